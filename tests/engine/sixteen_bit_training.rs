//! Training in bf16 and f16 is that of plain candle with weights rounded for each step: gradients in 16 bits, summed in
//! f32, and f32 weights and moments.

use candle_core::{DType, Tensor};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close, relative};

use crate::fixtures::{config, dot, full, gradients, named, on_ranks};
use crate::reference::{Layers, adam, rows, train, weights};

const STEPS: usize = 10;
const WIDTHS: [usize; 3] = [7, 15, 3];

#[test]
fn losses_and_weights_are_those_of_one_process() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for (precision, dtype, tolerance) in
        [(MixedPrecision::BF16, DType::BF16, 1.6e-2), (MixedPrecision::F16, DType::F16, 1e-3)]
    {
        for strategy in Strategy::ALL {
            for mode in [Always, Never, Ranks(2)] {
                if mode != Always && !strategy.shards_params() {
                    continue;
                }
                for (ranks, recompute) in [(2, Recompute::None), (4, Recompute::Unit)] {
                    let input = |step: usize, rank: usize| {
                        rows(4, WIDTHS[0], step * ranks + rank).to_dtype(dtype).unwrap()
                    };
                    let all = on_ranks(ranks, |world| {
                        let config = FsdpConfig {
                            precision,
                            reshard_after_forward: mode,
                            recompute,
                            ..config(strategy)
                        };
                        let model = Layers::new(&WIDTHS);
                        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                        let mut optimizer = model.optimizer(adam())?;
                        let before = weights(&model)?;
                        let mut losses = Vec::new();
                        for step in 0..STEPS {
                            let loss: Tensor = model.forward(&input(step, world.rank()))?;
                            assert_eq!(loss.dtype(), dtype);
                            losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
                            model.backward(&loss)?;
                            optimizer.step(&mut model)?;
                        }
                        Ok((losses, before, weights(&model)?))
                    });
                    let mut expected = all[0].1.clone();
                    let inputs: Vec<Vec<Tensor>> =
                        (0..STEPS).map(|step| (0..ranks).map(|rank| input(step, rank)).collect()).collect();
                    let losses = train(&[1, 1], &mut expected, ranks, &inputs).unwrap();
                    let what = format!("{dtype:?}, {strategy}, {mode:?}, {ranks}");
                    for (rank, (found, _, after)) in all.iter().enumerate() {
                        for (step, found) in found.iter().enumerate() {
                            let expected = losses[step * ranks + rank];
                            // The first loss has seen no optimizer, whose last bit may round a weight differently.
                            let within =
                                if step == 0 { absolute(0.0) } else { relative(tolerance).plus(1e-5) };
                            assert_close(found, &expected, within, format!("{what}, step {step}"));
                        }
                        // Adam moves a weight by at most the learning rate a step, here or there.
                        assert_close(after, &expected, absolute(2e-2), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_held_back_are_summed_in_the_dtype_of_the_reduction() {
    // 256 + 1 is 256 in bf16, and 257 in f32.
    for strategy in Strategy::ALL {
        for (reduce, sharded_sum) in [(Dtype::F32, 259.0), (Dtype::BF16, 256.0)] {
            on_ranks(4, |world| {
                let precision = MixedPrecision { reduce, ..MixedPrecision::BF16 };
                let config = FsdpConfig { precision, ..config(strategy) };
                let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                for (index, x) in [256.0, 1.0, 1.0, 1.0].into_iter().enumerate() {
                    let guard = (index < 3).then(|| model.no_sync());
                    let loss: Tensor = model.forward(&vec![full(3, x)])?;
                    model.backward(&loss)?;
                    drop(guard);
                }
                // ZeRO-0 and 1 hold sums in f32 and round them once, to travel.
                let whole_sum = if reduce == Dtype::F32 { 259.0 } else { 260.0 };
                let expected = if strategy.shards_grads() { sharded_sum } else { whole_sum };
                assert_eq!(
                    gradients(&model)?,
                    named(&[("units.0.w", &[expected; 3])]),
                    "{strategy}, {reduce}"
                );
                Ok(())
            });
        }
    }
}
