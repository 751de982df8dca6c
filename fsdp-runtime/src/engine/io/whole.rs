//! Whole parameters and gradients, gathered one bucket at a time, and the install of optimized weights.

use crate::buffer::{BucketBuffers, DataParallelBuffer};
use crate::comm::{CommError, Gather, HostOp, Phase, Tag};
use crate::device::{Slice, cast, read_anywhere};
use crate::engine::schedule::Change;
use crate::engine::unit::gradients;
use crate::engine::unit::weights::{settle, settle_intact};
use crate::engine::{Ctx, Engine, Locked, Step, UnitId};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::spec::{Dtype, ParamSpec};

/// What is shown of parameters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    /// The weights that the optimizer works on.
    Weights,
    /// The reduced gradients of the present step; nothing of units that have none.
    Gradients,
}

/// Shows every parameter whole, of one unit or of all, one bucket at a time.
pub(crate) fn visit(
    engine: &Engine,
    shown: Shown,
    unit: Option<UnitId>,
    mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    let mut units = engine.ctx.resources.units.ids().filter(|&of| unit.is_none_or(|unit| unit == of));
    units.try_for_each(|unit| visit_unit(engine, shown, unit, &mut visit))
}

fn visit_unit(
    engine: &Engine,
    shown: Shown,
    unit: UnitId,
    visit: &mut impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    let ctx = &engine.ctx;
    let tag = {
        let step = &mut engine.step();
        match shown {
            Shown::Weights => settle_intact(ctx, step)?,
            Shown::Gradients => {
                gradients::finish(ctx, step)?;
                if !step.units[unit].grads.has_gradient() {
                    return Ok(());
                }
            }
        }
        match shown {
            Shown::Weights => step.tag("weights", Phase::Setup),
            Shown::Gradients => step.tag("gradients", Phase::Optimizer),
        }
    };
    if shown == Shown::Weights && ctx.outer_comm.size() > 1 {
        // What only a group reads all must have come to alike.
        ctx.comm.host_barrier(tag.clone())?;
    }
    for &bucket in &ctx.unit(unit).buckets {
        let bucket = &ctx.resources.buckets[bucket];
        let buffer = match shown {
            Shown::Weights => Some(bucket.optimizer_weight()),
            Shown::Gradients => bucket.main_grad.as_ref(),
        };
        if let Some(buffer) = buffer {
            visit_bucket(ctx, bucket, buffer, &tag, visit)?;
        }
    }
    Ok(())
}

fn visit_bucket(
    ctx: &Ctx,
    bucket: &BucketBuffers,
    buffer: &DataParallelBuffer,
    tag: &Tag,
    visit: &mut impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    let whole = gather_whole(ctx, bucket, buffer, tag, None)?;
    let values = widened(ctx, whole, None)?;
    ctx.compute().record().synchronize()?;
    for item in &bucket.layout.items {
        let visit = |values: &[f32]| visit(&ctx.layout.params[item.param], values);
        // SAFETY: the calls above have made the buffer, nobody else has it, and what wrote it is done, as the event says.
        unsafe { read_anywhere(&*ctx.backend, &values.range(item.range()), visit)?? };
    }
    Ok(())
}

/// A new buffer that is counted under `category`, if under any.
///
/// # Safety
/// As for [`Account::allocate`](crate::memory::Account::allocate).
unsafe fn room(ctx: &Ctx, category: Option<Category>, dtype: Dtype, len: usize) -> Result<Slice, CommError> {
    match category {
        // SAFETY: the caller's promise.
        Some(category) => unsafe { ctx.account().allocate(category, dtype, len) },
        // SAFETY: the caller's promise.
        None => unsafe { ctx.account().allocate_briefly(dtype, len) },
    }
}

/// The values in f32, in a new buffer unless they are, valid in the order of the compute stream.
pub(crate) fn widened(ctx: &Ctx, values: Slice, category: Option<Category>) -> Result<Slice, CommError> {
    if values.dtype() == Dtype::F32 {
        return Ok(values);
    }
    // SAFETY: it is known to this call and to the caller, which use it on the compute stream, or here when that is done.
    let wide = unsafe { room(ctx, category, Dtype::F32, values.len()) }?;
    cast(ctx.compute(), &values, &wide)?;
    Ok(wide)
}

/// The whole of one of a bucket's buffers, in a new one that is counted under `category`, valid in the order of
/// the compute stream. Every rank must call it.
pub(crate) fn gather_whole(
    ctx: &Ctx,
    bucket: &BucketBuffers,
    buffer: &DataParallelBuffer,
    tag: &Tag,
    category: Option<Category>,
) -> Result<Slice> {
    let layout = &bucket.layout;
    let shard = if layout.outer > 1 && layout.key.requires_grad {
        let owned = buffer.part(bucket.owned.clone());
        // SAFETY: it is known to this call only: two gathers on the compute stream use it, one after the other.
        let shard = unsafe { room(ctx, None, owned.dtype(), layout.shard_len()) }?;
        let part = Gather { send: owned, recv: shard.clone() };
        ctx.outer_comm.all_gather(ctx.compute(), tag.clone(), vec![part])?;
        shard
    } else {
        buffer.shard()
    };
    // SAFETY: it is known to this call and to the caller, which both use it in the order of the compute stream.
    let whole = unsafe { room(ctx, category, shard.dtype(), layout.size) }?;
    let part = Gather { send: shard, recv: whole.clone() };
    ctx.shard_comm.all_gather(ctx.compute(), tag.clone(), vec![part])?;
    Ok(whole)
}

/// Casts the main weights that an optimizer has changed into the model weights; what was gathered is out of date.
pub(crate) fn install_optimized_model_weights(ctx: &Ctx, step: &mut Step) -> Result<()> {
    // Peers may still read the shards for a gather.
    settle(ctx, step)?;
    for bucket in &ctx.resources.buckets {
        if let Some(main) = &bucket.main_weight {
            cast(ctx.compute(), main.data(), &bucket.model_weight.part(main.held()))?;
        }
    }
    Ok(step.weights_changed(ctx, Change::Step)?)
}

pub(crate) fn parameters_without_gradient(ctx: &Ctx, step: &mut Locked<'_>) -> Result<Vec<String>> {
    let received = &step.gradients.received;
    let mut received: Vec<f64> = received.iter().map(|&received| f64::from(u8::from(received))).collect();
    ctx.host_reduce(step, ("received gradients", Phase::Optimizer), HostOp::Max, &mut received)?;
    let missing = ctx.layout.params.iter().zip(received);
    let missing =
        missing.filter(|(spec, received)| spec.key.requires_grad && spec.numel() > 0 && *received == 0.0);
    Ok(missing.map(|(spec, _)| spec.name.clone()).collect())
}

/// Before the first optimizer step: says which trainable parameters got no gradient anywhere.
pub(crate) fn report_missing_gradients(ctx: &Ctx, step: &mut Locked<'_>) -> Result<()> {
    let missing = parameters_without_gradient(ctx, step)?;
    if missing.is_empty() {
        return Ok(());
    }
    let message = format!(
        "no gradient reached these trainable parameters on any rank: {}. An op without a backward may cut the graph above them; if they \
         are meant to be unused, mark them `#[fsdp(frozen)]`",
        missing.join(", ")
    );
    if ctx.config.strict_gradients {
        return Err(Error::Usage(message));
    }
    if ctx.comm.rank() == 0 {
        fsdp_layout::warning::warn(message);
    }
    Ok(())
}
