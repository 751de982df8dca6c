//! Ranks are threads of this process.
//!
//! A collective moves no byte through a staging buffer: when all ranks have met, each one does its own part
//! at the same time as the others, reading the slices of its peers where they are (`rendezvous.rs` says why
//! that is sound). Sums are taken in rank order, so that every run gives the same bits.

mod knot;
mod ledger;
mod reduce;
mod rendezvous;
mod shake;
mod shared_device;
mod site;
mod world;

use std::sync::Arc;

pub use self::world::{LocalOptions, LocalWorld};

#[cfg(target_os = "linux")]
pub(super) use self::{reduce::sum_into, site::copy};

use self::rendezvous::{Endpoint, Meeting, Payload};
use self::shake::Place;
use self::site::{Host, Site};
use super::arguments::{Caller, same_place, share};
use super::call::Call;
use super::ledger::Control;
use super::{Accumulate, CommCounter, CommError, Communicator, Exchange, Gather, HostOp, Reduce, Tag};
use crate::device::{Slice, Stream};

/// A rank's communicator in a [`LocalWorld`], or a duplicate of it.
///
/// Calls take their place in the channel's order when they are made, whatever stream they run on.
pub struct LocalComm {
    endpoint: Arc<Endpoint>,
}

impl std::fmt::Debug for LocalComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalComm")
            .field("rank", &self.endpoint.rank)
            .field("members", &self.endpoint.members)
            .finish_non_exhaustive()
    }
}

impl LocalComm {
    fn new(endpoint: Endpoint) -> LocalComm {
        LocalComm { endpoint: Arc::new(endpoint) }
    }

    fn caller(&self) -> Caller {
        let Endpoint { rank, index, members, .. } = &*self.endpoint;
        Caller { rank: *rank, index: *index, size: members.len() }
    }

    /// Enqueues `call`: peers may read `payload` while `work` runs; `from_peers` bytes come from them.
    fn enqueue(
        &self,
        stream: &dyn Stream,
        call: Call,
        payload: Payload,
        from_peers: usize,
        work: impl FnOnce(&dyn Site, &mut Meeting) -> Result<(), CommError> + Send + 'static,
    ) -> Result<(), CommError> {
        if let Some(stream) = stream.on_device() {
            return self.enqueue_on_device(stream, call, payload, from_peers, work);
        }
        if self.endpoint.is_strange(stream) {
            self.endpoint.admit_stranger();
        }
        let (endpoint, op) = (self.endpoint.clone(), call.op);
        let ticket = self.endpoint.ticket(call);
        stream.submit(Box::new(move || {
            let mut meeting = ticket.meet(payload)?;
            endpoint.shake(Place::Work);
            let done = work(&Host, &mut meeting);
            endpoint.shake(Place::Departure);
            drop(meeting);
            endpoint.count(op, from_peers);
            done
        }))
    }

    fn gather_bytes(&self, call: Call, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        let (op, own) = (call.op, bytes.len());
        let meeting = self.endpoint.ticket(call).meet(Payload { bytes, ..Payload::default() })?;
        let gathered: Vec<Vec<u8>> =
            meeting.arrivals().iter().map(|arrival| arrival.payload.bytes.clone()).collect();
        drop(meeting);
        self.endpoint.count(op, gathered.iter().map(Vec::len).sum::<usize>() - own);
        Ok(gathered)
    }
}

// SAFETY: arguments are checked by `Caller` before anything is enqueued. Work runs on the call's stream, between the
// arrival of all ranks and their departure, and uses what the SAFETY comments of its copies and sums say.
unsafe impl Communicator for LocalComm {
    fn rank(&self) -> usize {
        // Of this group: the endpoint's `rank` is the one in the world.
        let Endpoint { index, .. } = &*self.endpoint;
        *index
    }

    fn size(&self) -> usize {
        self.endpoint.members.len()
    }

    fn duplicate(&self, name: &str) -> Arc<dyn Communicator> {
        let Endpoint { world, channel, index, members, .. } = &*self.endpoint;
        let child = world.child(*channel, *index, name, members.clone());
        Arc::new(LocalComm::new(child.made_of(&self.endpoint)))
    }

    fn duplicate_apart(&self, name: &str) -> Arc<dyn Communicator> {
        let Endpoint { world, channel, index, members, .. } = &*self.endpoint;
        Arc::new(LocalComm::new(world.child(*channel, *index, name, members.clone())))
    }

    fn split(&self, name: &str, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        self.caller().split(name, ranks)?;
        let Endpoint { world, channel, index, members, .. } = &*self.endpoint;
        let members = ranks.iter().map(|rank| members[*rank]).collect();
        let child = world.child(*channel, *index, name, members);
        Ok(Arc::new(LocalComm::new(child.made_of(&self.endpoint))))
    }

    fn shares_a_process(&self) -> bool {
        true
    }

    fn all_gather(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Gather>) -> Result<(), CommError> {
        let call = Call::all_gather(tag, &parts);
        let (rank, size) = (self.rank(), self.size());
        let from_peers = self.caller().all_gather(&call, &parts)?;
        let (send, recv): (Vec<Slice>, Vec<Slice>) =
            parts.into_iter().map(|part| (part.send, part.recv)).unzip();
        let payload = Payload { slices: send, ..Payload::default() };
        self.enqueue(stream, call, payload, from_peers, move |site, meeting| {
            for (i, recv) in recv.iter().enumerate() {
                // Each rank begins with its own part, so that not all read the same memory at once.
                for peer in (rank..size).chain(0..rank) {
                    // SAFETY: lengths and dtypes were checked and are equal on all ranks. Between arrival and
                    // departure nobody writes a `send`: it is outside its rank's `recv`, or the one part of
                    // it that its rank leaves alone. `recv` is this rank's own, peers read no more of it than
                    // such a `send`.
                    unsafe { site.copy(&meeting.payload(peer).slices[i], &share(recv, peer, size)) }?;
                }
            }
            Ok(())
        })
    }

    fn reduce_scatter(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Reduce>) -> Result<(), CommError> {
        let call = Call::reduce_scatter(tag, &parts);
        let from_peers = self.caller().reduce_scatter(&call, &parts)?;
        let rank = self.rank();
        let slices = parts.iter().map(|part| part.send.clone()).collect();
        let payload = Payload { slices, ..Payload::default() };
        let outputs: Vec<_> =
            parts.into_iter().map(|part| (part.recv, part.scale, part.accumulate)).collect();
        self.enqueue(stream, call, payload, from_peers, move |site, meeting| {
            for (i, (recv, scale, accumulate)) in outputs.iter().enumerate() {
                let sources = contributions(meeting, i, rank);
                // SAFETY: lengths and dtypes were checked and are equal on all ranks. Between arrival and
                // departure part `rank` of every `send` is read by this rank only, and written by it alone
                // where `recv` is it; a `recv` elsewhere is this rank's own.
                unsafe { site.sum_into(&sources, recv, *scale, *accumulate) }?;
            }
            Ok(())
        })
    }

    fn all_reduce(&self, stream: &dyn Stream, tag: Tag, parts: Vec<(Slice, f32)>) -> Result<(), CommError> {
        let call = Call::all_reduce(tag, &parts);
        let (rank, size) = (self.rank(), self.size());
        let from_peers = self.caller().all_reduce(&call, &parts)?;
        let slices = parts.iter().map(|(data, _)| data.clone()).collect();
        let payload = Payload { slices, ..Payload::default() };
        self.enqueue(stream, call, payload, from_peers, move |site, meeting| {
            for (i, (data, scale)) in parts.iter().enumerate() {
                let sources = contributions(meeting, i, rank);
                // SAFETY: lengths and dtypes are equal on all ranks, and parts do not overlap. Until the rendezvous below,
                // part `rank` of every rank's data is accessed by this rank only, and the target is one of the sources.
                unsafe { site.sum_into(&sources, &sources[rank], *scale, Accumulate::Overwrite) }?;
                debug_assert!(same_place(&sources[rank], &share(data, rank, size)));
            }
            site.rendezvous(meeting)?;
            for (i, (data, _)) in parts.iter().enumerate() {
                for peer in (0..size).filter(|peer| *peer != rank) {
                    let result = share(&meeting.payload(peer).slices[i], peer, size);
                    // SAFETY: after the rendezvous part `peer` of rank `peer` is final and only read, and the
                    // other parts of this rank's data are accessed by this rank only.
                    unsafe { site.copy(&result, &share(data, peer, size)) }?;
                }
            }
            Ok(())
        })
    }

    fn broadcast(&self, stream: &dyn Stream, tag: Tag, data: Slice, root: usize) -> Result<(), CommError> {
        let rank = self.rank();
        let call = Call::broadcast(tag, &data, self.endpoint.members.get(root).copied().unwrap_or(root));
        let from_peers = self.caller().broadcast(&call, &data, root)?;
        let payload = Payload { slices: vec![data.clone()], ..Payload::default() };
        self.enqueue(stream, call, payload, from_peers, move |site, meeting| {
            if rank != root {
                // SAFETY: lengths and dtypes are equal on all ranks. Between arrival and departure the root's
                // data is only read, and that of any other rank is accessed by itself only.
                unsafe { site.copy(&meeting.payload(root).slices[0], &data) }?;
            }
            Ok(())
        })
    }

    fn all_to_all(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Exchange>) -> Result<(), CommError> {
        let call = Call::all_to_all(tag, &parts);
        let (rank, size) = (self.rank(), self.size());
        let from_peers = self.caller().all_to_all(&call, &parts)?;
        let (send, recv): (Vec<Slice>, Vec<Slice>) =
            parts.into_iter().map(|part| (part.send, part.recv)).unzip();
        let payload = Payload { slices: send, ..Payload::default() };
        self.enqueue(stream, call, payload, from_peers, move |site, meeting| {
            for (i, recv) in recv.iter().enumerate() {
                // Each rank begins with its own chunk, so that not all read the same memory at once.
                for peer in (rank..size).chain(0..rank) {
                    let chunk = share(&meeting.payload(peer).slices[i], rank, size);
                    // SAFETY: lengths and dtypes were checked and are equal on all ranks. Between arrival and
                    // departure every `send` is only read; `recv` is outside this rank's and known to no peer.
                    unsafe { site.copy(&chunk, &share(recv, peer, size)) }?;
                }
            }
            Ok(())
        })
    }

    fn host_barrier(&self, tag: Tag) -> Result<(), CommError> {
        let call = Call::host_barrier(tag);
        let op = call.op;
        drop(self.endpoint.ticket(call).meet(Payload::default())?);
        self.endpoint.count(op, 0);
        Ok(())
    }

    fn host_reduce(&self, tag: Tag, op: HostOp, values: &mut [f64]) -> Result<(), CommError> {
        let call = Call::host_reduce(tag, op, values);
        let kind = call.op;
        let payload = Payload { values: values.to_vec(), ..Payload::default() };
        let meeting = self.endpoint.ticket(call).meet(payload)?;
        for (rank, arrival) in meeting.arrivals().iter().enumerate() {
            for (value, other) in values.iter_mut().zip(&arrival.payload.values) {
                *value = match op {
                    _ if rank == 0 => *other,
                    HostOp::Sum => *value + *other,
                    // Not `f64::max`, which would hide a NaN.
                    HostOp::Max if *other > *value || other.is_nan() => *other,
                    HostOp::Min if *other < *value || other.is_nan() => *other,
                    HostOp::Max | HostOp::Min => *value,
                };
            }
        }
        drop(meeting);
        self.endpoint.count(kind, size_of_val(values) * (self.size() - 1));
        Ok(())
    }

    fn host_gather(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather_bytes(Call::host_gather(tag, &bytes), bytes)
    }

    fn host_gather_patiently(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather_bytes(Call::host_gather(tag, &bytes).patient(), bytes)
    }

    fn note(&self, state: &str) {
        self.endpoint.note(state);
    }

    fn control(&self) -> Option<Control> {
        Some(Control(self.endpoint.clone()))
    }

    fn counters(&self) -> Vec<(&'static str, CommCounter)> {
        self.endpoint.world.counters(self.endpoint.rank)
    }
}

/// What every rank, in order, contributes to the share of `rank` in part `i`.
fn contributions(meeting: &Meeting, i: usize, rank: usize) -> Vec<Slice> {
    let arrivals = meeting.arrivals();
    arrivals.iter().map(|arrival| share(&arrival.payload.slices[i], rank, arrivals.len())).collect()
}
