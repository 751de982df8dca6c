//! The same from the system itself: a process that may write no more, directories that nobody may write to.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use fsdp::checkpoint::{Checkpoint, Checkpoints};
use fsdp::prelude::*;

use crate::small::{History, Run};

/// The directory that a child saves to.
const TASK: &str = "FSDP_CHECKPOINT_LIMITS_CHILD";

/// The error of a save after one more step, the same on all ranks; and training goes on.
fn refused(dir: &Path) -> String {
    let store = Checkpoints::new(dir);
    let errors = launch::local(2, |world| -> fsdp::Result<String> {
        let mut run = Run::start(&world)?;
        store.restore_latest(run.restore())?;
        run.step()?;
        let error = store.save(run.contents()).unwrap_err().to_string();
        run.step()?;
        Ok(error)
    });
    let errors = errors.unwrap();
    assert_eq!(errors[0], errors[1]);
    errors[0].clone()
}

fn save(dir: &Path) {
    let store = Checkpoints::new(dir);
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        store.restore_latest(run.restore())?;
        run.step()?;
        store.save(run.contents()).map(drop)
    })
    .unwrap();
}

/// The checkpoints are those of these steps, and whole; nothing else is there; the latest loads.
fn check(dir: &Path, steps: &[u64], history: &History) {
    let store = Checkpoints::new(dir);
    let entries = store.list().unwrap();
    assert_eq!(entries.iter().map(|entry| entry.step).collect::<Vec<_>>(), steps);
    assert_eq!(fs::read_dir(dir).unwrap().count(), steps.len() + 1);
    for entry in &entries {
        assert!(Checkpoint::open(&entry.path).unwrap().verify(|_| ()).unwrap().is_empty());
    }
    launch::local(3, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        let restored = store.restore_latest(run.restore())?.expect("one was saved");
        run.check_restored(&restored, history)
    })
    .unwrap();
}

/// What the process runs that the test starts; by itself, nothing.
#[test]
fn what_a_child_does() {
    if let Ok(dir) = std::env::var(TASK) {
        println!("\nrefused: {}", refused(Path::new(&dir)));
    }
}

#[test]
fn a_process_that_may_write_no_more_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let history = History::new(2);
    save(dir.path());
    // A limit on the length of files: as on a full disk, part of what is written gets there.
    let script = "trap '' XFSZ && ulimit -f 1 && exec \"$0\" --exact limits::what_a_child_does --nocapture";
    let child = Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .env(TASK, dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8(child.stdout).unwrap();
    assert!(child.status.success(), "{text}");
    let error = text.lines().find_map(|line| line.strip_prefix("refused: ")).unwrap();
    let unfinished = format!("cannot write `{}/.unfinished-step-00000002-", dir.path().display());
    assert!(error.contains(&unfinished) && error.contains("File too large"), "{error}");
    check(dir.path(), &[1], &history);
    save(dir.path());
    check(dir.path(), &[1, 2], &history);
}

#[test]
fn a_directory_that_may_not_be_written_to_is_named_and_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let history = History::new(1);
    save(dir.path());
    let set = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
    set(0o555);
    // Nothing is forbidden to the administrator.
    if fs::create_dir(dir.path().join("probe")).is_ok() {
        fs::remove_dir(dir.path().join("probe")).unwrap();
    } else {
        let error = refused(dir.path());
        let expected = format!("cannot create `{}/.unfinished-step-00000002-", dir.path().display());
        assert!(error.contains(&expected) && error.contains("Permission denied"), "{error}");
        check(dir.path(), &[1], &history);
    }
    set(0o755);
    check(dir.path(), &[1], &history);
    // This forbids it to him too.
    let error = refused(Path::new("/proc/checkpoints"));
    assert!(error.starts_with("rank 0: cannot create `/proc/checkpoints`: "), "{error}");
}
