//! The training loop, as each rank runs it.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use candle_core::{Device, Tensor};
use fsdp::comm::{HostOp, Phase, Tag};
use fsdp::engine::{MemoryReport, TrafficReport};
use fsdp::launch::World;
use fsdp::optim::{LossScaler, Optimizer};
use fsdp::spec::Dtype;
use fsdp::trace::Span;
use fsdp::{Fsdp, FullyShard};

use super::metrics::{MetricsWriter, StepMetrics, StepTimes};
use super::options::{TrainError, TrainOptions};
use super::progress::Progress;
use crate::data::{Batches, Part};
use crate::llama::Llama;
use fsdp::files::{TensorFile, TensorFileWriter};

/// A trace holds this many steps, the last ones: earlier ones are alike, and a long run's would not fit in
/// memory.
const TRACED_STEPS: usize = 5;

/// Where a run's results go while it goes on. One for all ranks; rank 0 writes.
#[derive(Default)]
pub struct Outputs {
    /// Shows each step.
    pub progress: Option<Mutex<Progress>>,
    /// Gets a line a step.
    pub metrics: Option<Mutex<MetricsWriter>>,
    /// Gets the gradients of the first step, whole, reduced and not clipped. Complete after that step.
    pub gradients: Option<Mutex<TensorFileWriter>>,
    /// Gets the weights after the last step, whole. Complete when the run is.
    pub weights: Option<Mutex<TensorFileWriter>>,
}

/// What a run was like, seen from one rank.
#[derive(Clone, Debug)]
pub struct TrainSummary {
    /// Every step. Loss and gradient norm are the same on all ranks, times are this rank's.
    pub steps: Vec<StepMetrics>,
    /// Median step time and rate.
    pub times: StepTimes,
    /// Bytes this rank held, by category, and what the layout foretells.
    pub memory: Vec<MemoryReport>,
    /// What this rank's collectives moved.
    pub traffic: Vec<TrafficReport>,
    /// The last steps' trace, if the configuration asks for one.
    pub spans: Vec<Span>,
}

/// Builds the model and shards it over all ranks, in as many replicas as the options say, with its initial weights or, where given, those of a file.
/// Every rank must call it.
///
/// # Errors
/// Those of sharding and of reading the file.
pub fn shard(
    world: &World,
    options: &TrainOptions,
    weights: Option<&TensorFile>,
) -> crate::Result<Fsdp<Llama>> {
    let model = Llama::new(&options.model)?;
    let outer = options.outer_ranks;
    let mesh =
        world.mesh(&[("dp_outer", outer), ("dp_shard", world.size() / outer)]).map_err(fsdp::Error::from)?;
    let model = model.fully_shard_with(&mesh, &options.fsdp)?;
    if let Some(file) = weights {
        model.load_weights(|spec, elements, values| {
            let read = file.read_range_f32(&spec.name, elements.start, values);
            read.map_err(|error| fsdp::Error::Param { param: spec.name.clone(), message: error.to_string() })
        })?;
    }
    Ok(model)
}

/// Trains `model`. Every rank must call it, with the same options, data and outputs.
///
/// A step's loss is the mean over all tokens of the global batch, its gradient the mean over ranks and
/// microbatches.
///
/// # Errors
/// A loss or a gradient norm that is not finite, on all ranks alike and before the weights change; and those
/// of the model, the data and the outputs.
pub fn train(
    world: &World,
    model: &mut Fsdp<Llama>,
    options: &TrainOptions,
    data: &dyn Batches,
    outputs: &Outputs,
) -> crate::Result<TrainSummary> {
    let microbatches = options.microbatches;
    let mut optimizer = model.optimizer(options.optimizer())?;
    let mut scaler = (options.fsdp.precision.param == Dtype::F16).then(LossScaler::default);
    let mut times = StepTimes::new(data.rows() * data.seq());
    let mut steps = Vec::with_capacity(options.steps);

    for step in 0..options.steps {
        if step + TRACED_STEPS == options.steps {
            model.clear_trace();
        }
        let start = Instant::now();
        let lr = options.learning_rate(step);
        optimizer.set_learning_rate(lr);

        let served = (step * data.rows()) as u64;
        let mut loss_sum = 0.0;
        for microbatch in 0..microbatches {
            let part = Part { rank: world.rank(), world: world.size(), microbatch, microbatches };
            let batch = data.batch(served, part)?.to_tensors(&Device::Cpu)?;
            model.set_first_sample(part.rows(data.rows())?.start as u64);
            model.set_is_last_microbatch(microbatch + 1 == microbatches);
            let loss: Tensor = model.forward(&batch)?;
            loss_sum += f64::from(loss.to_scalar::<f32>()?);
            let mut part = if microbatches == 1 { loss } else { (loss / microbatches as f64)? };
            if let Some(scaler) = &scaler {
                part = scaler.scale(&part)?;
            }
            model.backward(&part)?;
        }

        let loss = mean_over_ranks(world, step, loss_sum / microbatches as f64)?;
        let checked = options.fsdp.check_finite;
        if !loss.is_finite() {
            return Err(TrainError::LossNotFinite { step, loss, checked }.into());
        }
        if let Some(file) = outputs.gradients.as_ref().filter(|_| step == 0) {
            save(world, file, |visit| model.visit_gradients(visit))?;
        }
        if let Some(scaler) = &scaler {
            scaler.unscale(model)?;
        }
        let grad_norm = match options.clip {
            Some(max_norm) => model.clip_grad_norm(max_norm)?,
            None => model.grad_norm()?,
        };
        match &mut scaler {
            // A step whose gradients overflow is skipped, with a smaller scale from then on.
            Some(scaler) => {
                scaler.step(&mut optimizer, model)?;
            }
            None if !grad_norm.is_finite() => {
                return Err(TrainError::GradNormNotFinite { step, loss, norm: grad_norm }.into());
            }
            None => optimizer.step(model)?,
        }

        let step_ms = start.elapsed().as_secs_f64() * 1e3;
        let tokens_per_s = times.record(step_ms);
        let metrics = StepMetrics { step, loss, grad_norm, lr, tokens_per_s, step_ms };
        steps.push(metrics);
        if world.rank() == 0 {
            outputs.step(&metrics)?;
        }
    }

    if let Some(file) = &outputs.weights {
        save(world, file, |visit| model.visit_weights(visit))?;
    }
    Ok(TrainSummary {
        steps,
        times,
        memory: model.memory(optimizer.rule().state_names().len()),
        traffic: model.traffic(),
        spans: model.trace(),
    })
}

/// The ranks' mean, in f64, summed in rank order: the same bits on all ranks.
fn mean_over_ranks(world: &World, step: usize, value: f64) -> crate::Result<f64> {
    let mut sum = [value];
    let tag = Tag { unit: "loss".into(), phase: Phase::Optimizer, step: step as u64 };
    world.communicator().host_reduce(tag, HostOp::Sum, &mut sum).map_err(fsdp::Error::from)?;
    Ok(sum[0] / world.size() as f64)
}

type Visit<'a> = &'a mut dyn FnMut(&fsdp::spec::ParamSpec, &[f32]) -> fsdp::Result<()>;

/// Writes the parameters that `visit_all` shows on every rank, on rank 0.
fn save(
    world: &World,
    file: &Mutex<TensorFileWriter>,
    visit_all: impl FnOnce(Visit<'_>) -> fsdp::Result<()>,
) -> crate::Result<()> {
    visit_all(&mut |spec, values| {
        if world.rank() != 0 {
            return Ok(());
        }
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = file.write_range_f32(&spec.name, 0, values);
        written.map_err(|error| fsdp::Error::Param { param: spec.name.clone(), message: error.to_string() })
    })?;
    Ok(())
}

impl Outputs {
    fn step(&self, metrics: &StepMetrics) -> crate::Result<()> {
        if let Some(progress) = &self.progress {
            progress.lock().unwrap_or_else(PoisonError::into_inner).step(metrics);
        }
        if let Some(file) = &self.metrics {
            file.lock().unwrap_or_else(PoisonError::into_inner).step(metrics)?;
        }
        Ok(())
    }
}

impl TrainSummary {
    /// Loss of every step.
    pub fn losses(&self) -> Vec<f64> {
        self.steps.iter().map(|step| step.loss).collect()
    }

    /// Gradient norm of every step, before clipping.
    pub fn grad_norms(&self) -> Vec<f64> {
        self.steps.iter().map(|step| step.grad_norm).collect()
    }
}
