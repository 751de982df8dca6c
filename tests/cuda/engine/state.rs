//! Optimizers of the host, averages, checkpoints and whole states of models on a device.

use std::collections::BTreeMap;

use candle_core::Tensor;
use fsdp::checkpoint::{Checkpoints, Contents, Restore};
use fsdp::prelude::*;
use fsdp_test_support::{Within, assert_close, relative};

use super::{Model, batch};
use crate::support::{On, in_schedules};

const WIDTH: usize = 5;

/// What the device's order of sums may change.
const WITHIN: Within = relative(1e-4).plus(1e-5);

type Weights = BTreeMap<String, Vec<f32>>;

fn weights<M>(model: &Fsdp<M>) -> fsdp::Result<Weights> {
    let mut weights = BTreeMap::new();
    model.visit_weights(|spec, values| {
        weights.insert(spec.name.clone(), values.to_vec());
        Ok(())
    })?;
    Ok(weights)
}

/// Runs on two ranks of the CPU, then on the device in all schedules, and compares what rank 0 returns.
fn same_as_on_the_cpu(what: &str, run: impl Fn(On, &launch::World) -> fsdp::Result<Weights> + Sync) {
    let on = |on: On| {
        let outcome = launch::local(2, |world| run(on, &world));
        outcome.unwrap_or_else(|error| panic!("{what}, {on:?}: {error}")).swap_remove(0)
    };
    let expected = on(On::Cpu);
    in_schedules(1, |schedule| {
        assert_close(&on(On::OneDevice), &expected, WITHIN, format!("{what}, {schedule}"));
    });
}

fn sharded(on: On, world: &launch::World, config: &FsdpConfig) -> fsdp::Result<Fsdp<Model>> {
    let device = on.device(world)?;
    let mesh = world.data_parallel_mesh().on(&device)?;
    Model::new(WIDTH, 2, &device)?.fully_shard_with(&mesh, config)
}

fn backward(on: On, world: &launch::World, model: &Fsdp<Model>, step: usize) -> fsdp::Result<()> {
    // The device of the batch may be another handle of the same GPU.
    let _ = on;
    let loss: Tensor = model.forward(&batch(WIDTH, 2 * step + world.rank(), model.device())?)?;
    model.backward(&loss)
}

#[test]
fn rules_without_a_kernel_run_on_the_host() {
    same_as_on_the_cpu("sgd", |on, world| {
        let mut model = sharded(on, world, &FsdpConfig::default())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.05).momentum(0.9))?;
        for step in 0..3 {
            backward(on, world, &model, step)?;
            optimizer.step(&mut model)?;
        }
        weights(&model)
    });
}

#[test]
fn rules_for_whole_parameters_run_on_their_owner() {
    same_as_on_the_cpu("muon", |on, world| {
        let mut model = sharded(on, world, &FsdpConfig::default())?;
        let mut optimizer = model.owner_optimizer(Muon::default(), AdamW::default())?;
        for step in 0..3 {
            backward(on, world, &model, step)?;
            optimizer.step(&mut model)?;
        }
        weights(&model)
    });
}

#[test]
fn steps_in_the_backward_are_taken_there() {
    same_as_on_the_cpu("step in backward", |on, world| {
        let config = FsdpConfig { step_in_backward: true, ..FsdpConfig::default() };
        let mut model = sharded(on, world, &config)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.05))?;
        for step in 0..3 {
            let loss: Tensor = model.forward(&batch(WIDTH, 2 * step + world.rank(), model.device())?)?;
            optimizer.backward_and_step(&mut model, &loss)?;
        }
        weights(&model)
    });
}

#[test]
fn averages_follow_the_weights() {
    same_as_on_the_cpu("average", |on, world| {
        let mut model = sharded(on, world, &FsdpConfig::default())?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.05))?;
        let mut ema = model.ema(0.5)?;
        for step in 0..3 {
            backward(on, world, &model, step)?;
            optimizer.step(&mut model)?;
            ema.update(&model)?;
        }
        let own = weights(&model)?;
        let averaged = model.with_ema(&mut ema, weights)?;
        assert_ne!(own, averaged);
        assert_eq!(own, weights(&model)?, "the model has its own weights back");
        Ok(averaged)
    });
}

#[test]
fn a_checkpoint_of_a_device_is_restored_there_and_on_the_cpu() {
    let directory = tempfile::tempdir().expect("a directory");
    let train = |on: On, save: Option<&str>, restore: Option<&str>| {
        let outcome = launch::local(2, |world| -> fsdp::Result<Weights> {
            let mut model = sharded(on, &world, &FsdpConfig::default())?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.05))?;
            if let Some(from) = restore {
                let checkpoints = Checkpoints::new(directory.path().join(from));
                let restored = checkpoints
                    .restore_latest(Restore::new(&mut model).optimizer(&mut optimizer))?
                    .expect("there is one");
                assert_eq!(restored.checkpoint.step(), 2);
            }
            let done = optimizer.steps() as usize;
            for step in done..done + 2 {
                backward(on, &world, &model, step)?;
                optimizer.step(&mut model)?;
            }
            if let Some(to) = save {
                let checkpoints = Checkpoints::new(directory.path().join(to));
                checkpoints.save(Contents::of(&model).optimizer(&optimizer))?;
            }
            weights(&model)
        });
        outcome.unwrap_or_else(|error| panic!("{on:?}, {save:?}, {restore:?}: {error}")).swap_remove(0)
    };
    train(On::Cpu, Some("cpu"), None);
    let expected = train(On::Cpu, None, Some("cpu"));
    let mut index = 0;
    in_schedules(1, |schedule| {
        index += 1;
        let name = format!("device{index}");
        let close = |found: Weights, way: &str| {
            assert_close(&found, &expected, WITHIN, format!("{schedule}, {way}"));
        };
        train(On::OneDevice, Some(&name), None);
        close(train(On::OneDevice, None, Some(&name)), "device to device");
        close(train(On::Cpu, None, Some(&name)), "device to CPU");
        close(train(On::OneDevice, None, Some("cpu")), "CPU to device");
    });
}

#[test]
fn whole_states_come_to_the_host_and_go_back() {
    in_schedules(1, |_| {
        let outcome = launch::local(2, |world| -> fsdp::Result<()> {
            let mut model = sharded(On::OneDevice, &world, &FsdpConfig::default())?;
            let before = weights(&model)?;
            let state = model.full_state_dict()?;
            if let Some(state) = &state {
                assert_eq!(
                    state["layers.0.weight"].flatten_all()?.to_vec1::<f32>()?,
                    before["layers.0.weight"]
                );
                assert_eq!(state["scale"].to_vec1::<f32>()?, [1.5]);
            }
            model.load_weights(|_, _, values| {
                values.fill(0.25);
                Ok(())
            })?;
            assert!(weights(&model)?.values().flatten().all(|&value| value == 0.25));
            model.load_full_state_dict(state.as_ref(), true)?;
            assert_eq!(weights(&model)?, before);
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
    });
}
