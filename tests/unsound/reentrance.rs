//! Code of the user that runs while weights are written or read, and calls back.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use candle_core::Tensor;
use fsdp::checkpoint::{Checkpoints, Contents};
use fsdp::optim::{OptimError, Optimizer, Segment, StepInfo};
use fsdp::prelude::*;

use crate::apart::apart;
use crate::models::{Caller, Dots, caller, full, gradients, weights};

/// Called with the weights of each segment.
type Call = dyn FnMut(&mut [f32]) + Send;

/// A rule that does what it is told with the weights that it is lent.
#[derive(Clone)]
struct Rule(Arc<Mutex<Call>>);

impl Rule {
    fn new(call: impl FnMut(&mut [f32]) + Send + 'static) -> Rule {
        Rule(Arc::new(Mutex::new(call)))
    }
}

impl Optimizer for Rule {
    fn name(&self) -> &'static str {
        "rule"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["state"]
    }

    fn update(&self, _: StepInfo, segment: &mut Segment<'_>) {
        (self.0.lock().unwrap())(segment.weights);
    }

    fn learning_rate(&self) -> f64 {
        1.0
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn validate(&self) -> Result<(), OptimError> {
        Ok(())
    }
}

fn text<T, E: std::fmt::Display>(outcome: Result<T, E>) -> String {
    outcome.err().map(|error| error.to_string()).unwrap_or_default()
}

/// A backward of a loss that was kept gathers weights, which may be those that are being written.
#[test]
fn a_kept_loss_inside_load_weights() {
    for strategy in Strategy::ALL {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        let mut model = Dots::new(2, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
        let loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
        let mut said = Vec::new();
        model
            .load_weights(|_, _, values| {
                values.fill(3.0);
                said.push(text(loss.backward()));
                assert_eq!(values, [3.0; 5]);
                Ok(())
            })
            .unwrap();
        assert!(said.len() == 2 && said.iter().all(|said| said.contains("backward")), "{said:?}");
        assert_eq!(weights(&model).unwrap(), [[3.0; 5]; 2]);
    }
}

#[test]
fn a_kept_loss_inside_with_full_params() {
    let mut model = Dots::new(2, 5).fully_shard(&DeviceMesh::single()).unwrap();
    let loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
    let said = model
        .with_full_params("units.1", |params| {
            params[0].values.fill(4.0);
            Ok(text(loss.backward()))
        })
        .unwrap();
    assert!(said.contains("backward"), "{said}");
    assert_eq!(weights(&model).unwrap(), [[1.0; 5], [4.0; 5]]);
}

#[test]
fn a_kept_loss_inside_a_rule() {
    for strategy in Strategy::ALL {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        let mut model = Dots::new(2, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
        let kept: Tensor = model.forward(&full(5, 2.0)).unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let saying = said.clone();
        let rule = Rule::new(move |weights| {
            weights.fill(7.0);
            saying.lock().unwrap().push(text(kept.backward()));
            assert_eq!(weights, [7.0; 5]);
        });
        let mut optimizer = model.optimizer(rule).unwrap();
        let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
        model.backward(&loss).unwrap();
        optimizer.step(&mut model).unwrap();
        let said = said.lock().unwrap();
        assert!(said.len() == 2 && said.iter().all(|said| said.contains("backward")), "{said:?}");
        assert_eq!(weights(&model).unwrap(), [[7.0; 5]; 2]);
    }
}

/// There the rule runs while the model's backward does: it could wait for itself, too.
#[test]
fn a_kept_loss_inside_a_rule_that_runs_in_the_backward() {
    for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
        let config = FsdpConfig { strategy, step_in_backward: true, ..FsdpConfig::default() };
        let mut model = Dots::new(3, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
        let mut kept: Vec<Tensor> = (0..3).map(|_| model.forward(&full(5, 2.0)).unwrap()).collect();
        // No backward of theirs is to come, for which units would wait.
        model.reset_step().unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let saying = said.clone();
        let rule = Rule::new(move |weights| {
            weights.fill(7.0);
            // Run, and let go of.
            let kept = kept.pop().expect("as many as units");
            saying.lock().unwrap().push(text(kept.backward()));
            drop(kept);
            assert_eq!(weights, [7.0; 5]);
        });
        let mut optimizer = model.optimizer(rule).unwrap();
        let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
        optimizer.backward_and_step(&mut model, &loss).unwrap();
        let said = said.lock().unwrap();
        assert!(said.len() == 3 && said.iter().all(|said| said.contains("backward")), "{said:?}");
        // But for the last one, whose update follows the last backward.
        assert_eq!(
            said.iter().filter(|said| said.contains("a rule runs no backward")).count(),
            2,
            "{said:?}"
        );
        assert_eq!(weights(&model).unwrap(), [[7.0; 5]; 3]);
    }
}

/// A rule that panics leaves the weights lent to nobody.
#[test]
fn a_rule_that_panics_in_the_backward() {
    let config = FsdpConfig { step_in_backward: true, ..FsdpConfig::default() };
    let mut model = Dots::new(2, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
    let mut optimizer = model.optimizer(Rule::new(|_| panic!("boom"))).unwrap();
    let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
    let step = || optimizer.backward_and_step(&mut model, &loss);
    assert!(catch_unwind(AssertUnwindSafe(step)).is_err());
    let refused = text(model.forward::<Tensor, Tensor>(&full(5, 1.0)));
    assert!(refused.contains("reset_step"), "{refused}");
    model.reset_step().unwrap();
    let mut optimizer = model.optimizer(Rule::new(|weights| weights.fill(2.0))).unwrap();
    let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
    optimizer.backward_and_step(&mut model, &loss).unwrap();
    assert_eq!(weights(&model).unwrap(), [[2.0; 5]; 2]);
}

/// Every call that takes the model by shared reference, inside of its own forward.
#[test]
fn a_forward_that_calls_its_own_model() {
    type Made = (&'static str, fn(&Fsdp<Caller>) -> String);
    let calls: [Made; 11] = [
        ("forward", |model| text(model.forward::<Tensor, Tensor>(&full(5, 1.0)))),
        ("evaluate", |model| text(model.evaluate::<Tensor, Tensor>(&full(5, 1.0)))),
        ("backward", |model| text(model.backward(&full(1, 1.0)))),
        ("finish_grad_sync", |model| text(model.finish_grad_sync())),
        ("clip_grad_norm", |model| text(model.clip_grad_norm(1.0))),
        ("grad_norm", |model| text(model.grad_norm())),
        ("visit_weights", |model| text(model.visit_weights(|_, _| Ok(())))),
        ("visit_gradients", |model| text(model.visit_gradients(|_, _| Ok(())))),
        ("full_params", |model| text(model.full_params("dots.units.0"))),
        ("ema", |model| text(model.ema(0.5))),
        ("save", |model| {
            let dir = tempfile::tempdir().unwrap();
            text(Checkpoints::new(dir.path()).save(Contents::of(model)))
        }),
    ];
    for strategy in Strategy::ALL {
        for (name, call) in calls {
            let config = FsdpConfig { strategy, ..FsdpConfig::default() };
            let said = Rc::new(RefCell::new(String::new()));
            let saying = said.clone();
            let model = caller(&config, move |model| *saying.borrow_mut() = call(model)).unwrap();
            for training in [true, false] {
                let run =
                    || if training { model.forward(&full(5, 2.0)) } else { model.evaluate(&full(5, 2.0)) };
                let sum: Tensor = run().unwrap();
                assert_eq!(sum.to_scalar::<f32>().unwrap(), 20.0, "{name}");
                let said = said.take();
                assert!(said.contains("forward"), "{strategy}: `{name}` in a forward: {said:?}");
            }
        }
    }
}

/// What may be called there changes nothing of the forward.
#[test]
fn a_forward_that_starts_gathers_of_its_own_units() {
    for strategy in Strategy::ALL {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        let model = caller(&config, |model| {
            for unit in ["dots.units.1", "dots.units.0", ""] {
                model.unshard(unit).unwrap().wait().unwrap();
            }
            model.set_prefetch(0, 0).unwrap();
            drop(model.no_sync());
        });
        let model = model.unwrap();
        let loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
        assert_eq!(loss.to_scalar::<f32>().unwrap(), 20.0);
        model.backward(&loss).unwrap();
        assert_eq!(gradients(&model).unwrap(), [[2.0; 5]; 2]);
    }
}

#[test]
fn a_closure_of_load_weights_that_panics() {
    for strategy in Strategy::ALL {
        let config = FsdpConfig { strategy, ..FsdpConfig::default() };
        let mut model = Dots::new(2, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
        let _loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
        let seen = Cell::new(0);
        let load = || {
            model.load_weights(|_, _, values| {
                values.fill(3.0);
                seen.set(seen.get() + 1);
                assert!(seen.get() < 2, "boom");
                Ok(())
            })
        };
        assert!(catch_unwind(AssertUnwindSafe(load)).is_err());
        assert_eq!(weights(&model).unwrap(), [[3.0; 5]; 2]);
        let sum: Tensor = model.evaluate(&full(5, 2.0)).unwrap();
        assert_eq!(sum.to_scalar::<f32>().unwrap(), 60.0);
    }
}

#[test]
fn an_evaluation_of_averages_that_panics() {
    let mut model = Dots::new(2, 5).fully_shard(&DeviceMesh::single()).unwrap();
    let mut average = model.ema(0.5).unwrap();
    let threes = |values: &mut [f32]| {
        values.fill(3.0);
        Ok(())
    };
    model.load_weights(|_, _, values| threes(values)).unwrap();
    let mut evaluate = || {
        model.with_ema(&mut average, |model| {
            assert_eq!(weights(model)?, [[1.0; 5]; 2]);
            panic!("boom")
        })
    };
    assert!(catch_unwind(AssertUnwindSafe(|| evaluate() as fsdp::Result<()>)).is_err());
    assert_eq!(weights(&model).unwrap(), [[3.0; 5]; 2]);
}

/// A sink that is kept is closed outside of the backward, and when the model is gone.
#[test]
fn a_gradient_written_at_the_wrong_time() {
    apart("reentrance::a_gradient_written_at_the_wrong_time", || {
        let model = Dots::new(1, 5).fully_shard(&DeviceMesh::single()).unwrap();
        let sink = model.module().units[0].w.grad_sink();
        let write = |sink: &fsdp::GradSink| {
            sink.accumulate_f32(|values, _| -> Result<(), ()> {
                values.fill(f32::NAN);
                Ok(())
            })
        };
        assert_eq!(write(&sink), Ok(false));
        let loss: Tensor = model.forward(&full(5, 2.0)).unwrap();
        assert_eq!(write(&sink), Ok(false));
        model.backward(&loss).unwrap();
        assert_eq!(write(&sink), Ok(false));
        assert_eq!(gradients(&model).unwrap(), [[2.0; 5]]);
        drop(model);
        assert_eq!(write(&sink), Ok(false));
    });
}
