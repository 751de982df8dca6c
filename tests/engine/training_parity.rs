//! Losses of every step, and the weights in the end, are those of plain candle in one process, whatever is uneven,
//! slow, repeated or left out.

use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close};

use crate::fixtures::{Dot, config, full, gradients, launcher, named, on_ranks};
use crate::reference::{self, Layer, Layers, TORCH, adam, rows, train, weights};

const STEPS: usize = 10;

/// What each rank returns: its losses, the weights before and after.
type Trained = (Vec<f32>, reference::Weights, reference::Weights);

/// Trains on `ranks` ranks, each with inputs of its own.
fn sharded(ranks: usize, widths: &[usize], repeats: &[usize], config: &FsdpConfig) -> Vec<Trained> {
    on_ranks(ranks, |world| {
        let layers = Layers::repeated(widths, repeats);
        let mut model = layers.fully_shard_with(&world.data_parallel_mesh(), config)?;
        let mut optimizer = model.optimizer(adam())?;
        let before = weights(&model)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss: Tensor = model.forward(&rows(4, widths[0], step * ranks + world.rank()))?;
            losses.push(loss.to_scalar()?);
            if step % 2 == 1 {
                // What is thrown away leaves no trace.
                model.backward(&loss)?;
                model.reset_step()?;
                let again: Tensor = model.forward(&rows(4, widths[0], step * ranks + world.rank()))?;
                model.backward(&again)?;
            } else {
                model.backward(&loss)?;
            }
            optimizer.step(&mut model)?;
        }
        Ok((losses, before, weights(&model)?))
    })
}

/// Compares with plain candle on the same inputs.
fn compare(ranks: usize, widths: &[usize], repeats: &[usize], config: &FsdpConfig, what: &str) {
    let trained = sharded(ranks, widths, repeats, config);
    let mut expected = trained[0].1.clone();
    let inputs: Vec<Vec<Tensor>> = (0..STEPS)
        .map(|step| (0..ranks).map(|rank| rows(4, widths[0], step * ranks + rank)).collect())
        .collect();
    let losses = train(repeats, &mut expected, ranks, &inputs).unwrap();
    for (rank, (found, _, after)) in trained.iter().enumerate() {
        let expected_losses: Vec<f32> = losses.iter().skip(rank).step_by(ranks).copied().collect();
        assert_close(found, &expected_losses, TORCH, format!("{what}, losses of rank {rank}"));
        assert_close(after, &expected, absolute(1e-4), format!("{what}, weights of rank {rank}"));
    }
}

#[test]
fn uneven_layers_train_as_one_process_does() {
    // The shapes of PyTorch's test: weights and biases that no number of ranks divides.
    for widths in [[16, 15, 8], [7, 15, 3], [16, 17, 8]] {
        for ranks in [2, 3, 8] {
            for strategy in Strategy::ALL {
                let config = config(strategy);
                compare(ranks, &widths, &[1, 1], &config, &format!("{widths:?}, {ranks} ranks, {strategy}"));
            }
        }
    }
}

#[test]
fn every_reshard_mode_alignment_and_prefetch_trains_as_one_process_does() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for reshard_after_forward in [Always, Never, Ranks(2)] {
        for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
            for (prefetch, recompute) in [(0, Recompute::None), (2, Recompute::Unit), (8, Recompute::None)] {
                let config = FsdpConfig {
                    reshard_after_forward,
                    alignment,
                    prefetch,
                    recompute,
                    ..config(Strategy::default())
                };
                let what = format!("{reshard_after_forward:?}, {alignment:?}, {prefetch}, {recompute:?}");
                compare(4, &[5, 9, 9, 3, 7], &[1; 4], &config, &what);
            }
        }
    }
}

#[test]
fn a_layer_that_runs_several_times_a_forward_trains_as_one_process_does() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for reshard_after_forward in [Always, Never, Ranks(2)] {
        for recompute in [Recompute::None, Recompute::Unit] {
            let config = FsdpConfig { reshard_after_forward, recompute, ..config(Strategy::default()) };
            let what = format!("{reshard_after_forward:?}, {recompute:?}");
            compare(2, &[6, 6, 6, 5], &[1, 3, 1], &config, &what);
        }
    }
}

/// Where one rank is slow.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Slow {
    Nowhere,
    /// Before each unit, so that its gather waits for the rank.
    BeforeGathers,
    /// In the backward of each unit, before its reduction.
    BeforeReductions,
    BetweenPasses,
    BeforeTheOptimizer,
    Everywhere,
}

impl Slow {
    fn at(self, place: Slow, rank: usize) {
        // Another rank in each place.
        if (self == place || self == Slow::Everywhere) && rank == place as usize % 3 {
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

/// The identity, which takes its time.
#[derive(Clone, Copy)]
struct Delay {
    slow: Slow,
    rank: usize,
}

impl CustomOp1 for Delay {
    fn name(&self) -> &'static str {
        "delay"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.slow.at(Slow::BeforeGathers, self.rank);
        let (start, end) = layout.contiguous_offsets().expect("layers give whole tensors");
        Ok((CpuStorage::F32(storage.as_slice::<f32>()?[start..end].to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.slow.at(Slow::BeforeReductions, self.rank);
        Ok(Some(grad.clone()))
    }
}

/// Layers with a delay in each.
#[derive(FsdpUnit)]
struct Delayed {
    layers: Vec<Unit<DelayedLayer>>,
}

#[derive(FsdpUnit)]
struct DelayedLayer {
    layer: Layer,
    #[fsdp(skip)]
    delay: Delay,
}

impl Forward for DelayedLayer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.layer.forward(x, &(), scope)?.apply_op1(self.delay)
    }
}

impl Forward for Delayed {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, &(), scope)?;
        }
        x.sqr()?.mean_all()
    }
}

#[test]
fn slow_ranks_change_no_bit() {
    let run = |slow: Slow, strategy, reshard_after_forward| {
        let mut rows_of_ranks = on_ranks(3, |world| {
            let delay = Delay { slow, rank: world.rank() };
            let layer = || Unit::new(DelayedLayer { layer: Layer::new(7, 7), delay });
            let config = FsdpConfig { reshard_after_forward, ..config(strategy) };
            let model = Delayed { layers: (0..3).map(|_| layer()).collect() };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(adam())?;
            let mut losses = Vec::new();
            for step in 0..4 {
                let loss: Tensor = model.forward(&rows(4, 7, step * 3 + world.rank()))?;
                slow.at(Slow::BetweenPasses, world.rank());
                model.backward(&loss)?;
                slow.at(Slow::BeforeTheOptimizer, world.rank());
                optimizer.step(&mut model)?;
                losses.push(loss.to_scalar::<f32>()?.to_bits());
            }
            Ok((losses, weights(&model)?))
        });
        let last = rows_of_ranks.pop().unwrap();
        assert!(rows_of_ranks.iter().all(|(_, weights)| *weights == last.1));
        last
    };
    for strategy in Strategy::ALL {
        for mode in [ReshardAfterForward::Always, ReshardAfterForward::Never, ReshardAfterForward::Ranks(3)] {
            if mode != ReshardAfterForward::Always && !strategy.shards_params() {
                continue;
            }
            let expected = run(Slow::Nowhere, strategy, mode);
            for slow in [
                Slow::BeforeGathers,
                Slow::BeforeReductions,
                Slow::BetweenPasses,
                Slow::BeforeTheOptimizer,
                Slow::Everywhere,
            ] {
                assert_eq!(run(slow, strategy, mode), expected, "{slow:?}, {strategy}, {mode:?}");
            }
        }
    }
}

#[test]
fn a_batch_cut_among_ranks_has_the_loss_and_the_gradients_of_the_whole() {
    let whole = |ranks: usize, strategy| {
        let all = on_ranks(ranks, |world| {
            let model = Layers::new(&[6, 5, 3]);
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let batch = rows(8, 6, 1);
            let part = 8 / ranks;
            let loss: Tensor = model.forward(&batch.narrow(0, world.rank() * part, part)?)?;
            model.backward(&loss)?;
            let mut loss = [f64::from(loss.to_scalar::<f32>()?) / ranks as f64];
            let tag = fsdp::comm::Tag { unit: "loss".into(), phase: fsdp::comm::Phase::Setup, step: 0 };
            world.communicator().host_reduce(tag, fsdp::comm::HostOp::Sum, &mut loss)?;
            let gradients = gradients(&model)?.into_iter().flat_map(|(_, gradient)| gradient);
            Ok((loss[0] as f32, gradients.collect::<Vec<f32>>()))
        });
        all[ranks - 1].clone()
    };
    let expected = whole(1, Strategy::NoShard);
    for strategy in Strategy::ALL {
        for ranks in [2, 4, 8] {
            let (loss, gradients) = whole(ranks, strategy);
            assert_close(&loss, &expected.0, TORCH, "loss");
            assert_close(&gradients, &expected.1, TORCH, "gradients");
        }
    }
}

/// Two units and two ways through them.
#[derive(FsdpUnit)]
struct Forked {
    first: Unit<Layer>,
    second: Unit<Layer>,
}

/// The whole model.
impl Forward for Forked {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.second.forward(&self.first.forward(x, &(), scope)?, &(), scope)?.sqr()?.sum_all()
    }
}

/// Which half of the model to run by itself.
#[derive(Clone, Copy)]
enum Half {
    First,
    Second,
}

impl Forward<Half> for Forked {
    fn forward(&self, x: &Tensor, half: &Half, scope: &Scope<'_>) -> Result<Tensor> {
        let unit = match half {
            Half::First => &self.first,
            Half::Second => &self.second,
        };
        unit.forward(x, &(), scope)?.sum_all()
    }
}

#[test]
fn a_model_may_have_several_forwards() {
    let run = |ranks: usize, strategy| {
        let all = on_ranks(ranks, |world| {
            let forked = Forked { first: Unit::new(Layer::new(5, 5)), second: Unit::new(Layer::new(5, 5)) };
            let mut model = forked.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(adam())?;
            let mut losses = Vec::new();
            for step in 0..3 {
                // The whole, then each half by itself, in an order that no prefetch can have foretold.
                for way in [None, Some(Half::Second), Some(Half::First)] {
                    let x = rows(2, 5, step);
                    let loss: Tensor = match &way {
                        None => model.forward(&x)?,
                        Some(half) => model.forward_with(&x, half)?,
                    };
                    model.backward(&loss)?;
                    let reached = gradients(&model)?.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
                    let expected: &[&str] = match way {
                        None => &["first.w", "first.b", "second.w", "second.b"],
                        Some(Half::First) => &["first.w", "first.b"],
                        Some(Half::Second) => &["second.w", "second.b"],
                    };
                    assert_eq!(reached, expected);
                    optimizer.step(&mut model)?;
                    losses.push(loss.to_scalar::<f32>()?);
                }
            }
            Ok((losses, weights(&model)?))
        });
        all.into_iter().next().unwrap()
    };
    let (losses, after) = run(1, Strategy::NoShard);
    for strategy in Strategy::ALL {
        let found = run(2, strategy);
        assert_close(&found.0, &losses, TORCH, "losses");
        assert_close(&found.1, &after, absolute(1e-5), "weights");
    }
}

#[test]
fn two_models_train_side_by_side_on_one_mesh() {
    let alone =
        |widths: &[usize]| sharded(2, widths, &vec![1; widths.len() - 1], &config(Strategy::default()));
    let (wide, narrow) = ([8, 6, 4], [3, 5, 5, 2]);
    let expected = (alone(&wide), alone(&narrow));
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let mut a = Layers::new(&wide).fully_shard_with(&mesh, &config(Strategy::default()))?;
        let mut b = Layers::new(&narrow).fully_shard_with(&mesh, &config(Strategy::default()))?;
        let (mut step_a, mut step_b) = (a.optimizer(adam())?, b.optimizer(adam())?);
        let mut losses = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let input = |width| rows(4, width, step * 2 + world.rank());
            // The passes of one inside those of the other.
            let loss_a: Tensor = a.forward(&input(wide[0]))?;
            let loss_b: Tensor = b.forward(&input(narrow[0]))?;
            a.backward(&loss_a)?;
            step_a.step(&mut a)?;
            b.backward(&loss_b)?;
            step_b.step(&mut b)?;
            losses.0.push(loss_a.to_scalar::<f32>()?);
            losses.1.push(loss_b.to_scalar::<f32>()?);
        }
        assert_eq!((losses.0, weights(&a)?), {
            let (losses, _, after) = &expected.0[world.rank()];
            (losses.clone(), after.clone())
        });
        assert_eq!((losses.1, weights(&b)?), {
            let (losses, _, after) = &expected.1[world.rank()];
            (losses.clone(), after.clone())
        });
        Ok(())
    });
}

#[test]
fn a_hundred_and_twenty_eight_ranks_hold_and_average_every_element() {
    // The shapes of PyTorch's test of collectives, as element counts.
    let sizes = [17 * 257, 17, 64 * 312, 64, 64 * 64, 512 * 64, 256, 64 * 297];
    let value = |index: usize| (index % 251) as f32;
    // Threads by the hundred may have to wait for their turn.
    let launcher = launcher(128).timeout(Duration::from_secs(120));
    let outcome = launcher.run(|world| -> fsdp::Result<()> {
        let model = crate::fixtures::Dots { units: sizes.map(Dot::zeros).into() };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        model.load_weights(|_, range, out| {
            out.iter_mut().zip(range).for_each(|(out, index)| *out = value(index));
            Ok(())
        })?;
        let grad = (world.rank() % 8) as f32;
        let loss: Tensor = model.forward(&sizes.map(|n| full(n, grad)).into())?;
        model.backward(&loss)?;
        // Whole weights cross to one rank's eyes only: 128 copies would be slow to compare.
        let mut seen = 0;
        model.visit_weights(|spec, values| {
            seen += spec.numel();
            let whole = world.rank() > 0 || values.iter().enumerate().all(|(index, &v)| v == value(index));
            assert!(whole, "{}", spec.name);
            Ok(())
        })?;
        assert_eq!(seen, sizes.iter().sum::<usize>());
        model.visit_gradients(|spec, values| {
            assert!(world.rank() > 0 || values.iter().all(|&v| v == 3.5), "{}", spec.name);
            Ok(())
        })
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// A model without input, whose root has no parameters.
#[derive(FsdpUnit)]
struct Inputless {
    inner: Unit<Dot>,
}

impl Forward<(), ()> for Inputless {
    fn forward(&self, (): &(), _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.inner.forward(&Tensor::ones(3, candle_core::DType::F32, &Device::Cpu)?, &(), scope)
    }
}

#[test]
fn a_model_may_have_no_input() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Inputless { inner: Dot::with(3, 2.0) };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            for _ in 0..2 {
                let loss: Tensor = model.forward(&())?;
                assert_eq!((loss.dims().len(), loss.to_scalar::<f32>()?), (0, 6.0));
                model.backward(&loss)?;
                assert_eq!(gradients(&model)?, named(&[("inner.w", &[1.0; 3])]));
                model.reset_step()?;
            }
            Ok(())
        });
    }
}
