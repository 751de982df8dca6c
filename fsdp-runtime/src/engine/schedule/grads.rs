//! The gradients of one unit: where they are written, and how far they have come in this step.

use std::sync::Arc;

use super::super::ids::BucketId;
use super::{Moment, Outer, Resources};
use crate::buffer::DataParallelBuffer;
use crate::comm::{Accumulate, CommError, Communicator, Gather, Reduce};
use crate::device::{Fill, Slice, fill};
use crate::memory::Lease;
use crate::spec::OuterStrategy;

/// The gradients of one unit.
pub(crate) struct Grads {
    /// What is reduced one by one: for the root with several buckets more than one.
    pub parts: Vec<GradPart>,
    /// What is open stays so until a unit inside this one has had its backward.
    pub(super) encloses: bool,
    /// Forwards of the unit whose backward is still to come.
    pub pending: usize,
    /// A backward of the unit got a gradient that is not all zeros. Looked at in the first step only.
    pub alive: bool,
}

/// Trainable buckets of a unit that are reduced at a time.
pub(crate) struct GradPart {
    pub buckets: Vec<BucketId>,
    /// Their elements.
    pub(super) numel: usize,
    /// What the pool knows it by.
    pub(super) in_pool: usize,
    target: Target,
    pub(super) main: Main,
}

/// Where the gradients of a microbatch are written.
#[derive(Default)]
enum Target {
    /// Nowhere.
    #[default]
    None,
    /// Here, in this backward.
    Open(Buckets),
    /// They were written here under `no_sync`, and the next backward adds to them.
    Held(Buckets),
}

/// One slice a bucket.
pub(super) struct Buckets {
    /// The memory, where it is not that of the main gradients.
    pub lease: Option<Lease>,
    pub slices: Vec<Slice>,
    /// They hold nothing yet; otherwise the gradients of earlier microbatches, to be added to.
    pub fresh: bool,
}

/// What the main gradients hold of this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Main {
    Nothing,
    /// Contributions, to which others can be added.
    Accumulated,
    /// All of them, reduced in place: nothing more can be added.
    Reduced,
}

impl Grads {
    pub(super) fn new(parts: Vec<GradPart>) -> Grads {
        Grads { parts, encloses: false, pending: 0, alive: false }
    }

    /// The main gradients hold a contribution of this step.
    pub(crate) fn has_gradient(&self) -> bool {
        self.parts.iter().any(|part| part.main != Main::Nothing)
    }

    /// The gradients of this step were reduced in place, so nothing more can be added: with ZeRO-0 and 1, and
    /// where there are outer ranks.
    pub(crate) fn is_reduced(&self) -> bool {
        self.parts.iter().any(|part| part.main == Main::Reduced)
    }

    /// They are written to in this backward.
    pub(crate) fn is_open(&self) -> bool {
        self.parts.first().is_some_and(|part| matches!(part.target, Target::Open(_)))
    }
}

impl GradPart {
    pub(super) fn new(buckets: Vec<BucketId>, numel: usize, in_pool: usize) -> GradPart {
        GradPart { buckets, numel, in_pool, target: Target::None, main: Main::Nothing }
    }

    /// Where the gradients of `bucket` are written in this backward, and whether there is nothing yet.
    pub(crate) fn target(&self, bucket: BucketId) -> Option<(&Slice, bool)> {
        let Target::Open(buckets) = &self.target else { return None };
        let index = self.buckets.iter().position(|&own| own == bucket)?;
        Some((&buckets.slices[index], buckets.fresh))
    }

    /// They are unreduced in memory of the pool.
    pub(super) fn has_lease(&self) -> bool {
        matches!(&self.target, Target::Open(buckets) | Target::Held(buckets) if buckets.lease.is_some())
    }

    /// True if gradients are written to what is there already.
    pub(super) fn reopen(&mut self) -> bool {
        let there = self.close();
        self.target = there.map_or(Target::None, Target::Open);
        !matches!(self.target, Target::None)
    }

    /// Gradients are written to `buckets` from now on.
    pub(super) fn open(
        &mut self,
        resources: &Resources,
        buckets: Buckets,
        poison: bool,
    ) -> Result<(), CommError> {
        let compute = &*resources.streams.compute;
        for (&bucket, slice) in self.buckets.iter().zip(&buckets.slices).filter(|_| buckets.fresh) {
            if poison {
                fill(compute, slice, Fill::Poison)?;
            }
            for pad in resources.buckets[bucket].layout.pads() {
                fill(compute, &slice.range(pad), Fill::Zero)?;
            }
        }
        self.target = Target::Open(buckets);
        Ok(())
    }

    /// What was written stays, and the next backward adds to it.
    pub(super) fn hold(&mut self) {
        let written = self.close();
        self.target =
            written.map_or(Target::None, |buckets| Target::Held(Buckets { fresh: false, ..buckets }));
    }

    /// Ends the writing; `None` if there was none.
    pub(super) fn close(&mut self) -> Option<Buckets> {
        match std::mem::take(&mut self.target) {
            Target::Open(buckets) | Target::Held(buckets) => Some(buckets),
            Target::None => None,
        }
    }

    /// The main gradients of each bucket.
    pub(super) fn mains<'a>(
        &'a self,
        resources: &'a Resources,
    ) -> impl ExactSizeIterator<Item = &'a DataParallelBuffer> {
        let main = |&bucket: &BucketId| resources.buckets[bucket].main_grad.as_ref();
        self.buckets.iter().map(main).map(|main| main.expect("a trainable bucket has main gradients"))
    }

    /// Launches the reduce-scatter of `parts`.
    pub(super) fn reduce_scatter(
        resources: &Resources,
        comm: &dyn Communicator,
        path: &Arc<str>,
        parts: Vec<Reduce>,
        moment: Moment,
    ) -> Result<(), CommError> {
        let reduce = &resources.streams.reduce;
        reduce.wait(&resources.streams.compute.record())?;
        if parts.is_empty() {
            return Ok(());
        }
        resources.tracer.enqueue(&**reduce, "reduce", "reduce-scatter", path, || {
            comm.reduce_scatter(&**reduce, moment.tag(path), parts)
        })
    }

    /// ZeRO-0 and 1: reduces the whole main gradients in place; what travels are their casts in `wire`, if there are any.
    /// Where they are `replicated` every rank gets all of the sum.
    pub(super) fn reduce_whole(
        &self,
        resources: &Resources,
        comm: &dyn Communicator,
        path: &Arc<str>,
        wire: &[Slice],
        (scale, replicated): (f32, bool),
        moment: Moment,
    ) -> Result<(), CommError> {
        let (reduce, tracer) = (&resources.streams.reduce, &resources.tracer);
        if replicated && wire.is_empty() {
            reduce.wait(&resources.streams.compute.record())?;
            let parts = self.mains(resources).map(|grads| (grads.data().clone(), scale)).collect();
            return tracer.enqueue(&**reduce, "reduce", "all-reduce", path, || {
                comm.all_reduce(&**reduce, moment.tag(path), parts)
            });
        }
        let parts = self.mains(resources).enumerate().map(|(index, grads)| Reduce {
            send: wire.get(index).unwrap_or_else(|| grads.data()).clone(),
            recv: grads.shard(),
            scale,
            accumulate: Accumulate::Overwrite,
        });
        Self::reduce_scatter(resources, comm, path, parts.collect(), moment)?;
        if replicated {
            let whole =
                |grads: &DataParallelBuffer| Gather { send: grads.shard(), recv: grads.data().clone() };
            let parts = self.mains(resources).map(whole).collect();
            tracer.enqueue(&**reduce, "reduce", "all-gather gradients", path, || {
                comm.all_gather(&**reduce, moment.tag(path), parts)
            })?;
        }
        Ok(())
    }

    /// Reduces the main gradients over the outer ranks, in place, once the inner ranks have reduced them. Without inner
    /// sharding they are `whole`.
    pub(super) fn reduce_outer(
        &self,
        resources: &Resources,
        outer: &Outer,
        path: &Arc<str>,
        whole: bool,
        moment: Moment,
    ) -> Result<(), CommError> {
        let Outer { comm, stream, strategy } = outer;
        stream.wait(&resources.streams.reduce.record())?;
        let (tag, tracer) = (moment.tag(path), &resources.tracer);
        match strategy {
            OuterStrategy::NoShard => {
                let part = |grads: &DataParallelBuffer| match whole {
                    true => (grads.data().clone(), 1.0),
                    false => (grads.shard(), 1.0),
                };
                let parts = self.mains(resources).map(part).collect();
                tracer.enqueue(&**stream, "outer reduce", "outer all-reduce", path, || {
                    comm.all_reduce(&**stream, tag, parts)
                })
            }
            OuterStrategy::Optim => {
                let owned = self.buckets.iter().map(|&bucket| resources.buckets[bucket].owned.clone());
                let parts = self.mains(resources).zip(owned).map(|(grads, owned)| Reduce {
                    send: grads.shard(),
                    recv: grads.part(owned),
                    scale: 1.0,
                    accumulate: Accumulate::Overwrite,
                });
                let parts = parts.collect();
                tracer.enqueue(&**stream, "outer reduce", "outer reduce-scatter", path, || {
                    comm.reduce_scatter(&**stream, tag, parts)
                })
            }
        }
    }
}
