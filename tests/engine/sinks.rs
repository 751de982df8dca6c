//! Ops that write a weight's gradient where it is reduced from, instead of giving it to candle.

use candle_core::{Result, Tensor};
use fsdp::prelude::*;
use fsdp_models::ops::linear;

use crate::fixtures::{config, full, gradients, named, on_ranks};

/// The sum of all elements of `x w'` and `(3 x) w'`: each row of the gradient of `w` is `x + 3 x`.
#[derive(FsdpUnit)]
struct Twice {
    w: Param,
    /// Whether candle computes the second product.
    #[fsdp(skip)]
    mixed: bool,
}

impl Twice {
    fn new(mixed: bool) -> Twice {
        Twice { w: Param::new((2, 3)).with_init(Init::Ones), mixed }
    }
}

impl Forward for Twice {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let (w, sink) = (self.w.tensor(scope)?, self.w.grad_sink());
        let x = x.reshape((1, 3))?;
        let first = linear(&x, &w, &sink)?;
        let threefold = (x * 3.0)?;
        let second = if self.mixed { threefold.matmul(&w.t()?)? } else { linear(&threefold, &w, &sink)? };
        (first + second)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct InUnit {
    unit: Unit<Twice>,
}

impl Forward for InUnit {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)
    }
}

/// The mean over ranks 0 and 1 of four times 1 and 2 is 6.
const EXPECTED: [f32; 6] = [6.0; 6];

fn settings() -> impl Iterator<Item = (FsdpConfig, bool)> {
    let all = Strategy::ALL.into_iter().flat_map(|strategy| {
        [Recompute::None, Recompute::Unit].map(|recompute| FsdpConfig { recompute, ..config(strategy) })
    });
    all.flat_map(|config| [false, true].map(|mixed| (config.clone(), mixed)))
}

#[test]
fn a_units_weight_that_is_used_twice_has_the_sum_of_both() {
    for (config, mixed) in settings() {
        on_ranks(2, |world| {
            let model = InUnit { unit: Unit::new(Twice::new(mixed)) };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let loss: Tensor = model.forward(&full(3, 1.0 + world.rank() as f32))?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("unit.w", &EXPECTED)]), "{config:?}, {mixed}");
            Ok(())
        });
    }
}

#[test]
fn a_weight_of_the_root_that_is_used_twice_has_the_sum_of_both() {
    for (config, mixed) in settings() {
        on_ranks(2, |world| {
            let model = Twice::new(mixed).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let loss: Tensor = model.forward(&full(3, 1.0 + world.rank() as f32))?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("w", &EXPECTED)]), "{config:?}, {mixed}");
            Ok(())
        });
    }
}
