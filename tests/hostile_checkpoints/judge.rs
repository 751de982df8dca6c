//! Everything that reads checkpoints, on one that was changed.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Index, MODEL, Restored};
use fsdp::launch;
use fsdp_models::checkpoint::{ExportOptions, Side, diff, export, find, list, summary, summary_json};
use tempfile::TempDir;

use crate::files::{self, Fate, Files, INDEX, Mutant};
use crate::memory;
use crate::run::{Run, State};

const STEPS: u64 = 3;

/// Of the run that was saved: weights are in several files.
const RANKS: usize = 3;

/// Longest message, in characters.
const MESSAGE: usize = 2000;

/// Largest allocation, in sizes of the checkpoint.
const LARGEST: usize = 32;
/// All that is taken at one time, in the same: an empty JSON list is 3 bytes in a file and 32 in memory, and there are the
/// readers of two ranks and of this test.
const PEAK: usize = 100;
/// Bytes that a JSON object takes, however short it is in a file.
const OBJECT: usize = 640;
/// For streams, buffers and messages of a launch.
const ALLOWANCE: usize = 1 << 20;

/// All tensors of a checkpoint, as bytes.
fn tensors(checkpoint: &Checkpoint) -> Result<BTreeMap<String, Vec<u8>>, CheckpointError> {
    let mut all = BTreeMap::new();
    for (section, tensors) in &checkpoint.index().tensors {
        for (name, tensor) in tensors {
            let bytes = checkpoint.read_bytes(section, name, 0..tensor.numel())?;
            all.insert(format!("{section}:{name}"), bytes);
        }
    }
    Ok(all)
}

/// A checkpoint that is sound, and a place for others.
pub struct Judge {
    dir: TempDir,
    pub files: Files,
    index: Index,
    tensors: BTreeMap<String, Vec<u8>>,
    state: State,
    /// After one more step, on 1 and on 2 ranks.
    next: [State; 2],
}

/// What was seen of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    Refused,
    /// Opened, but not all of it could be restored.
    Opened,
    Restored,
}

impl Judge {
    pub fn new() -> Judge {
        let dir = tempfile::tempdir().unwrap();
        let store = Checkpoints::new(dir.path().join("sound"));
        let saved = launch::local(RANKS, |world| -> fsdp::Result<_> {
            let mut run = Run::start(&world, 1)?;
            for _ in 0..STEPS {
                run.step()?;
            }
            Ok((store.save(run.contents().value("cursor", &42u64))?, run.state()?))
        });
        let (path, state) = saved.unwrap().swap_remove(0);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (files, tensors) = (files::read(&path), tensors(&checkpoint).unwrap());
        // What a path may lead to: as good as what is inside.
        files::write(&dir.path().join("outside"), &files);
        let next = [1, 2].map(|ranks| {
            let next = launch::local(ranks, |world| -> fsdp::Result<State> {
                let mut run = Run::start(&world, 2)?;
                run.restore().from(&path)?;
                run.step()?;
                run.state()
            });
            next.unwrap().swap_remove(0)
        });
        Judge { dir, files, index: checkpoint.index().clone(), tensors, state, next }
    }

    /// The directory that mutants are in.
    pub fn place(&self) -> PathBuf {
        self.dir.path().join("run").join("step-00000003")
    }

    /// A copy of the sound checkpoint that is none of ours.
    pub fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn sound(&self) -> PathBuf {
        self.dir.path().join("sound").join("step-00000003")
    }

    /// Writes a mutant and looks at it.
    pub fn judge(&self, mutant: &Mutant) -> Seen {
        files::write(&self.place(), &mutant.files);
        self.judge_place(mutant)
    }

    /// Looks at what is in the place of mutants.
    pub fn judge_place(&self, mutant: &Mutant) -> Seen {
        let before = files::tree(self.dir.path());
        let look = || catch_unwind(AssertUnwindSafe(|| self.look(mutant)));
        let (seen, taken) = memory::watched(look);
        let label = &mutant.label;
        let seen = seen.unwrap_or_else(|_| panic!("{label}: see above"));
        let size: usize = mutant.files.values().chain(self.files.values()).map(Vec::len).sum();
        assert!(taken.largest <= LARGEST * size + ALLOWANCE, "{label}: {taken:?} of {size} bytes");
        let objects =
            mutant.files.get(INDEX).map_or(0, |index| index.iter().filter(|byte| **byte == b'{').count());
        let peak = PEAK * (size + OBJECT * objects) + ALLOWANCE;
        assert!(taken.peak <= peak, "{label}: {taken:?} of {size} bytes and {objects} objects");
        assert_eq!(files::tree(self.dir.path()), before, "{label}");
        seen
    }

    fn look(&self, mutant: &Mutant) -> Seen {
        let path = self.place();
        let index = Index::read(&path);
        if let Err(error) = &index {
            self.check_message(error);
        }
        let opened = Checkpoint::open(&path);
        match (mutant.fate, &opened) {
            (Fate::Refused(words), Err(error)) => {
                let text = error.to_string();
                assert!(text.contains(words) && text.chars().count() < MESSAGE, "{text}");
            }
            (Fate::Refused(words), Ok(_)) => panic!("it is opened, and is not refused as it {words}"),
            (Fate::Sound | Fate::Unfit(_), Err(error)) => panic!("{error}"),
            (_, Err(error)) => self.check_message(error),
            (Fate::Damaged, Ok(checkpoint)) => assert_eq!(*checkpoint.index(), self.index),
            (_, Ok(_)) => {}
        }
        if let Ok(index) = &index {
            let wrong = index.verify(&path, |_| ());
            self.check_verified(mutant, &wrong);
            if let Ok(checkpoint) = &opened {
                assert_eq!(checkpoint.index(), index);
            }
        }
        let run = path.parent().unwrap();
        match list(&Checkpoints::new(run)) {
            Ok(listing) => {
                let text = format!("{listing} {}", serde_json::Value::Object(listing.json()));
                assert!(text.contains("step-00000003") || !path.join(INDEX).is_file());
                assert!(find(run).is_ok());
            }
            Err(error) => self.check_message(&error),
        }
        if let Ok(checkpoint) = &opened {
            self.inspect(mutant, checkpoint);
        }
        self.compare(mutant);
        let restored = [1, 2].map(|ranks| self.restore(ranks, mutant, opened.is_ok()));
        assert_eq!(restored[0], restored[1]);
        assert!(!restored[0] || !matches!(mutant.fate, Fate::Unfit(_)), "it is restored");
        match (opened.is_ok(), restored[0]) {
            (false, _) => Seen::Refused,
            (true, false) => Seen::Opened,
            (true, true) => Seen::Restored,
        }
    }

    /// A message says which file or directory, and is no longer than a person reads.
    fn check_message(&self, error: &dyn std::fmt::Display) {
        let text = error.to_string();
        assert!(text.contains(self.place().to_str().unwrap()), "{text}");
        let length = text.chars().count();
        assert!(length < MESSAGE, "a message of {length} characters: {text}");
    }

    /// Every byte of a file that differs is in what is wrong, and nothing else is.
    fn check_verified(&self, mutant: &Mutant, wrong: &[CheckpointError]) {
        wrong.iter().for_each(|error| self.check_message(error));
        match mutant.fate {
            Fate::Sound => return assert!(wrong.is_empty(), "{wrong:?}"),
            Fate::Damaged => {}
            _ => return,
        }
        for (name, sound) in self.files.iter().filter(|(name, _)| *name != INDEX) {
            let path = self.place().join(name);
            let Some(found) = mutant.files.get(name) else {
                let missing = |error: &CheckpointError| matches!(error, CheckpointError::File(error) if error.path == path);
                assert!(wrong.iter().any(missing), "{wrong:?}");
                continue;
            };
            let resized = wrong
                .iter()
                .any(|error| matches!(error, CheckpointError::Malformed { path: at, .. } if *at == path));
            assert_eq!(resized, found.len() != sound.len(), "{name}: {wrong:?}");
            let told: Vec<_> = wrong
                .iter()
                .filter_map(|error| match error {
                    CheckpointError::Corrupted { path: at, offset, len, .. } if *at == path => {
                        Some(*offset as usize..(offset + len) as usize)
                    }
                    _ => None,
                })
                .collect();
            // Blocks whose end is missing are told by the length.
            let whole = self.blocks(name).into_iter().filter(|block| block.end <= found.len());
            let damaged: Vec<_> =
                whole.filter(|block| found[block.clone()] != sound[block.clone()]).collect();
            assert_eq!(told, damaged, "{name}");
        }
    }

    /// The bytes of a file that are under one checksum each, in order: tensors are far below a MiB.
    fn blocks(&self, name: &str) -> Vec<Range<usize>> {
        let file = self.index.files.iter().position(|file| file.name == name).unwrap();
        let tensors = self.index.tensors.values().flat_map(|section| section.values());
        let parts = tensors.flat_map(|tensor| tensor.parts.iter().map(|part| (part, tensor.dtype.size())));
        let here = parts.filter(|(part, _)| part.file == file);
        let mut blocks: Vec<_> =
            here.map(|(part, size)| part.offset as usize..part.offset as usize + part.len * size).collect();
        blocks.sort_by_key(|block| block.start);
        blocks.insert(0, 0..blocks[0].start);
        blocks
    }

    /// What the program `inspect` and `export` do.
    fn inspect(&self, mutant: &Mutant, checkpoint: &Checkpoint) {
        let sections: Vec<String> = checkpoint.index().tensors.keys().cloned().collect();
        for sections in [&[][..], &sections] {
            summary(checkpoint, sections).unwrap();
            let json = summary_json(checkpoint, sections).unwrap();
            assert_eq!(json["step"], checkpoint.step());
        }
        match tensors(checkpoint) {
            Ok(found) if matches!(mutant.fate, Fate::Damaged | Fate::Sound) => assert!(found == self.tensors),
            Ok(_) => {}
            Err(error) => self.check_corrupted(&error),
        }
        let target = self.dir.path().join("export");
        for section in [MODEL, "ema"] {
            let options = ExportOptions { section, max_shard_bytes: 300, ..ExportOptions::default() };
            match export(checkpoint, &target, &options, |_, _| ()) {
                Ok(exported) => {
                    assert!(exported.tensors > 0);
                    let exported = Side::open(&target).unwrap();
                    if section == MODEL {
                        let original = Side::open(&self.place()).unwrap();
                        let differences = diff(&original, &exported, Some(MODEL), |_, _| ()).unwrap();
                        assert!(differences.is_empty(), "{differences}");
                    }
                    fs::remove_dir_all(&target).unwrap();
                }
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains(self.dir.path().to_str().unwrap()), "{text}");
                }
            }
            assert!(!target.exists());
        }
    }

    /// Damaged bytes are named with file, offset and tensor.
    fn check_corrupted(&self, error: &CheckpointError) {
        self.check_message(error);
        assert!(matches!(error, CheckpointError::Corrupted { .. }), "{error}");
    }

    fn compare(&self, mutant: &Mutant) {
        let sound = Side::open(&self.sound()).unwrap();
        match Side::open(&self.place()) {
            Ok(side) => match diff(&sound, &side, None, |_, _| ()) {
                Ok(differences) => {
                    assert!(!differences.to_string().is_empty());
                    // Some of those that are as good have other values.
                    let tensors = differences.same == self.tensors.len();
                    assert!(tensors || matches!(mutant.fate, Fate::Forged | Fate::Unfit(_)), "{differences}");
                }
                Err(error) => self.check_message(&error),
            },
            Err(error) => self.check_message(&error),
        }
    }

    /// Restores on `ranks` ranks, strictly and not, and trains after each. Whether the strict restore succeeds, which is
    /// with the saved values only.
    fn restore(&self, ranks: usize, mutant: &Mutant, opens: bool) -> bool {
        let (path, sound) = (self.place(), self.sound());
        let outcomes = launch::local(ranks, |world| -> fsdp::Result<bool> {
            let mut run = Run::start(&world, 2)?;
            let before = run.state()?;
            match run.restore().verified().from(&path) {
                Ok(restored) => {
                    let mut written = self.files.iter().filter(|(name, _)| *name != INDEX);
                    let sound = written.all(|(name, bytes)| mutant.files.get(name) == Some(bytes));
                    assert!(sound || mutant.fate != Fate::Damaged);
                    self.check_restored(mutant, &restored, &before, &run.state()?);
                }
                Err(error) => {
                    self.check_message(&error);
                    assert_eq!(run.state()?, before, "{error}");
                }
            }
            let before = run.state()?;
            let strict = run.restore().from(&path);
            let after = run.state()?;
            match &strict {
                Ok(restored) => self.check_restored(mutant, restored, &before, &after),
                Err(error) => {
                    self.check_message(error);
                    if let Fate::Unfit(words) = mutant.fate {
                        assert!(error.to_string().contains(words), "{error}");
                    }
                    if error.to_string().contains(" is corrupted: bytes ") {
                        assert!(opens);
                    } else {
                        assert_eq!(after, before, "{error}");
                    }
                }
            }
            run.step()?;
            let before = run.state()?;
            if strict.is_ok() && matches!(mutant.fate, Fate::Damaged | Fate::Sound) {
                // The optimizer's state was that which was saved.
                assert_eq!(before, self.next[ranks - 1]);
            }
            match run.restore().strict(false).from(&path) {
                Ok(restored) => self.check_restored(mutant, &restored, &before, &run.state()?),
                Err(error) => {
                    self.check_message(&error);
                    assert!(strict.is_err(), "{error}");
                }
            }
            run.step()?;
            run.restore().from(&sound)?;
            assert_eq!(run.state()?, self.state);
            Ok(strict.is_ok())
        });
        let outcomes = outcomes.unwrap_or_else(|error| panic!("{error}"));
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
        outcomes[0]
    }

    /// What was restored has the values that were saved; what was left out, those from before.
    fn check_restored(&self, mutant: &Mutant, restored: &Restored, before: &State, after: &State) {
        let model = restored.skipped.iter().find(|(section, _)| section == MODEL);
        let kept = |name: &String| {
            model.is_some_and(|(_, wrong)| {
                let shapes = wrong.shapes.iter().map(|wrong| &wrong.name);
                let dtypes =
                    wrong.dtypes.iter().filter(|wrong| !wrong.found.contains('F')).map(|wrong| &wrong.name);
                wrong.missing.iter().chain(shapes).chain(dtypes).any(|left| left == name)
            })
        };
        for (name, bits) in &after.tensors {
            let expected = if kept(name) { before } else { &self.state };
            let converted =
                model.is_some_and(|(_, wrong)| wrong.dtypes.iter().any(|wrong| wrong.name == *name));
            assert!(converted || *bits == expected.tensors[name], "{name}");
        }
        // With the optimizer of another rule, the step is left too.
        let left = restored.skipped.iter().any(|(section, _)| section == "optimizer");
        let step = if left { before.counters[0] } else { restored.checkpoint.step() };
        assert_eq!(after.counters[0], step);
        if matches!(mutant.fate, Fate::Damaged | Fate::Sound) {
            assert_eq!(*after, self.state);
        }
    }
}
