//! Rules that need a parameter whole.

use super::{OptimError, Overrides};
use crate::spec::ParamSpec;

/// A whole parameter, as its owner updates it. All slices are row-major and have [`ParamSpec::numel`] elements.
#[derive(Debug)]
pub struct WholeParam<'a> {
    /// Name, shape and attributes. Under tensor parallelism the shape is that of this rank's part.
    pub spec: &'a ParamSpec,
    /// Weights, updated in place: the main weights where the model keeps them.
    pub weights: &'a mut [f32],
    /// Gradient: reduced over the ranks, summed over microbatches, clipped.
    pub grads: &'a [f32],
    /// State buffers in the order of [`OwnerRule::state_names`]; all zero before the first step.
    pub states: Vec<&'a mut [f32]>,
    /// Learning rate, with the factor of the parameter's group.
    pub lr: f64,
    /// What the parameter's group changes.
    pub overrides: Overrides,
}

impl WholeParam<'_> {
    /// The parameter as a matrix: the first dim, and the product of the others.
    pub fn rows_and_cols(&self) -> (usize, usize) {
        let rows = self.spec.shape.first().copied().unwrap_or(1);
        (rows, self.spec.shape.iter().skip(1).product())
    }
}

/// A rule that updates a parameter as a whole, on one rank: its owner. See [`Muon`](super::Muon) for one, and
/// [`OwnerFn`] to make one from a function.
pub trait OwnerRule: Send {
    /// Name, as in checkpoints and reports.
    fn name(&self) -> &'static str;

    /// Names of the f32 state buffers. Each has one element for each element of the parameter, on its owner.
    fn state_names(&self) -> &'static [&'static str];

    /// Whether the rule updates this parameter. The same on all ranks.
    fn wants(&self, spec: &ParamSpec) -> bool;

    /// Work of an update, in any unit: owners are chosen so that ranks have about the same.
    fn cost(&self, spec: &ParamSpec) -> u64 {
        spec.numel() as u64
    }

    /// Updates weights and states of one parameter; `step` counts from 1. Called once a parameter and step, on
    /// the owner only.
    ///
    /// # Errors
    /// Whatever keeps the rule from it; the step then fails on all ranks.
    fn update(&mut self, step: u64, param: &mut WholeParam<'_>) -> Result<(), OptimError>;

    /// Learning rate of the next step.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate of the next step.
    fn set_learning_rate(&mut self, lr: f64);

    /// Checks the settings.
    ///
    /// # Errors
    /// If one is out of range; names it.
    fn validate(&self) -> Result<(), OptimError>;

    /// Checks what a parameter group changes of the settings.
    ///
    /// # Errors
    /// If the rule has no such setting, or the value is out of range; names it.
    fn check_overrides(&self, overrides: &Overrides) -> Result<(), OptimError>;
}

type Wants = Box<dyn Fn(&ParamSpec) -> bool + Send>;
type Cost = Box<dyn Fn(&ParamSpec) -> u64 + Send>;

/// An [`OwnerRule`] made of a function.
///
/// ```
/// use fsdp_runtime::optim::{OwnerFn, OwnerRule, WholeParam};
///
/// // Sign descent scaled by the mean size of a whole gradient.
/// let rule = OwnerFn::new(|_step, param: &mut WholeParam<'_>| {
///     let mean = param.grads.iter().map(|g| g.abs()).sum::<f32>() / param.grads.len() as f32;
///     for (w, g) in param.weights.iter_mut().zip(param.grads) {
///         *w -= param.lr as f32 * mean * g.signum();
///     }
///     Ok(())
/// })
/// .lr(0.1)
/// .wants(|spec| spec.shape.len() == 2);
/// assert_eq!(rule.learning_rate(), 0.1);
/// ```
pub struct OwnerFn<F> {
    update: F,
    states: &'static [&'static str],
    wants: Wants,
    cost: Cost,
    lr: f64,
}

impl<F> OwnerFn<F>
where
    F: FnMut(u64, &mut WholeParam<'_>) -> Result<(), OptimError> + Send,
{
    /// A rule that calls `update(step, parameter)` for every trainable parameter, with learning rate 1e-3 and no
    /// state.
    pub fn new(update: F) -> Self {
        let cost = |spec: &ParamSpec| spec.numel() as u64;
        OwnerFn { update, states: &[], wants: Box::new(|_| true), cost: Box::new(cost), lr: 1e-3 }
    }

    /// Sets the learning rate, which the function sees in [`WholeParam::lr`].
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Asks for f32 state buffers.
    pub fn states(mut self, names: &'static [&'static str]) -> Self {
        self.states = names;
        self
    }

    /// Restricts the rule to some parameters; the others are left to the element-wise rule.
    pub fn wants(mut self, wants: impl Fn(&ParamSpec) -> bool + Send + 'static) -> Self {
        self.wants = Box::new(wants);
        self
    }

    /// Sets the work of an update, by which owners are chosen; by default the number of elements.
    pub fn cost(mut self, cost: impl Fn(&ParamSpec) -> u64 + Send + 'static) -> Self {
        self.cost = Box::new(cost);
        self
    }
}

impl<F> std::fmt::Debug for OwnerFn<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "OwnerFn(lr {}, states {:?})", self.lr, self.states)
    }
}

impl<F> OwnerRule for OwnerFn<F>
where
    F: FnMut(u64, &mut WholeParam<'_>) -> Result<(), OptimError> + Send,
{
    fn name(&self) -> &'static str {
        "owner function"
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.states
    }

    fn wants(&self, spec: &ParamSpec) -> bool {
        (self.wants)(spec)
    }

    fn cost(&self, spec: &ParamSpec) -> u64 {
        (self.cost)(spec)
    }

    fn update(&mut self, step: u64, param: &mut WholeParam<'_>) -> Result<(), OptimError> {
        (self.update)(step, param)
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn validate(&self) -> Result<(), OptimError> {
        super::Range { optimizer: self.name() }.at_least_zero("lr", self.lr)
    }

    /// All are in range: the function sees them.
    fn check_overrides(&self, overrides: &Overrides) -> Result<(), OptimError> {
        overrides.validate(self.name())
    }
}
