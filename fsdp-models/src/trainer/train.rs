//! The training loop, as each rank runs it.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use candle_core::{Device, Tensor};
use fsdp::comm::{HostOp, Phase, Tag};
use fsdp::engine::{MemoryReport, TrafficReport};
use fsdp::launch::World;
use fsdp::optim::{AdamW, LossScaler, Optimizer};
use fsdp::spec::Dtype;
use fsdp::trace::Span;
use fsdp::{Fsdp, FullyShard, OnDevice, ShardedOptimizer};

use super::checkpoints::RunCheckpoints;
use super::metrics::{MetricsWriter, StepMetrics, StepTimes};
use super::options::{TrainError, TrainOptions};
use super::progress::Progress;
use super::stop::Stop;
use crate::data::{Batches, Part};
use crate::llama::Llama;
use crate::pretrained::Weights;
use fsdp::files::TensorFileWriter;

/// A trace holds this many steps, the last ones: earlier ones are alike, and a long run's would not fit in
/// memory.
const TRACED_STEPS: usize = 5;

/// Where a run's results go while it goes on. One for all ranks; rank 0 writes.
#[derive(Debug, Default)]
pub struct Outputs {
    /// Shows each step.
    pub progress: Option<Mutex<Progress>>,
    /// Gets a line a step.
    pub metrics: Option<Mutex<MetricsWriter>>,
    /// Gets the gradients of the run's first step, whole, reduced and not clipped. Complete after that step.
    pub gradients: Option<Mutex<TensorFileWriter>>,
    /// Gets the weights after the last step, whole. Complete when the run is.
    pub weights: Option<Mutex<TensorFileWriter>>,
    /// Gets the state now and then, and has what the run goes on from.
    pub checkpoints: Option<RunCheckpoints>,
    /// Asked, the run stops at the end of a step: its state is saved, its final weights are not.
    pub stop: Stop,
}

/// What a run was like, seen from one rank.
#[derive(Clone, Debug)]
pub struct TrainSummary {
    /// Every step since the run began, or went on. Loss and gradient norm are the same on all ranks, times are this rank's.
    pub steps: Vec<StepMetrics>,
    /// Median step time and rate.
    pub times: StepTimes,
    /// Bytes this rank held, by category, and what the layout foretells.
    pub memory: Vec<MemoryReport>,
    /// What this rank's collectives moved.
    pub traffic: Vec<TrafficReport>,
    /// The last steps' trace, if the configuration asks for one.
    pub spans: Vec<Span>,
    /// It was asked to stop before its last step, and has.
    pub stopped: bool,
}

/// Builds the model and shards it over all ranks, on their devices and in as many replicas as the options say, with its
/// initial weights or, where given, those of a file, which must [fit](Weights::check_llama). Every rank must call it, once.
///
/// # Errors
/// Those of the device, of sharding and of reading the file.
pub fn shard(world: &World, options: &TrainOptions, weights: Option<&Weights>) -> crate::Result<Fsdp<Llama>> {
    let model = Llama::new(&options.model)?;
    let outer = options.outer_ranks;
    let mesh =
        world.mesh(&[("dp_outer", outer), ("dp_shard", world.size() / outer)]).map_err(fsdp::Error::from)?;
    let mesh = mesh.on(&options.device.of_rank(world)?)?;
    let mut model = model.fully_shard_with(&mesh, &options.fsdp)?;
    if let Some(weights) = weights {
        weights.load_llama(&mut model, &options.model)?;
    }
    Ok(model)
}

/// Trains `model`. Every rank must call it, with the same options, data and outputs.
///
/// A step's loss is the mean over all tokens of the global batch, its gradient the mean over ranks and
/// microbatches. With [`Outputs::checkpoints`] the state is saved as training goes on, and a run that was stopped
/// goes on from there, its data at the very next sample.
///
/// # Errors
/// A loss or a gradient norm that is not finite, on all ranks alike and before the weights change; and those
/// of the model, the data, the checkpoints and the outputs.
pub fn train(
    world: &World,
    model: &mut Fsdp<Llama>,
    options: &TrainOptions,
    data: &dyn Batches,
    outputs: &Outputs,
) -> crate::Result<TrainSummary> {
    let mut optimizer = model.optimizer(options.optimizer())?;
    let mut scaler = (options.fsdp.precision.param == Dtype::F16).then(LossScaler::default);
    let (mut first, mut served, mut saver) = (0, 0, None);
    if let Some(checkpoints) = &outputs.checkpoints {
        checkpoints.restore(model, &mut optimizer, scaler.as_mut())?;
        (first, served) = (checkpoints.first_step(), checkpoints.served());
        saver = Some(checkpoints.saver());
    }
    let mut run = Run { world, options, data, optimizer, scaler, stop: &outputs.stop };
    let mut times = StepTimes::new(data.rows() * data.seq());
    let (mut steps, mut stopped) = (Vec::new(), false);

    let training = outputs.stop.training();
    for step in first..options.steps {
        if step + TRACED_STEPS == options.steps {
            model.clear_trace();
        }
        let start = Instant::now();
        let gradients = outputs.gradients.as_ref().filter(|_| step == first);
        let StepOutcome { loss, grad_norm, stop } = run.step(model, step, served, gradients)?;
        served += data.rows() as u64;

        let step_ms = start.elapsed().as_secs_f64() * 1e3;
        let tokens_per_s = times.record(step_ms);
        let lr = options.learning_rate(step);
        let done = step + 1;
        let metrics = StepMetrics { step: done, loss, grad_norm, lr, tokens_per_s, step_ms };
        steps.push(metrics);
        if world.rank() == 0 {
            outputs.step(&metrics)?;
        }
        if let Some(saver) = &mut saver {
            let (next, scaler) = (data.cursor(served), run.scaler.as_ref());
            let last = stop || done == options.steps;
            saver.after(done, last, next, model, &run.optimizer, scaler)?;
        }
        if stop && done < options.steps {
            stopped = true;
            break;
        }
    }

    if let Some(saver) = saver {
        saver.finish()?;
    }
    drop(training);
    if let Some(file) = outputs.weights.as_ref().filter(|_| !stopped) {
        save(world, file, |visit| model.visit_weights(visit))?;
    }
    Ok(TrainSummary {
        steps,
        times,
        memory: model.memory(run.optimizer.rule().state_names().len()),
        traffic: model.traffic(),
        spans: model.trace(),
        stopped,
    })
}

/// What a rank's steps need besides the model.
struct Run<'a> {
    world: &'a World,
    options: &'a TrainOptions,
    data: &'a dyn Batches,
    optimizer: ShardedOptimizer<AdamW>,
    scaler: Option<LossScaler>,
    stop: &'a Stop,
}

/// What all ranks know after a step.
struct StepOutcome {
    loss: f64,
    grad_norm: f64,
    /// Some rank was asked to stop.
    stop: bool,
}

impl Run<'_> {
    /// Takes one step on the global batch after `served` samples.
    fn step(
        &mut self,
        model: &mut Fsdp<Llama>,
        step: usize,
        served: u64,
        gradients: Option<&Mutex<TensorFileWriter>>,
    ) -> crate::Result<StepOutcome> {
        self.optimizer.set_learning_rate(self.options.learning_rate(step));
        let loss = self.backward(model, served)?;
        // One reduction for both: the ranks agree on the step that is the last.
        let asked = if self.stop.asked() { 1.0 } else { 0.0 };
        let [loss, stop] = mean_over_ranks(self.world, step, [loss, asked])?;
        if !loss.is_finite() {
            let checked = self.options.fsdp.check_finite;
            return Err(TrainError::LossNotFinite { step: step + 1, loss, checked }.into());
        }
        if let Some(file) = gradients {
            save(self.world, file, |visit| model.visit_gradients(visit))?;
        }
        if let Some(scaler) = &self.scaler {
            scaler.unscale(model)?;
        }
        let norm = match self.options.clip {
            Some(max_norm) => model.clip_grad_norm(max_norm)?,
            None => model.grad_norm()?,
        };
        match &mut self.scaler {
            // A step whose gradients overflow is skipped, with a smaller scale from then on.
            Some(scaler) => {
                scaler.step(&mut self.optimizer, model)?;
            }
            None if !norm.is_finite() => {
                return Err(TrainError::GradNormNotFinite { step: step + 1, loss, norm }.into());
            }
            None => {
                self.optimizer.step(model)?;
            }
        }
        Ok(StepOutcome { loss, grad_norm: norm, stop: stop > 0.0 })
    }

    /// Forwards and backwards of this rank's microbatches. Returns the mean of their losses.
    fn backward(&self, model: &Fsdp<Llama>, served: u64) -> crate::Result<f64> {
        let (data, microbatches) = (self.data, self.options.microbatches);
        let mut losses = Vec::new();
        for microbatch in 0..microbatches {
            let part = Part { rank: self.world.rank(), world: self.world.size(), microbatch, microbatches };
            let batch = data.batch(served, part)?.to_tensors(&Device::Cpu)?;
            model.set_first_sample(part.rows(data.rows())?.start as u64);
            model.set_is_last_microbatch(microbatch + 1 == microbatches);
            let loss: Tensor = model.forward(&batch)?;
            losses.push(loss.detach());
            let mut loss = if microbatches == 1 { loss } else { (loss / microbatches as f64)? };
            if let Some(scaler) = &self.scaler {
                loss = scaler.scale(&loss)?;
            }
            model.backward(&loss)?;
        }
        // Read last: a device is waited for here.
        let mut sum = 0.0;
        for loss in losses {
            sum += f64::from(loss.to_scalar::<f32>()?);
        }
        Ok(sum / microbatches as f64)
    }
}

/// The ranks' means, in f64, summed in rank order: the same bits on all ranks.
fn mean_over_ranks<const N: usize>(world: &World, step: usize, values: [f64; N]) -> crate::Result<[f64; N]> {
    let mut sum = values;
    let tag = Tag { unit: "loss".into(), phase: Phase::Optimizer, step: step as u64 };
    world.communicator().host_reduce(tag, HostOp::Sum, &mut sum).map_err(fsdp::Error::from)?;
    Ok(sum.map(|sum| sum / world.size() as f64))
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
