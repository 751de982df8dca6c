//! Tensors of parameters that a program keeps: what it can do with them is an error, never a look at memory that others
//! write.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp::optim::{OptimError, Optimizer, Segment, StepInfo};
use fsdp::prelude::*;

use crate::fixtures::{config, full, on_ranks};

const STRATEGIES: [Strategy; 4] =
    [Strategy::NoShard, Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams];

type Kept = Arc<Mutex<Option<Tensor>>>;

/// A parameter of the root, which stays whole between forward and backward; its loss is `sum_i w_i * x_i`.
#[derive(FsdpUnit)]
struct Root {
    w: Param,
    #[fsdp(skip)]
    kept: Kept,
}

impl Forward for Root {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        *self.kept.lock().unwrap() = Some(w.clone());
        (x * w)?.sum_all()
    }
}

fn root() -> (Root, Kept) {
    let kept = Kept::default();
    (Root { w: Param::new(64).with_init(Init::Ones), kept: kept.clone() }, kept)
}

/// Fails if the kept tensor can be read or written.
fn check_out_of_reach(kept: &Kept) {
    let kept = kept.lock().unwrap().clone().expect("the forward keeps it");
    assert!(kept.to_vec1::<f32>().is_err(), "it was read");
    assert!(kept.sum_all().is_err(), "it was summed");
    let variable = Var::from_tensor(&kept).unwrap();
    assert!(variable.set(&full(64, 100.0)).is_err(), "it was set");
    assert!(kept.slice_set(&full(64, 100.0), 0, 0).is_err(), "it was written in place");
}

/// Checks in each update that the kept tensor is out of reach.
#[derive(Clone)]
struct Watching(Kept);

impl Optimizer for Watching {
    fn name(&self) -> &'static str {
        "watching"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }

    fn learning_rate(&self) -> f64 {
        1.0
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn validate(&self) -> std::result::Result<(), OptimError> {
        Ok(())
    }

    fn update(&self, _at: StepInfo, segment: &mut Segment<'_>) {
        check_out_of_reach(&self.0);
        segment.weights.iter_mut().zip(segment.grads).for_each(|(weight, grad)| *weight -= grad);
    }
}

fn first_weight<M>(model: &Fsdp<M>) -> f32 {
    let mut first = f32::NAN;
    model
        .visit_weights(|_, values| {
            first = values[0];
            Ok(())
        })
        .unwrap();
    first
}

#[test]
fn a_kept_tensor_of_the_root_is_out_of_reach_of_whoever_has_the_weights() {
    for strategy in STRATEGIES {
        for ranks in [1, 2] {
            on_ranks(ranks, |world| {
                let (model, kept) = root();
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut model = model;
                let mut optimizer = model.optimizer(Watching(kept.clone()))?;
                let x = full(64, 2.0);
                let forward = |model: &Fsdp<Root>| -> fsdp::Result<Tensor> {
                    let loss = model.forward(&x)?;
                    let readable = kept.lock().unwrap().as_ref().unwrap().sum_all().is_ok();
                    assert!(readable, "the root stays whole for its backward");
                    Ok(loss)
                };
                forward(&model)?;
                model.load_weights(|_, _, values| {
                    check_out_of_reach(&kept);
                    values.fill(3.0);
                    Ok(())
                })?;
                forward(&model)?;
                model.with_full_params("", |params| {
                    check_out_of_reach(&kept);
                    params[0].values.fill(5.0);
                    Ok(())
                })?;
                forward(&model)?;
                model.visit_weights(|_, values| {
                    check_out_of_reach(&kept);
                    assert_eq!(values, [5.0; 64]);
                    Ok(())
                })?;
                // What looked between forward and backward changes no gradient: dloss/dw = x.
                let loss = forward(&model)?;
                assert_eq!(first_weight(&model), 5.0);
                model.backward(&loss)?;
                check_out_of_reach(&kept);
                optimizer.step(&mut model)?;
                assert_eq!(first_weight(&model), 3.0);
                Ok(())
            });
        }
    }
}

#[test]
fn a_kept_tensor_of_the_root_is_out_of_reach_of_a_step_in_the_backward() {
    for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
        on_ranks(2, |world| {
            let (model, kept) = root();
            let config = FsdpConfig { step_in_backward: true, ..config(strategy) };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Watching(kept.clone()))?;
            let loss: Tensor = model.forward(&full(64, 2.0))?;
            optimizer.backward_and_step(&mut model, &loss)?;
            assert_eq!(first_weight(&model), -1.0);
            Ok(())
        });
    }
}

/// Unit `a` keeps its weight, and unit `b` computes with it.
#[derive(FsdpUnit)]
struct Keeper {
    w: Param,
    #[fsdp(skip)]
    kept: Kept,
}

#[derive(FsdpUnit)]
struct User {
    w: Param,
    #[fsdp(skip)]
    kept: Kept,
    #[fsdp(skip)]
    op: fn(&Tensor, &Tensor) -> Result<Tensor>,
}

#[derive(FsdpUnit)]
struct Pair {
    a: Unit<Keeper>,
    b: Unit<User>,
}

impl Forward for Keeper {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        *self.kept.lock().unwrap() = Some(w.clone());
        x.matmul(&w)
    }
}

impl Forward for User {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let kept = self.kept.lock().unwrap().clone().unwrap();
        (self.op)(&x.matmul(&self.w.tensor(scope)?)?, &kept)
    }
}

impl Forward for Pair {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.b.forward(&self.a.forward(x, &(), scope)?, &(), scope)?.sum_all()
    }
}

#[test]
fn an_op_on_a_resharded_parameter_says_which_it_is_and_where_it_may_be_read() {
    type Op = fn(&Tensor, &Tensor) -> Result<Tensor>;
    let ops: [(&str, Op); 5] = [
        ("matmul", |x, kept| x.matmul(kept)),
        ("add", |x, kept| x + kept),
        ("sum", |_, kept| kept.sum_all()),
        ("index_select", |_, kept| kept.index_select(&Tensor::new(&[1u32], &Device::Cpu)?, 0)),
        ("to_vec", |_, kept| {
            kept.to_vec2::<f32>()?;
            Tensor::zeros(1, DType::F32, &Device::Cpu)
        }),
    ];
    for (name, op) in ops {
        for strategy in STRATEGIES {
            on_ranks(2, |world| {
                let kept = Kept::default();
                let model = Pair {
                    a: Unit::new(Keeper { w: Param::new((4, 4)), kept: kept.clone() }),
                    b: Unit::new(User { w: Param::new((4, 4)), kept, op }),
                };
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let x = full(16, 1.0).reshape((4, 4))?;
                let error = Fsdp::forward::<Tensor, Tensor>(&model, &x).unwrap_err().to_string();
                for part in ["unit `b`", "F4", "`a.w` of unit `a`", "Param::tensor(scope)", "visit_weights"] {
                    assert!(error.contains(part), "{name}: {part} in {error}");
                }
                assert!(!error.contains("`b.w`"), "{name}: b is whole: {error}");
                Ok(())
            });
        }
    }
}

fn assert_says(error: &fsdp::Error, parts: &[&str]) {
    assert!(matches!(error, fsdp::Error::Resharded { .. }), "{error:?}");
    for part in parts {
        assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn an_op_outside_of_all_forwards_says_which_parameters_are_resharded() {
    type Op = fn(&Tensor) -> Result<Tensor>;
    let ops: [Op; 5] = [
        |kept| kept.sqr(),
        |kept| kept + kept,
        |kept| kept.matmul(&full(16, 1.0).reshape((4, 4))?),
        |kept| Tensor::new(kept.to_vec2::<f32>()?, &Device::Cpu),
        |kept| kept.to_dtype(DType::BF16),
    ];
    for strategy in STRATEGIES {
        on_ranks(2, |world| {
            let kept = Kept::default();
            let model = Pair {
                a: Unit::new(Keeper { w: Param::new((4, 4)), kept: kept.clone() }),
                b: Unit::new(User { w: Param::new((4, 4)), kept: kept.clone(), op: |x, _| Ok(x.clone()) }),
            };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let loss: Tensor = model.forward(&full(16, 1.0).reshape((4, 4))?)?;
            let kept = kept.lock().unwrap().clone().unwrap();
            for after_backward in [false, true] {
                if after_backward {
                    model.backward(&loss)?;
                }
                for op in ops {
                    let error = fsdp::Error::from(op(&kept).unwrap_err());
                    let parts = [
                        "`a.w` of unit `a`",
                        "Param::tensor(scope)",
                        "visit_weights",
                        "`model.backward(&loss)`",
                    ];
                    assert_says(&error, &parts);
                    // What goes through candle's own error and back says it once.
                    let again = fsdp::Error::from(candle_core::Error::from(error)).to_string();
                    assert_eq!(again.matches("Resharded now").count(), 1, "{again}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_backward_of_candles_after_the_models_own_says_what_to_write() {
    for strategy in STRATEGIES {
        on_ranks(2, |world| {
            let (model, _) = root();
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
            let loss: Tensor = model.forward(&full(64, 2.0))?;
            model.backward(&loss)?;
            let error = fsdp::Error::from(loss.backward().map(drop).unwrap_err());
            let parts = [
                "`w` of unit `(root)`",
                "`backward_step`",
                "`model.backward(&loss)` once",
                "`optimizer.step(&mut",
            ];
            assert_says(&error, &parts);
            // It has done no harm.
            optimizer.step(&mut model)?;
            assert_eq!(first_weight(&model), -1.0);
            Ok(())
        });
    }
}

#[test]
fn an_error_that_has_nothing_to_do_with_parameters_is_left_alone() {
    on_ranks(1, |world| {
        let (model, _) = root();
        let model = model.fully_shard(&world.data_parallel_mesh())?;
        let loss: Tensor = model.forward(&full(64, 2.0))?;
        let error = fsdp::Error::from(loss.reshape((2, 2)).unwrap_err());
        assert!(matches!(error, fsdp::Error::Tensor(_)), "{error:?}");
        Ok(())
    });
}
