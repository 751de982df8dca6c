//! Parameter groups: settings of the rule that differ from parameter to parameter.

use std::fmt;

use super::{OptimError, Optimizer, Range};

/// What a [`ParamGroup`] changes of a rule's settings, as the rule sees it in
/// [`Segment::overrides`](super::Segment::overrides). The default changes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overrides {
    /// Factor of the rule's learning rate, so that a schedule sets one rate for all groups.
    pub lr_factor: f64,
    /// Weight decay instead of the rule's.
    pub weight_decay: Option<f64>,
    /// Decay rates of the first and second moment instead of the rule's.
    pub betas: Option<(f64, f64)>,
}

impl Default for Overrides {
    fn default() -> Self {
        Overrides { lr_factor: 1.0, weight_decay: None, betas: None }
    }
}

impl Overrides {
    /// Checks the values, for [`Optimizer::check_overrides`] of a rule that knows all of them.
    ///
    /// # Errors
    /// If one is out of range; names it.
    pub fn validate(&self, optimizer: &'static str) -> Result<(), OptimError> {
        let range = Range { optimizer };
        range.at_least_zero("lr factor", self.lr_factor)?;
        if let Some(weight_decay) = self.weight_decay {
            range.at_least_zero("weight decay", weight_decay)?;
        }
        if let Some((beta1, beta2)) = self.betas {
            range.below_one("beta1", beta1)?;
            range.below_one("beta2", beta2)?;
        }
        Ok(())
    }
}

/// A named set of settings for the parameters that belong to it: what `param_groups` is in PyTorch.
///
/// ```
/// use fsdp_runtime::optim::ParamGroup;
///
/// let norms = ParamGroup::new("norms").lr_factor(0.5).weight_decay(0.0);
/// assert_eq!(norms.to_string(), "norms (learning rate x 0.5, weight decay 0)");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct ParamGroup {
    name: String,
    overrides: Overrides,
    element_wise: bool,
}

impl Default for ParamGroup {
    /// The group `default`, which changes nothing.
    fn default() -> Self {
        ParamGroup::new("default")
    }
}

impl ParamGroup {
    /// A group that changes nothing yet. Parameters with the same group name must have the same settings.
    pub fn new(name: impl Into<String>) -> Self {
        ParamGroup { name: name.into(), overrides: Overrides::default(), element_wise: false }
    }

    /// Multiplies the rule's learning rate.
    pub fn lr_factor(mut self, factor: f64) -> Self {
        self.overrides.lr_factor = factor;
        self
    }

    /// Replaces the rule's weight decay. Parameters marked `no_decay` have none all the same.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.overrides.weight_decay = Some(weight_decay);
        self
    }

    /// Replaces the rule's decay rates of the first and second moment.
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        self.overrides.betas = Some((beta1, beta2));
        self
    }

    /// Leaves these parameters to the element-wise rule of an optimizer that has a rule for whole parameters
    /// too: embeddings and the output layer beside Muon, for instance.
    pub fn element_wise(mut self) -> Self {
        self.element_wise = true;
        self
    }

    /// Name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it changes.
    pub fn overrides(&self) -> &Overrides {
        &self.overrides
    }

    /// See [`ParamGroup::element_wise`].
    pub fn is_element_wise(&self) -> bool {
        self.element_wise
    }
}

impl fmt::Display for ParamGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Overrides { lr_factor, weight_decay, betas } = self.overrides;
        let mut changes = Vec::new();
        if lr_factor != 1.0 {
            changes.push(format!("learning rate x {lr_factor}"));
        }
        if let Some(weight_decay) = weight_decay {
            changes.push(format!("weight decay {weight_decay}"));
        }
        if let Some((beta1, beta2)) = betas {
            changes.push(format!("betas {beta1}, {beta2}"));
        }
        if self.element_wise {
            changes.push("element-wise".into());
        }
        f.write_str(&self.name)?;
        if changes.is_empty() { Ok(()) } else { write!(f, " ({})", changes.join(", ")) }
    }
}

/// [`Optimizer::check_overrides`] of a rule that knows none: every override is refused.
pub(super) fn refuse_overrides(
    rule: &(impl Optimizer + ?Sized),
    overrides: &Overrides,
) -> Result<(), OptimError> {
    let refuse = |setting| Err(OptimError::Unsupported { optimizer: rule.name(), setting });
    match overrides {
        Overrides { weight_decay: Some(_), .. } => refuse("weight decay"),
        Overrides { betas: Some(_), .. } => refuse("betas"),
        Overrides { lr_factor, .. } if *lr_factor != 1.0 => refuse("learning-rate factor"),
        _ => Ok(()),
    }
}
