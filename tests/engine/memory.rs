//! Memory is the formula.

use candle_core::Tensor;
use fsdp::comm::Registration;
use fsdp::memory::Category;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, full, on_ranks};

#[test]
fn persistent_bytes_are_exact_and_pools_are_bounded() {
    // Uneven sizes, two units of each of two shapes, one alone; more ranks than elements in some.
    let sizes = [1000usize, 1000, 1000, 7, 7, 333];
    for ranks in [1, 2, 3, 8] {
        for strategy in Strategy::ALL {
            for precision in [MixedPrecision::default(), MixedPrecision::BF16] {
                for recompute in [Recompute::None, Recompute::Unit] {
                    on_ranks(ranks, |world| {
                        let config = FsdpConfig { precision, recompute, prefetch: 2, ..config(strategy) };
                        let model = Dots { units: sizes.map(Dot::zeros).into() };
                        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                        let mut optimizer = model.optimizer(AdamW::default())?;
                        for step in 0..3 {
                            for last in [false, true] {
                                model.set_is_last_microbatch(last);
                                let loss: Tensor = model.forward(&sizes.map(|n| full(n, 1.0)).into())?;
                                model.backward(&loss)?;
                            }
                            optimizer.step(&mut model)?;
                            for report in model.memory(2) {
                                let (usage, formula) = (report.usage, report.formula as usize);
                                let pool =
                                    [Category::GatherPool, Category::ReducePool].contains(&usage.category);
                                let case = format!("{usage:?}, {strategy}, {ranks} ranks, step {step}");
                                if pool {
                                    assert!(usage.peak <= formula, "{case}: at most {formula}");
                                } else {
                                    assert_eq!((usage.current, usage.peak), (formula, formula), "{case}");
                                }
                            }
                        }
                        Ok(())
                    });
                }
            }
        }
    }
}

#[test]
fn the_gather_pool_holds_two_units_of_a_shape() {
    on_ranks(2, |world| {
        let model = Dots { units: (0..6).map(|_| Dot::zeros(64)).collect() };
        let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::default()))?;
        for _ in 0..3 {
            let loss: Tensor = model.forward(&vec![full(64, 1.0); 6])?;
            model.backward(&loss)?;
        }
        let pools = model.memory(0);
        assert_eq!(pools[4].usage.peak, 2 * 64 * 4);
        assert_eq!(pools[5].usage.peak, 2 * 64 * 4);
        Ok(())
    });
}

#[test]
fn padding_stays_under_a_cache_line_a_parameter_and_rank() {
    for ranks in [1, 2, 7, 16] {
        on_ranks(ranks, |world| {
            let model = Dots { units: vec![Dot::zeros(1), Dot::zeros(1001)] };
            let model = model.fully_shard(&world.data_parallel_mesh())?;
            for unit in model.units() {
                assert!(unit.padding * 4 < 64 * (unit.params + ranks) || unit.params == 0, "{unit:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn pools_are_registered_only_where_ranks_are_joined_by_nccl() {
    on_ranks(2, |world| {
        for (strategy, refused) in
            [(Strategy::NoShard, None), (Strategy::default(), Some("not joined by NCCL"))]
        {
            let config = FsdpConfig { registration: Some(Registration::Buffer), ..config(strategy) };
            let model = Dots { units: vec![Dot::zeros(64)] };
            let sharded = model.fully_shard_with(&world.data_parallel_mesh(), &config);
            let error = sharded.err().map(|error| error.to_string());
            match (refused, &error) {
                (None, None) => {}
                (Some(words), Some(error)) => assert!(error.contains(words), "{error}"),
                _ => panic!("{strategy}: {error:?}"),
            }
        }
        Ok(())
    });
}
