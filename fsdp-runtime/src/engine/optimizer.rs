//! An optimizer over the shards of a model.

use crate::comm::Phase;
use crate::device::Slice;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::optim::{Optimizer, Segment, StepInfo};
use crate::spec::Dtype;

use super::fsdp::Fsdp;

/// Updates the part of each parameter that this rank owns. Made by [`Fsdp::optimizer`], so it cannot exist
/// before the model is sharded.
#[derive(Debug)]
pub struct ShardedOptimizer<O> {
    rule: O,
    engine: usize,
    /// State buffers of each group, none for frozen ones.
    states: Vec<Vec<Slice>>,
    /// Steps taken.
    steps: u64,
}

impl<M> Fsdp<M> {
    /// An optimizer with `rule` whose state is sharded like the parameters and starts at zero. Nothing is
    /// communicated.
    ///
    /// # Errors
    /// If the rule's settings are out of range.
    pub fn optimizer<O: Optimizer>(&self, rule: O) -> Result<ShardedOptimizer<O>> {
        rule.validate()?;
        let engine = self.engine();
        let state = |group: &crate::buffer::GroupBuffers| {
            let len = group.owned.len();
            let buffers = if group.layout.key.requires_grad { rule.state_names().len() } else { 0 };
            (0..buffers).map(|_| engine.account.allocate(Category::OptimizerState, Dtype::F32, len)).collect()
        };
        let states = engine.groups.iter().map(state).collect();
        Ok(ShardedOptimizer { rule, engine: engine.id(), states, steps: 0 })
    }
}

impl<O: Optimizer> ShardedOptimizer<O> {
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
        self.steps
    }

    /// Updates this rank's shard from the reduced gradients, installs the new weights, and begins the next
    /// step with no gradients.
    ///
    /// Units that had no backward since the last step keep their weights and state. A parameter without
    /// gradient in a unit that had one has a zero gradient.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the optimizer was made by another model, if a setting is out of range or (in the first step) the ranks'
    /// rules or their settings differ, and those of the reductions; with `strict_gradients`, in
    /// the first step, if a trainable parameter got no gradient on any rank.
    pub fn step<M>(&mut self, model: &mut Fsdp<M>) -> Result<()> {
        let engine = model.engine().clone();
        if engine.id() != self.engine {
            return Err(Error::Usage("this optimizer was made by another model's `optimizer(..)`".into()));
        }
        self.rule.validate()?;
        engine.finish_grad_sync()?;
        if self.steps == 0 {
            engine.agree("optimizer", Phase::Optimizer, &[self.rule.describe()])?;
            engine.report_missing_gradients()?;
        }
        self.steps += 1;
        let start = crate::trace::now();
        let (with_gradient, grad_scale): (Vec<bool>, f32) = {
            let state = engine.state.lock();
            ((0..engine.units.len()).map(|unit| state.reduce.has_gradient(unit)).collect(), state.grad_scale)
        };
        let at = StepInfo { step: self.steps, grad_scale };
        let with = engine.units.iter().zip(&with_gradient);
        let units = with.filter(|(unit, with)| **with && !unit.groups.is_empty()).count();
        engine.note_event(format!(
            "after step {} by {}, with gradients in {units} units scaled by {grad_scale}",
            self.steps,
            self.rule.describe()
        ));
        for (group, states) in engine.groups.iter().zip(&self.states) {
            let Some(grads) = group.main_grad.as_ref().filter(|_| with_gradient[group.layout.key.unit])
            else {
                continue;
            };
            let weights = group.optimizer_weight();
            let extent = group.owned.clone();
            for item in &group.layout.items {
                let begin = item.start.max(extent.start);
                let end = (item.start + item.len).min(extent.end);
                if begin >= end {
                    continue;
                }
                let part = weights.part(begin..end);
                let grad = grads.part(begin..end);
                let states: Vec<Slice> = states
                    .iter()
                    .map(|state| state.range(begin - extent.start..end - extent.start))
                    .collect();
                let mut segment = Segment {
                    // SAFETY: reductions are done and no weights are gathered (`finish_grad_sync`), so this
                    // thread is the only user of the shards; weights, gradients and states are different
                    // buffers.
                    weights: unsafe { part.as_mut_slice::<f32>() },
                    // SAFETY: as above.
                    grads: unsafe { grad.as_slice::<f32>() },
                    // SAFETY: as above.
                    states: states.iter().map(|state| unsafe { state.as_mut_slice::<f32>() }).collect(),
                    decay: !engine.layout.params[item.param].no_decay,
                };
                self.rule.update(at, &mut segment);
            }
        }
        engine.install_optimized_model_weights()?;
        let mut state = engine.state.lock();
        state.reduce.clear();
        state.received.fill(false);
        state.tokens = Default::default();
        state.grad_scale = 1.0;
        state.step += 1;
        drop(state);
        engine.tracer.compute("optimizer", &engine.tag("optimizer", Phase::Optimizer).unit, start);
        Ok(())
    }
}
