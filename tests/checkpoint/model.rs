//! A model of awkward tensors: uneven, tiny, tied, frozen, of several dtypes, with buffers.

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;

/// `x -> tanh(x w + b)`.
#[derive(FsdpUnit)]
pub struct Layer {
    pub weight: Param,
    #[fsdp(no_decay)]
    pub bias: Param,
    #[fsdp(frozen)]
    pub scale: Param,
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let weight = self.weight.tensor(scope)?.to_dtype(DType::F32)?;
        let bias = self.bias.tensor(scope)?.to_dtype(DType::F32)?;
        let scale = self.scale.tensor(scope)?.to_dtype(DType::F32)?;
        x.matmul(&weight)?.broadcast_add(&bias)?.broadcast_mul(&scale)?.tanh()
    }
}

#[derive(FsdpUnit)]
pub struct Net {
    pub layers: Vec<Unit<Layer>>,
    pub head: Param,
    #[fsdp(tie_with = "head")]
    pub tied: Param,
    /// One element: most ranks hold none.
    pub gain: Param,
    #[fsdp(dtype = "f32")]
    pub exact: Param,
    #[fsdp(buffer)]
    pub counts: Tensor,
    #[fsdp(buffer)]
    pub mean: Tensor,
}

pub const WIDTH: usize = 5;

impl Net {
    pub fn new(layers: usize) -> Net {
        let layer = || {
            Unit::new(Layer {
                weight: Param::new((WIDTH, WIDTH)),
                bias: Param::new(WIDTH).with_init(Init::Zeros),
                scale: Param::new(WIDTH).with_init(Init::Uniform { low: 0.5, high: 1.5 }),
            })
        };
        Net {
            layers: (0..layers).map(|_| layer()).collect(),
            head: Param::new((WIDTH, WIDTH)),
            tied: Param::new((WIDTH, WIDTH)),
            gain: Param::new(1).with_init(Init::Ones),
            exact: Param::new((3, 7)),
            counts: Tensor::new(&[1u32, 2, 3], &Device::Cpu).unwrap(),
            mean: Tensor::new(&[[0.5f64, -1.5]], &Device::Cpu).unwrap(),
        }
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, context: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, context, scope)?;
        }
        let head = self.head.tensor(scope)?.to_dtype(DType::F32)?;
        let tied = self.tied.tensor(scope)?.to_dtype(DType::F32)?;
        let x = x.matmul(&head)?.matmul(&tied.t()?)?;
        let x = x.broadcast_mul(&self.gain.tensor(scope)?.to_dtype(DType::F32)?)?;
        x.sqr()?.mean_all()? + self.exact.tensor(scope)?.sqr()?.sum_all()?
    }
}

/// A rank's input in a step: rows that differ by rank and step.
pub fn input(rank: usize, step: u64) -> Tensor {
    let values: Vec<f32> =
        (0..2 * WIDTH).map(|i| ((i * 7 + rank * 3 + step as usize * 5) % 11) as f32 / 5.0 - 1.0).collect();
    Tensor::from_vec(values, (2, WIDTH), &Device::Cpu).unwrap()
}

/// Trains a step.
pub fn step<M: Forward>(
    model: &mut Fsdp<M>,
    optimizer: &mut ShardedOptimizer<AdamW>,
    input: &Tensor,
) -> fsdp::Result<f32> {
    let loss: Tensor = model.forward(input)?;
    model.backward(&loss)?;
    optimizer.step(model)?;
    Ok(loss.to_scalar()?)
}
