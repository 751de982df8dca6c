//! Several microbatches a step: how many collectives each way of synchronising takes, by formula, and that all ways
//! train as plain candle does.

use candle_core::Tensor;
use fsdp::engine::TrafficReport;
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close};

use crate::fixtures::{Dot, config, dot, full, gradients, named, on_ranks};
use crate::reference::{self, Layers, TORCH, adam, rows, train, weights};

const STEPS: usize = 3;
const MICROBATCHES: usize = 3;
/// Units of one shape, beside the root.
const UNITS: usize = 4;
const WIDTHS: [usize; UNITS + 1] = [5; UNITS + 1];

/// Which microbatches are synchronised.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Synced {
    /// Each among the inner ranks, as far as the strategy asks for it.
    Each,
    /// The last one.
    Last,
    /// None: the optimizer's step does it.
    Never,
}

#[derive(Clone, Debug)]
struct Case {
    outer: usize,
    inner: usize,
    strategy: Strategy,
    outer_strategy: OuterStrategy,
    reshard: ReshardAfterForward,
    synced: Synced,
    double_buffer: bool,
}

impl Case {
    fn all() -> Vec<Case> {
        use ReshardAfterForward::{Always, Never, Ranks};
        let mut cases = Vec::new();
        for (outer, inner) in [(1, 2), (2, 2), (2, 1)] {
            for strategy in Strategy::ALL {
                for outer_strategy in [OuterStrategy::NoShard, OuterStrategy::Optim] {
                    for reshard in [Always, Never, Ranks(2)] {
                        for synced in [Synced::Each, Synced::Last, Synced::Never] {
                            for double_buffer in [false, true] {
                                cases.push(Case {
                                    outer,
                                    inner,
                                    strategy,
                                    outer_strategy,
                                    reshard,
                                    synced,
                                    double_buffer,
                                });
                            }
                        }
                    }
                }
            }
        }
        cases.retain(|case| {
            let cut_by_outer = case.outer_strategy == OuterStrategy::Optim;
            let nothing_to_cut = case.outer == 1 || !case.strategy.shards_optim();
            let no_pool = case.inner == 1 || !case.strategy.shards_params();
            let nothing_to_reshard = no_pool && (case.reshard != Always || case.double_buffer);
            !(cut_by_outer && nothing_to_cut || nothing_to_reshard)
        });
        cases
    }

    /// All-gathers, reduce-scatters and all-reduces of a step.
    fn collectives(&self, step: usize) -> [u64; 3] {
        let (units, microbatches) = (UNITS as u64, MICROBATCHES as u64);
        let groups = units + 1;
        let gathers = match self.strategy {
            Strategy::NoShard => 0,
            // The shards of one inner rank are whole weights.
            _ if self.inner == 1 => 0,
            // What is kept whole is refreshed once a step.
            Strategy::Optim | Strategy::OptimGrads => groups,
            Strategy::OptimGradsParams => {
                let never = self.reshard == ReshardAfterForward::Never;
                match (self.double_buffer, never) {
                    // The root once a microbatch; units in forward and backward, or in forward only.
                    (false, false) => microbatches * (1 + 2 * units),
                    (false, true) => microbatches * (1 + units),
                    // Two of the units are still there when a pass turns round; the root all the time.
                    (true, false) => 1 + units + (2 * microbatches - 1) * (units - 2),
                    (true, true) => groups,
                }
            }
        };
        let each = self.synced == Synced::Each;
        let (mut scatters, mut reduces) = match self.strategy {
            Strategy::NoShard => (0, groups),
            Strategy::Optim => (groups, 0),
            _ => (if each { microbatches * groups } else { groups }, 0),
        };
        let mut outer_gathers = 0;
        if self.outer > 1 {
            match self.outer_strategy {
                OuterStrategy::NoShard => reduces += groups,
                OuterStrategy::Optim => {
                    scatters += groups;
                    outer_gathers = if step == 0 { 0 } else { groups };
                }
            }
        }
        [gathers + outer_gathers, scatters, reduces]
    }
}

fn counts(traffic: &[TrafficReport]) -> [u64; 3] {
    ["all-gather", "reduce-scatter", "all-reduce"]
        .map(|name| traffic.iter().find(|report| report.operation == name).unwrap().counter.calls)
}

fn input(ranks: usize, step: usize, microbatch: usize, rank: usize) -> Tensor {
    rows(3, WIDTHS[0], (step * MICROBATCHES + microbatch) * ranks + rank)
}

/// Losses of plain candle, microbatches outermost, and its weights in the end.
fn expected(ranks: usize, before: &reference::Weights) -> (Vec<f32>, reference::Weights) {
    let inputs: Vec<Vec<Tensor>> = (0..STEPS)
        .map(|step| (0..MICROBATCHES * ranks).map(|i| input(ranks, step, i / ranks, i % ranks)).collect())
        .collect();
    let mut weights = before.clone();
    let losses = train(&[1; UNITS], &mut weights, ranks, &inputs).unwrap();
    (losses, weights)
}

#[test]
fn collectives_are_those_of_the_formulas_and_values_those_of_plain_candle() {
    let cases = Case::all();
    assert!(cases.len() > 60, "{}", cases.len());
    for case in cases {
        let ranks = case.outer * case.inner;
        let all = on_ranks(ranks, |world| {
            let mesh = world.mesh(&[("dp_outer", case.outer), ("dp_shard", case.inner)])?;
            let config = FsdpConfig {
                outer: case.outer_strategy,
                reshard_after_forward: case.reshard,
                double_buffer: case.double_buffer,
                ..config(case.strategy)
            };
            let mut model = Layers::new(&WIDTHS).fully_shard_with(&mesh, &config)?;
            let mut optimizer = model.optimizer(adam())?;
            let before = weights(&model)?;
            let mut losses = Vec::new();
            for step in 0..STEPS {
                let start = counts(&model.traffic());
                for microbatch in 0..MICROBATCHES {
                    let last = microbatch + 1 == MICROBATCHES;
                    model.set_is_last_microbatch(last);
                    let unsynced = match case.synced {
                        Synced::Each => false,
                        Synced::Last => !last,
                        Synced::Never => true,
                    };
                    let guard = unsynced.then(|| model.no_sync());
                    let loss: Tensor = model.forward(&input(ranks, step, microbatch, world.rank()))?;
                    model.backward(&loss)?;
                    drop(guard);
                    losses.push(loss.to_scalar::<f32>()?);
                }
                optimizer.step(&mut model)?;
                let now = counts(&model.traffic());
                let counted = [0, 1, 2].map(|op| now[op] - start[op]);
                assert_eq!(counted, case.collectives(step), "step {step}, {case:?}");
            }
            Ok((losses, before, weights(&model)?))
        });
        let (losses, after) = expected(ranks, &all[0].1);
        for (rank, (found, _, weights)) in all.iter().enumerate() {
            let expected: Vec<f32> = losses.iter().skip(rank).step_by(ranks).copied().collect();
            assert_close(found, &expected, TORCH, format!("{case:?}"));
            assert_close(weights, &after, absolute(1e-4), format!("{case:?}"));
        }
    }
}

#[test]
fn a_pass_gathers_what_its_mode_says() {
    use ReshardAfterForward::{Always, Never, Ranks};
    // Forward, backward; reductions in the backward.
    let groups = UNITS as u64 + 1;
    for (mode, backward) in [(Always, UNITS as u64), (Ranks(2), UNITS as u64), (Never, 0)] {
        for recompute in [Recompute::None, Recompute::Unit] {
            on_ranks(4, |world| {
                let config = FsdpConfig {
                    reshard_after_forward: mode,
                    recompute,
                    double_buffer: false,
                    ..config(Strategy::default())
                };
                let mut model =
                    Layers::new(&WIDTHS).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(adam())?;
                for step in 0..STEPS {
                    let start = counts(&model.traffic());
                    let loss: Tensor = model.forward(&input(4, step, 0, world.rank()))?;
                    let between = counts(&model.traffic());
                    model.backward(&loss)?;
                    // What is on its way is not counted yet.
                    model.finish_grad_sync()?;
                    let end = counts(&model.traffic());
                    assert_eq!([0, 1, 2].map(|op| between[op] - start[op]), [groups, 0, 0], "{mode:?}");
                    assert_eq!([0, 1, 2].map(|op| end[op] - between[op]), [backward, groups, 0], "{mode:?}");
                    optimizer.step(&mut model)?;
                    assert_eq!(counts(&model.traffic()), end);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn one_rank_receives_nothing_and_trains_as_plain_candle() {
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            let all = on_ranks(1, |world| {
                let config = FsdpConfig { recompute, ..config(strategy) };
                let mut model =
                    Layers::new(&WIDTHS).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                let mut optimizer = model.optimizer(adam())?;
                let before = weights(&model)?;
                let bytes = |model: &Fsdp<Layers>| -> u64 {
                    model.traffic().iter().map(|report| report.counter.bytes_from_peers).sum()
                };
                let start = bytes(&model);
                let mut losses = Vec::new();
                for step in 0..STEPS {
                    for microbatch in 0..MICROBATCHES {
                        model.set_is_last_microbatch(microbatch + 1 == MICROBATCHES);
                        let loss: Tensor = model.forward(&input(1, step, microbatch, 0))?;
                        model.backward(&loss)?;
                        losses.push(loss.to_scalar::<f32>()?);
                    }
                    optimizer.step(&mut model)?;
                }
                assert_eq!(bytes(&model), start);
                Ok((losses, before, weights(&model)?))
            });
            let (losses, after) = expected(1, &all[0].1);
            assert_close(&all[0].0, &losses, TORCH, "losses");
            assert_close(&all[0].2, &after, absolute(1e-5), "weights");
        }
    }
}

#[test]
fn backwards_may_follow_several_forwards() {
    use ReshardAfterForward::{Always, Never, Ranks};
    /// Forward or backward of a microbatch.
    #[derive(Clone, Copy)]
    enum Pass {
        F(usize),
        B(usize),
    }
    use Pass::{B, F};
    let in_turn = [F(0), B(0), F(1), B(1), F(2), B(2)];
    let one_forward_one_backward = [F(0), F(1), B(0), F(2), B(1), B(2)];
    let all_forwards_first = [F(0), F(1), F(2), B(0), B(1), B(2)];
    let last_in_first_out = [F(0), F(1), F(2), B(2), B(1), B(0)];
    for strategy in Strategy::ALL {
        for mode in [Always, Never, Ranks(2)] {
            if mode != Always && !strategy.shards_params() {
                continue;
            }
            for recompute in [Recompute::None, Recompute::Unit] {
                for unshard in [false, true] {
                    for double_buffer in [false, true] {
                        let run = |schedule: [Pass; 6]| {
                            on_ranks(2, |world| {
                                let config = FsdpConfig {
                                    reshard_after_forward: mode,
                                    recompute,
                                    double_buffer,
                                    ..config(strategy)
                                };
                                let model = Layers::new(&WIDTHS);
                                let mut model =
                                    model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                                let mut optimizer = model.optimizer(adam())?;
                                for step in 0..2 {
                                    let mut losses: [Option<Tensor>; 3] = Default::default();
                                    let mut left = 3;
                                    for pass in schedule {
                                        if unshard {
                                            let _ = model.unshard("layers.0")?;
                                            let _ = model.unshard("")?;
                                        }
                                        match pass {
                                            F(i) => {
                                                let x = input(2, step, i, world.rank());
                                                losses[i] = Some(model.forward(&x)?);
                                            }
                                            B(i) => {
                                                left -= 1;
                                                model.set_is_last_microbatch(left == 0);
                                                model.backward(&losses[i].take().unwrap())?;
                                            }
                                        }
                                    }
                                    optimizer.step(&mut model)?;
                                }
                                assert_eq!(model.gathered_units(), Vec::<String>::new());
                                weights(&model)
                            })
                        };
                        let expected = run(in_turn);
                        let what = format!("{strategy}, {mode:?}, {recompute:?}, {unshard}, {double_buffer}");
                        // The same sums in the same order, and in another one.
                        assert_eq!(run(one_forward_one_backward), expected, "{what}");
                        assert_eq!(run(all_forwards_first), expected, "{what}");
                        let reversed = run(last_in_first_out);
                        assert_close(&reversed[0], &expected[0], absolute(1e-4), &what);
                    }
                }
            }
        }
    }
}

#[test]
fn a_backward_beyond_the_forwards_or_across_a_step_is_refused() {
    on_ranks(2, |world| {
        // All in the root, whose graph could be walked again.
        let dot = Dot { w: Param::new(3).with_init(Init::Zeros) };
        let mut model = dot.fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
        let first: Tensor = model.forward(&full(3, 1.0))?;
        let second: Tensor = model.forward(&full(3, 2.0))?;
        let third: Tensor = model.forward(&full(3, 4.0))?;
        model.backward(&first)?;
        model.backward(&second)?;
        assert_eq!(gradients(&model)?, named(&[("w", &[3.0; 3])]));
        optimizer.step(&mut model)?;
        let text = model.backward(&third).unwrap_err().to_string();
        assert!(text.contains("weights have changed"), "{text}");
        let fourth: Tensor = model.forward(&full(3, 1.0))?;
        model.backward(&fourth)?;
        let text = model.backward(&fourth).unwrap_err().to_string();
        assert!(text.contains("needs a training forward before it"), "{text}");
        assert_eq!(gradients(&model)?, named(&[("w", &[1.0; 3])]));
        Ok(())
    });
}

#[test]
fn what_was_reduced_keeps_its_bits_beside_what_was_not() {
    // Gradients that a sum in bf16 would lose: 256 + 1 is 256 there.
    for strategy in Strategy::ALL {
        for unsynced in [0, 2, 4] {
            on_ranks(2, |world| {
                let precision = MixedPrecision::BF16;
                let config = FsdpConfig { precision, ..config(strategy) };
                let model = dot(3).fully_shard_with(&world.data_parallel_mesh(), &config)?;
                for (index, x) in [256.0, 1.0, -256.0, 1.0].into_iter().enumerate() {
                    model.set_is_last_microbatch(index == 3);
                    let guard = (index < unsynced).then(|| model.no_sync());
                    let loss: Tensor = model.forward(&vec![full(3, x)])?;
                    model.backward(&loss)?;
                    drop(guard);
                }
                assert_eq!(gradients(&model)?, named(&[("units.0.w", &[2.0; 3])]), "{strategy}");
                Ok(())
            });
        }
    }
}

#[test]
fn gradients_that_wait_for_another_backward_are_in_the_formula() {
    use crate::fixtures::{Dot, Dots, full};
    for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
        on_ranks(2, |world| {
            let model = Dots { units: (0..5).map(|_| Dot::zeros(64)).collect() };
            let model = model.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let pool = |model: &Fsdp<Dots>| model.memory(0)[5];
            let inputs = vec![full(64, 1.0); 5];
            let loss: Tensor = model.forward(&inputs)?;
            model.backward(&loss)?;
            assert!(
                pool(&model).formula <= 2 * 64 * 4 && pool(&model).usage.peak as u64 <= pool(&model).formula
            );
            let (first, second): (Tensor, Tensor) = (model.forward(&inputs)?, model.forward(&inputs)?);
            model.backward(&first)?;
            model.backward(&second)?;
            assert_eq!(pool(&model).formula, 5 * 64 * 4);
            assert!(pool(&model).usage.peak as u64 <= pool(&model).formula);
            Ok(())
        });
    }
}
