//! Implementations of the public traits, and values handed back, that are not what they say.

use candle_core::{Result, Tensor};
use fsdp::optim::{OptimError, Optimizer, Segment, StepInfo};
use fsdp::prelude::*;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use crate::models::{Dots, full, gradients, weights};

/// A rule that exchanges what it was lent before it writes, and has other states each time it is asked.
struct Juggler(AtomicUsize);

impl Optimizer for Juggler {
    fn name(&self) -> &'static str {
        "juggler"
    }

    fn state_names(&self) -> &'static [&'static str] {
        if self.0.fetch_add(1, SeqCst).is_multiple_of(2) { &["a", "b"] } else { &[] }
    }

    fn update(&self, _: StepInfo, segment: &mut Segment<'_>) {
        let Segment { weights, states, .. } = segment;
        if let [first, ..] = &mut states[..] {
            std::mem::swap(weights, first);
        }
        weights.fill(9.0);
        states.clear();
    }

    fn learning_rate(&self) -> f64 {
        f64::NAN
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn validate(&self) -> std::result::Result<(), OptimError> {
        Ok(())
    }
}

#[test]
fn a_rule_that_exchanges_its_slices() {
    let mut model = Dots::new(2, 5).fully_shard(&DeviceMesh::single()).unwrap();
    let mut optimizer = model.optimizer(Juggler(AtomicUsize::new(0))).unwrap();
    for _ in 0..3 {
        let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
        model.backward(&loss).unwrap();
        optimizer.step(&mut model).unwrap();
    }
    // The first unit's step wrote a state; the second has no states.
    let seen = weights(&model).unwrap();
    assert!(seen.iter().flatten().all(|&weight| weight == 1.0 || weight == 9.0), "{seen:?}");
}

#[test]
fn full_parameters_that_come_back_as_others() {
    let mut model = Dots::new(2, 5).fully_shard(&DeviceMesh::single()).unwrap();
    type Change = fn(&mut fsdp::engine::FullParam);
    let changes: [(&str, Change); 4] = [
        ("was given 6 values for its shape [5]", |param| param.values.push(0.0)),
        ("was given 0 values for its shape [5]", |param| param.values.clear()),
        ("was given 0 times, expected once", |param| param.spec.name = "units.1.w".into()),
        ("was given 4 values for its shape [5]", |param| {
            param.values.pop();
            param.spec.shape = vec![4];
        }),
    ];
    for (expected, change) in changes {
        let changed = model.with_full_params("units.0", |params| {
            change(&mut params[0]);
            Ok(())
        });
        let error = changed.unwrap_err().to_string();
        assert!(error.contains("`units.0.w`") && error.contains(expected), "{error}");
        assert_eq!(weights(&model).unwrap(), [[1.0; 5]; 2]);
    }
}

/// Another number of elements each time it runs.
#[derive(FsdpUnit)]
struct Fickle {
    w: Param,
    #[fsdp(skip)]
    runs: AtomicUsize,
}

impl Forward for Fickle {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let len = 5 - self.runs.fetch_add(1, SeqCst) % 5;
        (x * self.w.tensor(scope)?)?.narrow(0, 0, len)
    }
}

#[derive(FsdpUnit)]
struct Net {
    unit: Unit<Fickle>,
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)?.sum_all()
    }
}

/// The gradient that comes to the recomputed output is of the first one's shape.
#[test]
fn a_recomputation_of_another_shape() {
    let config = FsdpConfig { recompute: Recompute::Unit, ..FsdpConfig::default() };
    let fickle = Fickle { w: Param::new(5).with_init(Init::Ones), runs: AtomicUsize::new(0) };
    let mut model = Net { unit: Unit::new(fickle) }.fully_shard_with(&DeviceMesh::single(), &config).unwrap();
    let loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
    let error = model.backward(&loss).unwrap_err().to_string();
    assert!(error.contains("`unit`") && error.contains("its forward gave [5], and [4]"), "{error}");
    model.reset_step().unwrap();
    assert_eq!(weights(&model).unwrap(), [[1.0; 5]]);
    assert!(gradients(&model).unwrap().is_empty());
}
