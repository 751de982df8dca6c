//! What is not trained need not be saved, where a program has it from elsewhere.

use std::collections::BTreeMap;
use std::path::Path;

use fsdp::checkpoint::{Checkpoint, Checkpoints, Contents, MODEL, Restore};
use fsdp::launch::World;
use fsdp::prelude::*;

use crate::model::{Net, input, step};

fn shard(world: &World, seed: u64) -> fsdp::Result<Fsdp<Net>> {
    let config = FsdpConfig { seed, ..FsdpConfig::default() };
    Net::new(2).fully_shard_with(&world.data_parallel_mesh(), &config)
}

fn weights(model: &Fsdp<Net>) -> fsdp::Result<BTreeMap<String, Vec<f32>>> {
    let mut all = BTreeMap::new();
    model.visit_weights(|spec, values| {
        all.insert(spec.name.clone(), values.to_vec());
        Ok(())
    })?;
    Ok(all)
}

fn is_frozen(name: &str) -> bool {
    name.ends_with(".scale")
}

/// Trains for two steps and saves at 2 ranks, with or without what is frozen.
fn save(dir: &Path, frozen: bool) -> BTreeMap<String, Vec<f32>> {
    let saved = launch::local(2, |world| -> fsdp::Result<_> {
        let mut model = shard(&world, 1)?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.1))?;
        for at in 0..2 {
            step(&mut model, &mut optimizer, &input(world.rank(), at))?;
        }
        let contents = Contents::of(&model).optimizer(&optimizer);
        let contents = if frozen { contents } else { contents.without_frozen() };
        Checkpoints::new(dir).save(contents)?;
        weights(&model)
    });
    saved.unwrap().remove(0)
}

#[test]
fn frozen_weights_that_are_left_out_stay_as_they_are() {
    for frozen in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let saved = save(dir.path(), frozen);
        let path = Checkpoints::new(dir.path()).latest().unwrap().unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let stored = &checkpoint.index().tensors[MODEL];
        assert_eq!(stored.keys().any(|name| is_frozen(name)), frozen);
        assert!(checkpoint.verify(|_| ()).unwrap().is_empty());

        launch::local(3, |world| -> fsdp::Result<()> {
            let mut model = shard(&world, 2)?;
            let mut optimizer = model.optimizer(AdamW::default().lr(0.1))?;
            let before = weights(&model)?;
            let restore = Restore::new(&mut model).optimizer(&mut optimizer).without_frozen();
            let restored = Checkpoints::new(dir.path()).restore_latest(restore)?.expect("one was saved");
            assert!(restored.skipped.is_empty());
            assert_eq!((model.step_count(), optimizer.steps()), (2, 2));
            for (name, values) in weights(&model)? {
                let expected = if is_frozen(&name) { &before } else { &saved };
                assert_eq!(values, expected[&name], "{name}");
            }
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_restore_of_everything_misses_what_was_left_out() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), false);
    let errors = launch::local(2, |world| -> fsdp::Result<String> {
        let mut model = shard(&world, 1)?;
        Ok(Checkpoints::new(dir.path()).restore_latest(Restore::new(&mut model)).unwrap_err().to_string())
    });
    let errors = errors.unwrap();
    assert!(errors[0].contains("\n model:\n  2 missing: layers.0.scale, layers.1.scale"), "{}", errors[0]);
}
