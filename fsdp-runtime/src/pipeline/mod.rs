//! The two schedules of communication: parameters are gathered ahead of their use, gradients are reduced
//! behind their birth. Both know units, buckets, streams and events, and nothing of models or autograd.

mod all_gather;
mod grad_reduce;
mod order;
mod registration;

use std::sync::Arc;

pub(crate) use all_gather::{AllGatherPipeline, Change, GatherOptions, GatherUnit, Pass, Prefetch, Reshard};
pub(crate) use grad_reduce::{GradReducePipeline, GradTarget, Outer, ReduceOptions, ReducedUnit, Sync};
use order::Order;

use crate::comm::{Phase, Tag};
use crate::device::Stream;

/// The three queues of a rank: compute, and one for each direction of communication.
#[derive(Clone)]
pub(crate) struct Streams {
    pub compute: Arc<dyn Stream>,
    pub gather: Arc<dyn Stream>,
    pub reduce: Arc<dyn Stream>,
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
