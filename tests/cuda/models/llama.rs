//! A small Llama on CUDA devices against the same on the CPU: losses, gradients, weights, adapters, completions, the trainer.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor};
use fsdp::launch::World;
use fsdp::prelude::*;
use fsdp_models::data::{TextDataset, TextOptions};
use fsdp_models::generate::{Sampling, generate};
use fsdp_models::lora::LoraConfig;
use fsdp_models::trainer::{Outputs, TrainDevice, TrainOptions, shard, train};
use fsdp_models::{Llama, LlamaConfig, Result};
use fsdp_test_support::{assert_close, assert_distance, assert_distance_with_least, relative};

use crate::support::{On, in_schedules};

const VOCAB: usize = 23;

pub(super) fn config(tied: bool) -> LlamaConfig {
    LlamaConfig {
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        vocab_size: VOCAB,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: tied,
        max_position_embeddings: 9,
        initializer_range: 0.2,
        head_dim: Some(6),
    }
}

type Values = BTreeMap<String, Vec<f32>>;

/// What a rank has seen of two steps.
struct Seen {
    losses: Vec<f32>,
    /// Of the first step.
    gradients: Values,
    /// At the end.
    weights: Values,
}

/// What is trained, and how.
#[derive(Clone)]
struct Run {
    model: LlamaConfig,
    lora: Option<LoraConfig>,
    fsdp: FsdpConfig,
    /// Ids are made where the model is, not on the CPU.
    ids_on_device: bool,
}

impl Run {
    fn new(model: LlamaConfig) -> Run {
        Run { model, lora: None, fsdp: FsdpConfig::default(), ids_on_device: false }
    }

    fn model(&self, world: &World, device: &Device) -> Result<Fsdp<Llama>> {
        let mut model = Llama::new(&self.model)?;
        if let Some(lora) = &self.lora {
            model.add_adapters(lora)?;
        }
        let mesh = world.data_parallel_mesh().on(device)?;
        Ok(model.fully_shard_with(&mesh, &self.fsdp)?)
    }
}

/// Two rows of 7 tokens of a step, and what follows each.
pub(super) fn batch(world: &World, step: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let first = (step * world.size() + world.rank()) * 2;
    let ids = |shift: usize| -> Vec<u32> {
        let row = |row: usize| (0..7).map(move |at| ((row * 11 + (at + shift) * 7) % VOCAB) as u32);
        (first..first + 2).flat_map(row).collect()
    };
    let tensor = |shift| Tensor::from_vec(ids(shift), (2, 7), device);
    Ok((tensor(0)?, tensor(1)?))
}

fn run(on: On, ranks: usize, run: &Run) -> Vec<Seen> {
    let outcome = launch::local(ranks, |world| -> Result<Seen> {
        let device = on.device(&world)?;
        let mut model = run.model(&world, &device)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.01))?;
        let (mut losses, mut gradients) = (Vec::new(), Values::new());
        for step in 0..2 {
            let ids_on = if run.ids_on_device { &device } else { &Device::Cpu };
            model.set_first_sample((world.rank() * 2) as u64);
            let loss: Tensor = model.forward(&batch(&world, step, ids_on)?)?;
            losses.push(loss.to_scalar()?);
            model.backward(&loss)?;
            if step == 0 {
                model.visit_gradients(|spec, values| {
                    gradients.insert(spec.name.clone(), values.to_vec());
                    Ok(())
                })?;
            }
            optimizer.step(&mut model)?;
        }
        let mut weights = Values::new();
        model.visit_weights(|spec, values| {
            weights.insert(spec.name.clone(), values.to_vec());
            Ok(())
        })?;
        Ok(Seen { losses, gradients, weights })
    });
    outcome.unwrap_or_else(|error| panic!("{on:?}: {error}"))
}

#[track_caller]
fn assert_near(what: &str, found: &Values, expected: &Values, tolerance: f64) {
    assert!(found.keys().eq(expected.keys()), "{what}: other parameters");
    for (name, expected) in expected {
        assert_distance_with_least(&found[name], expected, 1e-6, tolerance, format!("{what} of {name}"));
    }
}

/// Compares with the CPU, on one device and on several.
fn compare(case: &Run, tolerance: f64) {
    for (on, ranks) in [(On::OneDevice, 1), (On::OneDevice, 2), (On::ADeviceEach, 2)] {
        let expected = run(On::Cpu, ranks, case);
        in_schedules(0, |schedule| {
            for (rank, (found, expected)) in run(on, ranks, case).iter().zip(&expected).enumerate() {
                let what = format!("{on:?}, {schedule}, rank {rank} of {ranks}");
                assert_distance(&found.losses, &expected.losses, tolerance, format!("{what}: losses"));
                assert_near(
                    &format!("{what}: gradient"),
                    &found.gradients,
                    &expected.gradients,
                    10.0 * tolerance,
                );
                assert_near(&format!("{what}: weight"), &found.weights, &expected.weights, 10.0 * tolerance);
            }
        });
    }
}

fn with_param(run: Run, param: Dtype) -> Run {
    let fsdp = FsdpConfig { precision: MixedPrecision { param, ..MixedPrecision::F32 }, ..run.fsdp.clone() };
    Run { fsdp, ..run }
}

#[test]
fn a_llama_trains_as_on_the_cpu() {
    for tied in [false, true] {
        compare(&Run::new(config(tied)), 1e-5);
    }
}

#[test]
fn ids_may_be_where_the_model_is() {
    compare(&Run { ids_on_device: true, ..Run::new(config(false)) }, 1e-5);
}

#[test]
fn recomputation_changes_nothing() {
    let fsdp = FsdpConfig { recompute: Recompute::Unit, ..FsdpConfig::default() };
    compare(&Run { fsdp, ..Run::new(config(false)) }, 1e-5);
}

#[test]
fn a_llama_trains_in_bf16() {
    compare(&with_param(Run::new(config(false)), Dtype::BF16), 1e-2);
}

#[test]
fn a_llama_trains_in_f16() {
    compare(&with_param(Run::new(config(false)), Dtype::F16), 2e-3);
}

/// The masks of dropout are those of the CPU: other ones would show.
#[test]
fn adapters_train_with_dropout() {
    let lora = LoraConfig { rank: 3, alpha: 6.0, targets: "all-linear".parse().unwrap(), dropout: 0.4 };
    for recompute in [Recompute::None, Recompute::Unit] {
        let fsdp = FsdpConfig { recompute, ..FsdpConfig::default() };
        compare(&Run { lora: Some(lora.clone()), fsdp, ..Run::new(config(false)) }, 1e-5);
    }
}

#[test]
fn completions_are_those_of_the_cpu() {
    let complete = |on: On| {
        let sampling = Sampling { temperature: 0.0, max_tokens: 6, ..Sampling::default() };
        launch::local(2, |world| -> Result<Vec<u32>> {
            let model = Run::new(config(true)).model(&world, &on.device(&world)?)?;
            generate(&model, &[3, 1, 4], &sampling)
        })
        .unwrap()
    };
    let expected = complete(On::Cpu);
    in_schedules(1, |schedule| assert_eq!(complete(On::OneDevice), expected, "{schedule}"));
}

#[test]
fn the_trainer_takes_a_device() {
    let order = TextOptions { seq: 8, batch: 4, vocab: 256, seed: 3 };
    let text = b"the quick brown fox jumps over the lazy dog and then it does so again".to_vec();
    let data = TextDataset::from_bytes(text, order).unwrap();
    let model = LlamaConfig { vocab_size: 256, max_position_embeddings: 8, ..config(true) };
    let losses = |device, param| {
        let precision = MixedPrecision { param, ..MixedPrecision::F32 };
        let fsdp = FsdpConfig { precision, ..FsdpConfig::default() };
        let options = TrainOptions {
            device,
            fsdp,
            microbatches: 2,
            warmup: Some(1),
            ..TrainOptions::new(model.clone(), 3)
        };
        options.validate(2, &data).unwrap();
        let summaries = launch::local(2, |world| -> Result<_> {
            let mut model = shard(&world, &options, None)?;
            train(&world, &mut model, &options, &data, &Outputs::default())
        });
        summaries.unwrap().iter().flat_map(|summary| summary.losses()).collect::<Vec<f64>>()
    };
    // In f16 the loss is scaled.
    for (param, tolerance) in [(Dtype::F32, 1e-5), (Dtype::F16, 1e-3)] {
        let expected = losses(TrainDevice::Cpu, param);
        in_schedules(0, |schedule| {
            let found = losses(TrainDevice::Cuda, param);
            assert_close(&found, &expected, relative(tolerance), schedule);
        });
    }
}
