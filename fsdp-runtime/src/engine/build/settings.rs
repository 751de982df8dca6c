//! What a configuration means on a mesh, and what contradicts what.

use crate::comm::DeviceMesh;
use crate::engine::build::collect::Collected;
use crate::engine::optim::in_backward::check_strategy;
use crate::engine::{FsdpConfig, GradientScaling, NonFinite, UnitCell};
use crate::error::{Error, Result};
use crate::layout::POOLED_UNITS;
use crate::mesh::{MeshDim, Topology};
use crate::spec::{Dtype, MixedPrecision, ReshardAfterForward};

pub(crate) fn check_mesh(mesh: &DeviceMesh) -> Result<()> {
    for &(dim, size) in mesh.topology().dims() {
        if matches!(dim, MeshDim::Tp | MeshDim::Ep) && size != 1 {
            return Err(Error::Config(format!(
                "mesh dim `{dim}` has size {size}: only `dp_outer`, `dp_shard` and `cp` can be larger than 1 so far"
            )));
        }
    }
    match mesh.communicator().moves_no_data() {
        Some(why) => Err(Error::Config(format!(
            "a model cannot be sharded over this mesh: {why}, which its weights and gradients need. Start ranks that compute \
             on the CPU as threads of one process (`launch::local`); ranks with a GPU each put the mesh on it first \
             (`mesh.on(&device)`, features `cuda` and `nccl`)"
        ))),
        None => Ok(()),
    }
}

/// Registered buffers are as many as were registered.
pub(crate) fn check_prefetch(config: &FsdpConfig, ahead: usize) -> Result<()> {
    let room = config.prefetch.max(POOLED_UNITS - 1);
    if config.registration.is_none() || ahead <= room {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{ahead} units are to be gathered ahead, but the registered pool has buffers for {room} besides the present unit: \
         shard the model with `FsdpConfig {{ prefetch: {ahead}, .. }}`"
    )))
}

/// Weights can be kept by groups only of as many ranks as divide all.
pub(crate) fn check_reshard(collected: &Collected<'_>, config: &FsdpConfig, ranks: usize) -> Result<()> {
    for (unit, mode) in collected.units.iter().zip(reshard_modes(&collected.cells, config)) {
        if let ReshardAfterForward::Ranks(group) = mode
            && (group == 0 || !ranks.is_multiple_of(group))
        {
            return Err(Error::Config(format!(
                "unit `{}` is to be resharded after forward to groups of {group} ranks: {ranks} ranks share its \
                 shards, which {group} does not divide",
                unit.path
            )));
        }
    }
    Ok(())
}

/// The mesh dims whose ranks share the shards.
pub(crate) const SHARD_DIMS: [MeshDim; 2] = [MeshDim::DpShard, MeshDim::Cp];

pub(crate) fn shard_ranks(mesh: &Topology) -> usize {
    SHARD_DIMS.into_iter().map(|dim| mesh.size(dim)).product()
}

pub(crate) fn check_precision(config: &FsdpConfig) -> Result<()> {
    let MixedPrecision { reduce, main_grads, .. } = config.precision;
    if main_grads == Dtype::F32 || main_grads == reduce {
        return Ok(());
    }
    Err(Error::Config(format!(
        "main gradients are kept in f32 or in the dtype in which gradients are reduced, {reduce}, not in {main_grads}"
    )))
}

pub(crate) fn check_step_in_backward(config: &FsdpConfig, mesh: &Topology) -> Result<()> {
    if !config.step_in_backward {
        return Ok(());
    }
    let message = if mesh.size(MeshDim::DpOuter) > 1 {
        "`step_in_backward` steps a unit when its gradients are reduced among the ranks that share its shards: it \
         cannot be used with more than one rank of `dp_outer`, whose reduction comes later"
    } else if config.non_finite == NonFinite::SkipStep {
        "`step_in_backward` steps a unit before the gradients of all are known: it cannot be used with \
         `NonFinite::SkipStep`, which skips the step of all"
    } else if config.scaling == GradientScaling::PerToken {
        "`step_in_backward` steps a unit before the tokens of the step are counted: it cannot be used with \
         `GradientScaling::PerToken`"
    } else {
        return check_strategy(config.strategy);
    };
    Err(Error::Config(message.into()))
}

/// What each unit does with its whole weights between forward and backward, the root first.
pub(crate) fn reshard_modes(cells: &[&UnitCell], config: &FsdpConfig) -> Vec<ReshardAfterForward> {
    let root = ReshardAfterForward::Never;
    let of_cell = |cell: &&UnitCell| cell.reshard.unwrap_or(config.reshard_after_forward);
    std::iter::once(root).chain(cells.iter().map(of_cell)).collect()
}
