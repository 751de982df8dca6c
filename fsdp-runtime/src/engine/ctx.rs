//! What a rank knows of its sharded model and what never changes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use candle_core::{DType, Tensor};

use crate::buffer::BucketBuffers;
use crate::comm::{CommError, Communicator, HostOp, Phase, without_rank};
use crate::device::{Backend, Stream};
use crate::engine::schedule::{Resources, Unit};
use crate::engine::{BucketId, FsdpConfig, GradSink, Id, Locked, ParamId, Table, UnitId};
use crate::error::{Error, Result};
use crate::files::{FileLocks, Turns};
use crate::layout::{Item, ModelLayout};
use crate::memory::{Account, Variable, candle_dtype};
use crate::mesh::Topology;
use crate::spec::ParamSpec;
use crate::trace::Begun;

/// What a rank knows of its sharded model and what never changes.
pub(crate) struct Ctx {
    /// Identity of the engine.
    pub id: usize,
    /// The type of the model, for messages.
    pub name: String,
    pub config: FsdpConfig,
    pub mesh: Topology,
    /// All ranks of the mesh.
    pub comm: Arc<dyn Communicator>,
    /// The ranks that share the shards.
    pub shard_comm: Arc<dyn Communicator>,
    /// The ranks that have the same shard.
    pub outer_comm: Arc<dyn Communicator>,
    pub saves: Saves,
    pub backend: Arc<dyn Backend>,
    pub layout: ModelLayout,
    /// Streams, memory, units and buckets.
    pub resources: Arc<Resources>,
    pub params: Table<ParamId, PhysicalParam>,
    /// The model's buffers, in declaration order.
    pub buffers: Vec<Tensor>,
}

/// What saves and restores have, beside training.
pub(crate) struct Saves {
    /// All ranks of the mesh, in an order of its own.
    pub comm: Arc<dyn Communicator>,
    /// The order of saves and restores, in the background too.
    pub turns: Arc<Turns>,
    /// The locks of the directories that are saved into.
    pub locks: Arc<FileLocks>,
}

/// One physical parameter, which tied ones share: where it is, its tensor, and where its gradient goes.
#[derive(Debug)]
pub(crate) struct PhysicalParam {
    pub bucket: BucketId,
    /// Index among those of the bucket.
    pub item: usize,
    pub variable: Variable,
    pub sink: GradSink,
    /// Some forward has read it.
    pub read: AtomicBool,
}

/// Dtypes that floating-point tensors are cast to at a unit's boundary.
#[derive(Clone, Copy)]
pub(crate) struct Casts {
    pub input: Option<DType>,
    pub output: Option<DType>,
}

/// A fresh identity for an engine.
pub(crate) fn next_id() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Ctx {
    /// The unit of this path; `(root)` and the empty path are the root.
    pub(crate) fn unit_named(&self, path: &str) -> Result<UnitId> {
        let mut units = self.resources.units.ids();
        let is_it = |&unit: &UnitId| &*self.unit(unit).path == path || self.unit_name(unit) == path;
        units.find(is_it).ok_or_else(|| {
            let units = self.resources.units.ids();
            let known: Vec<&str> = units.map(|unit| self.unit_name(unit)).collect();
            Error::Usage(format!("there is no unit `{path}`: the model's are {}", known.join(", ")))
        })
    }

    pub(crate) fn unit(&self, unit: UnitId) -> &Unit {
        &self.resources.units[unit]
    }

    /// Path of a unit for messages.
    pub(crate) fn unit_name(&self, unit: UnitId) -> &str {
        if unit == UnitId::ROOT { "(root)" } else { &self.unit(unit).path }
    }

    pub(crate) fn spec(&self, param: ParamId) -> &ParamSpec {
        &self.layout.params[param.index()]
    }

    /// The unit that holds a parameter.
    pub(crate) fn unit_of(&self, param: ParamId) -> UnitId {
        UnitId::new(self.spec(param).key.unit)
    }

    /// The buffers of a parameter's bucket, and where it is in them.
    pub(crate) fn place_of(&self, param: ParamId) -> (&BucketBuffers, &Item) {
        let PhysicalParam { bucket, item, .. } = &self.params[param];
        let bucket = &self.resources.buckets[*bucket];
        (bucket, &bucket.layout.items[*item])
    }

    /// The buffers of all buckets, of one unit or of all.
    pub(crate) fn buckets_of(&self, unit: Option<UnitId>) -> impl Iterator<Item = &BucketBuffers> {
        let buckets = self.resources.buckets.iter();
        buckets.filter(move |bucket| unit.is_none_or(|unit| UnitId::of(&bucket.layout) == unit))
    }

    /// The elements of a bucket that this rank writes to a checkpoint: over all ranks they tile it.
    pub(crate) fn saved_range(&self, bucket: &BucketBuffers) -> Range<usize> {
        let layout = &bucket.layout;
        if layout.outer > 1 {
            return layout.outer_part(self.shard_comm.rank(), self.outer_comm.rank());
        }
        let (shard, outer) = (&bucket.shard, self.outer_comm.size());
        let at = |index: usize| shard.start + index * shard.len() / outer;
        at(self.outer_comm.rank())..at(self.outer_comm.rank() + 1)
    }

    pub(crate) fn compute(&self) -> &dyn Stream {
        &*self.resources.streams.compute
    }

    pub(crate) fn account(&self) -> &Account {
        &self.resources.account
    }

    /// What is cast at the unit's boundary.
    pub(crate) fn casts(&self, unit: UnitId) -> Casts {
        let precision = &self.config.precision;
        let weights = self.unit(unit).params.first().map(|&param| self.spec(param).key.dtype);
        let input = if precision.cast_inputs { weights } else { None };
        Casts { input: input.map(candle_dtype), output: precision.output.map(candle_dtype) }
    }

    /// A span of computation begins.
    pub(crate) fn begin_span(&self, name: &'static str, unit: &Arc<str>) -> Begun {
        self.resources.tracer.begin(self.compute(), name, unit)
    }

    pub(crate) fn end_span(&self, begun: Begun) {
        self.resources.tracer.compute(self.compute(), begun);
    }

    /// An error inside `unit`, with where and when.
    pub(crate) fn unit_error(
        &self,
        unit: UnitId,
        phase: Phase,
        step: u64,
        message: impl Into<String>,
    ) -> Error {
        let (rank, unit) = (self.comm.rank(), self.unit_name(unit).to_string());
        let message = without_rank(rank, &message.into()).to_owned();
        Error::Unit { rank, unit, phase, step, message }
    }

    /// [`Communicator::host_reduce`] of all ranks, which are waited for without the lock.
    pub(crate) fn host_reduce(
        &self,
        step: &mut Locked<'_>,
        (what, phase): (&str, Phase),
        op: HostOp,
        values: &mut [f64],
    ) -> Result<(), CommError> {
        let tag = step.tag(what, phase);
        Locked::unlocked(step, || self.comm.host_reduce(tag, op, values))
    }

    /// [`Communicator::host_gather`] of all ranks, which are waited for without the lock.
    pub(crate) fn host_gather(
        &self,
        step: &mut Locked<'_>,
        (what, phase): (&str, Phase),
        own: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let tag = step.tag(what, phase);
        Locked::unlocked(step, || self.comm.host_gather(tag, own))
    }
}
