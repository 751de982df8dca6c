//! Saves beside the training: what they save, what they cost, and how they end.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints};
use fsdp::launch::{LaunchError, RankEnd};
use fsdp::memory::Category;
use fsdp::prelude::*;

use crate::small::Run;

/// What file operations wait at until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let open = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.1.wait_while(open, |open| !*open).unwrap_or_else(PoisonError::into_inner));
    }

    /// A store whose files are written when the gate is open.
    fn guard(&self, dir: &Path) -> Checkpoints {
        let gate = self.clone();
        Checkpoints::new(dir).with_hook(move |action, _| {
            if action == "write" {
                gate.pass();
            }
            Ok(())
        })
    }
}

/// Opens the gate whatever happens, so that a test that fails ends.
struct Opens(Gate);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// All of a checkpoint, by name.
fn all(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let checkpoint = Checkpoint::open(path).unwrap();
    let mut all = BTreeMap::new();
    for (section, tensors) in &checkpoint.index().tensors {
        for (name, tensor) in tensors {
            let bytes = checkpoint.read_bytes(section, name, 0..tensor.numel()).unwrap();
            all.insert(format!("{section}:{name}"), bytes);
        }
    }
    let values = checkpoint.index().values.iter();
    all.extend(values.map(|(name, value)| (name.clone(), value.to_string().into_bytes())));
    all
}

#[test]
fn what_is_saved_is_the_state_at_the_call_whatever_comes_after() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let (here, beside) = (dir.path().join("here"), dir.path().join("beside"));
    let paths = launch::local(2, |world| -> fsdp::Result<_> {
        let _opens = Opens(gate.clone());
        let mut run = Run::start(&world)?;
        for _ in 0..3 {
            run.step()?;
        }
        let mut saver = gate.guard(&beside).in_background();
        let saved = Checkpoints::new(&here).save(run.contents())?;
        saver.save(run.contents())?;
        for _ in 0..4 {
            run.step()?;
        }
        // Nothing was written so far, and training has gone on.
        assert!(saver.is_busy() && Checkpoints::new(&beside).latest()?.is_none());
        gate.open();
        let copied = saver.wait()?.expect("a save was under way");
        assert!(!saver.is_busy() && saver.wait()?.is_none());
        Ok((saved, copied))
    })
    .unwrap();
    assert_eq!(paths[0], paths[1]);
    let (saved, copied) = &paths[0];
    assert!(copied.starts_with(&beside) && all(saved) == all(copied));
    let checkpoint = Checkpoint::open(copied).unwrap();
    assert_eq!((checkpoint.step(), checkpoint.verify(|_| ()).unwrap().len()), (3, 0));
}

#[test]
fn the_next_save_waits_and_memory_is_that_of_one_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let (entered, returned) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(false)));
    let gate = Gate::default();
    let (hooked, late) = (gate.clone(), returned.clone());
    // The first save is written when both ranks are in the second one, and over before that returns.
    let store = Checkpoints::new(dir.path()).with_hook(move |action, path| {
        if action == "write" {
            hooked.pass();
        }
        let first = path.file_name().is_some_and(|name| name == "step-00000001");
        if first && late.load(Ordering::SeqCst) {
            return Err(io::Error::other("the second save has begun"));
        }
        Ok(())
    });
    launch::local(2, |world| -> fsdp::Result<()> {
        let _opens = Opens(gate.clone());
        let mut run = Run::start(&world)?;
        let mut saver = store.clone().in_background();
        let snapshot = |run: &Run| {
            let listed = run.model.memory(2).into_iter().find(|row| row.usage.category == Category::Snapshot);
            let row = listed.expect("there was one");
            (row.usage.current, row.usage.peak, row.formula as usize)
        };
        run.step()?;
        assert!(run.model.memory(2).iter().all(|row| row.usage.category != Category::Snapshot));
        saver.save(run.contents())?;
        let (current, peak, formula) = snapshot(&run);
        assert!(current == formula && peak == formula && formula > 0, "{current} {peak} {formula}");
        run.step()?;
        if entered.fetch_add(1, Ordering::SeqCst) == 1 {
            gate.open();
        }
        saver.save(run.contents())?;
        returned.store(true, Ordering::SeqCst);
        assert_eq!(snapshot(&run).1, formula);
        assert!(saver.wait()?.is_some_and(|path| path.ends_with("step-00000002")));
        assert_eq!(snapshot(&run), (0, formula, formula));
        Ok(())
    })
    .unwrap();
    let steps: Vec<u64> =
        Checkpoints::new(dir.path()).list().unwrap().iter().map(|entry| entry.step).collect();
    assert_eq!(steps, [1, 2]);
}

#[test]
fn an_error_is_told_by_the_next_save_which_has_begun_all_the_same() {
    for rank in 0..2 {
        let dir = tempfile::tempdir().unwrap();
        let fails = AtomicBool::new(true);
        let file = format!("rank-{rank:05}.safetensors");
        let store = Checkpoints::new(dir.path()).with_hook(move |action, path| {
            let here = action == "sync" && path.ends_with(&file);
            if here && fails.swap(false, Ordering::SeqCst) {
                return Err(io::Error::from_raw_os_error(28));
            }
            Ok(())
        });
        let errors = launch::local(2, |world| -> fsdp::Result<_> {
            let mut run = Run::start(&world)?;
            let mut saver = store.clone().in_background();
            run.step()?;
            saver.save(run.contents())?;
            run.step()?;
            let error = saver.save(run.contents()).unwrap_err();
            run.step()?;
            assert!(saver.wait()?.is_some_and(|path| path.ends_with("step-00000002")));
            saver.save(run.contents())?;
            assert!(saver.wait()?.is_some_and(|path| path.ends_with("step-00000003")));
            Ok(error.to_string())
        })
        .unwrap();
        assert_eq!(errors[0], errors[1]);
        assert!(errors[0].starts_with(&format!("rank {rank}: cannot sync `")), "{}", errors[0]);
        assert!(errors[0].contains("No space left on device"), "{}", errors[0]);
        assert_eq!(store.list().unwrap().len(), 2);
    }
}

#[test]
fn a_panic_in_the_background_is_an_error_on_all_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let fails = AtomicBool::new(true);
    let store = Checkpoints::new(dir.path()).with_hook(move |_, path| {
        assert!(!path.ends_with("rank-00001.safetensors") || !fails.swap(false, Ordering::SeqCst), "unlucky");
        Ok(())
    });
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        let mut saver = store.clone().in_background();
        saver.save(run.contents())?;
        let error = saver.wait().unwrap_err();
        let fsdp::Error::Checkpoint(typed) = &error else { panic!("{error}") };
        assert!(matches!(&**typed, CheckpointError::OnRank { rank: 1, .. }), "{error}");
        assert_eq!(error.to_string(), "rank 1: panicked: unlucky");
        run.step()?;
        saver.save(run.contents())?;
        saver.wait().map(drop)
    })
    .unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn saves_and_restores_of_a_model_come_one_after_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    launch::local(3, |world| -> fsdp::Result<()> {
        let _opens = Opens(gate.clone());
        let mut run = Run::start(&world)?;
        run.step()?;
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        let mut savers = [gate.guard(&one).in_background(), gate.guard(&other).in_background()];
        savers[0].save(run.contents())?;
        savers[1].save(run.contents())?;
        run.step()?;
        // Ranks come here in any order, with two saves under way, and now save and restore themselves.
        gate.open();
        Checkpoints::new(&one).save(run.contents())?;
        let restored = Checkpoints::new(&other).restore_latest(run.restore())?;
        assert_eq!(restored.expect("the background has saved it").checkpoint.step(), 1);
        for saver in &mut savers {
            assert!(saver.wait()?.is_some_and(|path| path.ends_with("step-00000001")));
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(Checkpoints::new(dir.path().join("one")).list().unwrap().len(), 2);
}

#[test]
fn a_rank_that_panics_is_reported_while_a_save_is_under_way() {
    let dir = tempfile::tempdir().unwrap();
    let gate = Gate::default();
    let error = launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        let mut saver = gate.guard(dir.path()).in_background();
        run.step()?;
        saver.save(run.contents())?;
        if world.rank() == 1 {
            panic!("out of luck");
        }
        // The save goes on only after this rank has heard of the other.
        let _opens = Opens(gate.clone());
        run.step()
    })
    .unwrap_err();
    let LaunchError::Ranks { first, others } = error else { panic!("{error}") };
    assert_eq!((first.rank, &first.end), (1, &RankEnd::Panicked("out of luck".into())));
    let [other] = &others[..] else { panic!("{others:?}") };
    let RankEnd::Failed(text) = &other.end else { panic!("{other}") };
    assert!(text.contains("rank 1 panicked: out of luck"), "{text}");
    // It could not be completed; the next run saves into the same directory.
    let store = Checkpoints::new(dir.path());
    assert!(store.list().unwrap().is_empty());
    launch::local(2, |world| store.save(Run::start(&world)?.contents())).unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
}

#[test]
fn a_saver_that_is_dropped_ends_with_its_rank() {
    for how in ["at the end", "before the end", "with an error"] {
        let dir = tempfile::tempdir().unwrap();
        let store = Checkpoints::new(dir.path());
        let ended = launch::local(2, |world| -> fsdp::Result<()> {
            let mut run = Run::start(&world)?;
            let mut saver = store.clone().in_background();
            run.step()?;
            saver.save(run.contents())?;
            match how {
                "before the end" => {
                    drop(saver);
                    run.step()?;
                    store.clone().in_background().save(run.contents())
                }
                "with an error" if world.rank() == 1 => Err(fsdp::Error::Usage("that is all".into())),
                _ => Ok(()),
            }
        });
        let steps: Vec<u64> = store.list().unwrap().iter().map(|entry| entry.step).collect();
        match how {
            "at the end" => assert_eq!((ended.is_ok(), steps), (true, vec![1]), "{ended:?}"),
            "before the end" => assert_eq!((ended.is_ok(), steps), (true, vec![1, 2]), "{ended:?}"),
            _ => assert!(ended.unwrap_err().to_string().starts_with("rank 1 failed: that is all")),
        }
    }
}
