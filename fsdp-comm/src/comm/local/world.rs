//! The world of rank threads: who is where, and the failure that ends all.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::LocalComm;
use super::ledger::Entry;
use super::rendezvous::{Arrival, Endpoint};
use crate::comm::call::{Call, Op};
use crate::comm::traffic::Traffic;
use crate::comm::{CommCounter, CommError, Tag};
use crate::device::Activity;
use crate::sync::{Condvar, Mutex};

/// Settings of a [`LocalWorld`].
#[derive(Clone, Debug)]
pub struct LocalOptions {
    /// How long a rank waits for its peers to arrive in a collective. What they write to a checkpoint or read from it may
    /// take any time.
    pub timeout: Duration,
    /// Whether error messages carry the last collectives of every rank.
    pub trace: bool,
    /// For tests: the seed of short random delays around collectives, on one rank or on all. What ranks compute
    /// must not depend on them.
    pub shake: Option<u64>,
}

impl Default for LocalOptions {
    /// 300 seconds, no trace, no delays.
    fn default() -> Self {
        LocalOptions { timeout: Duration::from_secs(300), trace: false, shake: None }
    }
}

impl LocalOptions {
    /// The defaults, changed by the environment: `FSDP_TIMEOUT_SECS=SECONDS`, `FSDP_TRACE=1`.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if `FSDP_TIMEOUT_SECS` is not a positive number.
    pub fn from_env() -> Result<LocalOptions, CommError> {
        let mut options = LocalOptions::default();
        if let Ok(text) = std::env::var("FSDP_TIMEOUT_SECS") {
            options.timeout = parse_timeout(&text).ok_or_else(|| CommError::Invalid {
                rank: 0,
                message: format!("FSDP_TIMEOUT_SECS must be a positive number of seconds, not `{text}`"),
            })?;
        }
        options.trace = std::env::var("FSDP_TRACE").is_ok_and(|value| value == "1");
        Ok(options)
    }
}

fn parse_timeout(text: &str) -> Option<Duration> {
    let seconds = text.trim().parse().ok().filter(|seconds| *seconds > 0.0)?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Ranks that are threads of this process, and what they share.
///
/// Its first failure is for good: every rank, waiting now or arriving later, gets it.
pub struct LocalWorld {
    pub(super) size: usize,
    pub(super) options: LocalOptions,
    pub(super) state: Mutex<State>,
    /// The threads of each rank, where they are known.
    pub(super) activities: Vec<OnceLock<Arc<Activity>>>,
    traffic: Vec<Traffic>,
}

impl std::fmt::Debug for LocalWorld {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalWorld").field("size", &self.size).finish_non_exhaustive()
    }
}

/// What is behind the world's one lock. It is held for comparisons and counting, never while data moves.
pub(super) struct State {
    pub(super) failure: Option<Failure>,
    pub(super) channels: Vec<Channel>,
    pub(super) ranks: Vec<RankState>,
}

/// One communicator's order of collectives, and the meeting that is under way in it.
pub(super) struct Channel {
    pub(super) name: String,
    /// World ranks, by their indices in the channel. What follows is by index.
    pub(super) members: Arc<[usize]>,
    /// Signalled when anything that a rank of this channel may wait for has changed.
    pub(super) changed: Arc<Condvar>,
    /// Each rank's part in the collective that is assembling.
    pub(super) arrived: Vec<Option<Arrival>>,
    /// The collective in which all ranks are.
    pub(super) meeting: Option<Arc<[Arrival]>>,
    /// Ranks that have reached the present rendezvous.
    pub(super) present: usize,
    /// Rendezvous that were completed.
    pub(super) completed: u64,
    /// Collectives that each rank has left.
    pub(super) left: Vec<u64>,
    /// Threads that wait for an earlier collective of the same rank.
    pub(super) behind: Vec<Behind>,
    last_seen: Vec<Option<Seen>>,
    /// Collectives of devices, oldest first.
    pub(super) entries: VecDeque<Entry>,
    /// Channels made of this one, in order of creation.
    children: Vec<Children>,
    /// How many of them each rank has asked for.
    asked: Vec<usize>,
}

/// A thread that waits until the member `index` has left `number` collectives, and is not counted meanwhile.
pub(super) struct Behind {
    pub(super) index: usize,
    pub(super) number: u64,
    pub(super) activity: Arc<Activity>,
}

/// The channels that one call of `duplicate` or `split`, made by all ranks, gives.
struct Children {
    name: String,
    /// The rank that was first to ask.
    first: usize,
    channels: Vec<usize>,
}

impl Channel {
    fn new(name: String, members: Arc<[usize]>) -> Channel {
        let size = members.len();
        Channel {
            name,
            members,
            changed: Arc::default(),
            arrived: (0..size).map(|_| None).collect(),
            meeting: None,
            present: 0,
            completed: 0,
            left: vec![0; size],
            behind: Vec::new(),
            last_seen: vec![None; size],
            entries: VecDeque::new(),
            children: Vec::new(),
            asked: vec![0; size],
        }
    }

    /// World ranks that have, or have not, arrived in the collective that is assembling.
    pub(super) fn ranks(&self, arrived: bool) -> Vec<usize> {
        let ranks = self.members.iter().zip(&self.arrived);
        ranks.filter(|(_, arrival)| arrival.is_some() == arrived).map(|(rank, _)| *rank).collect()
    }

    /// The member `index` has left one more collective.
    pub(super) fn leave(&mut self, index: usize) {
        self.left[index] += 1;
        let left = self.left[index];
        for behind in self.behind.extract_if(.., |behind| behind.index == index && behind.number <= left) {
            behind.activity.start();
        }
        self.changed.notify_all();
    }

    /// The index of a world rank, if it is a member.
    fn index(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|member| *member == rank)
    }
}

#[derive(Default)]
pub(super) struct RankState {
    /// It has returned, well or not: it arrives nowhere any more.
    pub(super) ended: bool,
    /// Its own code is over: it calls nothing any more.
    pub(super) returned: bool,
    /// Its threads, if they are known.
    pub(super) activity: Option<Arc<Activity>>,
    /// Channels on which it has arrived in a collective that others are missing in.
    pub(super) assembling: Vec<usize>,
    /// Its communicator was handed out.
    taken: bool,
    /// Its last collectives, oldest first.
    ring: VecDeque<Seen>,
}

/// A collective that a rank was seen in.
#[derive(Clone)]
struct Seen {
    channel: usize,
    number: u64,
    op: Op,
    tag: Tag,
    bytes: usize,
    done: bool,
}

/// Collectives remembered of each rank.
const RING: usize = 32;

/// Why the world has failed.
#[derive(Clone)]
pub(super) enum Cause {
    Diverged,
    RankFailed { failed: usize },
    TimedOut { missing: Vec<usize> },
}

/// The first failure.
#[derive(Clone)]
pub(super) struct Failure {
    cause: Cause,
    message: String,
    /// The rank that failed, or else the one that saw it.
    culprit: usize,
}

impl Failure {
    /// As `rank` reports it.
    pub(super) fn error(&self, rank: usize) -> CommError {
        let message = self.message.clone();
        match self.cause.clone() {
            Cause::Diverged => CommError::Diverged { rank, message },
            Cause::RankFailed { failed } => CommError::RankFailed { rank, failed, message },
            Cause::TimedOut { missing } => CommError::TimedOut { rank, missing, message },
        }
    }
}

impl State {
    /// Notes that the member `index` is in collective `number` of a channel.
    pub(super) fn enter(&mut self, channel: usize, index: usize, number: u64, call: &Call) {
        let Call { op, tag, bytes, .. } = call;
        let seen = Seen { channel, number, op: *op, tag: tag.clone(), bytes: *bytes, done: false };
        self.channels[channel].last_seen[index] = Some(seen.clone());
        let rank = self.channels[channel].members[index];
        let ring = &mut self.ranks[rank].ring;
        if ring.len() == RING {
            ring.pop_front();
        }
        ring.push_back(seen);
    }

    /// All ranks have arrived on a channel: its collective comes about, and who waited for that goes on.
    pub(super) fn assemble(&mut self, channel: usize) {
        let Channel { members, arrived, meeting, completed, changed, .. } = &mut self.channels[channel];
        for (member, arrival) in members.iter().zip(arrived.iter_mut()) {
            self.ranks[*member].assembling.retain(|assembling| *assembling != channel);
            if let Some(activity) = arrival.as_mut().and_then(|arrival| arrival.at_rest.take()) {
                activity.start();
            }
        }
        *meeting = Some(arrived.iter_mut().filter_map(Option::take).collect());
        *completed += 1;
        changed.notify_all();
    }

    /// Takes back the arrival of the member `index`.
    pub(super) fn withdraw(&mut self, channel: usize, index: usize) {
        let Channel { members, arrived, .. } = &mut self.channels[channel];
        self.ranks[members[index]].assembling.retain(|assembling| *assembling != channel);
        if let Some(activity) = arrived[index].take().and_then(|arrival| arrival.at_rest) {
            activity.start();
        }
    }

    /// Notes that the member `index` has left its present collective of a channel.
    pub(super) fn leave(&mut self, channel: usize, index: usize) {
        if let Some(seen) = &self.channels[channel].last_seen[index] {
            self.finished(channel, index, seen.number);
        }
    }

    /// Notes that the member `index` is done with a collective of a channel.
    pub(super) fn finished(&mut self, channel: usize, index: usize, number: u64) {
        let Channel { members, last_seen, .. } = &mut self.channels[channel];
        let rank = members[index];
        if let Some(seen) = last_seen[index].as_mut().filter(|seen| seen.number == number) {
            seen.done = true;
        }
        let mut ring = self.ranks[rank].ring.iter_mut().rev();
        if let Some(seen) = ring.find(|seen| seen.channel == channel && seen.number == number) {
            seen.done = true;
        }
    }

    /// Records the world's failure, unless there is one, and wakes all who wait.
    pub(super) fn fail(&mut self, world: &LocalWorld, culprit: usize, cause: Cause, mut message: String) {
        if self.failure.is_some() {
            return;
        }
        if world.options.trace {
            self.append_trace(&mut message);
        }
        self.failure = Some(Failure { cause, message, culprit });
        for channel in &self.channels {
            channel.changed.notify_all();
        }
    }

    /// `collective #2 of channel `gather``, with the ranks of the channel if they are not all.
    pub(super) fn name(&self, channel: usize, number: u64) -> String {
        let Channel { name, members, .. } = &self.channels[channel];
        let of_ranks =
            if members.len() < self.ranks.len() { format!(" of ranks {members:?}") } else { String::new() };
        format!("collective #{number} of channel `{name}`{of_ranks}")
    }

    /// Where a rank was last seen, in a few words.
    pub(super) fn last_seen(&self, rank: usize) -> String {
        match self.ranks[rank].ring.back() {
            Some(seen) => format!("last seen in {}", seen.call()),
            None => "seen in no collective yet".to_owned(),
        }
    }

    /// Where a rank was last seen on every channel that it has used.
    pub(super) fn last_seen_everywhere(&self, rank: usize) -> String {
        let seen = |channel: &'_ Channel| {
            let seen = channel.last_seen[channel.index(rank)?].as_ref()?;
            Some(format!("channel `{}`: {seen}", channel.name))
        };
        let seen: Vec<String> = self.channels.iter().filter_map(seen).collect();
        let mut text = if seen.is_empty() {
            format!("rank {rank} was seen in no collective yet")
        } else {
            format!("rank {rank} was last seen: {}", seen.join("; "))
        };
        if self.ranks[rank].ended {
            text += "; it has returned";
        }
        text
    }

    /// Where the ranks are that are `missing` on `channel`, and those that they wait for themselves, on other
    /// channels: one of them, who waits nowhere, keeps all, or they wait for each other.
    pub(super) fn whereabouts(&self, channel: usize, mut missing: Vec<usize>) -> Vec<String> {
        let (mut told, mut texts) = (vec![channel], Vec::new());
        let mut at = 0;
        while let Some(&rank) = missing.get(at) {
            at += 1;
            texts.push(self.last_seen_everywhere(rank));
            for (index, waits) in self.channels.iter().enumerate() {
                let arrival = waits.index(rank).and_then(|member| waits.arrived[member].as_ref());
                let Some(arrival) = arrival.filter(|_| !told.contains(&index)) else { continue };
                told.push(index);
                let absent = waits.ranks(false);
                texts.push(format!(
                    "rank {rank} itself waits in {}, channel `{}`, for {absent:?}",
                    arrival.call, waits.name
                ));
                let new: Vec<usize> = absent.into_iter().filter(|rank| !missing.contains(rank)).collect();
                missing.extend(new);
            }
        }
        texts
    }

    fn append_trace(&self, message: &mut String) {
        for (rank, state) in self.ranks.iter().enumerate() {
            let _ = write!(message, "\nlast {} collectives of rank {rank}:", state.ring.len());
            for seen in &state.ring {
                let _ = write!(message, "\n  {} {seen}", self.channels[seen.channel].name);
            }
        }
    }
}

impl Seen {
    fn call(&self) -> String {
        let Seen { op, tag, bytes, .. } = self;
        Call::describe(*op, tag, *bytes)
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "#{} {}, {}", self.number, self.call(), if self.done { "done" } else { "waiting" })
    }
}

impl LocalWorld {
    /// A world of `size` ranks, none of which has started.
    pub fn new(size: usize, options: LocalOptions) -> Arc<LocalWorld> {
        Arc::new(LocalWorld {
            size,
            options,
            state: Mutex::new(State {
                failure: None,
                channels: vec![Channel::new("world".to_owned(), (0..size).collect())],
                ranks: (0..size).map(|_| RankState::default()).collect(),
            }),
            activities: (0..size).map(|_| OnceLock::new()).collect(),
            traffic: (0..size).map(|_| Traffic::default()).collect(),
        })
    }

    /// The present thread is the own one of `rank`: the rank's collectives are called by it, and run in it and on the
    /// streams that it makes. So waits of this rank that cannot end become known, until other threads call collectives
    /// for it.
    pub fn begin(self: &Arc<Self>, rank: usize) {
        self.activity(rank).enter();
    }

    /// The threads of `rank`, which are known from now on: one of them runs.
    pub(in crate::comm) fn activity(self: &Arc<Self>, rank: usize) -> Arc<Activity> {
        let world = Arc::downgrade(self);
        let activity = Activity::new(move || {
            if let Some(world) = world.upgrade() {
                world.comes_to_rest(&mut world.state.lock(), rank);
            }
        });
        activity.start();
        if self.activities[rank].set(activity.clone()).is_ok() {
            self.state.lock().ranks[rank].activity = Some(activity.clone());
        }
        activity
    }

    /// The code of `rank` is over, without an error; what is under way on its streams may still go on. To be called in the
    /// thread that began, before [`LocalWorld::finish`].
    pub fn returns(&self, rank: usize) {
        self.state.lock().ranks[rank].returned = true;
        if let Some(activity) = self.activities[rank].get().filter(|activity| activity.is_current()) {
            activity.stop();
        }
    }

    /// The communicator of one rank, on the channel `world`. There is one a rank; others are duplicates of
    /// it.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if the world has no such rank, or its communicator was taken already.
    pub fn communicator(self: &Arc<Self>, rank: usize) -> Result<Arc<LocalComm>, CommError> {
        if rank >= self.size {
            let message = format!("a world of {} ranks has no rank {rank}", self.size);
            return Err(CommError::Invalid { rank, message });
        }
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.ranks[rank].taken, true) {
            let message = "the communicator of this rank was taken already: duplicate it".to_owned();
            return Err(CommError::Invalid { rank, message });
        }
        Ok(Arc::new(LocalComm::new(Endpoint::new(self.clone(), 0, &state.channels[0], rank))))
    }

    /// The next child of `channel` for its member `index`: the channel of these world ranks, which are members
    /// of it.
    pub(super) fn child(
        self: &Arc<Self>,
        channel: usize,
        index: usize,
        name: &str,
        members: Arc<[usize]>,
    ) -> Endpoint {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let parent = &mut state.channels[channel];
        let rank = parent.members[index];
        let name = if channel == 0 { name.to_owned() } else { format!("{}/{name}", parent.name) };
        let number = parent.asked[index];
        parent.asked[index] += 1;
        if number == parent.children.len() {
            parent.children.push(Children { name: name.clone(), first: rank, channels: Vec::new() });
        }
        let parent = &state.channels[channel];
        let Children { name: first_name, first, channels } = &parent.children[number];
        let overlaps = |other: &&usize| {
            let theirs = &state.channels[**other].members;
            theirs.iter().any(|rank| members.contains(rank))
        };
        let known = channels.iter().find(overlaps).copied();
        let difference = match known {
            _ if *first_name != name => {
                Some(format!("rank {first} names it `{first_name}`, rank {rank} `{name}`"))
            }
            Some(known) if state.channels[known].members != members => {
                let theirs = &state.channels[known].members;
                Some(format!(
                    "`{name}` is both of ranks {theirs:?} and, says rank {rank}, of ranks {members:?}"
                ))
            }
            _ => None,
        };
        if let Some(difference) = difference {
            let number = number + 1;
            let message = format!("duplicate #{number} of channel `{}` differs: {difference}", parent.name);
            state.fail(self, rank, Cause::Diverged, message);
        }
        // After a disagreement the world has failed, and so will whatever is tried on this one.
        let known = known.filter(|known| state.channels[*known].members == members);
        let child = known.unwrap_or_else(|| {
            let child = state.channels.len();
            state.channels.push(Channel::new(name, members.clone()));
            state.channels[channel].children[number].channels.push(child);
            child
        });
        let index = members.iter().position(|member| *member == rank).expect("a member asks");
        Endpoint::new(self.clone(), child, &state.channels[child], index)
    }

    /// Tells the world that `rank` has returned without an error. If others wait for it, the world fails.
    ///
    /// The rank's collectives must be finished: its streams dropped and joined, or synchronised.
    pub fn finish(&self, rank: usize) {
        let mut state = self.state.lock();
        state.ranks[rank].ended = true;
        let waiter = (0..state.channels.len()).find_map(|channel| {
            let this = &state.channels[channel];
            let index = this.index(rank)?;
            let arrivals = this.members.iter().zip(&this.arrived);
            let arrival =
                arrivals.filter_map(|(waiter, arrival)| Some((*waiter, &arrival.as_ref()?.call))).next();
            let on_the_host = arrival.filter(|_| this.arrived[index].is_none());
            on_the_host.or_else(|| state.waits_in_ledger(channel, index))
        });
        if let Some((waiter, call)) = waiter {
            let message = returned_early(&state, rank, waiter, call);
            state.fail(self, rank, Cause::RankFailed { failed: rank }, message);
        }
    }

    /// Tells the world that `rank` has failed: `how` follows its name, as in `panicked: boom`. All others get
    /// an error.
    pub fn fail(&self, rank: usize, how: &str) {
        let mut state = self.state.lock();
        let message = format!("rank {rank} {how} ({})", state.last_seen(rank));
        state.fail(self, rank, Cause::RankFailed { failed: rank }, message);
        state.ranks[rank].ended = true;
    }

    /// The rank at the root of the world's failure, or else the one that saw it first, and what happened.
    pub fn failure(&self) -> Option<(usize, String)> {
        self.state.lock().failure.as_ref().map(|failure| (failure.culprit, failure.message.clone()))
    }

    pub(super) fn count(&self, rank: usize, op: Op, bytes_from_peers: usize) {
        self.traffic[rank].count(op, bytes_from_peers);
    }

    pub(super) fn counters(&self, rank: usize) -> Vec<(&'static str, CommCounter)> {
        self.traffic[rank].counters()
    }
}

/// Words for a rank that is not coming.
pub(super) fn returned_early(state: &State, rank: usize, waiter: usize, call: &Call) -> String {
    let last_seen = state.last_seen(rank);
    format!("rank {rank} returned early ({last_seen}), but rank {waiter} waits for it in {call}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_outs_are_positive_seconds() {
        assert_eq!(parse_timeout("30"), Some(Duration::from_secs(30)));
        assert_eq!(parse_timeout(" 0.25 "), Some(Duration::from_millis(250)));
        for text in ["", "0", "-1", "soon", "NaN", "inf"] {
            assert_eq!(parse_timeout(text), None, "{text}");
        }
    }

    #[test]
    fn a_world_has_each_of_its_ranks_once() {
        let world = LocalWorld::new(2, LocalOptions::default());
        assert!(world.communicator(1).is_ok());
        let error = world.communicator(1).err().unwrap();
        assert_eq!(
            error.to_string(),
            "rank 1: the communicator of this rank was taken already: duplicate it"
        );
        let error = world.communicator(2).err().unwrap();
        assert_eq!(error.to_string(), "rank 2: a world of 2 ranks has no rank 2");
    }
}
