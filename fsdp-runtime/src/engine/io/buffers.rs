//! Buffers, the tensors of a model that are kept but not trained: all ranks start with those of rank 0, and a forward that
//! is run again leaves them alone.

use std::sync::Arc;

use candle_core::Tensor;

use crate::comm::{Communicator, Phase, Tag};
use crate::engine::{Ctx, FsdpUnit, Step, Visitor, Walker};
use crate::error::{Error, Result};
use crate::memory::tensor_bytes::{assign, holds, overwrite, read};

/// The buffers of `model` with their names, in declaration order.
pub(crate) fn buffer_list<M: FsdpUnit>(model: &M) -> Vec<(String, &Tensor)> {
    struct Buffers<'a>(Vec<(String, &'a Tensor)>);

    impl<'a> Visitor<'a> for Buffers<'a> {
        fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
            self.0.push((name.into(), tensor));
        }
    }

    let mut buffers = Buffers(Vec::new());
    model.walk(&mut Walker::new(&mut buffers));
    buffers.0
}

/// What the ranks compare of their buffers before any of their bytes meet.
pub(crate) fn fingerprint<M: FsdpUnit>(model: &M) -> Vec<String> {
    let describe = |(name, tensor): (String, &Tensor)| {
        format!("buffer `{name}` {:?} {}", tensor.dims(), tensor.dtype().as_str())
    };
    buffer_list(model).into_iter().map(describe).collect()
}

/// Overwrites the buffers of every rank, in place, by those of the first. A model without buffers sends nothing.
///
/// # Errors
/// If a buffer is of a dtype that has no whole bytes or, on a device, not contiguous, naming it; those of the exchange.
pub(crate) fn broadcast<M: FsdpUnit>(model: &M, comm: &dyn Communicator) -> Result<()> {
    let buffers = buffer_list(model);
    if buffers.is_empty() || comm.size() == 1 {
        return Ok(());
    }
    let fail = |name: &str, error: candle_core::Error| Error::Usage(format!("buffer `{name}`: {error}"));
    let own = buffers.iter().map(|(name, tensor)| read(tensor).map_err(|error| fail(name, error)));
    let own: Vec<Vec<u8>> = own.collect::<Result<_>>()?;
    let tag = Tag { unit: "buffers".into(), phase: Phase::Setup, step: 0 };
    let sent = if comm.rank() == 0 { own.concat() } else { Vec::new() };
    let mut received = comm.host_gather(tag, sent)?.swap_remove(0).into_iter();
    if comm.rank() == 0 {
        return Ok(());
    }
    for ((name, tensor), own) in buffers.iter().zip(&own) {
        let bytes: Vec<u8> = received.by_ref().take(own.len()).collect();
        // What is the same already may be in use by others.
        if bytes != *own {
            overwrite(tensor, bytes).map_err(|error| fail(name, error))?;
        }
    }
    Ok(())
}

/// What the buffers of a model have held at some time.
#[derive(Clone, Default)]
pub(crate) struct BufferValues(Vec<(Tensor, Arc<Values>)>);

enum Values {
    Host(Vec<u8>),
    Device(Tensor),
}

impl BufferValues {
    /// What they hold now; what has not changed since `earlier` is shared with it. On a device, where the host would have
    /// to wait for an answer, nothing is.
    ///
    /// # Errors
    /// If a buffer is of a dtype that has no whole bytes, and those of candle.
    fn of(buffers: &[Tensor], earlier: &BufferValues) -> candle_core::Result<Self> {
        let values = |(index, tensor): (usize, &Tensor)| {
            if let Some((_, known)) = earlier.0.get(index)
                && !differs(tensor, known)?
            {
                return Ok((tensor.clone(), known.clone()));
            }
            let on_host = tensor.device().is_cpu();
            let values = if on_host { Values::Host(read(tensor)?) } else { Values::Device(tensor.copy()?) };
            Ok((tensor.clone(), Arc::new(values)))
        };
        Ok(BufferValues(buffers.iter().enumerate().map(values).collect::<candle_core::Result<_>>()?))
    }

    fn is_on_host(&self) -> bool {
        self.0.iter().all(|(_, values)| matches!(**values, Values::Host(_)))
    }

    /// Gives them back, in place, to the buffers that hold something else.
    pub(crate) fn restore(&self) -> candle_core::Result<()> {
        for (tensor, values) in &self.0 {
            // What is the same already may be in use by others.
            if differs(tensor, values)? {
                match &**values {
                    Values::Host(bytes) => overwrite(tensor, bytes.clone())?,
                    Values::Device(values) => assign(tensor, values)?,
                }
            }
        }
        Ok(())
    }
}

fn differs(tensor: &Tensor, values: &Values) -> candle_core::Result<bool> {
    let Values::Host(bytes) = values else { return Ok(true) };
    Ok(!holds(tensor, bytes)?)
}

/// What all buffers of the model hold now: a forward that is run again must find them so, wherever in the model they are.
pub(crate) fn buffer_values(ctx: &Ctx, step: &mut Step) -> candle_core::Result<BufferValues> {
    let values = BufferValues::of(&ctx.buffers, &step.seen_buffers)?;
    // Copies on a device are shared with nothing. They go with their forward, so that one which is captured as a graph
    // frees what it has allocated and nothing from before.
    step.seen_buffers = if values.is_on_host() { values.clone() } else { BufferValues::default() };
    Ok(values)
}
