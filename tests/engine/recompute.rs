//! Units and their lifecycle: called twice, evaluated, nested, recomputed.

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, full, gradients, named, on_ranks};

#[derive(FsdpUnit)]
struct Scale {
    w: Param,
}

impl Forward for Scale {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

/// `loss = (w x)(w x)` by two calls of the unit.
#[derive(FsdpUnit)]
struct Siamese {
    unit: Unit<Scale>,
}

impl Forward for Siamese {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let (left, right) = (self.unit.forward(x, &(), scope)?, self.unit.forward(x, &(), scope)?);
        (left * right)?.sum_all()
    }
}

#[test]
fn a_unit_called_twice_is_reduced_once_with_the_sum() {
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(2, |world| {
                let config = FsdpConfig { recompute, ..config(strategy) };
                let unit = Unit::new(Scale { w: Param::new(1).with_init(Init::Constant(2.0)) });
                let mut model = Siamese { unit }.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                for _ in 0..2 {
                    let before = reductions(&model);
                    let loss: Tensor = model.forward(&full(1, 3.0))?;
                    assert_eq!(loss.to_scalar::<f32>()?, 36.0);
                    model.backward(&loss)?;
                    assert_eq!(
                        gradients(&model)?,
                        named(&[("unit.w", &[36.0])]),
                        "{strategy}, {recompute:?}"
                    );
                    assert_eq!(reductions(&model) - before, 1, "{strategy}, {recompute:?}");
                    model.reset_step()?;
                }
                Ok(())
            });
        }
    }
}

fn reductions<M>(model: &Fsdp<M>) -> u64 {
    let traffic = model.traffic();
    let reduces = traffic.iter().filter(|t| ["reduce-scatter", "all-reduce"].contains(&t.operation));
    reduces.map(|t| t.counter.calls).sum()
}

#[test]
fn after_evaluation_nothing_is_gathered() {
    on_ranks(4, |world| {
        let model = Dots { units: (0..3).map(|_| Dot::zeros(1000)).collect() };
        let config = FsdpConfig { double_buffer: false, ..config(Strategy::OptimGradsParams) };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let loss: Tensor = model.evaluate(&vec![full(1000, 1.0); 3])?;
        assert!(!loss.track_op());
        assert_eq!(model.gathered_units(), Vec::<String>::new());
        let memory = model.memory(2);
        assert_eq!(memory[4].usage.current, 0, "gathered bytes");
        // 1000 elements over 4 ranks, rounded up to whole cache lines of 16.
        assert_eq!(memory[0].usage.current, 3 * 256 * 4);
        Ok(())
    });
}

#[test]
fn what_an_evaluation_gathered_ahead_in_vain_is_given_up() {
    on_ranks(2, |world| {
        let model = Dots { units: (0..3).map(|_| Dot::zeros(1000)).collect() };
        let config = FsdpConfig { double_buffer: false, ..config(Strategy::OptimGradsParams) };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        for used in [3, 3, 1, 2] {
            let _: Tensor = model.evaluate(&vec![full(1000, 1.0); used])?;
            assert_eq!(model.gathered_units(), Vec::<String>::new(), "{used} units");
            assert_eq!(model.memory(2)[4].usage.current, 0, "gathered bytes, {used} units");
        }
        Ok(())
    });
}

/// A unit inside a unit.
#[derive(FsdpUnit)]
struct Outer {
    scale: Param,
    inner: Unit<Scale>,
}

impl Forward for Outer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.inner.forward(&x.broadcast_mul(&self.scale.tensor(scope)?)?, &(), scope)
    }
}

#[derive(FsdpUnit)]
struct Nest {
    outer: Unit<Outer>,
}

impl Forward for Nest {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.outer.forward(x, &(), scope)?.sum_all()
    }
}

#[test]
fn nested_units_compose() {
    for strategy in Strategy::ALL {
        for (outer, inner) in [
            (Recompute::None, Recompute::None),
            (Recompute::Unit, Recompute::None),
            (Recompute::Unit, Recompute::Unit),
        ] {
            on_ranks(2, |world| {
                let scale = |value| Param::new(1).with_init(Init::Constant(value));
                let nest = Nest {
                    outer: Unit::new(Outer {
                        scale: scale(2.0),
                        inner: Unit::new(Scale { w: scale(5.0) }).recompute(inner),
                    })
                    .recompute(outer),
                };
                let mut model = nest.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                for _ in 0..3 {
                    let loss: Tensor = model.forward(&full(3, 7.0))?;
                    assert_eq!(loss.to_scalar::<f32>()?, 210.0);
                    model.backward(&loss)?;
                    let expected = named(&[("outer.scale", &[105.0]), ("outer.inner.w", &[42.0])]);
                    assert_eq!(gradients(&model)?, expected, "{strategy}");
                    model.reset_step()?;
                }
                Ok(())
            });
        }
    }
}

/// Three units of one shape, each inside the other: one more than the pool has buffers.
#[derive(FsdpUnit)]
struct Matryoshka {
    w: Param,
    inner: Option<Box<Unit<Matryoshka>>>,
}

impl Matryoshka {
    fn new(depth: usize) -> Matryoshka {
        let inner = (depth > 1).then(|| Box::new(Unit::new(Matryoshka::new(depth - 1))));
        Matryoshka { w: Param::new(1).with_init(Init::Constant(2.0)), inner }
    }
}

impl Forward for Matryoshka {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        let inner = match &self.inner {
            Some(inner) => inner.forward(x, &(), scope)?,
            None => x.clone(),
        };
        inner.broadcast_mul(&w)
    }
}

#[derive(FsdpUnit)]
struct Shelf {
    doll: Unit<Matryoshka>,
}

impl Forward for Shelf {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.doll.forward(x, &(), scope)?.sum_all()
    }
}

#[test]
fn units_nested_deeper_than_the_pool_fall_back_to_buffers_of_their_own() {
    for recompute in [Recompute::None, Recompute::Unit] {
        on_ranks(2, |world| {
            let config = FsdpConfig { recompute, ..config(Strategy::default()) };
            let shelf = Shelf { doll: Unit::new(Matryoshka::new(4)) };
            let mut model = shelf.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            for _ in 0..3 {
                let loss: Tensor = model.forward(&full(1, 3.0))?;
                assert_eq!(loss.to_scalar::<f32>()?, 48.0);
                model.backward(&loss)?;
                assert!(gradients(&model)?.iter().all(|(_, gradient)| gradient == &[24.0]));
                model.reset_step()?;
            }
            // Only the two buffers of the pool are left.
            assert_eq!(model.memory(0)[4].usage.current, 2 * 32 * 4);
            Ok(())
        });
    }
}

#[test]
fn a_forward_whose_loss_is_dropped_leaves_nothing_behind() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::zeros(3), Dot::zeros(3)] };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            drop(model.forward(&vec![full(3, 5.0); 2])?);
            let loss: Tensor = model.forward(&vec![full(3, 1.0); 2])?;
            let _: Tensor = model.evaluate(&vec![full(3, 9.0); 2])?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[1.0; 3]), ("units.1.w", &[1.0; 3])]));
            Ok(())
        });
    }
}

#[test]
fn two_forwards_before_their_backwards_accumulate() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::zeros(3), Dot::zeros(3)] };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let first = model.forward(&vec![full(3, 1.0); 2])?;
            let second = model.forward(&vec![full(3, 10.0); 2])?;
            model.backward(&(first + second)?)?;
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[11.0; 3]), ("units.1.w", &[11.0; 3])]));
            Ok(())
        });
    }
}

#[test]
fn backward_twice_or_without_forward_is_an_error() {
    on_ranks(1, |world| {
        let model = Dots { units: vec![Dot::zeros(3)] }.fully_shard(&world.data_parallel_mesh())?;
        let scalar = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        let error = model.backward(&scalar).unwrap_err().to_string();
        assert!(error.contains("forward"), "{error}");
        let loss = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&loss)?;
        let other = model.forward(&vec![full(3, 1.0)])?;
        let error = model.backward(&loss).unwrap_err().to_string();
        assert!(error.contains("twice"), "{error}");
        drop(other);
        let loss: Tensor = model.forward(&vec![full(3, 2.0)])?;
        model.backward(&loss)?;
        assert_eq!(gradients(&model)?, named(&[("units.0.w", &[2.0; 3])]));
        let error = model.backward(&full(2, 1.0)).unwrap_err().to_string();
        assert!(error.contains("[2]"), "{error}");
        Ok(())
    });
}
