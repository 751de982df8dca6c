//! What becomes of whole weights between forward and backward, gathers asked for by hand, and microbatches that
//! reduce nothing.

use candle_core::{DType, Device, Result, Tensor};
use fsdp::engine::TrafficReport;
use fsdp::memory::Category;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, Two, config, dot, full, gradients, named, on_ranks, weights};

const N: usize = 64;
const BYTES: u64 = 4 * N as u64;

fn stack(units: usize, mode: impl Fn(usize) -> ReshardAfterForward) -> Dots {
    Dots { units: (0..units).map(|unit| Dot::zeros(N).reshard_after_forward(mode(unit))).collect() }
}

/// Launches and bytes from peers of one operation since `before`.
fn since<M>(model: &Fsdp<M>, before: &[TrafficReport], operation: &str) -> (u64, u64) {
    let of = |traffic: &[TrafficReport]| {
        let report = traffic.iter().find(|report| report.operation == operation).unwrap();
        (report.counter.calls, report.counter.bytes_from_peers)
    };
    let (now, before) = (of(&model.traffic()), of(before));
    (now.0 - before.0, now.1 - before.1)
}

fn step(model: &Fsdp<Dots>) -> fsdp::Result<()> {
    let inputs: Vec<Tensor> = model.module().units.iter().map(|_| full(N, model.rank() as f32)).collect();
    let loss: Tensor = model.forward(&inputs)?;
    model.backward(&loss)
}

#[test]
fn gathers_and_bytes_are_those_of_the_mode() {
    use ReshardAfterForward::{Always, Never, Ranks};
    // Four ranks, three units; without double buffering nothing is kept that need not be.
    let whole = BYTES / 4 * 3;
    for (mode, calls, bytes) in [
        (Always, 6, 6 * whole),
        (Never, 3, 3 * whole),
        (Ranks(1), 3, 3 * whole),
        (Ranks(2), 6, 3 * whole + 3 * BYTES / 2),
        (Ranks(4), 6, 6 * whole),
    ] {
        on_ranks(4, |world| {
            let config = FsdpConfig { double_buffer: false, ..config(Strategy::OptimGradsParams) };
            let mut model = stack(3, |_| mode).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            for _ in 0..2 {
                let before = model.traffic();
                step(&model)?;
                assert_eq!(since(&model, &before, "all-gather"), (calls, bytes), "{mode:?}");
                assert_eq!(model.gathered_units(), Vec::<String>::new());
                optimizer.step(&mut model)?;
                for report in model.memory(1) {
                    assert!(report.usage.peak as u64 <= report.formula, "{mode:?} {report:?}");
                }
            }
            assert!(weights(&model)?.iter().all(|(_, values)| values == &[-3.0; N]));
            Ok(())
        });
    }
}

#[test]
fn every_mode_trains_to_the_same_bits() {
    use ReshardAfterForward::{Always, Never, Ranks};
    let modes: [fn(usize) -> ReshardAfterForward; 5] = [
        |_| Always,
        |_| Never,
        |_| Ranks(2),
        |unit| [Always, Never, Ranks(2)][unit % 3],
        |unit| if unit == 4 { Never } else { Always },
    ];
    let mut first = None;
    for mode in modes {
        for double_buffer in [true, false] {
            for recompute in [Recompute::None, Recompute::Unit] {
                let rows = on_ranks(4, |world| {
                    let config = FsdpConfig {
                        double_buffer,
                        recompute,
                        prefetch: 2,
                        ..config(Strategy::OptimGradsParams)
                    };
                    let mut model = stack(5, mode).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                    let mut optimizer = model.optimizer(AdamW::default())?;
                    for _ in 0..3 {
                        for last in [false, true] {
                            model.set_is_last_microbatch(last);
                            step(&model)?;
                        }
                        optimizer.step(&mut model)?;
                    }
                    for report in model.memory(2) {
                        assert!(report.usage.peak as u64 <= report.formula, "{report:?}");
                    }
                    weights(&model)
                });
                assert!(rows.iter().all(|row| row == first.get_or_insert_with(|| row.clone())));
            }
        }
    }
}

/// Its loss is `sum_i w_i² x_i`: the gradient is `2 w x`, and so depends on the weights that the backward has.
#[derive(FsdpUnit)]
struct Square {
    w: Param,
}

impl Forward for Square {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        (self.w.tensor(scope)?.sqr()? * x)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct Squares {
    units: Vec<Unit<Square>>,
}

impl Squares {
    /// Weights that are all different.
    fn new(units: usize, mode: ReshardAfterForward) -> Squares {
        let unit = || {
            let w = Param::new(N).with_init(Init::Uniform { low: 1.0, high: 2.0 });
            Unit::new(Square { w }).reshard_after_forward(mode)
        };
        Squares { units: (0..units).map(|_| unit()).collect() }
    }
}

impl Forward for Squares {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for unit in &self.units {
            loss = (loss + unit.forward(x, &(), scope)?)?;
        }
        Ok(loss)
    }
}

#[test]
fn a_backward_has_the_weights_that_neighbours_kept() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for (mode, double_buffer) in
        [(Always, true), (Never, true), (Ranks(2), true), (Ranks(2), false), (Ranks(4), false)]
    {
        on_ranks(4, |world| {
            let config = FsdpConfig { double_buffer, ..config(Strategy::OptimGradsParams) };
            let model = Squares::new(5, mode).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let loss: Tensor = model.forward(&full(N, 0.5))?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, weights(&model)?, "{mode:?}");
            Ok(())
        });
    }
}

#[test]
fn weights_that_differ_train_to_the_same_bits_in_every_mode() {
    use ReshardAfterForward::{Always, Never, Ranks};
    let mut first = None;
    for mode in [Always, Never, Ranks(2)] {
        let rows = on_ranks(4, |world| {
            let config = FsdpConfig { double_buffer: false, ..config(Strategy::OptimGradsParams) };
            let mut model = Squares::new(3, mode).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.1))?;
            for _ in 0..3 {
                let loss: Tensor = model.forward(&full(N, 1.0 + world.rank() as f32))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            weights(&model)
        });
        assert!(rows.iter().all(|row| row == first.get_or_insert_with(|| row.clone())), "{mode:?}");
    }
}

#[test]
fn a_unit_that_is_never_resharded_is_gathered_once_a_step() {
    on_ranks(2, |world| {
        let model = stack(4, |_| ReshardAfterForward::Never);
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        for _ in 0..2 {
            let before = model.traffic();
            for last in [false, false, true] {
                model.set_is_last_microbatch(last);
                step(&model)?;
            }
            assert_eq!(since(&model, &before, "all-gather").0, 4);
            let pool = model.memory(0)[Category::GatherPool as usize].usage;
            assert_eq!(pool.peak as u64, 4 * BYTES);
            optimizer.step(&mut model)?;
            assert_eq!(model.gathered_units(), Vec::<String>::new());
        }
        Ok(())
    });
}

#[test]
fn groups_that_do_not_divide_the_ranks_are_refused() {
    on_ranks(4, |world| {
        let model = stack(2, |unit| ReshardAfterForward::Ranks([2, 3][unit]));
        let text = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        assert_eq!(
            text,
            "configuration: unit `units.1` is to be resharded after forward to groups of 3 ranks: 4 ranks share its \
             shards, which 3 does not divide"
        );
        Ok(())
    });
}

#[test]
fn a_unit_can_be_unsharded_ahead_of_its_forward() {
    on_ranks(2, |world| {
        let config = FsdpConfig { prefetch: 0, ..config(Strategy::default()) };
        let model = Two::zeros(N).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let before = model.traffic();
        let first = model.unshard("b")?;
        let second = model.unshard("a")?;
        assert_eq!(model.gathered_units(), ["a", "b"]);
        first.wait()?;
        second.wait()?;
        let loss: Tensor = model.forward(&(true, true, full(N, 1.0)))?;
        assert_eq!(since(&model, &before, "all-gather").0, 2);
        model.backward(&loss)?;
        let text = model.unshard("c").unwrap_err().to_string();
        assert_eq!(text, "there is no unit `c`: the model's are (root), a, b");
        Ok(())
    });
}

#[test]
fn prefetch_can_be_set_for_each_pass() {
    // Units gathered while the first one runs, in the second pass, which knows the order.
    for (forward, backward) in [(0, 0), (1, 0), (0, 1), (3, 3)] {
        on_ranks(2, |world| {
            let model = stack(4, |_| ReshardAfterForward::Never);
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
            model.set_prefetch(forward, backward)?;
            for _ in 0..3 {
                step(&model)?;
            }
            assert_eq!(gradients(&model)?.len(), 4);
            Ok(())
        });
    }
}

#[test]
fn under_no_sync_nothing_is_reduced_and_whole_gradients_are_held() {
    for strategy in Strategy::ALL {
        for wire in [Dtype::F32, Dtype::BF16] {
            on_ranks(2, |world| {
                let precision = MixedPrecision { reduce: wire, ..MixedPrecision::F32 };
                let config = FsdpConfig { precision, ..config(strategy) };
                let mut model = stack(5, |_| ReshardAfterForward::Always)
                    .fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                for round in 1..=2 {
                    let before = model.traffic();
                    let guard = model.no_sync();
                    step(&model)?;
                    // One inside another ends nothing but itself.
                    drop(model.no_sync());
                    step(&model)?;
                    assert_eq!(since(&model, &before, "reduce-scatter").0, 0);
                    assert_eq!(since(&model, &before, "all-reduce").0, 0);
                    drop(guard);
                    step(&model)?;
                    optimizer.step(&mut model)?;
                    let reductions =
                        since(&model, &before, "reduce-scatter").0 + since(&model, &before, "all-reduce").0;
                    assert_eq!(reductions, 5);
                    // Three microbatches of the mean of 0 and 1.
                    let expected = -1.5 * round as f32;
                    assert!(weights(&model)?.iter().all(|(_, values)| values == &[expected; N]));
                    for report in model.memory(0) {
                        assert!(report.usage.peak as u64 <= report.formula, "{strategy} {report:?}");
                    }
                    if strategy.shards_grads() {
                        let pool = model.memory(0)[Category::ReducePool as usize];
                        assert_eq!(pool.usage.peak as u64, 5 * (N * wire.size()) as u64);
                        assert_eq!(pool.usage.peak as u64, pool.formula);
                    }
                }
                Ok(())
            });
        }
    }
}

#[test]
fn what_no_sync_has_kept_is_reduced_by_the_step_at_the_latest() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            let forward = |model: &Fsdp<Two>, a: bool, b: bool| -> fsdp::Result<()> {
                let loss: Tensor = model.forward(&(a, b, full(3, 1.0 + 2.0 * world.rank() as f32)))?;
                model.backward(&loss)
            };
            {
                let _guard = model.no_sync();
                forward(&model, true, true)?;
                forward(&model, false, true)?;
            }
            assert_eq!(gradients(&model)?, named(&[("a.w", &[2.0; 3]), ("b.w", &[4.0; 3])]));
            optimizer.step(&mut model)?;
            // `b` got no gradient in the synchronised microbatch.
            {
                let _guard = model.no_sync();
                forward(&model, false, true)?;
            }
            forward(&model, true, false)?;
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?, named(&[("a.w", &[-4.0; 3]), ("b.w", &[-6.0; 3])]));
            // Kept gradients can be thrown away.
            {
                let _guard = model.no_sync();
                forward(&model, true, true)?;
            }
            model.reset_step()?;
            forward(&model, true, false)?;
            assert_eq!(gradients(&model)?, named(&[("a.w", &[2.0; 3])]));
            Ok(())
        });
    }
}

#[test]
fn evaluation_keeps_nothing_for_a_backward() {
    on_ranks(2, |world| {
        for mode in [ReshardAfterForward::Never, ReshardAfterForward::Ranks(2), ReshardAfterForward::Always] {
            let config = FsdpConfig { reshard_after_forward: mode, ..config(Strategy::default()) };
            let model = dot(N).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let _: Tensor = model.evaluate(&vec![full(N, 1.0)])?;
            assert_eq!(model.gathered_units(), Vec::<String>::new());
        }
        Ok(())
    });
}
