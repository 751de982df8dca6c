//! `fully_shard`: from a model to a sharded one.

pub(crate) mod agreement;
mod collect;
pub(crate) mod constant;
mod fused;
pub(crate) mod module;
pub(crate) mod settings;
pub(crate) mod variants;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::buffer::{BucketBuffers, Placement};
use crate::comm::{Communicator, DeviceMesh, Phase, Tag};
use crate::device::TensorDevice;
use crate::engine::api::param::Bound;
use crate::engine::build::agreement::{compare, fingerprint};
use crate::engine::build::collect::{Collected, collect, collect_params};
use crate::engine::build::settings::{
    SHARD_DIMS, check_mesh, check_precision, check_reshard, check_step_in_backward, reshard_modes,
    shard_ranks,
};
use crate::engine::ctx::{PhysicalParam, Saves, next_id};
use crate::engine::io::{buffers, load};
use crate::engine::schedule::{
    AllGatherPipeline, GatherOptions, GradReducePipeline, Grads, Outer, Prefetch, ReduceOptions, Reshard,
    Resources, Streams, Unit, Units, Weights,
};
use crate::engine::{
    BucketId, Ctx, Engine, Fsdp, FsdpConfig, FsdpUnit, GradSink, Id, ParamId, Table, UnitId,
};
use crate::error::{Error, Result};
use crate::layout::{BucketLayout, LayoutOptions, ModelLayout, POOLED_UNITS, UnitLayout};
use crate::memory::{Account, Category, Variable};
use crate::mesh::{MeshDim, Topology};
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
    let params = physical_params(&layout, backend.tensors())?;
    let id = next_id();
    bind_params(&collected, &layout, &params, id)?;

    let rank = comm.rank();
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
    let strategy = config.strategy;
    let placement = Placement { strategy, rank: shard_comm.rank(), outer_rank: outer_comm.rank() };
    let allocate = |bucket: &BucketLayout| {
        let keep_grads = !config.step_in_backward;
        // SAFETY: the rank's engine keeps the buffers and gives them to its pipelines only. Those gather model weights on one
        // stream and reduce gradients on another; the compute stream waits for the events of both before it uses what they
        // have written, and they wait for its event before they use what it has. What writes weights or takes gradients
        // waits first for all that is under way (`weights::settle`, `gradients::finish`).
        unsafe {
            BucketBuffers::allocate(&persistent, bucket.clone(), placement, &config.precision, keep_grads)
        }
    };
    let resources = Arc::new(Resources {
        streams,
        account,
        tracer: Tracer::new(config.trace),
        units: units(&layout, &reshard_modes(&collected.cells, config)),
        buckets: layout.buckets.iter().map(allocate).collect::<Result<_, _>>()?,
    });
    let saves = Saves {
        comm: mesh.communicator().duplicate(&format!("{name} checkpoint")),
        turns: Arc::default(),
        locks: Arc::default(),
    };
    let ctx = Ctx {
        id,
        name: name.into(),
        config: config.clone(),
        mesh: mesh.topology().clone(),
        comm,
        shard_comm,
        outer_comm,
        saves,
        backend,
        layout,
        resources,
        params,
        buffers: collected.buffers.clone(),
    };
    let (mut gather, weights) = gather_pipeline(&ctx)?;
    let (mut reduce, grads) = reduce_pipeline(&ctx)?;
    let units = Units::at_rest(weights, grads);
    if let Some(how) = config.registration {
        gather.register_pool(&units, how)?;
        reduce.register_pool(how)?;
    }
    let engine = Engine::new(ctx, units, gather, reduce);
    for (cell, unit) in collected.cells.iter().zip(engine.ctx.resources.units.ids().skip(1)) {
        if !cell.bind(&engine, unit)? {
            let unit = engine.ctx.unit_name(unit);
            return Err(Error::Usage(format!("unit `{unit}` is part of a sharded model already")));
        }
    }
    load::fill_weights(&engine, None, |param, spec, range, out| {
        for piece in spec.pieces(range) {
            let elements = piece.elements.start as u64..piece.elements.end as u64;
            let init = &collected.inits[param.index()];
            init.fill(config.seed, piece.tensor.name, elements, &mut out[piece.at]);
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

fn units(layout: &ModelLayout, reshard: &[ReshardAfterForward]) -> Table<UnitId, Unit> {
    let unit = |(unit, &reshard): (&UnitLayout, &ReshardAfterForward)| {
        let layouts = || unit.buckets.iter().map(|&bucket| &layout.buckets[bucket]);
        let items = layouts().flat_map(|layout| &layout.items);
        Unit {
            path: unit.path.as_str().into(),
            buckets: unit.buckets.iter().copied().map(BucketId::new).collect(),
            params: items.map(|item| ParamId::new(item.param)).collect(),
            numel: layouts().map(|layout| layout.size).sum(),
            reshard,
        }
    };
    layout.units.iter().zip(reshard).map(unit).collect()
}

/// What each unit does with its whole weights, with the groups of neighbours that some gather in.
fn reshard_groups(ctx: &Ctx) -> Result<Table<UnitId, Reshard>> {
    let comm = &ctx.shard_comm;
    let mut groups: Vec<(usize, Arc<dyn Communicator>)> = Vec::new();
    let mut all = Vec::with_capacity(ctx.resources.units.len());
    for (id, unit) in ctx.resources.units.entries() {
        all.push(match unit.reshard {
            _ if !ctx.config.strategy.shards_params() || id == UnitId::ROOT => Reshard::Always,
            ReshardAfterForward::Always => Reshard::Always,
            ReshardAfterForward::Never => Reshard::Never,
            ReshardAfterForward::Ranks(ranks) if ranks == comm.size() => Reshard::Always,
            ReshardAfterForward::Ranks(1) => Reshard::Never,
            ReshardAfterForward::Ranks(ranks) => {
                if groups.iter().all(|(known, _)| *known != ranks) {
                    let first = comm.rank() / ranks * ranks;
                    let neighbours: Vec<usize> = (first..first + ranks).collect();
                    groups.push((ranks, comm.split(&format!("gather within {ranks}"), &neighbours)?));
                }
                let group = groups.iter().find(|(known, _)| *known == ranks);
                Reshard::Within(group.expect("it is known now").1.clone())
            }
        });
    }
    Ok(all.into())
}

fn gather_pipeline(ctx: &Ctx) -> Result<(AllGatherPipeline, Vec<Weights>)> {
    let config = &ctx.config;
    let comm = ctx.shard_comm.duplicate("gather");
    let shares_optim = ctx.outer_comm.size() > 1 && config.outer == OuterStrategy::Optim;
    let options = GatherOptions {
        // One rank's shards are whole weights: there is nothing to gather, and nothing to hold beside them.
        strategy: if ctx.shard_comm.size() == 1 { Strategy::NoShard } else { config.strategy },
        prefetch: Prefetch { forward: config.prefetch, backward: config.prefetch },
        budget: config.gather_budget,
        depth: POOLED_UNITS,
        double_buffer: config.double_buffer,
        poison: config.poison,
        split_root: config.bucket_size.is_some(),
        outer: shares_optim.then(|| ctx.outer_comm.duplicate("gather")),
    };
    Ok(AllGatherPipeline::new(comm, options, &ctx.resources, reshard_groups(ctx)?))
}

fn reduce_pipeline(ctx: &Ctx) -> Result<(GradReducePipeline, Vec<Grads>)> {
    let config = &ctx.config;
    let comm = ctx.shard_comm.duplicate("reduce");
    let outer = || -> Result<Outer> {
        let stream = ctx.backend.side(format!("rank{}/outer-reduce", ctx.comm.rank()))?;
        Ok(Outer { comm: ctx.outer_comm.duplicate("reduce"), stream, strategy: config.outer })
    };
    let options = ReduceOptions {
        strategy: config.strategy,
        wire: config.precision.reduce,
        main: config.precision.main_grads,
        scale: config.scaling.factor(ctx.comm.size()),
        depth: POOLED_UNITS,
        budget: config.reduce_budget,
        double_buffer: config.double_buffer,
        poison: config.poison,
        split_root: config.bucket_size.is_some(),
        outer: (ctx.outer_comm.size() > 1).then(outer).transpose()?,
    };
    Ok(GradReducePipeline::new(comm, options, &ctx.resources))
}

fn physical_params(
    layout: &ModelLayout,
    device: &candle_core::Device,
) -> Result<Table<ParamId, PhysicalParam>> {
    let param = |(param, spec): (usize, &ParamSpec)| {
        let (bucket, item) = layout.place_of(param);
        let shape = candle_core::Shape::from(spec.shape.as_slice());
        let variable = Variable::new(&shape, spec.key.dtype, spec.key.requires_grad, device)?;
        let (bucket, sink, read) = (BucketId::new(bucket), GradSink::closed(), AtomicBool::new(false));
        Ok(PhysicalParam { bucket, item, variable, sink, read })
    };
    layout.params.iter().enumerate().map(param).collect()
}

fn bind_params(
    collected: &Collected<'_>,
    layout: &ModelLayout,
    params: &Table<ParamId, PhysicalParam>,
    engine: usize,
) -> Result<()> {
    for item in &collected.uses {
        let PhysicalParam { variable, sink, .. } = &params[item.param_id];
        let key = layout.params[item.param_id.index()].key;
        let bound = Bound {
            engine,
            name: item.name.clone(),
            unit: UnitId::new(key.unit),
            param: item.param_id,
            variable: variable.tensor().clone(),
            requires_grad: key.requires_grad,
            sink: if key.requires_grad { sink.clone() } else { GradSink::closed() },
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
