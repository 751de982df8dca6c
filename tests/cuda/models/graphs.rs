//! Steps of a Llama as CUDA graphs.

use candle_core::{Device, Tensor};
use fsdp::prelude::*;
use fsdp_models::Llama;
use fsdp_models::lora::LoraConfig;

use super::llama::{batch, config};
use crate::support::in_schedules_with_graphs;

const STEPS: usize = 4;

/// Takes steps, the first two with one batch, by a graph or without; returns the later losses.
fn train(graph: bool, dropout: Option<f64>, on: fn(&Device) -> Device) -> fsdp_models::Result<Vec<f32>> {
    let losses = launch::local(1, |world| -> fsdp_models::Result<Vec<f32>> {
        let device = fsdp::cuda::device(0).map_err(fsdp::Error::from)?;
        let mesh = world.data_parallel_mesh().on(&device)?;
        let mut model = Llama::new(&config(true))?;
        if let Some(dropout) = dropout {
            let targets = "all-linear".parse()?;
            model.add_adapters(&LoraConfig { rank: 2, alpha: 2.0, targets, dropout })?;
        }
        let mut model = model.fully_shard(&mesh)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.01))?;
        let input = batch(&world, 0, &on(&device))?;
        let step = |model: &Fsdp<Llama>| -> fsdp::Result<Tensor> {
            let loss: Tensor = model.forward(&input)?;
            model.backward(&loss)?;
            Ok(loss)
        };
        let captured = if graph {
            // SAFETY: the batch is kept longer than the graph, and nothing of a step is used but its loss.
            Some(unsafe { optimizer.capture(&mut model, step) }?)
        } else {
            for _ in 0..3 {
                drop(step(&model)?);
                optimizer.step(&mut model)?;
            }
            None
        };
        let mut losses = Vec::new();
        for index in 3..STEPS {
            let (ids, targets) = batch(&world, index, &device)?;
            input.0.slice_set(&ids, 0, 0)?;
            input.1.slice_set(&targets, 0, 0)?;
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
        Ok(losses)
    });
    match losses {
        Ok(mut losses) => Ok(losses.remove(0)),
        Err(error) => Err(fsdp::Error::Usage(error.to_string()).into()),
    }
}

#[test]
fn a_graph_of_a_llamas_step_computes_the_same_bits() {
    in_schedules_with_graphs(1, |schedule| {
        let losses = [false, true].map(|graph| train(graph, None, Device::clone).unwrap());
        assert_eq!(losses[0].len(), STEPS - 3);
        assert_eq!(losses[0], losses[1], "{schedule}");
    });
}

#[test]
fn what_a_graph_cannot_hold_is_refused() {
    in_schedules_with_graphs(0, |_| {
        let refusal = |dropout, on: fn(&Device) -> Device| train(true, dropout, on).unwrap_err().to_string();
        let message = refusal(None, |_| Device::Cpu);
        assert!(message.contains("embedding: ids on the CPU, while a graph is captured"), "{message}");
        let message = refusal(Some(0.5), Device::clone);
        assert!(message.contains("dropout: a graph would repeat the mask"), "{message}");
    });
}
