//! Whole parameters and gradients, gathered one bucket at a time, and the install of optimized weights.

use crate::buffer::{DataParallelBuffer, GroupBuffers};
use crate::comm::{Gather, HostOp, Phase, Tag};
use crate::device::{Slice, cast, read_anywhere};
use crate::engine::core::Engine;
use crate::engine::ctx::Ctx;
use crate::engine::ids::UnitId;
use crate::engine::schedule::Change;
use crate::engine::step::{Locked, Step};
use crate::engine::unit::gradients;
use crate::engine::unit::weights::{settle, settle_intact};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::spec::{Dtype, ParamSpec};

/// Shows every parameter whole, one bucket at a time.
pub(crate) fn visit_weights(
    engine: &Engine,
    mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    engine.ctx.resources.units.ids().try_for_each(|unit| visit_unit_weights(engine, unit, &mut visit))
}

pub(crate) fn visit_unit_weights(
    engine: &Engine,
    unit: UnitId,
    mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    let ctx = &engine.ctx;
    let tag = {
        let step = &mut *engine.step();
        settle_intact(ctx, step)?;
        step.tag("weights", Phase::Setup)
    };
    if ctx.outer_comm.size() > 1 {
        // What only a group reads all must have come to alike.
        ctx.comm.host_barrier(tag.clone())?;
    }
    for &bucket in &ctx.unit(unit).buckets {
        let bucket = &ctx.resources.buckets[bucket];
        visit_bucket(ctx, bucket, bucket.optimizer_weight(), &tag, &mut visit)?;
    }
    Ok(())
}

/// Shows the reduced gradients of every parameter whole, one bucket at a time.
pub(crate) fn visit_gradients(
    engine: &Engine,
    mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    engine.ctx.resources.units.ids().try_for_each(|unit| visit_unit_gradients(engine, unit, &mut visit))
}

pub(crate) fn visit_unit_gradients(
    engine: &Engine,
    unit: UnitId,
    mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    let ctx = &engine.ctx;
    let tag = {
        let step = &mut engine.step();
        gradients::finish(ctx, step)?;
        if !step.units[unit].grads.has_gradient() {
            return Ok(());
        }
        step.tag("gradients", Phase::Optimizer)
    };
    for &bucket in &ctx.unit(unit).buckets {
        let bucket = &ctx.resources.buckets[bucket];
        if let Some(grads) = &bucket.main_grad {
            visit_bucket(ctx, bucket, grads, &tag, &mut visit)?;
        }
    }
    Ok(())
}

fn visit_bucket(
    ctx: &Ctx,
    bucket: &GroupBuffers,
    buffer: &DataParallelBuffer,
    tag: &Tag,
    visit: &mut impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
) -> Result<()> {
    let layout = &bucket.layout;
    let compute = ctx.compute();
    let whole = gather_whole(ctx, bucket, buffer, tag, None)?;
    let values = if whole.dtype() == Dtype::F32 {
        whole
    } else {
        // SAFETY: it is known to this call only, which writes it on the compute stream and reads it when that is done.
        let wide = unsafe { ctx.account().allocate_briefly(Dtype::F32, layout.size) }?;
        cast(compute, &whole, &wide)?;
        wide
    };
    compute.record().synchronize()?;
    for item in &layout.items {
        let visit = |values: &[f32]| visit(&ctx.layout.params[item.param], values);
        // SAFETY: `gather_whole` or this call has made the buffer, nobody else has it, and what wrote it is done, as the
        // event says.
        unsafe { read_anywhere(&*ctx.backend, &values.range(item.range()), visit)?? };
    }
    Ok(())
}

/// The whole of one of a bucket's buffers, in a new one that is counted under `category`, valid in the order of
/// the compute stream. Every rank must call it.
pub(crate) fn gather_whole(
    ctx: &Ctx,
    bucket: &GroupBuffers,
    buffer: &DataParallelBuffer,
    tag: &Tag,
    category: Option<Category>,
) -> Result<Slice> {
    let (layout, account) = (&bucket.layout, ctx.account());
    let shard = if layout.outer > 1 && layout.key.requires_grad {
        let owned = buffer.part(bucket.owned.clone());
        // SAFETY: it is known to this call only: two gathers on the compute stream use it, one after the other.
        let shard = unsafe { account.allocate_briefly(owned.dtype(), layout.shard_len()) }?;
        let part = Gather { send: owned, recv: shard.clone() };
        ctx.outer_comm.all_gather(ctx.compute(), tag.clone(), vec![part])?;
        shard
    } else {
        buffer.shard()
    };
    let dtype = shard.dtype();
    let whole = match category {
        // SAFETY: it is known to this call and to the caller, which both use it in the order of the compute stream.
        Some(category) => unsafe { account.allocate(category, dtype, layout.size) }?,
        // SAFETY: as above.
        None => unsafe { account.allocate_briefly(dtype, layout.size) }?,
    };
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
