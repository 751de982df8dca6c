//! What others read of a run that goes on.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Index};
use fsdp::prelude::*;

use crate::small::{History, Run};

#[test]
fn a_restore_follows_a_run_that_removes_its_old_checkpoints() {
    const STEPS: usize = 60;
    let dir = tempfile::tempdir().unwrap();
    let history = History::new(STEPS);
    let over = AtomicBool::new(false);
    let restored = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut restored = 0;
            while !over.load(Ordering::SeqCst) {
                let steps = launch::local(2, |world| -> fsdp::Result<u64> {
                    let mut run = Run::start(&world)?;
                    let store = Checkpoints::new(dir.path());
                    let mut last = 0;
                    for _ in 0..8 {
                        let Some(restored) = store.restore_latest(run.restore())? else { continue };
                        run.check_restored(&restored, &history)?;
                        assert!(restored.checkpoint.step() >= last);
                        last = restored.checkpoint.step();
                    }
                    Ok(last)
                });
                restored = steps.unwrap()[0];
            }
            restored
        });
        let saved = launch::local(2, |world| -> fsdp::Result<()> {
            let mut run = Run::start(&world)?;
            let store = Checkpoints::new(dir.path()).keep(1);
            for _ in 0..STEPS {
                run.step()?;
                store.save(run.contents())?;
            }
            Ok(())
        });
        over.store(true, Ordering::SeqCst);
        saved.unwrap();
        reader.join().unwrap()
    });
    assert!(restored <= STEPS as u64);
}

#[test]
fn what_is_removed_while_it_is_verified_is_not_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let store = Checkpoints::new(dir.path());
    launch::local(2, |world| store.save(Run::start(&world)?.contents())).unwrap();
    let path = store.latest().unwrap().unwrap();
    let (index, checkpoint) = (Index::read(&path).unwrap(), Checkpoint::open(&path).unwrap());
    fs::remove_dir_all(&path).unwrap();
    let wrong = index.verify(&path, |_| ());
    assert!(matches!(&wrong[..], [CheckpointError::Removed { path: gone }] if *gone == path), "{wrong:?}");
    let error = checkpoint.verify(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), format!("checkpoint `{}` was removed while it was read", path.display()));
}
