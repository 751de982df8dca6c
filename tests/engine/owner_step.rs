//! Steps that need whole parameters: each on one rank, once a parameter and step, the same on any number of
//! ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Result, Tensor};
use fsdp::memory::Category;
use fsdp::optim::{OptimError, OwnerFn, WholeParam};
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close, relative};

use crate::fixtures::{Dot, Dots, config, dot, full, launcher, on_ranks, weights};

/// A wide and a tall matrix, a square one marked `no_decay`, and a vector; the loss is the sum of the elements
/// of each times those of an input of the same length, so that the input is the gradient.
#[derive(FsdpUnit)]
struct Layer {
    wide: Param,
    tall: Param,
    bias: Param,
    #[fsdp(no_decay)]
    square: Param,
}

const SHAPES: [&[usize]; 4] = [&[3, 8], &[10, 4], &[5], &[4, 4]];

#[derive(FsdpUnit)]
struct Model {
    layers: Vec<Unit<Layer>>,
}

impl Model {
    fn new() -> Model {
        let [wide, tall, bias, square] = SHAPES;
        let layer = || Layer {
            wide: Param::new(wide),
            tall: Param::new(tall),
            bias: Param::new(bias),
            square: Param::new(square),
        };
        Model { layers: (0..3).map(|_| Unit::new(layer())).collect() }
    }
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
        let mut start = 0;
        for param in [&self.wide, &self.tall, &self.bias, &self.square] {
            let w = param.tensor(scope)?.flatten_all()?;
            let w = w.to_dtype(candle_core::DType::F32)?;
            let n = w.elem_count();
            loss = (loss + (w * x.narrow(0, start, n)?)?.sum_all()?)?;
            start += n;
        }
        Ok(loss)
    }
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?;
        for layer in &self.layers {
            loss = (loss + layer.forward(x, &(), scope)?)?;
        }
        Ok(loss)
    }
}

/// The gradient of a layer in a step, as small binary fractions: sums of them are exact in any order.
fn gradient(step: usize) -> Vec<f32> {
    let n: usize = SHAPES.iter().map(|shape| shape.iter().product::<usize>()).sum();
    (0..n).map(|i| ((i * 37 + step * 11) % 64) as f32 / 64.0 - 0.5).collect()
}

fn muon() -> Muon {
    Muon::default().lr(0.1).momentum(0.875).weight_decay(0.25)
}

fn adamw() -> AdamW {
    AdamW::default().lr(0.05)
}

/// Weights after three steps of two microbatches each.
fn train(ranks: usize, config: &FsdpConfig, clip: Option<f64>) -> Vec<(String, Vec<f32>)> {
    let mut all = on_ranks(ranks, |world| {
        let mut model = Model::new().fully_shard_with(&world.data_parallel_mesh(), config)?;
        let mut optimizer = model.owner_optimizer(muon(), adamw())?;
        for step in 0..3 {
            for last in [false, true] {
                model.set_is_last_microbatch(last);
                let x = gradient(step);
                let loss: Tensor = model.forward(&Tensor::new(x.as_slice(), &Device::Cpu)?)?;
                model.backward(&loss)?;
            }
            if let Some(clip) = clip {
                model.clip_grad_norm(clip)?;
            }
            optimizer.step(&mut model)?;
        }
        weights(&model)
    });
    assert!(all.iter().all(|weights| *weights == all[0]));
    all.swap_remove(0)
}

/// Muon on one matrix in f64, as its formula says.
struct Reference {
    rows: usize,
    cols: usize,
    w: Vec<f64>,
    momentum: Vec<f64>,
}

impl Reference {
    fn step(&mut self, g: &[f64], decay: f64) {
        let (rows, cols) = (self.rows, self.cols);
        let mut x = Vec::new();
        for (b, g) in self.momentum.iter_mut().zip(g) {
            *b = 0.875 * *b + 0.125 * g;
            x.push(0.125 * g + 0.875 * *b);
        }
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt() + 1e-7;
        x.iter_mut().for_each(|x| *x /= norm);
        for _ in 0..5 {
            // (a I + b X Xᵀ + c (X Xᵀ)²) X, whichever side is shorter.
            let gram = product(&x, &transposed(&x, rows, cols), rows, cols, rows);
            let square = product(&gram, &gram, rows, rows, rows);
            let poly: Vec<f64> = gram.iter().zip(square).map(|(g, s)| -4.7750 * g + 2.0315 * s).collect();
            let rest = product(&poly, &x, rows, rows, cols);
            x.iter_mut().zip(rest).for_each(|(x, rest)| *x = 3.4445 * *x + rest);
        }
        let scale = 0.1 * (rows as f64 / cols as f64).max(1.0).sqrt();
        for (w, x) in self.w.iter_mut().zip(x) {
            *w = *w * (1.0 - 0.1 * decay) - scale * x;
        }
    }
}

fn product(a: &[f64], b: &[f64], m: usize, k: usize, n: usize) -> Vec<f64> {
    let element = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum();
    (0..m * n).map(|ij| element(ij / n, ij % n)).collect()
}

fn transposed(a: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..rows * cols).map(|ji| a[(ji % rows) * cols + ji / rows]).collect()
}

#[test]
fn muon_follows_its_formula_in_f64() {
    let start = on_ranks(1, |world| weights(&Model::new().fully_shard(&world.data_parallel_mesh())?));
    let got = train(4, &config(Strategy::default()), None);
    let mut begin = 0;
    for (index, ((name, got), (_, start))) in got.iter().zip(&start[0]).enumerate() {
        let shape = SHAPES[index % 4];
        begin = if index % 4 == 0 { 0 } else { begin };
        let n = got.len();
        if let &[rows, cols] = shape {
            let wide = |values: &[f32]| values.iter().map(|&value| f64::from(value)).collect::<Vec<_>>();
            let mut reference = Reference { rows, cols, w: wide(start), momentum: vec![0.0; n] };
            for step in 0..3 {
                // Two microbatches.
                let g: Vec<f64> = wide(&gradient(step)[begin..begin + n]).iter().map(|g| 2.0 * g).collect();
                reference.step(&g, if name.ends_with("square") { 0.0 } else { 0.25 });
            }
            assert_close(&wide(got), &reference.w, absolute(1e-4), name);
        }
        begin += n;
    }
}

#[test]
fn the_vectors_follow_the_element_wise_rule() {
    let all = on_ranks(2, |world| {
        let mut model = Model::new().fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(adamw())?;
        for step in 0..3 {
            for last in [false, true] {
                model.set_is_last_microbatch(last);
                let loss: Tensor = model.forward(&Tensor::new(gradient(step).as_slice(), &Device::Cpu)?)?;
                model.backward(&loss)?;
            }
            optimizer.step(&mut model)?;
        }
        weights(&model)
    });
    let mixed = train(2, &config(Strategy::default()), None);
    for ((name, mixed), (_, adamw)) in mixed.iter().zip(&all[0]) {
        assert_eq!(mixed == adamw, name.ends_with("bias"), "{name}");
    }
}

#[test]
fn any_number_of_ranks_and_any_strategy_give_the_same_bits() {
    for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
        for clip in [None, Some(0.5)] {
            let config = |strategy| FsdpConfig { precision, ..config(strategy) };
            let expected = train(1, &config(Strategy::NoShard), clip);
            for strategy in Strategy::ALL {
                for ranks in [2, 3, 4] {
                    let got = train(ranks, &config(strategy), clip);
                    if clip.is_none() {
                        assert_eq!(got, expected, "{strategy}, {ranks} ranks");
                        continue;
                    }
                    // The norm is summed over other cuts.
                    assert_close(&got, &expected, absolute(1e-5), format!("{strategy}, {ranks} ranks"));
                }
            }
        }
    }
}

#[test]
fn the_function_runs_once_a_parameter_and_step_whatever_the_microbatches() {
    for strategy in Strategy::ALL {
        let calls = AtomicUsize::new(0);
        let calls_of_ranks = on_ranks(2, |world| {
            let model = Dots { units: vec![Dot::zeros(40), Dot::zeros(40)] };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut own = 0;
            let rule = OwnerFn::new(|step, param: &mut WholeParam<'_>| {
                own += 1;
                calls.fetch_add(1, Ordering::Relaxed);
                assert_eq!((param.weights.len(), param.grads), (40, [4.0f32; 40].as_slice()));
                assert!((1..=2).contains(&step));
                param.weights.iter_mut().for_each(|w| *w += 1.0);
                Ok(())
            });
            let mut optimizer = model.owner_optimizer(rule, Sgd::default())?;
            for _ in 0..2 {
                for microbatch in 0..4 {
                    model.set_is_last_microbatch(microbatch == 3);
                    let loss: Tensor = model.forward(&vec![full(40, 1.0); 2])?;
                    model.backward(&loss)?;
                }
                optimizer.step(&mut model)?;
            }
            assert_eq!(optimizer.steps(), 2);
            drop(optimizer);
            for (_, weights) in weights(&model)? {
                assert_eq!(weights, [2.0; 40]);
            }
            Ok(own)
        });
        assert_eq!((calls.into_inner(), calls_of_ranks), (4, vec![2, 2]), "{strategy}");
    }
}

#[test]
fn state_is_whole_on_the_owner_and_nowhere_else() {
    for strategy in Strategy::ALL {
        let bytes = on_ranks(2, |world| {
            let mut model = Model::new().fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.owner_optimizer(muon(), adamw())?;
            let loss: Tensor = model.forward(&Tensor::new(gradient(0).as_slice(), &Device::Cpu)?)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            let report = model.memory(0);
            let of = |category| report.iter().find(|report| report.usage.category == category);
            let step = of(Category::OwnerStep);
            assert_eq!(step.is_some(), strategy != Strategy::NoShard, "{strategy}");
            // Weights and gradients of one of the three buckets.
            if let Some(step) = step {
                assert_eq!((step.usage.current, step.usage.peak as u64), (0, step.formula));
            }
            Ok(of(Category::OptimizerState).unwrap().usage.current)
        });
        // Momentum of 24 + 40 + 16 elements a layer, and two moments of the 5 of each bias, which all ranks
        // hold under `NoShard`.
        let biases = if strategy == Strategy::NoShard { 2 } else { 1 };
        assert_eq!(bytes.iter().sum::<usize>(), 3 * 4 * (80 + biases * 2 * 5), "{strategy}");
    }
}

#[test]
fn groups_choose_the_rule_and_its_settings() {
    on_ranks(2, |world| {
        let model = Dots { units: (0..3).map(|_| Dot::zeros(20)).collect() };
        let mut model = model.fully_shard(&world.data_parallel_mesh())?;
        let rule = OwnerFn::new(|_, param: &mut WholeParam<'_>| {
            let lr = param.lr as f32;
            param.weights.iter_mut().for_each(|w| *w += lr);
            Ok(())
        });
        let sgd = Sgd::default().lr(1.0);
        let mut optimizer =
            model.owner_optimizer_with(rule.lr(2.0), sgd, |spec| match spec.name.as_str() {
                "units.0.w" => ParamGroup::new("embedding").element_wise(),
                "units.1.w" => ParamGroup::new("slow").lr_factor(0.25),
                _ => ParamGroup::default(),
            })?;
        assert_eq!(optimizer.owners().next(), Some(("units.0.w", None)));
        let loss: Tensor = model.forward(&vec![full(20, 1.0); 3])?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        let first: Vec<f32> = weights(&model)?.iter().map(|(_, weights)| weights[0]).collect();
        assert_eq!(first, [-1.0, 0.5, 2.0]);
        let muon =
            model.owner_optimizer_with(muon(), Sgd::default(), |_| ParamGroup::new("x").betas(0.5, 0.5));
        // All of them are vectors: the betas are those of the element-wise rule.
        assert!(muon.unwrap_err().to_string().starts_with("sgd"));
        Ok(())
    });
}

#[test]
fn a_unit_without_backward_is_left_alone() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let model = crate::fixtures::Two::zeros(5);
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let rule = OwnerFn::new(|_, param: &mut WholeParam<'_>| {
                param.weights.fill(1.0);
                Ok(())
            });
            let mut optimizer = model.owner_optimizer(rule, Sgd::default())?;
            let loss: Tensor = model.forward(&(false, true, full(5, 1.0)))?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            let weights = weights(&model)?;
            assert_eq!((weights[0].1[0], weights[1].1[0]), (0.0, 1.0), "{strategy}");
            Ok(())
        });
    }
}

#[test]
fn a_rule_that_fails_on_its_owner_fails_the_step_everywhere() {
    let seen = Arc::new(AtomicUsize::new(0));
    let outcome = launcher(2).run(|world| -> fsdp::Result<()> {
        let mut model = dot(8).fully_shard(&world.data_parallel_mesh())?;
        let seen = seen.clone();
        let rule = OwnerFn::new(move |_, _: &mut WholeParam<'_>| {
            seen.fetch_add(1, Ordering::Relaxed);
            Err(OptimError::Failed("the matrix is singular".into()))
        });
        let mut optimizer = model.owner_optimizer(rule, Sgd::default())?;
        let loss: Tensor = model.forward(&vec![full(8, 1.0)])?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        Ok(())
    });
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("`units.0.w`") && text.contains("the matrix is singular"), "{text}");
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

/// `x` times the sum of a tall and a wide matrix, all zeros at first.
#[derive(FsdpUnit)]
struct TallAndWide {
    tall: Param,
    wide: Param,
}

impl Forward for TallAndWide {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        (self.tall.tensor(scope)?.sum_all()? + self.wide.tensor(scope)?.sum_all()?)? * x
    }
}

/// An element of the tall and one of the wide matrix after a step of Muon. Both gradients are ones, so the updates are each
/// other's transposes but for the factor of the shape, the root of rows over columns where there are more rows.
fn after_muon(rows: usize, cols: usize, strategy: Strategy) -> [f32; 2] {
    let all = on_ranks(2, |world| {
        let zeros = |dims: (usize, usize)| Param::new(dims).with_init(Init::Zeros);
        let model = TallAndWide { tall: zeros((rows, cols)), wide: zeros((cols, rows)) };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
        let mut optimizer = model.owner_optimizer(Muon::default(), Sgd::default())?;
        let loss: Tensor = model.forward(&full(1, 1.0).sum_all()?)?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        let weights = weights(&model)?;
        Ok([weights[0].1[0], weights[1].1[0]])
    });
    assert_eq!(all[0], all[1]);
    all[0]
}

#[test]
fn muon_moves_a_tall_matrix_by_the_root_of_its_shape_further() {
    for (rows, cols, factor) in [(8, 2, 2.0), (27, 3, 3.0), (4, 4, 1.0)] {
        let [tall, wide] = after_muon(rows, cols, Strategy::OptimGradsParams);
        assert!(wide < 0.0, "{wide}");
        assert_close(&(tall / wide), &factor, relative(1e-4), format!("{rows} x {cols}"));
    }
}

#[test]
fn muon_moves_alike_in_every_strategy_whatever_the_shape() {
    let first = after_muon(8, 2, Strategy::NoShard);
    assert_close(&(first[0] / first[1]), &2.0, relative(1e-4), "8 x 2");
    for strategy in Strategy::ALL {
        assert_eq!(after_muon(8, 2, strategy), first, "{strategy}");
    }
}
