//! The two schedules of communication: parameters are gathered ahead of their use, gradients are reduced
//! behind their birth. Both know units, buckets, streams and events, and nothing of models or autograd.
//!
//! A schedule decides: which unit, when, and who has to make room for it. What is then done is done by the unit's
//! [`Weights`] and [`Grads`].

mod all_gather;
mod grad_reduce;
mod grads;
mod order;
mod registration;
mod unit;
mod weights;

use std::sync::Arc;

pub(crate) use all_gather::{AllGatherPipeline, GatherOptions, Pass, Prefetch};
pub(crate) use grad_reduce::{GradReducePipeline, Outer, ReduceOptions, ReducedUnit, Sync};
pub(crate) use grads::{GradPart, Grads};
use order::Order;
pub(crate) use unit::{Unit, Units};
pub(crate) use weights::{Change, Reshard, Weights};

use super::ids::{BucketId, Table, UnitId};
use crate::buffer::BucketBuffers;
use crate::comm::{Phase, Tag};
use crate::device::Stream;
use crate::memory::Account;
use crate::trace::Tracer;

/// The three queues of a rank: compute, and one for each direction of communication.
#[derive(Clone)]
pub(crate) struct Streams {
    pub compute: Arc<dyn Stream>,
    pub gather: Arc<dyn Stream>,
    pub reduce: Arc<dyn Stream>,
}

/// What the schedules of a rank work with. Nothing of it changes but the content of the buckets.
pub(crate) struct Resources {
    pub streams: Streams,
    pub account: Account,
    pub tracer: Arc<Tracer>,
    /// The root first.
    pub units: Table<UnitId, Unit>,
    pub buckets: Table<BucketId, BucketBuffers>,
}

/// Where in training a pipeline is asked to act; becomes the tag of its collectives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub phase: Phase,
    pub step: u64,
}

impl Moment {
    pub(crate) fn tag(self, unit: &Arc<str>) -> Tag {
        Tag { unit: unit.clone(), phase: self.phase, step: self.step }
    }
}
