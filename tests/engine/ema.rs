//! Averages of the weights: a second shard, evaluated in place of the weights and exchanged back exactly.

use candle_core::Tensor;
use fsdp::engine::Ema;
use fsdp::memory::Category;
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

use crate::fixtures::{Dot, Dots, config, dot, full, launcher, named, on_ranks, weights};

const SIZES: [usize; 3] = [7, 40, 1000];

fn dots() -> Dots {
    Dots { units: SIZES.iter().map(|&n| Dot::with(n, 0.75)).collect() }
}

fn inputs(value: f32) -> Vec<Tensor> {
    SIZES.iter().map(|&n| full(n, value)).collect()
}

fn bits(weights: &[(String, Vec<f32>)]) -> Vec<u32> {
    weights.iter().flat_map(|(_, values)| values.iter().map(|value| value.to_bits())).collect()
}

#[test]
fn follows_the_weights_at_its_decay() {
    for strategy in Strategy::ALL {
        for ranks in [1, 2, 4] {
            on_ranks(ranks, |world| {
                let mut model = dots().fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                let mut ema = model.ema(0.5)?;
                // Weights 0.75 - 1, then 0.75 - 2; averages halfway each time.
                for expected in [0.25, -0.5] {
                    let loss: Tensor = model.forward(&inputs(1.0))?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                    ema.update(&model)?;
                    let average = model.with_ema(&mut ema, weights)?;
                    for (_, values) in average {
                        assert!(values.iter().all(|value| *value == expected), "{strategy}, {ranks} ranks");
                    }
                }
                assert_eq!(ema.updates(), 2);
                Ok(())
            });
        }
    }
}

/// The weights become 4, 8, 12; the averages after each update of one that begins with zeros, each element the same.
fn averages_of_4_8_12(
    strategy: Strategy,
    ranks: usize,
    average: impl Fn(&Fsdp<Dots>) -> fsdp::Result<Ema> + Sync,
) -> Vec<f32> {
    let averages = on_ranks(ranks, |world| {
        let model = Dots { units: vec![Dot::zeros(7), Dot::zeros(40)] };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
        let mut ema = average(&model)?;
        let mut averages = Vec::new();
        for _ in 0..3 {
            let loss: Tensor = model.forward(&vec![full(7, -4.0), full(40, -4.0)])?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            ema.update(&model)?;
            let values = model.with_ema(&mut ema, weights)?.into_iter().flat_map(|(_, values)| values);
            let values: Vec<f32> = values.collect();
            assert_eq!(values, [values[0]; 47]);
            averages.push(values[0]);
        }
        Ok(averages)
    });
    averages.into_iter().next().unwrap()
}

#[test]
fn an_update_keeps_the_decay_and_takes_the_rest_from_the_weights() {
    for (strategy, ranks) in Strategy::ALL.into_iter().flat_map(|strategy| [(strategy, 1), (strategy, 3)]) {
        // 3/4 of 0 and 1/4 of 4; 3/4 of 1 and 1/4 of 8; 3/4 of 2.75 and 1/4 of 12.
        let averages = averages_of_4_8_12(strategy, ranks, |model| model.ema(0.75));
        assert_eq!(averages, [1.0, 2.75, 5.0625], "{strategy}, {ranks} ranks");
    }
}

#[test]
fn with_a_warm_up_an_update_keeps_less_than_the_decay_at_first() {
    for (strategy, ranks) in Strategy::ALL.into_iter().flat_map(|strategy| [(strategy, 1), (strategy, 3)]) {
        // 2/11 are kept, then 3/12, then 4/13: 9/11 of 4; 1/4 of that and 3/4 of 8; 4/13 of that and 9/13 of 12.
        let expected = [36.0 / 11.0, 75.0 / 11.0, 1488.0 / 143.0];
        let averages = averages_of_4_8_12(strategy, ranks, |model| Ok(model.ema(0.9)?.warmup()));
        assert_close(&averages[..], &expected[..], relative(1e-6), format!("{strategy}, {ranks} ranks"));
    }
}

#[test]
fn evaluation_sees_the_average_and_the_weights_come_back_bit_for_bit() {
    for strategy in Strategy::ALL {
        for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
            on_ranks(3, |world| {
                let config = FsdpConfig { precision, ..config(strategy) };
                let mut model = dots().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(AdamW::default().lr(0.3))?;
                let mut ema = model.ema(0.9)?;
                for step in 0..4 {
                    let loss: Tensor = model.forward(&inputs(0.1 + step as f32))?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                    let probe = inputs(1.0);
                    let before =
                        (bits(&weights(&model)?), model.evaluate::<_, Tensor>(&probe)?.to_scalar::<f32>()?);
                    let (first, average) = model.with_ema(&mut ema, |model| {
                        let loss: Tensor = model.evaluate(&probe)?;
                        Ok((loss.to_scalar::<f32>()?, bits(&weights(model)?)))
                    })?;
                    let after =
                        (bits(&weights(&model)?), model.evaluate::<_, Tensor>(&probe)?.to_scalar::<f32>()?);
                    assert_eq!(before, after, "{strategy}");
                    assert_ne!((before.1, &before.0), (first, &average), "{strategy}");
                    // The average has come back too.
                    let again = model.with_ema(&mut ema, |model| Ok(bits(&weights(model)?)))?;
                    assert_eq!(average, again, "{strategy}");
                    ema.update(&model)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn training_goes_on_as_if_nothing_had_been_evaluated() {
    for strategy in Strategy::ALL {
        let train = |averaged: bool| {
            on_ranks(2, |world| {
                let mut model = dots().fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let mut optimizer = model.optimizer(AdamW::default())?;
                let mut ema = model.ema(0.9)?;
                for _ in 0..3 {
                    let loss: Tensor = model.forward(&inputs(0.5))?;
                    model.backward(&loss)?;
                    if averaged {
                        // Between backward and step: the gradients stay.
                        model.with_ema(&mut ema, |model| model.evaluate::<_, Tensor>(&inputs(1.0)))?;
                    }
                    optimizer.step(&mut model)?;
                    ema.update(&model)?;
                }
                weights(&model)
            })
        };
        assert_eq!(train(true), train(false), "{strategy}");
    }
}

#[test]
fn weights_come_back_when_the_evaluation_fails() {
    on_ranks(2, |world| {
        let mut model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
        let mut ema = model.ema(0.5)?;
        let loss: Tensor = model.forward(&vec![full(3, 1.0)])?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        let failed: fsdp::Result<()> =
            model.with_ema(&mut ema, |_| Err(fsdp::Error::Usage("no data".into())));
        assert_eq!(failed.unwrap_err().to_string(), "no data");
        assert_eq!(weights(&model)?, named(&[("units.0.w", &[-1.0; 3])]));
        let error = dot(3).fully_shard(&world.data_parallel_mesh())?.with_ema(&mut ema, |_| Ok(()));
        assert!(error.unwrap_err().to_string().contains("another model"));
        Ok(())
    });
}

#[test]
fn it_costs_one_state_buffer() {
    for strategy in Strategy::ALL {
        for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
            on_ranks(4, |world| {
                let config = FsdpConfig { precision, ..config(strategy) };
                let mut model = dots().fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut ema = model.ema(0.5)?;
                ema.update(&model)?;
                model.with_ema(&mut ema, |model| model.evaluate::<_, Tensor>(&inputs(1.0)))?;
                let average = |model: &Fsdp<Dots>| {
                    let all = model.memory(1);
                    all.into_iter().find(|report| report.usage.category == Category::WeightAverage).unwrap()
                };
                let report = average(&model);
                let formula = model.memory_plan().optimizer_state as usize;
                let held: usize = model.layout().buckets.iter().map(|bucket| bucket.size * 4).sum();
                assert_eq!((report.usage.current, report.usage.peak), (formula, formula), "{strategy}");
                assert_eq!(report.formula as usize, formula);
                assert_eq!(formula, if strategy == Strategy::NoShard { held } else { held / 4 });
                drop(ema);
                assert_eq!(average(&model).usage.current, 0);
                Ok(())
            });
        }
    }
}

#[test]
fn warm_up_averages_over_the_short_past_at_first() {
    on_ranks(2, |world| {
        let model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        let mut ema = model.ema(0.25)?.warmup();
        let mut decays = Vec::new();
        for _ in 0..4 {
            decays.push(ema.next_decay());
            ema.update(&model)?;
        }
        assert_eq!(decays, [2.0 / 11.0, 0.25, 0.25, 0.25]);
        ema.set_updates(0);
        assert_eq!(ema.next_decay(), 2.0 / 11.0);
        for decay in [-0.1, 1.0, f64::NAN] {
            assert!(model.ema(decay).unwrap_err().to_string().contains("at least 0 and below 1"));
        }
        Ok(())
    });
}

#[test]
fn an_average_is_saved_and_loaded_like_weights() {
    on_ranks(2, |world| {
        let mut model = dots().fully_shard(&world.data_parallel_mesh())?;
        let mut ema = model.ema(0.5)?;
        ema.load_weights(&mut model, |_, range, values| {
            values.iter_mut().zip(range).for_each(|(value, index)| *value = index as f32);
            Ok(())
        })?;
        assert!(weights(&model)?.iter().all(|(_, values)| values.iter().all(|value| *value == 0.75)));
        let average = model.with_ema(&mut ema, weights)?;
        for (_, values) in average {
            assert!(values.iter().enumerate().all(|(index, value)| *value == index as f32));
        }
        Ok(())
    });
}

#[test]
fn ranks_with_different_decays_are_told_apart() {
    let outcome = launcher(2).run(|world| -> fsdp::Result<()> {
        let model = dot(3).fully_shard(&world.data_parallel_mesh())?;
        model.ema(if world.rank() == 0 { 0.5 } else { 0.75 })?.update(&model)
    });
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("decay 0.5") && text.contains("decay 0.75"), "{text}");
}
