//! `fully_shard`: from a model to a sharded one.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::agreement::{compare, fingerprint};
use super::buffers;
use super::collect::{Collected, collect, collect_params};
use super::config::FsdpConfig;
use super::core::{Engine, Parts, ROOT, Slot, UnitInfo, next_id};
use super::fsdp::Fsdp;
use super::module::FsdpUnit;
use super::param::Bound;
use super::settings::{
    SHARD_DIMS, check_mesh, check_precision, check_reshard, check_step_in_backward, reshard_modes,
    shard_ranks,
};
use super::sink::GradSink;
use crate::buffer::{GroupBuffers, Placement};
use crate::comm::{Communicator, DeviceMesh, Phase, Tag};
use crate::device::TensorDevice;
use crate::error::{Error, Result};
use crate::layout::{BucketLayout, LayoutOptions, ModelLayout, POOLED_UNITS, UnitLayout};
use crate::memory::{Account, Category, Variable};
use crate::mesh::{MeshDim, Topology};
use crate::pipeline::{
    AllGatherPipeline, GatherOptions, GatherUnit, GradReducePipeline, Outer, Prefetch, ReduceOptions,
    Reshard, Streams,
};
use crate::spec::{OuterStrategy, ParamSpec, ReshardAfterForward, Strategy};
use crate::trace::Tracer;

/// Sharding of a whole model. Implemented for every [`FsdpUnit`].
pub trait FullyShard: FsdpUnit + Sized {
    /// Shards the model over the `dp_shard` dim of `mesh` (flattened with `cp`) and replicates it over
    /// `dp_outer`, with the default configuration (ZeRO-3, FP32).
    ///
    /// Every rank of the mesh must call it, with the same model. Each then owns 1/N of every parameter,
    /// filled with its initial values; no rank ever holds more than its shard and, while it runs, the units
    /// in use. Buffers are whole on every rank and start as rank 0 has them.
    ///
    /// # Errors
    /// If the ranks' models differ (naming the first parameter that does), a tie cannot be resolved, or the
    /// mesh does not fit.
    fn fully_shard(self, mesh: &DeviceMesh) -> Result<Fsdp<Self>> {
        self.fully_shard_with(mesh, &FsdpConfig::default())
    }

    /// The same with a configuration, which must be the same on all ranks.
    ///
    /// # Errors
    /// As for [`FullyShard::fully_shard`], and if the configuration contradicts itself.
    fn fully_shard_with(self, mesh: &DeviceMesh, config: &FsdpConfig) -> Result<Fsdp<Self>> {
        let engine = build(&self, mesh, config)?;
        Ok(Fsdp::new(self, engine))
    }

    /// The layout that the model would have on a mesh: parameters with their shapes, groups and
    /// tensor-parallel dims, units, buckets, shards. Allocates nothing and asks no other rank.
    ///
    /// # Errors
    /// As for [`FullyShard::fully_shard`], except for what only a comparison of ranks can find.
    ///
    /// ```
    /// use fsdp_runtime::mesh::Topology;
    /// use fsdp_runtime::{FsdpConfig, FullyShard, Param};
    ///
    /// let mesh = Topology::new(&[("dp_shard", 8)], 8)?;
    /// let layout = Param::new((100, 10)).layout(&mesh, &FsdpConfig::default())?;
    /// assert_eq!(layout.buckets[0].shard_len(), 128); // 1000 elements, padded to 8 x 16
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn layout(&self, mesh: &Topology, config: &FsdpConfig) -> Result<ModelLayout> {
        Ok(lay_out(self, mesh, config)?.1)
    }

    /// Freezes every parameter of the module (`false`) or makes all of them trainable, whatever their
    /// attributes say. To be called before the model is sharded; what is called later wins, so a model can be
    /// frozen and then its adapters be made trainable.
    ///
    /// # Errors
    /// If a parameter is sharded already.
    fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        collect_params(self).into_iter().try_for_each(|param| param.set_requires_grad(requires_grad))
    }
}

impl<M: FsdpUnit> FullyShard for M {}

fn build<M: FsdpUnit>(model: &M, mesh: &DeviceMesh, config: &FsdpConfig) -> Result<Arc<Engine>> {
    // Channels are named for the model's type, so that those of several models can be told apart.
    let name = std::any::type_name::<M>().split('<').next().unwrap_or_default();
    let name = name.rsplit("::").next().unwrap_or(name);
    check_mesh(mesh)?;
    check_step_in_backward(config, mesh.topology())?;
    check_precision(config)?;
    let comm = mesh.communicator().duplicate(name);
    // Before the groups, which ranks whose meshes differ would make differently.
    let (collected, layout) = agree_on_layout(model, &*comm, mesh.topology(), config)?;
    let shard_comm = mesh.group(&SHARD_DIMS)?.duplicate(name);
    let outer_comm = mesh.group(&[MeshDim::DpOuter])?.duplicate(name);
    buffers::broadcast(model, &*comm)?;
    let backend = mesh.backend().clone();
    let slots = slots(&layout, backend.tensors())?;
    let id = next_id();
    bind_params(&collected, &layout, &slots, id)?;

    let rank = comm.rank();
    let strategy = config.strategy;
    let placement = Placement { strategy, rank: shard_comm.rank(), outer_rank: outer_comm.rank() };
    let account = Account::new(backend.memory());
    for comm in [&comm, &shard_comm, &outer_comm] {
        comm.allocate_by(account.allocator(Category::Collectives));
    }
    let streams = Streams {
        compute: backend.compute(),
        gather: backend.side(format!("rank{rank}/all-gather"))?,
        reduce: backend.side(format!("rank{rank}/reduce"))?,
    };
    // What the outer ranks' collectives work on stays, and can be registered.
    let persistent = match outer_comm.registrable() {
        Some(memory) if config.registration.is_some() && outer_comm.size() > 1 => account.in_memory(memory),
        _ => account.clone(),
    };
    let allocate = |bucket: &BucketLayout| {
        let keep_grads = !config.step_in_backward;
        // SAFETY: the rank's engine keeps the buffers and gives them to its pipelines only. Those gather model weights on one
        // stream and reduce gradients on another; the compute stream waits for the events of both before it uses what they
        // have written, and they wait for its event before they use what it has. What writes weights or takes gradients
        // waits first for all that is under way (`Engine::settle`, `Engine::finish_grad_sync`).
        unsafe {
            GroupBuffers::allocate(&persistent, bucket.clone(), placement, &config.precision, keep_grads)
        }
    };
    let parts = Parts {
        id,
        name: name.into(),
        config: config.clone(),
        mesh: mesh.topology().clone(),
        buffers: collected.buffers.clone(),
        seen_buffers: Default::default(),
        groups: layout.buckets.iter().map(allocate).collect::<Result<_, _>>()?,
        units: units(&layout),
        reshard: reshard_modes(&collected.cells, config),
        checkpoint_comm: mesh.communicator().duplicate(&format!("{name} checkpoint")),
        checkpoint_turns: Arc::default(),
        checkpoint_locks: Arc::default(),
        comm,
        shard_comm,
        outer_comm,
        backend,
        streams,
        account,
        tracer: Tracer::new(config.trace),
        layout,
        slots,
    };
    let (mut gather, mut reduce) = (gather_pipeline(&parts)?, reduce_pipeline(&parts)?);
    if let Some(how) = config.registration {
        gather.register_pool(&parts.groups, how)?;
        reduce.register_pool(&parts.groups, how)?;
    }
    let engine = Engine::new(parts, gather, reduce);
    for (index, cell) in collected.cells.iter().enumerate() {
        if !cell.bind(&engine, index + 1)? {
            let unit = engine.unit_name(index + 1).to_string();
            return Err(Error::Usage(format!("unit `{unit}` is part of a sharded model already")));
        }
    }
    engine.fill_weights(|param, spec, range, out| {
        for piece in spec.pieces(range) {
            let elements = piece.elements.start as u64..piece.elements.end as u64;
            collected.inits[param].fill(config.seed, piece.tensor.name, elements, &mut out[piece.at]);
        }
        Ok(())
    })?;
    Ok(engine)
}

/// The model's parameters and their layout, the same on all ranks. A rank that fails alone takes part in the
/// comparison with what it has, so that it does not leave the others waiting.
fn agree_on_layout<'a, M: FsdpUnit>(
    model: &'a M,
    comm: &dyn Communicator,
    mesh: &Topology,
    config: &FsdpConfig,
) -> Result<(Collected<'a>, ModelLayout)> {
    let agreed = lay_out(model, mesh, config);
    let tag = Tag { unit: "model fingerprint".into(), phase: Phase::Setup, step: 0 };
    let mut lines = fingerprint(config, mesh, agreed.as_ref());
    lines.extend(buffers::fingerprint(model));
    compare(comm, tag, &lines)?;
    agreed
}

fn lay_out<'a, M: FsdpUnit>(
    model: &'a M,
    mesh: &Topology,
    config: &FsdpConfig,
) -> Result<(Collected<'a>, ModelLayout)> {
    let ranks = shard_ranks(mesh);
    let outer = match config.outer {
        OuterStrategy::NoShard => 1,
        OuterStrategy::Optim => mesh.size(MeshDim::DpOuter),
    };
    if outer > 1 && ranks > 1 && !config.strategy.shards_optim() {
        return Err(Error::Config(format!(
            "the outer strategy `{}` cuts the optimizer state of a shard, but with strategy `{}` the {ranks} inner \
             ranks have no shards: shard the optimizer state at least",
            config.outer, config.strategy
        )));
    }
    let (alignment, bucket_size) = (config.alignment, config.bucket_size);
    let options = LayoutOptions { ranks, outer, alignment, bucket_size };
    let collected = collect(model, config, mesh)?;
    check_reshard(&collected, config, ranks)?;
    let layout = ModelLayout::build(collected.specs.clone(), &collected.units, &options)?;
    Ok((collected, layout))
}

fn units(layout: &ModelLayout) -> Vec<UnitInfo> {
    let params = |bucket: &usize| layout.buckets[*bucket].items.iter().map(|item| item.param);
    let unit = |unit: &UnitLayout| UnitInfo {
        path: unit.path.as_str().into(),
        groups: unit.buckets.clone(),
        params: unit.buckets.iter().flat_map(params).collect(),
    };
    layout.units.iter().map(unit).collect()
}

/// The units as the gather pipeline wants them, with the groups of neighbours that some gather in.
fn gather_units(parts: &Parts) -> Result<Vec<GatherUnit>> {
    let comm = &parts.shard_comm;
    let mut groups: Vec<(usize, Arc<dyn Communicator>)> = Vec::new();
    let mut units = Vec::with_capacity(parts.units.len());
    for (index, (unit, mode)) in parts.units.iter().zip(&parts.reshard).enumerate() {
        let reshard = match *mode {
            _ if !parts.config.strategy.shards_params() || index == ROOT => Reshard::Always,
            ReshardAfterForward::Always => Reshard::Always,
            ReshardAfterForward::Never => Reshard::Never,
            ReshardAfterForward::Ranks(ranks) if ranks == comm.size() => Reshard::Always,
            ReshardAfterForward::Ranks(1) => Reshard::Never,
            ReshardAfterForward::Ranks(ranks) => {
                let known = groups.iter().find(|(known, _)| *known == ranks).map(|(_, group)| group.clone());
                Reshard::Within(match known {
                    Some(group) => group,
                    None => {
                        let first = comm.rank() / ranks * ranks;
                        let neighbours: Vec<usize> = (first..first + ranks).collect();
                        let group = comm.split(&format!("gather within {ranks}"), &neighbours)?;
                        groups.push((ranks, group.clone()));
                        group
                    }
                })
            }
        };
        units.push(GatherUnit { path: unit.path.clone(), groups: unit.groups.clone(), reshard });
    }
    Ok(units)
}

fn paths_and_groups(parts: &Parts) -> Vec<(Arc<str>, Vec<usize>)> {
    parts.units.iter().map(|unit| (unit.path.clone(), unit.groups.clone())).collect()
}

fn gather_pipeline(parts: &Parts) -> Result<AllGatherPipeline> {
    let config = &parts.config;
    Ok(AllGatherPipeline::new(
        parts.shard_comm.duplicate("gather"),
        parts.streams.clone(),
        parts.tracer.clone(),
        &parts.account,
        GatherOptions {
            // One rank's shards are whole weights: there is nothing to gather, and nothing to hold beside them.
            strategy: if parts.shard_comm.size() == 1 { Strategy::NoShard } else { config.strategy },
            prefetch: Prefetch { forward: config.prefetch, backward: config.prefetch },
            budget: config.gather_budget,
            depth: POOLED_UNITS,
            double_buffer: config.double_buffer,
            poison: config.poison,
            split_root: config.bucket_size.is_some(),
            outer: shares_optim(parts).then(|| parts.outer_comm.duplicate("gather")),
        },
        gather_units(parts)?,
        &parts.groups,
    ))
}

/// The outer ranks share the optimizer state.
fn shares_optim(parts: &Parts) -> bool {
    parts.outer_comm.size() > 1 && parts.config.outer == OuterStrategy::Optim
}

fn outer_reduction(parts: &Parts) -> Result<Option<Outer>> {
    if parts.outer_comm.size() == 1 {
        return Ok(None);
    }
    let comm = parts.outer_comm.duplicate("reduce");
    let stream = parts.backend.side(format!("rank{}/outer-reduce", parts.comm.rank()))?;
    Ok(Some(Outer { comm, stream, strategy: parts.config.outer }))
}

fn reduce_pipeline(parts: &Parts) -> Result<GradReducePipeline> {
    let config = &parts.config;
    Ok(GradReducePipeline::new(
        parts.shard_comm.duplicate("reduce"),
        parts.streams.clone(),
        parts.tracer.clone(),
        &parts.account,
        ReduceOptions {
            strategy: config.strategy,
            wire: config.precision.reduce,
            main: config.precision.main_grads,
            scale: config.scaling.factor(parts.comm.size()),
            depth: POOLED_UNITS,
            budget: config.reduce_budget,
            double_buffer: config.double_buffer,
            poison: config.poison,
            split_root: config.bucket_size.is_some(),
            outer: outer_reduction(parts)?,
        },
        paths_and_groups(parts),
        &parts.groups,
    ))
}

fn slots(layout: &ModelLayout, device: &candle_core::Device) -> Result<Vec<Slot>> {
    (0..layout.params.len())
        .map(|param| {
            let (group, item) = layout.place_of(param);
            let ParamSpec { shape, key, .. } = &layout.params[param];
            let shape = candle_core::Shape::from(shape.as_slice());
            let variable = Variable::new(&shape, key.dtype, key.requires_grad, device)?;
            Ok(Slot { group, item, variable, sink: GradSink::closed(), read: AtomicBool::new(false) })
        })
        .collect()
}

fn bind_params(collected: &Collected<'_>, layout: &ModelLayout, slots: &[Slot], engine: usize) -> Result<()> {
    for item in &collected.uses {
        let slot = &slots[item.slot];
        let key = layout.params[item.slot].key;
        let bound = Bound {
            engine,
            name: item.name.clone(),
            unit: key.unit,
            slot: item.slot,
            variable: slot.variable.tensor().clone(),
            requires_grad: key.requires_grad,
            sink: if key.requires_grad { slot.sink.clone() } else { GradSink::closed() },
        };
        // A clone of a parameter is the same cell: its first use has bound it.
        let clone = item.param.bound().is_some_and(|bound| bound.engine == engine);
        if !item.param.bind(bound) && !clone {
            let message = "is part of a sharded model already".into();
            return Err(Error::Param { param: item.name.clone(), message });
        }
    }
    Ok(())
}
