//! A small model with all that is awkward: nested units, ties, frozen and unused parameters, uneven sizes.

use candle_core::{Result, Tensor};
use fsdp::prelude::*;

use crate::case::{Awkward, Case};

/// Width of the model: no divisor in common with most numbers of ranks.
pub const DIM: usize = 5;

/// `x + tanh(x w + b)`
#[derive(FsdpUnit)]
pub struct Block {
    w: Param,
    b: Param,
    unused: Option<Param>,
}

impl Forward for Block {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x + x.matmul(&self.w.tensor(scope)?)?.broadcast_add(&self.b.tensor(scope)?)?.tanh()?
    }
}

/// A unit inside a unit: `block(x) * gain`
#[derive(FsdpUnit)]
pub struct Nest {
    inner: Unit<Block>,
    gain: Param,
}

impl Forward for Nest {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.inner.forward(x, &(), scope)?.broadcast_mul(&self.gain.tensor(scope)?)
    }
}

/// The mean of the squares of `(blocks(x embed)) head`.
#[derive(FsdpUnit)]
pub struct Net {
    embed: Param,
    blocks: Vec<Unit<Block>>,
    nest: Unit<Nest>,
    head: Param,
    #[fsdp(skip)]
    used: usize,
}

impl Net {
    pub fn new(case: &Case) -> Net {
        let matrix = || Param::new((DIM, DIM)).with_init(Init::Normal { mean: 0.0, std: 0.3 });
        let block = |w: Param, unused: bool| Block {
            w,
            b: Param::new(DIM).with_init(Init::Zeros),
            unused: unused.then(|| Param::new(3).with_init(Init::Ones)),
        };
        let first = matrix();
        let last = if case.awkward == Awkward::TiedAcrossUnits { first.clone() } else { matrix() };
        let unused = case.awkward == Awkward::Unused;
        let net = Net {
            embed: matrix(),
            blocks: vec![
                Unit::new(block(first, unused)),
                Unit::new(block(matrix(), false)),
                Unit::new(block(last, false)),
            ],
            nest: Unit::new(Nest {
                inner: Unit::new(block(matrix(), false)),
                gain: Param::new(DIM).with_init(Init::Ones),
            }),
            head: matrix(),
            used: if unused { 2 } else { 3 },
        };
        let net =
            if case.awkward == Awkward::TiedInRoot { Net { head: net.embed.clone(), ..net } } else { net };
        if case.awkward == Awkward::Frozen {
            net.embed.set_requires_grad(false).expect("not sharded yet");
            net.blocks[1].set_requires_grad(false).expect("not sharded yet");
        }
        net
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.matmul(&self.embed.tensor(scope)?)?;
        for block in &self.blocks[..self.used] {
            x = block.forward(&x, &(), scope)?;
        }
        x = self.nest.forward(&x, &(), scope)?;
        x.matmul(&self.head.tensor(scope)?)?.to_dtype(candle_core::DType::F32)?.sqr()?.mean_all()
    }
}
