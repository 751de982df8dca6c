//! 16-bit weights with FP32 main weights, and FP32 reduction.

use candle_core::{DType, Result, Tensor};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_each_close};

use crate::fixtures::{Dot, Dots, config, dot, full, gradients, named, on_ranks, weights};

#[test]
fn sixteen_bit_gradients_are_summed_in_f32() {
    for strategy in Strategy::ALL {
        on_ranks(8, |world| {
            let config = FsdpConfig { precision: MixedPrecision::BF16, ..config(strategy) };
            let model = Dots { units: vec![Dot::zeros(1)] };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let x = if world.rank() == 0 { 256.0 } else { 1.0 };
            let loss: Tensor = model.forward(&vec![full(1, x)])?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[32.875])]), "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn gradients_may_travel_in_sixteen_bits() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let precision = MixedPrecision { reduce: Dtype::BF16, ..MixedPrecision::F32 };
            let config = FsdpConfig { precision, ..config(strategy) };
            let model = Dots { units: (0..3).map(|_| Dot::zeros(5)).collect() };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            for _ in 0..2 {
                for last in [false, true] {
                    model.set_is_last_microbatch(last);
                    // 256 is a bf16, 257 is not; 258 is.
                    let x = if world.rank() == 0 { 256.0 } else { 2.0 };
                    let loss: Tensor = model.forward(&vec![full(5, x); 3])?;
                    model.backward(&loss)?;
                }
                for (_, gradient) in gradients(&model)? {
                    assert_eq!(gradient, [258.0; 5], "{strategy}");
                }
                optimizer.step(&mut model)?;
            }
            assert_eq!(weights(&model)?[0].1, [-516.0; 5]);
            Ok(())
        });
    }
}

#[test]
fn a_sum_that_travels_in_sixteen_bits_is_rounded_once() {
    // 256 + 1 is no bf16 and 2048 + 1 no f16: rounded after each rank, the sums would stay 256 and 2048.
    for (reduce, large) in [(Dtype::BF16, 256.0), (Dtype::F16, 2048.0)] {
        for strategy in Strategy::ALL {
            on_ranks(4, |world| {
                let precision = MixedPrecision { reduce, ..MixedPrecision::F32 };
                let config = FsdpConfig { precision, scaling: GradientScaling::Sum, ..config(strategy) };
                let model = dot(7).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let x = if world.rank() == 0 { large } else { 1.0 };
                let loss: Tensor = model.forward(&vec![full(7, x)])?;
                model.backward(&loss)?;
                assert_eq!(
                    gradients(&model)?,
                    named(&[("units.0.w", &[large + 3.0; 7])]),
                    "{strategy} {reduce}"
                );
                Ok(())
            });
        }
    }
}

#[test]
fn a_sum_that_is_stored_in_bf16_rounds_to_the_nearest_and_ties_to_even() {
    // Neighbours of bf16 are 2 apart from 256 on; 256 and 260 have the even mantissas.
    for (ours, theirs, sum) in
        [(256.0, 3.0, 260.0), (256.0, 1.0, 256.0), (256.0, 1.5, 258.0), (-256.0, -3.0, -260.0)]
    {
        for strategy in Strategy::ALL {
            on_ranks(2, |world| {
                let precision =
                    MixedPrecision { reduce: Dtype::BF16, main_grads: Dtype::BF16, ..MixedPrecision::F32 };
                let config = FsdpConfig { precision, scaling: GradientScaling::Sum, ..config(strategy) };
                let model = dot(5).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let loss: Tensor = model.forward(&vec![full(5, [ours, theirs][world.rank()])])?;
                model.backward(&loss)?;
                assert_eq!(gradients(&model)?, named(&[("units.0.w", &[sum; 5])]), "{strategy}");
                Ok(())
            });
        }
    }
}

#[test]
fn a_step_installs_the_main_weights_for_the_next_forward() {
    for strategy in Strategy::ALL {
        for (outer, inner) in [(1, 2), (2, 2)] {
            on_ranks(outer * inner, |world| {
                let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                let config = FsdpConfig { precision: MixedPrecision::BF16, ..config(strategy) };
                let model = Dots { units: vec![Dot::with(3, 1.0), Dot::with(40, 1.0)] };
                let mut model = model.fully_shard_with(&mesh, &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                for weight in [0.75, 0.5] {
                    let loss: Tensor = model.forward(&vec![full(3, 0.25), full(40, 0.25)])?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                    let loss: Tensor = model.evaluate(&vec![full(3, 4.0), full(40, 2.0)])?;
                    assert_eq!(loss.to_scalar::<f32>()?, weight * (3.0 * 4.0 + 40.0 * 2.0), "{strategy}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn main_weights_keep_what_sixteen_bits_lose() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let config = FsdpConfig { precision: MixedPrecision::BF16, ..config(strategy) };
            let model = Dots { units: vec![Dot::with(3, 1.0)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let loss: Tensor = model.forward(&vec![full(3, 2f32.powi(-9))])?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?[0].1[0].to_bits(), 0x3F7F_8000, "{strategy}");
            Ok(())
        });
    }
}

/// Three parameters, of which a microbatch uses some.
#[derive(FsdpUnit)]
struct Three {
    a: Param,
    b: Param,
    c: Param,
}

impl Forward<bool> for Three {
    fn forward(&self, x: &Tensor, with_b: &bool, scope: &Scope<'_>) -> Result<Tensor> {
        let x = x.to_dtype(DType::BF16)?;
        let mut y = (&x * self.a.tensor(scope)?)?;
        if *with_b {
            y = (y + (&x * self.b.tensor(scope)?)?)?;
        }
        y.sum_all()
    }
}

#[derive(FsdpUnit)]
struct ThreeModel {
    unit: Unit<Three>,
}

impl Forward<bool> for ThreeModel {
    fn forward(&self, x: &Tensor, with_b: &bool, scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, with_b, scope)
    }
}

#[test]
fn a_gradient_that_comes_late_or_never_reduces_with_the_others() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let config = FsdpConfig { precision: MixedPrecision::BF16, ..config(strategy) };
            let param = || Param::new(3);
            let model = ThreeModel { unit: Unit::new(Three { a: param(), b: param(), c: param() }) };
            let _ = &model.unit.c;
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            for (x, with_b) in [(1.0, false), (2.0, true)] {
                model.set_is_last_microbatch(with_b);
                let loss: Tensor = model.forward_with(&full(3, x), &with_b)?;
                model.backward(&loss)?;
            }
            let expected = named(&[("unit.a", &[3.0; 3]), ("unit.b", &[2.0; 3]), ("unit.c", &[0.0; 3])]);
            assert_eq!(gradients(&model)?, expected, "{strategy}");
            assert_eq!(model.parameters_without_gradient()?, ["unit.c"]);
            Ok(())
        });
    }
}

/// A 16-bit base with an FP32 adapter in one unit.
#[derive(FsdpUnit)]
struct Mixed {
    #[fsdp(frozen, dtype = "bf16")]
    base: Param,
    #[fsdp(dtype = "f32")]
    lora: Param,
}

impl Forward for Mixed {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let base = self.base.tensor(scope)?;
        assert_eq!(base.dtype(), DType::BF16);
        x.matmul(&base.to_dtype(DType::F32)?)?.matmul(&self.lora.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct MixedModel {
    unit: Unit<Mixed>,
}

impl Forward for MixedModel {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)?.sum_all()
    }
}

#[test]
fn a_unit_may_hold_several_dtypes() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let unit = Unit::new(Mixed { base: Param::new((4, 4)), lora: Param::new((4, 2)) });
            let mut model =
                MixedModel { unit }.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            let before = weights(&model)?;
            let x = full(16, 1.0).reshape((4, 4))?;
            let loss: Tensor = model.forward(&x)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            let after = weights(&model)?;
            assert_eq!(before[0], after[0]);
            assert_ne!(before[1], after[1]);
            Ok(())
        });
    }
}

/// `x * w` in the dtype in which it gets its input.
#[derive(FsdpUnit)]
struct Scale {
    w: Param,
    #[fsdp(skip)]
    expected: DType,
}

impl Forward for Scale {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        assert_eq!(x.dtype(), self.expected);
        x * self.w.tensor(scope)?
    }
}

#[derive(FsdpUnit)]
struct Scales {
    half: Unit<Scale>,
    #[fsdp(dtype = "f32")]
    single: Unit<Scale>,
    #[fsdp(skip)]
    between: DType,
}

impl Forward for Scales {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.half.forward(x, &(), scope)?;
        assert_eq!(x.dtype(), self.between);
        let x = self.single.forward(&x, &(), scope)?;
        assert_eq!(x.dtype(), self.between);
        x.sum_all()
    }
}

#[test]
fn inputs_and_outputs_of_units_are_cast_as_the_policy_says() {
    for (output, between) in [(Dtype::F32, DType::F32), (Dtype::BF16, DType::BF16)] {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(2, |world| {
                let precision =
                    MixedPrecision { cast_inputs: true, output: Some(output), ..MixedPrecision::BF16 };
                let config = FsdpConfig { precision, recompute, ..config(Strategy::default()) };
                let scale =
                    |expected| Unit::new(Scale { w: Param::new(4).with_init(Init::Constant(0.5)), expected });
                let model = Scales { half: scale(DType::BF16), single: scale(DType::F32), between };
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let loss: Tensor = model.evaluate(&full(4, 3.0))?;
                assert_eq!(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?, 3.0);
                let loss: Tensor = model.forward(&full(4, 3.0))?;
                model.backward(&loss)?;
                assert_eq!(gradients(&model)?, named(&[("half.w", &[1.5; 4]), ("single.w", &[1.5; 4])]));
                Ok(())
            });
        }
    }
}

/// The sum of its inputs in f32, and of its weights.
#[derive(FsdpUnit)]
struct Sum {
    w: Param,
}

impl Forward for Sum {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?.to_dtype(DType::F32)?;
        x.to_dtype(DType::F32)?.sum_all()? + w.sum_all()?
    }
}

#[derive(FsdpUnit)]
struct Sums {
    #[fsdp(dtype = "f32")]
    single: Unit<Sum>,
    half: Unit<Sum>,
}

impl Forward for Sums {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        Tensor::stack(&[self.single.forward(x, &(), scope)?, self.half.forward(x, &(), scope)?], 0)
    }
}

#[test]
fn an_input_that_is_cast_has_the_digits_of_its_units_dtype() {
    // 257 is no bf16: it lies between 256 and 258, of which 256 is even.
    for (cast_inputs, expected) in [(true, [3.0 * 257.0, 3.0 * 256.0]), (false, [3.0 * 257.0; 2])] {
        for strategy in Strategy::ALL {
            on_ranks(2, |world| {
                let precision = MixedPrecision { cast_inputs, ..MixedPrecision::BF16 };
                let config = FsdpConfig { precision, ..config(strategy) };
                let sum = || Unit::new(Sum { w: Param::new(5).with_init(Init::Zeros) });
                let model = Sums { single: sum(), half: sum() };
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let sums: Tensor = model.evaluate(&full(3, 257.0))?;
                assert_eq!(sums.to_vec1::<f32>()?, expected, "{strategy}");
                Ok(())
            });
        }
    }
}

#[test]
fn a_policy_says_what_it_is() {
    assert_eq!(
        MixedPrecision { reduce: Dtype::BF16, ..MixedPrecision::F16 }.to_string(),
        "weights f16 on the wire and in compute, main weights f32, unreduced gradients bf16, main gradients f32, \
         inputs of units as they come, outputs of units as computed"
    );
}

#[test]
fn without_main_weights_the_optimizer_rounds_each_step() {
    for strategy in Strategy::ALL {
        for main_weights in [true, false] {
            on_ranks(2, |world| {
                let precision = MixedPrecision { main_weights, ..MixedPrecision::BF16 };
                let config = FsdpConfig { precision, ..config(strategy) };
                let model = Dots { units: vec![Dot::with(5, 1.0)] };
                let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                // 1 - 2^-9 is no bf16, but half of them is: 1 is the even neighbour.
                for _ in 0..2 {
                    let loss: Tensor = model.forward(&vec![full(5, 2f32.powi(-9))])?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                }
                let expected = if main_weights { 1.0 - 2f32.powi(-8) } else { 1.0 };
                assert_eq!(weights(&model)?, named(&[("units.0.w", &[expected; 5])]), "{strategy}");
                for report in model.memory(0) {
                    if !report.usage.category.name().ends_with("pool") {
                        assert_eq!(report.usage.current as u64, report.formula, "{strategy} {report:?}");
                    }
                }
                let main = model.memory_plan().main_weights;
                assert_eq!(main > 0, main_weights);
                Ok(())
            });
        }
    }
}

#[test]
fn main_gradients_may_have_the_dtype_of_the_reduction() {
    for strategy in Strategy::ALL {
        for (outer, inner) in [(1, 2), (2, 1), (2, 2)] {
            on_ranks(outer * inner, |world| {
                let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                let precision =
                    MixedPrecision { reduce: Dtype::BF16, main_grads: Dtype::BF16, ..MixedPrecision::F32 };
                let config = FsdpConfig { precision, ..config(strategy) };
                let model = Dots { units: vec![Dot::zeros(40)] };
                let mut model = model.fully_shard_with(&mesh, &config)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                for last in [false, true] {
                    model.set_is_last_microbatch(last);
                    // 256 + 1 rounds to 256.
                    let x = if last { 1.0 } else { 256.0 };
                    let loss: Tensor = model.forward(&vec![full(40, x)])?;
                    model.backward(&loss)?;
                }
                assert_eq!(model.grad_norm()?, 256.0 * 40f64.sqrt());
                assert_eq!(gradients(&model)?, named(&[("units.0.w", &[256.0; 40])]));
                let norm = model.clip_grad_norm(40f64.sqrt())?;
                assert_eq!(norm, 256.0 * 40f64.sqrt());
                for report in model.memory(0) {
                    assert!(report.usage.peak as u64 <= report.formula, "{strategy} {report:?}");
                }
                optimizer.step(&mut model)?;
                let (_, values) = &weights(&model)?[0];
                assert_each_close(values, -1.0, absolute(1e-6), strategy);
                Ok(())
            });
        }
    }
    on_ranks(1, |world| {
        let precision = MixedPrecision { main_grads: Dtype::F16, reduce: Dtype::BF16, ..MixedPrecision::F32 };
        let config = FsdpConfig { precision, ..FsdpConfig::default() };
        let model = Dots { units: vec![Dot::zeros(1)] };
        let text = model.fully_shard_with(&world.data_parallel_mesh(), &config).unwrap_err().to_string();
        assert!(
            text.contains("f32 or in the dtype in which gradients are reduced, bf16, not in f16"),
            "{text}"
        );
        Ok(())
    });
}
