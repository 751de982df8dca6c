//! Saves that go on beside the training.

use std::path::PathBuf;
use std::thread::JoinHandle;

use super::contents::Contents;
use super::error::CheckpointError;
use super::store::Checkpoints;
use crate::comm::panic_text;
use crate::error::Result;

/// Saves checkpoints in a thread of each rank's: [`save`](BackgroundSaver::save) copies what the rank owns into host
/// memory (accounted as [`Category::Snapshot`](crate::memory::Category::Snapshot)) and returns; training goes on while
/// it is written. One save is under way at a time: the next one waits for it.
///
/// End with [`wait`](BackgroundSaver::wait). A saver that is dropped with a save under way does not wait for it, as the
/// other ranks may have failed; that checkpoint may then not come to be.
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
#[derive(Debug)]
#[must_use = "dropped, it does not wait for the save that is under way"]
pub struct BackgroundSaver {
    store: Checkpoints,
    under_way: Option<JoinHandle<Result<PathBuf>>>,
}

impl Checkpoints {
    /// Saves in the background from now on.
    pub fn in_background(self) -> BackgroundSaver {
        BackgroundSaver { store: self, under_way: None }
    }
}

impl BackgroundSaver {
    /// Where it saves to.
    pub fn store(&self) -> &Checkpoints {
        &self.store
    }

    /// Copies `contents` and begins to save them, after the save before it is complete.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Those of the save before this one, which is then not begun: the same on all ranks.
    pub fn save(&mut self, contents: Contents<'_>) -> Result<()> {
        self.wait()?;
        let (prepared, store) = (contents.snapshot()?, self.store.clone());
        let name = format!("rank{}/checkpoint", prepared.group.comm.rank());
        let spawned = std::thread::Builder::new().name(name).spawn(move || store.save_prepared(prepared));
        let handle = spawned.map_err(|error| {
            CheckpointError::Usage(format!("no thread can be started to save in the background: {error}"))
        })?;
        self.under_way = Some(handle);
        Ok(())
    }

    /// Waits until the save that is under way is complete, and returns where it is; `None` if there is none.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// As for [`Checkpoints::save`].
    pub fn wait(&mut self) -> Result<Option<PathBuf>> {
        let Some(handle) = self.under_way.take() else { return Ok(None) };
        let outcome = handle.join().unwrap_or_else(|panic| {
            let message = format!("the save in the background panicked: {}", panic_text(&*panic));
            Err(CheckpointError::Usage(message).into())
        });
        outcome.map(Some)
    }

    /// Whether a save is under way. Local.
    pub fn is_busy(&self) -> bool {
        self.under_way.as_ref().is_some_and(|handle| !handle.is_finished())
    }
}
