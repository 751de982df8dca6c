//! What a rank holds of the training state, piece by piece, for checkpoints.

use std::ops::Range;

use crate::buffer::GroupBuffers;
use crate::device::Slice;
use crate::engine::ctx::Ctx;
use crate::engine::ids::{Id, ParamId, Table, UnitId};
use crate::engine::optim::ema::Ema;
use crate::engine::optim::owner::OwnerOptimizer;
use crate::engine::optim::sharded::ShardedOptimizer;
use crate::optim::{Optimizer, OwnerRule};
use crate::spec::Dtype;

/// Elements of a parameter-shaped f32 tensor that this rank holds, and where.
pub(crate) struct Held {
    pub param: ParamId,
    /// Elements of the flattened parameter.
    pub elements: Range<usize>,
    pub memory: Slice,
    /// This rank writes them to a checkpoint: of all ranks that hold an element, one does.
    pub saves: bool,
}

/// Parameter-shaped f32 tensors of one kind, such as the first moments.
pub struct HeldState {
    pub(crate) name: &'static str,
    /// The physical parameters that have one, on any rank.
    pub(crate) params: Vec<ParamId>,
    pub(crate) pieces: Vec<Held>,
}

impl std::fmt::Debug for HeldState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldState").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The steps of an optimizer, as checkpoints keep them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepCounts {
    pub steps: u64,
    pub unit_steps: Table<UnitId, u64>,
}

/// The elements of a bucket that this rank writes to a checkpoint: over all ranks they tile it.
pub(crate) fn saved_range(ctx: &Ctx, bucket: &GroupBuffers) -> Range<usize> {
    let layout = &bucket.layout;
    if layout.outer > 1 {
        return layout.outer_part(ctx.shard_comm.rank(), ctx.outer_comm.rank());
    }
    let (shard, outer) = (&bucket.shard, ctx.outer_comm.size());
    let at = |index: usize| shard.start + index * shard.len() / outer;
    at(ctx.outer_comm.rank())..at(ctx.outer_comm.rank() + 1)
}

/// The elements of a bucket's parameters that this rank writes to a checkpoint.
pub(crate) fn saved_numel(ctx: &Ctx, bucket: &GroupBuffers) -> usize {
    let saved = saved_range(ctx, bucket);
    bucket.layout.items.iter().map(|item| intersection(&item.range(), &saved).len()).sum()
}

/// The dtype in which a parameter's weights are saved.
pub(crate) fn saved_dtype(ctx: &Ctx, param: ParamId) -> Dtype {
    ctx.place_of(param).0.optimizer_weight().data().dtype()
}

/// The weights that this rank writes to a checkpoint: those that the optimizer works on.
pub(crate) fn saved_weights(ctx: &Ctx) -> Vec<Held> {
    let mut pieces = Vec::new();
    for bucket in &ctx.resources.buckets {
        let (saved, weights) = (saved_range(ctx, bucket), bucket.optimizer_weight());
        for item in &bucket.layout.items {
            let range = intersection(&item.range(), &saved);
            if !range.is_empty() {
                let memory = weights.part(range.clone());
                let elements = range.start - item.start..range.end - item.start;
                pieces.push(Held { param: ParamId::new(item.param), elements, memory, saves: true });
            }
        }
    }
    pieces
}

/// Cuts `range` of the bucket `bucket`, which lies in one item that starts at `start` and is kept in `memory`, where
/// this rank begins and ends to be the one that saves.
fn cut(
    ctx: &Ctx,
    bucket: &GroupBuffers,
    (param, start): (ParamId, usize),
    range: Range<usize>,
    memory: &Slice,
) -> Vec<Held> {
    let saved = intersection(&range, &saved_range(ctx, bucket));
    let parts = [(range.start..saved.start, false), (saved.clone(), true), (saved.end..range.end, false)];
    let parts = if saved.is_empty() { [(range.clone(), false), (0..0, false), (0..0, false)] } else { parts };
    let held = |(part, saves): (Range<usize>, bool)| Held {
        param,
        elements: part.start - start..part.end - start,
        memory: memory.range(part.start - range.start..part.end - range.start),
        saves,
    };
    parts.into_iter().filter(|(part, _)| !part.is_empty()).map(held).collect()
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

impl<O: Optimizer> ShardedOptimizer<O> {
    pub(crate) fn held_states(&self, ctx: &Ctx) -> Vec<HeldState> {
        let names = self.rule().state_names().iter().enumerate();
        let state = |(index, name): (usize, &&'static str)| HeldState {
            name,
            params: self.updated_params().to_vec(),
            pieces: self.held_state(ctx, index),
        };
        names.map(state).collect()
    }

    fn held_state(&self, ctx: &Ctx, index: usize) -> Vec<Held> {
        let mut pieces = Vec::new();
        for (bucket, (states, parts)) in ctx.resources.buckets.iter().zip(self.state_parts()) {
            let Some(state) = states.get(index) else { continue };
            for part in parts {
                let (_, item) = ctx.place_of(part.param);
                let memory = state.range(part.state..part.state + part.range.len());
                pieces.extend(cut(ctx, bucket, (part.param, item.start), part.range.clone(), &memory));
            }
        }
        pieces
    }
}

impl<R: OwnerRule, O: Optimizer> OwnerOptimizer<R, O> {
    /// The states of the owners' rule: whole on the owner, which saves them.
    pub(crate) fn held_owner_states(&self) -> Vec<HeldState> {
        let params: Vec<ParamId> = self.owned_states().map(|(param, _)| param).collect();
        let names = self.rule().state_names().iter().enumerate();
        let state = |(index, name): (usize, &&'static str)| {
            let piece = |(param, states): (ParamId, &[Slice])| {
                let memory = states.get(index)?.clone();
                Some(Held { param, elements: 0..memory.len(), memory, saves: true })
            };
            HeldState {
                name,
                params: params.clone(),
                pieces: self.owned_states().filter_map(piece).collect(),
            }
        };
        names.map(state).collect()
    }
}

impl Ema {
    pub(crate) fn held(&self, ctx: &Ctx) -> HeldState {
        let mut state = HeldState { name: "", params: Vec::new(), pieces: Vec::new() };
        for (bucket, shard) in ctx.resources.buckets.iter().zip(self.shards()) {
            let Some(shard) = shard else { continue };
            for item in &bucket.layout.items {
                let (param, owned) = (ParamId::new(item.param), &bucket.owned);
                state.params.push(param);
                let range = intersection(&item.range(), owned);
                if !range.is_empty() {
                    let memory = shard.range(range.start - owned.start..range.end - owned.start);
                    state.pieces.extend(cut(ctx, bucket, (param, item.start), range, &memory));
                }
            }
        }
        state
    }
}
