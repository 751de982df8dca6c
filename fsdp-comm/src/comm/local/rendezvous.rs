//! How ranks meet: a ticket in the order of calls, an arrival that is compared, and a common departure.
//!
//! A collective goes through these stages:
//! 1. *Ticket*, when it is called: its place in the order of this rank's calls on the channel.
//! 2. *Arrival*, when the stream has come to it: the rank publishes its slices and waits until all ranks have. Here and
//!    only here a collective can fail: on a disagreement, a failed rank, a time-out.
//! 3. *Work*: each rank does its own part, reading the slices of its peers in place. All ranks that have met do it,
//!    whatever happens elsewhere in the world.
//! 4. *Departure*: a rank leaves when all have done their work.
//!
//! Because the stages after the arrival cannot be left early, unwinding included, no rank gets its buffers
//! back while a peer still reads them. That is the promise that the accesses in [`super`] rest on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::knot::HINT;
use super::shake::Place;
use super::world::{Behind, Cause, Channel, LocalWorld, State, returned_early};
use crate::comm::CommError;
use crate::comm::call::{Call, Op};
use crate::device::cpu::{ComputeStream, CpuStream};
use crate::device::{Activity, Event, Slice, Stream};
use crate::sync::{Condvar, Instant, Mutex, MutexGuard};

/// What one rank brings into a collective.
pub(super) struct Arrival {
    /// Its place among the rank's calls on the channel, from 1.
    pub(super) number: u64,
    pub(super) call: Call,
    pub(super) payload: Payload,
    /// What the thread is counted in that waits for the others, and is not counted meanwhile.
    pub(super) at_rest: Option<Arc<Activity>>,
}

/// What peers may read until the departure.
#[derive(Default)]
pub(super) struct Payload {
    pub(super) slices: Vec<Slice>,
    pub(super) values: Vec<f64>,
    pub(super) bytes: Vec<u8>,
    /// On a device: the ends of the rank's stream at its arrival and at each rendezvous so far.
    pub(super) events: Mutex<Vec<Arc<dyn Event>>>,
}

/// One rank's end of a channel.
pub(super) struct Endpoint {
    pub(super) world: Arc<LocalWorld>,
    pub(super) channel: usize,
    /// This rank in the world.
    pub(super) rank: usize,
    /// World ranks of the channel, by their indices in it.
    pub(super) members: Arc<[usize]>,
    /// This rank's index in the channel.
    pub(super) index: usize,
    changed: Arc<Condvar>,
    /// This rank's notes here, and on the channels that this one was made of.
    notes: Vec<Arc<Mutex<Arc<str>>>>,
    pub(super) called: AtomicU64,
}

impl Endpoint {
    /// The end of `channel` that belongs to its member `index`.
    pub(super) fn new(world: Arc<LocalWorld>, channel: usize, state: &Channel, index: usize) -> Self {
        let (members, changed) = (state.members.clone(), state.changed.clone());
        let rank = members[index];
        let notes = vec![Arc::new(Mutex::new("".into()))];
        Endpoint { world, channel, rank, members, index, changed, notes, called: AtomicU64::new(0) }
    }

    /// The same, made of `parent`: what is noted there counts here.
    pub(super) fn made_of(mut self, parent: &Endpoint) -> Endpoint {
        self.notes.splice(0..0, parent.notes.iter().cloned());
        self
    }

    /// Notes the rank's state.
    pub(super) fn note(&self, state: &str) {
        if let Some(own) = self.notes.last() {
            *own.lock() = state.into();
        }
    }

    /// What the rank has noted.
    pub(super) fn noted(&self) -> impl Iterator<Item = Arc<str>> {
        self.notes.iter().map(|note| note.lock().clone()).filter(|note| !note.is_empty())
    }

    /// Counts a collective that is done.
    pub(super) fn count(&self, op: Op, bytes_from_peers: usize) {
        self.world.count(self.rank, op, bytes_from_peers);
    }

    /// The threads of this rank, if they are known and the present one is of them.
    fn activity(&self) -> Option<Arc<Activity>> {
        self.world.activities[self.rank].get().filter(|activity| activity.is_current()).cloned()
    }

    /// The rank's collectives run in threads that are not known.
    pub(super) fn admit_stranger(&self) {
        if let Some(activity) = self.world.activities[self.rank].get() {
            activity.admit_stranger();
        }
    }

    /// Whether the rank's threads are known, and the worker of this stream is none of them.
    pub(super) fn is_strange(&self, stream: &dyn Stream) -> bool {
        let Some(activity) = self.world.activities[self.rank].get() else { return false };
        match stream.as_any().downcast_ref::<CpuStream>() {
            Some(stream) => !stream.is_counted_in(activity),
            None => !stream.as_any().is::<ComputeStream>(),
        }
    }

    /// Takes the next place in the order of this rank's calls.
    pub(super) fn ticket(self: &Arc<Self>, mut call: Call) -> Ticket {
        if self.activity().is_none() {
            self.admit_stranger();
        }
        call.notes.extend(self.noted());
        self.shake(Place::Call);
        let number = self.called.fetch_add(1, Ordering::Relaxed);
        Ticket { endpoint: self.clone(), number, call: Some(call) }
    }
}

/// A collective that was called and has not run yet. Dropping it unused fails the world: peers will wait for
/// it.
pub(super) struct Ticket {
    endpoint: Arc<Endpoint>,
    /// Collectives called before on this endpoint.
    number: u64,
    call: Option<Call>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        let Endpoint { world, rank, .. } = &*self.endpoint;
        let message = format!("rank {rank} cannot run {call}: its stream had failed before");
        world.state.lock().fail(world, *rank, Cause::RankFailed { failed: *rank }, message);
    }
}

impl Ticket {
    /// Waits for this rank's earlier collectives of the channel, publishes `payload`, and waits for the
    /// peers.
    pub(super) fn meet(mut self, payload: Payload) -> Result<Meeting, CommError> {
        let endpoint = self.endpoint.clone();
        let Some(call) = self.call.take() else {
            unreachable!("only `meet` takes the call, and `self` with it")
        };
        let Endpoint { world, channel, rank, members, index, changed, .. } = &*endpoint;
        let (channel, rank, index, number) = (*channel, *rank, *index, self.number + 1);
        endpoint.shake(Place::Arrival);
        let timeout = (!call.patient).then_some(world.options.timeout);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = world.state.lock();

        let behind = |state: &State| state.channels[channel].left[index] < self.number;
        let own = endpoint.activity();
        if let Some(activity) = own.clone().filter(|_| behind(&state) && state.failure.is_none()) {
            let at_rest = activity.stop_in_silence();
            state.channels[channel].behind.push(Behind { index, number: self.number, activity });
            if at_rest {
                world.comes_to_rest(&mut state, rank);
            }
        }
        while behind(&state) && state.failure.is_none() {
            if !wait(changed, &mut state, deadline) && behind(&state) {
                let message = format!(
                    "timed out after {:?} in {call}, {}: it waits for an earlier collective of the same rank on \
                     this channel; missing: [{rank}]; {}",
                    world.options.timeout,
                    state.name(channel, number),
                    state.last_seen_everywhere(rank),
                );
                state.fail(world, rank, Cause::TimedOut { missing: vec![rank] }, message);
            }
        }
        if let Some(failure) = &state.failure {
            let error = failure.error(rank);
            let own = |behind: &mut Behind| behind.index == index && behind.number == self.number;
            state.channels[channel].behind.extract_if(.., own).for_each(|behind| behind.activity.start());
            return Err(error);
        }

        state.enter(channel, index, number, &call);
        let arrivals = state.channels[channel].arrived.iter().enumerate();
        let first = arrivals.filter_map(|(i, arrival)| Some((i, &arrival.as_ref()?.call))).next();
        // A peer may be in one that only devices take part in.
        let other = first.or_else(|| state.entry(channel, number).map(|entry| (entry.first, &entry.call)));
        if let Some((peer, other)) = other.filter(|(_, other)| !other.agrees_with(&call)) {
            let difference = call.differing(rank, other, members[peer]);
            let hint = if call.same_name(other) { String::new() } else { format!("; {HINT}") };
            let message = format!("{} differs: {difference}{hint}", state.name(channel, number));
            return Err(fail(world, &mut state, rank, Cause::Diverged, message));
        }
        let absent =
            |i: &usize| state.ranks[members[*i]].ended && state.channels[channel].arrived[*i].is_none();
        if let Some(gone) = (0..members.len()).filter(|i| *i != index).find(absent) {
            let gone = members[gone];
            let message = returned_early(&state, gone, rank, &call);
            return Err(fail(world, &mut state, rank, Cause::RankFailed { failed: gone }, message));
        }

        // On a device the departure is two: one tells the end of each rank's stream, which the other ranks wait for.
        let remaining = call.op.rendezvous() + usize::from(call.device.is_some());
        let arrivals = &mut state.channels[channel];
        arrivals.arrived[index] = Some(Arrival { number, call, payload, at_rest: None });
        let completed = arrivals.completed;
        if arrivals.arrived.iter().all(Option::is_some) {
            state.assemble(channel);
        } else {
            let at_rest = own.as_ref().is_some_and(|activity| activity.stop_in_silence());
            if let Some(arrival) = &mut state.channels[channel].arrived[index] {
                arrival.at_rest = own;
            }
            state.ranks[rank].assembling.push(channel);
            if at_rest {
                world.comes_to_rest(&mut state, rank);
            }
        }
        loop {
            // A meeting that came about is held, even if the world has failed since: the peers count on it.
            if state.channels[channel].completed != completed {
                break;
            }
            if let Some(failure) = &state.failure {
                let error = failure.error(rank);
                state.withdraw(channel, index);
                return Err(error);
            }
            // Peers may have come between the deadline and this thread's having the lock again.
            if !wait(changed, &mut state, deadline) && state.channels[channel].completed == completed {
                let message = timed_out(&endpoint, &state, number);
                let missing = state.channels[channel].ranks(false);
                state.fail(world, rank, Cause::TimedOut { missing }, message);
            }
        }
        let arrivals = state.channels[channel].meeting.clone();
        drop(state);
        Ok(Meeting { endpoint, arrivals, remaining })
    }
}

/// Waits for a change; false if the deadline has passed.
fn wait(changed: &Condvar, state: &mut MutexGuard<'_, State>, deadline: Option<Instant>) -> bool {
    match deadline {
        Some(deadline) => !changed.wait_until(state, deadline).timed_out(),
        None => {
            changed.wait(state);
            true
        }
    }
}

/// Fails the world and returns what `rank` reports: this, or the failure that came first.
pub(super) fn fail(
    world: &LocalWorld,
    state: &mut State,
    rank: usize,
    cause: Cause,
    message: String,
) -> CommError {
    let culprit = match cause {
        Cause::RankFailed { failed } => failed,
        _ => rank,
    };
    state.fail(world, culprit, cause, message.clone());
    match &state.failure {
        Some(failure) => failure.error(rank),
        None => CommError::Diverged { rank, message },
    }
}

fn timed_out(endpoint: &Endpoint, state: &State, number: u64) -> String {
    let Endpoint { world, channel, index, .. } = endpoint;
    let arrivals = &state.channels[*channel];
    let (arrived, missing) = (arrivals.ranks(true), arrivals.ranks(false));
    let call = arrivals.arrived[*index].as_ref().map(|arrival| arrival.call.to_string()).unwrap_or_default();
    format!(
        "timed out after {:?} in {call}, {}; arrived: {arrived:?}, missing: {missing:?}; {}",
        world.options.timeout,
        state.name(*channel, number),
        state.whereabouts(*channel, missing.clone()).join("; "),
    )
}

/// A collective in which all ranks have arrived. Dropping it departs: it blocks until all have done their
/// work.
pub(super) struct Meeting {
    endpoint: Arc<Endpoint>,
    /// `None` only on the way out.
    arrivals: Option<Arc<[Arrival]>>,
    remaining: usize,
}

impl Meeting {
    /// What each rank brought, by its index in the channel.
    pub(super) fn arrivals(&self) -> &[Arrival] {
        self.arrivals.as_deref().unwrap_or_default()
    }

    /// This rank's index in the channel.
    pub(super) fn index(&self) -> usize {
        self.endpoint.index
    }

    /// The rank in the world of an index in the channel.
    pub(super) fn world_rank(&self, index: usize) -> usize {
        self.endpoint.members[index]
    }

    /// What the rank of this index brought.
    pub(super) fn payload(&self, index: usize) -> &Payload {
        &self.arrivals()[index].payload
    }

    /// Waits until all ranks are here.
    pub(super) fn rendezvous(&mut self) {
        let Endpoint { world, channel, members, index, changed, .. } = &*self.endpoint;
        let mut state = world.state.lock();
        self.remaining -= 1;
        let departing = self.remaining == 0;
        let meeting = &mut state.channels[*channel];
        meeting.present += 1;
        let completed = meeting.completed;
        if meeting.present == members.len() {
            meeting.present = 0;
            meeting.completed += 1;
            if departing {
                // All have given up theirs: this frees what the ranks brought, before any of them leaves.
                meeting.meeting = None;
            }
            changed.notify_all();
        }
        // No deadline: the peers that are missing here are at work, and work ends.
        while state.channels[*channel].completed == completed {
            changed.wait(&mut state);
        }
        if departing {
            state.channels[*channel].leave(*index);
            state.leave(*channel, *index);
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        while self.remaining > 1 {
            // Only if this rank's work panicked: the peers must not wait for it.
            self.rendezvous();
        }
        self.arrivals = None;
        self.rendezvous();
    }
}
