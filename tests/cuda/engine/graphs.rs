//! A step that is captured as a graph and launched is the step that is taken one kernel after the other.

use candle_core::Tensor;
use fsdp::engine::StepGraph;
use fsdp::optim::Optimizer;
use fsdp::prelude::*;

use super::{Model, batch};
use crate::support::{On, in_schedules_with_graphs};

const WIDTH: usize = 6;
const STEPS: usize = 6;

fn learning_rate(step: usize) -> f64 {
    0.05 / (1 + step) as f64
}

/// A graph of a step whose batch outlives it.
fn capture<O: Optimizer>(
    optimizer: &mut ShardedOptimizer<O>,
    model: &mut Fsdp<Model>,
    step: impl FnMut(&Fsdp<Model>) -> fsdp::Result<Tensor>,
) -> fsdp::Result<StepGraph> {
    // SAFETY: the tests keep the batch longer than the graph, and use nothing of a step but its loss.
    unsafe { optimizer.capture(model, step) }
}

/// The losses of all steps and the weights, from a graph or without.
fn train(
    on: On,
    (outer, ranks): (usize, usize),
    config: &FsdpConfig,
    graph: bool,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    let outcome = launch::local(outer * ranks, |world| -> fsdp::Result<_> {
        let device = on.device(&world)?;
        let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", ranks)])?.on(&device)?;
        let mut model = Model::new(WIDTH, 3, &device)?.fully_shard_with(&mesh, config)?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        let input = batch(WIDTH, 0, &device)?;
        let step = |model: &Fsdp<Model>| -> fsdp::Result<Tensor> {
            for last in [false, true] {
                model.set_is_last_microbatch(last);
                let loss: Tensor = model.forward(&input)?;
                model.backward(&loss)?;
                if last {
                    return Ok(loss);
                }
            }
            unreachable!("a loop of two")
        };
        let mut losses = Vec::new();
        // The first three steps have one batch and one learning rate.
        optimizer.set_learning_rate(learning_rate(0));
        input.slice_set(&batch(WIDTH, world.rank(), &device)?, 0, 0)?;
        let captured = if graph {
            Some(capture(&mut optimizer, &mut model, step)?)
        } else {
            for _ in 0..3 {
                drop(step(&model)?);
                optimizer.step(&mut model)?;
            }
            None
        };
        for index in 3..STEPS {
            input.slice_set(&batch(WIDTH, 10 * index + world.rank(), &device)?, 0, 0)?;
            optimizer.set_learning_rate(learning_rate(index));
            let loss = match &captured {
                Some(graph) => graph.launch(&mut model, &mut optimizer)?,
                None => {
                    let loss = step(&model)?;
                    optimizer.step(&mut model)?;
                    loss
                }
            };
            losses.push(loss.to_scalar()?);
        }
        assert_eq!((optimizer.steps(), model.step_count()), (STEPS as u64, STEPS as u64));
        // It goes on without the graph.
        drop(captured);
        losses.push(step(&model)?.to_scalar()?);
        optimizer.step(&mut model)?;
        let mut weights = Vec::new();
        model.visit_weights(|_, values| {
            weights.extend_from_slice(values);
            Ok(())
        })?;
        Ok((losses, weights))
    });
    outcome.unwrap_or_else(|error| panic!("{on:?}, graph {graph}: {error}"))
}

fn compare(on: On, ranks: (usize, usize), config: &FsdpConfig, what: &str) {
    in_schedules_with_graphs(2, |schedule| {
        let (graph, plain) = (train(on, ranks, config, true), train(on, ranks, config, false));
        assert_eq!(graph, plain, "{what}, {on:?}, {schedule}");
    });
}

#[test]
fn a_graph_of_a_step_computes_the_same_bits() {
    for (recompute, double_buffer) in
        [(Recompute::None, true), (Recompute::Unit, true), (Recompute::None, false)]
    {
        let config = FsdpConfig { recompute, double_buffer, ..FsdpConfig::default() };
        compare(On::OneDevice, (1, 1), &config, &format!("{recompute:?}, {double_buffer}"));
    }
}

#[test]
#[cfg(feature = "nccl")]
fn collectives_of_nccl_are_in_the_graph() {
    if crate::support::is_real() && fsdp::cuda::device_count().unwrap_or(0) < 2 {
        eprintln!("left out: there are no two devices");
        return;
    }
    for strategy in [Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams] {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        compare(On::ADeviceEach, (1, 2), &config, &format!("{strategy}"));
    }
    if crate::support::is_real() {
        return;
    }
    for outer in [OuterStrategy::NoShard, OuterStrategy::Optim] {
        let config = FsdpConfig { outer, ..FsdpConfig::default() };
        compare(On::ADeviceEach, (2, 2), &config, &format!("outer {outer}"));
    }
}

/// A model, an optimizer and a step for each test of what is refused.
fn prepared(
    on: On,
    world: &launch::World,
    config: &FsdpConfig,
) -> fsdp::Result<(Fsdp<Model>, ShardedOptimizer<AdamW>, Tensor)> {
    let device = on.device(world)?;
    let mesh = world.data_parallel_mesh().on(&device)?;
    let model = Model::new(WIDTH, 2, &device)?.fully_shard_with(&mesh, config)?;
    let optimizer = model.optimizer(AdamW::default())?;
    let input = batch(WIDTH, world.rank(), &device)?;
    Ok((model, optimizer, input))
}

fn plain_step(
    model: &mut Fsdp<Model>,
    optimizer: &mut ShardedOptimizer<AdamW>,
    input: &Tensor,
) -> fsdp::Result<f32> {
    let loss: Tensor = model.forward(input)?;
    model.backward(&loss)?;
    optimizer.step(model)?;
    Ok(loss.to_scalar()?)
}

#[test]
fn memory_from_before_that_a_step_frees_makes_it_no_graph_and_training_goes_on() {
    in_schedules_with_graphs(1, |schedule| {
        let outcome = launch::local(1, |world| -> fsdp::Result<String> {
            let (mut model, mut optimizer, input) = prepared(On::OneDevice, &world, &FsdpConfig::default())?;
            let mut last = None;
            let error = capture(&mut optimizer, &mut model, |model| {
                let loss: Tensor = model.forward(&input)?;
                model.backward(&loss)?;
                // Drops the loss of the step before.
                last = Some(loss.clone());
                Ok(loss)
            })
            .expect_err("it cannot be captured");
            drop(last);
            assert!(plain_step(&mut model, &mut optimizer, &input)?.is_finite());
            assert_eq!((optimizer.steps(), model.step_count()), (3, 3));
            Ok(error.to_string())
        });
        let said = outcome.unwrap_or_else(|error| panic!("{schedule}: {error}")).swap_remove(0);
        assert!(said.starts_with("the step cannot be captured as a graph: "), "{schedule}: {said}");
    });
}

#[test]
fn a_graph_is_not_launched_with_another_optimizer() {
    in_schedules_with_graphs(0, |_| {
        let outcome = launch::local(1, |world| -> fsdp::Result<String> {
            let (mut model, mut optimizer, input) = prepared(On::OneDevice, &world, &FsdpConfig::default())?;
            let graph = capture(&mut optimizer, &mut model, |model| {
                let loss: Tensor = model.forward(&input)?;
                model.backward(&loss)?;
                Ok(loss)
            })?;
            drop(optimizer);
            let mut other = model.optimizer(AdamW::default())?;
            let error = graph.launch(&mut model, &mut other).expect_err("it is another optimizer");
            Ok(error.to_string())
        });
        let said = outcome.unwrap_or_else(|error| panic!("{error}")).swap_remove(0);
        assert_eq!(said, "this graph was captured with another optimizer");
    });
}

#[test]
#[cfg(feature = "nccl")]
fn a_step_that_one_rank_cannot_capture_no_rank_has() {
    if crate::support::is_real() {
        return;
    }
    in_schedules_with_graphs(0, |_| {
        let outcome = launch::local(2, |world| -> fsdp::Result<String> {
            let (mut model, mut optimizer, input) =
                prepared(On::ADeviceEach, &world, &FsdpConfig::default())?;
            let error = capture(&mut optimizer, &mut model, |model| {
                let loss: Tensor = model.forward(&input)?;
                model.backward(&loss)?;
                if world.rank() == 1 {
                    // The host waits.
                    let _value: f32 = loss.to_scalar()?;
                }
                Ok(loss)
            })
            .expect_err("rank 1 cannot capture it");
            plain_step(&mut model, &mut optimizer, &input)?;
            Ok(error.to_string())
        });
        let said = outcome.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(said[0], "the step cannot be captured as a graph: it failed on another rank");
        assert!(said[1].starts_with("the step cannot be captured as a graph: "), "{said:?}");
    });
}

#[test]
fn what_cannot_be_captured_is_refused_with_the_reason() {
    let refusal = |on: On, ranks: usize, config: &FsdpConfig, sgd: bool, clip: bool| {
        let outcome = launch::local(ranks, |world| -> fsdp::Result<String> {
            let device = on.device(&world)?;
            let mesh = world.data_parallel_mesh().on(&device)?;
            let mut model = Model::new(WIDTH, 2, &device)?.fully_shard_with(&mesh, config)?;
            let input = batch(WIDTH, world.rank(), &device)?;
            let step = |model: &Fsdp<Model>| -> fsdp::Result<Tensor> {
                let loss: Tensor = model.forward(&input)?;
                model.backward(&loss)?;
                if clip {
                    model.clip_grad_norm(1.0)?;
                }
                Ok(loss)
            };
            let error = if sgd {
                let mut optimizer = model.optimizer(Sgd::default().momentum(0.5))?;
                capture(&mut optimizer, &mut model, step).expect_err("it cannot be captured")
            } else {
                let mut optimizer = model.optimizer(AdamW::default())?;
                let error = capture(&mut optimizer, &mut model, step).expect_err("it cannot be captured");
                // The model is as it was: a plain step follows.
                drop(step(&model)?);
                optimizer.step(&mut model)?;
                assert_eq!(optimizer.steps(), model.step_count());
                error
            };
            Ok(error.to_string())
        });
        outcome.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
    };
    let plain = FsdpConfig::default();
    assert_eq!(
        refusal(On::Cpu, 1, &plain, false, false),
        "configuration: a step cannot be captured as a graph: the model is not on a CUDA device (see `OnDevice::on`)"
    );
    in_schedules_with_graphs(0, |_| {
        let said = refusal(On::OneDevice, 2, &plain, false, false);
        assert!(said.contains("its ranks share a device"), "{said}");
        let said = refusal(On::OneDevice, 1, &plain, true, false);
        assert!(said.contains("the optimizer's rule has no kernel"), "{said}");
        let traced = FsdpConfig { trace: true, ..plain.clone() };
        let said = refusal(On::OneDevice, 1, &traced, false, false);
        assert!(said.contains("`trace` takes the times"), "{said}");
        let said = refusal(On::OneDevice, 1, &plain, false, true);
        assert!(said.contains("the host cannot wait for the device in a step that is captured"), "{said}");
    });
}

#[test]
#[cfg(feature = "nccl")]
fn a_rank_that_does_not_launch_the_graph_ends_the_others_wait() {
    use fake_cuda::{Kind, Schedule};
    use fsdp_test_fake_cuda::session;

    if crate::support::is_real() {
        return;
    }
    let session = session(Schedule::Latest);
    let outcome = launch::local(2, |world| -> fsdp::Result<()> {
        let (mut model, mut optimizer, input) = prepared(On::ADeviceEach, &world, &FsdpConfig::default())?;
        let graph = capture(&mut optimizer, &mut model, |model| {
            let loss: Tensor = model.forward(&input)?;
            model.backward(&loss)?;
            Ok(loss)
        })?;
        // Rank 1 is out of batches.
        if world.rank() == 0 {
            let loss = graph.launch(&mut model, &mut optimizer)?;
            let _value: f32 = loss.to_scalar()?;
        }
        Ok(())
    });
    let said = outcome.expect_err("rank 1 does not come").to_string();
    assert!(said.contains("rank 0 failed: ") && said.contains("launch of a graph"), "{said}");
    // What may be in use on a device that has failed is kept.
    let found = session.end();
    assert!(found.iter().all(|finding| finding.kind == Kind::Leak), "{found:?}");
}
