//! Saves the state of a run, and resumes from it.

use std::fs;
use std::path::{Path, PathBuf};

use fsdp::Fsdp;
use fsdp::checkpoint::{
    BackgroundSaver, Checkpoint, CheckpointError, Checkpoints, Contents, INDEX_FILE, OptimizerState, Restore,
};
use fsdp::files::FileError;
use fsdp::optim::{LossScaler, LossScalerState};
use serde::{Deserialize, Serialize};

use super::options::TrainError;
use crate::data::{Batches, DataCursor};
use crate::llama::Llama;
use crate::pretrained::Identity;

/// The value of a checkpoint that holds what is the loop's own.
const RUN: &str = "run";

/// Most samples and steps that are believed: more can always be added.
const MAX_COUNT: u64 = i64::MAX as u64;

/// How a run is saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointOptions {
    /// The directory of the run's checkpoints; made if it is not there.
    pub directory: PathBuf,
    /// Steps between two of them. The last step is saved in any case.
    pub every: usize,
    /// How many are kept: the latest ones.
    pub keep: usize,
    /// Go on from the latest one, if there is one, instead of beginning.
    pub resume: bool,
    /// The pretrained model that the run begins with, if it does: it goes on with the same one only. What adapters leave frozen
    /// is then neither saved nor restored: the model has it from there before [`train`](super::train) is called.
    pub base: Option<Identity>,
}

/// A run's checkpoints: opened once, before ranks are started.
#[derive(Debug)]
pub struct RunCheckpoints {
    store: Checkpoints,
    every: usize,
    resume: bool,
    base: Option<Identity>,
    from: Option<(PathBuf, RunState)>,
}

/// What a checkpoint holds besides the state of model and optimizer.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RunState {
    /// Of the loop: those that a loss scale has skipped count too.
    steps: usize,
    /// What comes next.
    data: DataCursor,
    loss_scale: Option<LossScalerState>,
    /// Of adapters, whose tensors do not tell it.
    adapter_scale: Option<f64>,
    /// The pretrained model, which has what is frozen.
    base: Option<Identity>,
}

impl RunCheckpoints {
    /// Makes the directory, or finds the checkpoint that the run goes on from: it may be of any number of ranks and any
    /// strategy, but `data` must serve the same samples in the same order, and the pretrained model must be the same.
    ///
    /// # Errors
    /// An interval or a number of 0; a directory that has checkpoints already, if the run is to begin; one that does not
    /// exist, if it is to go on; a checkpoint that cannot be read, is of other data or of another pretrained model, or was not
    /// saved by [`train`](super::train).
    pub fn open(options: &CheckpointOptions, data: &dyn Batches) -> crate::Result<Self> {
        let CheckpointOptions { directory, every, keep, resume, base } = options;
        for (option, value) in [("the interval of checkpoints", *every), ("the checkpoints to keep", *keep)] {
            if value == 0 {
                return Err(TrainError::Zero { option }.into());
            }
        }
        if *resume && !directory.is_dir() {
            return Err(TrainError::NothingToResume { directory: directory.clone() }.into());
        }
        fs::create_dir_all(directory).map_err(FileError::on("create", directory))?;
        let store = Checkpoints::new(directory).keep(*keep);
        let from = match store.latest()? {
            Some(path) if !resume => {
                return Err(TrainError::HasCheckpoints { directory: directory.clone(), latest: path }.into());
            }
            Some(path) => Some(Self::look(path, data, base.as_ref())?),
            None => None,
        };
        Ok(RunCheckpoints { store, every: *every, resume: *resume, base: base.clone(), from })
    }

    fn look(
        path: PathBuf,
        data: &dyn Batches,
        base: Option<&Identity>,
    ) -> crate::Result<(PathBuf, RunState)> {
        let checkpoint = Checkpoint::open(&path).map_err(fsdp::Error::from)?;
        let state: RunState = checkpoint.value(RUN).map_err(fsdp::Error::from)?;
        for (what, count) in [("samples", state.data.samples), ("steps", state.steps as u64)] {
            if count > MAX_COUNT {
                let reason = format!("its value `{RUN}` has {count} {what}, more than {MAX_COUNT}");
                let path = path.join(INDEX_FILE);
                return Err(fsdp::Error::from(CheckpointError::Malformed { path, reason }).into());
            }
        }
        data.resume(&state.data)?;
        let fingerprint = |base: Option<&Identity>| base.map(|base| base.fingerprint.clone());
        if fingerprint(state.base.as_ref()) != fingerprint(base) {
            return Err(TrainError::OtherBase { before: state.base, now: base.cloned() }.into());
        }
        Ok((path, state))
    }

    /// The steps that the run has taken.
    pub fn first_step(&self) -> usize {
        self.from.as_ref().map_or(0, |(_, state)| state.steps)
    }

    /// Where they are.
    pub fn directory(&self) -> &Path {
        self.store.directory()
    }

    /// The checkpoint that the run goes on from.
    pub fn resumed(&self) -> Option<&Path> {
        self.from.as_ref().map(|(path, _)| path.as_path())
    }

    /// A line that tells where a run that is to go on for `steps` steps in all begins.
    pub fn beginning(&self, steps: usize) -> Option<String> {
        Some(match &self.from {
            None if !self.resume => return None,
            None => format!("no checkpoint in `{}`: the run begins anew", self.store.directory().display()),
            Some((path, state)) if state.steps >= steps => {
                let (path, done) = (path.display(), state.steps);
                format!("the run is complete: `{path}` is of step {done}, and {steps} are asked for")
            }
            Some((path, state)) => format!("going on after step {}, from `{}`", state.steps, path.display()),
        })
    }

    /// Samples that the run has been served so far.
    pub fn served(&self) -> u64 {
        self.from.as_ref().map_or(0, |(_, state)| state.data.samples)
    }

    /// Restores what the run goes on from. Every rank must call it.
    pub(super) fn restore(
        &self,
        model: &mut Fsdp<Llama>,
        optimizer: &mut dyn OptimizerState,
        scaler: Option<&mut LossScaler>,
    ) -> crate::Result<()> {
        let Some((path, state)) = &self.from else { return Ok(()) };
        let scale = adapter_scale(model);
        if state.adapter_scale != scale {
            return Err(TrainError::OtherAdapters { before: state.adapter_scale, now: scale }.into());
        }
        let frozen = saves_frozen(model, self.base.as_ref());
        let restore = Restore::new(model).optimizer(optimizer);
        if frozen { restore } else { restore.without_frozen() }.from(path)?;
        if let (Some(scaler), Some(scale)) = (scaler, state.loss_scale) {
            scaler.set_state(scale);
        }
        Ok(())
    }

    /// One for each rank.
    pub(super) fn saver(&self) -> Saver {
        let (saver, base) = (self.store.clone().in_background(), self.base.clone());
        Saver { saver, every: self.every, base }
    }
}

/// `alpha / rank`.
fn adapter_scale(model: &Fsdp<Llama>) -> Option<f64> {
    model.module().lora().map(|lora| lora.scale())
}

/// Whether checkpoints have the weights that are not trained: beside adapters they are nearly all, and the pretrained model
/// has them.
fn saves_frozen(model: &Fsdp<Llama>, base: Option<&Identity>) -> bool {
    base.is_none() || model.module().lora().is_none()
}

/// Saves while the training goes on.
pub(super) struct Saver {
    saver: BackgroundSaver,
    every: usize,
    base: Option<Identity>,
}

impl Saver {
    /// Saves the state after `steps` steps, if it is time or they are the `last`. Every rank must call it.
    pub fn after(
        &mut self,
        steps: usize,
        last: bool,
        data: DataCursor,
        model: &Fsdp<Llama>,
        optimizer: &dyn OptimizerState,
        scaler: Option<&LossScaler>,
    ) -> crate::Result<()> {
        if !steps.is_multiple_of(self.every) && !last {
            return Ok(());
        }
        let state = RunState {
            steps,
            data,
            loss_scale: scaler.map(LossScaler::state),
            adapter_scale: adapter_scale(model),
            base: self.base.clone(),
        };
        let contents = Contents::of(model).optimizer(optimizer).value(RUN, &state);
        let frozen = saves_frozen(model, self.base.as_ref());
        self.saver.save(if frozen { contents } else { contents.without_frozen() })?;
        Ok(())
    }

    /// Waits until all is on the disk. Every rank must call it.
    pub fn finish(mut self) -> crate::Result<()> {
        self.saver.wait()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fsdp::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::data::{TextDataset, TextOptions};

    #[test]
    fn counts_that_cannot_be_true_are_refused() {
        let options = TextOptions { seq: 4, batch: 2, vocab: 128, seed: 0 };
        let data = TextDataset::from_bytes((b'a'..=b'z').collect(), options).unwrap();
        let open = |steps: u64, samples: u64| {
            let dir = tempfile::tempdir().unwrap();
            let cursor = serde_json::to_value(data.cursor(samples)).unwrap();
            let state: Value =
                json!({"steps": steps, "data": cursor, "loss_scale": null, "adapter_scale": null});
            let model = Param::new(3).fully_shard(&DeviceMesh::single()).unwrap();
            Checkpoints::new(dir.path()).save(Contents::of(&model).value(RUN, &state)).unwrap();
            let directory = dir.path().to_path_buf();
            let options = CheckpointOptions { directory, every: 1, keep: 1, resume: true, base: None };
            RunCheckpoints::open(&options, &data).map(|run| (run.first_step(), run.served()))
        };
        assert_eq!(open(3, 6).unwrap(), (3, 6));
        for (steps, samples, what) in [(3, u64::MAX, "samples"), (u64::MAX, 6, "steps")] {
            let error = open(steps, samples).unwrap_err().to_string();
            let expected = format!("its value `run` has 18446744073709551615 {what}, more than ");
            assert!(error.contains("index.json") && error.contains(&expected), "{error}");
        }
    }
}
