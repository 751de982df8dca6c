//! Stochastic gradient descent.

use pulp::{Arch, Simd, WithSimd};

use super::{OptimError, Optimizer, Overrides, Range, Segment, StepInfo};

/// SGD with momentum and L2 weight decay.
///
/// With gradient `g`: `g += decay * w; b = momentum * b + g; w -= lr * b`, or, with Nesterov's momentum,
/// `w -= lr * (g + momentum * b)`. Without momentum there is no state. Elements are f32.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Sgd {
    lr: f64,
    momentum: f64,
    nesterov: bool,
    weight_decay: f64,
}

impl Default for Sgd {
    /// Learning rate 1e-3, no momentum, no weight decay.
    fn default() -> Self {
        Sgd { lr: 1e-3, momentum: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

impl Sgd {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets the share of the previous update that is kept; 0 for none.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Takes the gradient at the point where momentum leads. Needs momentum.
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
        self
    }

    /// Sets the weight decay, which acts on segments with [`Segment::decay`].
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
}

impl Optimizer for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn describe(&self) -> String {
        let Sgd { lr, momentum, nesterov, weight_decay } = self;
        format!(
            "optimizer sgd, learning rate {lr}, momentum {momentum}, nesterov {nesterov}, weight decay {weight_decay}"
        )
    }

    fn state_names(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn update(&self, at: StepInfo, segment: &mut Segment<'_>) {
        let Overrides { lr_factor, weight_decay, .. } = segment.overrides;
        let (lr, grad_scale) = ((self.lr * lr_factor) as f32, at.grad_scale);
        let decay = if segment.decay { weight_decay.unwrap_or(self.weight_decay) as f32 } else { 0.0 };
        let (w, g) = (&mut *segment.weights, segment.grads);
        match segment.states.as_mut_slice() {
            [] if self.momentum == 0.0 => Arch::new().dispatch(Plain { w, g, grad_scale, lr, decay }),
            [b] if self.momentum != 0.0 => {
                let momentum = self.momentum as f32;
                Arch::new().dispatch(Momentum {
                    w,
                    g,
                    b,
                    grad_scale,
                    lr,
                    decay,
                    momentum,
                    nesterov: self.nesterov,
                })
            }
            states => panic!("sgd has {} state buffers, got {}", self.state_names().len(), states.len()),
        }
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn validate(&self) -> Result<(), OptimError> {
        let range = Range { optimizer: self.name() };
        range.at_least_zero("lr", self.lr)?;
        range.below_one("momentum", self.momentum)?;
        let expected = "above 0 for Nesterov's momentum";
        range.check("momentum", expected, self.momentum, !self.nesterov || self.momentum > 0.0)?;
        range.at_least_zero("weight decay", self.weight_decay)
    }

    fn check_overrides(&self, overrides: &Overrides) -> Result<(), OptimError> {
        if overrides.betas.is_some() {
            return Err(OptimError::Unsupported { optimizer: self.name(), setting: "betas" });
        }
        overrides.validate(self.name())
    }
}

struct Plain<'a> {
    w: &'a mut [f32],
    g: &'a [f32],
    grad_scale: f32,
    lr: f32,
    decay: f32,
}

impl WithSimd for Plain<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        assert_eq!(self.g.len(), self.w.len(), "slices of a segment differ in length");
        for (w, &g) in self.w.iter_mut().zip(self.g) {
            *w -= self.lr * (g * self.grad_scale + self.decay * *w);
        }
    }
}

struct Momentum<'a> {
    w: &'a mut [f32],
    g: &'a [f32],
    b: &'a mut [f32],
    grad_scale: f32,
    lr: f32,
    decay: f32,
    momentum: f32,
    nesterov: bool,
}

impl WithSimd for Momentum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let n = self.w.len();
        assert!(self.g.len() == n && self.b.len() == n, "slices of a segment differ in length");
        for ((w, &g), b) in self.w.iter_mut().zip(self.g).zip(self.b) {
            let g = g * self.grad_scale + self.decay * *w;
            *b = self.momentum * *b + g;
            let update = if self.nesterov { g + self.momentum * *b } else { *b };
            *w -= self.lr * update;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(sgd: &Sgd, w: &mut [f32], g: &[f32], states: Vec<&mut [f32]>, decay: bool) {
        let info = StepInfo { step: 1, grad_scale: 1.0 };
        sgd.update(
            info,
            &mut Segment { weights: w, grads: g, states, decay, overrides: Overrides::default() },
        );
    }

    #[test]
    fn plain_subtracts_the_gradient() {
        let sgd = Sgd::default().lr(1.0);
        // An empty segment first, between and last: its neighbours are all updated.
        let mut w = [0.0f32; 14];
        for cuts in [[0, 0, 6, 14], [0, 6, 6, 14], [0, 6, 14, 14]] {
            w.fill(0.0);
            for cut in cuts.windows(2) {
                step(&sgd, &mut w[cut[0]..cut[1]], &[1.0; 14][cut[0]..cut[1]], vec![], true);
            }
            assert_eq!(w, [-1.0; 14]);
        }
        assert!(sgd.state_names().is_empty());
    }

    #[test]
    fn momentum_and_decay_by_hand() {
        let sgd = Sgd::default().lr(0.5).momentum(0.5).weight_decay(0.25);
        let (mut w, mut b) = ([4.0f32], [0.0f32]);
        step(&sgd, &mut w, &[1.0], vec![&mut b], true);
        assert_eq!((w, b), ([3.0], [2.0])); // g = 1 + 1, b = 2
        step(&sgd, &mut w, &[1.0], vec![&mut b], false);
        assert_eq!((w, b), ([2.0], [2.0])); // g = 1, b = 1 + 1
        step(&sgd.nesterov(true), &mut w, &[1.0], vec![&mut b], false);
        assert_eq!((w, b), ([1.0], [2.0])); // g = 1, b = 2, update 1 + 1
    }

    #[test]
    fn grad_scale_multiplies_the_gradient_only() {
        let sgd = Sgd::default().lr(1.0).weight_decay(0.5);
        let mut w = [2.0f32];
        let info = StepInfo { step: 1, grad_scale: 0.25 };
        let mut segment = Segment {
            weights: &mut w,
            grads: &[4.0],
            states: vec![],
            decay: true,
            overrides: Overrides::default(),
        };
        sgd.update(info, &mut segment);
        assert_eq!(w, [0.0]); // 2 - (1 + 1)
    }

    #[test]
    fn overrides_replace_decay_and_scale_the_rate_and_betas_are_refused() {
        let sgd = Sgd::default().lr(1.0).weight_decay(7.0);
        let overrides = Overrides { lr_factor: 0.5, weight_decay: Some(0.5), betas: None };
        let mut w = [2.0f32];
        let mut segment = Segment { weights: &mut w, grads: &[1.0], states: vec![], decay: true, overrides };
        sgd.update(StepInfo { step: 1, grad_scale: 1.0 }, &mut segment);
        assert_eq!(w, [1.0]); // 2 - 0.5 * (1 + 1)
        assert_eq!(sgd.check_overrides(&overrides), Ok(()));
        let error = sgd.check_overrides(&Overrides { betas: Some((0.9, 0.9)), ..overrides }).unwrap_err();
        assert_eq!(error.to_string(), "sgd: a parameter group cannot change the betas of this rule");
    }

    #[test]
    fn any_cut_into_segments_gives_the_same_bits() {
        let sgd = Sgd::default().lr(0.1).momentum(0.9).weight_decay(0.01);
        let g: Vec<f32> = (0..101).map(|i| (i as f32 * 0.7).sin()).collect();
        let run = |cuts: &[usize]| {
            let (mut w, mut b) = (g.iter().map(|g| g * 3.0).collect::<Vec<f32>>(), vec![0.1f32; 101]);
            for cut in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
                step(&sgd, &mut w[cut.clone()], &g[cut.clone()], vec![&mut b[cut]], true);
            }
            [w, b].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(run(&[0, 101]), run(&[0, 1, 18, 18, 50, 101]));
    }

    #[test]
    fn nesterov_needs_momentum() {
        let error = Sgd::default().nesterov(true).validate().unwrap_err();
        assert_eq!(error.to_string(), "sgd: momentum must be above 0 for Nesterov's momentum, got 0");
        assert_eq!(Sgd::default().nesterov(true).momentum(0.9).validate(), Ok(()));
    }
}
