//! An optimizer over the shards of a model.

use crate::comm::{CommError, Phase};
use crate::device::{Slice, TensorDevice, read_anywhere, update_all_anywhere, update_anywhere};
use crate::engine::api::unitless;
use crate::engine::build::agreement::agree;
use crate::engine::io::whole;
use crate::engine::optim::{grad_norm, in_backward};
use crate::engine::unit::gradients;
use crate::engine::{BucketId, Ctx, Engine, Fsdp, Id, Locked, ParamGroups, ParamId, Step, Table, UnitId};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::optim::{AdamWRun, AdamWScalars, KernelUpdate, Kernels, Optimizer, ParamGroup, Segment, StepInfo};
use crate::spec::{Dtype, ParamSpec};
use crate::trace::Begun;
use std::ops::Range;

/// Updates the part of each parameter that this rank owns. Made by [`Fsdp::optimizer`], so it cannot exist
/// before the model is sharded.
#[derive(Debug)]
pub struct ShardedOptimizer<O> {
    pub(crate) rule: O,
    engine: usize,
    groups: ParamGroups,
    /// State buffers of each bucket, none for frozen ones.
    pub(crate) states: Table<BucketId, Vec<Slice>>,
    state_layout: StateLayout,
    /// What is updated in each bucket.
    pub(crate) parts: Table<BucketId, Vec<Part>>,
    /// The physical parameters that it updates, on any rank.
    pub(crate) updated: Vec<ParamId>,
    pub(crate) counts: StepCounts,
    /// It has stepped since it was made: the ranks have compared theirs.
    pub(crate) begun: bool,
}

/// The steps that an optimizer has taken, as checkpoints keep them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepCounts {
    pub steps: u64,
    /// Those in which a unit had gradients: what the corrections of young moments depend on.
    pub unit_steps: Table<UnitId, u64>,
}

/// A part of a parameter that this rank's optimizer updates; never empty.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub param: ParamId,
    /// Elements of the bucket.
    pub range: Range<usize>,
    /// Its first element in the state buffers.
    pub state: usize,
}

/// How state buffers are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateLayout {
    /// Like the shard, padding included.
    Shard,
    /// Only the parts that are updated, one after the other.
    Compact,
}

impl<M> Fsdp<M> {
    /// An optimizer with `rule` whose state is sharded like the parameters and starts at zero. Nothing is
    /// communicated.
    ///
    /// # Errors
    /// If the rule's settings are out of range.
    pub fn optimizer<O: Optimizer>(&self, rule: O) -> Result<ShardedOptimizer<O>> {
        self.optimizer_with(rule, |_| ParamGroup::default())
    }

    /// The same with parameter groups: `assign` says for each trainable parameter which group it is in, by its
    /// name, shape or attributes, and so what of the rule's settings is different for it. It must say the same
    /// on all ranks, which the first step checks. The step is still one pass over the flat shards.
    ///
    /// # Errors
    /// If settings are out of range, the rule does not know what a group changes, or two groups of one name
    /// differ.
    ///
    /// ```
    /// use fsdp_runtime::optim::{AdamW, ParamGroup};
    /// use fsdp_runtime::{FullyShard, Param, launch};
    ///
    /// launch::local(2, |world| -> fsdp_runtime::Result<()> {
    ///     let affine = (Param::new((8, 8)), Param::new(8));
    ///     let model = affine.fully_shard(&world.data_parallel_mesh())?;
    ///     let optimizer = model.optimizer_with(AdamW::default(), |spec| match spec.shape.len() {
    ///         0 | 1 => ParamGroup::new("vectors").weight_decay(0.0).lr_factor(2.0),
    ///         _ => ParamGroup::default(),
    ///     })?;
    ///     let listed = "default:\n  0\nvectors (learning rate x 2, weight decay 0):\n  1\n";
    ///     assert_eq!(optimizer.param_groups().to_string(), listed);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
    /// ```
    pub fn optimizer_with<O: Optimizer>(
        &self,
        rule: O,
        assign: impl FnMut(&ParamSpec) -> ParamGroup,
    ) -> Result<ShardedOptimizer<O>> {
        let groups = ParamGroups::new(&self.engine().ctx.layout, assign)?;
        ShardedOptimizer::new(&self.engine().ctx, rule, groups, StateLayout::Shard, |_| true)
    }
}

impl<O: Optimizer> ShardedOptimizer<O> {
    /// An optimizer of the parameters for which `updates` says so.
    pub(crate) fn new(
        ctx: &Ctx,
        rule: O,
        groups: ParamGroups,
        layout: StateLayout,
        updates: impl Fn(ParamId) -> bool,
    ) -> Result<Self> {
        rule.validate()?;
        let mut all_parts = Vec::with_capacity(ctx.resources.buckets.len());
        let mut states = Vec::with_capacity(ctx.resources.buckets.len());
        let mut updated = Vec::new();
        for bucket in &ctx.resources.buckets {
            let mut parts: Vec<Part> = Vec::new();
            let mut len = 0;
            let trainable = bucket.layout.key.requires_grad;
            let items = bucket.layout.items.iter().map(|item| (ParamId::new(item.param), item));
            for (param, item) in items.filter(|(param, _)| trainable && updates(*param)) {
                // On every rank, whether or not it holds a part.
                rule.check_overrides(groups.of(param).overrides())?;
                updated.push(param);
                let range = bucket.owned_of(&item.range());
                if range.is_empty() {
                    continue;
                }
                let state = if layout == StateLayout::Shard { range.start - bucket.owned.start } else { len };
                len += range.len();
                parts.push(Part { param, range, state });
            }
            if layout == StateLayout::Shard {
                len = bucket.owned.len();
            }
            let buffers = if trainable { rule.state_names().len() } else { 0 };
            // SAFETY: the optimizer keeps it, and all calls that use it borrow the optimizer: those that write it mutably.
            // They use it on the compute stream, or here when that has passed all work on it.
            let state = |_| unsafe { ctx.account().allocate(Category::OptimizerState, Dtype::F32, len) };
            states.push((0..buffers).map(state).collect::<std::result::Result<_, _>>()?);
            all_parts.push(parts);
        }
        let counts = StepCounts { steps: 0, unit_steps: vec![0; ctx.resources.units.len()].into() };
        Ok(ShardedOptimizer {
            rule,
            engine: ctx.id,
            groups,
            states: states.into(),
            state_layout: layout,
            parts: all_parts.into(),
            updated,
            counts,
            begun: false,
        })
    }

    /// The update rule.
    pub fn rule(&self) -> &O {
        &self.rule
    }

    /// Sets the learning rate of the steps to come. The same on all ranks.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.rule.set_learning_rate(learning_rate);
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.rule.learning_rate()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.counts.steps
    }

    /// The parameter groups, and which parameter is in which.
    pub fn param_groups(&self) -> &ParamGroups {
        &self.groups
    }

    /// Updates this rank's shard from the reduced gradients, installs the new weights, and begins the next
    /// step with no gradients.
    ///
    /// Units that had no backward since the last step keep their weights and state, and for them the step does
    /// not count. A parameter without gradient in a unit that had one has a zero gradient.
    ///
    /// Returns whether the step was taken: with [`NonFinite::SkipStep`](crate::engine::NonFinite::SkipStep) one whose gradients are
    /// not finite is skipped, on all ranks.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the optimizer was made by another model, if there was no backward since the last step, if gradients are known
    /// not to be finite ([`NonFinite::Error`](crate::engine::NonFinite::Error)), if a setting is out of range or (in the first step)
    /// the ranks' rules, their settings or parameter groups differ, and those of the reductions; with
    /// `strict_gradients`, in the first step, if a trainable parameter got no gradient on any rank.
    pub fn step<M>(&mut self, model: &mut Fsdp<M>) -> Result<bool> {
        let engine = &**model.engine();
        let Some(due) = self.begin(engine, Vec::new())? else { return Ok(false) };
        self.update(&engine.ctx, &due)?;
        due.finish(&engine.ctx, &mut engine.step())?;
        Ok(true)
    }

    /// Checks that a step can be taken, waits for the gradients, and counts the step; `None` if it is to be skipped. In the
    /// first step ranks compare the lines of `more`, too.
    pub(crate) fn begin(&mut self, engine: &Engine, more: Vec<String>) -> Result<Option<DueStep>> {
        let ctx = &engine.ctx;
        self.check(ctx)?;
        in_backward::refuse(ctx, "a step after it")?;
        {
            let step = &mut engine.step();
            step.check_has_backward(ctx)?;
            unitless::report(ctx, step)?;
            gradients::finish(ctx, step)?;
            if !self.begun {
                self.agree(ctx, step, more)?;
                whole::report_missing_gradients(ctx, step)?;
            }
        }
        if !grad_norm::may_step(engine)? {
            return Ok(None);
        }
        let span = ctx.begin_span("optimizer", &"optimizer".into());
        let step = &mut engine.step();
        let (grad_scale, with_gradient) = (step.gradients.factors.scale, step.with_gradient());
        Ok(Some(self.due(ctx, step, grad_scale, with_gradient, span)))
    }

    /// Counts the step, also for the units that have gradients in it, and lets the ranks compare it.
    pub(crate) fn due(
        &mut self,
        ctx: &Ctx,
        step: &mut Step,
        grad_scale: f32,
        with_gradient: Table<UnitId, bool>,
        span: Begun,
    ) -> DueStep {
        self.begun = true;
        self.counts.steps += 1;
        for (steps, with_gradient) in self.counts.unit_steps.iter_mut().zip(&with_gradient) {
            *steps += u64::from(*with_gradient);
        }
        let units = ctx.resources.units.iter().zip(&with_gradient);
        let units = units.filter(|(unit, with)| **with && !unit.buckets.is_empty()).count();
        let (number, rule) = (self.counts.steps, self.rule.describe());
        let scaled = format!("with gradients in {units} units scaled by {grad_scale}");
        // No collective tells of it.
        step.note_event(ctx, format!("after step {number} by {rule}, {scaled}"));
        DueStep { at: StepInfo { step: number, grad_scale }, with_gradient, span }
    }

    pub(crate) fn check(&self, ctx: &Ctx) -> Result<()> {
        if ctx.id != self.engine {
            return Err(Error::Usage("this optimizer was made by another model's `optimizer(..)`".into()));
        }
        Ok(self.rule.validate()?)
    }

    /// Makes sure that all ranks have the same rule, settings and parameter groups.
    pub(crate) fn agree(&self, ctx: &Ctx, step: &mut Locked<'_>, more: Vec<String>) -> Result<()> {
        let lines = std::iter::once(self.rule.describe()).chain(self.groups.fingerprint());
        agree(ctx, step, ("optimizer", Phase::Optimizer), &lines.chain(more).collect::<Vec<_>>())
    }

    /// Runs the rule over this rank's parts.
    pub(crate) fn update(&self, ctx: &Ctx, due: &DueStep) -> Result<(), CommError> {
        for (id, bucket) in ctx.resources.buckets.entries() {
            let unit = UnitId::of(&bucket.layout);
            if let Some(grads) = &bucket.main_grad
                && due.with_gradient[unit]
            {
                let at = StepInfo { step: self.counts.unit_steps[unit], ..due.at };
                // SAFETY: `begin`, without which there is no `DueStep`, has waited for all reductions and given up all that was
                // gathered (`finish_grad_sync`), and has the model and the optimizer borrowed mutably since.
                unsafe { self.update_bucket(ctx, at, id, grads.data(), grads.held().start)? };
            }
        }
        Ok(())
    }

    /// Runs the rule over this rank's parts of one bucket. `grads` begins with element `start` of the bucket.
    ///
    /// # Safety
    /// In the order of the compute stream, reductions of the bucket are done, its weights are not being gathered, and no
    /// tensor shows them; no other handle of the optimizer is in use.
    pub(crate) unsafe fn update_bucket(
        &self,
        ctx: &Ctx,
        at: StepInfo,
        bucket: BucketId,
        grads: &Slice,
        start: usize,
    ) -> Result<(), CommError> {
        if let Some(kernels) = ctx.backend.kernels()
            && self.update_by_kernel(ctx, kernels, at, bucket, grads, start)?
        {
            return Ok(());
        }
        let (weights, backend) = (ctx.resources.buckets[bucket].optimizer_weight(), &*ctx.backend);
        for Part { param, range, state } in &self.parts[bucket] {
            let part = weights.part(range.clone());
            let grad = grads.range(range.start - start..range.end - start);
            let held = *state..*state + range.len();
            let states: Vec<Slice> =
                self.states[bucket].iter().map(|state| state.range(held.clone())).collect();
            let decay = !ctx.spec(*param).no_decay;
            let overrides = *self.groups.of(*param).overrides();
            // SAFETY: by the caller's promise this thread is the only user of the shards and of the states; weights,
            // gradients and states are different buffers, allocated each for itself.
            unsafe {
                update_anywhere(backend, &part, |weights| {
                    read_anywhere(backend, &grad, |grads| {
                        update_all_anywhere(backend, &states, |states| {
                            let segment = &mut Segment { weights, grads, states, decay, overrides };
                            self.rule.update(at, segment);
                        })
                    })
                })???;
            }
        }
        Ok(())
    }

    /// The same by kernels of the device, if the rule is one that it has kernels for.
    fn update_by_kernel(
        &self,
        ctx: &Ctx,
        kernels: &dyn Kernels,
        at: StepInfo,
        bucket: BucketId,
        grads: &Slice,
        start: usize,
    ) -> Result<bool, CommError> {
        let [exp_avg, exp_avg_sq] = self.states[bucket].as_slice() else { return Ok(false) };
        let buffers = &ctx.resources.buckets[bucket];
        let mut runs = Vec::with_capacity(self.parts[bucket].len());
        for Part { param, range, state } in &self.parts[bucket] {
            let decay = !ctx.spec(*param).no_decay;
            let Some(KernelUpdate::AdamW(step)) =
                self.rule.kernel_update(at, decay, *self.groups.of(*param).overrides())
            else {
                return Ok(false);
            };
            runs.push((range.clone(), *state, step));
        }
        let update = |range: &Range<usize>, states: Range<usize>, runs: &[AdamWRun]| {
            let (weights, grads) = (
                buffers.optimizer_weight().part(range.clone()),
                grads.range(range.start - start..range.end - start),
            );
            let moments = [&exp_avg.range(states.clone()), &exp_avg_sq.range(states)];
            kernels.adamw(runs, at.grad_scale, &weights, &grads, moments)
        };
        match self.state_layout {
            StateLayout::Shard => {
                // States are where the weights are.
                let run = |(range, state, step): (Range<usize>, usize, AdamWScalars)| AdamWRun {
                    elements: state..state + range.len(),
                    step,
                };
                let runs: Vec<AdamWRun> = runs.into_iter().map(run).collect();
                update(&buffers.owned, 0..buffers.owned.len(), &runs)?;
            }
            StateLayout::Compact => {
                for (range, state, step) in runs {
                    let len = range.len();
                    update(&range, state..state + len, &[AdamWRun { elements: 0..len, step }])?;
                }
            }
        }
        Ok(true)
    }
}

/// A step that has begun, which is over with [`DueStep::finish`]: what its updates have in common.
pub(crate) struct DueStep {
    pub at: StepInfo,
    /// The units that had a backward since the last step.
    pub with_gradient: Table<UnitId, bool>,
    pub span: Begun,
}

impl DueStep {
    /// Installs the new weights, and begins the next step with no gradients.
    pub(crate) fn finish(self, ctx: &Ctx, step: &mut Step) -> Result<()> {
        whole::install_optimized_model_weights(ctx, step)?;
        step.finish();
        ctx.end_span(self.span);
        Ok(())
    }
}
