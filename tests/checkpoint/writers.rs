//! Two runs that save into one directory: one is refused at once, also between the saves of the other, and nothing is
//! mixed up.

use std::path::{Path, PathBuf};
use std::sync::mpsc;

use fsdp::checkpoint::{Checkpoint, Checkpoints};
use fsdp::prelude::*;

use crate::kills::{Trainer, Way};
use crate::small::Run;

fn save(ranks: usize, store: &Checkpoints) -> Result<PathBuf, String> {
    let saved = launch::local(ranks, |world| -> fsdp::Result<_> {
        let mut run = Run::start(&world)?;
        run.step()?;
        Ok(store.save(run.contents()).map_err(|error| error.to_string()))
    });
    let saved = saved.unwrap();
    assert!(saved.iter().all(|outcome| *outcome == saved[0]), "{saved:?}");
    saved[0].clone()
}

fn busy(dir: &Path) -> String {
    format!(
        "`{}` is that of another run, which has not ended: every run needs a directory of its own",
        dir.display()
    )
}

#[test]
fn a_second_process_is_refused_until_the_first_is_gone() {
    for way in [Way::Here, Way::Beside] {
        let dir = tempfile::tempdir().unwrap();
        let store = Checkpoints::new(dir.path());
        // It stops in the middle of a save.
        let mut other = Trainer::spawn(way, dir.path(), Some(8));
        assert_eq!(other.says().as_deref(), Some("stopped"));
        assert_eq!(save(1, &store).unwrap_err(), busy(dir.path()));
        assert_eq!(save(2, &store).unwrap_err(), format!("rank 0: {}", busy(dir.path())));
        // Reading is always possible.
        assert_eq!(store.latest().unwrap(), None);
        other.kill();
        let path = save(2, &store).unwrap();
        assert_eq!(Checkpoint::open(&path).unwrap().verify(|_| ()).unwrap().len(), 0);
        assert_eq!(store.list().unwrap().len(), 1);
    }
}

#[test]
fn two_runs_of_one_process_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let (begun, has_begun) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = std::sync::Mutex::new(may_go_on);
    let slow = Checkpoints::new(dir.path()).with_hook(move |action, path| {
        if action == "create" && path.ends_with("index.json") {
            // The test may be over, having failed.
            let _ = begun.send(());
            let _ = may_go_on.lock().unwrap().recv();
        }
        Ok(())
    });
    std::thread::scope(|scope| {
        let first = scope.spawn(|| save(2, &slow));
        has_begun.recv().unwrap();
        let second = save(1, &Checkpoints::new(dir.path()).keep(1));
        drop(go_on);
        assert_eq!(second.unwrap_err(), busy(dir.path()));
        let path = first.join().unwrap().unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!((checkpoint.index().written_by.ranks, checkpoint.verify(|_| ()).unwrap().len()), (2, 0));
    });
    assert!(save(1, &Checkpoints::new(dir.path()).keep(1)).unwrap().ends_with("step-00000001-1"));
}

#[test]
fn a_directory_is_that_of_a_run_until_its_model_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (has_saved, saved) = mpsc::channel();
    let (end, may_end) = mpsc::channel::<()>();
    let may_end = std::sync::Mutex::new(may_end);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            launch::local(2, |world| -> fsdp::Result<()> {
                let mut run = Run::start(&world)?;
                run.step()?;
                // Each time by another store: the directory is the model's.
                Checkpoints::new(dir.path()).save(run.contents())?;
                Checkpoints::new(dir.path()).in_background().save(run.contents())?;
                run.step()?;
                Checkpoints::new(dir.path().join(".")).save(run.contents())?;
                if world.rank() == 0 {
                    // The test may be over, having failed.
                    let _ = has_saved.send(());
                    let _ = may_end.lock().unwrap().recv();
                }
                Ok(())
            })
        });
        saved.recv().unwrap();
        // It is between two saves. Others can read, and not save, at whatever step.
        let store = Checkpoints::new(dir.path());
        assert_eq!(save(1, &store).unwrap_err(), busy(dir.path()));
        let restored = launch::local(1, |world| -> fsdp::Result<_> {
            let mut run = Run::start(&world)?;
            Ok(store.restore_latest(run.restore())?.expect("there are two").checkpoint.step())
        });
        drop(end);
        first.join().unwrap().unwrap();
        assert_eq!(restored.unwrap(), [2]);
        let steps: Vec<u64> = store.list().unwrap().iter().map(|entry| entry.step).collect();
        assert_eq!(steps, [1, 2]);
        // Now that it is gone, another one goes on.
        launch::local(1, |world| -> fsdp::Result<()> {
            let mut run = Run::start(&world)?;
            store.restore_latest(run.restore())?.expect("there are two");
            run.step()?;
            store.save(run.contents()).map(drop)
        })
        .unwrap();
        assert_eq!(store.list().unwrap().len(), 3);
    });
}
