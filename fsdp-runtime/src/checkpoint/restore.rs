//! A checkpoint back into a model, at any number of ranks.

use std::collections::HashSet;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;

use candle_core::Tensor;

use super::agree::Group;
use super::contents::{MODEL, OPTIMIZER};
use super::error::CheckpointError;
use super::expected::{Expected, frozen_tensors, left_out, mismatch, model_tensors};
use super::index::{INDEX_FILE, MAX_STEPS, Section, StoredDtype};
use super::read::Checkpoint;
use super::state::{ModelRef, OptimizerState};
use super::store::Checkpoints;
use crate::engine::{Ema, Engine, Fsdp, FsdpUnit, Held, buffer_list, overwrite_buffer};
use crate::error::{Error, Result};
use crate::files::Mismatch;
use crate::spec::{LogicalTensor, TensorPiece};

/// What a checkpoint is to be restored into. The checkpoint may be of any number of ranks, strategy, mesh and layout:
/// each rank reads the elements that it holds.
///
/// By default it must have exactly the tensors of what is restored, in their shapes, and in dtypes that lose nothing;
/// see [`Restore::strict`].
pub struct Restore<'a> {
    engine: Arc<Engine>,
    buffers: Vec<(String, &'a Tensor)>,
    optimizer: Option<&'a mut dyn OptimizerState>,
    averages: Vec<(String, &'a mut Ema)>,
    strict: bool,
    frozen: bool,
    verified: bool,
    borrowed: PhantomData<&'a mut ()>,
}

impl std::fmt::Debug for Restore<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Restore({} buffers, {} averages)", self.buffers.len(), self.averages.len())
    }
}

/// A checkpoint that was restored.
#[derive(Debug)]
pub struct Restored {
    /// The checkpoint, for the values that the program has added.
    pub checkpoint: Checkpoint,
    /// What did not fit, by section; empty after a strict restore. What is missing, or of another shape, is as it was.
    pub skipped: Vec<(String, Mismatch)>,
    /// Sections of the checkpoint that nothing was restored from.
    pub unused: Vec<String>,
}

impl<'a> Restore<'a> {
    /// Restores weights and buffers.
    pub fn new<M: FsdpUnit>(model: &'a mut Fsdp<M>) -> Restore<'a> {
        let model: &'a Fsdp<M> = model;
        Restore {
            engine: model.engine().clone(),
            buffers: buffer_list(model.module()),
            optimizer: None,
            averages: Vec::new(),
            strict: true,
            frozen: true,
            verified: false,
            borrowed: PhantomData,
        }
    }

    /// Restores the optimizer too: its state, its counts of steps, its learning rate; and, as training goes on where it
    /// was, the model's step and the seed of its random streams.
    pub fn optimizer(mut self, optimizer: &'a mut dyn OptimizerState) -> Self {
        self.optimizer = Some(optimizer);
        self
    }

    /// Restores an average of the weights from the section `name`.
    pub fn average(mut self, name: &str, average: &'a mut Ema) -> Self {
        self.averages.push((name.to_owned(), average));
        self
    }

    /// With `false`, loads what fits, converts what is of another float dtype, leaves the rest as it is and says so in
    /// [`Restored::skipped`].
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Leaves frozen weights as they are, whether the checkpoint has them or not: the counterpart of
    /// [`Contents::without_frozen`](super::Contents::without_frozen).
    pub fn without_frozen(mut self) -> Self {
        self.frozen = false;
        self
    }

    /// Checks every byte of the checkpoint before anything is changed, each file on one of the ranks: what is damaged is
    /// then refused as what does not fit is, for the time of reading all of it once more.
    pub fn verified(mut self) -> Self {
        self.verified = true;
        self
    }

    /// Restores from the checkpoint in `directory`. Gradients of a step that has begun are forgotten.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// The same on all ranks: if the checkpoint cannot be opened on one of them, or it does not fit, and then nothing
    /// has changed; if its data turn out to be damaged, and then the state is partly the old one: restore another
    /// before training goes on, or ask for [`Restore::verified`].
    pub fn from(self, directory: impl AsRef<Path>) -> Result<Restored> {
        let engine = self.engine.clone();
        engine.settle()?;
        let group = Group::of(&engine);
        let turn = group.turn();
        turn.wait();
        self.in_group(&group, directory.as_ref())
    }

    fn in_group(mut self, group: &Group, directory: &Path) -> Result<Restored> {
        let engine = self.engine.clone();
        let opened = Checkpoint::open(directory);
        let digest = opened.as_ref().map(|checkpoint| checkpoint.digest().to_le_bytes().to_vec());
        let digests = group.gather("the checkpoint", digest.map_err(|error| Error::Usage(error.to_string())));
        // This rank's own error is the typed one.
        let (checkpoint, digests) = match (opened, digests) {
            (Err(error), Err(Error::Usage(_))) => return Err(error.into()),
            (_, Err(error)) => return Err(error),
            (Err(error), _) => return Err(error.into()),
            (Ok(checkpoint), Ok(digests)) => (checkpoint, digests),
        };
        let rank = group.comm.rank();
        if let Some(other) = digests.iter().position(|digest| *digest != digests[rank]) {
            let index = |rank: usize| format!("index {} of `{}`", hex(&digests[rank]), directory.display());
            return Err(Error::RanksDiffer { rank, ours: index(rank), other, theirs: index(other) });
        }

        let (skipped, unused) = self.compare(&checkpoint)?;
        if self.strict && !skipped.is_empty() {
            let path = checkpoint.path().to_path_buf();
            return Err(CheckpointError::Mismatch { path, sections: skipped }.into());
        }
        let values = self.check_values(&checkpoint)?;

        if self.verified {
            let (index, ranks) = (checkpoint.index(), group.comm.size());
            let wrong = index.verify_files(checkpoint.path(), |file| file % ranks == rank, |_| ());
            group.all_done("the checked state", wrong.into_iter().next().map_or(Ok(()), Err))?;
        }

        engine.reset_step()?;
        group.all_done("the restored state", self.read(&checkpoint, &skipped))?;

        if let (Some(optimizer), Some(value)) = (&mut self.optimizer, values.optimizer) {
            optimizer.set_value(ModelRef(&engine), &value);
            let mut state = engine.state.lock();
            (state.step, state.seed) = (checkpoint.step(), checkpoint.index().seed);
        }
        for ((_, average), updates) in self.averages.iter_mut().zip(values.updates) {
            average.set_updates(updates);
        }
        engine.note_event(format!("after restoring a checkpoint of step {}", checkpoint.step()));
        Ok(Restored { checkpoint, skipped, unused })
    }

    /// What is wrong with each section that is to be restored, and which sections are not.
    fn compare(&self, checkpoint: &Checkpoint) -> Result<(Mismatches, Vec<String>)> {
        let engine = &*self.engine;
        let left = if self.frozen { HashSet::new() } else { frozen_tensors(engine) };
        let mut model = model_tensors(engine, &self.buffers);
        model.retain(|tensor| !left.contains(tensor.name.as_str()));
        let mut expected: Vec<(String, Vec<Expected>)> = vec![(MODEL.into(), model)];
        let mut add = |section: String, params: &[usize]| -> Result<()> {
            if expected.iter().any(|(known, _)| *known == section) {
                return Err(Error::Usage(format!("section `{section}` is to be restored into two places")));
            }
            let tensors = params.iter().flat_map(|&param| engine.layout.params[param].tensors());
            let f32 = |tensor: LogicalTensor<'_>| Expected {
                name: tensor.name.to_owned(),
                shape: tensor.shape,
                dtype: StoredDtype::F32,
                exact: false,
            };
            expected.push((section, tensors.map(f32).collect()));
            Ok(())
        };
        if let Some(optimizer) = &self.optimizer {
            optimizer.check_model(ModelRef(engine))?;
            for state in optimizer.states(ModelRef(engine)) {
                add(format!("{OPTIMIZER}.{}", state.name), &state.params)?;
            }
        }
        for (name, average) in &self.averages {
            average.check(engine)?;
            add(name.clone(), &average.held(engine).params)?;
        }
        let stored = &checkpoint.index().tensors;
        let none = Section::new();
        let mut wrong = Vec::new();
        for (section, expected) in &expected {
            let mut mismatch = mismatch(expected, stored.get(section).unwrap_or(&none));
            if section == MODEL {
                mismatch.unexpected.retain(|name| !left.contains(name.as_str()));
            }
            if !mismatch.is_empty() {
                wrong.push((section.clone(), mismatch));
            }
        }
        let unused = stored.keys().filter(|section| !expected.iter().any(|(known, _)| known == *section));
        Ok((wrong, unused.cloned().collect()))
    }

    /// The values that go with what is to be restored.
    fn check_values(&self, checkpoint: &Checkpoint) -> Result<Values> {
        let malformed =
            |reason| CheckpointError::Malformed { path: checkpoint.path().join(INDEX_FILE), reason };
        let optimizer = match &self.optimizer {
            None => None,
            Some(optimizer) => {
                let value: serde_json::Value = checkpoint.value(OPTIMIZER)?;
                optimizer.check_value(&value).map_err(malformed)?;
                Some(value)
            }
        };
        let updates = |(name, _): &(String, _)| -> Result<u64> {
            let updates = checkpoint.value::<u64>(name)?;
            if updates > MAX_STEPS {
                let reason = format!("its average `{name}` has {updates} updates, more than {MAX_STEPS}");
                return Err(malformed(reason).into());
            }
            Ok(updates)
        };
        Ok(Values { optimizer, updates: self.averages.iter().map(updates).collect::<Result<_>>()? })
    }

    /// Fills what this rank holds.
    fn read(&mut self, checkpoint: &Checkpoint, skipped: &[(String, Mismatch)]) -> Result<()> {
        let engine = &*self.engine;
        let left_out = |section: &str| {
            left_out(skipped.iter().find(|(wrong, _)| wrong == section).map(|(_, mismatch)| mismatch))
        };
        let out = left_out(MODEL);
        let frozen = self.frozen;
        engine.fill_weights(|_, spec, elements, values| {
            if !frozen && !spec.key.requires_grad {
                return Ok(());
            }
            for TensorPiece { tensor, elements, at } in spec.pieces(elements) {
                if !out.weight(tensor.name) {
                    checkpoint.read_f32(MODEL, tensor.name, elements.start, &mut values[at])?;
                }
            }
            Ok(())
        })?;
        for (name, tensor) in &self.buffers {
            if !out.buffer(name) && tensor.elem_count() > 0 {
                let bytes = checkpoint.read_bytes(MODEL, name, 0..tensor.elem_count())?;
                let written = overwrite_buffer(tensor, bytes);
                written.map_err(|error| Error::Usage(format!("buffer `{name}`: {error}")))?;
            }
        }
        let fill = |section: &str, pieces: Vec<Held>| -> Result<()> {
            let out = left_out(section);
            for Held { param, elements, memory, .. } in pieces {
                // SAFETY: nothing is under way (`reset_step`), and the state is borrowed mutably for the restore: this
                // thread is its only user.
                let values = unsafe { memory.as_mut_slice::<f32>() };
                for TensorPiece { tensor, elements, at } in engine.layout.params[param].pieces(elements) {
                    if !out.weight(tensor.name) {
                        checkpoint.read_f32(section, tensor.name, elements.start, &mut values[at])?;
                    }
                }
            }
            Ok(())
        };
        if let Some(optimizer) = &self.optimizer {
            for state in optimizer.states(ModelRef(engine)) {
                fill(&format!("{OPTIMIZER}.{}", state.name), state.pieces)?;
            }
        }
        for (name, average) in &self.averages {
            fill(name, average.held(engine).pieces)?;
        }
        Ok(())
    }
}

/// By section.
type Mismatches = Vec<(String, Mismatch)>;

struct Values {
    optimizer: Option<serde_json::Value>,
    updates: Vec<u64>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect()
}

impl Checkpoints {
    /// Restores the latest complete checkpoint; `None` if there is none. The first rank decides which it is.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// As for [`Restore::from`].
    pub fn restore_latest(&self, restore: Restore<'_>) -> Result<Option<Restored>> {
        let engine = restore.engine.clone();
        engine.settle()?;
        let group = Group::of(&engine);
        let turn = group.turn();
        turn.wait();
        let name = group.by_first("the latest checkpoint", || -> Result<Vec<u8>> {
            let latest = self.latest()?;
            let name =
                latest.as_deref().and_then(Path::file_name).map(|name| name.as_encoded_bytes().to_vec());
            Ok(name.unwrap_or_default())
        })?;
        if name.is_empty() {
            return Ok(None);
        }
        let directory = self.directory().join(String::from_utf8_lossy(&name).into_owned());
        restore.in_group(&group, &directory).map(Some)
    }
}
