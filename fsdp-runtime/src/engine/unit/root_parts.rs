//! The root's buckets, each reduced as soon as its gradients are complete.
//!
//! A backward shows after which unit's the last gradient of each bucket has come: that of a head before those of the
//! units, that of an embedding after them. The next backward reduces the bucket there, among the reductions of the units,
//! at the latest place that any rank has seen: so all ranks launch the same in the same order. Only gradients that ops write
//! into their [`GradSink`](crate::engine::GradSink) come that early. Those that candle collects come at the end of the
//! backward, and so does the reduction of their bucket.
//!
//! A backward may do otherwise than the one before. A gradient that comes after its bucket's reduction is kept, and reduced
//! on top at the end, by all ranks.

use candle_core::Tensor;

use crate::comm::{CommError, HostOp, Phase};
use crate::engine::schedule::{Sync, Units};
use crate::engine::unit::gradients::{close_sink, open_sinks};
use crate::engine::{BucketId, Ctx, Locked, ParamId, Step, UnitId};
use crate::error::Result;

/// The end of a backward, as a place.
pub(super) const END: u64 = u64::MAX;

/// Where in a backward the parts of the root are reduced, as all ranks have agreed: after so many units have had theirs.
pub(crate) struct RootOrder {
    due: Vec<u64>,
}

/// What of the root has come in a backward.
pub(crate) struct RootPass {
    /// Empty where the root is reduced as one.
    parts: Vec<Part>,
    /// Units that have had their backward.
    units: u64,
    /// Parameters and gradients that came after their part's reduction.
    late: Vec<(ParamId, Tensor)>,
}

#[derive(Clone, Copy)]
struct Part {
    /// Number of units that had had their backward when its last gradient came, on this rank.
    complete: u64,
    /// Gradients that have come so far.
    writes: u64,
    reduced: bool,
}

impl RootOrder {
    pub(crate) fn of(units: &Units) -> RootOrder {
        RootOrder { due: vec![END; units[UnitId::ROOT].grads.parts.len()] }
    }

    /// A backward begins.
    pub(crate) fn begin(&self) -> RootPass {
        let parts = if self.due.len() > 1 { self.due.len() } else { 0 };
        let part = Part { complete: END, writes: 0, reduced: false };
        RootPass { parts: vec![part; parts], units: 0, late: Vec::new() }
    }
}

/// Whether parts of the root are reduced one by one while the backward runs, which then keeps their order.
fn follows(ctx: &Ctx, step: &Step) -> bool {
    // A step in the backward would change weights that are whole still.
    ctx.config.strategy.shards_grads()
        && !ctx.config.step_in_backward
        && step.sync() != Sync::Nothing
        && step.root_order.due.len() > 1
}

/// The parameters of a part.
fn params<'a>(ctx: &'a Ctx, buckets: &'a [BucketId]) -> impl Iterator<Item = ParamId> + 'a {
    let params = ctx.unit(UnitId::ROOT).params.iter().copied();
    params.filter(|&param| buckets.contains(&ctx.params[param].bucket))
}

/// Notes whether gradients of the root have come since the last call, at `place`.
pub(super) fn look(ctx: &Ctx, step: &mut Step, place: u64) {
    if !follows(ctx, step) {
        return;
    }
    let Step { units, running, .. } = step;
    let Some(pass) = running.backward() else { return };
    for (part, grads) in pass.root.parts.iter_mut().zip(&units[UnitId::ROOT].grads.parts) {
        if part.reduced {
            continue;
        }
        let writes = params(ctx, &grads.buckets).map(|param| ctx.params[param].sink.writes()).sum();
        if writes > part.writes {
            (part.complete, part.writes) = (place, writes);
        }
    }
}

/// A unit has had its backward: reduces what is due now.
pub(super) fn reduce_due(ctx: &Ctx, step: &mut Step) -> Result<(), CommError> {
    if !follows(ctx, step) {
        return Ok(());
    }
    let Some(pass) = step.backward() else { return Ok(()) };
    pass.root.units += 1;
    let units = pass.root.units;
    look(ctx, step, units);
    for part in 0..step.root_order.due.len() {
        if step.root_order.due[part] == units {
            // The outer ranks' reduction is at the end, once nothing more can come.
            reduce_part(ctx, step, part)?;
            if let Some(pass) = step.backward() {
                pass.root.parts[part].reduced = true;
            }
        }
    }
    Ok(())
}

/// Closes the sinks of a part and reduces it.
fn reduce_part(ctx: &Ctx, step: &mut Step, part: usize) -> Result<(), CommError> {
    let buckets = step.units[UnitId::ROOT].grads.parts[part].buckets.clone();
    params(ctx, &buckets).try_for_each(|param| close_sink(ctx, step, param, true))?;
    let moment = step.moment(Phase::Backward);
    let units = &mut step.units;
    step.reduce.reduce_part(units, UnitId::ROOT, part, Sync::Microbatch, moment)
}

/// Keeps a gradient whose sink is closed, if its part was reduced before it came.
pub(super) fn keep_late(ctx: &Ctx, step: &mut Step, param: ParamId, grad: &Tensor) {
    let Step { units, running, .. } = step;
    let Some(pass) = running.backward() else { return };
    let parts = pass.root.parts.iter().zip(&units[UnitId::ROOT].grads.parts);
    let mut reduced = parts.filter(|(part, _)| part.reduced);
    if reduced.any(|(_, grads)| grads.buckets.contains(&ctx.params[param].bucket)) {
        pass.root.late.push((param, grad.detach()));
    }
}

/// The end of the backward has come, for all units: what came late is reduced, and all ranks agree on where the next
/// backward reduces what.
pub(crate) fn end(ctx: &Ctx, step: &mut Locked<'_>) -> Result<()> {
    if !follows(ctx, step) {
        return Ok(());
    }
    let Some(pass) = step.backward() else { return Ok(()) };
    let late = std::mem::take(&mut pass.root.late);
    let complete: Vec<u64> = pass.root.parts.iter().map(|part| part.complete).collect();
    let parts = &step.units[UnitId::ROOT].grads.parts;
    let is_late =
        |part: usize| late.iter().any(|(param, _)| parts[part].buckets.contains(&ctx.params[*param].bucket));
    // A place is small, or the end.
    let place = |part: usize| match complete[part] {
        END => f64::INFINITY,
        _ if is_late(part) => f64::INFINITY,
        place => place as f64,
    };
    let mut agreed: Vec<f64> = (0..parts.len()).map(place).collect();
    agreed.extend((0..parts.len()).map(|part| f64::from(u8::from(is_late(part)))));
    let what = ("places of the root's reductions", Phase::Backward);
    ctx.host_reduce(step, what, HostOp::Max, &mut agreed)?;
    let step = &mut **step;
    let (places, any_late) = agreed.split_at(complete.len());
    for (part, (&at, &any_late)) in places.iter().zip(any_late).enumerate() {
        step.root_order.due[part] = if at.is_finite() { at as u64 } else { END };
        if any_late > 0.0 {
            step.reduce.open_part(&mut step.units, UnitId::ROOT, part)?;
            open_sinks(ctx, step, UnitId::ROOT);
            for (param, grad) in late.iter().filter(|(param, _)| ctx.params[*param].sink.is_open()) {
                ctx.params[*param].sink.accumulate_tensor(grad)?;
            }
            reduce_part(ctx, step, part)?;
        }
    }
    Ok(())
}
