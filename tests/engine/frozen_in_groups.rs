//! Frozen parameters beside trainable ones in a unit: what travels, and what is trained.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{config, gradients, on_ranks, weights};
use crate::reference::{Layer, rows};

/// A frozen layer between layers that are trained, which may run several times.
#[derive(FsdpUnit)]
struct Sandwich {
    below: Unit<Layer>,
    middle: Unit<Layer>,
    above: Unit<Layer>,
}

impl Forward<usize> for Sandwich {
    fn forward(&self, x: &Tensor, repeats: &usize, scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = self.below.forward(x, &(), scope)?;
        for _ in 0..*repeats {
            x = self.middle.forward(&x, &(), scope)?;
        }
        self.above.forward(&x, &(), scope)?.sqr()?.mean_all()
    }
}

/// For evaluation, which passes no context.
impl Forward<(), (Tensor, usize)> for Sandwich {
    fn forward(&self, (x, repeats): &(Tensor, usize), _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.forward(x, repeats, scope)
    }
}

fn sandwich() -> Sandwich {
    let layer = || Unit::new(Layer::new(6, 6));
    Sandwich { below: layer(), middle: layer(), above: layer() }
}

/// What is frozen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Frozen {
    Nothing,
    Biases,
    Middle,
    BelowAndBiases,
}

impl Frozen {
    fn holds(self, name: &str) -> bool {
        match self {
            Frozen::Nothing => false,
            Frozen::Biases => name.ends_with(".b"),
            Frozen::Middle => name.starts_with("middle"),
            Frozen::BelowAndBiases => name.starts_with("below") || name.ends_with(".b"),
        }
    }

    fn freeze(self, model: &Sandwich) -> fsdp::Result<()> {
        for (name, layer) in [("below", &model.below), ("middle", &model.middle), ("above", &model.above)] {
            for (param, name) in [(&layer.w, format!("{name}.w")), (&layer.b, format!("{name}.b"))] {
                param.set_requires_grad(!self.holds(&name))?;
            }
        }
        Ok(())
    }
}

#[test]
fn gradients_of_what_is_trained_are_those_of_the_model_with_nothing_frozen() {
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            for repeats in [1, 3] {
                let run = |frozen: Frozen| {
                    let rows_of_ranks = on_ranks(2, |world| {
                        let model = sandwich();
                        frozen.freeze(&model)?;
                        let config = FsdpConfig { recompute, ..config(strategy) };
                        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                        let mut optimizer = model.optimizer(AdamW::default().lr(0.1))?;
                        let before = weights(&model)?;
                        let x = rows(3, 6, world.rank());
                        // A pass without gradients first.
                        let _: Tensor = model.evaluate(&(x.clone(), repeats))?;
                        let loss: Tensor = model.forward_with(&x, &repeats)?;
                        model.backward(&loss)?;
                        let gradients = gradients(&model)?;
                        optimizer.step(&mut model)?;
                        for ((name, before), (_, after)) in before.iter().zip(&weights(&model)?) {
                            assert_eq!(before == after, frozen.holds(name), "{name}, {frozen:?}");
                        }
                        Ok(gradients)
                    });
                    rows_of_ranks.into_iter().next().unwrap()
                };
                let all = run(Frozen::Nothing);
                assert_eq!(all.len(), 6);
                for frozen in [Frozen::Biases, Frozen::Middle, Frozen::BelowAndBiases] {
                    let trained = all.iter().filter(|(name, _)| !frozen.holds(name)).cloned();
                    let expected: BTreeMap<String, Vec<f32>> = trained.collect();
                    let found: BTreeMap<String, Vec<f32>> = run(frozen).into_iter().collect();
                    assert_eq!(found, expected, "{frozen:?}, {strategy}, {recompute:?}, {repeats}");
                }
            }
        }
    }
}

#[test]
fn only_what_is_trained_is_reduced() {
    for (frozen, groups) in
        [(Frozen::Nothing, 3), (Frozen::Biases, 3), (Frozen::Middle, 2), (Frozen::BelowAndBiases, 2)]
    {
        for ranks in [2, 3] {
            on_ranks(ranks, |world| {
                let model = sandwich();
                frozen.freeze(&model)?;
                let model =
                    model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
                let loss: Tensor = model.forward_with(&rows(3, 6, world.rank()), &2)?;
                model.backward(&loss)?;
                model.finish_grad_sync()?;
                let buckets = model.layout().buckets.iter().filter(|bucket| bucket.key.requires_grad);
                let padded: usize = buckets.map(|bucket| bucket.size).sum();
                let trained: usize =
                    model.layout().params.iter().filter(|p| p.key.requires_grad).map(|p| p.numel()).sum();
                let padding = padded - trained;
                assert!(padding < groups as usize * (2 + ranks) * 16, "{padding}");
                let traffic = model.traffic();
                let scatter = traffic.iter().find(|t| t.operation == "reduce-scatter").unwrap().counter;
                assert_eq!(scatter.calls, groups, "{frozen:?}");
                // Each rank gets its part of the others' gradients.
                let bytes = padded / ranks * (ranks - 1) * 4;
                assert_eq!(scatter.bytes_from_peers, bytes as u64, "{frozen:?}");
                Ok(())
            });
        }
    }
}
