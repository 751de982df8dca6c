//! The norm that clipping takes is that of the whole gradient, and the step it leaves is within the bound.

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close, relative};

use crate::fixtures::{config, gradients, on_ranks, weights};
use crate::reference::{Layers, rows};

fn host_reductions<M>(model: &Fsdp<M>) -> u64 {
    model.traffic().iter().find(|report| report.operation == "host-reduce").unwrap().counter.calls
}

#[test]
fn norms_are_those_of_whole_gradients_and_clipped_steps_within_the_bound() {
    for (outer, inner) in [(1, 2), (1, 3), (2, 2)] {
        for strategy in Strategy::ALL {
            for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                if outer_strategy == OuterStrategy::Optim && (outer == 1 || !strategy.shards_optim()) {
                    continue;
                }
                let norms = on_ranks(outer * inner, |world| {
                    let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", inner)])?;
                    let config = FsdpConfig { outer: outer_strategy, ..config(strategy) };
                    let mut model = Layers::new(&[7, 15, 3]).fully_shard_with(&mesh, &config)?;
                    let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
                    let mut norms = Vec::new();
                    for step in 0..10 {
                        let loss: Tensor = model.forward(&rows(4, 7, step * 4 + world.rank()))?;
                        model.backward(&loss)?;
                        let gradients = gradients(&model)?;
                        let elements = || gradients.iter().flat_map(|(_, gradient)| gradient);
                        let whole = elements().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
                        // Every other step is clipped.
                        let bound = if step % 2 == 0 { whole / 3.0 } else { whole * 3.0 };
                        let before = weights(&model)?;
                        let reductions = host_reductions(&model);
                        let norm = model.clip_grad_norm(bound)?;
                        assert_eq!(host_reductions(&model) - reductions, 1);
                        assert_close(&norm, &whole, relative(1e-6), "the norm");
                        optimizer.step(&mut model)?;
                        let after = weights(&model)?;
                        let moves = before.iter().zip(&after).flat_map(|((_, a), (_, b))| a.iter().zip(b));
                        let steps: Vec<f64> =
                            moves.map(|(before, after)| f64::from(before - after)).collect();
                        let factor = (bound / norm).min(1.0);
                        let expected: Vec<f64> = elements().map(|&g| f64::from(g) * factor).collect();
                        assert_close(&steps, &expected, absolute(1e-6), "the step");
                        let moved = steps.iter().map(|step| step.powi(2)).sum::<f64>().sqrt();
                        assert!(moved <= bound * (1.0 + 1e-5), "{moved} beyond {bound}");
                        norms.push(norm.to_bits());
                    }
                    Ok(norms)
                });
                assert!(norms.iter().all(|of_rank| *of_rank == norms[0]), "ranks have different norms");
            }
        }
    }
}
