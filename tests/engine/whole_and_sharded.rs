//! When a unit's weights are whole, and that reading them at any time disturbs nothing.

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_test_support::{absolute, assert_close};

use crate::fixtures::{config, gradients, named, on_ranks};
use crate::reference::{self, Layers, adam, rows};

const WIDTHS: [usize; 5] = [5; 5];

#[test]
fn units_are_whole_between_the_passes_as_their_mode_says_and_sharded_after() {
    use ReshardAfterForward::{Always, Never, Ranks};
    let all = ["(root)", "layers.0", "layers.1", "layers.2", "layers.3"];
    for (mode, double_buffer, between, after) in [
        // The root is whole for its backward. The pool of two holds the last units used.
        (Always, false, &all[..1], &all[..0]),
        (Always, true, &["(root)", "layers.2", "layers.3"][..], &all[..3]),
        (Ranks(2), false, &all[..1], &all[..0]),
        (Ranks(2), true, &["(root)", "layers.2", "layers.3"][..], &all[..3]),
        (Never, false, &all[..], &all[..0]),
        (Never, true, &all[..], &all[..]),
    ] {
        on_ranks(2, |world| {
            let config =
                FsdpConfig { reshard_after_forward: mode, double_buffer, ..config(Strategy::default()) };
            let mut model = Layers::new(&WIDTHS).fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(adam())?;
            assert_eq!(model.gathered_units(), Vec::<String>::new());
            for step in 0..3 {
                for last in [false, true] {
                    model.set_is_last_microbatch(last);
                    let loss: Tensor = model.forward(&rows(2, 5, step))?;
                    assert_eq!(model.gathered_units(), between, "{mode:?}, {double_buffer}");
                    model.backward(&loss)?;
                    assert_eq!(model.gathered_units(), after, "{mode:?}, {double_buffer}");
                }
                optimizer.step(&mut model)?;
                assert_eq!(model.gathered_units(), Vec::<String>::new());
            }
            Ok(())
        });
    }
}

#[test]
fn reading_weights_at_any_time_changes_no_bit() {
    use ReshardAfterForward::{Always, Never, Ranks};
    for strategy in Strategy::ALL {
        for mode in [Always, Never, Ranks(2)] {
            for double_buffer in [false, true] {
                if mode != Always && !strategy.shards_params() {
                    continue;
                }
                let run = |reads: bool| {
                    on_ranks(2, |world| {
                        let config =
                            FsdpConfig { reshard_after_forward: mode, double_buffer, ..config(strategy) };
                        let model = Layers::new(&WIDTHS);
                        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                        let mut optimizer = model.optimizer(adam())?;
                        let mut seen = Vec::new();
                        let mut read = |model: &Fsdp<Layers>| -> fsdp::Result<()> {
                            if reads {
                                seen.push(reference::weights(model)?);
                                model.full_params("layers.1")?[0].values.fill(f32::NAN);
                            }
                            Ok(())
                        };
                        for step in 0..2 {
                            for last in [false, true] {
                                model.set_is_last_microbatch(last);
                                read(&model)?;
                                let loss: Tensor = model.forward(&rows(2, 5, 2 * step + world.rank()))?;
                                read(&model)?;
                                let _: Tensor = model.evaluate(&rows(2, 5, 7))?;
                                model.backward(&loss)?;
                                read(&model)?;
                            }
                            optimizer.step(&mut model)?;
                        }
                        for of_step in seen.chunks(6) {
                            assert!(of_step.iter().all(|weights| *weights == of_step[0]));
                        }
                        reference::weights(&model)
                    })
                };
                assert_eq!(run(true), run(false), "{strategy}, {mode:?}, {double_buffer}");
            }
        }
    }
}

#[test]
fn any_size_on_any_number_of_ranks_is_loaded_and_read_whole() {
    // Rows fewer than ranks, as many, more; parts that are empty.
    for ranks in [2, 4, 8] {
        for rows in [1, 2, 3, 4, 5, 16, 17] {
            for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
                on_ranks(ranks, |world| {
                    let config = FsdpConfig { alignment, ..config(Strategy::default()) };
                    let model = Layers::new(&[rows, 3, 2]);
                    let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
                    let mut held = 0;
                    model.load_weights(|spec, range, out| {
                        held += range.len();
                        let first = spec.name.len();
                        out.iter_mut().zip(range).for_each(|(out, index)| *out = (first + index) as f32);
                        Ok(())
                    })?;
                    for (name, (shape, values)) in reference::weights(&model)? {
                        assert_eq!(values.len(), shape.iter().product::<usize>());
                        let expected = (0..values.len()).map(|index| (name.len() + index) as f32);
                        assert!(values.iter().copied().eq(expected), "{name}: {values:?}");
                    }
                    let tag =
                        fsdp::comm::Tag { unit: "held".into(), phase: fsdp::comm::Phase::Setup, step: 0 };
                    let mut sum = [held as f64];
                    world.communicator().host_reduce(tag, fsdp::comm::HostOp::Sum, &mut sum)?;
                    let numel: usize = model.layout().params.iter().map(|spec| spec.numel()).sum();
                    assert_eq!(sum[0], numel as f64, "each element is on one rank");
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn every_row_of_an_uneven_tied_table_is_updated() {
    /// A table of rows that is the embedding and the head.
    #[derive(FsdpUnit)]
    struct Tied {
        embed: Param,
        #[fsdp(tie_with = "embed")]
        head: Param,
    }

    impl Forward for Tied {
        fn forward(&self, ids: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
            let x = self.embed.tensor(scope)?.index_select(ids, 0)?;
            x.matmul(&self.head.tensor(scope)?.t()?)?.sqr()?.sum_all()
        }
    }

    for ranks in [2, 4] {
        for strategy in Strategy::ALL {
            let rows = 4 * ranks + 1;
            let run = |ranks: usize| {
                on_ranks(ranks, |world| {
                    let param = || Param::new((rows, 3)).with_init(Init::Normal { mean: 0.0, std: 0.5 });
                    let tied = Tied { embed: param(), head: param() };
                    let mut model = tied.fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
                    assert_eq!(model.layout().params.len(), 1);
                    let mut optimizer = model.optimizer(adam())?;
                    let before = reference::weights(&model)?;
                    let ids = Tensor::arange(0u32, rows as u32, &candle_core::Device::Cpu)?;
                    for _ in 0..10 {
                        let loss: Tensor = model.forward(&ids)?;
                        model.backward(&loss)?;
                        optimizer.step(&mut model)?;
                    }
                    Ok((before, reference::weights(&model)?))
                })
            };
            let (alone, found) = (run(1), run(ranks));
            for (before, after) in found {
                for (old, new) in before["embed"].1.chunks(3).zip(after["embed"].1.chunks(3)) {
                    assert!(old != new, "{old:?} stayed");
                }
                assert_close(&after, &alone[0].1, absolute(1e-5), format!("{ranks}, {strategy}"));
            }
        }
    }
}

#[test]
fn a_unit_that_is_whole_can_be_asked_for_again() {
    on_ranks(2, |world| {
        let mut model = Layers::new(&WIDTHS).fully_shard(&world.data_parallel_mesh())?;
        for _ in 0..2 {
            model.unshard("layers.3")?.wait()?;
            model.unshard("layers.3")?.wait()?;
            assert_eq!(model.gathered_units(), ["layers.3"]);
        }
        let x = rows(2, 5, 1);
        let alone: Tensor = model.forward(&x)?;
        model.backward(&alone)?;
        let expected = gradients(&model)?;
        model.reset_step()?;
        // In the wrong order, between the passes too: it costs gathers and changes nothing.
        model.unshard("layers.3")?.wait()?;
        let loss: Tensor = model.forward(&x)?;
        let _started = model.unshard("layers.0")?;
        model.backward(&loss)?;
        assert_eq!(gradients(&model)?, expected);
        assert_ne!(expected, named(&[]));
        Ok(())
    });
}
