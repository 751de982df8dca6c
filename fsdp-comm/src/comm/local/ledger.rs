//! Collectives that devices carry out, on record: who has called which, and how far the devices are.

use std::time::Duration;

use super::knot::HINT;
use super::rendezvous::{Endpoint, fail};
use super::world::{Cause, State, returned_early};
use crate::comm::CommError;
use crate::comm::arguments::Caller;
use crate::comm::call::{Call, Op};
use crate::comm::ledger::{Ledger, Stage, Trouble};
use crate::sync::Ordering;

/// A collective that not all devices have done.
pub(super) struct Entry {
    /// Its place among the calls of each rank on the channel, from 1.
    pub(super) number: u64,
    pub(super) call: Call,
    /// Index of the rank that called it first.
    pub(super) first: usize,
    /// How far each rank is; `None` if it has not called it.
    pub(super) stages: Vec<Option<Stage>>,
}

impl Entry {
    /// Indices of the ranks that have not come to a stage.
    fn before(&self, stage: Stage) -> impl Iterator<Item = usize> {
        let stages = self.stages.iter().enumerate();
        stages.filter(move |(_, reached)| reached.is_none_or(|reached| reached < stage)).map(|(i, _)| i)
    }
}

impl State {
    /// The entry of this number.
    pub(super) fn entry(&self, channel: usize, number: u64) -> Option<&Entry> {
        // The latest ones are asked for most.
        self.channels[channel].entries.iter().rev().find(|entry| entry.number == number)
    }

    /// A rank that has called what `index` has not, and the call.
    pub(super) fn waits_in_ledger(&self, channel: usize, index: usize) -> Option<(usize, &Call)> {
        let this = &self.channels[channel];
        let entry = this.entries.iter().find(|entry| entry.stages[index].is_none())?;
        Some((this.members[entry.first], &entry.call))
    }

    /// `called by: [0], missing: [1]; ..`, for a call that does not end, and the ranks to blame.
    fn standing(&self, channel: usize, entry: &Entry, trouble: &Trouble) -> (Vec<usize>, String) {
        let members = &self.channels[channel].members;
        let before = |stage| entry.before(stage).map(|i| members[i]).collect::<Vec<_>>();
        let missing = before(Stage::Called);
        if !missing.is_empty() {
            let called = members.iter().copied().filter(|rank| !missing.contains(rank)).collect::<Vec<_>>();
            let whereabouts = self.whereabouts(channel, missing.clone()).join("; ");
            return (missing.clone(), format!("called by: {called:?}, missing: {missing:?}; {whereabouts}"));
        }
        // How far devices are is known of calls of some age.
        let behind = if matches!(trouble, Trouble::Late) { before(Stage::Started) } else { Vec::new() };
        if !behind.is_empty() && behind.len() < members.len() {
            let message = format!("called by all, but the devices of {behind:?} have not come to it");
            return (behind, message);
        }
        (Vec::new(), "called by all; NCCL_DEBUG=WARN may tell more".to_owned())
    }
}

impl Ledger for Endpoint {
    fn caller(&self) -> Caller {
        Caller { rank: self.rank, index: self.index, size: self.members.len() }
    }

    fn world_rank(&self, index: usize) -> usize {
        self.members.get(index).copied().unwrap_or(index)
    }

    fn timeout(&self) -> Duration {
        self.world.options.timeout
    }

    fn call(&self, mut call: Call) -> Result<u64, CommError> {
        call.notes.extend(self.noted());
        let Endpoint { world, channel, rank, members, index, .. } = self;
        let (channel, rank, index) = (*channel, *rank, *index);
        let mut state = world.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.error(rank));
        }
        let number = self.called.fetch_add(1, Ordering::Relaxed) + 1;
        state.enter(channel, index, number, &call);
        let arrivals = state.channels[channel].arrived.iter().enumerate();
        let mut arrivals = arrivals.filter_map(|(i, arrival)| Some((i, arrival.as_ref()?)));
        let on_the_host = arrivals.find(|(i, arrival)| *i != index && arrival.number == number);
        let entered = state.entry(channel, number).map(|entry| (entry.first, &entry.call));
        let other = on_the_host.map(|(i, arrival)| (i, &arrival.call)).or(entered);
        if let Some((peer, theirs)) = other.filter(|(_, theirs)| !theirs.agrees_with(&call)) {
            let difference = call.differing(rank, theirs, members[peer]);
            let hint = if call.same_name(theirs) { String::new() } else { format!("; {HINT}") };
            let message = format!("{} differs: {difference}{hint}", state.name(channel, number));
            return Err(fail(world, &mut state, rank, Cause::Diverged, message));
        }
        let has_called =
            |i: usize| state.entry(channel, number).is_some_and(|entry| entry.stages[i].is_some());
        let gone =
            (0..members.len()).find(|i| state.ranks[members[*i]].ended && *i != index && !has_called(*i));
        if let Some(gone) = gone.map(|gone| members[gone]) {
            let message = returned_early(&state, gone, rank, &call);
            return Err(fail(world, &mut state, rank, Cause::RankFailed { failed: gone }, message));
        }
        let this = &mut state.channels[channel];
        match this.entries.iter_mut().rev().find(|entry| entry.number == number) {
            Some(entry) => entry.stages[index] = Some(Stage::Called),
            None => {
                let mut stages = vec![None; members.len()];
                stages[index] = Some(Stage::Called);
                this.entries.push_back(Entry { number, call, first: index, stages });
            }
        }
        // Of the host's part it is over: what the host does next need not wait for the device.
        this.leave(index);
        Ok(number)
    }

    fn reached(&self, number: u64, stage: Stage) {
        let mut state = self.world.state.lock();
        let this = &mut state.channels[self.channel];
        let Some(at) = this.entries.iter().position(|entry| entry.number == number) else { return };
        this.entries[at].stages[self.index] = Some(stage);
        if this.entries[at].before(Stage::Done).next().is_none() {
            this.entries.remove(at);
        }
        if stage == Stage::Done {
            state.finished(self.channel, self.index, number);
        }
    }

    fn count(&self, op: Op, bytes_from_peers: usize) {
        self.world.count(self.rank, op, bytes_from_peers);
    }

    fn give_up(&self, number: Option<u64>, trouble: Trouble) -> CommError {
        let Endpoint { world, channel, rank, .. } = self;
        let mut state = world.state.lock();
        let entry = number.and_then(|number| state.entry(*channel, number));
        let (missing, place) = match entry {
            Some(entry) => {
                let (missing, standing) = state.standing(*channel, entry, &trouble);
                let name = state.name(*channel, entry.number);
                (missing, format!(" in {}, {name}; {standing}", entry.call))
            }
            None => {
                let channel = &state.channels[*channel];
                (Vec::new(), format!(" on channel `{}` of ranks {:?}", channel.name, channel.members))
            }
        };
        let (cause, message) = match trouble {
            Trouble::Late => {
                (Cause::TimedOut { missing }, format!("timed out after {:?}{place}", world.options.timeout))
            }
            Trouble::Here(how) => {
                (Cause::RankFailed { failed: *rank }, format!("rank {rank} failed: {how}{place}"))
            }
            Trouble::Elsewhere(how) => {
                let failed = missing.first().copied().unwrap_or(*rank);
                (Cause::RankFailed { failed }, format!("{how}{place}"))
            }
        };
        fail(world, &mut state, *rank, cause, message)
    }

    fn failure(&self) -> Option<CommError> {
        self.world.state.lock().failure.as_ref().map(|failure| failure.error(self.rank))
    }
}
