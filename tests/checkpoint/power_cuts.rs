//! After a power cut, what was not synced may be there, or not, or in part: nothing counts before all of it is synced.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fsdp::checkpoint::Checkpoints;
use fsdp::prelude::*;

use crate::small::Run;

/// What has surely reached the disk, as a disk may be that does nothing unasked.
#[derive(Default)]
struct Disk {
    /// Files with bytes that are not on the disk.
    dirty: BTreeSet<PathBuf>,
    /// Directories with entries, made or gone, that are not on the disk.
    stale: BTreeSet<PathBuf>,
    /// By directory, what was made in it.
    made: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
    /// Complete checkpoints that are still in their places.
    complete: BTreeSet<PathBuf>,
    /// How often old ones have left theirs.
    removed: usize,
}

impl Disk {
    fn run(&mut self, top: &Path, action: &str, path: &Path) {
        let parent = path.parent().unwrap().to_path_buf();
        let name = path.file_name().unwrap().to_str().unwrap();
        match action {
            "create" if name.starts_with("step-") => {
                // Takes its place: all that is in it is on the disk, and so is the place itself.
                let unfinished = self.made.keys().find(|dir| is_unfinished(dir)).unwrap().clone();
                let files = self.made.remove(&unfinished).unwrap();
                assert!(files.contains(&unfinished.join("index.json")) && files.len() == 3, "{files:?}");
                for file in &files {
                    assert!(!self.dirty.contains(file), "{} counts before it is synced", file.display());
                }
                assert!(!self.stale.contains(&unfinished), "entries count before they are synced");
                for dir in path.ancestors().skip(1).take_while(|dir| *dir != top) {
                    let up = dir.parent().unwrap();
                    assert!(!self.stale.contains(up) || dir == parent, "{} may be gone", dir.display());
                }
                self.complete.insert(path.to_path_buf());
                self.stale.insert(parent);
            }
            "create" => {
                // What is written is new: no file of a checkpoint is changed.
                assert!(self.made.entry(parent.clone()).or_default().insert(path.to_path_buf()));
                self.stale.insert(parent);
            }
            "write" => {
                assert!(is_unfinished(&parent), "{} is written to", path.display());
                self.dirty.insert(path.to_path_buf());
            }
            "sync" => {
                self.dirty.remove(path);
                self.stale.remove(path);
            }
            "remove" if name.starts_with("step-") => {
                // An old one goes only when the new one is there to stay.
                assert!(self.complete.remove(path) && !self.complete.is_empty());
                assert!(self.removed > 0 || !self.stale.contains(&parent), "the new one may be gone");
                self.removed += 1;
                self.stale.insert(parent);
            }
            "remove" => {
                // Its files go only when nothing has its old name any more.
                assert!(is_unfinished(path) && !self.stale.contains(&parent), "half of it may be back");
                self.removed = 0;
            }
            "open" | "lock" => assert_eq!(name, ".lock"),
            _ => panic!("unknown: {action} {}", path.display()),
        }
    }
}

fn is_unfinished(path: &Path) -> bool {
    path.file_name().unwrap().to_str().unwrap().starts_with(".unfinished-")
}

#[test]
fn nothing_counts_before_all_of_it_is_synced() {
    let dir = tempfile::tempdir().unwrap();
    let top = dir.path().to_path_buf();
    let place = top.join("some").join("where");
    let disk = Arc::new(Mutex::new(Disk::default()));
    let hook = {
        let (disk, top) = (disk.clone(), top.clone());
        move |action: &'static str, path: &Path| {
            disk.lock().unwrap().run(&top, action, path);
            Ok(())
        }
    };
    let store = Checkpoints::new(&place).keep(2).with_hook(hook);
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut run = Run::start(&world)?;
        for save in 0..6 {
            // Once more at the same step, too.
            if save != 3 {
                run.step()?;
            }
            store.save(run.contents())?;
            let disk = disk.lock().unwrap();
            assert!(disk.dirty.is_empty(), "not on the disk: {:?}", disk.dirty);
            // Of what was taken away, files may be left, under names that mean nothing.
            assert!(disk.stale.is_empty() || disk.complete.len() == 2, "not on the disk: {:?}", disk.stale);
        }
        Ok(())
    })
    .unwrap();
    let disk = disk.lock().unwrap();
    let there: BTreeSet<PathBuf> = store.list().unwrap().into_iter().map(|entry| entry.path).collect();
    assert_eq!((&there, there.len()), (&disk.complete, 2));
}
