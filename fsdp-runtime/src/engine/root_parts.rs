//! The root's buckets, each reduced as soon as its gradients are complete.
//!
//! A backward shows after which unit's the last gradient of each bucket has come: that of a head before those of the
//! units, that of an embedding after them. The next backward reduces the bucket there, among the reductions of the units,
//! at the latest place that any rank has seen: so all ranks launch the same in the same order. It is known of gradients
//! that ops write into their [`GradSink`](super::GradSink); those that candle collects come at the end of the backward, and so
//! does their bucket.
//!
//! A backward may do otherwise than the one before. A gradient that comes after its bucket's reduction is kept, and reduced
//! on top at the end, by all ranks.

use candle_core::Tensor;

use super::core::{Engine, ROOT, State};
use crate::comm::{CommError, HostOp, Phase, Tag};
use crate::error::Result;
use crate::pipeline::{Moment, Sync};

/// The end of a backward, as a place.
pub(super) const END: u64 = u64::MAX;

#[derive(Clone, Copy)]
struct Part {
    /// Number of units that have had their backward when it is complete, as all ranks have agreed.
    due: u64,
    /// Number of units that had had their backward when its last gradient of this backward came, on this rank.
    complete: u64,
    /// Gradients of this backward that have come so far.
    writes: u64,
    reduced: bool,
}

/// Where a backward is, and what the one before has shown.
#[derive(Default)]
pub(crate) struct RootParts {
    parts: Vec<Part>,
    /// Units that have had their backward.
    units: u64,
    /// Parameters and gradients that came after their part's reduction.
    late: Vec<(usize, Tensor)>,
}

impl RootParts {
    fn begin(&mut self, parts: usize) {
        self.parts.resize(parts, Part { due: END, complete: END, writes: 0, reduced: false });
        for part in &mut self.parts {
            (part.complete, part.writes, part.reduced) = (END, 0, false);
        }
        self.units = 0;
        self.late.clear();
    }
}

impl Engine {
    /// Whether parts of the root are reduced one by one while the backward runs, which then keeps their order.
    pub(super) fn follows_root(&self, state: &State) -> bool {
        // A step in the backward would change weights that are whole still.
        self.config.strategy.shards_grads()
            && !self.config.step_in_backward
            && state.sync != Sync::Nothing
            && state.reduce.parts(ROOT).len() > 1
    }

    /// A backward begins, the root's sinks being open.
    pub(crate) fn begin_root_parts(&self) {
        let mut state = self.state.lock();
        let parts = state.reduce.parts(ROOT).len();
        state.root_parts.begin(parts);
    }

    /// Gradients of a part that have come in this backward.
    fn writes(&self, state: &State, part: usize) -> u64 {
        let groups = state.reduce.groups_of(part);
        let params = self.units[ROOT].params.iter().map(|&param| &self.slots[param]);
        params.filter(|slot| groups.contains(&slot.group)).map(|slot| slot.sink.writes()).sum()
    }

    /// Notes whether gradients of the root have come since the last call, at `place`.
    pub(super) fn look_at_root(&self, state: &mut State, place: u64) {
        for (index, part) in state.reduce.parts(ROOT).into_iter().enumerate() {
            if state.root_parts.parts[index].reduced {
                continue;
            }
            let writes = self.writes(state, part);
            let known = &mut state.root_parts.parts[index];
            if writes > known.writes {
                (known.complete, known.writes) = (place, writes);
            }
        }
    }

    /// A unit has had its backward: reduces what is due now.
    pub(crate) fn reduce_root_parts(&self, state: &mut State, moment: Moment) -> Result<(), CommError> {
        if !self.follows_root(state) {
            return Ok(());
        }
        state.root_parts.units += 1;
        let units = state.root_parts.units;
        self.look_at_root(state, units);
        for (index, part) in state.reduce.parts(ROOT).into_iter().enumerate() {
            if state.root_parts.parts[index].due == units {
                self.close_part(state, part)?;
                // The outer ranks' reduction is at the end, once nothing more can come.
                state.reduce.reduce_part(&self.groups, part, Sync::Microbatch, moment)?;
                state.root_parts.parts[index].reduced = true;
            }
        }
        Ok(())
    }

    fn close_part(&self, state: &mut State, part: usize) -> Result<(), CommError> {
        let groups = state.reduce.groups_of(part).to_vec();
        let params = self.units[ROOT].params.iter();
        let params = params.filter(|&&param| groups.contains(&self.slots[param].group)).copied();
        params.into_iter().try_for_each(|param| self.close_sink(state, param, true))
    }

    /// Keeps a gradient whose sink is closed, if its part was reduced before it came.
    pub(crate) fn keep_late(&self, param: usize, grad: &Tensor) {
        let mut state = self.state.lock();
        let group = self.slots[param].group;
        let parts = state.reduce.parts(ROOT).into_iter().enumerate();
        let mut reduced = parts.filter(|&(index, part)| {
            state.root_parts.parts.get(index).is_some_and(|part| part.reduced)
                && state.reduce.groups_of(part).contains(&group)
        });
        if reduced.next().is_some() {
            drop(reduced);
            state.root_parts.late.push((param, grad.detach()));
        }
    }

    /// The end of the backward has come, for all units: what came late is reduced, and all ranks agree on where the next
    /// backward reduces what.
    pub(crate) fn end_root_parts(&self) -> Result<()> {
        let mut state = self.state.lock();
        if !self.follows_root(&state) {
            return Ok(());
        }
        let moment = Moment { phase: Phase::Backward, step: state.step };
        let parts = state.reduce.parts(ROOT);
        let late = std::mem::take(&mut state.root_parts.late);
        let is_late = |part: usize| {
            let groups = state.reduce.groups_of(part);
            late.iter().any(|(param, _)| groups.contains(&self.slots[*param].group))
        };
        // A place is small, or the end.
        let place = |place: u64| if place == END { f64::INFINITY } else { place as f64 };
        let complete = |(index, &part): (usize, &usize)| {
            if is_late(part) { f64::INFINITY } else { place(state.root_parts.parts[index].complete) }
        };
        let mut agreed: Vec<f64> = parts.iter().enumerate().map(complete).collect();
        agreed.extend(parts.iter().map(|&part| f64::from(u8::from(is_late(part)))));
        let tag =
            Tag { unit: "places of the root's reductions".into(), phase: Phase::Backward, step: moment.step };
        // Other ranks may be waited for only without the lock.
        drop(state);
        self.comm.host_reduce(tag, HostOp::Max, &mut agreed)?;
        let mut state = self.state.lock();
        let state = &mut *state;
        for (index, &part) in parts.iter().enumerate() {
            let at = agreed[index];
            state.root_parts.parts[index].due = if at.is_finite() { at as u64 } else { END };
            if agreed[parts.len() + index] > 0.0 {
                let targets = state.reduce.open_part(&self.groups, part)?;
                self.open_sinks(ROOT, &targets);
                for (param, grad) in late.iter().filter(|(param, _)| self.slots[*param].sink.is_open()) {
                    self.slots[*param].sink.accumulate_tensor(grad)?;
                }
                self.close_part(state, part)?;
                state.reduce.reduce_part(&self.groups, part, Sync::Microbatch, moment)?;
            }
        }
        Ok(())
    }
}
