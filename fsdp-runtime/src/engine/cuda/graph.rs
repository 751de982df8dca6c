//! A whole training step as one CUDA graph.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use candle_core::{DType, Tensor};

use crate::comm::{HostOp, Phase, Tag};
use crate::device::cuda::{CudaBackend, CudaWork, Steps};
use crate::device::{Slice, Stream, TensorDevice};
use crate::engine::schedule::{Change, Streams};
use crate::engine::{
    BucketId, Ctx, Engine, Fsdp, GradientScaling, NonFinite, ShardedOptimizer, Table, UnitId,
};
use crate::error::{Error, Result};
use crate::optim::{Optimizer, StepInfo};

/// A training step that the device does again by itself: every kernel, copy and collective of forward, backward and
/// optimizer, in one launch. Made by [`ShardedOptimizer::capture`].
///
/// It works at the addresses of the step that was captured: a new batch is copied into the tensors that the step read
/// (`Tensor::slice_set`).
#[derive(Debug)]
pub struct StepGraph {
    /// First, as it is dropped first: NCCL's communicators end only when no graph holds them.
    work: CudaWork,
    engine: Arc<Engine>,
    /// The optimizer's state, which the graph updates.
    states: Table<BucketId, Vec<Slice>>,
    /// One element, of f32.
    loss: Tensor,
    /// The units that have gradients in the step.
    with_gradient: Table<UnitId, bool>,
    /// That of the capture: candle keeps shapes and strides on the device for each thread.
    thread: ThreadId,
}

impl<O: Optimizer> ShardedOptimizer<O> {
    /// Takes three training steps: two as always, so that all memory, kernels and communicators are there and the order of
    /// units is known, the third captured and launched as a graph, which can then be launched for further steps.
    ///
    /// `step` runs the forward and the backward of one step, with one or more microbatches, and returns the loss; the
    /// optimizer's own step is added. All shapes must be the same in every step, and nothing in it may wait for the device
    /// or bring values from the host: batches, masks and tables are on the device before. Schedules of the learning rate
    /// and the counts of steps go on as without a graph.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Before anything is done, [`Error::Config`] if the model is not on a CUDA device, several ranks share one device
    /// (their streams wait for each other, which a graph of one of them cannot hold; NCCL's collectives it can), the update
    /// rule has no kernel, gradients are scaled per token or checked, times are traced, or steps are taken in the backward.
    /// Those of `step`; [`Error::Usage`] with the reason if it cannot be captured, on all ranks if it is so on one: the first
    /// two steps count, the third has not happened.
    ///
    /// # Safety
    /// As long as the graph is launched, the tensors that `step` reads and did not make (batches, masks, tables) are kept.
    /// What `step` makes, the loss that it returns apart, is not used after it.
    pub unsafe fn capture<M>(
        &mut self,
        model: &mut Fsdp<M>,
        mut step: impl FnMut(&Fsdp<M>) -> Result<Tensor>,
    ) -> Result<StepGraph> {
        let engine = model.engine().clone();
        let ctx = &engine.ctx;
        self.check(ctx)?;
        let backend = self.capturable(ctx)?;
        // Small uploads of candle's kernels, dims and strides, are kept on the device from here on.
        let tensors = backend.tensors_on_cuda();
        let _kept = tensors.enable_cuda_graph_htod_cache();
        let loss = Tensor::zeros(1, DType::F32, ctx.backend.tensors())?;
        for _ in 0..2 {
            // As in the captured step: the kernels that it launches have to be loaded before.
            loss.slice_set(&step(model)?.to_dtype(DType::F32)?.reshape(1)?, 0, 0)?;
            self.step(model)?;
        }
        let sides = side_streams(&engine);
        for stream in sides.iter().chain([&ctx.resources.streams.compute]) {
            stream.record().synchronize()?;
        }
        let counts = (self.counts.clone(), engine.step().number);
        let mut with_gradient = Table::from(Vec::new());
        let steps = CapturedSteps::begin(backend);
        let captured = backend.stream().capture(&sides, || -> Result<()> {
            let found = step(model)?;
            loss.slice_set(&found.to_dtype(DType::F32)?.reshape(1)?, 0, 0)?;
            drop(found);
            with_gradient = engine.step().with_gradient();
            self.step(model)?;
            Ok(())
        });
        drop(steps);
        engine.note_event("after the capture of a step as a graph".into());
        let mut failed = [f64::from(u8::from(captured.is_err()))];
        // The step that it was begun in: it is another one where it was captured.
        let told = Tag { unit: "capture of a graph".into(), phase: Phase::Optimizer, step: counts.1 };
        ctx.comm.host_reduce(told, HostOp::Max, &mut failed)?;
        let captured = match captured {
            Ok(_) if failed != [0.0] => Err(Error::Usage("it failed on another rank".into())),
            captured => captured,
        };
        let work = match captured {
            Ok(((), work)) => work,
            Err(error) => {
                self.counts = counts.0;
                let mut step = engine.step();
                step.number = counts.1;
                step.abort(ctx)?;
                return Err(Error::Usage(format!("the step cannot be captured as a graph: {error}")));
            }
        };
        let graph = StepGraph {
            work,
            engine: engine.clone(),
            states: self.states.clone(),
            loss,
            with_gradient,
            thread: thread::current().id(),
        };
        // SAFETY: the graph holds the model's engine, the states and the loss; the rest is the caller's promise.
        unsafe { graph.run(backend)? };
        Ok(graph)
    }

    /// The backend, if what is configured can be captured.
    fn capturable<'a>(&self, ctx: &'a Ctx) -> Result<&'a CudaBackend> {
        let refuse = |why: &str| Err(Error::Config(format!("a step cannot be captured as a graph: {why}")));
        let Some(backend) = ctx.backend.as_any().downcast_ref::<CudaBackend>() else {
            return refuse("the model is not on a CUDA device (see `OnDevice::on`)");
        };
        let config = &ctx.config;
        let shared = ctx.comm.size() > 1 && ctx.comm.shares_a_process();
        let reasons = [
            (shared, "its ranks share a device, and wait for each other's streams: give each rank its own"),
            (
                config.scaling == GradientScaling::PerToken,
                "gradients are divided by a number of tokens that the host knows",
            ),
            (config.check_finite, "`check_finite` has the host look at the outputs of units"),
            (
                config.non_finite == NonFinite::SkipStep,
                "`NonFinite::SkipStep` has the host look at the norm of the gradients",
            ),
            (config.trace, "`trace` takes the times of single kernels"),
            (config.step_in_backward, "with `step_in_backward` units are stepped one by one"),
            (
                !has_kernels(self),
                "the optimizer's rule has no kernel (`Optimizer::kernel_update`) and runs on the host",
            ),
        ];
        if let Some((_, why)) = reasons.into_iter().find(|(wrong, _)| *wrong) {
            return refuse(why);
        }
        Ok(backend)
    }
}

impl StepGraph {
    /// Takes a step by launching the graph, with the optimizer's present settings; returns the loss, a scalar of f32 that the
    /// next launch overwrites. The host is at most one launch ahead of the device.
    ///
    /// Every rank must call it; ranks wait for each other on the host first, as nothing else would end a collective in the
    /// graph that a rank does not come to.
    ///
    /// # Errors
    /// [`Error::Usage`] if model or optimizer are not those of the capture, the thread is another one, or a step is under way;
    /// a rank that does not come; those of the device.
    pub fn launch<M, O: Optimizer>(
        &self,
        model: &mut Fsdp<M>,
        optimizer: &mut ShardedOptimizer<O>,
    ) -> Result<Tensor> {
        let engine = &self.engine;
        if model.engine().id() != engine.id() {
            return Err(Error::Usage("this graph was captured from another model".into()));
        }
        if thread::current().id() != self.thread {
            let message = "a graph is launched by the thread that captured it: this is another one";
            return Err(Error::Usage(message.into()));
        }
        let ctx = &engine.ctx;
        optimizer.check(ctx)?;
        let backend = optimizer.capturable(ctx)?;
        let addresses = |states: &Table<BucketId, Vec<Slice>>| {
            states.iter().flatten().map(Slice::as_ptr).collect::<Vec<_>>()
        };
        if addresses(&self.states) != addresses(&optimizer.states) {
            return Err(Error::Usage("this graph was captured with another optimizer".into()));
        }
        if engine.step().gradients.received.iter().any(|received| *received) {
            return Err(Error::Usage(
                "a step has begun: step the optimizer, or forget its gradients with `reset_step`, before a graph is \
                 launched"
                    .into(),
            ));
        }
        engine.settle_intact()?;
        if ctx.comm.size() > 1 {
            let tag = engine.step().tag("launch of a graph", Phase::Optimizer);
            ctx.comm.host_barrier(tag)?;
        }
        let span = ctx.begin_span("optimizer", &"optimizer".into());
        let due = optimizer.due(ctx, &mut engine.step(), 1.0, self.with_gradient.clone(), span);
        backend.set_steps(Steps::Replayed);
        let written = optimizer.update(ctx, &due);
        backend.set_steps(Steps::Taken);
        written?;
        // SAFETY: the model and the optimizer are those of the capture, borrowed mutably, and everything of the model that was
        // under way is over (`settle`); the rest is the promise that the graph was captured with.
        unsafe { self.run(backend)? };
        let step = &mut *engine.step();
        step.weights_changed(ctx, Change::Step)?;
        step.number += 1;
        Ok(self.loss.reshape(())?)
    }

    /// The loss of the last launch.
    ///
    /// # Errors
    /// Those of candle.
    pub fn loss(&self) -> Result<Tensor> {
        Ok(self.loss.reshape(())?)
    }

    /// # Safety
    /// That of [`CudaWork::launch`].
    unsafe fn run(&self, backend: &CudaBackend) -> Result<()> {
        backend.copy_tables()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.work.launch(&[]) }?)
    }
}

/// Updates are captured while this lives, whether a step fails or unwinds.
struct CapturedSteps<'a>(&'a CudaBackend);

impl<'a> CapturedSteps<'a> {
    fn begin(backend: &'a CudaBackend) -> Self {
        backend.set_steps(Steps::Captured);
        CapturedSteps(backend)
    }
}

impl Drop for CapturedSteps<'_> {
    fn drop(&mut self) {
        self.0.set_steps(Steps::Taken);
    }
}

/// Whether all updates are done by kernels of the device.
fn has_kernels<O: Optimizer>(optimizer: &ShardedOptimizer<O>) -> bool {
    let at = StepInfo { step: 1, grad_scale: 1.0 };
    optimizer.rule.kernel_update(at, true, Default::default()).is_some()
}

/// All streams beside the compute stream.
fn side_streams(engine: &Engine) -> Vec<Arc<dyn Stream>> {
    let Streams { gather, reduce, .. } = &engine.ctx.resources.streams;
    [gather.clone(), reduce.clone()].into_iter().chain(engine.step().reduce.outer_stream()).collect()
}
