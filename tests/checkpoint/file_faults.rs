//! A file operation that fails is an error on all ranks that says which; nothing is lost, and training goes on.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use fsdp::prelude::*;

use crate::small::{History, Run};

/// Numbers of the errors of Linux and their words.
const ERRORS: [(i32, &str); 4] = [
    (28, "No space left on device"),
    (13, "Permission denied"),
    (30, "Read-only file system"),
    (5, "Input/output error"),
];

/// One operation: the rank's thread, and how many of it came before.
type Place = (String, usize);

/// Makes the operation at a place fail, and counts.
#[derive(Default)]
struct Faults {
    done: BTreeMap<String, usize>,
    log: Vec<(Place, &'static str, PathBuf)>,
    fail: Option<(Place, i32)>,
}

impl Faults {
    fn run(&mut self, action: &'static str, path: &Path) -> io::Result<()> {
        // `rank0/checkpoint` in the background.
        let thread = std::thread::current().name().unwrap().to_owned();
        let count = self.done.entry(thread.clone()).or_default();
        let place = (thread, *count);
        *count += 1;
        self.log.push((place.clone(), action, path.to_path_buf()));
        match &self.fail {
            Some((at, error)) if *at == place => Err(io::Error::from_raw_os_error(*error)),
            _ => Ok(()),
        }
    }

    fn arm(&mut self, fail: Option<(Place, i32)>) {
        *self = Faults { fail, ..Faults::default() };
    }
}

fn faulty(store: Checkpoints) -> (Checkpoints, Arc<Mutex<Faults>>) {
    let faults = Arc::new(Mutex::new(Faults::default()));
    let hook = faults.clone();
    // A rank whose assertion fails must not hide why.
    let run = move |action: &'static str, path: &Path| {
        hook.lock().unwrap_or_else(PoisonError::into_inner).run(action, path)
    };
    (store.with_hook(run), faults)
}

/// The names in a directory.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn check_all(store: &Checkpoints) {
    for entry in store.list().unwrap() {
        let checkpoint = Checkpoint::open(&entry.path).unwrap();
        assert_eq!((checkpoint.step(), checkpoint.verify(|_| ()).unwrap().len()), (entry.step, 0));
    }
}

fn typed(error: &fsdp::Error) -> &CheckpointError {
    let fsdp::Error::Checkpoint(error) = error else { panic!("{error}") };
    error
}

/// What the ranks agree on once more, in a test.
fn barrier(run: &Run) -> fsdp::Result<()> {
    run.weights().map(drop)
}

/// The operations of a save that removes an old checkpoint.
fn operations(dir: &Path) -> Vec<(Place, &'static str, PathBuf)> {
    let (store, faults) = faulty(Checkpoints::new(dir).keep(2));
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        for _ in 0..3 {
            run.step()?;
            barrier(&run)?;
            if world.rank() == 0 {
                faults.lock().unwrap().arm(None);
            }
            barrier(&run)?;
            store.save(run.contents())?;
        }
        Ok(())
    })
    .unwrap();
    let mut log = std::mem::take(&mut faults.lock().unwrap().log);
    log.sort();
    log
}

#[test]
fn every_operation_may_fail_on_any_rank() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let operations = operations(&log);
    let ranks = ["rank0", "rank1"].map(|rank| operations.iter().filter(|((at, _), ..)| at == rank).count());
    assert!(ranks[0] > 15 && ranks[1] > 5, "{operations:?}");

    let place = dir.path().join("run");
    let (store, faults) = faulty(Checkpoints::new(&place).keep(2));
    let history = History::new(2 + ERRORS.len() * operations.len());
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        let first = world.rank() == 0;
        let arm = |run: &Run, fail: Option<(Place, i32)>| -> fsdp::Result<()> {
            barrier(run)?;
            if first {
                faults.lock().unwrap().arm(fail);
            }
            barrier(run)
        };
        for _ in 0..2 {
            run.step()?;
            store.save(run.contents())?;
        }
        let mut not_removed = 0;
        for ((at, action, path), (number, words)) in
            operations.iter().flat_map(|operation| ERRORS.map(|error| (operation.clone(), error)))
        {
            run.step()?;
            let step = run.model.step_count();
            let before = store.list()?;
            arm(&run, Some((at.clone(), number)))?;
            let error = store.save(run.contents()).unwrap_err();
            arm(&run, None)?;

            // It says what could not be done, with what, and why.
            let text = error.to_string();
            let name = path.file_name().unwrap().to_str().unwrap();
            let is_here = name.starts_with("rank-") || name == "index.json" || name == ".lock";
            let named = if is_here { name } else { place.to_str().unwrap() };
            for part in [format!("cannot {action} `"), named.to_owned(), words.to_owned()] {
                assert!(text.contains(&part), "{at:?}: {text}");
            }
            let after = store.list()?;
            let is_new = after.last().is_some_and(|entry| entry.step == step);
            match typed(&error) {
                CheckpointError::OnRank { rank, .. } => {
                    assert_eq!(format!("rank{rank}"), at.0);
                    // Only the last sync comes when the checkpoint is in its place.
                    assert_eq!(is_new, action == "sync" && path == log, "{text}");
                }
                CheckpointError::NotRemoved { path, .. } => {
                    assert!(is_new && *path == after.last().unwrap().path && first | (at.0 == "rank0"));
                    not_removed += 1;
                }
                other => panic!("{other}"),
            }
            // What was there is there, and whole.
            let kept = before.iter().filter(|entry| after.contains(entry)).count();
            assert!(kept == before.len() || is_new, "{text}");
            if first {
                check_all(&store);
                let others = names(&place).iter().filter(|name| name.starts_with(".unfinished-")).count();
                assert!(others == 0 || is_new, "{text} leaves {:?}", names(&place));
            }
            // All is well again.
            store.save(run.contents())?;
            if first {
                let names = names(&place);
                assert_eq!((names.len(), names[0].as_str()), (3, ".lock"), "{names:?} after: {text}");
            }
            assert_eq!(run.weights()?, history.0[step as usize]);
            barrier(&run)?;
        }
        // Moving an old one away, the sync of that, and the removal of its files.
        assert_eq!(not_removed, 3 * ERRORS.len());
        Ok(())
    })
    .unwrap();
}

/// Whether all ranks got this error when they saved, and the model still trains and saves elsewhere.
fn refused(ranks: usize, store: &Checkpoints, expected: &str) {
    let elsewhere = tempfile::tempdir().unwrap();
    let errors = launch::local(ranks, |world| -> fsdp::Result<String> {
        let mut run = Run::start(&world)?;
        run.step()?;
        let error = store.save(run.contents()).unwrap_err();
        run.step()?;
        Checkpoints::new(elsewhere.path()).save(run.contents())?;
        Ok(error.to_string())
    })
    .unwrap();
    for error in &errors {
        assert!(*error == errors[0] && error.contains(expected), "{error}");
    }
}

#[test]
fn places_that_are_no_directory_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "text").unwrap();
    for ranks in [1, 2] {
        refused(ranks, &Checkpoints::new(&file), &format!("cannot create `{}`: ", file.display()));
        let below = file.join("below");
        refused(ranks, &Checkpoints::new(&below), &format!("cannot create `{}`: ", file.display()));
    }
    let error = Checkpoints::new(&file).latest().unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot read `{}`: ", file.display())), "{error}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "text");
    assert_eq!(Checkpoints::new(dir.path().join("nowhere")).latest().unwrap(), None);
}

/// Saves steps 1, 2, .. of a run; calls `between` after each.
fn save_steps(
    store: &Checkpoints,
    steps: usize,
    between: impl Fn(usize) + Sync,
) -> Vec<fsdp::Result<PathBuf>> {
    let outcomes = launch::local(2, |world| -> fsdp::Result<_> {
        let mut run = Run::start(&world)?;
        let mut outcomes = Vec::new();
        for step in 0..steps {
            run.step()?;
            outcomes.push(store.save(run.contents()));
            barrier(&run)?;
            if world.rank() == 0 {
                between(step);
            }
            barrier(&run)?;
        }
        Ok(outcomes)
    });
    outcomes.unwrap().swap_remove(0)
}

#[test]
fn a_directory_that_is_removed_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("deep").join("er");
    let store = Checkpoints::new(&place);
    let saved = save_steps(&store, 4, |step| {
        if step == 1 {
            fs::remove_dir_all(dir.path().join("deep")).unwrap();
        }
    });
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    assert_eq!(names(&place), [".lock", "step-00000003", "step-00000004"]);
    check_all(&store);
}

#[test]
fn a_directory_that_goes_while_it_is_written_to_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("run");
    let gone = place.clone();
    let once = Mutex::new(true);
    let store = Checkpoints::new(&place).with_hook(move |action, path| {
        let first = path.ends_with("index.json") && std::mem::take(&mut *once.lock().unwrap());
        if action == "create" && first {
            fs::remove_dir_all(&gone)?;
        }
        Ok(())
    });
    let saved = save_steps(&store, 2, |_| ());
    let error = saved[0].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("rank 0: cannot create `") && error.contains("index.json`: "), "{error}");
    assert_eq!(names(&place), [".lock", "step-00000002"]);
}

#[cfg(unix)]
#[test]
fn a_directory_may_be_a_link_and_what_is_foreign_in_it_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    let outside = dir.path().join("outside");
    for made in [&real.join("step-4"), &real.join(".unfinished-business"), &real.join("notes"), &outside] {
        fs::create_dir_all(made).unwrap();
        fs::write(made.join("index.json"), "{}").unwrap();
    }
    // A killed save's directory is removed, but not through a link, and not what only has such a name.
    fs::create_dir_all(real.join(".unfinished-step-00000001-1")).unwrap();
    std::os::unix::fs::symlink(&outside, real.join(".unfinished-step-00000002-1")).unwrap();
    fs::write(real.join(".unfinished-step-00000003-1"), "text").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();

    let store = Checkpoints::new(&link).keep(1);
    let saved = save_steps(&store, 3, |_| ());
    assert!(saved.iter().all(|path| path.as_ref().is_ok_and(|path| path.starts_with(&link))), "{saved:?}");
    let expected = [
        ".lock",
        ".unfinished-business",
        ".unfinished-step-00000002-1",
        ".unfinished-step-00000003-1",
        "notes",
        "step-00000003",
        "step-4",
    ];
    assert_eq!(names(&real), expected);
    assert!(outside.join("index.json").is_file());
    check_all(&store);
}

#[test]
fn what_a_killed_save_has_left_and_cannot_be_removed_is_no_reason_not_to_save() {
    let dir = tempfile::tempdir().unwrap();
    let left = dir.path().join(".unfinished-step-00000001-1");
    fs::create_dir(&left).unwrap();
    let fail = Arc::new(Mutex::new(true));
    let hook = fail.clone();
    let at = left.clone();
    let store = Checkpoints::new(dir.path()).with_hook(move |action, path| {
        let fails = action == "remove" && path == at && *hook.lock().unwrap();
        if fails { Err(io::Error::from_raw_os_error(13)) } else { Ok(()) }
    });
    let saved = save_steps(&store, 2, |_| *fail.lock().unwrap() = false);
    let error = saved[0].as_ref().unwrap_err();
    let CheckpointError::NotRemoved { path, message } = typed(error) else { panic!("{error}") };
    assert!(message.starts_with(&format!("cannot remove `{}`: ", left.display())), "{message}");
    assert!(path.ends_with("step-00000001"));
    assert!(saved[1].is_ok());
    assert_eq!(names(dir.path()), [".lock", "step-00000001", "step-00000002"]);
    check_all(&store);
}

#[test]
fn a_file_system_without_locks_is_written_to_without() {
    let dir = tempfile::tempdir().unwrap();
    let error = Arc::new(Mutex::new(io::ErrorKind::Unsupported));
    let hook = error.clone();
    let store = Checkpoints::new(dir.path()).with_hook(move |action, _| match action {
        "lock" => Err((*hook.lock().unwrap()).into()),
        _ => Ok(()),
    });
    let saved = save_steps(&store, 2, |_| *error.lock().unwrap() = io::ErrorKind::PermissionDenied);
    assert!(saved[0].is_ok());
    let error = saved[1].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("rank 0: cannot lock `"), "{error}");
}

#[test]
fn a_step_before_the_latest_is_refused_as_it_would_not_be_gone_on_from() {
    let dir = tempfile::tempdir().unwrap();
    let store = Checkpoints::new(dir.path()).keep(1);
    assert!(save_steps(&store, 3, |_| ())[2].is_ok());
    // Another run, or one that has gone back.
    let saved = save_steps(&store, 4, |_| ());
    for (step, refused) in saved[..2].iter().enumerate() {
        let error = refused.as_ref().unwrap_err().to_string();
        let expected = format!("a checkpoint of step 3, so one of step {} would not be the latest", step + 1);
        assert!(error.contains(&expected), "{error}");
    }
    // The same step replaces, a later one follows.
    assert!(saved[2].as_ref().unwrap().ends_with("step-00000003-1") && saved[3].is_ok());
    assert_eq!(names(dir.path()), [".lock", "step-00000004"]);
}

#[test]
fn a_panic_in_a_save_is_an_error_on_all_ranks() {
    for panics in ["rank-00001.safetensors", "index.json", ".lock"] {
        let dir = tempfile::tempdir().unwrap();
        let once = Mutex::new(true);
        let store = Checkpoints::new(dir.path()).with_hook(move |_, path| {
            if path.ends_with(panics) && std::mem::take(&mut *once.lock().unwrap()) {
                panic!("out of luck");
            }
            Ok(())
        });
        let saved = save_steps(&store, 2, |_| ());
        let rank = usize::from(panics.starts_with("rank"));
        let error = saved[0].as_ref().unwrap_err().to_string();
        assert_eq!(error, format!("rank {rank}: panicked: out of luck"));
        assert!(saved[1].is_ok());
        assert_eq!(names(dir.path()), [".lock", "step-00000002"]);
    }
}

#[test]
fn values_that_could_not_be_read_again_are_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let store = Checkpoints::new(dir.path());
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        run.step()?;
        let error = store.save(run.contents().value("best", &f32::INFINITY)).unwrap_err().to_string();
        assert!(
            error.starts_with("value `best` cannot be saved: it has a number that is not finite"),
            "{error}"
        );
        run.optimizer.set_learning_rate(f64::NAN);
        let error = store.save(run.contents()).unwrap_err().to_string();
        assert_eq!(error, "adamw: lr must be finite and at least 0, got NaN");
        run.optimizer.set_learning_rate(0.1);
        store.save(run.contents().value("best", &Some(f32::MAX)).value("none", &None::<f32>))?;
        let saved = store.restore_latest(run.restore())?.expect("it was saved").checkpoint;
        assert_eq!((saved.value("best")?, saved.value("none")?), (f32::MAX, None::<f32>));
        Ok(())
    })
    .unwrap();
}
