//! Losses, norms and weights of some steps, against the same run on the CPU.

use std::collections::BTreeMap;

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

use super::{Model, batch};
use crate::support::{On, in_schedules};

const WIDTH: usize = 7;

/// What a run is like, beside its configuration.
#[derive(Clone, Copy)]
struct Run {
    ranks: usize,
    outer: usize,
    microbatches: usize,
    clip: bool,
}

const PLAIN: Run = Run { ranks: 2, outer: 1, microbatches: 1, clip: false };

/// What a rank has seen.
#[derive(Debug, PartialEq)]
struct Seen {
    losses: Vec<f32>,
    norms: Vec<f64>,
    weights: BTreeMap<String, Vec<f32>>,
}

fn train(on: On, run: Run, config: &FsdpConfig) -> Vec<Seen> {
    let Run { ranks, outer, microbatches, clip } = run;
    let outcome = launch::local(ranks * outer, |world| -> fsdp::Result<Seen> {
        let device = on.device(&world)?;
        let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", ranks)])?.on(&device)?;
        let mut model = Model::new(WIDTH, 3, &device)?.fully_shard_with(&mesh, config)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.05))?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..3 {
            for microbatch in 0..microbatches {
                model.set_is_last_microbatch(microbatch + 1 == microbatches);
                let index = (step * microbatches + microbatch) * world.size() + world.rank();
                let loss: Tensor = model.forward(&batch(WIDTH, index, &device)?)?;
                losses.push(loss.to_scalar()?);
                model.backward(&loss)?;
            }
            if clip {
                norms.push(model.clip_grad_norm(0.1)?);
            }
            optimizer.step(&mut model)?;
        }
        let evaluated: Tensor = model.evaluate(&batch(WIDTH, 99, &device)?)?;
        losses.push(evaluated.to_scalar()?);
        let mut weights = BTreeMap::new();
        model.visit_weights(|spec, values| {
            weights.insert(spec.name.clone(), values.to_vec());
            Ok(())
        })?;
        Ok(Seen { losses, norms, weights })
    });
    outcome.unwrap_or_else(|error| panic!("{on:?}: {error}"))
}

fn compare(on: On, run: Run, config: &FsdpConfig, tolerance: f64, what: &str) {
    let expected = train(On::Cpu, run, config);
    in_schedules(1, |schedule| {
        let found = train(on, run, config);
        for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let what = format!("{what}, {on:?}, {schedule}, rank {rank}");
            let within = relative(tolerance).plus(0.1 * tolerance);
            assert_close(&found.losses, &expected.losses, within, format!("{what}, losses"));
            assert_close(&found.norms, &expected.norms, within, format!("{what}, norms"));
            assert_close(&found.weights, &expected.weights, within, format!("{what}, weights"));
        }
    });
}

#[test]
fn one_rank_trains_as_on_the_cpu() {
    let run = Run { ranks: 1, ..PLAIN };
    compare(On::OneDevice, run, &FsdpConfig::default(), 1e-4, "one rank");
}

#[test]
fn every_strategy_trains_as_on_the_cpu() {
    for strategy in Strategy::ALL {
        for ranks in [2, 3] {
            let config = FsdpConfig { strategy, ..FsdpConfig::default() };
            let run = Run { ranks, clip: true, ..PLAIN };
            compare(On::OneDevice, run, &config, 1e-4, &format!("{strategy}, {ranks} ranks"));
        }
    }
}

#[test]
fn recomputation_pools_and_prefetching_change_nothing() {
    for (recompute, double_buffer, prefetch) in
        [(Recompute::Unit, true, 1), (Recompute::Unit, false, 2), (Recompute::None, false, 0)]
    {
        let config = FsdpConfig { recompute, double_buffer, prefetch, poison: true, ..FsdpConfig::default() };
        compare(On::OneDevice, PLAIN, &config, 1e-4, &format!("{recompute:?}, {double_buffer}, {prefetch}"));
    }
}

#[test]
fn microbatches_and_outer_ranks_train_as_on_the_cpu() {
    for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
        let config = FsdpConfig { outer: outer_strategy, ..FsdpConfig::default() };
        let run = Run { outer: 2, microbatches: 2, clip: true, ..PLAIN };
        compare(On::OneDevice, run, &config, 1e-4, &format!("{outer_strategy}"));
    }
}

#[test]
fn sixteen_bit_weights_train_as_on_the_cpu() {
    let config = FsdpConfig {
        precision: MixedPrecision { cast_inputs: true, ..MixedPrecision::BF16 },
        ..FsdpConfig::default()
    };
    compare(On::OneDevice, Run { clip: true, ..PLAIN }, &config, 3e-2, "bf16");
}

#[test]
#[cfg(feature = "nccl")]
fn ranks_with_a_device_each_train_by_nccl() {
    if crate::support::is_real() && fsdp::cuda::device_count().unwrap_or(0) < 2 {
        eprintln!("left out: there are no two devices");
        return;
    }
    for strategy in Strategy::ALL {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        compare(On::ADeviceEach, Run { clip: true, ..PLAIN }, &config, 1e-4, &format!("{strategy}"));
    }
}
