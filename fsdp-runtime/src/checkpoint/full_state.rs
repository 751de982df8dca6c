//! The full state of a model as tensors on one rank: all at once for small models, or one at a time.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor};

use super::agree::Group;
use super::expected::{LeftOut, left_out, mismatch, model_tensors};
use super::held::saved_dtype;
use super::index::{Section, StoredTensor};
use crate::comm::{Phase, Tag};
use crate::device::update_anywhere;
use crate::engine::{Fsdp, FsdpUnit, ParamId, Stores, buffer_list};
use crate::error::{CheckpointError, Error, Result};
use crate::files::Mismatch;
use crate::memory::{candle_dtype, tensor_bytes};
use crate::spec::Dtype;

impl<M: FsdpUnit> Fsdp<M> {
    /// Every tensor of the model, whole, by name, on rank 0; `None` on the other ranks. Weights are the main weights
    /// where there are any, else the model weights, in their dtype; tied ones are there once, under their first name;
    /// buffers are there too. For models that one rank's memory can hold.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Those of the gathers.
    ///
    /// ```
    /// use fsdp_runtime::{FullyShard, Init, Param, launch};
    ///
    /// launch::local(2, |world| -> fsdp_runtime::Result<()> {
    ///     let params = (Param::new((2, 3)).with_init(Init::Ones), Param::new(5));
    ///     let mut model = params.fully_shard(&world.data_parallel_mesh())?;
    ///     let state = model.full_state_dict()?;
    ///     if let Some(state) = &state {
    ///         assert_eq!(state["0"].to_vec2::<f32>()?, [[1.0; 3]; 2]);
    ///     }
    ///     model.load_full_state_dict(state.as_ref(), true)?;
    ///     Ok(())
    /// })?;
    /// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
    /// ```
    pub fn full_state_dict(&self) -> Result<Option<BTreeMap<String, Tensor>>> {
        let mut state = BTreeMap::new();
        self.visit_full_state(|name, tensor| {
            state.insert(name.to_owned(), tensor);
            Ok(())
        })?;
        Ok((self.rank() == 0).then_some(state))
    }

    /// Visits the full state one tensor at a time. `visit(name, tensor)` is called on rank 0 only, which holds no more than one
    /// bucket and one tensor. An error of `visit` is an error on all ranks.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Those of `visit` and of the gathers.
    pub fn visit_full_state(&self, mut visit: impl FnMut(&str, Tensor) -> Result<()>) -> Result<()> {
        let engine = self.engine();
        let group = Group::of(engine);
        let turn = group.turn();
        turn.wait();
        let first = group.is_first();
        // After an error the gathers go on, as the other ranks are in them.
        let mut outcome = Ok(());
        let params = engine.ctx.params.ids();
        let by_name: HashMap<&str, ParamId> =
            params.map(|param| (engine.ctx.spec(param).name.as_str(), param)).collect();
        self.visit_weights(|spec, values| {
            if first && outcome.is_ok() {
                let dtype = candle_dtype(saved_dtype(&engine.ctx, by_name[spec.name.as_str()]));
                outcome = spec.tensors().into_iter().try_for_each(|tensor| {
                    let values = Tensor::from_slice(&values[tensor.elements], tensor.shape, &Device::Cpu)?;
                    visit(tensor.name, values.to_dtype(dtype)?)
                });
            }
            Ok(())
        })?;
        if first && outcome.is_ok() {
            outcome = buffer_list(self.module()).into_iter().try_for_each(|(name, tensor)| {
                // Not the tensor itself, which the model may overwrite.
                visit(&name, tensor.copy()?)
            });
        }
        group.all_done("the full state", outcome)
    }

    /// Sets weights and buffers from whole tensors that rank 0 has; the other ranks pass `None`. With `strict` they must
    /// be exactly the model's, in dtypes that lose nothing; otherwise what fits is loaded, other float dtypes are
    /// converted, the rest is left as it is. Returns what did not fit, the same on all ranks.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// If the ranks' `strict` differs, if rank 0 has no tensors, or (with `strict`) they do not fit, and then nothing has changed; those of the
    /// broadcasts.
    pub fn load_full_state_dict(
        &mut self,
        state: Option<&BTreeMap<String, Tensor>>,
        strict: bool,
    ) -> Result<Mismatch> {
        let engine = self.engine().clone();
        let group = Group::of(&engine);
        let turn = group.turn();
        turn.wait();
        group.meet("the load of a full state")?;
        let how = if strict { "all of a full state" } else { "what fits of a full state" };
        group.agree("to load", Ok(BTreeMap::from([("strict".to_owned(), how.to_owned())])))?;
        let buffers = buffer_list(self.module());
        let expected = model_tensors(&engine, &buffers);
        let empty = BTreeMap::new();
        let state = if group.is_first() {
            group.all_done("the full state", state.ok_or_else(no_state))?
        } else {
            group.all_done::<_, Error>("the full state", Ok(&empty))?
        };
        // Only the first rank knows what it has.
        let stored = group.by_first("the tensors of the full state", || section(state))?;
        let stored: Section = serde_json::from_slice(&stored).map_err(unreadable)?;
        let wrong = mismatch(&expected, &stored, &HashMap::new());
        if strict && !wrong.is_empty() {
            return Err(CheckpointError::OtherState { mismatch: Box::new(wrong) }.into());
        }
        engine.reset_step()?;
        let left_out = left_out(Some(&wrong));
        let stores = Stores::begin(&engine)?;
        let params = load_params(&stores, &group, state, &left_out);
        group.all_done("the full state", params)?;
        for (name, tensor) in buffers.iter().filter(|(name, _)| !left_out.buffer(name)) {
            let bytes = group.by_first(name, || tensor_bytes::read(&state[name]))?;
            let loaded = if bytes.is_empty() { Ok(()) } else { tensor_bytes::overwrite(tensor, bytes) };
            group.all_done(name, loaded)?;
        }
        stores.finish()?;
        engine.note_event("after loading a full state".into());
        Ok(wrong)
    }
}

fn no_state() -> Error {
    Error::Usage("rank 0 loads a full state for all ranks: it must have one, but came with `None`".into())
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::Usage(format!("what rank 0 says of its full state cannot be read: {error}"))
}

/// What there is, as a checkpoint would say it.
fn section(state: &BTreeMap<String, Tensor>) -> Result<Vec<u8>> {
    let mut section = Section::new();
    for (name, tensor) in state {
        let dtype = tensor_bytes::stored_dtype(tensor).map_err(|error| param_error(name, &error))?;
        let stored = StoredTensor { dtype, shape: tensor.dims().to_vec(), parts: Vec::new() };
        section.insert(name.clone(), stored);
    }
    serde_json::to_vec(&section).map_err(unreadable)
}

fn param_error(name: &str, error: &candle_core::Error) -> Error {
    Error::Param { param: name.to_owned(), message: error.to_string() }
}

/// Broadcasts one tensor after the other from the first rank; each rank takes what it holds.
fn load_params(
    stores: &Stores<'_>,
    group: &Group,
    state: &BTreeMap<String, Tensor>,
    left_out: &LeftOut<'_>,
) -> Result<()> {
    let engine = stores.engine();
    let compute = engine.ctx.compute();
    // After an error the broadcasts go on, as the other ranks are in them.
    let mut outcome = Ok(());
    for param in engine.ctx.params.ids() {
        for tensor in engine.ctx.spec(param).tensors() {
            if left_out.weight(tensor.name) || tensor.elements.is_empty() {
                continue;
            }
            // SAFETY: it is known to this call only, which writes it before it uses it on the compute stream.
            let values = unsafe { engine.ctx.account().allocate_briefly(Dtype::F32, tensor.elements.len()) }?;
            if group.is_first() && outcome.is_ok() {
                let copy = |out: &mut [f32]| copy_values(&state[tensor.name], out);
                // SAFETY: the buffer is new and ours alone.
                let copied = unsafe { update_anywhere(&*engine.ctx.backend, &values, copy)? };
                outcome = copied.map_err(|error| param_error(tensor.name, &error));
            }
            let tag = Tag { unit: tensor.name.into(), phase: Phase::Checkpoint, step: group.step };
            group.comm.broadcast(compute, tag, values.clone(), 0)?;
            stores.store(param, tensor.elements, &values)?;
        }
    }
    compute.record().synchronize()?;
    outcome
}

fn copy_values(tensor: &Tensor, out: &mut [f32]) -> candle_core::Result<()> {
    out.copy_from_slice(&tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?);
    Ok(())
}
