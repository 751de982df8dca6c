//! Uneven sizes, more ranks than elements, one rank, empty shards.

use candle_core::Tensor;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, dot, full, gradients, named, on_ranks, weights};

#[test]
fn more_ranks_than_elements_equal_one_process() {
    let train = |ranks: usize, strategy, xs: &(dyn Fn(usize) -> f32 + Sync)| {
        let all = on_ranks(ranks, |world| {
            let mut model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            for _ in 0..3 {
                let loss: Tensor = model.forward(&vec![full(3, xs(world.rank()))])?;
                model.backward(&loss)?;
                model.clip_grad_norm(1.0)?;
                optimizer.step(&mut model)?;
            }
            weights(&model)
        });
        assert!(all.iter().all(|weights| *weights == all[0]));
        all[0].clone()
    };
    let single = train(1, Strategy::NoShard, &|_| 3.5);
    for strategy in Strategy::ALL {
        assert_eq!(train(8, strategy, &|rank| rank as f32), single, "{strategy}");
    }
}

#[test]
fn parameters_of_any_size_in_any_order_are_all_updated() {
    let sizes = [[6usize, 2, 5, 1], [1, 6, 2, 5], [6, 1, 2, 5], [0, 70, 0, 3]];
    for sizes in sizes {
        for strategy in Strategy::ALL {
            for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
                on_ranks(4, |world| {
                    let config = FsdpConfig { alignment, ..config(strategy) };
                    let model = Dots { units: sizes.map(Dot::zeros).into() };
                    let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                    let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0))?;
                    let loss: Tensor = model.forward(&sizes.map(|n| full(n, 1.0)).into())?;
                    model.backward(&loss)?;
                    optimizer.step(&mut model)?;
                    for (index, (_, values)) in weights(&model)?.into_iter().enumerate() {
                        assert_eq!(values, vec![-1.0; sizes[index]], "{sizes:?}, {strategy}, {alignment:?}");
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn one_rank_is_an_ordinary_case() {
    for ranks in [1, 2] {
        on_ranks(ranks, |world| {
            let model = dot(1).fully_shard(&world.data_parallel_mesh())?;
            let loss: Tensor = model.forward(&vec![full(1, 30000.0)])?;
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("units.0.w", &[30000.0])]));
            Ok(())
        });
    }
}

#[test]
fn one_rank_without_a_launch() {
    let mut model = dot(2).fully_shard(&DeviceMesh::single()).unwrap();
    let mut optimizer = model.optimizer(Sgd::default().lr(1.0).weight_decay(0.0)).unwrap();
    let loss: Tensor = model.forward(&vec![full(2, 4.0)]).unwrap();
    model.backward(&loss).unwrap();
    optimizer.step(&mut model).unwrap();
    assert_eq!(weights(&model).unwrap(), named(&[("units.0.w", &[-4.0; 2])]));
}

#[derive(FsdpUnit)]
struct Empties {
    w: Param,
    rows: Param,
    between: Param,
    #[fsdp(frozen)]
    frozen: Param,
}

impl Forward for Empties {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        let (rows, between) = (self.rows.tensor(scope)?, self.between.tensor(scope)?);
        let none = (rows.sum_all()? + between.sum_all()?)?;
        (((x * self.w.tensor(scope)?)?.sum_all()? + none)? + self.frozen.tensor(scope)?.sum_all()?)?.sum_all()
    }
}

#[test]
fn parameters_without_elements_may_have_any_shape() {
    for strategy in Strategy::ALL {
        on_ranks(3, |world| {
            let model = Empties {
                w: Param::new(4).with_init(Init::Ones),
                rows: Param::new((3, 0)),
                between: Param::new((3, 0, 5)),
                frozen: Param::new((2, 0)),
            };
            let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.5))?;
            let loss: Tensor = model.forward(&full(4, 1.0))?;
            assert_eq!(loss.to_scalar::<f32>()?, 4.0);
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            let state = model.full_state_dict()?;
            if let Some(state) = &state {
                assert_eq!(state["w"].to_vec1::<f32>()?, [0.5; 4]);
                assert_eq!((state["rows"].dims(), state["between"].dims()), (&[3, 0][..], &[3, 0, 5][..]));
            }
            assert!(model.load_full_state_dict(state.as_ref(), true)?.is_empty());
            Ok(())
        });
    }
}
