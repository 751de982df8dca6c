//! A parameter's values are there in its unit's forward and nowhere else.

use std::sync::Mutex;

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{config, full, on_ranks};

/// A unit that leaks its parameter's tensor.
#[derive(FsdpUnit)]
struct Leaky {
    w: Param,
    #[fsdp(skip)]
    leaked: Mutex<Option<Tensor>>,
}

impl Forward for Leaky {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        *self.leaked.lock().unwrap() = Some(w.clone());
        x.matmul(&w)
    }
}

#[derive(FsdpUnit)]
struct Model {
    unit: Unit<Leaky>,
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)?.sum_all()
    }
}

fn leak(strategy: Strategy, check: impl Fn(&Tensor) + Sync) {
    on_ranks(2, |world| {
        let leaky = Leaky { w: Param::new((4, 4)), leaked: Mutex::new(None) };
        let model = Model { unit: Unit::new(leaky) };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
        let x = Tensor::ones((4, 4), candle_core::DType::F32, &Device::Cpu)?;
        let loss: Tensor = model.forward(&x)?;
        let leaked = model.module().unit.leaked.lock().unwrap().take().unwrap();
        check(&leaked);
        model.backward(&loss)?;
        check(&leaked);
        Ok(())
    });
}

#[test]
fn ops_on_a_leaked_tensor_of_a_resharded_parameter_err() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let ops: Vec<(&str, Op)> = vec![
        ("matmul", |t| t.matmul(&full(16, 1.0).reshape((4, 4))?)),
        ("matmul, right", |t| full(16, 1.0).reshape((4, 4))?.matmul(t)),
        ("matmul of its transpose", |t| t.t()?.matmul(t)),
        ("add", |t| t + t),
        ("add, right", |t| full(16, 1.0).reshape((4, 4))? + t),
        ("sub", |t| t - t),
        ("mul", |t| t * t),
        ("div", |t| t / t),
        ("affine", |t| t.affine(2.0, 1.0)),
        ("broadcast_add", |t| t.broadcast_add(&full(4, 1.0))),
        ("broadcast_mul", |t| full(4, 1.0).broadcast_mul(t)),
        ("sum_all", |t| t.sum_all()),
        ("sum", |t| t.sum(0)),
        ("mean", |t| t.mean(1)),
        ("max", |t| t.max(0)),
        ("sqr", |t| t.sqr()),
        ("sqrt", |t| t.sqrt()),
        ("exp", |t| t.exp()),
        ("log", |t| t.log()),
        ("tanh", |t| t.tanh()),
        ("relu", |t| t.relu()),
        ("gelu", |t| t.gelu()),
        ("silu", |t| t.silu()),
        ("powf", |t| t.powf(2.0)),
        ("cmp", |t| t.ge(t)),
        ("index_select", |t| t.index_select(&Tensor::new(&[1u32, 3], &Device::Cpu)?, 0)),
        ("gather", |t| t.gather(&Tensor::zeros((4, 4), candle_core::DType::U32, &Device::Cpu)?, 0)),
        ("where_cond", |t| Tensor::ones((4, 4), candle_core::DType::U8, &Device::Cpu)?.where_cond(t, t)),
        ("to_dtype f64", |t| t.to_dtype(candle_core::DType::F64)),
        ("cat", |t| Tensor::cat(&[t, t], 0)),
        ("contiguous of its transpose", |t| t.t()?.contiguous()),
    ];
    for strategy in [Strategy::OptimGradsParams, Strategy::NoShard] {
        leak(strategy, |leaked| {
            for (name, op) in &ops {
                assert!(op(leaked).is_err(), "{name} computed something, {strategy}");
            }
            assert!(leaked.to_vec2::<f32>().is_err());
            assert!(leaked.sum_all().is_err());
        });
    }
}

#[derive(FsdpUnit)]
struct Thief {
    a: Unit<Leaky>,
    b: Unit<Borrower>,
    #[fsdp(skip)]
    stray: Param,
}

#[derive(FsdpUnit)]
struct Borrower {
    own: Param,
    #[fsdp(skip)]
    foreign: Param,
}

impl Forward for Borrower {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.matmul(&self.foreign.tensor(scope)?)
    }
}

impl Forward for Thief {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.b.forward(x, &(), scope)
    }
}

/// The root reads a parameter that was never part of the model.
#[derive(FsdpUnit)]
struct Stray {
    #[fsdp(skip)]
    stray: Param,
}

impl Forward for Stray {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x + self.stray.tensor(scope)?
    }
}

#[test]
fn reading_another_units_parameter_names_parameter_and_units() {
    on_ranks(2, |world| {
        let w = Param::new((4, 4));
        let model = Thief {
            a: Unit::new(Leaky { w: w.clone(), leaked: Mutex::new(None) }),
            b: Unit::new(Borrower { own: Param::new(1), foreign: w }),
            stray: Param::new(1),
        };
        let _ = &model.stray;
        let _ = &model.b.own;
        let model = model.fully_shard(&world.data_parallel_mesh())?;
        let x = full(16, 1.0).reshape((4, 4))?;
        let error = Fsdp::forward::<Tensor, Tensor>(&model, &x).unwrap_err().to_string();
        for part in ["`a.w`", "unit `a`", "unit `b`", "sharded"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        let stray = Stray { stray: Param::new(1) }.fully_shard(&world.data_parallel_mesh())?;
        let error = Fsdp::forward::<Tensor, Tensor>(&stray, &full(1, 1.0)).unwrap_err().to_string();
        assert!(error.contains("no place in the sharded model"), "{error}");
        Ok(())
    });
}

#[test]
fn a_model_is_sharded_once() {
    on_ranks(1, |world| {
        let shared = Param::new((4, 4));
        let make = || Model { unit: Unit::new(Leaky { w: shared.clone(), leaked: Mutex::new(None) }) };
        let _first = make().fully_shard(&world.data_parallel_mesh())?;
        let error = make().fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        assert!(error.contains("`unit.w`") && error.contains("already"), "{error}");
        Ok(())
    });
}
