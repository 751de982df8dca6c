//! Dropout whose masks are the same in recomputation and on any number of ranks.

use std::sync::Mutex;

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;
use fsdp_models::ops::dropout;

use crate::fixtures::{config, gradients, on_ranks};

const WIDTH: usize = 64;

/// `dropout(x) * w`, twice.
#[derive(FsdpUnit)]
struct Layer {
    w: Param,
    p: f64,
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        let x = dropout(x, self.p, scope)?.broadcast_mul(&w)?;
        dropout(&x, self.p, scope)?.broadcast_mul(&w)
    }
}

/// A unit with a unit inside.
#[derive(FsdpUnit)]
struct Pair {
    first: Unit<Layer>,
    w: Param,
}

impl Forward for Pair {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.first.forward(x, &(), scope)?;
        dropout(&x, 0.5, scope)?.broadcast_mul(&self.w.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct Net {
    layers: Vec<Unit<Layer>>,
    pair: Unit<Pair>,
    /// The outputs of the forwards, by sample, for the tests.
    #[fsdp(skip)]
    seen: Mutex<Vec<Vec<f32>>>,
}

impl Net {
    fn new() -> Net {
        let ones = || Param::new(WIDTH).with_init(Init::Ones);
        let layer = || Unit::new(Layer { w: ones(), p: 0.5 });
        let pair = Unit::new(Pair { first: layer(), w: ones() });
        Net { layers: (0..2).map(|_| layer()).collect(), pair, seen: Mutex::default() }
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, &(), scope)?;
        }
        // The same unit again: its masks are others.
        x = self.layers[0].forward(&x, &(), scope)?;
        x = self.pair.forward(&x, &(), scope)?;
        self.seen.lock().unwrap().extend(x.to_vec2::<f32>()?);
        x.sum_all()
    }
}

fn ones(samples: usize) -> Tensor {
    Tensor::ones((samples, WIDTH), DType::F32, &Device::Cpu).unwrap()
}

/// Outputs by sample, and gradients by name.
type Outcome = (Vec<Vec<f32>>, Vec<(String, Vec<f32>)>);

/// Two steps over a global batch of 8 samples: outputs by sample, and the last gradients.
fn train(ranks: usize, microbatches: usize, recompute: Recompute) -> Outcome {
    let samples = 8 / ranks / microbatches;
    let rows = on_ranks(ranks, |world| {
        let config =
            FsdpConfig { recompute, scaling: GradientScaling::Sum, seed: 5, ..config(Strategy::default()) };
        let mut model = Net::new().fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
        let mut last = Vec::new();
        let mut seen = Vec::new();
        for _ in 0..2 {
            for microbatch in 0..microbatches {
                let first = (microbatch * world.size() + world.rank()) * samples;
                model.set_first_sample(first as u64);
                model.set_is_last_microbatch(microbatch + 1 == microbatches);
                let loss: Tensor = model.forward(&ones(samples))?;
                model.backward(&loss)?;
                let outputs = std::mem::take(&mut *model.module().seen.lock().unwrap());
                seen.extend(outputs.into_iter().take(samples).enumerate().map(|(i, row)| (first + i, row)));
            }
            last = gradients(&model)?;
            optimizer.step(&mut model)?;
        }
        Ok((seen, last))
    });
    let gradients = rows[0].1.clone();
    let mut seen: Vec<(usize, Vec<f32>)> = rows.into_iter().flat_map(|row| row.0).collect();
    // Two rows of each sample, in order of the steps.
    seen.sort_by_key(|(sample, _)| *sample);
    (seen.into_iter().map(|(_, row)| row).collect(), gradients)
}

#[test]
fn masks_are_those_of_the_sample_on_any_number_of_ranks_and_in_recomputation() {
    // All values are powers of two: sums are exact in any order.
    let reference = train(1, 1, Recompute::None);
    let zeros = reference.0.iter().flatten().filter(|value| **value == 0.0).count();
    assert!(zeros > 0 && zeros < 16 * WIDTH);
    for (ranks, microbatches) in [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)] {
        for recompute in [Recompute::None, Recompute::Unit] {
            assert!(
                train(ranks, microbatches, recompute) == reference,
                "{ranks} ranks, {microbatches} microbatches"
            );
        }
    }
}

/// One layer, seen from outside.
#[derive(FsdpUnit)]
struct Once {
    layer: Unit<Layer>,
}

impl Forward for Once {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.layer.forward(x, &(), scope)
    }
}

#[test]
fn masks_differ_by_sample_call_step_rank_and_seed_and_have_the_rate() {
    let run = |seed: u64, p: f64| {
        on_ranks(2, |world| {
            let config = FsdpConfig { seed, ..config(Strategy::default()) };
            let layer = Unit::new(Layer { w: Param::new(WIDTH).with_init(Init::Ones), p });
            let mut model = Once { layer }.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
            let mut seen = Vec::new();
            for _ in 0..2 {
                for last in [false, true] {
                    model.set_is_last_microbatch(last);
                    let y: Tensor = model.forward(&ones(50))?;
                    seen.extend(y.to_vec2::<f32>()?);
                    model.backward(&y.sum_all()?)?;
                }
                optimizer.step(&mut model)?;
            }
            let y: Tensor = model.evaluate(&ones(3))?;
            assert_eq!(y.to_vec2::<f32>()?, vec![vec![1.0; WIDTH]; 3]);
            Ok(seen)
        })
        .concat()
    };
    let rows = run(1, 0.5);
    assert_eq!(rows.len(), 400);
    for (i, row) in rows.iter().enumerate() {
        assert!(row.iter().all(|value| [0.0, 4.0].contains(value)));
        assert!(!rows[..i].contains(row), "row {i} was there before");
    }
    // Kept twice with probability a half: five standard deviations.
    let kept = rows.iter().flatten().filter(|value| **value > 0.0).count() as f64 / (400 * WIDTH) as f64;
    assert!((kept - 0.25).abs() < 5.0 * (0.25f64 * 0.75 / (400 * WIDTH) as f64).sqrt(), "{kept}");
    assert_ne!(rows, run(2, 0.5));
    assert!(run(1, 0.0).iter().flatten().all(|value| *value == 1.0));
}

/// Keeps the key of each random stream that it draws from, three in a forward.
#[derive(FsdpUnit)]
struct Draws {
    w: Param,
    #[fsdp(skip)]
    keys: Mutex<Vec<u64>>,
}

impl Draws {
    fn new() -> Draws {
        Draws { w: Param::new(2).with_init(Init::Ones), keys: Mutex::default() }
    }

    fn keys(&self) -> Vec<u64> {
        self.keys.lock().unwrap().clone()
    }
}

impl Forward for Draws {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.keys.lock().unwrap().extend((0..3).map(|_| scope.random_stream().key()));
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct AllDraw {
    own: Draws,
    units: [Unit<Draws>; 2],
}

impl Forward for AllDraw {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = self.own.forward(x, &(), scope)?;
        for unit in &self.units {
            x = unit.forward(&x, &(), scope)?;
        }
        x.sum_all()
    }
}

#[test]
fn every_draw_of_every_unit_in_every_step_has_a_stream_of_its_own_that_recomputation_finds_again() {
    let run = |recompute| {
        on_ranks(2, |world| {
            let model =
                AllDraw { own: Draws::new(), units: [Unit::new(Draws::new()), Unit::new(Draws::new())] };
            let config = FsdpConfig { recompute, ..config(Strategy::default()) };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
            for _ in 0..2 {
                let loss: Tensor = model.forward(&Tensor::ones((1, 2), DType::F32, &Device::Cpu)?)?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            let AllDraw { own, units: [first, second] } = model.module();
            Ok([own.keys(), first.keys(), second.keys()])
        })
    };
    let plain = run(Recompute::None);
    assert_eq!(plain[0], plain[1], "the ranks");
    let mut all = plain[0].concat();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 3 * 2 * 3, "three modules, two steps, three draws: {:x?}", plain[0]);
    let again = |keys: &[u64]| [&keys[..3], &keys[..3], &keys[3..], &keys[3..]].concat();
    let [own, first, second] = &plain[0];
    assert_eq!(run(Recompute::Unit)[0], [own.clone(), again(first), again(second)]);
}

#[test]
fn what_cannot_be_dropped_is_refused() {
    on_ranks(1, |world| {
        for p in [-0.1, 1.0, f64::NAN] {
            let layer = Unit::new(Layer { w: Param::new(WIDTH), p });
            let model = Once { layer }.fully_shard(&world.data_parallel_mesh())?;
            let text = Fsdp::forward::<_, Tensor>(&model, &ones(2)).unwrap_err().to_string();
            assert!(text.contains("at least 0 and below 1") && text.contains("`layer`"), "{text}");
        }
        Ok(())
    });
}

#[test]
fn what_is_not_trained_on_draws_nothing() {
    // Outputs of three steps, disturbed or not by evaluations, failures and resets.
    let run = |disturbed: bool| {
        on_ranks(2, |world| {
            let layer = Unit::new(Layer { w: Param::new(WIDTH).with_init(Init::Ones), p: 0.5 });
            let mut model = Once { layer }.fully_shard(&world.data_parallel_mesh())?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
            let mut seen = Vec::new();
            for step in 0..3 {
                if step == 1 {
                    model.set_first_sample(100 + world.rank() as u64);
                }
                if disturbed {
                    let _: Tensor = model.evaluate(&ones(2))?;
                    // A tensor without a batch dim.
                    assert!(model.forward::<_, Tensor>(&ones(1).sum_all()?).is_err());
                }
                let y: Tensor = model.forward(&ones(3))?;
                seen.extend(y.to_vec2::<f32>()?);
                model.backward(&y.sum_all()?)?;
                optimizer.step(&mut model)?;
            }
            Ok(seen)
        })
    };
    assert_eq!(run(true), run(false));
}
