//! Rules that need a parameter whole.

use super::{OptimError, Overrides};
use crate::layout::ModelLayout;
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

/// An owner for each parameter, by its number in the layout, that has a cost: bucket by bucket, the dearest parameter first, to the rank that
/// has the least work in the bucket, then overall.
pub(crate) fn choose_owners(
    layout: &ModelLayout,
    ranks: usize,
    cost: impl Fn(usize) -> Option<u64>,
) -> Vec<Option<usize>> {
    let mut owners = vec![None; layout.params.len()];
    let mut total = vec![0u64; ranks];
    for bucket in &layout.buckets {
        let params = bucket.items.iter().map(|item| item.param);
        let mut wanted: Vec<(u64, usize)> = params.filter_map(|param| Some((cost(param)?, param))).collect();
        wanted.sort_by_key(|&(cost, param)| (std::cmp::Reverse(cost), param));
        let mut load = vec![0u64; ranks];
        for (cost, param) in wanted {
            let owner = (0..ranks).min_by_key(|&rank| (load[rank], total[rank], rank)).expect("a rank");
            load[owner] = load[owner].saturating_add(cost);
            total[owner] = total[owner].saturating_add(cost);
            owners[param] = Some(owner);
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{LayoutOptions, ShardAlignment, UnitSpec};
    use crate::spec::{Dtype, GroupKey, ParamSpec};

    fn layout(units: &[&[usize]], ranks: usize) -> ModelLayout {
        let spec = |unit: usize, index: usize, n: usize| ParamSpec {
            name: format!("{unit}.{index}"),
            shape: vec![n],
            key: GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit },
            no_decay: false,
            tp: None,
            tp_parts: 1,
            shared: false,
            aliases: Vec::new(),
            fused: Vec::new(),
        };
        let of_unit = |(unit, params): (usize, &&[usize])| {
            params.iter().enumerate().map(|(index, &n)| spec(unit, index, n)).collect::<Vec<_>>()
        };
        let params = units.iter().enumerate().flat_map(of_unit).collect();
        let names: Vec<UnitSpec> = (0..units.len()).map(|unit| UnitSpec::new(unit.to_string())).collect();
        let options =
            LayoutOptions { ranks, outer: 1, alignment: ShardAlignment::Element, bucket_size: None };
        ModelLayout::build(params, &names, &options).unwrap()
    }

    fn owners(units: &[&[usize]], ranks: usize) -> Vec<Option<usize>> {
        let layout = layout(units, ranks);
        choose_owners(&layout, ranks, |param| Some(layout.params[param].numel() as u64))
    }

    #[test]
    fn the_dearest_parameter_goes_to_the_rank_with_the_least_work() {
        assert_eq!(owners(&[&[1, 3, 2]], 2), [Some(1), Some(0), Some(1)]);
        // Rank 0 has had the dear one of the first bucket: it gets the cheap one of the second.
        assert_eq!(owners(&[&[10, 1], &[10, 1]], 2), [Some(0), Some(1), Some(1), Some(0)]);
        assert_eq!(owners(&[&[5], &[5], &[5], &[5]], 2), [0, 1, 0, 1].map(Some));
    }

    #[test]
    fn parameters_without_cost_have_no_owner() {
        let layout = layout(&[&[4, 4]], 3);
        let owners = choose_owners(&layout, 3, |param| (param == 1).then_some(4));
        assert_eq!(owners, [None, Some(0)]);
    }
}
