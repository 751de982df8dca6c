//! Ops that change a parameter through its tensor: refused in every strategy, with the same words, and harmless.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, StorageRef, Tensor, Var};
use fsdp::prelude::*;

use crate::fixtures::{config, full, on_ranks};

/// What a forward does to its weight.
type Act = fn(&Tensor) -> Result<()>;

/// Done in one run of a forward, counted from 0.
#[derive(Clone, Default)]
struct Plan(Arc<Mutex<Option<(usize, Act)>>>, Arc<AtomicUsize>);

impl Plan {
    /// Has the forward after `runs` others do it.
    fn set(&self, runs: usize, act: Act) {
        *self.0.lock().unwrap() = Some((runs, act));
        self.1.store(0, Ordering::Relaxed);
    }

    fn run(&self, weight: &Tensor) -> Result<()> {
        let run = self.1.fetch_add(1, Ordering::Relaxed);
        let act = self.0.lock().unwrap().take_if(|(at, _)| *at == run);
        act.map_or(Ok(()), |(_, act)| act(weight))
    }
}

/// Its loss is `sum_i w_i * x_i`; it acts on its weight first.
#[derive(FsdpUnit)]
struct Acting {
    w: Param,
    #[fsdp(skip)]
    plan: Plan,
}

impl Forward for Acting {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        self.plan.run(&w)?;
        (x * w)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct InUnit {
    unit: Unit<Acting>,
}

impl Forward for InUnit {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)
    }
}

/// Large enough for a part of it to be looked at only.
const LEN: usize = 4096;

fn acting(plan: &Plan) -> Acting {
    Acting { w: Param::new(LEN).with_init(Init::Ones), plan: plan.clone() }
}

fn in_unit(plan: &Plan, recompute: Recompute) -> InUnit {
    InUnit { unit: Unit::new(acting(plan)).recompute(recompute) }
}

/// Does to the memory of a tensor what safe code may do to a `Vec`.
struct Reach(fn(&mut Vec<f32>));

impl InplaceOp1 for Reach {
    fn name(&self) -> &'static str {
        "reach"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let CpuStorage::F32(vec) = storage else { candle_core::bail!("the weight is f32") };
        self.0(vec);
        Ok(())
    }
}

const ACTS: [(&str, Act); 10] = [
    ("push", |w| w.inplace_op1(&Reach(|vec| vec.push(1.0)))),
    ("grow and shrink", |w| {
        w.inplace_op1(&Reach(|vec| {
            vec.extend(vec![1.0; 10 * LEN]);
            vec.truncate(LEN);
        }))
    }),
    ("take and drop", |w| w.inplace_op1(&Reach(|vec| drop(std::mem::replace(vec, vec![1.0; LEN]))))),
    ("another length", |w| w.inplace_op1(&Reach(|vec| *vec = vec![1.0; 2 * LEN]))),
    ("write", |w| w.inplace_op1(&Reach(|vec| vec.fill(2.0)))),
    ("write a view", |w| w.detach().reshape((2, LEN / 2))?.t()?.inplace_op1(&Reach(|vec| vec.fill(2.0)))),
    ("set", |w| Var::from_tensor(w)?.set(&full(LEN, 2.0))),
    ("slice_set", |w| w.slice_set(&full(LEN, 2.0), 0, 0)),
    ("zero_set", |w| w.zero_set()),
    ("const_set", |w| w.const_set(candle_core::scalar::Scalar::F32(2.0))),
];

const STRATEGIES: [Strategy; 4] =
    [Strategy::NoShard, Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams];

fn check(error: &fsdp::Error, name: &str, unit: &str, what: &str) {
    let error = error.to_string();
    for part in [format!("`{name}`"), format!("unit `{unit}`"), "changed in place".into(), "load".into()] {
        assert!(error.contains(&part), "{what}: {part} in {error}");
    }
}

fn first_weight<M>(model: &Fsdp<M>) -> fsdp::Result<f32> {
    let mut first = f32::NAN;
    model.visit_weights(|_, values| {
        first = values[0];
        Ok(())
    })?;
    Ok(first)
}

/// Trains `steps` steps, acts in the forward run number `run` of the next, sees every use of the model refused until its
/// weights are loaded, and trains on.
fn refused<M>(
    make: impl Fn(&Plan) -> M + Sync,
    name: &str,
    unit: &str,
    setting: (&FsdpConfig, usize),
    when: (u64, usize),
    act: (&str, Act),
) where
    M: FsdpUnit + Forward + Send + Sync,
{
    let ((config, ranks), (steps, run)) = (setting, when);
    let what = format!("{}, {name}, {}, {ranks} ranks", act.0, config.strategy);
    on_ranks(ranks, |world| {
        let plan = Plan::default();
        let mut model = make(&plan).fully_shard_with(&world.data_parallel_mesh(), config)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
        let x = full(LEN, 0.5);
        for _ in 0..steps {
            let loss: Tensor = model.forward(&x)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
        }
        plan.set(run, act.1);
        let outcome = model.forward(&x).and_then(|loss: Tensor| model.backward(&loss));
        check(&outcome.unwrap_err(), name, unit, &what);
        let forward: fsdp::Result<Tensor> = model.forward(&x);
        check(&forward.unwrap_err(), name, unit, &what);
        let evaluation: fsdp::Result<Tensor> = model.evaluate(&x);
        check(&evaluation.unwrap_err(), name, unit, &what);
        assert!(optimizer.step(&mut model).is_err(), "{what}");
        check(&first_weight(&model).unwrap_err(), name, unit, &what);
        model.reset_step()?;
        check(&first_weight(&model).unwrap_err(), name, unit, &what);
        model.load_weights(|_, _, values| {
            values.fill(3.0);
            Ok(())
        })?;
        assert_eq!(first_weight(&model)?, 3.0, "{what}");
        let loss: Tensor = model.forward(&x)?;
        assert_eq!(loss.to_scalar::<f32>()?, 1.5 * LEN as f32, "{what}");
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        assert_eq!(first_weight(&model)?, 2.5, "{what}");
        Ok(())
    });
}

/// Runs the test of this name alone in a process of its own, which may be ended by what the test does; there, runs `body`.
fn in_own_process(test: &str, body: impl FnOnce()) {
    const INSIDE: &str = "FSDP_TEST_IN_OWN_PROCESS";
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let program = std::env::current_exe().unwrap();
    let test = format!("aliasing_in_place::{test}");
    let output =
        Command::new(program).args([&test, "--exact", "--nocapture"]).env(INSIDE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
}

#[test]
fn changing_the_weight_of_a_unit_is_refused() {
    in_own_process("changing_the_weight_of_a_unit_is_refused", || {
        for strategy in STRATEGIES {
            for ranks in [1, 2] {
                for act in ACTS {
                    let make = |plan: &Plan| in_unit(plan, Recompute::None);
                    refused(make, "unit.w", "unit", (&config(strategy), ranks), (0, 0), act);
                }
            }
        }
    });
}

#[test]
fn changing_the_weight_of_the_root_is_refused() {
    in_own_process("changing_the_weight_of_the_root_is_refused", || {
        for strategy in STRATEGIES {
            for ranks in [1, 2] {
                for act in ACTS {
                    refused(acting, "w", "(root)", (&config(strategy), ranks), (0, 0), act);
                }
            }
        }
    });
}

#[test]
fn changing_a_weight_is_refused_in_a_later_step_and_in_a_recomputation() {
    in_own_process("changing_a_weight_is_refused_in_a_later_step_and_in_a_recomputation", || {
        for strategy in STRATEGIES {
            for act in ACTS {
                // As a release build does: after the first step only samples are compared.
                let config = FsdpConfig { poison: false, ..config(strategy) };
                let make = |plan: &Plan| in_unit(plan, Recompute::Unit);
                refused(make, "unit.w", "unit", (&config, 2), (1, 1), act);
            }
        }
    });
}

#[test]
fn the_memory_of_two_parameters_may_be_exchanged_without_harm() {
    /// Two parameters of one shape, exchanged in the forward.
    #[derive(FsdpUnit)]
    struct Pair {
        a: Param,
        b: Param,
    }

    struct Exchange(Mutex<Vec<f32>>);

    impl InplaceOp1 for Exchange {
        fn name(&self) -> &'static str {
            "exchange"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            let CpuStorage::F32(vec) = storage else { candle_core::bail!("the weight is f32") };
            std::mem::swap(vec, &mut self.0.lock().unwrap());
            Ok(())
        }
    }

    impl Forward for Pair {
        fn forward(&self, _: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
            let (a, b) = (self.a.tensor(scope)?, self.b.tensor(scope)?);
            let exchange = Exchange(Mutex::default());
            for tensor in [&a, &b, &a] {
                tensor.inplace_op1(&exchange)?;
            }
            (a * 2.0)?.sum_all()? + b.sum_all()?
        }
    }

    in_own_process("the_memory_of_two_parameters_may_be_exchanged_without_harm", || {
        for strategy in STRATEGIES {
            on_ranks(2, |world| {
                let pair = Pair { a: Param::new(LEN), b: Param::new(LEN) };
                let model = pair.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let error = Fsdp::evaluate::<Tensor, Tensor>(&model, &full(1, 1.0)).unwrap_err();
                check(&error, "a", "(root)", "exchange");
                Ok(())
            });
        }
    });
}

thread_local! {
    /// A guard of a weight's storage that outlives the forward.
    static GUARD: RefCell<Option<StorageRef<'static>>> = const { RefCell::new(None) };
}

fn keep_guard(w: &Tensor) -> Result<()> {
    let w: &'static Tensor = Box::leak(Box::new(w.clone()));
    GUARD.set(Some(w.storage_and_layout().0));
    Ok(())
}

fn guarded<M>(make: impl Fn(&Plan) -> M + Sync, name: &str, unit: &str, strategy: Strategy)
where
    M: FsdpUnit + Forward + Send + Sync,
{
    on_ranks(2, |world| {
        let plan = Plan::default();
        let mut model = make(&plan).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
        let x = full(LEN, 0.5);
        let check = |error: fsdp::Error| {
            let error = error.to_string();
            for part in [
                &format!("`{name}`"),
                &format!("unit `{unit}`"),
                "guard",
                "`storage_and_layout`",
                "still alive",
            ] {
                assert!(error.contains(part), "{strategy}: {part} in {error}");
            }
        };
        plan.set(0, keep_guard);
        let outcome = model.forward(&x).and_then(|loss: Tensor| model.backward(&loss));
        check(outcome.unwrap_err());
        check(Fsdp::forward::<Tensor, Tensor>(&model, &x).unwrap_err());
        check(first_weight(&model).unwrap_err());
        GUARD.take();
        model.reset_step()?;
        assert_eq!(first_weight(&model)?, 1.0);
        let loss: Tensor = model.forward(&x)?;
        assert_eq!(loss.to_scalar::<f32>()?, 0.5 * LEN as f32);
        model.backward(&loss)
    });
}

#[test]
fn a_guard_that_outlives_its_units_forward_is_an_error_and_no_hang() {
    side_by_side([Strategy::NoShard, Strategy::OptimGradsParams], |strategy| {
        guarded(|plan| in_unit(plan, Recompute::None), "unit.w", "unit", strategy);
    });
}

#[test]
fn a_guard_of_the_roots_weight_is_an_error_and_no_hang() {
    side_by_side([Strategy::OptimGrads, Strategy::OptimGradsParams], |strategy| {
        guarded(acting, "w", "(root)", strategy);
    });
}

/// A guard is waited for, for seconds: both strategies wait at a time.
fn side_by_side(strategies: [Strategy; 2], test: impl Fn(Strategy) + Sync) {
    std::thread::scope(|scope| {
        let test = &test;
        let threads = strategies.map(|strategy| scope.spawn(move || test(strategy)));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
