//! Dynamic loss scaling, for gradients in f16.

use serde::{Deserialize, Serialize};

use super::{OptimError, Range};

/// Dynamic loss scaling (Micikevicius et al., 2018), for f16: the loss is multiplied by a scale before the
/// backward, so that small gradients do not vanish, and the step divides the gradients by it again.
///
/// Where a gradient is infinite or NaN on any rank, all ranks skip the step and the scale is halved; after 2000
/// steps without one it is doubled. Every rank has its own scaler with the same settings. bf16 has the exponents
/// of f32 and needs none.
///
/// The loop is that of PyTorch's `GradScaler`, `update` being part of [`step`](LossScaler::step):
/// `scaler.scale(&loss)`, backward, if gradients are to be clipped [`unscale`](LossScaler::unscale) and
/// `model.clip_grad_norm(..)`, and `scaler.step(&mut optimizer, &mut model)`.
///
/// ```
/// use fsdp_runtime::optim::LossScaler;
///
/// let mut scaler = LossScaler::default().initial_scale(8.0).growth_interval(2);
/// let mut scales = Vec::new();
/// for all_finite in [true, true, false, true, true] {
///     scaler.update(all_finite);
///     scales.push(scaler.current_scale());
/// }
/// assert_eq!(scales, [8.0, 16.0, 8.0, 8.0, 16.0]);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct LossScaler {
    growth: f64,
    backoff: f64,
    interval: u64,
    min: f64,
    state: LossScalerState,
    /// The ranks' scales were compared.
    pub(crate) agreed: bool,
}

/// What a [`LossScaler`] has learnt: for checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// Factor of the loss.
    pub scale: f64,
    /// Steps taken since the scale has changed or a step was skipped.
    pub good_steps: u64,
    /// Steps skipped so far.
    pub skipped: u64,
}

impl Default for LossScaler {
    /// Starts at 2^16, doubles every 2000 steps, halves at a skipped step, but not below 1.
    fn default() -> Self {
        let state = LossScalerState { scale: 65536.0, good_steps: 0, skipped: 0 };
        LossScaler { growth: 2.0, backoff: 0.5, interval: 2000, min: 1.0, state, agreed: false }
    }
}

impl LossScaler {
    /// Sets the scale of the first step. Powers of 2 lose nothing.
    pub fn initial_scale(mut self, scale: f64) -> Self {
        self.state.scale = scale;
        self
    }

    /// Sets the factor of the scale after enough steps without overflow.
    pub fn growth(mut self, factor: f64) -> Self {
        self.growth = factor;
        self
    }

    /// Sets the factor of the scale after a skipped step.
    pub fn backoff(mut self, factor: f64) -> Self {
        self.backoff = factor;
        self
    }

    /// Sets how many steps in a row must be without overflow before the scale grows.
    pub fn growth_interval(mut self, steps: u64) -> Self {
        self.interval = steps;
        self
    }

    /// Sets the smallest scale. Steps that overflow there are skipped all the same.
    pub fn min_scale(mut self, scale: f64) -> Self {
        self.min = scale;
        self
    }

    /// The factor of the next loss.
    pub fn current_scale(&self) -> f64 {
        self.state.scale
    }

    /// What it has learnt.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Goes on from a state that [`LossScaler::state`] gave. The same on all ranks, which the next step checks.
    pub fn set_state(&mut self, state: LossScalerState) {
        self.state = state;
        self.agreed = false;
    }

    /// Notes whether the gradients of a step were all finite, and so whether it was taken, and sets the next
    /// scale. [`LossScaler::step`] does it.
    pub fn update(&mut self, all_finite: bool) {
        let state = &mut self.state;
        if !all_finite {
            state.skipped = state.skipped.saturating_add(1);
            state.good_steps = 0;
            state.scale = (state.scale * self.backoff).max(self.min);
            return;
        }
        state.good_steps = state.good_steps.saturating_add(1);
        if state.good_steps >= self.interval {
            state.good_steps = 0;
            let grown = state.scale * self.growth;
            // Losses are f32.
            if (grown as f32).is_finite() {
                state.scale = grown;
            }
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// If one is out of range; names it.
    pub fn validate(&self) -> Result<(), OptimError> {
        let range = Range { optimizer: "loss scaler" };
        let normal = |value: f64| (value as f32).is_normal() && value > 0.0;
        range.check("scale", "positive and finite in f32", self.state.scale, normal(self.state.scale))?;
        range.check("smallest scale", "positive and finite in f32", self.min, normal(self.min))?;
        range.check(
            "growth",
            "finite and at least 1",
            self.growth,
            self.growth.is_finite() && self.growth >= 1.0,
        )?;
        let backoff = self.backoff > 0.0 && self.backoff < 1.0;
        range.check("backoff", "above 0 and below 1", self.backoff, backoff)?;
        range.check("growth interval", "at least 1", self.interval as f64, self.interval >= 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_after_an_interval_without_overflow_and_backs_off_at_one() {
        let mut scaler = LossScaler::default();
        for step in 1..=4000 {
            assert_eq!(scaler.current_scale(), if step <= 2000 { 65536.0 } else { 131072.0 });
            scaler.update(true);
        }
        assert_eq!(scaler.state(), LossScalerState { scale: 262144.0, good_steps: 0, skipped: 0 });
        // An overflow begins the count anew.
        (0..1999).for_each(|_| scaler.update(true));
        scaler.update(false);
        assert_eq!(scaler.state(), LossScalerState { scale: 131072.0, good_steps: 0, skipped: 1 });
        (0..1999).for_each(|_| scaler.update(true));
        assert_eq!(scaler.current_scale(), 131072.0);
        scaler.update(true);
        assert_eq!(scaler.current_scale(), 262144.0);
    }

    #[test]
    fn stays_between_its_smallest_and_what_f32_can_hold() {
        let mut scaler = LossScaler::default().initial_scale(4.0).growth_interval(1);
        let mut scales = Vec::new();
        for _ in 0..4 {
            scaler.update(false);
            scales.push(scaler.current_scale());
        }
        assert_eq!(scales, [2.0, 1.0, 1.0, 1.0]);
        (0..200).for_each(|_| scaler.update(true));
        assert_eq!(scaler.current_scale(), 2f64.powi(127));
    }

    #[test]
    fn settings_out_of_range_are_named() {
        assert_eq!(LossScaler::default().validate(), Ok(()));
        let message = |scaler: LossScaler| scaler.validate().unwrap_err().to_string();
        let error = message(LossScaler::default().backoff(1.0));
        assert_eq!(error, "loss scaler: backoff must be above 0 and below 1, got 1");
        assert!(message(LossScaler::default().initial_scale(0.0)).contains("scale must be positive"));
        assert!(message(LossScaler::default().growth(0.5)).contains("growth"));
        assert!(message(LossScaler::default().growth_interval(0)).contains("interval"));
    }
}
