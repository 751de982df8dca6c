//! `fully_shard`: from a model to a sharded one.

use std::ops::Range;
use std::sync::Arc;

use super::backward_step::check_strategy;
use super::buffers;
use super::collect::{Collected, collect, collect_params};
use super::config::{FsdpConfig, GradientScaling};
use super::core::{Engine, Parts, ROOT, Slot, UnitInfo, next_id};
use super::fsdp::Fsdp;
use super::module::FsdpUnit;
use super::param::Bound;
use super::sink::GradSink;
use super::unit::UnitCell;
use crate::buffer::{GroupBuffers, Placement};
use crate::comm::{CommError, Communicator, DeviceMesh, Phase, Tag};
use crate::device::{Slice, cast, cpu};
use crate::error::{Error, Result};
use crate::layout::{BucketLayout, LayoutOptions, ModelLayout, POOLED_UNITS, UnitLayout};
use crate::memory::{Account, variable};
use crate::mesh::{MeshDim, Topology};
use crate::pipeline::{
    AllGatherPipeline, Change, GatherOptions, GatherUnit, GradReducePipeline, Outer, Prefetch, ReduceOptions,
    Reshard, Streams,
};
use crate::spec::{Dtype, MixedPrecision, OuterStrategy, ParamSpec, ReshardAfterForward, Strategy};
use crate::trace::Tracer;

/// Sharding of a whole model. Implemented for every [`FsdpUnit`].
pub trait FullyShard: FsdpUnit + Sized {
    /// Shards the model over the `dp_shard` dim of `mesh` (flattened with `cp`) and replicates it over `dp_outer`, with the default configuration (ZeRO-3, FP32).
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
    let shard_comm = mesh.group(&SHARD_DIMS)?.duplicate(name);
    let outer_comm = mesh.group(&[MeshDim::DpOuter])?.duplicate(name);
    let (collected, layout) = agree_on_layout(model, &*comm, mesh.topology(), config)?;
    buffers::broadcast(model, &*comm)?;
    let slots = slots(&collected, &layout)?;
    let id = next_id();
    bind_params(&collected, &layout, &slots, id)?;

    let rank = comm.rank();
    let strategy = strategy_in_force(config, mesh.topology());
    let placement = Placement { strategy, rank: shard_comm.rank(), outer_rank: outer_comm.rank() };
    let account = Account::default();
    let streams = Streams {
        compute: cpu::ComputeStream::new("compute"),
        gather: cpu::CpuStream::spawn(format!("rank{rank}/all-gather")),
        reduce: cpu::CpuStream::spawn(format!("rank{rank}/reduce")),
    };
    let allocate = |bucket: &BucketLayout| {
        let keep_grads = !config.step_in_backward;
        GroupBuffers::allocate(&account, bucket.clone(), placement, &config.precision, keep_grads)
    };
    let parts = Parts {
        id,
        config: config.clone(),
        strategy,
        groups: layout.buckets.iter().map(allocate).collect(),
        units: units(&layout),
        reshard: reshard_modes(&collected.cells, config),
        comm,
        shard_comm,
        outer_comm,
        streams,
        account,
        tracer: Tracer::new(config.trace),
        layout,
        slots,
    };
    let (gather, reduce) = (gather_pipeline(&parts)?, reduce_pipeline(&parts));
    let engine = Engine::new(parts, gather, reduce);
    for (index, cell) in collected.cells.iter().enumerate() {
        if !cell.bind(&engine, index + 1) {
            let unit = engine.unit_name(index + 1).to_string();
            return Err(Error::Usage(format!("unit `{unit}` is part of a sharded model already")));
        }
    }
    engine.fill_weights(|param, spec, range, out| {
        collected.inits[param].fill(config.seed, &spec.name, range.start as u64..range.end as u64, out);
        Ok(())
    })?;
    Ok(engine)
}

fn check_mesh(mesh: &DeviceMesh) -> Result<()> {
    for &(dim, size) in mesh.topology().dims() {
        if matches!(dim, MeshDim::Tp | MeshDim::Ep) && size != 1 {
            return Err(Error::Config(format!(
                "mesh dim `{dim}` has size {size}: only `dp_outer`, `dp_shard` and `cp` can be larger than 1 so far"
            )));
        }
    }
    Ok(())
}

/// Weights can be kept by groups only of as many ranks as divide all.
fn check_reshard(collected: &Collected<'_>, config: &FsdpConfig, ranks: usize) -> Result<()> {
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
const SHARD_DIMS: [MeshDim; 2] = [MeshDim::DpShard, MeshDim::Cp];

fn shard_ranks(mesh: &Topology) -> usize {
    SHARD_DIMS.into_iter().map(|dim| mesh.size(dim)).product()
}

fn check_precision(config: &FsdpConfig) -> Result<()> {
    let MixedPrecision { reduce, main_grads, .. } = config.precision;
    if main_grads == Dtype::F32 || main_grads == reduce {
        return Ok(());
    }
    Err(Error::Config(format!(
        "main gradients are kept in f32 or in the dtype in which gradients are reduced, {reduce}, not in {main_grads}"
    )))
}

/// The configured strategy, or `NoShard` where one rank holds all shards. Steps in the backward need gradients
/// that are reduced unit by unit, on one rank too.
fn strategy_in_force(config: &FsdpConfig, mesh: &Topology) -> Strategy {
    if shard_ranks(mesh) == 1 && !config.step_in_backward { Strategy::NoShard } else { config.strategy }
}

fn check_step_in_backward(config: &FsdpConfig, mesh: &Topology) -> Result<()> {
    if !config.step_in_backward {
        return Ok(());
    }
    let message = if mesh.size(MeshDim::DpOuter) > 1 {
        "`step_in_backward` steps a unit when its gradients are reduced among the ranks that share its shards: it \
         cannot be used with more than one rank of `dp_outer`, whose reduction comes later"
    } else if config.scaling == GradientScaling::PerToken {
        "`step_in_backward` steps a unit before the tokens of the step are counted: it cannot be used with \
         `GradientScaling::PerToken`"
    } else {
        return check_strategy(config.strategy);
    };
    Err(Error::Config(message.into()))
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
    let mut lines = fingerprint(config, agreed.as_ref());
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

/// What each unit does with its whole weights between forward and backward, the root first.
fn reshard_modes(cells: &[&UnitCell], config: &FsdpConfig) -> Vec<ReshardAfterForward> {
    let root = ReshardAfterForward::Never;
    let of_cell = |cell: &&UnitCell| cell.reshard().unwrap_or(config.reshard_after_forward);
    std::iter::once(root).chain(cells.iter().map(of_cell)).collect()
}

/// The units as the gather pipeline wants them, with the groups of neighbours that some gather in.
fn gather_units(parts: &Parts) -> Result<Vec<GatherUnit>> {
    let comm = &parts.shard_comm;
    let mut groups: Vec<(usize, Arc<dyn Communicator>)> = Vec::new();
    let mut units = Vec::with_capacity(parts.units.len());
    for (index, (unit, mode)) in parts.units.iter().zip(&parts.reshard).enumerate() {
        let reshard = match *mode {
            _ if !parts.strategy.shards_params() || index == ROOT => Reshard::Always,
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
            strategy: parts.strategy,
            prefetch: Prefetch { forward: config.prefetch, backward: config.prefetch },
            budget: config.gather_budget,
            depth: POOLED_UNITS,
            double_buffer: config.double_buffer,
            poison: config.poison,
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

fn outer_reduction(parts: &Parts) -> Option<Outer> {
    (parts.outer_comm.size() > 1).then(|| Outer {
        comm: parts.outer_comm.duplicate("reduce"),
        stream: cpu::CpuStream::spawn(format!("rank{}/outer-reduce", parts.comm.rank())),
        strategy: parts.config.outer,
    })
}

fn reduce_pipeline(parts: &Parts) -> GradReducePipeline {
    let config = &parts.config;
    GradReducePipeline::new(
        parts.shard_comm.duplicate("reduce"),
        parts.streams.clone(),
        parts.tracer.clone(),
        &parts.account,
        ReduceOptions {
            strategy: parts.strategy,
            wire: config.precision.reduce,
            main: config.precision.main_grads,
            scale: match config.scaling {
                GradientScaling::Mean => (1.0 / parts.comm.size() as f64) as f32,
                GradientScaling::Sum | GradientScaling::PerToken => 1.0,
            },
            depth: POOLED_UNITS,
            double_buffer: config.double_buffer,
            poison: config.poison,
            outer: outer_reduction(parts),
        },
        paths_and_groups(parts),
        &parts.groups,
    )
}

/// What a rank's model and configuration are, for comparison with the other ranks'.
fn fingerprint(config: &FsdpConfig, agreed: Result<&(Collected<'_>, ModelLayout), &Error>) -> Vec<String> {
    let (collected, layout) = match agreed {
        Ok(agreed) => (&agreed.0, &agreed.1),
        Err(error) => return vec![format!("{FAILED}{error}")],
    };
    // What the precision says of weights is in the line of each parameter.
    let precision = &config.precision;
    let mut lines = vec![
        format!("strategy {}", config.strategy),
        format!("outer strategy {}", config.outer),
        format!("reshard after forward {:?}", config.reshard_after_forward),
        format!("{:?} alignment", config.alignment),
        format!("reduce dtype {}", precision.reduce),
        format!("main weights {}, main gradients {}", precision.main_weights, precision.main_grads),
        format!("cast of inputs {}, output dtype {:?}", precision.cast_inputs, precision.output),
        format!("{:?} scaling", config.scaling),
        format!("prefetch {}, gather budget {:?}", config.prefetch, config.gather_budget),
        format!("double buffer {}", config.double_buffer),
        format!("{:?} recomputation", config.recompute),
        format!("seed {}", config.seed),
        format!("step in backward {}", config.step_in_backward),
    ];
    let modes = collected.units.iter().zip(reshard_modes(&collected.cells, config)).skip(1);
    lines.extend(modes.map(|(unit, mode)| format!("unit `{}` resharded after forward {mode:?}", unit.path)));
    lines.extend(collected.variants.iter().map(|(path, name)| format!("`{path}` is the variant `{name}`")));
    // What the parameters are, before where they are: a difference moves all that follows it.
    let shape = |spec: &ParamSpec| format!("`{}` {:?} {}", spec.name, spec.full_shape(), spec.key.dtype);
    lines.extend(layout.params.iter().map(shape));
    lines.extend(layout.fingerprint());
    let modes = collected.units.iter().zip(reshard_modes(&collected.cells, config)).skip(1);
    lines.extend(modes.zip(&collected.cells).map(|((unit, reshard), cell)| {
        let recompute = cell.recompute().unwrap_or(config.recompute);
        format!("unit `{}`: reshard after forward {reshard:?}, {recompute:?} recomputation", unit.path)
    }));
    let starts = layout.params.iter().zip(&collected.inits);
    lines.extend(starts.map(|(spec, init)| format!("`{}` starts as {init:?}", spec.name)));
    lines
}

/// Before the message of a rank that has nothing to compare.
const FAILED: char = '\u{1}';

/// Compares `lines` over the ranks, before any of their bytes meet.
///
/// # Errors
/// The first line that differs, with what each of two ranks has.
fn compare(comm: &dyn Communicator, tag: Tag, lines: &[String]) -> Result<()> {
    let all = comm.host_gather(tag, lines.join("\n").into_bytes())?;
    let rank = comm.rank();
    for (other, bytes) in all.iter().enumerate().filter(|&(other, _)| other != rank) {
        let theirs = String::from_utf8_lossy(bytes);
        if let Some(message) = theirs.strip_prefix(FAILED) {
            if lines.first().is_some_and(|line| line.starts_with(FAILED)) {
                // This rank has an error of its own, which says more.
                continue;
            }
            let message = format!("rank {other} failed: {message}");
            return Err(CommError::RankFailed { rank, failed: other, message }.into());
        }
        if lines.first().is_some_and(|line| line.starts_with(FAILED)) {
            continue;
        }
        let mut theirs = theirs.split('\n');
        let ours = lines.join("\n");
        let mut ours = ours.split('\n');
        loop {
            match (ours.next(), theirs.next()) {
                (None, None) => break,
                (ours, theirs) if ours == theirs => {}
                (ours, theirs) => {
                    let describe = |line: Option<&str>| line.unwrap_or("nothing more").to_string();
                    return Err(Error::RanksDiffer {
                        rank,
                        ours: describe(ours),
                        other,
                        theirs: describe(theirs),
                    });
                }
            }
        }
    }
    Ok(())
}

fn slots(collected: &Collected<'_>, layout: &ModelLayout) -> Result<Vec<Slot>> {
    let mut slots: Vec<Slot> = (0..layout.params.len())
        .map(|param| {
            let (group, item) = layout.place_of(param);
            Slot { group, item, variables: Vec::new(), sink: GradSink::closed() }
        })
        .collect();
    for item in &collected.uses {
        let ParamSpec { shape, key, .. } = &layout.params[item.slot];
        let shape = candle_core::Shape::from(shape.as_slice());
        slots[item.slot].variables.push(variable(&shape, key.dtype, key.requires_grad)?);
    }
    Ok(slots)
}

fn bind_params(collected: &Collected<'_>, layout: &ModelLayout, slots: &[Slot], engine: usize) -> Result<()> {
    let mut used = vec![0; slots.len()];
    for item in &collected.uses {
        let slot = &slots[item.slot];
        let key = layout.params[item.slot].key;
        let bound = Bound {
            engine,
            name: item.name.clone(),
            unit: key.unit,
            variable: slot.variables[used[item.slot]].clone(),
            requires_grad: key.requires_grad,
            sink: if key.requires_grad { slot.sink.clone() } else { GradSink::closed() },
        };
        used[item.slot] += 1;
        // A clone of a parameter is the same cell: its first use has bound it.
        let clone = item.param.bound().is_some_and(|bound| bound.engine == engine);
        if !item.param.bind(bound) && !clone {
            let message = "is part of a sharded model already".into();
            return Err(Error::Param { param: item.name.clone(), message });
        }
    }
    Ok(())
}

impl Engine {
    /// Makes sure that all ranks have the same `lines`.
    pub(crate) fn agree(&self, what: &str, phase: Phase, lines: &[String]) -> Result<()> {
        compare(&*self.comm, self.tag(what, phase), lines)
    }

    /// Writes the weights this rank holds: `write(param, spec, elements of the flattened parameter, values)`
    /// for each part of a parameter. Both the main weights and the model weights get them.
    pub(crate) fn fill_weights(
        &self,
        write: impl FnMut(usize, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.fill_unit_weights(None, write)
    }

    /// The same for one unit, or for all of them.
    pub(crate) fn fill_unit_weights(
        &self,
        unit: Option<usize>,
        mut write: impl FnMut(usize, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let compute = &*self.streams.compute;
        for group in self.groups.iter().filter(|group| unit.is_none_or(|unit| group.layout.key.unit == unit))
        {
            let extent =
                if self.strategy.shards_optim() { group.shard.clone() } else { 0..group.layout.size };
            for item in &group.layout.items {
                let start = item.start.max(extent.start);
                let end = (item.start + item.len).min(extent.end);
                if start >= end {
                    continue;
                }
                let values = Slice::zeros(Dtype::F32, end - start, None);
                // SAFETY: the buffer is new and ours alone.
                let out = unsafe { values.as_mut_slice::<f32>() };
                write(
                    item.param,
                    &self.layout.params[item.param],
                    start - item.start..end - item.start,
                    out,
                )?;
                if let Some(main) = &group.main_weight {
                    let (from, to) = (start.max(group.owned.start), end.min(group.owned.end));
                    if from < to {
                        cast(compute, &values.range(from - start..to - start), &main.part(from..to))?;
                    }
                }
                cast(compute, &values, &group.model_weight.part(start..end))?;
            }
        }
        Ok(self.weights_changed(Change::Loaded(unit))?)
    }
}
