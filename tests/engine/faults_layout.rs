//! Where elements lie: no one is lost, counted twice, or numbered in too few bits.

use candle_core::{Result, Tensor};
use fsdp::mesh::Topology;
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_each_close};

use crate::fixtures::{Dot, Dots, config, dot, full, gradients, named, on_ranks, weights};

/// One unit of several parameters; its loss is the sum of all elements.
#[derive(FsdpUnit)]
struct Sums {
    params: Vec<Param>,
}

impl Forward for Sums {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut sum = x.sum_all()?;
        for param in &self.params {
            sum = (sum + param.tensor(scope)?.sum_all()?)?;
        }
        Ok(sum)
    }
}

#[derive(FsdpUnit)]
struct Model {
    unit: Unit<Sums>,
}

impl Forward for Model {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)
    }
}

fn model(sizes: &[usize]) -> Model {
    let param = |n: &usize| Param::new(*n).with_init(Init::Zeros);
    Model { unit: Unit::new(Sums { params: sizes.iter().map(param).collect() }) }
}

#[test]
fn a_parameter_too_short_for_all_ranks_does_not_stop_its_neighbours() {
    // The shortest one first, in the middle and last.
    for sizes in [[1usize, 6, 2, 5], [6, 2, 1, 5], [6, 2, 5, 1]] {
        for strategy in Strategy::ALL {
            for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
                on_ranks(4, |world| {
                    let mesh = world.data_parallel_mesh();
                    let config = FsdpConfig { alignment, ..config(strategy) };
                    let check = |weights: Vec<(String, Vec<f32>)>, expected: f32| {
                        assert_eq!(weights.len(), sizes.len());
                        for (name, values) in &weights {
                            let index: usize = name.rsplit('.').next().unwrap().parse().unwrap();
                            assert_eq!(values.len(), sizes[index], "{name}");
                            let what = format!("{sizes:?}, {strategy}, {alignment:?}, {name}");
                            assert_each_close(values, expected.into(), absolute(1e-6), what);
                        }
                    };
                    let mut trained = model(&sizes).fully_shard_with(&mesh, &config)?;
                    let mut optimizer = trained.optimizer(Sgd::default().lr(1.0))?;
                    let loss: Tensor = trained.forward(&full(1, 0.0))?;
                    trained.backward(&loss)?;
                    optimizer.step(&mut trained)?;
                    check(weights(&trained)?, -1.0);
                    let mut trained = model(&sizes).fully_shard_with(&mesh, &config)?;
                    let mut optimizer = trained.optimizer(AdamW::default().lr(0.5).weight_decay(0.0))?;
                    let loss: Tensor = trained.forward(&full(1, 0.0))?;
                    trained.backward(&loss)?;
                    optimizer.step(&mut trained)?;
                    check(weights(&trained)?, -0.5);
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn shards_tile_a_dim_that_the_ranks_do_not_divide() {
    for (elements, ranks) in [(7usize, 3usize), (5, 2), (3, 8), (10, 4)] {
        for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
            let config = FsdpConfig { alignment, ..FsdpConfig::default() };
            let mesh = Topology::new(&[("dp_shard", ranks)], ranks).unwrap();
            let layout = Param::new(elements).layout(&mesh, &config).unwrap();
            let bucket = &layout.buckets[0];
            let shards: Vec<_> = (0..ranks).map(|rank| bucket.item_in_shard(0, rank).in_item).collect();
            let owned: Vec<usize> = shards.iter().cloned().flatten().collect();
            assert_eq!(owned, (0..elements).collect::<Vec<_>>(), "{elements} over {ranks}, {alignment:?}");
            if alignment == ShardAlignment::Row {
                // Ceiling division for sizes and offsets alike.
                let chunk = elements.div_ceil(ranks);
                for (rank, shard) in shards.into_iter().enumerate().filter(|(_, shard)| !shard.is_empty()) {
                    assert_eq!(shard, rank * chunk..((rank + 1) * chunk).min(elements));
                }
            }
            // What each rank is asked to load is what the layout says.
            let loaded = on_ranks(ranks, |world| {
                let model = Dots { units: vec![Dot::zeros(elements)] };
                let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut own = Vec::new();
                model.load_weights(|_, range, values| {
                    own.extend(range.clone());
                    values.iter_mut().zip(range).for_each(|(value, index)| *value = index as f32);
                    Ok(())
                })?;
                let whole: Vec<f32> = (0..elements).map(|index| index as f32).collect();
                assert_eq!(weights(&model)?, named(&[("units.0.w", &whole)]));
                Ok(own)
            });
            assert_eq!(loaded.concat(), owned);
        }
    }
}

#[test]
fn more_elements_than_32_bits_count() {
    const ELEMENTS: usize = 2_147_483_650;
    let mesh = Topology::new(&[("dp_shard", 4)], 4).unwrap();
    for (alignment, shard, padding) in
        [(ShardAlignment::Row, 536_870_913, 2), (ShardAlignment::Element, 536_870_944, 126)]
    {
        let config = FsdpConfig { alignment, ..FsdpConfig::default() };
        let layout = Param::new(ELEMENTS).with_dtype(Dtype::BF16).layout(&mesh, &config).unwrap();
        let bucket = &layout.buckets[0];
        assert_eq!((bucket.shard_len(), bucket.size, bucket.padding()), (shard, ELEMENTS + padding, padding));
        let last = bucket.item_in_shard(0, 3).in_item;
        assert_eq!(last, 3 * shard..ELEMENTS);
    }
}

/// `30000 p`, in a unit inside a unit.
#[derive(FsdpUnit)]
struct Nest {
    outer: Unit<Dots>,
}

impl Forward<(), Vec<Tensor>> for Nest {
    fn forward(&self, x: &Vec<Tensor>, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.outer.units[0].forward(&x[0], &(), scope)
    }
}

#[test]
fn a_tiny_parameter_of_a_nested_unit_gets_its_gradient_on_one_rank_too() {
    for ranks in [1, 2] {
        for strategy in Strategy::ALL {
            on_ranks(ranks, |world| {
                let model = Nest { outer: Unit::new(dot(1)) };
                let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                let loss: Tensor = model.forward(&vec![full(1, 30000.0)])?;
                model.backward(&loss)?;
                assert_eq!(gradients(&model)?, named(&[("outer.units.0.w", &[30000.0])]));
                Ok(())
            });
        }
    }
}
