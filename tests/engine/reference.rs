//! A model that trains sharded and, from the same weights, on plain candle in one process.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp::prelude::*;
use fsdp_test_support::{Within, relative};

/// Learning rate of both trainings; decay is off.
pub const LEARNING_RATE: f64 = 1e-2;

/// `tanh(x w + b)`
#[derive(FsdpUnit)]
pub struct Layer {
    pub w: Param,
    pub b: Param,
}

impl Layer {
    pub fn new(inputs: usize, outputs: usize) -> Layer {
        let init = Init::Normal { mean: 0.0, std: 0.5 };
        Layer { w: Param::new((inputs, outputs)).with_init(init), b: Param::new(outputs).with_init(init) }
    }
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        layer(x, &self.w.tensor(scope)?, &self.b.tensor(scope)?)
    }
}

fn layer(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    x.matmul(w)?.broadcast_add(b)?.tanh()
}

/// Layers, and a gain of the root; the loss is the mean over the rows of the sum of squares. `repeats` says how many
/// times each layer runs in a row.
#[derive(FsdpUnit)]
pub struct Layers {
    gain: Param,
    layers: Vec<Unit<Layer>>,
    #[fsdp(skip)]
    repeats: Vec<usize>,
}

impl Layers {
    /// `widths`: of the input, and of each layer's output.
    pub fn new(widths: &[usize]) -> Layers {
        Layers::repeated(widths, &vec![1; widths.len() - 1])
    }

    pub fn repeated(widths: &[usize], repeats: &[usize]) -> Layers {
        let layers = widths.windows(2).map(|pair| Unit::new(Layer::new(pair[0], pair[1])));
        Layers {
            gain: Param::new(widths[0]).with_init(Init::Uniform { low: 0.5, high: 1.5 }),
            layers: layers.collect(),
            repeats: repeats.to_vec(),
        }
    }
}

impl Forward for Layers {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.broadcast_mul(&self.gain.tensor(scope)?)?;
        for (layer, &repeats) in self.layers.iter().zip(&self.repeats) {
            for _ in 0..repeats {
                x = layer.forward(&x, &(), scope)?;
            }
        }
        x.sqr()?.sum(1)?.mean_all()
    }
}

/// The weights by name, with their shapes.
pub type Weights = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub fn weights<M>(model: &Fsdp<M>) -> fsdp::Result<Weights> {
    let mut all = Weights::new();
    model.visit_weights(|spec, values| {
        all.insert(spec.name.clone(), (spec.shape.clone(), values.to_vec()));
        Ok(())
    })?;
    Ok(all)
}

/// Rows of small values that depend on everything.
pub fn rows(rows: usize, width: usize, seed: usize) -> Tensor {
    let values: Vec<f32> = (0..rows * width).map(|i| ((seed * 13 + i * 5) % 17) as f32 / 8.0 - 1.0).collect();
    Tensor::from_vec(values, (rows, width), &Device::Cpu).unwrap()
}

/// The optimizer that [`train`] mirrors.
pub fn adam() -> AdamW {
    AdamW::default().lr(LEARNING_RATE).weight_decay(0.0)
}

/// Trains `layers` on plain candle: `steps` of Adam on the mean of the losses over the ranks, summed over
/// microbatches. `inputs[step]` holds one input for each microbatch and rank, microbatches outermost. Passes run in the
/// inputs' dtype; weights and sums keep f32. Changes `weights`; returns the losses in the order of the inputs.
pub fn train(
    repeats: &[usize],
    weights: &mut Weights,
    ranks: usize,
    inputs: &[Vec<Tensor>],
) -> Result<Vec<f32>> {
    let mut moments: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut losses = Vec::new();
    for (step, inputs) in inputs.iter().enumerate() {
        let vars: BTreeMap<&String, Var> = weights
            .iter()
            .map(|(name, (shape, values))| {
                let values = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu)?;
                Ok((name, Var::from_tensor(&values.to_dtype(inputs[0].dtype())?)?))
            })
            .collect::<Result<_>>()?;
        let var = |name: &str| vars[&name.to_string()].as_tensor();
        let mut sums: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for input in inputs {
            let mut x = input.broadcast_mul(var("gain"))?;
            for (index, &repeats) in repeats.iter().enumerate() {
                for _ in 0..repeats {
                    let name = |param: &str| format!("layers.{index}.{param}");
                    x = layer(&x, var(&name("w")), var(&name("b")))?;
                }
            }
            let loss = x.sqr()?.sum(1)?.mean_all()?;
            losses.push(loss.to_dtype(DType::F32)?.to_scalar()?);
            let grads = loss.backward()?;
            for (name, var) in &vars {
                let grad = grads.get(var.as_tensor()).expect("every parameter is used");
                let grad = grad.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                let sum = sums.entry((*name).clone()).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(sum, grad)| *sum += grad / ranks as f64);
            }
        }
        drop(vars);
        let t = step as i32 + 1;
        for (name, (_, values)) in weights.iter_mut() {
            let moments = moments.entry(name.clone()).or_insert_with(|| vec![(0.0, 0.0); values.len()]);
            for ((value, grad), (m, v)) in values.iter_mut().zip(&sums[name]).zip(moments) {
                *m = 0.9 * *m + 0.1 * grad;
                *v = 0.999 * *v + 0.001 * grad * grad;
                let denominator = (*v / (1.0 - 0.999f64.powi(t))).sqrt() + 1e-8;
                *value -= (LEARNING_RATE * *m / (1.0 - 0.9f64.powi(t)) / denominator) as f32;
            }
        }
    }
    Ok(losses)
}

/// PyTorch's tolerance of f32.
pub const TORCH: Within = relative(1.3e-6).plus(1e-5);
