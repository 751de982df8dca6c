//! The shortest whole program: define a model, shard it over two ranks, train it.
//!
//! `cargo run --example quickstart`

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;

/// `x + tanh(x wᵀ + b)`
#[derive(FsdpUnit)]
struct Residual {
    weight: Param,
    bias: Param,
}

impl Residual {
    fn new(dim: usize) -> Self {
        Self { weight: Param::new((dim, dim)), bias: Param::new(dim).with_init(Init::Zeros) }
    }
}

impl Forward for Residual {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        // Only a scope, which only the runtime makes, gives access to the whole weights.
        let (weight, bias) = (self.weight.tensor(scope)?, self.bias.tensor(scope)?);
        x + x.matmul(&weight.t()?)?.broadcast_add(&bias)?.tanh()?
    }
}

#[derive(FsdpUnit)]
struct Net {
    /// What is in one `Unit` is gathered, used and given back together.
    layers: Vec<Unit<Residual>>,
    head: Param,
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, &(), scope)?;
        }
        x.matmul(&self.head.tensor(scope)?)
    }
}

const DIM: usize = 32;

fn main() -> anyhow::Result<()> {
    clap::Command::new("quickstart").about("Shards a small model over two ranks and trains it").get_matches();
    let losses = fsdp::launch::local(2, |world| -> fsdp::Result<Vec<f32>> {
        let net = Net {
            layers: (0..4).map(|_| Unit::new(Residual::new(DIM))).collect(),
            head: Param::new((DIM, 1)),
        };
        let mut model = net.fully_shard(&world.data_parallel_mesh())?; // each rank now owns a half
        let mut optimizer = model.optimizer(AdamW::default().lr(3e-3))?;
        let (x, y) = examples(world.rank())?;
        let mut losses = Vec::new();
        for _ in 0..200 {
            let prediction: Tensor = model.forward(&x)?;
            let loss = (prediction - &y)?.sqr()?.mean_all()?;
            model.backward(&loss)?; // the reduction of gradients overlaps the backward
            optimizer.step(&mut model)?;
            losses.push(loss.to_scalar()?);
        }
        Ok(losses)
    })?;
    for step in (0..200).step_by(40).chain([199]) {
        println!("step {step:3}  loss {:.4}", (losses[0][step] + losses[1][step]) / 2.0);
    }
    Ok(())
}

/// 64 points of this rank's own, and a function of each to be learnt.
fn examples(rank: usize) -> Result<(Tensor, Tensor)> {
    let point = |i: usize| (((rank * 64 * DIM + i) as f32 * 12.9898).sin() * 43758.547).fract();
    let x = Tensor::from_iter((0..64 * DIM).map(point), &Device::Cpu)?.reshape((64, DIM))?;
    let y = x.narrow(1, 0, 4)?.sin()?.sum_keepdim(1)?;
    Ok((x, y))
}
