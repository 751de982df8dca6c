//! Models that are sharded on CUDA devices train as on the CPU, in whatever order streams run: the fake driver runs each as
//! late as its waits allow, and finds races, frees of memory in use, and leaks.

mod devices;
mod graphs;
mod state;
mod training;

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;

/// A layer of a perceptron with a residual; the bias is of no multiple of anything.
#[derive(FsdpUnit)]
pub(crate) struct Layer {
    weight: Param,
    bias: Param,
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let (weight, bias) = (self.weight.tensor(scope)?, self.bias.tensor(scope)?);
        let y = x.matmul(&weight.t()?)?.broadcast_add(&bias)?;
        x + y.tanh()?
    }
}

/// Some layers, a head of its own, and a buffer.
#[derive(FsdpUnit)]
pub(crate) struct Model {
    layers: Vec<Unit<Layer>>,
    head: Param,
    #[fsdp(buffer)]
    scale: Tensor,
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, &(), scope)?;
        }
        let x = x.to_dtype(self.head.tensor(scope)?.dtype())?;
        let y = x.broadcast_mul(&self.head.tensor(scope)?)?.to_dtype(candle_core::DType::F32)?;
        y.broadcast_mul(&self.scale)?.sqr()?.mean_all()
    }
}

impl Model {
    pub(crate) fn new(width: usize, layers: usize, device: &Device) -> Result<Model> {
        let layer = |_| {
            Unit::new(Layer {
                weight: Param::new((width, width)).with_init(Init::Normal { mean: 0.0, std: 0.3 }),
                bias: Param::new(width).with_init(Init::Normal { mean: 0.0, std: 0.1 }),
            })
        };
        Ok(Model {
            layers: (0..layers).map(layer).collect(),
            head: Param::new(width).with_init(Init::Ones),
            scale: Tensor::full(1.5f32, 1, device)?,
        })
    }
}

/// The batch of a rank in a microbatch.
pub(crate) fn batch(width: usize, index: usize, device: &Device) -> Result<Tensor> {
    let value = |i: usize| ((i * 37 + index * 101 + 11) % 64) as f32 / 32.0 - 1.0;
    Tensor::from_vec((0..3 * width).map(value).collect::<Vec<f32>>(), (3, width), device)
}
