//! Optimizers, as checkpoints see them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::held::{self, HeldState};
use super::index::MAX_STEPS;
use crate::engine::{Engine, Id, OwnerOptimizer, ShardedOptimizer, StepCounts, Table, UnitId};
use crate::error::{Error, Result};
use crate::files::{brief, said};
use crate::optim::{Optimizer, OwnerRule};

mod sealed {
    pub trait Sealed {}
    impl<O: super::Optimizer> Sealed for super::ShardedOptimizer<O> {}
    impl<R: super::OwnerRule, O: super::Optimizer> Sealed for super::OwnerOptimizer<R, O> {}
}

/// A sharded model, for its optimizers.
#[derive(Clone, Copy)]
pub struct ModelRef<'a>(pub(crate) &'a Engine);

impl std::fmt::Debug for ModelRef<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelRef").finish_non_exhaustive()
    }
}

/// An optimizer whose state checkpoints hold: [`ShardedOptimizer`] and [`OwnerOptimizer`].
pub trait OptimizerState: sealed::Sealed {
    /// Fails if it is not this model's.
    #[doc(hidden)]
    fn check_model(&self, model: ModelRef<'_>) -> Result<()>;

    /// Its buffers.
    #[doc(hidden)]
    fn states(&self, model: ModelRef<'_>) -> Vec<HeldState>;

    /// Its counters and settings.
    #[doc(hidden)]
    fn value(&self, model: ModelRef<'_>) -> Value;

    /// Names of its rules.
    #[doc(hidden)]
    fn rules(&self) -> String;

    /// Whether [`OptimizerState::set_value`] would take it.
    #[doc(hidden)]
    fn check_value(&self, value: &Value) -> Result<(), Unfit>;

    /// Goes on from a value that was checked.
    #[doc(hidden)]
    fn set_value(&mut self, model: ModelRef<'_>, value: &Value);
}

/// Why an optimizer cannot go on from a value.
#[derive(Debug)]
pub enum Unfit {
    /// It is an optimizer's of these rules.
    OtherRules(String),
    /// It is none, and why.
    Malformed(String),
}

/// Names of the rule for elements, and of the one for whole parameters.
fn rules(rule: &str, owner_rule: Option<&str>) -> String {
    owner_rule.map_or_else(|| rule.to_owned(), |owner| format!("{owner} with {rule}"))
}

/// Counters and settings of an optimizer.
#[derive(Debug, Serialize, Deserialize)]
struct OptimizerValue {
    /// Name of the rule.
    rule: String,
    /// Name of the rule for whole parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_rule: Option<String>,
    learning_rate: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner_learning_rate: Option<f64>,
    /// The rule's settings in words; for information only.
    settings: String,
    steps: u64,
    /// Parameters whose unit had gradients in another number of steps.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    param_steps: std::collections::BTreeMap<String, u64>,
}

impl OptimizerValue {
    fn new<O: Optimizer>(engine: &Engine, optimizer: &ShardedOptimizer<O>) -> Self {
        let StepCounts { steps, unit_steps } = optimizer.counts.clone();
        let params = engine.ctx.layout.params.iter().filter(|spec| spec.key.requires_grad);
        let counts = params.map(|spec| (spec.name.clone(), unit_steps[UnitId::new(spec.key.unit)]));
        OptimizerValue {
            rule: optimizer.rule().name().into(),
            owner_rule: None,
            learning_rate: optimizer.learning_rate(),
            owner_learning_rate: None,
            settings: optimizer.rule().describe(),
            steps,
            param_steps: counts.filter(|(_, count)| *count != steps).collect(),
        }
    }

    /// The value of an optimizer of these rules.
    fn read(value: &Value, expected: &str) -> Result<Self, Unfit> {
        let read: OptimizerValue = serde_json::from_value(value.clone()).map_err(|error| {
            Unfit::Malformed(format!("its value `optimizer` is not an optimizer's: {}", said(error)))
        })?;
        let found = rules(&read.rule, read.owner_rule.as_deref());
        if found != expected {
            return Err(Unfit::OtherRules(brief(&found)));
        }
        read.check().map_err(Unfit::Malformed)
    }

    /// What can be true.
    fn check(self) -> Result<Self, String> {
        let rates = [Some(self.learning_rate), self.owner_learning_rate];
        if let Some(rate) = rates.into_iter().flatten().find(|rate| !rate.is_finite() || *rate < 0.0) {
            return Err(format!(
                "its optimizer has a learning rate of {rate}, expected a finite one of at least 0"
            ));
        }
        let steps = self.param_steps.values().chain([&self.steps]).max();
        if let Some(steps) = steps.filter(|steps| **steps > MAX_STEPS) {
            return Err(format!("its optimizer has taken {steps} steps, more than {MAX_STEPS}"));
        }
        Ok(self)
    }

    fn counts(&self, engine: &Engine) -> StepCounts {
        let mut unit_steps: Table<UnitId, u64> = vec![self.steps; engine.ctx.resources.units.len()].into();
        for spec in engine.ctx.layout.params.iter().filter(|spec| spec.key.requires_grad) {
            if let Some(steps) = self.param_steps.get(&spec.name) {
                unit_steps[UnitId::new(spec.key.unit)] = *steps;
            }
        }
        StepCounts { steps: self.steps, unit_steps }
    }
}

fn to_value(value: OptimizerValue) -> Value {
    serde_json::to_value(value).expect("a struct of names and numbers is JSON")
}

impl<O: Optimizer> OptimizerState for ShardedOptimizer<O> {
    fn check_model(&self, model: ModelRef<'_>) -> Result<()> {
        self.check(&model.0.ctx)
    }

    fn states(&self, model: ModelRef<'_>) -> Vec<HeldState> {
        held::states(self, &model.0.ctx)
    }

    fn value(&self, model: ModelRef<'_>) -> Value {
        to_value(OptimizerValue::new(model.0, self))
    }

    fn rules(&self) -> String {
        rules(self.rule().name(), None)
    }

    fn check_value(&self, value: &Value) -> Result<(), Unfit> {
        OptimizerValue::read(value, &self.rules()).map(drop)
    }

    fn set_value(&mut self, model: ModelRef<'_>, value: &Value) {
        if let Ok(read) = OptimizerValue::read(value, &self.rules()) {
            self.counts = read.counts(model.0);
            self.set_learning_rate(read.learning_rate);
        }
    }
}

impl<R: OwnerRule, O: Optimizer> OptimizerState for OwnerOptimizer<R, O> {
    fn check_model(&self, model: ModelRef<'_>) -> Result<()> {
        self.rest.check(&model.0.ctx)
    }

    fn states(&self, model: ModelRef<'_>) -> Vec<HeldState> {
        let mut states = held::states(&self.rest, &model.0.ctx);
        for owned in held::owner_states(self) {
            // One section for states of one name.
            match states.iter_mut().find(|state| state.name == owned.name) {
                Some(state) => {
                    state.params.extend(owned.params);
                    state.pieces.extend(owned.pieces);
                }
                None => states.push(owned),
            }
        }
        states
    }

    fn value(&self, model: ModelRef<'_>) -> Value {
        to_value(OptimizerValue {
            owner_rule: Some(self.rule().name().into()),
            owner_learning_rate: Some(self.rule().learning_rate()),
            ..OptimizerValue::new(model.0, &self.rest)
        })
    }

    fn rules(&self) -> String {
        rules(self.rest().name(), Some(self.rule().name()))
    }

    fn check_value(&self, value: &Value) -> Result<(), Unfit> {
        OptimizerValue::read(value, &self.rules()).map(drop)
    }

    fn set_value(&mut self, model: ModelRef<'_>, value: &Value) {
        if let Ok(read) = OptimizerValue::read(value, &self.rules()) {
            self.rest.counts = read.counts(model.0);
            self.set_rest_learning_rate(read.learning_rate);
            if let Some(learning_rate) = read.owner_learning_rate {
                self.set_learning_rate(learning_rate);
            }
        }
    }
}

impl From<super::CheckpointError> for Error {
    fn from(error: super::CheckpointError) -> Self {
        Error::Checkpoint(std::sync::Arc::new(error))
    }
}
