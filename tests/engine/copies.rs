//! Ranks that hold copies of weights are given the same ones, or told which differ.

use std::sync::Mutex;

use candle_core::Tensor;
use fsdp::launch::World;
use fsdp::prelude::*;

use crate::fixtures::{Dots, config, dot, full, launcher, named, on_ranks, weights};

/// What every rank says of a load of `values(rank, element)` into `w`, on a mesh of `outer x inner` ranks.
fn load(
    (outer, inner): (usize, usize),
    config: &FsdpConfig,
    elements: usize,
    values: impl Fn(usize, usize) -> f32 + Send + Sync,
) -> Vec<Result<(), String>> {
    on_ranks(outer * inner, |world| {
        let mut model = sharded(&world, (outer, inner), config, elements)?;
        Ok(write(&mut model, |element| values(world.rank(), element)).map_err(|error| error.to_string()))
    })
}

fn sharded(
    world: &World,
    (outer, inner): (usize, usize),
    config: &FsdpConfig,
    elements: usize,
) -> fsdp::Result<Fsdp<Dots>> {
    dot(elements).fully_shard_with(&world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?, config)
}

fn write(model: &mut Fsdp<Dots>, value: impl Fn(usize) -> f32) -> fsdp::Result<()> {
    model.load_weights(|_, elements, values| {
        for (element, out) in elements.zip(values) {
            *out = value(element);
        }
        Ok(())
    })
}

fn all_say(said: &[Result<(), String>], text: &str) {
    for (rank, said) in said.iter().enumerate() {
        assert_eq!(said.as_ref().unwrap_err(), text, "rank {rank}");
    }
}

const GIVEN: &str = "parameter `units.0.w`: ranks";
const SAME: &str = "all ranks must write the same values";

#[test]
fn copies_that_differ_are_told_on_all_ranks() {
    let no_shard = config(Strategy::NoShard);
    let said = load((1, 2), &no_shard, 3, |rank, _| [7.0, 5.0][rank]);
    all_say(
        &said,
        &format!(
            "{GIVEN} 0 and 1 hold copies of it, and were given different ones: element 0 is 7 on rank 0 and 5 on rank 1; \
             {SAME}"
        ),
    );
    // One element of many on the last of three ranks.
    let said =
        load((1, 3), &no_shard, 9000, |rank, element| if (rank, element) == (2, 8191) { 0.5 } else { 1.0 });
    all_say(
        &said,
        &format!(
            "{GIVEN} 0 and 2 hold copies of it, and were given different ones: element 8191 is 1 on rank 0 and 0.5 on \
             rank 2; {SAME}"
        ),
    );
}

#[test]
fn outer_ranks_hold_copies_of_the_same_shard() {
    for strategy in [Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams] {
        for outer in [OuterStrategy::NoShard, OuterStrategy::Optim] {
            let config = FsdpConfig { outer, ..config(strategy) };
            // Ranks 1 and 3 hold the second half of 64 elements.
            let said =
                load((2, 2), &config, 64, |rank, element| if (rank, element) == (3, 40) { 2.0 } else { 1.0 });
            all_say(
                &said,
                &format!(
                    "{GIVEN} 1 and 3 hold copies of it, and were given different ones: element 40 is 1 on rank 1 and 2 on \
                     rank 3; {SAME}"
                ),
            );
            // What only one inner rank holds it may have from anywhere.
            let said = load((2, 2), &config, 64, |_, element| element as f32);
            assert!(said.iter().all(Result::is_ok), "{said:?}");
        }
    }
}

#[test]
fn main_weights_that_round_to_the_same_are_told_apart() {
    let precision = MixedPrecision::BF16;
    let config = FsdpConfig { precision, ..config(Strategy::NoShard) };
    let said = load((1, 2), &config, 3, |rank, _| [1.0, 1.0 + f32::EPSILON][rank]);
    for said in said {
        let said = said.unwrap_err();
        assert!(said.contains("element 0 is 1 on rank 0 and 1.0000001 on rank 1"), "{said}");
    }
}

#[test]
fn a_bit_pattern_is_a_value() {
    let no_shard = config(Strategy::NoShard);
    let said = load((1, 2), &no_shard, 3, |_, _| f32::NAN);
    assert!(said.iter().all(Result::is_ok), "{said:?}");
    let said = load((1, 2), &no_shard, 3, |rank, _| [0.0, -0.0][rank]);
    assert!(
        said.iter().all(|said| said.as_ref().is_err_and(|said| said.contains("is 0 on rank 0 and -0 on")))
    );
}

#[test]
fn ranks_without_copies_write_what_they_have() {
    let said = load((1, 2), &config(Strategy::OptimGradsParams), 64, |rank, _| rank as f32);
    assert!(said.iter().all(Result::is_ok), "{said:?}");
}

#[test]
fn an_error_of_one_rank_is_that_of_all_that_hold_copies() {
    for mesh in [(2, 1), (1, 2)] {
        let texts = on_ranks(2, |world| {
            let model = &mut sharded(&world, mesh, &config(Strategy::NoShard), 3)?;
            let read = |_: &_, _, _: &mut [f32]| match world.rank() {
                1 => Err(fsdp::Error::Usage("the file is gone".into())),
                _ => Ok(()),
            };
            Ok(model.load_weights(read).unwrap_err().to_string())
        });
        assert_eq!(texts, ["the file is gone"; 2]);
    }
}

#[test]
fn averages_that_differ_are_told_before_they_are_used() {
    let texts = on_ranks(2, |world| {
        let mut model = sharded(&world, (1, 2), &config(Strategy::NoShard), 3)?;
        // Whoever does not look at this error is told again.
        write(&mut model, |element| if element == 2 { world.rank() as f32 } else { 4.0 }).unwrap_err();
        let mut ema = model.ema(0.5)?;
        write(&mut model, |_| 1.0)?;
        let error = model.with_ema(&mut ema, |_| Ok(())).unwrap_err();
        assert_eq!(weights(&model)?, named(&[("units.0.w", &[1.0; 3])]));
        Ok(error.to_string())
    });
    for text in texts {
        assert!(text.contains("element 2 is 0 on rank 0 and 1 on rank 1"), "{text}");
    }
}

/// A load that leaves values as they are finds them as the last step has left them, on other outer ranks too.
#[test]
fn what_outer_ranks_have_updated_is_present_in_a_load() {
    for (outer, inner) in [(2, 1), (2, 2)] {
        for bf16 in [false, true] {
            let rows = on_ranks(outer * inner, |world| {
                let precision = if bf16 { MixedPrecision::BF16 } else { MixedPrecision::default() };
                let config = FsdpConfig {
                    outer: OuterStrategy::Optim,
                    precision,
                    ..config(Strategy::OptimGradsParams)
                };
                let mut model = sharded(&world, (outer, inner), &config, 64)?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                let input = vec![full(64, 1.0)];
                let loss: Tensor = model.forward(&input)?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
                let seen = Mutex::new(Vec::new());
                model.load_weights(|_, elements, values| {
                    seen.lock().unwrap().extend_from_slice(values);
                    // One of them is changed.
                    for (_, value) in elements.zip(values).filter(|(element, _)| *element == 5) {
                        *value = 3.0;
                    }
                    Ok(())
                })?;
                assert!(seen.into_inner().unwrap().iter().all(|&value| value == -1.0));
                let loss: Tensor = model.evaluate(&input)?;
                Ok(loss.to_dtype(candle_core::DType::F32)?.to_scalar::<f32>()?)
            });
            assert_eq!(rows, vec![3.0 - 63.0; outer * inner]);
        }
    }
}

/// Alone it is no more than a wait for the others, which is told at once.
#[test]
fn a_load_of_one_rank_where_there_are_copies_is_told() {
    let error = launcher(2).run(|world| -> fsdp::Result<()> {
        let mut model = sharded(&world, (1, 2), &config(Strategy::NoShard), 3)?;
        if world.rank() == 1 {
            write(&mut model, |_| 1.0)?;
        }
        let _ = model.grad_norm()?;
        Ok(())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`copies of the weights` (setup, step 1"), "{error}");
    assert!(error.contains("was something called on one rank only?"), "{error}");
}
