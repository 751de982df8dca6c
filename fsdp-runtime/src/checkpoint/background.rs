//! Saves in the background while training goes on.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::agree::caught;
use super::contents::Contents;
use super::store::Checkpoints;
use crate::device::cpu::CpuStream;
use crate::device::{Event, Stream};
use crate::error::{CheckpointError, Result};
use crate::sync::Mutex;

/// Saves checkpoints in a thread of each rank's: [`save`](BackgroundSaver::save) copies what the rank owns into host
/// memory (accounted as [`Category::Snapshot`](crate::memory::Category::Snapshot)) and returns; training goes on while
/// it is written. One save is under way at a time: the next one waits for it.
///
/// A slow disk holds up the next save, and nothing fails of it. End with [`wait`](BackgroundSaver::wait), which tells how the last save went. A launched rank does not end before the
/// save of a saver that it has dropped, but then nobody learns of an error.
///
/// ```
/// use fsdp_runtime::checkpoint::{Checkpoints, Contents};
/// use fsdp_runtime::{FullyShard, Param, launch};
///
/// # let dir = tempfile::tempdir()?;
/// # let dir = dir.path();
/// launch::local(2, |world| -> fsdp_runtime::Result<()> {
///     let model = Param::new(8).fully_shard(&world.data_parallel_mesh())?;
///     let mut saver = Checkpoints::new(dir).in_background();
///     saver.save(Contents::of(&model))?;
///     // Train on, and in the end:
///     assert!(saver.wait()?.is_some_and(|path| path.ends_with("step-00000000")));
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropped, it does not tell how the save that is under way went"]
pub struct BackgroundSaver {
    store: Checkpoints,
    /// Made by the first save.
    stream: Option<Arc<CpuStream>>,
    under_way: Option<UnderWay>,
}

struct UnderWay {
    over: Arc<dyn Event>,
    outcome: Arc<Mutex<Option<Result<PathBuf>>>>,
}

impl fmt::Debug for BackgroundSaver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackgroundSaver")
            .field("store", &self.store)
            .field("is_busy", &self.is_busy())
            .finish()
    }
}

impl Checkpoints {
    /// Saves in the background from now on.
    pub fn in_background(self) -> BackgroundSaver {
        BackgroundSaver { store: self, stream: None, under_way: None }
    }
}

impl BackgroundSaver {
    /// Where it saves to.
    pub fn store(&self) -> &Checkpoints {
        &self.store
    }

    /// Copies `contents` and begins to save them, after the save before it is over. If the system has no thread for it,
    /// it is complete when this returns.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Those of the save before this one, the same on all ranks. This one has begun all the same.
    pub fn save(&mut self, contents: Contents<'_>) -> Result<()> {
        let earlier = self.wait();
        let prepared = contents.snapshot()?;
        let (group, store) = (prepared.group.clone(), self.store.clone());
        let turn = group.turn();
        let outcome = Arc::new(Mutex::new(None));
        let slot = outcome.clone();
        let save = move || {
            let saved = caught(|| {
                turn.wait();
                store.save_prepared(prepared)
            });
            *slot.lock() = Some(saved);
            drop(turn);
        };
        let spawn = || CpuStream::spawn(format!("rank{}/checkpoint", group.comm.rank()));
        let stream = self.stream.get_or_insert_with(spawn);
        let has_thread = stream.submit(Box::new(|| Ok(()))).is_ok();
        if has_thread {
            stream.submit(Box::new(move || {
                save();
                Ok(())
            }))?;
        } else {
            save();
        }
        self.under_way = Some(UnderWay { over: stream.record(), outcome });
        earlier.map(drop)
    }

    /// Waits until the save that is under way is over, and returns where it is; `None` if there is none.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// As for [`Checkpoints::save`].
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(UnderWay { over, outcome }) = self.under_way.take() else { return Ok(None) };
        let ended = over.synchronize();
        match outcome.lock().take() {
            Some(saved) => saved.map(Some),
            None => {
                ended?;
                Err(CheckpointError::Usage("the save in the background has come to no end".into()).into())
            }
        }
    }

    /// Whether a save is under way. Local.
    pub fn is_busy(&self) -> bool {
        self.under_way.as_ref().is_some_and(|under_way| !under_way.over.is_complete())
    }
}
