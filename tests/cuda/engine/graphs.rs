//! A step that is captured as a graph and launched is the step that is taken one kernel after the other.

use candle_core::Tensor;
use fsdp::prelude::*;

use super::{Model, batch};
use crate::support::{On, in_schedules_with_graphs};

const WIDTH: usize = 6;
const STEPS: usize = 6;

fn learning_rate(step: usize) -> f64 {
    0.05 / (1 + step) as f64
}

/// The losses of all steps and the weights, from a graph or without.
fn train(on: On, ranks: usize, config: &FsdpConfig, graph: bool) -> Vec<(Vec<f32>, Vec<f32>)> {
    let outcome = launch::local(ranks, |world| -> fsdp::Result<_> {
        let device = on.device(&world)?;
        let mesh = world.data_parallel_mesh().on(&device)?;
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
        // The first two steps have one batch and one learning rate.
        optimizer.set_learning_rate(learning_rate(0));
        input.slice_set(&batch(WIDTH, world.rank(), &device)?, 0, 0)?;
        let captured = if graph {
            Some(optimizer.capture(&mut model, step)?)
        } else {
            for _ in 0..2 {
                drop(step(&model)?);
                optimizer.step(&mut model)?;
            }
            None
        };
        for index in 2..STEPS {
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

fn compare(on: On, ranks: usize, config: &FsdpConfig, what: &str) {
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
        compare(On::OneDevice, 1, &config, &format!("{recompute:?}, {double_buffer}"));
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
        compare(On::ADeviceEach, 2, &config, &format!("{strategy}"));
    }
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
                optimizer.capture(&mut model, step).expect_err("it cannot be captured")
            } else {
                let mut optimizer = model.optimizer(AdamW::default())?;
                let error = optimizer.capture(&mut model, step).expect_err("it cannot be captured");
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
        "configuration: a step cannot be captured as a graph: the model is not on a CUDA device (see `DeviceMesh::on`)"
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
