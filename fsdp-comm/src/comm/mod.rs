//! Collectives on streams. Each call has a tag that says what it is for.

mod arguments;
mod call;
mod device_mesh;
mod ledger;
pub mod local;
pub mod nccl;
#[cfg(target_os = "linux")]
pub mod shared_memory;
pub mod tcp;
mod traffic;

use std::sync::Arc;

pub use device_mesh::DeviceMesh;
pub use ledger::Control;

pub use crate::device::Accumulate;
use crate::device::{Memory, Slice, Stream};
pub use crate::error::{CommError, panic_text, without_rank};
use crate::spec::Dtype;

/// Most ranks of one launch.
pub const MAX_RANKS: usize = 2048;

/// Part of the training step a collective belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Phase {
    /// Building, sharding, loading.
    Setup,
    /// Forward, evaluation included.
    Forward,
    /// Backward, recomputation included.
    Backward,
    /// Clipping, optimizer step, install.
    Optimizer,
    /// Saving and restoring.
    Checkpoint,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Phase::Setup => "setup",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
            Phase::Checkpoint => "checkpoint",
        })
    }
}

/// A step that is under way, in words. Steps are counted from 0; people count from 1, in every text that names one.
pub fn step_words(step: u64) -> String {
    format!("step {}", step.saturating_add(1))
}

/// What a collective is for. Ranks compare tags before any byte moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Path of the unit, or the name of what is exchanged ("gradient norm").
    pub unit: Arc<str>,
    /// Part of the step.
    pub phase: Phase,
    /// Optimizer step, from 0. Messages count from 1.
    pub step: u64,
}

/// One buffer of a grouped all-gather: `recv` is `size` times as long as `send`; rank r's part lands at
/// `r * send.len()`. `send` may be that very part of `recv` (in place).
#[derive(Clone, Debug)]
pub struct Gather {
    /// This rank's shard.
    pub send: Slice,
    /// The whole.
    pub recv: Slice,
}

/// One buffer of a grouped reduce-scatter: `send` is `size` times as long as `recv`;
/// `recv (+)= scale * sum over ranks in rank order of send[rank * recv.len()..]`, computed in f32.
/// `recv` may be that very part of `send` (in place), and may have a wider dtype.
#[derive(Clone, Debug)]
pub struct Reduce {
    /// This rank's contribution to all shards.
    pub send: Slice,
    /// This rank's shard of the sum.
    pub recv: Slice,
    /// Factor of the reduced contribution, applied once, before it is accumulated.
    pub scale: f32,
    /// Replace or add.
    pub accumulate: Accumulate,
}

/// One buffer of a grouped all-to-all: `send` and `recv` have the same length, a multiple of `size`, and dtype, and
/// do not overlap. Chunk r of `send`, of `size` equal ones, goes to rank r, and chunk r of `recv` comes from it.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// What this rank has for each rank.
    pub send: Slice,
    /// What each rank has for this one.
    pub recv: Slice,
}

/// Reduction of small host values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum HostOp {
    /// Sum in rank order.
    Sum,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
}

/// Makes slices of new memory: zeros.
#[derive(Clone)]
pub struct Allocate(Arc<dyn Fn(Dtype, usize) -> Result<Slice, CommError> + Send + Sync>);

impl std::fmt::Debug for Allocate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Allocate").finish_non_exhaustive()
    }
}

impl Allocate {
    /// By a function that is given the dtype and the number of elements.
    pub fn new(make: impl Fn(Dtype, usize) -> Result<Slice, CommError> + Send + Sync + 'static) -> Allocate {
        Allocate(Arc::new(make))
    }

    /// A slice of `len` zeros.
    ///
    /// # Errors
    /// Those of the function.
    ///
    /// # Safety
    /// As for [`Slice::zeros_in`](crate::device::Slice::zeros_in).
    pub unsafe fn allocate(&self, dtype: Dtype, len: usize) -> Result<Slice, CommError> {
        (self.0)(dtype, len)
    }
}

/// How memory is registered with a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Registration {
    /// As a buffer (`ncclCommRegister`): by each rank for itself.
    Buffer,
    /// As a symmetric window (`ncclCommWindowRegister`): by all ranks together, the same sizes in the same order. Needs
    /// NCCL 2.27.
    Window,
}

impl std::fmt::Display for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Registration::Buffer => "buffer",
            Registration::Window => "window",
        })
    }
}

/// A group of ranks that calls collectives in one common order.
///
/// The asynchronous ones (`all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`) are enqueued on
/// `stream` and their failure is carried by the stream's next event; the `host_*` ones block. A collective takes
/// its place in the order when it is called, whatever stream it runs on. Buffers of one launch overlap only where
/// a part is in place. Every rank of the group must make the same calls in the same order with the same tags
/// and sizes; if one does not, panics, returns early or is late beyond the time-out, every rank gets a
/// [`CommError`] that says which. Ranks that are threads get it at once if they wait for each other in a cycle, or for a rank
/// that has returned. For that it must be known what all threads of a rank are doing: the rank's own one, which
/// [`launch`](crate::launch) has started, and the streams that it has made. Give communicators of their own to other threads.
///
/// A communicator that wraps another one passes on every method, those with a default too: the defaults compare nothing,
/// register nothing, and know no [`Control`]. What [`duplicate`](Communicator::duplicate) and [`split`](Communicator::split)
/// return has to be wrapped as well.
///
/// # Safety
/// A collective that is enqueued uses no memory but that of its slices and of [`Communicator::allocate_by`], in the order of
/// its stream: it writes what is said of each, and reads what its ranks send; when the stream has passed it, no rank uses
/// this rank's slices any more. Arguments that do not fit are refused. [`Communicator::rank`] is below
/// [`Communicator::size`], and both stay as they are.
pub unsafe trait Communicator: Send + Sync {
    /// This rank's index in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// A communicator of the same ranks with an order of its own, so that its collectives may run beside this
    /// one's. Every rank must call it with the same `name`, in the same order.
    fn duplicate(&self, name: &str) -> Arc<dyn Communicator>;

    /// A [`duplicate`](Communicator::duplicate) whose calls are compared without what the ranks have noted: for collectives that
    /// streams come to, at times that say nothing of where the ranks' own threads are.
    fn duplicate_apart(&self, name: &str) -> Arc<dyn Communicator> {
        self.duplicate(name)
    }

    /// A communicator of some of the ranks: `ranks` are their indices in this group, in the order of their new
    /// indices, this rank's among them. Every rank must call it with the same `name`, in the same order among
    /// the calls of this and of [`Communicator::duplicate`]; any two ranks must name the same group or groups
    /// that have no rank in common.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if `ranks` lacks this rank, or names one twice or one that does not exist. Groups
    /// that overlap fail every rank, as a disagreement.
    fn split(&self, name: &str, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError>;

    /// Gathers all `parts` in one grouped launch.
    fn all_gather(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Gather>) -> Result<(), CommError>;

    /// Reduces and scatters all `parts` in one grouped launch.
    fn reduce_scatter(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Reduce>) -> Result<(), CommError>;

    /// `data = scale * sum over ranks, in rank order, of data`, in place, the same bits on every rank: each
    /// element is summed once, as in [`Communicator::reduce_scatter`].
    fn all_reduce(&self, stream: &dyn Stream, tag: Tag, parts: Vec<(Slice, f32)>) -> Result<(), CommError>;

    /// Rank `root`'s `data` for all.
    fn broadcast(&self, stream: &dyn Stream, tag: Tag, data: Slice, root: usize) -> Result<(), CommError>;

    /// Exchanges all `parts` in one grouped launch: each rank has a chunk for every rank, itself included.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if a part's sides differ in length or dtype, cannot be cut into one chunk a rank, or
    /// overlap.
    fn all_to_all(&self, stream: &dyn Stream, tag: Tag, parts: Vec<Exchange>) -> Result<(), CommError>;

    /// Blocks until all ranks have reached it.
    fn host_barrier(&self, tag: Tag) -> Result<(), CommError>;

    /// Reduces `values` in rank order; blocks.
    fn host_reduce(&self, tag: Tag, op: HostOp, values: &mut [f64]) -> Result<(), CommError>;

    /// Every rank's `bytes` (of any length), by rank; blocks.
    fn host_gather(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError>;

    /// The same without the time-out, where it is known that every rank is on its way to it, at work that takes any time,
    /// such as writing to a slow disk. A rank that fails or returns early still ends it.
    fn host_gather_patiently(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.host_gather(tag, bytes)
    }

    /// Has `allocate` make the buffers that this communicator needs for itself, and those that are made of it from now on:
    /// so they are counted. They must be on the device of its streams, zero in the order of the device's compute stream.
    /// Those that need none, such as communicators of the host, never call it.
    fn allocate_by(&self, _allocate: Allocate) {}

    /// Memory whose slices [`Communicator::register`] takes; `None` if it takes none.
    fn registrable(&self) -> Option<Arc<dyn Memory>> {
        None
    }

    /// Registers memory that collectives use again and again: the ranks then need no buffers of their own on the way, where
    /// the links between them allow for that. The communicator keeps the memory until it ends itself. It is optional, and
    /// of duplicates each has to register for itself. All ranks must call it, in the same order among their collectives,
    /// as many slices of the same lengths; it blocks until they have.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if a slice is not of [`Communicator::registrable`], or the communicator registers nothing;
    /// those of [`Communicator::host_barrier`] and of the backend.
    fn register(&self, _slices: &[Slice], _how: Registration) -> Result<(), CommError> {
        let message =
            "memory cannot be registered with this communicator: those by NCCL register memory".to_owned();
        Err(CommError::Invalid { rank: self.rank(), message })
    }

    /// Says in what state this rank is, in words: all ranks of the group must say the same at the same place among
    /// their calls. Nothing is sent. A backend that compares tags compares the states too: ranks whose states differ
    /// get an error that tells them, from the next collective of this communicator or of one made of it.
    fn note(&self, _state: &str) {}

    /// What a communicator of devices is made on, see [`Control`]: that of this one's ranks, if they are known to each
    /// other on the host.
    fn control(&self) -> Option<Control> {
        None
    }

    /// Whether its collectives take streams of a device that all ranks share, as those of ranks that are threads do.
    fn shares_a_process(&self) -> bool {
        false
    }

    /// Why it has no collectives of streams, if it has only those of the host.
    fn moves_no_data(&self) -> Option<&'static str> {
        None
    }

    /// Traffic of this rank so far, by operation, all duplicates of the communicator together.
    fn counters(&self) -> Vec<(&'static str, CommCounter)>;
}

/// Traffic of one kind of collective on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct CommCounter {
    /// Number of grouped launches.
    pub calls: u64,
    /// Bytes that came from other ranks.
    pub bytes_from_peers: u64,
}
