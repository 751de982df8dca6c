//! Ranks are processes of one machine, and exchange through memory that they share.
//!
//! Nothing has to be installed for it. Each rank has a *window* of 1 MiB, memory that it alone writes and that the others
//! map for reading. What a rank sends goes through its window in rounds of 256 KiB: it is written once, and read there by
//! those who need it. A round stays in the processor's cache, so that a collective of any size takes little more memory traffic
//! than one of threads. Sums are taken in rank order, by the code of ranks that are threads: the bits are theirs.
//!
//! All else goes through a communicator of the host ([`TcpComm`](super::tcp::TcpComm)): barriers, small reductions and exchanges, groups,
//! and the record of calls, by which ranks that disagree, are late or gone are named.
//!
//! Windows were chosen before MPI: MPI's shared memory is this same data path, and needs a library. What MPI adds is other machines.
//!
//! # Who waits for whom
//! Ranks meet in a collective when their streams come to it, and compare prints of their calls before any byte moves. In the first
//! one on a communicator they open their windows to each other. A rank that waits sleeps in the kernel. Ranks that wait for
//! each other without end are told when time runs out, not at once as those that are threads.
//!
//! # Failure
//! No slice of a rank is ever seen by another one: a rank that fails may leave at once. A process that ends, in whatever way,
//! loses its connection to rank 0, and all others get an error within moments; one that is stopped is found by the time-out
//! of the collective, or by the silence of its connection. Windows are files without names: they end with the processes.
//!
//! # Trust
//! Ranks are processes of one user, who have shown each other the run's secret. They trust what they read in windows as
//! they trust the program that they all run. A process cannot write another one's window.

mod flow;
mod members;
mod plan;
mod segment;
mod window;

use std::sync::Arc;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use self::flow::{Flow, Order, Patience, Windows};
use self::members::{Processes, Refusal};
use self::plan::rounds;
use self::window::{Print, lane_bytes};
use super::arguments::{Caller, share};
use super::call::Call;
use super::ledger::{Control, Ledger, Stage, Trouble};
use super::local::{copy, sum_into};
use super::{Accumulate, CommCounter, CommError, Communicator, Exchange, Gather, HostOp, Reduce, Tag};
use crate::device::{Slice, Stream};

/// A rank's communicator, or one that was made of it.
pub struct SharedMemoryComm {
    control: Arc<dyn Communicator>,
    ledger: Arc<dyn Ledger>,
    processes: Arc<Processes>,
    /// This rank's notes here, and on the communicators that this one was made of.
    notes: Vec<Arc<Mutex<Arc<str>>>>,
    opening: Arc<Opening>,
    /// Collectives of streams that were called. Locked during a call: its place here is its place on record.
    called: Mutex<u32>,
    order: Arc<Order>,
}

/// The windows, and how they are opened.
struct Opening {
    /// Of the same ranks, for this alone: it has no place among their other calls.
    control: Arc<dyn Communicator>,
    windows: Mutex<Option<Arc<Windows>>>,
}

impl std::fmt::Debug for SharedMemoryComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedMemoryComm")
            .field("rank", &self.control.rank())
            .field("size", &self.control.size())
            .finish_non_exhaustive()
    }
}

impl SharedMemoryComm {
    /// The ranks of `control`, which are on one machine: if they are not, their first collective of streams fails.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if `control` is not one that ranks can be joined on ([`Communicator::control`]).
    pub fn new(control: Arc<dyn Communicator>) -> Result<Arc<SharedMemoryComm>, CommError> {
        SharedMemoryComm::made(control, Arc::default(), &[])
    }

    fn made(
        control: Arc<dyn Communicator>,
        processes: Arc<Processes>,
        notes: &[Arc<Mutex<Arc<str>>>],
    ) -> Result<Arc<SharedMemoryComm>, CommError> {
        let Some(Control(ledger)) = control.control() else {
            let message = "ranks cannot share memory on a communicator that keeps no record of their calls";
            return Err(CommError::Invalid { rank: control.rank(), message: message.to_owned() });
        };
        let notes = notes.iter().cloned().chain([Arc::new(Mutex::new("".into()))]).collect();
        let opening = Opening { control: control.duplicate_apart("memory"), windows: Mutex::default() };
        let (opening, called, order) = (Arc::new(opening), Mutex::default(), Arc::default());
        Ok(Arc::new(SharedMemoryComm { control, ledger, processes, notes, opening, called, order }))
    }

    fn caller(&self) -> Caller {
        self.ledger.caller()
    }

    fn told(&self, error: CommError) -> CommError {
        self.processes.told(error)
    }

    /// Enqueues `call`, whose `work` exchanges with the other ranks; `from_peers` bytes come from them.
    fn enqueue(
        &self,
        stream: &dyn Stream,
        mut call: Call,
        from_peers: usize,
        work: impl FnOnce(&Flow<'_>) -> Result<(), CommError> + Send + 'static,
    ) -> Result<(), CommError> {
        if let Some(stream) = stream.on_device() {
            let message = format!(
                "the stream is one of {}: put the mesh on the device (`mesh.on`)",
                stream.device_name()
            );
            return Err(self.caller().invalid(&call, message));
        }
        let notes = self.notes.iter().map(|note| note.lock().clone()).filter(|note| !note.is_empty());
        call.notes.extend(notes);
        let (op, name, print, tag) = (call.op, call.to_string(), print(&call), call.tag.clone());
        // The record has the notes itself.
        call.notes.clear();
        let mut called = self.called.lock();
        let entry = self.ledger.call(call).map_err(|error| self.told(error))?;
        *called = called.wrapping_add(1);
        let number = *called;
        drop(called);
        let mut ticket = Ticket { ledger: self.ledger.clone(), entry, name, is_open: true };
        let (opening, order, processes) = (self.opening.clone(), self.order.clone(), self.processes.clone());
        stream.submit(Box::new(move || {
            let patience = Patience::new(&ticket.ledger, entry);
            let exchange = || {
                patience.take_turn(&order, number)?;
                let windows = opening.opened(&ticket.ledger, entry, &processes, tag)?;
                let flow = Flow::new(&windows, patience);
                flow.meet(number, print)?;
                work(&flow)
            };
            let done = exchange();
            ticket.is_open = false;
            done.map_err(|error| processes.told(error))?;
            order.done(number);
            ticket.ledger.reached(entry, Stage::Done);
            ticket.ledger.count(op, from_peers);
            Ok(())
        }))
    }

    fn made_of(&self, control: Arc<dyn Communicator>) -> Result<Arc<SharedMemoryComm>, CommError> {
        SharedMemoryComm::made(control, self.processes.clone(), &self.notes)
    }
}

impl Opening {
    /// The windows, opened now if this is the first collective, of this `tag`.
    fn opened(
        &self,
        ledger: &Arc<dyn Ledger>,
        entry: u64,
        processes: &Processes,
        tag: Tag,
    ) -> Result<Arc<Windows>, CommError> {
        let mut windows = self.windows.lock();
        if let Some(windows) = &*windows {
            return Ok(windows.clone());
        }
        let opened = members::open(&*self.control, |index| ledger.world_rank(index), processes, tag);
        let opened = opened.map_err(|refusal| match refusal {
            Refusal::Comm(error) => error,
            Refusal::Here(how) => ledger.give_up(Some(entry), Trouble::Here(how)),
        })?;
        Ok(windows.insert(opened).clone())
    }
}

/// A collective that was called and is not over. Dropping it unused fails the world: peers will wait for it.
struct Ticket {
    ledger: Arc<dyn Ledger>,
    entry: u64,
    name: String,
    is_open: bool,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_open && self.ledger.failure().is_none() {
            let how = format!("it cannot run {}: its stream had failed before, or fails in it", self.name);
            self.ledger.give_up(Some(self.entry), Trouble::Here(how));
        }
    }
}

/// What is the same of equal calls, and of no others.
fn print(call: &Call) -> Print {
    let Call { op, tag, bytes: _, notes, device, patient: _, parts } = call;
    let parts: Vec<_> =
        parts.iter().map(|part| (part, part.reduction.map(|(scale, _)| scale.to_bits()))).collect();
    let hash = Sha256::digest(format!("{:?}", (op, tag, notes, device, parts)));
    std::array::from_fn(|i| u32::from_le_bytes(std::array::from_fn(|byte| hash[4 * i + byte])))
}

/// The elements of the largest share of a slice, and their dtype.
fn largest(slice: &Slice, size: usize) -> (usize, crate::spec::Dtype) {
    (slice.len().div_ceil(size), slice.dtype())
}

/// Gathers `send` of every rank into its share of `recv`.
///
/// # Safety
/// As for a collective's slices: nobody else uses them until it is over; `send` is this rank's share of `recv`, or apart from it.
unsafe fn gather(flow: &Flow<'_>, parts: &[(Slice, Slice)]) -> Result<(), CommError> {
    let (index, size) = (flow.index(), flow.size());
    let plan = rounds(parts.iter().map(|(_, recv)| largest(recv, size)), lane_bytes(1));
    flow.exchange(
        1,
        &plan,
        |item, lanes| {
            let own = parts[item.part].0.range(item.within(parts[item.part].0.len()));
            // SAFETY: `own` is only read while this runs. The slot is this rank's to write, as `Flow::exchange` has waited for.
            unsafe { copy(&own, &lanes.slice(0, item.at, own.dtype(), own.len())) };
        },
        |items, slot| {
            for peer in flow.ranks() {
                let lanes = slot(peer)?;
                for item in items {
                    let target = share(&parts[item.part].1, peer, size);
                    let target = target.range(item.within(target.len()));
                    let source = if peer == index {
                        let send = &parts[item.part].0;
                        send.range(item.within(send.len()))
                    } else {
                        lanes.slice(0, item.at, target.dtype(), target.len())
                    };
                    // SAFETY: the peer has written the slot and leaves it until this rank has said that it is read. The target is
                    // this rank's own, and where it is the source nothing is copied.
                    unsafe { copy(&source, &target) };
                }
            }
            Ok(())
        },
    )
}

/// Sums every rank's contribution to this rank's share, in rank order.
///
/// # Safety
/// As for a collective's slices: nobody else uses them until it is over; a target is this rank's share of its `send`, or apart
/// from it.
unsafe fn reduce(flow: &Flow<'_>, parts: &[(Slice, Slice, f32, Accumulate)]) -> Result<(), CommError> {
    let (index, size) = (flow.index(), flow.size());
    let plan = rounds(parts.iter().map(|(send, ..)| largest(send, size)), lane_bytes(size));
    flow.exchange(
        size,
        &plan,
        |item, lanes| {
            for peer in flow.ranks().skip(1) {
                let theirs = share(&parts[item.part].0, peer, size);
                let theirs = theirs.range(item.within(theirs.len()));
                // SAFETY: `theirs` is only read while this runs: sums are written to this rank's share. The slot is this rank's to
                // write.
                unsafe { copy(&theirs, &lanes.slice(peer, item.at, theirs.dtype(), theirs.len())) };
            }
        },
        |items, slot| {
            let slots = (0..size).map(slot).collect::<Result<Vec<_>, _>>()?;
            for item in items {
                let (send, recv, scale, accumulate) = &parts[item.part];
                let own = share(send, index, size);
                let elements = item.within(own.len());
                let source = |peer: usize| match peer == index {
                    true => own.range(elements.clone()),
                    false => slots[peer].slice(index, item.at, send.dtype(), elements.len()),
                };
                let sources: Vec<Slice> = (0..size).map(source).collect();
                // SAFETY: one length and, of the sources, one dtype, as the calls were compared. The peers have written their slots and
                // leave them until this rank has read them. The target is this rank's own, and is its own source or apart from it.
                unsafe { sum_into(&sources, &recv.range(elements.clone()), *scale, *accumulate) };
            }
            Ok(())
        },
    )
}

// SAFETY: arguments are checked by `Caller` before anything is enqueued. Work runs on the call's stream, and uses the slices of this
// rank as the SAFETY comments of its copies and sums say. No other process has this rank's slices: it reads copies in the window.
unsafe impl Communicator for SharedMemoryComm {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn duplicate(&self, name: &str) -> Arc<dyn Communicator> {
        let control = self.control.duplicate(name);
        match self.made_of(control.clone()) {
            Ok(duplicate) => duplicate,
            Err(_) => control,
        }
    }

    fn split(&self, name: &str, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(self.made_of(self.control.split(name, ranks)?)?)
    }

    fn all_gather(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Gather>) -> Result<(), CommError> {
        let call = Call::all_gather(tag, &parts);
        let from_peers = self.caller().all_gather(&call, &parts)?;
        let parts: Vec<_> = parts.into_iter().map(|part| (part.send, part.recv)).collect();
        self.enqueue(stream, call, from_peers, move |flow| {
            // SAFETY: the arguments were checked, and this is the collective's place in the order of its stream.
            unsafe { gather(flow, &parts) }
        })
    }

    fn reduce_scatter(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Reduce>) -> Result<(), CommError> {
        let call = Call::reduce_scatter(tag, &parts);
        let from_peers = self.caller().reduce_scatter(&call, &parts)?;
        let part = |part: Reduce| (part.send, part.recv, part.scale, part.accumulate);
        let parts: Vec<_> = parts.into_iter().map(part).collect();
        self.enqueue(stream, call, from_peers, move |flow| {
            // SAFETY: as in `all_gather`.
            unsafe { reduce(flow, &parts) }
        })
    }

    fn all_reduce(&self, stream: &dyn Stream, tag: Tag, parts: Vec<(Slice, f32)>) -> Result<(), CommError> {
        let call = Call::all_reduce(tag, &parts);
        let from_peers = self.caller().all_reduce(&call, &parts)?;
        let Caller { index, size, .. } = self.caller();
        let own = |data: &Slice| share(data, index, size);
        let sums: Vec<_> = parts
            .iter()
            .map(|(data, scale)| (data.clone(), own(data), *scale, Accumulate::Overwrite))
            .collect();
        let results: Vec<_> = parts.iter().map(|(data, _)| (own(data), data.clone())).collect();
        self.enqueue(stream, call, from_peers, move |flow| {
            // SAFETY: as in `all_gather`; the sums are this rank's shares, which are gathered when all are done.
            unsafe {
                reduce(flow, &sums)?;
                gather(flow, &results)
            }
        })
    }

    fn broadcast(&self, stream: &dyn Stream, tag: Tag, data: Slice, root: usize) -> Result<(), CommError> {
        let call = Call::broadcast(tag, &data, self.ledger.world_rank(root));
        let from_peers = self.caller().broadcast(&call, &data, root)?;
        self.enqueue(stream, call, from_peers, move |flow| {
            let plan = rounds([(data.len(), data.dtype())], lane_bytes(1));
            let is_root = flow.index() == root;
            flow.exchange(
                1,
                &plan,
                |item, lanes| {
                    if is_root {
                        let source = data.range(item.within(data.len()));
                        // SAFETY: the root's data is only read; the slot is this rank's to write.
                        unsafe { copy(&source, &lanes.slice(0, item.at, data.dtype(), item.len)) };
                    }
                },
                |items, slot| {
                    if is_root {
                        return Ok(());
                    }
                    let lanes = slot(root)?;
                    for item in items {
                        let source = lanes.slice(0, item.at, data.dtype(), item.len);
                        // SAFETY: the root has written the slot; the data is this rank's own.
                        unsafe { copy(&source, &data.range(item.within(data.len()))) };
                    }
                    Ok(())
                },
            )
        })
    }

    fn all_to_all(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Exchange>) -> Result<(), CommError> {
        let call = Call::all_to_all(tag, &parts);
        let from_peers = self.caller().all_to_all(&call, &parts)?;
        self.enqueue(stream, call, from_peers, move |flow| {
            let (index, size) = (flow.index(), flow.size());
            let plan = rounds(parts.iter().map(|part| largest(&part.send, size)), lane_bytes(size));
            let chunk = |slice: &Slice, peer: usize, item: &plan::Item| {
                let chunk = share(slice, peer, size);
                chunk.range(item.within(chunk.len()))
            };
            flow.exchange(
                size,
                &plan,
                |item, lanes| {
                    for peer in flow.ranks().skip(1) {
                        let theirs = chunk(&parts[item.part].send, peer, item);
                        // SAFETY: what is sent is only read; the slot is this rank's to write.
                        unsafe { copy(&theirs, &lanes.slice(peer, item.at, theirs.dtype(), theirs.len())) };
                    }
                },
                |items, slot| {
                    for peer in flow.ranks() {
                        let lanes = slot(peer)?;
                        for item in items {
                            let target = chunk(&parts[item.part].recv, peer, item);
                            let source = match peer == index {
                                true => chunk(&parts[item.part].send, peer, item),
                                false => lanes.slice(index, item.at, target.dtype(), target.len()),
                            };
                            // SAFETY: the peer has written its slot; the target is this rank's own, and apart from what it sends.
                            unsafe { copy(&source, &target) };
                        }
                    }
                    Ok(())
                },
            )
        })
    }

    fn host_barrier(&self, tag: Tag) -> Result<(), CommError> {
        self.control.host_barrier(tag).map_err(|error| self.told(error))
    }

    fn host_reduce(&self, tag: Tag, op: HostOp, values: &mut [f64]) -> Result<(), CommError> {
        self.control.host_reduce(tag, op, values).map_err(|error| self.told(error))
    }

    fn host_gather(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.host_gather(tag, bytes).map_err(|error| self.told(error))
    }

    fn host_gather_patiently(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.host_gather_patiently(tag, bytes).map_err(|error| self.told(error))
    }

    fn note(&self, state: &str) {
        if let Some(own) = self.notes.last() {
            *own.lock() = state.into();
        }
        self.control.note(state);
    }

    fn control(&self) -> Option<Control> {
        self.control.control()
    }

    fn counters(&self) -> Vec<(&'static str, CommCounter)> {
        self.processes.without_offers(self.control.counters())
    }
}
