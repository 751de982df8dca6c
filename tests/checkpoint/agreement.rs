//! All ranks save and restore the same, or it fails on all of them before anything has changed.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Tensor;
use fsdp::checkpoint::{Checkpoints, Contents, Restore};
use fsdp::engine::Ema;
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Net {
    w: Param,
    #[fsdp(frozen)]
    base: Param,
}

struct Run {
    model: Fsdp<Net>,
    optimizer: ShardedOptimizer<AdamW>,
    average: Ema,
}

fn run(world: &fsdp::launch::World, seed: u64) -> fsdp::Result<Run> {
    let config = FsdpConfig { seed, ..FsdpConfig::default() };
    let net = Net { w: Param::new(5), base: Param::new((4, 3)) };
    let model = net.fully_shard_with(&world.data_parallel_mesh(), &config)?;
    let (optimizer, average) = (model.optimizer(AdamW::default())?, model.ema(0.9)?);
    Ok(Run { model, optimizer, average })
}

fn save(dir: &Path) {
    launch::local(2, |world| -> fsdp::Result<()> {
        let run = run(&world, 1)?;
        let contents = Contents::of(&run.model).optimizer(&run.optimizer).average("ema", &run.average);
        Checkpoints::new(dir).save(contents).map(drop)
    })
    .unwrap();
}

fn weights(model: &Fsdp<Net>) -> fsdp::Result<BTreeMap<String, Vec<f32>>> {
    let mut all = BTreeMap::new();
    model.visit_weights(|spec, values| {
        all.insert(spec.name.clone(), values.to_vec());
        Ok(())
    })?;
    Ok(all)
}

/// That ranks which differ by `how(rank)` in what they restore are told `words`, by rank, and have changed nothing.
fn differ(how: impl for<'a> Fn(&'a mut Run, usize) -> Restore<'a> + Sync, words: [&str; 2]) {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path());
    let errors = launch::local(2, |world| -> fsdp::Result<String> {
        let mut run = run(&world, 2)?;
        let before = weights(&run.model)?;
        let error = Checkpoints::new(dir.path()).restore_latest(how(&mut run, world.rank())).unwrap_err();
        assert_eq!(weights(&run.model)?, before);
        Ok(error.to_string())
    });
    let [first, second] = words;
    let expected = [
        format!("the ranks differ: rank 0 has to restore {first}; rank 1 has to restore {second}"),
        format!("the ranks differ: rank 1 has to restore {second}; rank 0 has to restore {first}"),
    ];
    assert_eq!(errors.unwrap(), expected);
}

#[test]
fn ranks_that_restore_other_parts_are_told_so() {
    differ(
        |run, rank| {
            let restore = Restore::new(&mut run.model);
            if rank == 0 { restore } else { restore.without_frozen() }
        },
        ["the frozen weights too", "no frozen weights"],
    );
    differ(
        |run, rank| {
            let restore = Restore::new(&mut run.model);
            if rank == 0 { restore.average("ema", &mut run.average) } else { restore }
        },
        ["average `ema`", "no average `ema`"],
    );
    differ(
        |run, rank| {
            let restore = Restore::new(&mut run.model);
            if rank == 0 { restore.optimizer(&mut run.optimizer) } else { restore }
        },
        ["an optimizer, adamw", "no optimizer"],
    );
    differ(
        |run, rank| Restore::new(&mut run.model).strict(rank == 0),
        ["all of the state", "what fits of the state"],
    );
    differ(
        |run, rank| {
            let restore = Restore::new(&mut run.model);
            if rank == 0 { restore } else { restore.verified() }
        },
        ["what is checked as it is read", "what was checked before"],
    );
}

#[test]
fn two_optimizers_of_one_restore_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path());
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = run(&world, 2)?;
        let mut other = run.model.optimizer(AdamW::default())?;
        let restore = Restore::new(&mut run.model).optimizer(&mut run.optimizer).optimizer(&mut other);
        let error = Checkpoints::new(dir.path()).restore_latest(restore).unwrap_err().to_string();
        assert_eq!(error, "a model is restored with one optimizer: `Restore::optimizer` was called twice");
        Ok(())
    })
    .unwrap();
}

#[test]
fn ranks_that_save_other_parts_are_told_which() {
    let dir = tempfile::tempdir().unwrap();
    let errors = launch::local(2, |world| -> fsdp::Result<[String; 3]> {
        let run = run(&world, 1)?;
        let (store, first) = (Checkpoints::new(dir.path()), world.rank() == 0);
        let error = |contents| store.save(contents).unwrap_err().to_string();
        let contents = || Contents::of(&run.model);
        Ok([
            error(if first { contents() } else { contents().value("cursor", &7) }),
            error(if first { contents().value("a", &1) } else { contents().value("b", &2) }),
            error(if first { contents() } else { contents().without_frozen() }),
        ])
    });
    let expected = [
        "rank 0 has to save no `cursor`; rank 1 has to save `cursor` = 7",
        "rank 0 has to save `a` = 1; rank 1 has to save no `a`",
        "rank 0 has to save section `model` of 2 tensors; rank 1 has to save section `model` of 1 tensors",
    ];
    let [errors, _] = &errors.unwrap()[..] else { panic!("two ranks") };
    assert_eq!(errors.each_ref().map(|error| error.strip_prefix("the ranks differ: ").unwrap()), expected);
    assert!(Checkpoints::new(dir.path()).list().unwrap().is_empty());
}

#[test]
fn ranks_that_load_a_full_state_otherwise_are_told_so() {
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = run(&world, 1)?;
        let state: Option<BTreeMap<String, Tensor>> = run.model.full_state_dict()?;
        let error =
            run.model.load_full_state_dict(state.as_ref(), world.rank() == 0).unwrap_err().to_string();
        let words = ["to load all of a full state", "to load what fits of a full state"];
        let (rank, other) = (world.rank(), 1 - world.rank());
        let (ours, theirs) = (words[rank], words[other]);
        assert_eq!(error, format!("the ranks differ: rank {rank} has {ours}; rank {other} has {theirs}"));
        Ok(())
    })
    .unwrap();
}
