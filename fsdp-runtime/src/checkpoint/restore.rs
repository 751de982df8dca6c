//! Restores a checkpoint into a model, on any number of ranks.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::Tensor;

use super::agree::Group;
use super::contents::{MODEL, OPTIMIZER};
use super::description::ModelDescription;
use super::expected::left_out;
use super::fit::Fit;
use super::held::{self, Held};
use super::read::Checkpoint;
use super::state::{ModelRef, OptimizerState};
use super::store::Checkpoints;
use crate::device::update_anywhere;
use crate::engine::{Ema, Engine, Fsdp, FsdpUnit, buffer_list, fill_weights};
use crate::error::{CheckpointError, Error, Result};
use crate::files::Mismatch;
use crate::memory::tensor_bytes::overwrite;
use crate::spec::TensorPiece;

/// What a checkpoint is to be restored into. The checkpoint may be of any number of ranks, strategy, mesh and layout:
/// each rank reads the elements that it holds.
///
/// By default it must have exactly the tensors of what is restored, in their shapes, and in dtypes that lose nothing, and be
/// of a model whose enums are the same variants, whose parameters are tied as they are, and whose buffers are the same ones;
/// see [`Restore::strict`].
#[must_use = "nothing is restored until it is told from where"]
pub struct Restore<'a> {
    pub(super) engine: Arc<Engine>,
    pub(super) model: ModelDescription,
    pub(super) buffers: Vec<(String, &'a Tensor)>,
    pub(super) optimizer: Option<&'a mut dyn OptimizerState>,
    pub(super) averages: Vec<(String, &'a mut Ema)>,
    pub(super) strict: bool,
    pub(super) frozen: bool,
    pub(super) untie: bool,
    pub(super) verified: bool,
    /// What was wrong with how it was asked for.
    error: Option<String>,
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
    /// Tensors of another variant or kind whose name and shape fit are restored.
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
            model: ModelDescription::of(model),
            buffers: buffer_list(model.module()),
            optimizer: None,
            averages: Vec::new(),
            strict: true,
            frozen: true,
            untie: false,
            verified: false,
            error: None,
            borrowed: PhantomData,
        }
    }

    /// Restores the optimizer too: its state, its counts of steps, its learning rate; and, as training goes on where it
    /// was, the model's step and the seed of its random streams.
    pub fn optimizer(mut self, optimizer: &'a mut dyn OptimizerState) -> Self {
        if self.optimizer.replace(optimizer).is_some() {
            self.error.get_or_insert(
                "a model is restored with one optimizer: `Restore::optimizer` was called twice".into(),
            );
        }
        self
    }

    /// Restores an average of the weights from the section `name`.
    pub fn average(mut self, name: &str, average: &'a mut Ema) -> Self {
        self.averages.push((name.to_owned(), average));
        self
    }

    /// With `false`, loads what fits, converts what is of another float dtype, leaves the rest as it is and says so in
    /// [`Restored::skipped`]. Where the checkpoint has no optimizer or another one, the optimizer is left as it is, and
    /// with it the model's step and seed; where it has no such average, the average.
    pub fn strict(mut self, strict: bool) -> Self {
        self.strict = strict;
        self
    }

    /// Fills each tensor that was tied to another one when it was saved, and is not tied in the model, from the one that
    /// both were, with its share of the optimizer's state and the averages. Without it such a model is refused.
    pub fn untied(mut self) -> Self {
        self.untie = true;
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
    /// All ranks get the same error. Nothing has changed if the ranks ask for different checkpoints, if one of them cannot open
    /// it, or if it does not fit. If its data are damaged, the state may be partly restored: restore another checkpoint before
    /// training goes on, or ask for [`Restore::verified`] beforehand.
    pub fn from(mut self, directory: impl AsRef<Path>) -> Result<Restored> {
        let engine = self.engine.clone();
        engine.settle()?;
        let group = Group::of(&engine);
        let turn = group.turn();
        turn.wait();
        group.meet("a restore")?;
        self.in_group(&group, directory.as_ref())
    }

    fn in_group(&mut self, group: &Group, directory: &Path) -> Result<Restored> {
        let engine = self.engine.clone();
        group.agree(
            "to restore",
            self.error.take().map_or_else(|| Ok(self.parts()), |error| Err(CheckpointError::Usage(error))),
        )?;
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

        let fit = group.all_done("how the checkpoint fits", self.compare(&checkpoint))?;

        if self.verified {
            let (index, ranks) = (checkpoint.index(), group.comm.size());
            let wrong = index.verify_files(checkpoint.path(), |file| file % ranks == rank, |_| ());
            group.all_done("the checked state", wrong.into_iter().next().map_or(Ok(()), Err))?;
        }

        engine.reset_step()?;
        group.all_done("the restored state", self.read(&checkpoint, &fit))?;
        let Fit { optimizer, updates, skipped, unused, .. } = fit;

        if let (Some(optimizer), Some(value)) = (&mut self.optimizer, optimizer) {
            optimizer.set_value(ModelRef(&engine), &value);
            engine.step().resume(checkpoint.step(), checkpoint.index().seed);
        }
        for ((_, average), updates) in self.averages.iter_mut().zip(updates) {
            if let Some(updates) = updates {
                average.set_updates(updates);
            }
        }
        engine.note_event(format!("after restoring a checkpoint of step {}", checkpoint.step()));
        Ok(Restored { checkpoint, skipped, unused })
    }

    /// Fills what this rank holds.
    fn read(&self, checkpoint: &Checkpoint, fit: &Fit) -> Result<()> {
        let engine = &*self.engine;
        let left_out = |section: &str| {
            left_out(fit.skipped.iter().find(|(wrong, _)| wrong == section).map(|(_, mismatch)| mismatch))
        };
        let out = left_out(MODEL);
        let frozen = self.frozen;
        fill_weights(engine, None, |_, spec, elements, values| {
            if !frozen && !spec.key.requires_grad {
                return Ok(());
            }
            for TensorPiece { tensor, elements, at } in spec.pieces(elements) {
                if !out.weight(tensor.name) {
                    checkpoint.read_f32(MODEL, fit.saved(tensor.name), elements.start, &mut values[at])?;
                }
            }
            Ok(())
        })?;
        for (name, tensor) in &self.buffers {
            if !out.buffer(name) && tensor.elem_count() > 0 {
                let bytes = checkpoint.read_bytes(MODEL, name, 0..tensor.elem_count())?;
                let written = overwrite(tensor, bytes);
                written.map_err(|error| Error::Usage(format!("buffer `{name}`: {error}")))?;
            }
        }
        let fill = |section: &str, pieces: Vec<Held>| -> Result<()> {
            let out = left_out(section);
            for Held { param, elements, memory, .. } in pieces {
                let fill = |values: &mut [f32]| -> Result<()> {
                    for TensorPiece { tensor, elements, at } in engine.ctx.spec(param).pieces(elements) {
                        if !out.weight(tensor.name) {
                            let saved = fit.saved(tensor.name);
                            checkpoint.read_f32(section, saved, elements.start, &mut values[at])?;
                        }
                    }
                    Ok(())
                };
                // SAFETY: nothing is under way (`reset_step`), and the state is borrowed mutably for the restore: this
                // thread is its only user.
                unsafe { update_anywhere(&*engine.ctx.backend, &memory, fill)?? };
            }
            Ok(())
        };
        if let Some(optimizer) = self.optimizer.as_ref().filter(|_| fit.optimizer.is_some()) {
            for state in optimizer.states(ModelRef(engine)) {
                fill(&format!("{OPTIMIZER}.{}", state.name), state.pieces)?;
            }
        }
        for ((name, average), updates) in self.averages.iter().zip(&fit.updates) {
            if updates.is_some() {
                fill(name, held::average(average, &engine.ctx).pieces)?;
            }
        }
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect()
}

impl Checkpoints {
    /// Restores the latest checkpoint; `None` if there is none. The first rank decides which it is. It may be of a run that
    /// goes on: if that removes it meanwhile, the next one is restored.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// As for [`Restore::from`].
    pub fn restore_latest(&self, mut restore: Restore<'_>) -> Result<Option<Restored>> {
        let engine = restore.engine.clone();
        engine.settle()?;
        let group = Group::of(&engine);
        let turn = group.turn();
        turn.wait();
        group.meet("a restore")?;
        let mut latest = self.agree_on_latest(&group)?;
        while let Some(directory) = latest {
            let error = match restore.in_group(&group, &directory) {
                Err(error @ Error::Checkpoint(_)) => error,
                outcome => return outcome.map(Some),
            };
            let is_gone = || Ok::<_, Error>(vec![u8::from(!directory.exists())]);
            if group.by_first("whether the checkpoint is gone", is_gone)? != [1] {
                return Err(error);
            }
            latest = Some(self.agree_on_latest(&group)?.ok_or(error)?);
        }
        Ok(None)
    }

    /// The latest checkpoint, in this rank's view of the directory.
    fn agree_on_latest(&self, group: &Group) -> Result<Option<PathBuf>> {
        let name = group.by_first("the latest checkpoint", || -> Result<Vec<u8>> {
            let latest = self.latest()?;
            let name = latest.as_deref().and_then(Path::file_name);
            Ok(name.map(|name| name.as_encoded_bytes().to_vec()).unwrap_or_default())
        })?;
        Ok((!name.is_empty()).then(|| self.directory().join(String::from_utf8_lossy(&name).into_owned())))
    }
}
