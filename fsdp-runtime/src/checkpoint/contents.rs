//! The contents of a checkpoint to save.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::agree::Group;
use super::description::ModelDescription;
use super::expected::frozen_tensors;
use super::finite::is_finite;
use super::held::{self, Held, HeldState, saved_dtype, saved_weights};
use super::index::{StoredDtype, Writer};
use super::state::{ModelRef, OptimizerState};
use crate::device::Slice;
use crate::engine::{Ema, Engine, Fsdp, FsdpUnit, buffer_list};
use crate::error::{CheckpointError, Result};
use crate::memory::{Category, tensor_bytes};

/// Section of the weights and buffers.
pub const MODEL: &str = "model";

/// Name of the value that an optimizer's counters and settings are under, and before the names of its states.
pub(super) const OPTIMIZER: &str = "optimizer";

/// The state that a checkpoint is to hold: what this rank owns of it, and what all ranks know of the whole.
///
/// Nothing is copied: the state is borrowed until it is saved. See [`Checkpoints::save`](super::Checkpoints::save).
#[derive(Debug)]
#[must_use = "nothing is saved until it is given to a save"]
pub struct Contents<'a> {
    engine: Arc<Engine>,
    prepared: Prepared,
    borrowed: PhantomData<&'a ()>,
}

/// The contents of a checkpoint, detached from the model.
#[derive(Debug)]
pub(super) struct Prepared {
    pub group: Group,
    pub seed: u64,
    pub writer: Writer,
    pub model: ModelDescription,
    pub sections: BTreeMap<String, Vec<Declared>>,
    pub pieces: Vec<Piece>,
    pub values: BTreeMap<String, Value>,
    /// What was wrong first; told when all ranks can hear it.
    pub error: Option<CheckpointError>,
}

/// A tensor of the whole model.
#[derive(Clone, Debug)]
pub(super) struct Declared {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: StoredDtype,
}

/// Consecutive elements of a tensor that this rank writes.
#[derive(Debug)]
pub(super) struct Piece {
    pub section: String,
    pub name: String,
    pub start: usize,
    pub len: usize,
    pub memory: Memory,
}

#[derive(Debug)]
pub(super) enum Memory {
    Held(Slice),
    Bytes(Vec<u8>),
}

impl<'a> Contents<'a> {
    /// Weights and buffers of a model: the main weights where there are any, else the model weights.
    pub fn of<M: FsdpUnit>(model: &'a Fsdp<M>) -> Contents<'a> {
        let engine = model.engine().clone();
        let group = Group::of(&engine);
        let (seed, unfinished) = {
            let step = engine.step();
            (step.seed, step.gradients.received.iter().any(|received| *received))
        };
        let prepared = Prepared {
            group,
            seed,
            writer: Writer {
                ranks: engine.ctx.comm.size(),
                mesh: engine.ctx.mesh.to_string(),
                strategy: engine.ctx.config.strategy.to_string(),
                precision: engine.ctx.config.precision.to_string(),
                alignment: format!("{:?}", engine.ctx.config.alignment),
                library: env!("CARGO_PKG_VERSION").into(),
            },
            model: ModelDescription::of(model),
            sections: BTreeMap::new(),
            pieces: Vec::new(),
            values: BTreeMap::new(),
            error: None,
        };
        let mut contents = Contents { engine: engine.clone(), prepared, borrowed: PhantomData };
        let mut declared = Vec::new();
        for param in engine.ctx.params.ids() {
            let spec = engine.ctx.spec(param);
            let dtype = StoredDtype::from(saved_dtype(&engine.ctx, param));
            declared.extend(spec.tensors().into_iter().map(|tensor| Declared {
                name: tensor.name.to_owned(),
                shape: tensor.shape,
                dtype,
            }));
        }
        contents.hold(MODEL, &engine, saved_weights(&engine.ctx));
        for (name, tensor) in buffer_list(model.module()) {
            match tensor_bytes::stored_dtype(tensor)
                .and_then(|dtype| Ok((dtype, tensor_bytes::read(tensor)?)))
            {
                Err(error) => contents.fail(format!("buffer `{name}`: {error}")),
                Ok((dtype, bytes)) => {
                    if engine.ctx.comm.rank() == 0 && !bytes.is_empty() {
                        let (section, len) = (MODEL.to_owned(), tensor.elem_count());
                        let memory = Memory::Bytes(bytes);
                        contents.prepared.pieces.push(Piece {
                            section,
                            name: name.clone(),
                            start: 0,
                            len,
                            memory,
                        });
                    }
                    declared.push(Declared { name, shape: tensor.dims().to_vec(), dtype });
                }
            }
        }
        contents.prepared.sections.insert(MODEL.into(), declared);
        if unfinished {
            contents.fail(
                "a checkpoint is of the state between two steps, but this step has gradients already: save after the \
                 optimizer's step, or forget them with `reset_step`",
            );
        }
        contents
    }

    /// Leaves out the weights that are not trained, for a program that has them from elsewhere: beside low-rank adapters,
    /// the pretrained model is by far the most. To be restored with
    /// [`Restore::without_frozen`](super::Restore::without_frozen).
    pub fn without_frozen(mut self) -> Self {
        let engine = self.engine.clone();
        let frozen = frozen_tensors(&engine);
        if let Some(declared) = self.prepared.sections.get_mut(MODEL) {
            declared.retain(|tensor| !frozen.contains(tensor.name.as_str()));
        }
        let left_out = |piece: &Piece| piece.section == MODEL && frozen.contains(piece.name.as_str());
        self.prepared.pieces.retain(|piece| !left_out(piece));
        self
    }

    fn fail(&mut self, message: impl Into<String>) {
        self.prepared.error.get_or_insert(CheckpointError::Usage(message.into()));
    }

    fn hold(&mut self, section: &str, engine: &Engine, pieces: Vec<Held>) {
        for Held { param, elements, memory, .. } in pieces.into_iter().filter(|piece| piece.saves) {
            for piece in engine.ctx.spec(param).pieces(elements) {
                let memory = Memory::Held(memory.range(piece.at));
                let (section, name) = (section.to_owned(), piece.tensor.name.to_owned());
                let (start, len) = (piece.elements.start, piece.elements.len());
                self.prepared.pieces.push(Piece { section, name, start, len, memory });
            }
        }
    }

    /// Adds tensors of the shapes of parameters, in f32.
    fn add(&mut self, section: String, state: HeldState) {
        let engine = self.engine.clone();
        if self.prepared.sections.contains_key(&section) {
            return self.fail(format!("a checkpoint has one section `{section}`: it was added twice"));
        }
        let tensors = state.params.iter().flat_map(|&param| engine.ctx.spec(param).tensors());
        let declared = tensors.map(|tensor| Declared {
            name: tensor.name.to_owned(),
            shape: tensor.shape,
            dtype: StoredDtype::F32,
        });
        let declared = declared.collect();
        self.hold(&section, &engine, state.pieces);
        self.prepared.sections.insert(section, declared);
    }

    /// Adds the state of the model's optimizer: its buffers, its counts of steps, its learning rate.
    pub fn optimizer(mut self, optimizer: &'a dyn OptimizerState) -> Self {
        if let Err(error) = optimizer.check_model(ModelRef(&self.engine)) {
            self.fail(error.to_string());
            return self;
        }
        for state in optimizer.states(ModelRef(&self.engine)) {
            self.add(format!("{OPTIMIZER}.{}", state.name), state);
        }
        let value = optimizer.value(ModelRef(&self.engine));
        self.insert(OPTIMIZER, value);
        self
    }

    /// Adds an average of the model's weights, as section `name`, and its count of updates as the value `name`.
    pub fn average(mut self, name: &str, average: &'a Ema) -> Self {
        if let Err(error) = average.check(&self.engine.ctx) {
            self.fail(error.to_string());
            return self;
        }
        let state = held::average(average, &self.engine.ctx);
        self.add(name.to_owned(), state);
        self.insert(name, average.updates().into());
        self
    }

    /// Adds small state that is the same on all ranks, under a name of its own: a position in the data, a
    /// [`LossScalerState`](crate::optim::LossScalerState), what a schedule has to remember.
    ///
    /// Numbers must be finite: the index is JSON, which has no others.
    pub fn value(mut self, name: &str, value: &impl Serialize) -> Self {
        match serde_json::to_value(value) {
            Ok(_) if !is_finite(value) => self.fail(format!(
                "value `{name}` cannot be saved: it has a number that is not finite, which JSON does not have; save an \
                 `Option` or its bits"
            )),
            Ok(value) => self.insert(name, value),
            Err(error) => self.fail(format!("value `{name}` cannot be saved: {error}")),
        }
        self
    }

    fn insert(&mut self, name: &str, value: Value) {
        if self.prepared.values.insert(name.to_owned(), value).is_some() {
            self.fail(format!("a checkpoint has one value `{name}`: it was added twice"));
        }
    }

    /// What is to be written, settled: nothing changes it while it is borrowed.
    pub(super) fn prepare(self) -> Result<Prepared> {
        if self.prepared.pieces.iter().any(Piece::is_on_device) {
            // Files are written from memory of the host.
            return self.snapshot();
        }
        self.engine.settle_intact()?;
        Ok(self.prepared)
    }

    /// A copy of it in host memory, which borrows nothing.
    pub(super) fn snapshot(self) -> Result<Prepared> {
        self.engine.settle_intact()?;
        let (account, backend) = (self.engine.ctx.account().clone(), self.engine.ctx.backend.clone());
        let copy = |piece: Piece| -> Result<Piece> {
            let memory = match piece.memory {
                Memory::Bytes(bytes) => Memory::Bytes(bytes),
                Memory::Held(slice) => {
                    // SAFETY: it is written here, before anybody else knows of it, and then only read.
                    let copy =
                        unsafe { account.allocate_on_host(Category::Snapshot, slice.dtype(), slice.len()) }?;
                    // SAFETY: the copy is new and ours alone; nothing is under way (`settle`), and while the state is
                    // borrowed no one changes it.
                    backend.download(&slice, unsafe { copy.as_mut_bytes() })?;
                    Memory::Held(copy)
                }
            };
            Ok(Piece { memory, ..piece })
        };
        let Prepared { pieces, .. } = self.prepared;
        let pieces = pieces.into_iter().map(copy).collect::<Result<_>>()?;
        Ok(Prepared { pieces, ..self.prepared })
    }
}

impl Piece {
    fn is_on_device(&self) -> bool {
        matches!(&self.memory, Memory::Held(slice) if !slice.is_host())
    }
}

impl Memory {
    /// # Safety
    /// While the result lives no one writes what is held.
    pub unsafe fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: the caller's promise.
            Memory::Held(slice) => unsafe { slice.as_bytes() },
            Memory::Bytes(bytes) => bytes,
        }
    }
}
