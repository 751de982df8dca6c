//! A checkpoint without its index was damaged after it was saved: it is not passed over, nor in the way.

use std::fs;
use std::path::{Path, PathBuf};

use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use fsdp::prelude::*;

use crate::small::Run;

/// Saves after each step up to `last`, and damages the checkpoints of `steps`.
fn save_and_damage(dir: &Path, last: u64, steps: &[u64]) {
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        for _ in 0..last {
            run.step()?;
            Checkpoints::new(dir).save(run.contents())?;
        }
        Ok(())
    })
    .unwrap();
    for step in steps {
        fs::remove_file(place(dir, *step).join("index.json")).unwrap();
    }
}

fn place(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("step-{step:08}"))
}

fn text(dir: &Path, step: u64) -> String {
    format!(
        "`{}` is not valid: it is not there, though a checkpoint gets its name only when it is complete: it was \
         damaged since",
        place(dir, step).join("index.json").display()
    )
}

#[test]
fn the_latest_one_is_refused_by_name_and_no_earlier_one_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    save_and_damage(dir.path(), 2, &[2]);
    let store = Checkpoints::new(dir.path());
    assert_eq!(store.list().unwrap().iter().map(|entry| entry.step).collect::<Vec<_>>(), [1, 2]);
    let latest = store.latest().unwrap().unwrap();
    let error = Checkpoint::open(&latest).unwrap_err();
    assert!(matches!(error, CheckpointError::Malformed { .. }));
    assert_eq!(error.to_string(), text(dir.path(), 2));
    let errors = launch::local(2, |world| -> fsdp::Result<String> {
        let mut run = Run::start(&world)?;
        Ok(store.restore_latest(run.restore()).unwrap_err().to_string())
    });
    assert_eq!(errors.unwrap(), [text(dir.path(), 2), text(dir.path(), 2)]);
    // Its user removes it, and goes on from the one before.
    fs::remove_dir_all(latest).unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        assert_eq!(store.restore_latest(run.restore())?.expect("there is one").checkpoint.step(), 1);
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_only_one_does_not_look_like_none() {
    let dir = tempfile::tempdir().unwrap();
    save_and_damage(dir.path(), 1, &[1]);
    let error = launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        Checkpoints::new(dir.path()).restore_latest(run.restore()).map(drop)
    });
    assert!(error.unwrap_err().to_string().contains(&text(dir.path(), 1)));
}

#[test]
fn a_save_of_its_step_has_another_name_and_it_is_neither_kept_for_a_sound_one_nor_removed() {
    let dir = tempfile::tempdir().unwrap();
    save_and_damage(dir.path(), 3, &[2, 3]);
    // A file is in the way as well.
    fs::write(place(dir.path(), 4), "mine").unwrap();
    let store = Checkpoints::new(dir.path()).keep(2);
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        for _ in 0..4 {
            run.step()?;
        }
        assert_eq!(store.save(run.contents())?, dir.path().join("step-00000004-1"));
        Ok(())
    })
    .unwrap();
    let names: Vec<String> = store
        .list()
        .unwrap()
        .iter()
        .map(|entry| entry.path.file_name().unwrap().to_string_lossy().into_owned())
        .collect();
    assert_eq!(
        names,
        ["step-00000001", "step-00000002", "step-00000003", "step-00000004", "step-00000004-1"]
    );
    assert_eq!(Checkpoint::open(store.latest().unwrap().unwrap()).unwrap().verify(|_| ()).unwrap().len(), 0);
}
