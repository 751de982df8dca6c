//! One communication unit: the parameters that are gathered, used and reduced together.

use std::sync::Arc;

use super::super::ids::{BucketId, ParamId, Table, UnitId};
use super::{Grads, Weights};
use crate::memory::Aliases;
use crate::spec::ReshardAfterForward;

/// What a unit is, which never changes. (`engine::Unit` is the handle that a model has.)
#[derive(Debug)]
pub(crate) struct Unit {
    /// Empty for the root.
    pub path: Arc<str>,
    pub buckets: Vec<BucketId>,
    pub params: Vec<ParamId>,
    /// Elements of its buckets.
    pub numel: usize,
    /// What is asked for its whole weights between forward and backward.
    pub reshard: ReshardAfterForward,
}

/// What a unit is doing.
pub(crate) struct UnitState {
    pub weights: Weights,
    pub grads: Grads,
    /// The tensors that have its whole weights now.
    pub aliases: Aliases,
    /// Nobody uses it, but a tensor still has its memory.
    pub stuck: bool,
}

/// What all units are doing.
pub(crate) type Units = Table<UnitId, UnitState>;

impl Units {
    /// Units that do nothing yet.
    pub(crate) fn at_rest(
        weights: impl IntoIterator<Item = Weights>,
        grads: impl IntoIterator<Item = Grads>,
    ) -> Units {
        let state =
            |(weights, grads)| UnitState { weights, grads, aliases: Aliases::default(), stuck: false };
        weights.into_iter().zip(grads).map(state).collect()
    }
}
