//! Ranks are processes or threads with a GPU each, and NCCL moves the data.
//!
//! [`NcclComm`] carries out the collectives of streams of its device by NCCL; for all else it has a communicator of the
//! host ([`Control`]): barriers, small reductions and exchanges, notes, groups, and the record of calls by
//! which ranks that disagree, are late or gone are named.
//!
//! # Sums
//! NCCL sums in an order of its own, and a sum of 16-bit values is rounded to 16 bits on the way: results differ in the
//! last bits from those of ranks that are threads of the CPU, and from one number of ranks, kind of link or version of
//! NCCL to another; on one machine they are the same from run to run. What is scaled by another factor than 1 or
//! 1 / ranks is scaled after it is summed, in f32. A sum that is added to its destination or that is stored in f32 goes
//! through scratch memory of the communicator: as much as the rank's share of the largest launch.
//!
//! # Errors
//! A call that does not fit the other ranks' fails when it is called, or soon after. A watchdog of each rank sees to it that
//! nobody waits for ever: when NCCL reports an error, a collective does not end in time, or a rank is gone, on any rank,
//! all communicators are aborted, and the device fails with an error that names the collective and the ranks missing.

#![cfg(feature = "nccl")]

mod flight;
mod group;
mod handle;
mod launch;
mod library;
mod memory;
mod rank_order;
mod scratch;
mod watch;

use std::sync::Arc;

pub use self::memory::NcclMemory;

use cudarc::nccl::sys::ncclUniqueId;
use fsdp_kernels::MAX_RANKS;
use parking_lot::Mutex;

use self::flight::Comm;
use self::handle::{Handle, unique_id};
use self::launch::Launch;
use self::library::Failure;
use self::scratch::Scratch;
use self::watch::Lease;
use super::arguments::Caller;
use super::call::Call;
use super::ledger::{Control, Ledger, Stage, Trouble};
use super::{
    Allocate, CommCounter, CommError, Communicator, Exchange, Gather, HostOp, Phase, Reduce, Registration,
    Tag,
};
use crate::device::cuda::{CudaDevice, CudaError, CudaStream};
use crate::device::{Memory, Slice, Stream};

/// A communicator by NCCL cannot be made.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library is missing or too old.
    #[error(transparent)]
    Library(#[from] CudaError),
    /// The ranks could not be joined.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// Checks that NCCL is there, as [`NcclComm::new`] does.
///
/// # Errors
/// [`CudaError::MissingLibrary`] if it is not installed, not where the loader looks, or older than 2.22.
pub fn available() -> Result<(), CudaError> {
    library::require()
}

/// How reductions are summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sums {
    /// By NCCL, in its order: see [the module](self#sums).
    #[default]
    Nccl,
    /// In rank order in f32, rounded once: to the bit what ranks that are threads compute, whatever the links. As many
    /// bytes are sent, each rank's share of what a rank brings to that rank itself; scratch memory is as large as what a
    /// rank brings to the largest launch. For 64 ranks at most.
    InRankOrder,
}

/// How ranks are joined; the same on all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NcclOptions {
    /// How reductions are summed, on this communicator and on those that are made of it.
    pub sums: Sums,
}

/// A rank's communicator by NCCL, for the streams of its device.
///
/// NCCL's own communicator of a duplicate or a group is made in the first collective of a stream that is called on it,
/// which all its ranks have to call; until then it costs nothing.
pub struct NcclComm {
    control: Arc<dyn Communicator>,
    ledger: Arc<dyn Ledger>,
    lease: Arc<Lease>,
    sums: Sums,
    /// Locked during a call: its place in the order of calls is its place on the device.
    turn: Mutex<Turn>,
}

impl std::fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclComm")
            .field("rank", &self.control.rank())
            .field("size", &self.control.size())
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Turn {
    comm: Option<Arc<Comm>>,
    scratch: Scratch,
}

impl NcclComm {
    /// Joins the ranks of `control`, each with its device. All must call it; `control` should not be used otherwise from
    /// then on.
    ///
    /// # Errors
    /// [`NcclError::Library`] if NCCL is not installed; [`CommError::Invalid`] if `control` is not one that ranks can be
    /// joined on ([`Communicator::control`]); those of [`Communicator::host_gather`] and of NCCL.
    pub fn new(
        control: Arc<dyn Communicator>,
        device: &CudaDevice,
        options: NcclOptions,
    ) -> Result<Arc<NcclComm>, NcclError> {
        available()?;
        let ledger = ledger_of(&*control)?;
        let lease = Lease::new(device.clone(), ledger.clone())?;
        let this = Arc::new(NcclComm { control, ledger, lease, sums: options.sums, turn: Mutex::default() });
        this.joined(&mut this.turn.lock(), None)?;
        Ok(this)
    }

    fn made_of(&self, control: Arc<dyn Communicator>) -> Result<Arc<NcclComm>, CommError> {
        let ledger = ledger_of(&*control)?;
        let (lease, sums) = (self.lease.clone(), self.sums);
        let scratch = Scratch::new(self.turn.lock().scratch.allocator());
        let turn = Mutex::new(Turn { comm: None, scratch });
        Ok(Arc::new(NcclComm { control, ledger, lease, sums, turn }))
    }

    fn caller(&self) -> Caller {
        self.ledger.caller()
    }

    fn check_sums(&self, call: &Call) -> Result<(), CommError> {
        if self.sums == Sums::Nccl || self.size() <= MAX_RANKS {
            return Ok(());
        }
        let message =
            format!("{MAX_RANKS} ranks at most are summed in their order, the group has {}", self.size());
        Err(self.caller().invalid(call, message))
    }

    /// NCCL's communicator, made now if it is needed for the first time.
    fn joined(&self, turn: &mut Turn, number: Option<u64>) -> Result<Arc<Comm>, CommError> {
        if let Some(comm) = &turn.comm {
            return Ok(comm.clone());
        }
        let device = &self.lease.family.device;
        device.bind()?;
        let Caller { index, size, .. } = self.caller();
        let failed = |failure: Failure| self.ledger.give_up(number, failure.trouble());
        let own = if index == 0 { bytes_of(&unique_id().map_err(failed)?) } else { Vec::new() };
        let tag = Tag { unit: "id of NCCL".into(), phase: Phase::Setup, step: 0 };
        let ids = self.control.host_gather(tag, own)?;
        let Some(id) = ids.first().and_then(|bytes| id_of(bytes)) else {
            let how = format!("the id of NCCL has {:?} bytes", ids.first().map(Vec::len));
            return Err(self.ledger.give_up(number, Trouble::Here(how)));
        };
        let handle = Handle::init(id, index, size).map_err(failed)?;
        let comm = Comm::new(handle, self.ledger.clone(), device.clone());
        // From here on it is looked after.
        self.lease.family.add(comm.clone());
        turn.comm = Some(comm.clone());
        comm.settle(number)?;
        Ok(comm)
    }

    /// Enqueues a collective on `stream`: `work` does, with NCCL's communicator and the scratch memory.
    fn enqueue(
        &self,
        stream: &dyn Stream,
        mut call: Call,
        from_peers: usize,
        slices: &[&Slice],
        work: impl FnOnce(&Launch<'_>, &mut Scratch) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let device = &self.lease.family.device;
        let stream = stream.as_any().downcast_ref::<CudaStream>().filter(|stream| stream.device().is(device));
        let Some(stream) = stream else {
            let message = format!("the stream is not one of {}, which the communicator is of", device.name());
            return Err(self.caller().invalid(&call, message));
        };
        stream.reaches(slices)?;
        device.check()?;
        let op = call.op;
        call.device = Some("a device by NCCL".into());
        let mut turn = self.turn.lock();
        let number = self.ledger.call(call).inspect_err(|error| device.fail(error.clone()))?;
        let done = self.joined(&mut turn, Some(number)).and_then(|comm| {
            let launch = Launch { comm: &comm, stream, number };
            if stream.is_capturing()? {
                // A graph does it again and again, and no event of it can be asked about.
                turn.scratch.captured();
                work(&launch, &mut turn.scratch)?;
                self.ledger.reached(number, Stage::Done);
                return Ok(());
            }
            let start = stream.record();
            work(&launch, &mut turn.scratch)?;
            let end = stream.record();
            turn.scratch.used_until(stream, &end);
            device.check()?;
            comm.took_off(number, start, end);
            Ok(())
        });
        if let Err(error) = &done {
            // Tells the others, unless they know.
            self.ledger.give_up(Some(number), Trouble::Here(error.to_string()));
            device.fail(error.clone());
        } else {
            self.ledger.count(op, from_peers);
        }
        done
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        if let Some(comm) = &self.turn.get_mut().comm {
            self.lease.family.release(comm);
        }
    }
}

fn ledger_of(control: &dyn Communicator) -> Result<Arc<dyn Ledger>, CommError> {
    let Some(Control(ledger)) = control.control() else {
        let message = "ranks cannot be joined by NCCL on a communicator that keeps no record of their calls";
        return Err(CommError::Invalid { rank: control.rank(), message: message.to_owned() });
    };
    Ok(ledger)
}

fn bytes_of(id: &ncclUniqueId) -> Vec<u8> {
    id.internal.iter().map(|byte| *byte as u8).collect()
}

fn id_of(bytes: &[u8]) -> Option<ncclUniqueId> {
    let bytes: &[u8; 128] = bytes.try_into().ok()?;
    Some(ncclUniqueId { internal: bytes.map(|byte| byte as std::ffi::c_char) })
}

/// The parts that are not empty.
fn full<T>(parts: &[T], slice: impl Fn(&T) -> &Slice) -> impl Iterator<Item = &T> {
    parts.iter().filter(move |part| !slice(part).is_empty())
}

// SAFETY: arguments are checked by `Caller` before anything is enqueued. NCCL's calls are on the call's stream, whose device
// all slices are of; they write and read what the collective is defined to, and scratch memory in the order of its uses.
unsafe impl Communicator for NcclComm {
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
            // The host's part of it, whose collectives of streams refuse those of a device.
            Err(_) => control,
        }
    }

    fn split(&self, name: &str, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(self.made_of(self.control.split(name, ranks)?)?)
    }

    fn all_gather(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Gather>) -> Result<(), CommError> {
        let call = Call::all_gather(tag, &parts);
        let from_peers = self.caller().all_gather(&call, &parts)?;
        let slices: Vec<&Slice> = parts.iter().flat_map(|part| [&part.send, &part.recv]).collect();
        self.enqueue(stream, call, from_peers, &slices, |launch, _| {
            let mut parts = full(&parts, |part| &part.send);
            launch.group(&slices, |group| parts.try_for_each(|part| group.all_gather(part)))
        })
    }

    fn reduce_scatter(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Reduce>) -> Result<(), CommError> {
        let call = Call::reduce_scatter(tag, &parts);
        let from_peers = self.caller().reduce_scatter(&call, &parts)?;
        self.check_sums(&call)?;
        let slices: Vec<&Slice> = parts.iter().flat_map(|part| [&part.send, &part.recv]).collect();
        self.enqueue(stream, call, from_peers, &slices, |launch, scratch| {
            let parts = full(&parts, |part| &part.recv);
            match self.sums {
                Sums::Nccl => launch.reduce_scatter(parts, self.size(), scratch),
                Sums::InRankOrder => launch.reduce_scatter_in_order(parts, self.caller(), scratch),
            }
        })
    }

    fn all_reduce(&self, stream: &dyn Stream, tag: Tag, parts: Vec<(Slice, f32)>) -> Result<(), CommError> {
        let call = Call::all_reduce(tag, &parts);
        let from_peers = self.caller().all_reduce(&call, &parts)?;
        let slices: Vec<&Slice> = parts.iter().map(|(data, _)| data).collect();
        self.check_sums(&call)?;
        self.enqueue(stream, call, from_peers, &slices, |launch, scratch| {
            let parts = full(&parts, |(data, _)| data);
            match self.sums {
                Sums::Nccl => launch.all_reduce(parts, self.size()),
                Sums::InRankOrder => launch.all_reduce_in_order(parts, self.caller(), scratch),
            }
        })
    }

    fn broadcast(&self, stream: &dyn Stream, tag: Tag, data: Slice, root: usize) -> Result<(), CommError> {
        let call = Call::broadcast(tag, &data, self.ledger.world_rank(root));
        let from_peers = self.caller().broadcast(&call, &data, root)?;
        self.enqueue(stream, call, from_peers, &[&data], |launch, _| {
            launch
                .group(&[&data], |group| if data.is_empty() { Ok(()) } else { group.broadcast(&data, root) })
        })
    }

    fn all_to_all(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Exchange>) -> Result<(), CommError> {
        let call = Call::all_to_all(tag, &parts);
        let from_peers = self.caller().all_to_all(&call, &parts)?;
        let slices: Vec<&Slice> = parts.iter().flat_map(|part| [&part.send, &part.recv]).collect();
        self.enqueue(stream, call, from_peers, &slices, |launch, _| {
            let mut parts = full(&parts, |part| &part.send);
            launch.group(&slices, |group| parts.try_for_each(|part| group.all_to_all(part, self.size())))
        })
    }

    fn host_barrier(&self, tag: Tag) -> Result<(), CommError> {
        self.control.host_barrier(tag)
    }

    fn host_reduce(&self, tag: Tag, op: HostOp, values: &mut [f64]) -> Result<(), CommError> {
        self.control.host_reduce(tag, op, values)
    }

    fn host_gather(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.host_gather(tag, bytes)
    }

    fn host_gather_patiently(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.host_gather_patiently(tag, bytes)
    }

    fn allocate_by(&self, allocate: Allocate) {
        self.turn.lock().scratch.allocate_by(allocate);
    }

    fn registrable(&self) -> Option<Arc<dyn Memory>> {
        Some(Arc::new(NcclMemory::new(&self.lease.family.device)))
    }

    fn register(&self, slices: &[Slice], how: Registration) -> Result<(), CommError> {
        let device = &self.lease.family.device;
        let refuse = |message: String| Err(CommError::Invalid { rank: self.caller().rank, message });
        if let Some(wrong) = slices.iter().position(|slice| !slice.is_empty() && !device.has_adopted(slice)) {
            return refuse(format!(
                "slice {wrong} cannot be registered: its memory is not of a fixed place. It is of a pool that gives the \
                 address to others once it is freed; `NcclMemory` is for buffers that stay"
            ));
        }
        if how == Registration::Window && !library::has_windows() {
            return refuse("windows need NCCL 2.27 or newer: register buffers".to_owned());
        }
        device.check()?;
        let mut turn = self.turn.lock();
        let comm = self.joined(&mut turn, None)?;
        device.bind()?;
        self.control.host_barrier(Tag { unit: "registration".into(), phase: Phase::Setup, step: 0 })?;
        let full = slices.iter().filter(|slice| !slice.is_empty());
        let done = full.into_iter().try_for_each(|slice| comm.register(slice, how));
        done.inspect_err(|error| device.fail(error.clone()))
    }

    fn note(&self, state: &str) {
        self.control.note(state);
    }

    fn control(&self) -> Option<Control> {
        self.control.control()
    }

    fn counters(&self) -> Vec<(&'static str, CommCounter)> {
        self.control.counters()
    }
}
