//! A disk may take longer than ranks wait for each other; a rank that does not come may not.

use std::path::Path;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use fsdp::checkpoint::Checkpoints;
use fsdp::launch::Launcher;
use fsdp::prelude::*;

use crate::small::Run;

const TIMEOUT: Duration = Duration::from_millis(400);

/// A store with a disk that needs twice the time-out for a rank's file, for the index, and for each removal.
fn slow(dir: &Path) -> Checkpoints {
    Checkpoints::new(dir).keep(1).with_hook(|action, path| {
        let file = path.ends_with("rank-00001.safetensors") || path.ends_with("index.json");
        if action == "remove" || (action == "sync" && file) {
            std::thread::sleep(2 * TIMEOUT);
        }
        Ok(())
    })
}

#[test]
fn a_save_takes_any_time() {
    takes_any_time(false);
}

#[test]
fn a_save_in_the_background_takes_any_time() {
    takes_any_time(true);
}

fn takes_any_time(beside: bool) {
    let dir = tempfile::tempdir().unwrap();
    let store = slow(dir.path());
    let launcher = Launcher::new().ranks(2).timeout(TIMEOUT);
    let saved = launcher.run(|world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        let mut saver = store.clone().in_background();
        for _ in 0..2 {
            run.step()?;
            if beside {
                saver.save(run.contents())?;
            } else {
                store.save(run.contents())?;
            }
        }
        saver.wait()?;
        run.step()
    });
    saved.unwrap();
    let steps: Vec<u64> = store.list().unwrap().iter().map(|entry| entry.step).collect();
    assert_eq!(steps, [2]);
}

#[test]
fn a_rank_that_does_not_save_is_told_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let (told, is_told) = mpsc::channel::<()>();
    let (told, is_told) = (Mutex::new(Some(told)), Mutex::new(is_told));
    let launcher = Launcher::new().ranks(2).timeout(TIMEOUT);
    let ended = launcher.run(|world| -> fsdp::Result<()> {
        let run = Run::start(&world)?;
        if world.rank() == 1 {
            // Until the other rank has given up.
            let _ = is_told.lock().unwrap().recv();
            return Ok(());
        }
        let _gives_up = told.lock().unwrap().take();
        Checkpoints::new(dir.path()).save(run.contents()).map(drop)
    });
    let error = ended.unwrap_err().to_string();
    let expected = "timed out after 400ms in host-barrier of `a save` (checkpoint, step 1, 0 B)";
    assert!(error.contains(expected) && error.contains("missing: [1]"), "{error}");
}

#[test]
fn a_rank_that_ends_before_a_save_is_over_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let ended = launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        if world.rank() == 1 {
            return Err(fsdp::Error::Usage("that is all".into()));
        }
        let mut saver = Checkpoints::new(dir.path()).in_background();
        saver.save(run.contents())?;
        run.step()
    });
    assert!(ended.unwrap_err().to_string().starts_with("rank 1 failed: that is all"));
}
