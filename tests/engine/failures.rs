//! Errors, not hangs: on every rank, naming unit, operation and ranks.

use std::time::Duration;

use candle_core::{Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, Two, config, dot, full, gradients, launcher, named, on_ranks, weights};

#[test]
fn ranks_with_different_models_learn_it_when_they_shard() {
    #[derive(FsdpUnit)]
    struct Fields<const SWAPPED: bool> {
        units: Vec<Unit<Dot>>,
    }
    for (mine, other) in [((8, "f32"), (10, "f32")), ((8, "bf16"), (8, "f32"))] {
        on_ranks(2, |world| {
            let (n, dtype) = if world.rank() == 0 { mine } else { other };
            let precision = MixedPrecision { param: dtype.parse().unwrap(), ..MixedPrecision::F32 };
            let config = FsdpConfig { precision, ..FsdpConfig::default() };
            let model = Fields::<true> { units: vec![Dot::zeros(3), Dot::zeros(n)] };
            let error = model.fully_shard_with(&world.data_parallel_mesh(), &config).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
            let differs =
                if mine.1 == other.1 { ["units.1.w", "8", "10"] } else { ["units.0.w", "bf16", "f32"] };
            for part in differs {
                assert!(text.contains(part), "{part} in {text}");
            }
            Ok(())
        });
    }
}

#[test]
fn ranks_with_different_settings_learn_it_too() {
    on_ranks(2, |world| {
        let strategy = Strategy::ALL[2 + world.rank()];
        let error = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("optim-grads") && text.contains("optim-grads-params"), "{text}");
        Ok(())
    });
}

#[test]
fn ranks_with_any_other_setting_learn_which() {
    type Change = fn(&mut FsdpConfig);
    let changes: [(&str, Change, [&str; 2]); 12] = [
        ("prefetch", |config| config.prefetch = 3, ["prefetch 1", "prefetch 3"]),
        ("gather", |config| config.gather_budget = Some(7), ["gather budget None", "gather budget Some(7)"]),
        ("reduce", |config| config.reduce_budget = Some(7), ["reduce budget None", "reduce budget Some(7)"]),
        ("bucket", |config| config.bucket_size = Some(9), ["bucket size None", "bucket size Some(9)"]),
        ("buffers", |config| config.double_buffer = false, ["double buffer true", "double buffer false"]),
        ("seed", |config| config.seed = 5, ["seed 0", "seed 5"]),
        ("scaling", |config| config.scaling = GradientScaling::Sum, ["Mean scaling", "Sum scaling"]),
        (
            "after",
            |config| config.reshard_after_backward = true,
            ["after backward false", "after backward true"],
        ),
        ("check", |config| config.check_finite = true, ["check finite false", "check finite true"]),
        (
            "strict",
            |config| config.strict_gradients = true,
            ["strict gradients false", "strict gradients true"],
        ),
        ("step", |config| config.step_in_backward = true, ["in backward false", "in backward true"]),
        ("weights", |config| config.precision.main_weights = false, ["weights true", "weights false"]),
    ];
    for (name, change, said) in changes {
        on_ranks(2, |world| {
            let mut config = config(Strategy::default());
            if world.rank() == 1 {
                change(&mut config);
            }
            let error = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config).unwrap_err();
            for part in said {
                assert!(matches!(error, fsdp::Error::RanksDiffer { .. }), "{name}: {error}");
                assert!(error.to_string().contains(part), "{name}: `{part}` is not in: {error}");
            }
            Ok(())
        });
    }
}

#[test]
fn ranks_with_different_meshes_learn_it_when_they_shard() {
    on_ranks(2, |world| {
        let mesh = if world.rank() == 0 {
            world.data_parallel_mesh()
        } else {
            world.mesh(&[("dp_outer", 2), ("dp_shard", 1)])?
        };
        let error = dot(3).fully_shard(&mesh).unwrap_err().to_string();
        for part in ["the ranks differ", "mesh dp_shard=2", "mesh dp_outer=2 x dp_shard=1"] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        Ok(())
    });
}

#[test]
fn ranks_that_gather_ahead_differently_learn_it_at_the_next_collective() {
    let outcome = launcher(2).run(|world| -> fsdp::Result<()> {
        let model =
            Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        // The same again is no difference.
        model.set_prefetch(1, 1)?;
        let loss: Tensor = model.forward(&(true, true, full(3, 1.0)))?;
        model.backward(&loss)?;
        model.set_prefetch(1 + world.rank(), 1)?;
        let loss: Tensor = model.forward(&(true, true, full(3, 1.0)))?;
        model.backward(&loss)?;
        model.finish_grad_sync()
    });
    let error = outcome.unwrap_err().to_string();
    let said = "with 2 units gathered ahead in forwards and 1 in backwards";
    assert!(error.contains(said), "`{said}` is not in: {error}");
}

/// The same two parameters in one order or the other.
#[derive(FsdpUnit)]
enum Ordered {
    Forwards { a: Param, b: Param },
    Backwards { b: Param, a: Param },
}

#[test]
fn ranks_with_swapped_fields_learn_it() {
    on_ranks(2, |world| {
        let (a, b) = (Param::new(8), Param::new(8));
        let model = if world.rank() == 0 { Ordered::Forwards { a, b } } else { Ordered::Backwards { b, a } };
        let text = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        assert!(text.contains("rank 0") && text.contains("rank 1"), "{text}");
        Ok(())
    });
}

#[test]
fn a_unit_called_more_often_on_one_rank_is_reported_by_both() {
    let texts = std::sync::Mutex::new(vec![String::new(); 2]);
    let outcome = launcher(2).run(|world| -> fsdp::Result<()> {
        let model = Two::zeros(3).fully_shard(&world.data_parallel_mesh())?;
        let call = || -> fsdp::Result<()> {
            for _ in 0..if world.rank() == 0 { 1 } else { 3 } {
                let _: Tensor = model.evaluate(&(false, true, full(3, 1.0)))?;
            }
            let _: Tensor = model.evaluate(&(true, false, full(3, 1.0)))?;
            Ok(())
        };
        call().inspect_err(|error| texts.lock().unwrap()[world.rank()] = error.to_string())
    });
    assert!(outcome.is_err());
    for text in texts.into_inner().unwrap() {
        for part in ["unit `a`", "unit `b`", "all-gather", "rank 0", "rank 1"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}

#[test]
fn ranks_that_call_units_differently_are_told_apart() {
    let error = launcher(2)
        .run(|world| -> fsdp::Result<()> {
            let model = Two::zeros(3).fully_shard(&world.data_parallel_mesh())?;
            let _: Tensor = model.evaluate(&(world.rank() == 0, true, full(3, 1.0)))?;
            let _: Tensor = model.evaluate(&(true, true, full(3, 1.0)))?;
            Ok(())
        })
        .unwrap_err()
        .to_string();
    for part in ["all-gather", "`a`", "`b`", "forward", "rank 0", "rank 1"] {
        assert!(error.contains(part), "{part} in {error}");
    }
}

/// Fails or panics in its forward when told to.
#[derive(FsdpUnit)]
struct Bomb {
    w: Param,
}

impl Forward<Option<String>> for Bomb {
    fn forward(&self, x: &Tensor, bomb: &Option<String>, scope: &Scope<'_>) -> Result<Tensor> {
        match bomb.as_deref() {
            Some("panic") => panic!("boom"),
            Some("error") => candle_core::bail!("bang"),
            Some("sleep") => std::thread::sleep(Duration::from_secs(4)),
            _ => {}
        }
        x * self.w.tensor(scope)?
    }
}

#[derive(FsdpUnit)]
struct Minefield {
    blocks: Vec<Unit<Bomb>>,
}

impl Forward<(), (Tensor, Option<String>)> for Minefield {
    fn forward(&self, (x, bomb): &(Tensor, Option<String>), _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for (index, block) in self.blocks.iter().enumerate() {
            let bomb = if index == 1 { bomb.clone() } else { None };
            x = block.forward(&x, &bomb, scope)?;
        }
        x.sum_all()
    }
}

fn minefield() -> Minefield {
    Minefield { blocks: (0..4).map(|_| Unit::new(Bomb { w: Param::new(3) })).collect() }
}

/// Each rank's error text when rank 1 meets `bomb` in step 3.
fn explode(bomb: &str, timeout: Duration) -> (Vec<Option<String>>, String) {
    let texts = std::sync::Mutex::new(vec![None; 3]);
    let outcome = launcher(3).timeout(timeout).run(|world| -> fsdp::Result<()> {
        let mut model = minefield().fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default())?;
        for step in 0..6 {
            let armed = (step == 3 && world.rank() == 1).then(|| bomb.to_string());
            let mut train = || -> fsdp::Result<()> {
                let loss: Tensor = model.forward(&(full(3, 1.0), armed.clone()))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                Ok(())
            };
            if let Err(error) = train() {
                texts.lock().unwrap()[world.rank()] = Some(error.to_string());
                return Err(error);
            }
        }
        Ok(())
    });
    let outcome = outcome.unwrap_err().to_string();
    (texts.into_inner().unwrap(), outcome)
}

#[test]
fn a_panic_on_one_rank_is_an_error_on_the_others() {
    let (texts, outcome) = explode("panic", Duration::from_secs(10));
    assert!(outcome.starts_with("rank 1 panicked: boom"), "{outcome}");
    for rank in [0, 2] {
        let text = texts[rank].as_ref().unwrap();
        assert!(text.contains("rank 1") && text.contains("boom"), "{text}");
    }
}

#[test]
fn an_error_on_one_rank_is_an_error_on_the_others() {
    let (texts, outcome) = explode("error", Duration::from_secs(10));
    let expected = "rank 1 failed: unit `blocks.1`, forward, step 4: bang";
    assert!(outcome.starts_with(expected), "{outcome}");
    for rank in [0, 2] {
        let text = texts[rank].as_ref().unwrap();
        assert!(text.contains("rank 1") && text.contains("bang"), "{text}");
    }
}

#[test]
fn a_rank_that_is_late_is_missed_by_name() {
    let (texts, _) = explode("sleep", Duration::from_secs(2));
    let text = texts[0].as_ref().unwrap();
    for part in ["blocks.", "forward", "step 4", "missing", "1", "all-gather"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(texts[1].is_some() && texts[2].is_some());
}

#[test]
fn a_reduction_that_failed_counts_even_if_no_rank_looks() {
    let outcome = launcher(2).timeout(Duration::from_secs(2)).run(|world| -> fsdp::Result<()> {
        let model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        if world.rank() == 1 {
            std::thread::sleep(Duration::from_secs(5));
        }
        // Rank 1 is late for the reduction; neither waits for it.
        let _ = model.backward(&loss);
        Ok(())
    });
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("units.0") && text.contains("reduce-scatter"), "{text}");
}

#[test]
fn weights_that_change_between_forward_and_backward_are_refused() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::zeros(3), Dot::zeros(3)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default())?;
            let stale: Tensor = model.forward(&vec![full(3, 1.0); 2])?;
            let loss: Tensor = model.forward(&vec![full(3, 1.0); 2])?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            let other: Tensor = model.forward(&vec![full(3, 1.0); 2])?;
            let error = model.backward(&stale).unwrap_err().to_string();
            assert!(error.contains("weights have changed"), "{error}");
            drop(other);
            let stale: Tensor = model.forward(&vec![full(3, 1.0); 2])?;
            model.load_weights(|_, _, values| {
                values.fill(1.0);
                Ok(())
            })?;
            let error = model.backward(&stale).unwrap_err().to_string();
            assert!(error.contains("load_weights"), "{error}");
            Ok(())
        });
    }
}

#[test]
fn a_mistake_that_all_ranks_make_is_named_as_it_is() {
    #[derive(FsdpUnit)]
    struct Twice {
        a: std::sync::Arc<Unit<Dot>>,
        b: std::sync::Arc<Unit<Dot>>,
    }
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let a = std::sync::Arc::new(Dot::zeros(3));
        let error = Twice { b: a.clone(), a }.fully_shard(&mesh).unwrap_err().to_string();
        assert_eq!(error, "unit `b` is the same `Unit` as `a`: hold it once and call it twice");
        let init = Init::Normal { mean: 0.0, std: f32::NAN };
        let unit = Unit::new(Dot { w: Param::new(3).with_init(init) });
        let error = Dots { units: vec![unit] }.fully_shard(&mesh).unwrap_err().to_string();
        assert!(error.starts_with("parameter `units.0.w`") && error.contains("NaN"), "{error}");
        Ok(())
    });
}

#[test]
fn ranks_that_start_or_step_differently_are_told_apart() {
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let model = Dots { units: vec![Dot::with(3, world.rank() as f32)] };
        let error = model.fully_shard(&mesh).unwrap_err().to_string();
        assert!(error.contains("units.0.w") && error.contains("Constant(1.0)"), "{error}");
        let mut model = dot(3).fully_shard(&mesh)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.5 + world.rank() as f64))?;
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&loss)?;
        let error = optimizer.step(&mut model).unwrap_err().to_string();
        assert!(error.contains("learning rate 0.5") && error.contains("learning rate 1.5"), "{error}");
        Ok(())
    });
}

#[test]
fn after_an_error_on_all_ranks_the_model_is_usable_again() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = minefield().fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let armed = (full(3, 1.0), Some("error".to_string()));
            let error = Fsdp::forward::<_, Tensor>(&model, &armed).unwrap_err().to_string();
            assert!(error.contains("bang"), "{error}");
            model.reset_step()?;
            let loss: Tensor = model.forward(&(full(3, 1.0), None))?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?.len(), 4);
            Ok(())
        });
    }
}

#[test]
fn a_mesh_that_does_not_fit_shows_the_numbers() {
    on_ranks(4, |world| {
        let error = world.mesh(&[("dp_outer", 3), ("dp_shard", 2)]).unwrap_err().to_string();
        for part in ["3", "2", "6", "4"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        let mesh = world.mesh(&[("dp_shard", 2), ("tp", 2)]).unwrap();
        let error = dot(3).fully_shard(&mesh).unwrap_err().to_string();
        assert!(error.contains("`tp` has size 2"), "{error}");
        Ok(())
    });
}

#[test]
fn a_value_that_is_not_finite_is_traced_to_its_unit() {
    on_ranks(2, |world| {
        let config = FsdpConfig { check_finite: true, ..config(Strategy::default()) };
        let model = Dots { units: vec![Dot::with(3, 1.0), Dot::with(3, 1.0)] };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let error = Fsdp::forward::<_, Tensor>(&model, &vec![full(3, 1.0), full(3, f32::NAN)]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`units.1`") && text.contains("forward") && text.contains("step 1"), "{text}");
        Ok(())
    });
}

#[test]
fn loading_weights_reaches_every_element_once() {
    for strategy in Strategy::ALL {
        on_ranks(3, |world| {
            let model = Dots { units: vec![Dot::zeros(7), Dot::zeros(100)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let _: Tensor = model.evaluate(&vec![full(7, 1.0), full(100, 1.0)])?;
            model.load_weights(|spec, range, out| {
                assert!(range.end <= spec.numel());
                out.iter_mut().zip(range).for_each(|(value, index)| *value = index as f32);
                Ok(())
            })?;
            let counting = |n: usize| (0..n).map(|i| i as f32).collect::<Vec<_>>();
            let expected = named(&[("units.0.w", &counting(7)), ("units.1.w", &counting(100))]);
            assert_eq!(weights(&model)?, expected, "{strategy}");
            let loss: Tensor = model.evaluate(&vec![full(7, 1.0), full(100, 1.0)])?;
            assert_eq!(loss.to_scalar::<f32>()?, 21.0 + 4950.0, "{strategy}");
            Ok(())
        });
    }
}
