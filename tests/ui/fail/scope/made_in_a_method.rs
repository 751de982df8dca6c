use candle_core::{Result, Tensor};
use fsdp::{FsdpUnit, Param, Scope};

#[derive(FsdpUnit)]
struct Linear {
    weight: Param,
}

impl Linear {
    fn norm(&self) -> Result<Tensor> {
        self.weight.tensor(&Scope::default())?.sqr()?.sum_all()
    }
}

fn main() {}
