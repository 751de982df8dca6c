//! The unit boundary changes nothing: losses and gradients are those of plain candle, bit for bit.

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp::prelude::*;

use crate::fixtures::{config, gradients, on_ranks};

#[derive(FsdpUnit)]
struct Mlp {
    up: Param,
    down: Param,
}

impl Mlp {
    fn new() -> Mlp {
        let init = Init::Normal { mean: 0.0, std: 0.3 };
        Mlp { up: Param::new((24, 8)).with_init(init), down: Param::new((8, 24)).with_init(init) }
    }

    fn compute(x: &Tensor, up: &Tensor, down: &Tensor) -> Result<Tensor> {
        x + x.matmul(&up.t()?)?.gelu()?.matmul(&down.t()?)?
    }
}

impl Forward for Mlp {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        Mlp::compute(x, &self.up.tensor(scope)?, &self.down.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct Net {
    first: Param,
    layers: Vec<Unit<Mlp>>,
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.broadcast_mul(&self.first.tensor(scope)?)?;
        for layer in &self.layers {
            x = layer.forward(&x, &(), scope)?;
        }
        x.sqr()?.mean_all()
    }
}

fn input(rank: usize) -> Tensor {
    let values: Vec<f32> = (0..5 * 8).map(|i| ((i * 7 + rank * 3) % 11) as f32 / 4.0 - 1.0).collect();
    Tensor::from_vec(values, (5, 8), &Device::Cpu).unwrap()
}

#[test]
fn one_rank_equals_plain_candle_to_the_bit() {
    for recompute in [Recompute::None, Recompute::Unit] {
        on_ranks(1, |world| {
            let net = Net { first: Param::new(8), layers: (0..3).map(|_| Unit::new(Mlp::new())).collect() };
            let config = FsdpConfig { recompute, ..config(Strategy::default()) };
            let model = net.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let weights = crate::fixtures::weights(&model)?;
            let loss: Tensor = model.forward(&input(0))?;
            model.backward(&loss)?;

            let shapes: Vec<Vec<usize>> =
                model.layout().params.iter().map(|spec| spec.shape.clone()).collect();
            let vars: Vec<Var> = weights
                .iter()
                .map(|(name, values)| {
                    let index = model.layout().params.iter().position(|spec| spec.name == *name).unwrap();
                    Var::from_vec(values.clone(), shapes[index].clone(), &Device::Cpu)
                })
                .collect::<Result<_>>()?;
            let mut x = input(0).broadcast_mul(&vars[0])?;
            for layer in 0..3 {
                x = Mlp::compute(&x, &vars[1 + 2 * layer], &vars[2 + 2 * layer])?;
            }
            let expected = x.sqr()?.mean_all()?;
            assert_eq!(loss.to_scalar::<f32>()?, expected.to_scalar::<f32>()?);
            let grads = expected.backward()?;
            for ((name, gradient), var) in gradients(&model)?.iter().zip(&vars) {
                let expected = grads.get(var).unwrap().flatten_all()?.to_vec1::<f32>()?;
                assert_eq!(*gradient, expected, "{name}, {recompute:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn strategies_recomputation_and_double_buffering_are_bit_equal() {
    let run = |strategy, recompute, double_buffer, prefetch, gather_budget| {
        on_ranks(3, |world| {
            let net = Net { first: Param::new(8), layers: (0..4).map(|_| Unit::new(Mlp::new())).collect() };
            let config = FsdpConfig { recompute, double_buffer, prefetch, gather_budget, ..config(strategy) };
            let mut model = net.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.01))?;
            let mut bits = Vec::new();
            for _ in 0..6 {
                let loss: Tensor = model.forward(&input(world.rank()))?;
                model.backward(&loss)?;
                bits.push(model.clip_grad_norm(0.1)?.to_bits());
                optimizer.step(&mut model)?;
                bits.push(u64::from(loss.to_scalar::<f32>()?.to_bits()));
            }
            Ok(bits)
        })
    };
    let expected = run(Strategy::NoShard, Recompute::None, true, 1, None);
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            let ways =
                [(true, 1, None), (false, 1, None), (true, 0, None), (true, 3, None), (true, 1, Some(0))];
            for (double_buffer, prefetch, budget) in ways {
                let bits = run(strategy, recompute, double_buffer, prefetch, budget);
                assert_eq!(
                    bits, expected,
                    "{strategy}, {recompute:?}, {double_buffer}, {prefetch}, {budget:?}"
                );
            }
        }
    }
}

/// A unit with two inputs and two outputs, one of its outputs unused.
#[derive(FsdpUnit)]
struct Pair {
    w: Param,
}

impl Forward<f64, (Tensor, Tensor), (Tensor, Tensor)> for Pair {
    fn forward(
        &self,
        (a, b): &(Tensor, Tensor),
        factor: &f64,
        scope: &Scope<'_>,
    ) -> Result<(Tensor, Tensor)> {
        let w = self.w.tensor(scope)?;
        Ok((a.broadcast_mul(&w)?, (b * *factor)?))
    }
}

#[derive(FsdpUnit)]
struct PairNet {
    a: Param,
    pair: Unit<Pair>,
}

impl Forward for PairNet {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let a = self.a.tensor(scope)?;
        let b = x.reshape((1, 3))?;
        let (left, right): (Tensor, Tensor) = self.pair.forward(&(a, b), &3.0, scope)?;
        left.sum_all()? + right.sum_all()?
    }
}

#[test]
fn several_tensors_cross_a_boundary() {
    for recompute in [Recompute::None, Recompute::Unit] {
        on_ranks(2, |world| {
            let two = || Param::new(2).with_init(Init::Constant(2.0));
            let net = PairNet { a: two(), pair: Unit::new(Pair { w: two() }) };
            let config = FsdpConfig { recompute, ..config(Strategy::default()) };
            let model = net.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let x = Tensor::ones(3, DType::F32, &Device::Cpu)?;
            let loss: Tensor = model.forward(&x)?;
            assert_eq!(loss.to_scalar::<f32>()?, 2.0 * 4.0 + 9.0);
            model.backward(&loss)?;
            for (_, gradient) in gradients(&model)? {
                assert_eq!(gradient, [2.0; 2]);
            }
            Ok(())
        });
    }
}

#[test]
fn a_tuple_of_two_dtypes_is_told_where_else_the_tensor_goes() {
    #[derive(FsdpUnit)]
    struct Ids {
        w: Param,
    }
    impl Forward<(), (Tensor, Tensor), Tensor> for Ids {
        fn forward(&self, (x, _): &(Tensor, Tensor), _: &(), scope: &Scope<'_>) -> Result<Tensor> {
            x * self.w.tensor(scope)?
        }
    }
    #[derive(FsdpUnit)]
    struct IdsNet {
        ids: Unit<Ids>,
    }
    impl Forward for IdsNet {
        fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
            let ids = x.to_dtype(DType::U32)?;
            let out: Tensor = self.ids.forward(&(x.clone(), ids), &(), scope)?;
            out.sum_all()
        }
    }
    on_ranks(1, |world| {
        let net = IdsNet { ids: Unit::new(Ids { w: Param::new(2) }) };
        let model = net.fully_shard(&world.data_parallel_mesh())?;
        let x = Tensor::ones(2, DType::F32, &Device::Cpu)?;
        let error = model.forward::<Tensor, Tensor>(&x).unwrap_err().to_string();
        assert!(error.contains("element 0 is F32, element 1 is U32"), "{error}");
        assert!(error.contains("goes in the context, which may be of any type"), "{error}");
        Ok(())
    });
}

#[test]
fn initial_weights_are_the_same_for_every_world_and_strategy() {
    let initial = |ranks, strategy, precision| {
        let all = on_ranks(ranks, |world| {
            let net = Net { first: Param::new(8), layers: (0..2).map(|_| Unit::new(Mlp::new())).collect() };
            let config = FsdpConfig { seed: 7, precision, ..config(strategy) };
            crate::fixtures::weights(&net.fully_shard_with(&world.data_parallel_mesh(), &config)?)
        });
        assert!(all.iter().all(|weights| *weights == all[0]));
        all[0].clone()
    };
    let expected = initial(1, Strategy::NoShard, MixedPrecision::default());
    for ranks in [1, 2, 3, 5, 8] {
        for strategy in Strategy::ALL {
            assert_eq!(initial(ranks, strategy, MixedPrecision::default()), expected, "{ranks}, {strategy}");
            assert_eq!(initial(ranks, strategy, MixedPrecision::BF16), expected, "{ranks}, {strategy}, bf16");
        }
    }
}
