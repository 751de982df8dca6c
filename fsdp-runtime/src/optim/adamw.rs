//! Adam with decoupled weight decay.

use pulp::{Arch, Simd, WithSimd};

use super::{AdamWScalars, KernelUpdate, OptimError, Optimizer, Overrides, Range, Segment, StepInfo};

/// AdamW (Loshchilov and Hutter, 2019): Adam whose weight decay acts on the weights, not through the
/// gradient.
///
/// At step `t`, with gradient `g`:
/// `w *= 1 - lr * decay; m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g²;`
/// `w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)`.
///
/// Scalars are computed in f64 and rounded once; elements are f32.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct AdamW {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
}

impl Default for AdamW {
    /// Learning rate 1e-3, betas 0.9 and 0.999, eps 1e-8, weight decay 0.01.
    fn default() -> Self {
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

impl AdamW {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets the decay rates of the first and second moment.
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Self {
        (self.beta1, self.beta2) = (beta1, beta2);
        self
    }

    /// Sets what is added to the denominator.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Sets the weight decay, which acts on segments with [`Segment::decay`].
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    fn scalars(&self, at: StepInfo, decay: bool, overrides: Overrides) -> AdamWScalars {
        let t = at.step as f64;
        let Overrides { lr_factor, weight_decay, betas } = overrides;
        let (beta1, beta2) = betas.unwrap_or((self.beta1, self.beta2));
        let lr = self.lr * lr_factor;
        let weight_decay = weight_decay.unwrap_or(self.weight_decay);
        AdamWScalars {
            decay: (if decay { 1.0 - lr * weight_decay } else { 1.0 }) as f32,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (lr / (1.0 - beta1.powf(t))) as f32,
            correction2: (1.0 - beta2.powf(t)).sqrt() as f32,
            eps: self.eps as f32,
        }
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn describe(&self) -> String {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = self;
        format!(
            "optimizer adamw, learning rate {lr}, betas {beta1} and {beta2}, eps {eps}, weight decay {weight_decay}"
        )
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(&self, at: StepInfo, segment: &mut Segment<'_>) {
        let [m, v] = segment.states.as_mut_slice() else {
            panic!("adamw has 2 state buffers, got {}", segment.states.len());
        };
        Arch::new().dispatch(Kernel {
            w: segment.weights,
            g: segment.grads,
            m,
            v,
            grad_scale: at.grad_scale,
            step: self.scalars(at, segment.decay, segment.overrides),
        });
    }

    fn kernel_update(&self, at: StepInfo, decay: bool, overrides: Overrides) -> Option<KernelUpdate> {
        Some(KernelUpdate::AdamW(self.scalars(at, decay, overrides)))
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
        range.below_one("beta1", self.beta1)?;
        range.below_one("beta2", self.beta2)?;
        // In f32, where it is used: a denominator of 0 makes NaN of an element that never had a gradient.
        let eps = self.eps as f32;
        range.check("eps", "above 0 in f32", self.eps, eps.is_finite() && eps > 0.0)?;
        range.at_least_zero("weight decay", self.weight_decay)
    }

    fn check_overrides(&self, overrides: &Overrides) -> Result<(), OptimError> {
        overrides.validate(self.name())
    }
}

struct Kernel<'a> {
    w: &'a mut [f32],
    g: &'a [f32],
    m: &'a mut [f32],
    v: &'a mut [f32],
    grad_scale: f32,
    step: AdamWScalars,
}

impl WithSimd for Kernel<'_> {
    type Output = ();

    // The compiler vectorises this loop for the instruction set it is inlined for. Products and sums stay
    // apart (no fused multiply-add), so that vector body, scalar tail and every instruction set give the same
    // bits.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Kernel { w, g, m, v, grad_scale, step } = self;
        let n = w.len();
        assert!(g.len() == n && m.len() == n && v.len() == n, "slices of a segment differ in length");
        for i in 0..n {
            let g = g[i] * grad_scale;
            let m1 = step.beta1 * m[i] + step.one_minus_beta1 * g;
            let v1 = step.beta2 * v[i] + step.one_minus_beta2 * g * g;
            let denominator = v1.sqrt() / step.correction2 + step.eps;
            w[i] = w[i] * step.decay - step.step_size * m1 / denominator;
            m[i] = m1;
            v[i] = v1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights and moments of one parameter.
    #[derive(Clone, Debug, PartialEq)]
    struct State {
        w: Vec<f32>,
        m: Vec<f32>,
        v: Vec<f32>,
    }

    impl State {
        fn new(w: &[f32]) -> Self {
            State { w: w.to_vec(), m: vec![0.0; w.len()], v: vec![0.0; w.len()] }
        }

        fn step(&mut self, adam: &AdamW, at: StepInfo, g: &[f32], decay: bool) {
            self.step_in_cuts(adam, at, g, decay, &[0, g.len()]);
        }

        fn step_in_cuts(&mut self, adam: &AdamW, at: StepInfo, g: &[f32], decay: bool, cuts: &[usize]) {
            for cut in cuts.windows(2).map(|cut| cut[0]..cut[1]) {
                adam.update(
                    at,
                    &mut Segment {
                        weights: &mut self.w[cut.clone()],
                        grads: &g[cut.clone()],
                        states: vec![&mut self.m[cut.clone()], &mut self.v[cut]],
                        decay,
                        overrides: Overrides::default(),
                    },
                );
            }
        }
    }

    fn at(step: u64) -> StepInfo {
        StepInfo { step, grad_scale: 1.0 }
    }

    /// Reproducible values of both signs and several magnitudes.
    fn values(n: usize, salt: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| {
                let hash = (i ^ salt).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(2_246_822_519);
                (hash as f32 / u32::MAX as f32 - 0.5) * 10f32.powi(i as i32 % 5 - 2)
            })
            .collect()
    }

    fn close(got: f32, expected: f64, tolerance: f64) {
        assert!((f64::from(got) - expected).abs() <= tolerance * expected.abs(), "{got} is not {expected}");
    }

    #[test]
    fn five_steps_follow_the_formula_in_f64() {
        let adam = AdamW::default().lr(3e-3).betas(0.9, 0.95).weight_decay(0.1);
        let start = values(37, 1);
        let mut state = State::new(&start);
        let (mut w, mut m, mut v): (Vec<f64>, _, _) =
            (start.iter().map(|&w| w.into()).collect(), vec![0f64; 37], vec![0f64; 37]);
        for t in 1..=5 {
            let g = values(37, 100 + t);
            state.step(&adam, at(t.into()), &g, true);
            for i in 0..37 {
                let g = f64::from(g[i]);
                w[i] *= 1.0 - 3e-3 * 0.1;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let denominator = v[i].sqrt() / (1.0 - 0.95f64.powi(t as i32)).sqrt() + 1e-8;
                w[i] -= 3e-3 / (1.0 - 0.9f64.powi(t as i32)) * m[i] / denominator;
            }
        }
        for i in 0..37 {
            assert!((f64::from(state.w[i]) - w[i]).abs() < 3e-7 * w[i].abs().max(0.02), "{i}");
            close(state.v[i], v[i], 1e-6);
        }
    }

    #[test]
    fn first_step_moves_by_the_learning_rate() {
        let adam = AdamW::default().weight_decay(0.0);
        let mut state = State::new(&[1.0; 4]);
        state.step(&adam, at(1), &[2.0; 4], true);
        for &w in &state.w {
            assert!((f64::from(1.0 - w) - 1e-3).abs() < 1e-7, "{w}");
        }
        // From weight 0 the difference is exact enough for 1e-5 relative.
        let mut state = State::new(&[0.0; 4]);
        state.step(&adam, at(1), &[2.0; 4], true);
        state.w.iter().for_each(|&w| close(w, -1e-3, 1e-6));
        // With decay: 1 * (1 - 1e-3 * 0.1) - 1e-3.
        let mut state = State::new(&[1.0; 4]);
        state.step(&AdamW::default().weight_decay(0.1), at(1), &[2.0; 4], true);
        state.w.iter().for_each(|&w| close(w, 1.0 - 1e-4 - 1e-3, 1e-7));
    }

    #[test]
    fn sixth_step_remembers_the_five_before() {
        let adam = AdamW::default().weight_decay(0.0);
        let mut state = State::new(&[0.0; 4]);
        for t in 1..=5 {
            state.step(&adam, at(t), &[4.0; 4], true);
        }
        let mut sixth = State { w: vec![0.0; 4], ..state };
        sixth.step(&adam, at(6), &[1.0; 4], true);
        sixth.w.iter().for_each(|&w| close(w, -9.146172e-4, 1e-6));
    }

    #[test]
    fn any_cut_into_segments_gives_the_same_bits() {
        let adam = AdamW::default().lr(1e-2);
        let n = 203;
        let run = |cuts: &[usize]| {
            let mut state = State::new(&values(n, 1));
            for t in 1..=3 {
                let info = StepInfo { step: t, grad_scale: 0.37 };
                state.step_in_cuts(&adam, info, &values(n, 7 + t as u32), true, cuts);
            }
            [state.w, state.m, state.v].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let whole = run(&[0, n]);
        let elements: Vec<usize> = (0..=n).collect();
        for cuts in [&elements[..], &[0, 1, n], &[0, 16, 32, 100, 100, 101, n], &[0, 67, 134, n]] {
            assert_eq!(run(cuts), whole, "{cuts:?}");
        }
    }

    #[test]
    fn empty_segments_change_nothing_around_them() {
        let adam = AdamW::default();
        for cuts in [[0, 0, 3, 6], [0, 3, 3, 6], [0, 3, 6, 6]] {
            let (mut whole, mut cut) = (State::new(&values(6, 1)), State::new(&values(6, 1)));
            whole.step(&adam, at(1), &[1.0; 6], true);
            cut.step_in_cuts(&adam, at(1), &[1.0; 6], true, &cuts);
            assert_eq!(whole, cut);
        }
    }

    #[test]
    fn no_decay_leaves_a_weight_without_gradient_alone() {
        let adam = AdamW::default().lr(0.5).weight_decay(0.5);
        let mut state = State::new(&[2.0]);
        state.step(&adam, at(1), &[0.0], false);
        assert_eq!(state.w, [2.0]);
        state.step(&adam, at(2), &[0.0], true);
        assert_eq!(state.w, [1.5]);
    }

    #[test]
    fn overrides_are_as_if_the_rule_had_them() {
        let rule = AdamW::default().lr(0.5).weight_decay(0.25);
        let overrides = Overrides { lr_factor: 0.5, weight_decay: Some(0.125), betas: Some((0.5, 0.75)) };
        let (mut a, mut b) = (State::new(&values(50, 1)), State::new(&values(50, 1)));
        let g = values(50, 2);
        for t in 1..=3 {
            let mut segment = Segment {
                weights: &mut a.w,
                grads: &g,
                states: vec![&mut a.m, &mut a.v],
                decay: true,
                overrides,
            };
            rule.update(at(t), &mut segment);
            let as_one = AdamW::default().lr(0.25).weight_decay(0.125).betas(0.5, 0.75);
            b.step(&as_one, at(t), &g, true);
        }
        assert_eq!(a, b);
        let error = rule.check_overrides(&Overrides { betas: Some((0.5, 1.0)), ..overrides }).unwrap_err();
        assert_eq!(error.to_string(), "adamw: beta2 must be at least 0 and below 1, got 1");
    }

    #[test]
    fn grad_scale_is_a_product_in_f32_before_all_else() {
        let adam = AdamW::default();
        let g = values(50, 3);
        let scaled: Vec<f32> = g.iter().map(|g| g * 0.3).collect();
        let (mut a, mut b) = (State::new(&values(50, 1)), State::new(&values(50, 1)));
        a.step(&adam, StepInfo { step: 1, grad_scale: 0.3 }, &g, true);
        b.step(&adam, at(1), &scaled, true);
        assert_eq!(a, b);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        assert_eq!(AdamW::default().validate(), Ok(()));
        let message = |adam: AdamW| adam.validate().unwrap_err().to_string();
        assert_eq!(message(AdamW::default().lr(-1.0)), "adamw: lr must be finite and at least 0, got -1");
        assert_eq!(
            message(AdamW::default().betas(0.9, 1.0)),
            "adamw: beta2 must be at least 0 and below 1, got 1"
        );
        assert!(message(AdamW::default().eps(1e-60)).starts_with("adamw: eps"));
        assert!(message(AdamW::default().weight_decay(f64::NAN)).starts_with("adamw: weight decay"));
    }
}
