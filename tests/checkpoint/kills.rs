//! A program that is killed at any moment has lost nothing that it has said to have saved.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fsdp::checkpoint::{BackgroundSaver, Checkpoint, Checkpoints};
use fsdp::prelude::*;

use crate::small::{History, Run};

/// What a child is to do: how it saves, where, and the file operation before which it stops.
const TASK: &str = "FSDP_CHECKPOINT_TEST_CHILD";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// `Checkpoints::save`.
    Here,
    /// `BackgroundSaver::save`.
    Beside,
}

/// A process that goes on from the latest checkpoint in a directory.
pub struct Trainer {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Trainer {
    /// One that trains and saves until it is killed, or, given a number of file operations, trains one step and stops
    /// for good when it has done so many to save it.
    pub fn spawn(way: Way, dir: &Path, stop: Option<usize>) -> Trainer {
        let stop = stop.map_or_else(|| "never".to_owned(), |operations| operations.to_string());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kills::what_a_child_does", "--nocapture", "--test-threads=1"])
            .env(TASK, format!("{way:?} {stop} {}", dir.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Trainer { child, out }
    }

    /// What it says next: `saved N`, `stopped` or `over`; none when it has ended.
    pub fn says(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.out.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            let word = line.trim_end();
            if word == "stopped" || word == "over" || word.starts_with("saved ") {
                return Some(word.to_owned());
            }
        }
    }

    /// Kills it (SIGKILL), and returns what it has said until then.
    pub fn kill(&mut self) -> Vec<String> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::iter::from_fn(|| self.says()).collect()
    }
}

impl Drop for Trainer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(word: &str) {
    // The test harness may have begun a line.
    println!("\n{word}");
}

/// What the processes run that other tests start; by itself, nothing.
#[test]
fn what_a_child_does() {
    let Ok(task) = std::env::var(TASK) else { return };
    let (way, rest) = task.split_once(' ').unwrap();
    let (stop, dir) = rest.split_once(' ').unwrap();
    let stop: Option<usize> = (stop != "never").then(|| stop.parse().unwrap());
    let done = AtomicUsize::new(0);
    let store = Checkpoints::new(dir).keep(2).with_hook(move |_, _| {
        if stop == Some(done.fetch_add(1, Ordering::SeqCst)) {
            say("stopped");
            loop {
                std::thread::park();
            }
        }
        Ok(())
    });
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        store.restore_latest(run.restore())?;
        let mut saver = store.clone().in_background();
        let tell = |steps: u64| {
            if world.rank() == 0 {
                say(&format!("saved {steps}"));
            }
        };
        loop {
            run.step()?;
            save(&mut saver, &run, way == "Here", &tell)?;
            if stop.is_some() {
                saver.wait()?;
                if world.rank() == 0 {
                    say("over");
                }
                return Ok(());
            }
        }
    })
    .unwrap();
}

/// Saves, and tells of the step that is complete then.
fn save(saver: &mut BackgroundSaver, run: &Run, here: bool, tell: &dyn Fn(u64)) -> fsdp::Result<()> {
    let steps = run.model.step_count();
    if here {
        saver.store().save(run.contents())?;
        tell(steps);
    } else {
        saver.save(run.contents())?;
        if steps > 1 {
            tell(steps - 1);
        }
    }
    Ok(())
}

/// Entries of a directory by kind: complete checkpoints, what was left unfinished.
fn entries(dir: &Path) -> (Vec<PathBuf>, usize) {
    let (mut complete, mut unfinished) = (Vec::new(), 0);
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with(".unfinished-") {
            unfinished += 1;
        } else if name.starts_with("step-") {
            complete.push(path);
        } else {
            assert_eq!(name, ".lock");
        }
    }
    complete.sort();
    (complete, unfinished)
}

/// After a kill: every checkpoint is whole, the latest is not older than what was told, and loads on `ranks` ranks.
fn check(dir: &Path, told: u64, ranks: usize, history: &History) -> u64 {
    let store = Checkpoints::new(dir);
    let listed: Vec<PathBuf> = store.list().unwrap().into_iter().map(|entry| entry.path).collect();
    let (complete, unfinished) = entries(dir);
    assert_eq!(listed, complete);
    assert!(unfinished <= 3, "each save removes what the one before has left");
    for path in &listed {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.verify(|_| ()).unwrap().len(), 0);
    }
    let latest = listed.last().map_or(0, |path| Checkpoint::open(path).unwrap().step());
    assert!(latest >= told, "step {told} was saved, but the latest is of step {latest}");
    launch::local(ranks, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        match store.restore_latest(run.restore())? {
            Some(restored) => {
                assert_eq!(restored.checkpoint.step(), latest);
                run.check_restored(&restored, history)
            }
            None => {
                assert_eq!(latest, 0);
                Ok(())
            }
        }
    })
    .unwrap();
    latest
}

/// The next run removes what is left and goes on as if nothing had been.
fn go_on(dir: &Path, history: &History) {
    let store = Checkpoints::new(dir).keep(2);
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        store.restore_latest(run.restore())?;
        for _ in 0..3 {
            run.step()?;
        }
        store.save(run.contents())?;
        assert_eq!(run.weights()?, history.0[run.model.step_count() as usize]);
        Ok(())
    })
    .unwrap();
    let (complete, unfinished) = entries(dir);
    assert_eq!(unfinished, 0);
    assert!(complete.len() <= 2);
}

fn told(words: &[String]) -> u64 {
    let steps = words.iter().filter_map(|word| word.strip_prefix("saved ")?.parse().ok());
    steps.max().unwrap_or(0)
}

/// Kills before every file operation of the first save of all, then of one that removes an old checkpoint and what the
/// kill before has left.
fn kill_before_every_operation(way: Way) {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("run");
    let history = History::new(100);
    kill_before_each(way, &place, &history);
    kill_before_each(way, &place, &history);
    let (complete, _) = entries(&place);
    assert_eq!(complete.len(), 2);
}

fn kill_before_each(way: Way, place: &Path, history: &History) {
    let mut seen = BTreeMap::<u64, usize>::new();
    for operation in 0.. {
        let mut trainer = Trainer::spawn(way, place, Some(operation));
        let mut words: Vec<String> = Vec::new();
        loop {
            match trainer.says().as_deref() {
                Some("stopped") => break,
                Some("over") => {
                    assert!(operation > 20 && seen.len() > 1, "{seen:?} after {operation} kills");
                    drop(trainer);
                    go_on(place, history);
                    return;
                }
                Some(word) => words.push(word.to_owned()),
                None => panic!("the child has failed before operation {operation}"),
            }
        }
        words.extend(trainer.kill());
        *seen.entry(check(place, told(&words), 1 + operation % 4, history)).or_default() += 1;
    }
}

#[test]
fn killed_before_any_file_operation() {
    kill_before_every_operation(Way::Here);
}

#[test]
fn killed_before_any_file_operation_in_the_background() {
    kill_before_every_operation(Way::Beside);
}

/// At random times, in each way of saving. Those before each file operation come on top.
const KILLS: u64 = 100;

/// Kills a run and the runs that go on from it, one after the other, at any time.
fn kill_at_random_times(way: Way, kills: u64) {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("run");
    let history = History::new(4000);
    let mut told_before = 0;
    let mut random = 0x2545_f491_4f6c_dd1d_u64 ^ way as u64;
    for _ in 0..kills {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut trainer = Trainer::spawn(way, &place, None);
        let mut words = Vec::new();
        for _ in 0..random % 4 {
            words.extend(trainer.says());
        }
        // Any time will do: no outcome depends on it.
        std::thread::sleep(Duration::from_micros(random >> 8 & 0x3fff));
        words.extend(trainer.kill());
        let told = told(&words).max(told_before);
        told_before = check(&place, told, 1 + (random >> 32) as usize % 4, &history);
    }
    // How far it comes depends on the machine: a run that went back to the start each time would come to a few steps.
    assert!(told_before > kills / 4, "it went on: step {told_before}");
    go_on(&place, &history);
}

#[test]
fn killed_at_random_times() {
    kill_at_random_times(Way::Here, KILLS);
}

#[test]
fn killed_at_random_times_in_the_background() {
    kill_at_random_times(Way::Beside, KILLS);
}
