//! Memory is the formula.

use candle_core::Tensor;
use fsdp::comm::Registration;
use fsdp::memory::Category;
use fsdp::prelude::*;

use crate::fixtures::{Dot, Dots, config, full, on_ranks, weights};

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

/// Peaks of the gather pool and of the reduce pool, and what the plan says of them, after steps of units of these sizes
/// on four ranks.
fn pools(sizes: &[usize], config: &FsdpConfig, prefetch: Option<usize>) -> ([usize; 2], [u64; 2]) {
    let ranks = on_ranks(4, |world| {
        let model = Dots { units: sizes.iter().map(|&n| Dot::zeros(n)).collect() };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), config)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
        if let Some(prefetch) = prefetch {
            model.set_prefetch(prefetch, prefetch)?;
        }
        for _ in 0..3 {
            let loss: Tensor = model.forward(&sizes.iter().map(|&n| full(n, 1.0)).collect())?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
        }
        assert!(weights(&model)?.iter().all(|(_, values)| values.iter().all(|&value| value == -3.0)));
        let plan = model.memory_plan();
        let peak = |category: Category| model.memory(0)[category as usize].usage.peak;
        Ok(([peak(Category::GatherPool), peak(Category::ReducePool)], [plan.gather_pool, plan.reduce_pool]))
    });
    assert!(ranks.iter().all(|rank| *rank == ranks[0]));
    ranks[0]
}

/// Bytes of these sizes in f32.
fn bytes(sizes: &[usize]) -> usize {
    4 * sizes.iter().sum::<usize>()
}

#[test]
fn units_of_which_no_two_are_alike_are_whole_two_at_a_time() {
    let growing: Vec<usize> = (1..=12).map(|unit| 64 * unit).collect();
    let shrinking: Vec<usize> = growing.iter().rev().copied().collect();
    let two = bytes(&[11 * 64, 12 * 64]);
    for sizes in [&growing, &shrinking] {
        for double_buffer in [true, false] {
            let config = FsdpConfig { double_buffer, ..config(Strategy::default()) };
            // Run after run.
            for _ in 0..3 {
                let (peaks, plan) = pools(sizes, &config, None);
                assert_eq!((peaks, plan), ([two; 2], [two as u64; 2]), "{double_buffer}");
            }
        }
    }
    // The largest are never neighbours: without anything kept, two neighbours are there at a time.
    let apart = [320, 64, 256, 128, 320];
    let come_and_go = FsdpConfig { double_buffer: false, ..config(Strategy::default()) };
    let (peaks, plan) = pools(&apart, &come_and_go, None);
    assert_eq!((peaks, plan), ([bytes(&[320, 128]); 2], [bytes(&[320, 320]) as u64; 2]));
    // Units that are alike, in pairs: as many as if all were.
    let (peaks, plan) = pools(&[192, 64, 192, 64, 192, 64], &config(Strategy::default()), None);
    assert!(peaks.iter().all(|&peak| peak <= bytes(&[192, 192])), "{peaks:?}");
    assert_eq!(plan, [bytes(&[192, 192]) as u64; 2]);
}

#[test]
fn each_unit_gathered_ahead_costs_a_unit() {
    // (4, 4) is four ahead and the present one; more than there are cost no more.
    for (prefetch, units) in [(0, 2), (1, 2), (2, 3), (4, 5), (9, 6)] {
        let (peaks, plan) = pools(&[64; 6], &config(Strategy::default()), Some(prefetch));
        let expected = if prefetch == 9 { 6 } else { units };
        assert_eq!(peaks[0], expected * 256, "{prefetch}");
        assert_eq!(plan[0], expected as u64 * 256, "{prefetch}");
        assert_eq!((peaks[1], plan[1]), (2 * 256, 2 * 256));
    }
    // Of units that differ, the largest.
    let sizes = [64, 128, 192, 256, 320, 384];
    let (peaks, plan) = pools(&sizes, &config(Strategy::default()), Some(3));
    assert_eq!((peaks[0], plan[0]), (bytes(&sizes[2..]), bytes(&sizes[2..]) as u64));
    let config = FsdpConfig { prefetch: 4, ..config(Strategy::default()) };
    assert_eq!(pools(&[64; 6], &config, None).1[0], 5 * 256);
}

#[test]
fn budgets_in_elements_bound_both_pools() {
    let of = |gather_budget, reduce_budget, prefetch| {
        let config = FsdpConfig { gather_budget, reduce_budget, prefetch, ..config(Strategy::default()) };
        let (peaks, plan) = pools(&[64, 128, 64, 192, 64, 64], &config, None);
        assert!(peaks[0] as u64 <= plan[0] && peaks[1] as u64 <= plan[1], "{peaks:?} {plan:?}");
        (peaks, plan)
    };
    // One unit may always be there, the largest.
    assert_eq!(of(Some(0), Some(0), 3), ([4 * 192; 2], [4 * 192; 2]));
    assert_eq!(of(Some(256), Some(256), 3), ([4 * 256; 2], [4 * 256; 2]));
    // A queue of all: the last is written while none of the others need be reduced.
    let all = 4 * (4 * 64 + 128 + 192);
    assert_eq!(of(None, Some(1 << 20), 1).1[1], all);
    assert_eq!(of(None, Some(1 << 20), 1).0[1], all as usize);
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

/// Of no forward: only its layout is looked at.
#[derive(FsdpUnit)]
struct Pair {
    a: Param,
    b: Param,
}

#[test]
fn each_parameter_begins_a_cache_line() {
    on_ranks(2, |world| {
        let model = Pair { a: Param::new(20), b: Param::new(1) }.fully_shard(&world.data_parallel_mesh())?;
        // Elements 0..20 and 32..33 of 64, which are two cache lines for each rank.
        let root = &model.units()[0];
        assert_eq!((root.params, root.numel, root.padding), (2, 21, 43));
        Ok(())
    });
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
