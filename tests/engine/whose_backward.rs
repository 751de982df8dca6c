//! A backward is of the model whose forward has computed the loss, and begun by it; what is not is an error that says
//! what to write.

use candle_core::Tensor;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, Two, config, dot, full, gradients, named, on_ranks, weights};

fn root_only() -> Dot {
    Dot { w: Param::new(3).with_init(Init::Zeros) }
}

fn sgd() -> Sgd {
    Sgd::default().lr(1.0).weight_decay(0.0)
}

fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn candles_own_backward_is_refused_with_what_to_write() {
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(2, |world| {
                let config = FsdpConfig { recompute, ..config(strategy) };
                let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(sgd())?;
                let loss: Tensor = model.forward(&(true, true, full(3, 2.0)))?;
                let error = loss.backward().unwrap_err().to_string();
                assert_says(&error, &["unit `b` of model `Two`", "write `model.backward(&loss)`"]);
                let error = optimizer.step(&mut model).unwrap_err().to_string();
                assert_says(&error, &["no backward of model `Two`", "call `model.backward(&loss)`"]);
                // What was refused is not spent.
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                assert_eq!(weights(&model)?, named(&[("a.w", &[-2.0; 3]), ("b.w", &[-2.0; 3])]));
                Ok(())
            });
        }
    }
}

#[test]
fn where_all_is_in_the_root_the_step_says_what_to_write() {
    on_ranks(2, |world| {
        let mut model = root_only().fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(sgd())?;
        let loss: Tensor = model.forward(&full(3, 2.0))?;
        loss.backward()?;
        let error = optimizer.step(&mut model).unwrap_err().to_string();
        assert_says(&error, &["no backward of model `Dot`", "candle's `loss.backward()` trains nothing"]);
        assert_eq!((optimizer.steps(), model.step_count()), (0, 0));
        assert_eq!(weights(&model)?, named(&[("w", &[0.0; 3])]));
        Ok(())
    });
}

#[test]
fn candles_own_backward_of_one_microbatch_among_others_is_counted_and_refused_if_so_said() {
    for strategy in Strategy::ALL {
        for strict_gradients in [false, true] {
            on_ranks(2, |world| {
                let config = FsdpConfig { strict_gradients, ..config(strategy) };
                let mut model = root_only().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(sgd())?;
                for step in 1..=2 {
                    model.set_is_last_microbatch(false);
                    let first: Tensor = model.forward(&full(3, 2.0))?;
                    model.backward(&first)?;
                    assert_eq!(model.forwards_without_backward(), 0);
                    model.set_is_last_microbatch(true);
                    // Forwards of two microbatches may come before their backwards.
                    let [forgotten, last] = [4.0, 1.0].map(|x| model.forward::<_, Tensor>(&full(3, x)));
                    forgotten?.backward()?;
                    model.backward(&last?)?;
                    assert_eq!(model.forwards_without_backward(), 1);
                    let stepped = optimizer.step(&mut model);
                    if strict_gradients {
                        let error = stepped.unwrap_err().to_string();
                        let said = [
                            "1 training forward of model `Dot` was",
                            "`model.backward(&loss)`",
                            "`model.evaluate",
                        ];
                        assert_says(&error, &said);
                        model.reset_step()?;
                        let loss: Tensor = model.forward(&full(3, 3.0))?;
                        model.backward(&loss)?;
                        optimizer.step(&mut model)?;
                    } else {
                        stepped?;
                    }
                    assert_eq!(model.forwards_without_backward(), 0);
                    let expected = [-3.0 * step as f32; 3];
                    assert_eq!(
                        weights(&model)?,
                        named(&[("w", &expected)]),
                        "{strategy}, {strict_gradients}"
                    );
                }
                Ok(())
            });
        }
    }
}

#[test]
fn forwards_that_ran_units_or_were_evaluations_are_not_missed() {
    on_ranks(2, |world| {
        let config = FsdpConfig { strict_gradients: true, ..config(Strategy::default()) };
        let mut model = Two::zeros(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = model.optimizer(sgd())?;
        // A loss that is thrown away, and one of two forwards.
        let _: Tensor = model.forward(&(true, true, full(3, 9.0)))?;
        let both = [1.0, 2.0].map(|x| model.forward::<_, Tensor>(&(true, true, full(3, x))));
        let [first, second] = both;
        model.backward(&(first? + second?)?)?;
        optimizer.step(&mut model)?;
        assert_eq!(weights(&model)?[0].1, [-3.0; 3]);
        // So it is without units; evaluations do not count.
        let mut root = root_only().fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = root.optimizer(sgd())?;
        let [first, second] = [1.0, 2.0].map(|x| root.forward::<_, Tensor>(&full(3, x)));
        let _: Tensor = root.evaluate(&full(3, 2.0))?;
        let loss = (first? + second?)?;
        assert_eq!(root.forwards_without_backward(), 2);
        root.backward(&loss)?;
        assert_eq!(root.forwards_without_backward(), 0);
        optimizer.step(&mut root)?;
        assert_eq!(weights(&root)?[0].1, [-3.0; 3]);
        Ok(())
    });
}

#[test]
fn a_loss_of_another_model_is_refused_with_the_names_of_both() {
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let (mut ours, mut theirs) = (Two::zeros(3).fully_shard(&mesh)?, dot(3).fully_shard(&mesh)?);
        let (mut our_step, mut their_step) = (ours.optimizer(sgd())?, theirs.optimizer(sgd())?);
        let our_loss: Tensor = ours.forward(&(true, false, full(3, 1.0)))?;
        let their_loss: Tensor = theirs.forward(&vec![full(3, 4.0)])?;
        let error = theirs.backward(&our_loss).unwrap_err().to_string();
        assert_says(&error, &["`backward` of model `Dots`", "unit `a` of `Two`", "`detach`"]);
        // Only the one that was called wrongly has forgotten its forward.
        ours.backward(&our_loss)?;
        our_step.step(&mut ours)?;
        assert_eq!(weights(&ours)?[0].1, [-1.0; 3]);
        let error = theirs.backward(&their_loss).unwrap_err().to_string();
        assert_says(&error, &["needs a training forward before it"]);
        let their_loss: Tensor = theirs.forward(&vec![full(3, 4.0)])?;
        theirs.backward(&their_loss)?;
        their_step.step(&mut theirs)?;
        assert_eq!(weights(&theirs)?[0].1, [-4.0; 3]);
        Ok(())
    });
}

#[test]
fn a_loss_of_two_models_is_refused_and_of_one_with_the_other_detached_is_not() {
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let (first, second) = (dot(3).fully_shard(&mesh)?, dot(3).fully_shard(&mesh)?);
        for detached in [false, true] {
            let hidden: Tensor = first.forward(&vec![full(3, 1.0)])?;
            let hidden = if detached { hidden.detach() } else { hidden };
            let loss: Tensor = second.forward(&vec![full(3, 1.0)])?;
            let outcome = second.backward(&(loss + hidden)?);
            assert_eq!(outcome.is_ok(), detached);
            if let Err(error) = outcome {
                assert_says(
                    &error.to_string(),
                    &["with a loss of another model", "unit `units.0` of `Dots`"],
                );
            }
        }
        assert_eq!(gradients(&second)?, named(&[("units.0.w", &[1.0; 3])]));
        Ok(())
    });
}

#[test]
fn a_loss_that_has_come_from_the_root_of_another_model_reaches_nothing() {
    on_ranks(2, |world| {
        let mesh = world.data_parallel_mesh();
        let (ours, theirs) = (root_only().fully_shard(&mesh)?, dot(3).fully_shard(&mesh)?);
        let loss: Tensor = ours.forward(&full(3, 1.0))?;
        let _: Tensor = theirs.forward(&vec![full(3, 1.0)])?;
        let error = theirs.backward(&loss).unwrap_err().to_string();
        assert_says(&error, &["no unit and no parameter of model `Dots`"]);
        ours.backward(&loss)?;
        assert_eq!(gradients(&ours)?, named(&[("w", &[1.0; 3])]));
        Ok(())
    });
}

#[test]
fn a_loss_without_a_graph_is_refused_and_costs_nothing() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(sgd())?;
            model.set_is_last_microbatch(false);
            let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
            model.backward(&loss)?;
            model.set_is_last_microbatch(true);
            let loss: Tensor = model.forward(&vec![full(3, 2.0)])?;
            let read = Tensor::new(loss.to_scalar::<f32>()?, loss.device())?;
            for cut in [loss.detach(), read] {
                let error = model.backward(&cut).unwrap_err().to_string();
                assert_says(&error, &["depends on no trainable parameter", "detached"]);
            }
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?, named(&[("units.0.w", &[-3.0; 3])]), "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn a_step_is_of_the_backwards_since_the_last_one() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(sgd())?;
            let refused = |optimizer: &mut ShardedOptimizer<Sgd>, model: &mut Fsdp<Dots>| {
                let error = optimizer.step(model).unwrap_err().to_string();
                assert_says(&error, &["no backward of model `Dots` has ended since its last optimizer step"]);
            };
            refused(&mut optimizer, &mut model);
            for _ in 0..2 {
                let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
                refused(&mut optimizer, &mut model);
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                refused(&mut optimizer, &mut model);
            }
            let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
            model.backward(&loss)?;
            model.reset_step()?;
            refused(&mut optimizer, &mut model);
            assert_eq!((optimizer.steps(), model.step_count()), (2, 2));
            assert_eq!(weights(&model)?, named(&[("units.0.w", &[-2.0; 3])]));
            Ok(())
        });
    }
}

#[test]
fn what_a_caught_panic_has_cut_short_says_how_to_go_on() {
    struct Panics(Param);

    impl FsdpUnit for Panics {
        fn walk<'a>(&'a self, walker: &mut fsdp::engine::Walker<'_, 'a>) {
            self.0.walk(walker);
        }
    }

    impl Forward<bool, Tensor> for Panics {
        fn forward(&self, x: &Tensor, panics: &bool, scope: &Scope<'_>) -> candle_core::Result<Tensor> {
            assert!(!panics, "on purpose");
            (x * self.0.tensor(scope)?)?.sum_all()
        }
    }

    on_ranks(2, |world| {
        let mut model = Panics(Param::new(3)).fully_shard(&world.data_parallel_mesh())?;
        let x = full(3, 1.0);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            model.forward_with::<_, _, Tensor>(&x, &true).map(|_| ())
        }));
        assert!(caught.is_err());
        let again = model.forward_with::<_, _, Tensor>(&x, &false).unwrap_err().to_string();
        assert_says(&again, &["forward was called inside its own forward", "call `model.reset_step()`"]);
        let backward = model.backward(&x.sum_all()?).unwrap_err().to_string();
        assert_says(&backward, &["backward was called inside its own forward", "call `model.reset_step()`"]);
        model.reset_step()?;
        let loss: Tensor = model.forward_with(&x, &false)?;
        model.backward(&loss)?;
        assert_eq!(gradients(&model)?[0].1, [1.0; 3]);
        Ok(())
    });
}
