//! After an error that all ranks have alike, the next iteration is whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_each_close};

use crate::fixtures::{config, full, gradients, on_ranks, weights};

const UNITS: usize = 4;

/// The identity; its backward fails while it is armed, when it is run for the so manieth time.
#[derive(Clone)]
struct Fuse {
    forwards_left: Arc<AtomicUsize>,
    backwards_left: Arc<AtomicUsize>,
}

/// Counts down to a failure; `usize::MAX` never fails.
fn burn(left: &AtomicUsize, what: &str) -> Result<()> {
    match left.load(Ordering::Relaxed) {
        usize::MAX => Ok(()),
        0 => candle_core::bail!("{what} failed on purpose"),
        more => {
            left.store(more - 1, Ordering::Relaxed);
            Ok(())
        }
    }
}

impl CustomOp1 for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        burn(&self.forwards_left, "forward")?;
        let (start, end) = layout.contiguous_offsets().expect("the unit gives a whole tensor");
        Ok((CpuStorage::F32(storage.as_slice::<f32>()?[start..end].to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        burn(&self.backwards_left, "backward")?;
        Ok(Some(grad.clone()))
    }
}

/// `x w`, and a unit inside it.
#[derive(FsdpUnit)]
struct Outer {
    w: Param,
    inner: Unit<Inner>,
    #[fsdp(skip)]
    fuse: Fuse,
}

#[derive(FsdpUnit)]
struct Inner {
    w: Param,
    #[fsdp(skip)]
    fuse: Fuse,
}

impl Forward for Inner {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        (x * self.w.tensor(scope)?)?.apply_op1(self.fuse.clone())
    }
}

impl Forward for Outer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = (x * self.w.tensor(scope)?)?.apply_op1(self.fuse.clone())?;
        self.inner.forward(&x, &(), scope)
    }
}

#[derive(FsdpUnit)]
struct Model {
    gain: Param,
    units: Vec<Unit<Outer>>,
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = (x * self.gain.tensor(scope)?)?;
        for unit in &self.units {
            x = unit.forward(&x, &(), scope)?;
        }
        x.sum_all()
    }
}

fn every_way(check: impl Fn(&FsdpConfig)) {
    use ReshardAfterForward::{Always, Never, Ranks};
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            for reshard_after_forward in [Always, Never, Ranks(2)] {
                if reshard_after_forward == Always || strategy.shards_params() {
                    check(&FsdpConfig { recompute, reshard_after_forward, ..config(strategy) });
                }
            }
        }
    }
}

/// Fails `left` fuses into a pass, then trains on: the weights are those of a model that never failed.
fn fails_and_recovers(config: &FsdpConfig, in_backward: bool, left: usize) {
    on_ranks(2, |world| {
        let fuse = Fuse {
            forwards_left: Arc::new(AtomicUsize::new(usize::MAX)),
            backwards_left: Arc::new(AtomicUsize::new(usize::MAX)),
        };
        let param = |value| Param::new(3).with_init(Init::Constant(value));
        let outer = || {
            let inner = Unit::new(Inner { w: param(1.0), fuse: fuse.clone() });
            Unit::new(Outer { w: param(1.0), inner, fuse: fuse.clone() })
        };
        let model = Model { gain: param(1.0), units: (0..UNITS).map(|_| outer()).collect() };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), config)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.25))?;
        // A step that works, so that the order is known and gathers are under way when the failure comes.
        let loss: Tensor = model.forward(&full(3, 0.0))?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        // Gradients of an earlier microbatch, which the failure takes along.
        model.set_is_last_microbatch(false);
        let loss: Tensor = model.forward(&full(3, 5.0))?;
        model.backward(&loss)?;
        model.set_is_last_microbatch(true);
        let armed = if in_backward { &fuse.backwards_left } else { &fuse.forwards_left };
        let error = if in_backward {
            let loss: Tensor = model.forward(&full(3, 7.0))?;
            armed.store(left, Ordering::Relaxed);
            model.backward(&loss).unwrap_err()
        } else {
            armed.store(left, Ordering::Relaxed);
            Fsdp::forward::<Tensor, Tensor>(&model, &full(3, 7.0)).unwrap_err()
        };
        assert!(error.to_string().contains("failed on purpose"), "{error}");
        armed.store(usize::MAX, Ordering::Relaxed);
        model.reset_step()?;
        assert_eq!(model.gathered_units(), Vec::<String>::new());
        for step in 0..2 {
            let loss: Tensor = model.forward(&full(3, 1.0 + world.rank() as f32))?;
            model.backward(&loss)?;
            if step == 0 {
                let gradients = gradients(&model)?;
                assert_eq!(gradients.len(), 1 + 2 * UNITS);
                for (name, gradient) in gradients {
                    assert_eq!(gradient, [1.5; 3], "{name}, {config:?}");
                }
            }
            optimizer.step(&mut model)?;
        }
        // All weights do the same: w -= 0.25 * 1.5 * w^8, twice.
        let first = 1.0 - 0.25 * 1.5f32;
        let expected = first - 0.25 * 1.5 * first.powi(2 * UNITS as i32);
        for (name, values) in weights(&model)? {
            assert_each_close(&values, expected.into(), absolute(1e-6), name);
        }
        Ok(())
    });
}

#[test]
fn an_error_in_a_forward() {
    every_way(|config| {
        for left in [0, 1, 3] {
            fails_and_recovers(config, false, left);
        }
    });
}

#[test]
fn an_error_in_a_backward() {
    every_way(|config| {
        for left in [0, 1, 4] {
            fails_and_recovers(config, true, left);
        }
    });
}

#[test]
fn an_error_in_recomputation() {
    for strategy in Strategy::ALL {
        // All forwards of the first pass, and some of the second.
        for left in [2 * UNITS, 2 * UNITS + 1, 2 * UNITS + 5] {
            on_ranks(2, |world| {
                let never = || Arc::new(AtomicUsize::new(usize::MAX));
                let fuse = Fuse { forwards_left: never(), backwards_left: never() };
                let param = || Param::new(3).with_init(Init::Ones);
                let outer = || {
                    let inner = Unit::new(Inner { w: param(), fuse: fuse.clone() });
                    Unit::new(Outer { w: param(), inner, fuse: fuse.clone() })
                };
                let model = Model { gain: param(), units: (0..UNITS).map(|_| outer()).collect() };
                let config = FsdpConfig { recompute: Recompute::Unit, ..config(strategy) };
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                fuse.forwards_left.store(left, Ordering::Relaxed);
                let loss: Tensor = model.forward(&full(3, 1.0))?;
                let text = model.backward(&loss).unwrap_err().to_string();
                assert!(text.contains("failed on purpose") && text.contains("backward"), "{text}");
                fuse.forwards_left.store(usize::MAX, Ordering::Relaxed);
                // A backward that fails has reset the step by itself.
                let loss: Tensor = model.forward(&full(3, 1.0))?;
                model.backward(&loss)?;
                let gradients = gradients(&model)?;
                assert_eq!(gradients.len(), 1 + 2 * UNITS);
                assert!(gradients.iter().all(|(_, gradient)| gradient == &[1.0; 3]), "{gradients:?}");
                Ok(())
            });
        }
    }
}
