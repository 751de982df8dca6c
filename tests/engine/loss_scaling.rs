//! A scaled loss keeps small 16-bit gradients; where it overflows on one rank all ranks see it and skip the step.

use candle_core::Tensor;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, full, gradients, named, on_ranks, weights};

/// Two units, one of which gets an infinity on one rank in the second attempt.
#[test]
fn an_overflow_on_one_rank_is_seen_by_all_and_the_step_can_be_skipped() {
    for (outer, inner) in [(1, 2), (2, 2)] {
        for strategy in Strategy::ALL {
            on_ranks(outer * inner, |world| {
                let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                let config = FsdpConfig { precision: MixedPrecision::F16, ..config(strategy) };
                let model = Dots { units: vec![Dot::zeros(5), Dot::zeros(33)] };
                let mut model = model.fully_shard_with(&mesh, &config)?;
                let (mut scale, mut steps) = (1024f64, 0);
                for overflows in [false, true, false] {
                    let x = if overflows && world.rank() == 1 { f32::INFINITY } else { 1.0 };
                    let loss: Tensor = model.forward(&vec![full(5, 1.0), full(33, x)])?;
                    model.backward(&(loss * scale)?)?;
                    let finite = model.grad_norm()?.is_finite();
                    assert_eq!(finite, !overflows, "rank {}, {strategy}", world.rank());
                    if !finite {
                        model.reset_step()?;
                        scale /= 2.0;
                        continue;
                    }
                    let expected = scale as f32;
                    assert_eq!(
                        gradients(&model)?,
                        named(&[("units.0.w", &[expected; 5]), ("units.1.w", &[expected; 33])])
                    );
                    // A power of two is undone exactly by the learning rate of plain descent.
                    let mut optimizer = model.optimizer(Sgd::default().lr(1.0 / scale))?;
                    optimizer.step(&mut model)?;
                    steps += 1;
                }
                assert_eq!((steps, scale), (2, 512.0));
                assert_eq!(weights(&model)?, named(&[("units.0.w", &[-2.0; 5]), ("units.1.w", &[-2.0; 33])]));
                Ok(())
            });
        }
    }
}

#[test]
fn a_gradient_below_the_range_of_f16_survives_scaled() {
    on_ranks(2, |world| {
        let config = FsdpConfig { precision: MixedPrecision::F16, ..config(Strategy::default()) };
        let model = Dots { units: vec![Dot::zeros(3)] };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let tiny = 2f32.powi(-20);
        for (scale, expected) in [(2f64.powi(-10), 0.0), (1.0, tiny), (1024.0, 1024.0 * tiny)] {
            let loss: Tensor = model.forward(&vec![full(3, tiny)])?;
            model.backward(&(loss * scale)?)?;
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[expected; 3])]), "{scale}");
            model.reset_step()?;
        }
        Ok(())
    });
}
