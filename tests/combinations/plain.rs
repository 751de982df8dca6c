//! The same training in one process, with plain candle: no units, no ranks, no engine.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var};

use crate::Weights;
use crate::case::{Awkward, Case, STEPS};
use crate::net::DIM;

struct Model {
    vars: BTreeMap<String, Var>,
    awkward: Awkward,
}

impl Model {
    /// The weight of this name, or the one it is tied to.
    fn weight(&self, name: &str) -> &Tensor {
        let tied = match (self.awkward, name) {
            (Awkward::TiedInRoot, "head") => "embed",
            (Awkward::TiedAcrossUnits, "blocks.2.w") => "blocks.0.w",
            _ => name,
        };
        self.vars[tied].as_tensor()
    }

    fn block(&self, x: &Tensor, path: &str) -> Result<Tensor> {
        let (w, b) = (self.weight(&format!("{path}.w")), self.weight(&format!("{path}.b")));
        x + x.matmul(w)?.broadcast_add(b)?.tanh()?
    }

    fn loss(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.matmul(self.weight("embed"))?;
        for block in 0..if self.awkward == Awkward::Unused { 2 } else { 3 } {
            x = self.block(&x, &format!("blocks.{block}"))?;
        }
        x = self.block(&x, "nest.inner")?.broadcast_mul(self.weight("nest.gain"))?;
        x.matmul(self.weight("head"))?.to_dtype(DType::F32)?.sqr()?.mean_all()
    }
}

fn shape(name: &str) -> Vec<usize> {
    match name {
        "embed" | "head" => vec![DIM, DIM],
        _ if name.ends_with(".w") => vec![DIM, DIM],
        _ if name.ends_with(".unused") => vec![3],
        _ => vec![DIM],
    }
}

fn frozen(case: &Case, name: &str) -> bool {
    case.awkward == Awkward::Frozen && (name == "embed" || name.starts_with("blocks.1."))
}

/// A unit that has had no backward is left alone, momentum included.
fn untouched(case: &Case, name: &str) -> bool {
    case.awkward == Awkward::Unused && name.starts_with("blocks.2.")
}

/// Trains from the weights `before` and returns those after, by name.
pub fn train(case: &Case, before: &Weights) -> Result<Weights> {
    let dtype = if case.half { DType::BF16 } else { DType::F32 };
    let mut main: Vec<(String, Vec<f32>)> = before.clone();
    let mut velocity: Vec<Vec<f32>> = before.iter().map(|(_, values)| vec![0.0; values.len()]).collect();
    for step in 0..STEPS {
        let mut vars = BTreeMap::new();
        for (name, values) in &main {
            let tensor = Tensor::from_slice(values, shape(name), &Device::Cpu)?.to_dtype(dtype)?;
            vars.insert(name.clone(), Var::from_tensor(&tensor)?);
        }
        let model = Model { vars, awkward: case.awkward };
        let mut sums: Vec<Vec<f32>> = before.iter().map(|(_, values)| vec![0.0; values.len()]).collect();
        for microbatch in 0..case.microbatches {
            for rank in 0..case.ranks() {
                let grads = model.loss(&case.input(step, microbatch, rank)?)?.backward()?;
                for ((name, _), sum) in before.iter().zip(&mut sums) {
                    if let Some(grad) = grads.get(model.vars[name].as_tensor()) {
                        let grad = grad.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                        sum.iter_mut().zip(grad).for_each(|(sum, grad)| *sum += grad / case.ranks() as f32);
                    }
                }
            }
        }
        for (((name, weights), sum), velocity) in main.iter_mut().zip(&sums).zip(&mut velocity) {
            if frozen(case, name) || untouched(case, name) {
                continue;
            }
            for ((weight, grad), velocity) in weights.iter_mut().zip(sum).zip(velocity) {
                *velocity = 0.9 * *velocity + grad;
                *weight -= 0.05 * *velocity;
            }
        }
    }
    Ok(main)
}
