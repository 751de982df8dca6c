//! Optimizers, as checkpoints see them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::index::{MAX_STEPS, escaped};
use crate::engine::{Engine, HeldState, OwnerOptimizer, ShardedOptimizer, StepCounts};
use crate::error::{Error, Result};
use crate::optim::{Optimizer, OwnerRule};

mod sealed {
    pub trait Sealed {}
    impl<O: super::Optimizer> Sealed for super::ShardedOptimizer<O> {}
    impl<R: super::OwnerRule, O: super::Optimizer> Sealed for super::OwnerOptimizer<R, O> {}
}

/// A sharded model, for its optimizers.
#[derive(Clone, Copy)]
pub struct ModelRef<'a>(pub(crate) &'a Engine);

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

    /// Whether [`OptimizerState::set_value`] would take it.
    #[doc(hidden)]
    fn check_value(&self, value: &Value) -> Result<(), String>;

    /// Goes on from a value that was checked.
    #[doc(hidden)]
    fn set_value(&mut self, model: ModelRef<'_>, value: &Value);
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
        let StepCounts { steps, unit_steps } = optimizer.step_counts();
        let params = engine.layout.params.iter().filter(|spec| spec.key.requires_grad);
        let counts = params.map(|spec| (spec.name.clone(), unit_steps[spec.key.unit]));
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

    fn read(value: &Value, rule: &str, owner_rule: Option<&str>) -> Result<Self, String> {
        let read: OptimizerValue = serde_json::from_value(value.clone()).map_err(|error| {
            format!("its value `optimizer` is not an optimizer's: {}", escaped(&error.to_string()))
        })?;
        let describe = |rule: &str, owner: Option<&str>| match owner {
            Some(owner) => format!("{owner} with {rule}"),
            None => rule.to_owned(),
        };
        let (found, expected) =
            (describe(&read.rule, read.owner_rule.as_deref()), describe(rule, owner_rule));
        if found != expected {
            return Err(format!("its optimizer is {}, expected {expected}", escaped(&found)));
        }
        let rates = [Some(read.learning_rate), read.owner_learning_rate];
        if let Some(rate) = rates.into_iter().flatten().find(|rate| !rate.is_finite() || *rate < 0.0) {
            return Err(format!(
                "its optimizer has a learning rate of {rate}, expected a finite one of at least 0"
            ));
        }
        let steps = read.param_steps.values().chain([&read.steps]).max();
        if let Some(steps) = steps.filter(|steps| **steps > MAX_STEPS) {
            return Err(format!("its optimizer has taken {steps} steps, more than {MAX_STEPS}"));
        }
        Ok(read)
    }

    fn counts(&self, engine: &Engine) -> StepCounts {
        let mut unit_steps = vec![self.steps; engine.units.len()];
        for spec in engine.layout.params.iter().filter(|spec| spec.key.requires_grad) {
            if let Some(steps) = self.param_steps.get(&spec.name) {
                unit_steps[spec.key.unit] = *steps;
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
        self.check(model.0)
    }

    fn states(&self, model: ModelRef<'_>) -> Vec<HeldState> {
        self.held_states(model.0)
    }

    fn value(&self, model: ModelRef<'_>) -> Value {
        to_value(OptimizerValue::new(model.0, self))
    }

    fn check_value(&self, value: &Value) -> Result<(), String> {
        OptimizerValue::read(value, self.rule().name(), None).map(drop)
    }

    fn set_value(&mut self, model: ModelRef<'_>, value: &Value) {
        if let Ok(read) = OptimizerValue::read(value, self.rule().name(), None) {
            self.set_step_counts(read.counts(model.0));
            self.set_learning_rate(read.learning_rate);
        }
    }
}

impl<R: OwnerRule, O: Optimizer> OptimizerState for OwnerOptimizer<R, O> {
    fn check_model(&self, model: ModelRef<'_>) -> Result<()> {
        self.rest_optimizer().check(model.0)
    }

    fn states(&self, model: ModelRef<'_>) -> Vec<HeldState> {
        let mut states = self.rest_optimizer().held_states(model.0);
        for owned in self.held_owner_states() {
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
            ..OptimizerValue::new(model.0, self.rest_optimizer())
        })
    }

    fn check_value(&self, value: &Value) -> Result<(), String> {
        OptimizerValue::read(value, self.rest().name(), Some(self.rule().name())).map(drop)
    }

    fn set_value(&mut self, model: ModelRef<'_>, value: &Value) {
        if let Ok(read) = OptimizerValue::read(value, self.rest().name(), Some(self.rule().name())) {
            self.rest_optimizer_mut().set_step_counts(read.counts(model.0));
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
