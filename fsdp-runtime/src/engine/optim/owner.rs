//! Optimizer steps that need whole parameters, each on the one rank that owns it.

use crate::buffer::{DataParallelBuffer, GroupBuffers};
use crate::comm::Phase;
use crate::device::{Slice, cast, read_anywhere, update_all_anywhere, update_anywhere};
use crate::engine::api::fsdp::Fsdp;
use crate::engine::ctx::Ctx;
use crate::engine::ids::{Id, ParamId, Table, UnitId};
use crate::engine::io::whole;
use crate::engine::optim::groups::ParamGroups;
use crate::engine::optim::sharded::{DueStep, ShardedOptimizer, StateLayout};
use crate::engine::schedule::Moment;
use crate::error::{Error, Result};
use crate::layout::{Item, ModelLayout};
use crate::memory::Category;
use crate::optim::{Optimizer, OwnerRule, ParamGroup, WholeParam};
use crate::spec::{Dtype, ParamSpec};

/// An optimizer of two rules: one that needs parameters whole and runs on their owners, and an element-wise one
/// for the parameters that the first does not want. Made by [`Fsdp::owner_optimizer`].
///
/// Every parameter that the first rule wants has one owner. In a step, bucket after bucket is gathered (f32
/// weights and gradients), the owners update their parameters, and each rank takes its part of the result. No
/// more than one bucket is whole at a time. Owners are chosen by the rule's cost, so that within a bucket,
/// and over all of them, ranks have about the same work: what is one bucket's is done at the same time.
/// The results do not depend on who owns what.
#[derive(Debug)]
pub struct OwnerOptimizer<R, O> {
    rule: R,
    rest: ShardedOptimizer<O>,
    /// The owner of each physical parameter; `None` if the element-wise rule updates it.
    owners: Table<ParamId, Option<usize>>,
    /// State buffers of each physical parameter; none where another rank owns it.
    states: Table<ParamId, Vec<Slice>>,
}

impl<M> Fsdp<M> {
    /// An optimizer whose `rule` sees parameters whole, with `rest` for those it does not want. Its state is on
    /// the owner of each parameter and starts at zero; the state of `rest` is sharded like its parameters.
    /// Nothing is communicated.
    ///
    /// # Errors
    /// If settings of a rule are out of range.
    ///
    /// ```
    /// use fsdp_runtime::optim::{AdamW, Muon};
    /// use fsdp_runtime::{FullyShard, Param, launch};
    ///
    /// launch::local(2, |world| -> fsdp_runtime::Result<()> {
    ///     let params = (Param::new((8, 8)), Param::new((8, 8)), Param::new(8));
    ///     let model = params.fully_shard(&world.data_parallel_mesh())?;
    ///     let optimizer = model.owner_optimizer(Muon::default(), AdamW::default())?;
    ///     let owners: Vec<_> = optimizer.owners().collect();
    ///     assert_eq!(owners, [("0", Some(0)), ("1", Some(1)), ("2", None)]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
    /// ```
    pub fn owner_optimizer<R: OwnerRule, O: Optimizer>(
        &self,
        rule: R,
        rest: O,
    ) -> Result<OwnerOptimizer<R, O>> {
        self.owner_optimizer_with(rule, rest, |_| ParamGroup::default())
    }

    /// The same with parameter groups, as for [`Fsdp::optimizer_with`]. A group that is
    /// [`element_wise`](ParamGroup::element_wise) is left to `rest` whatever `rule` wants.
    ///
    /// # Errors
    /// As for [`Fsdp::optimizer_with`].
    pub fn owner_optimizer_with<R: OwnerRule, O: Optimizer>(
        &self,
        rule: R,
        rest: O,
        assign: impl FnMut(&ParamSpec) -> ParamGroup,
    ) -> Result<OwnerOptimizer<R, O>> {
        let ctx = &self.engine().ctx;
        rule.validate()?;
        let groups = ParamGroups::new(&ctx.layout, assign)?;
        let wants = |param: ParamId| {
            let spec = ctx.spec(param);
            let owned = spec.key.requires_grad && spec.numel() > 0 && !groups.of(param).is_element_wise();
            owned && rule.wants(spec)
        };
        let cost = |param: ParamId| wants(param).then(|| rule.cost(ctx.spec(param)));
        let owners = choose_owners(&ctx.layout, ctx.comm.size(), cost);
        let mut states = Vec::with_capacity(owners.len());
        for (param, owner) in owners.entries() {
            let spec = ctx.spec(param);
            if owner.is_some() {
                rule.check_overrides(groups.of(param).overrides())?;
            }
            let own = *owner == Some(ctx.comm.rank());
            let buffers = if own { rule.state_names().len() } else { 0 };
            // SAFETY: as for the state of a `ShardedOptimizer`.
            let state =
                |_| unsafe { ctx.account().allocate(Category::OptimizerState, Dtype::F32, spec.numel()) };
            states.push((0..buffers).map(state).collect::<std::result::Result<_, _>>()?);
        }
        let left = |param: ParamId| owners[param].is_none();
        let rest = ShardedOptimizer::new(ctx, rest, groups, StateLayout::Compact, left)?;
        Ok(OwnerOptimizer { rule, rest, owners, states: states.into() })
    }
}

/// An owner for each parameter that has a cost: bucket by bucket, the dearest parameter first, to the rank that
/// has the least work in the bucket, then overall.
fn choose_owners(
    layout: &ModelLayout,
    ranks: usize,
    cost: impl Fn(ParamId) -> Option<u64>,
) -> Table<ParamId, Option<usize>> {
    let mut owners: Table<ParamId, Option<usize>> = vec![None; layout.params.len()].into();
    let mut total = vec![0u64; ranks];
    for bucket in &layout.buckets {
        let params = bucket.items.iter().map(|item| ParamId::new(item.param));
        let mut wanted: Vec<(u64, ParamId)> =
            params.filter_map(|param| Some((cost(param)?, param))).collect();
        wanted.sort_by_key(|&(cost, param)| (std::cmp::Reverse(cost), param));
        let mut load = vec![0u64; ranks];
        for (cost, param) in wanted {
            let owner = (0..ranks).min_by_key(|&rank| (load[rank], total[rank], rank)).expect("a rank");
            load[owner] = load[owner].saturating_add(cost);
            total[owner] = total[owner].saturating_add(cost);
            owners[param] = Some(owner);
        }
    }
    owners
}

impl<R: OwnerRule, O: Optimizer> OwnerOptimizer<R, O> {
    /// The optimizer of the parameters without owner.
    pub(crate) fn rest_optimizer(&self) -> &ShardedOptimizer<O> {
        &self.rest
    }

    pub(crate) fn rest_optimizer_mut(&mut self) -> &mut ShardedOptimizer<O> {
        &mut self.rest
    }

    /// The physical parameters that have an owner, and their states, which only the owner has.
    pub(crate) fn owned_states(&self) -> impl Iterator<Item = (ParamId, &[Slice])> {
        let owned = self.owners.entries().filter(|(_, owner)| owner.is_some());
        owned.map(|(param, _)| (param, self.states[param].as_slice()))
    }

    /// The rule for whole parameters.
    pub fn rule(&self) -> &R {
        &self.rule
    }

    /// The element-wise rule for the others.
    pub fn rest(&self) -> &O {
        self.rest.rule()
    }

    /// Sets the learning rate of the rule for whole parameters. The same on all ranks.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.rule.set_learning_rate(learning_rate);
    }

    /// Sets the learning rate of the element-wise rule. The same on all ranks.
    pub fn set_rest_learning_rate(&mut self, learning_rate: f64) {
        self.rest.set_learning_rate(learning_rate);
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.rest.steps()
    }

    /// The parameter groups, and which parameter is in which.
    pub fn param_groups(&self) -> &ParamGroups {
        self.rest.param_groups()
    }

    /// Each trainable parameter and its owner, in declaration order; `None` where the element-wise rule
    /// updates it.
    pub fn owners(&self) -> impl Iterator<Item = (&str, Option<usize>)> {
        // Groups list the trainable parameters in the layout's order.
        let mut names = self.param_groups().iter().map(|(name, _)| name);
        let trainable = self.owners.entries().filter(|&(param, _)| self.param_groups().contains(param));
        trainable.filter_map(move |(_, owner)| Some((names.next()?, *owner)))
    }

    /// Updates all parameters, installs the new weights, and begins the next step with no gradients, as
    /// [`ShardedOptimizer::step`] does. The rule for whole parameters runs once a parameter and step, on its
    /// owner, however many microbatches there were.
    ///
    /// Every rank must call it.
    ///
    /// # Errors
    /// Those of [`ShardedOptimizer::step`] and of the rule; after one of the rule, weights are partly changed.
    pub fn step<M>(&mut self, model: &mut Fsdp<M>) -> Result<bool> {
        let engine = &**model.engine();
        let ctx = &engine.ctx;
        self.rule.validate()?;
        let mut lines = Vec::new();
        if self.rest.is_new() {
            let (name, lr) = (self.rule.name(), self.rule.learning_rate());
            lines.push(format!("owner rule {name}, learning rate {lr}"));
            lines.extend(self.owners().map(|(name, owner)| format!("`{name}` has the owner {owner:?}")));
        }
        let Some(due) = self.rest.begin(engine, |rest| [rest, lines].concat())? else { return Ok(false) };
        let number = engine.step().number;
        for bucket in &ctx.resources.buckets {
            let items = bucket.layout.items.iter().copied();
            let owned: Vec<Item> = items.filter(|item| self.owner(item).is_some()).collect();
            if !owned.is_empty() && due.with_gradient[UnitId::new(bucket.layout.key.unit)] {
                self.step_bucket(ctx, number, &due, bucket, &owned)?;
            }
        }
        self.rest.update(ctx, &due)?;
        due.finish(ctx, &mut engine.step())?;
        Ok(true)
    }

    fn owner(&self, item: &Item) -> Option<usize> {
        self.owners[ParamId::new(item.param)]
    }

    fn step_bucket(
        &mut self,
        ctx: &Ctx,
        step: u64,
        due: &DueStep,
        bucket: &GroupBuffers,
        owned: &[Item],
    ) -> Result<()> {
        let Some(main_grad) = &bucket.main_grad else { return Ok(()) };
        let compute = ctx.compute();
        let moment = Moment { phase: Phase::Optimizer, step };
        let sharded = ctx.config.strategy.shards_optim() || bucket.layout.outer > 1;
        let tag = moment.tag(&ctx.unit(UnitId::new(bucket.layout.key.unit)).path);
        let category = Some(Category::OwnerStep);
        // The whole in f32, and whether it is a copy.
        let whole = |buffer: &DataParallelBuffer| -> Result<(Slice, bool)> {
            let whole = if sharded {
                whole::gather_whole(ctx, bucket, buffer, &tag, category)?
            } else {
                buffer.data().clone()
            };
            if whole.dtype() == Dtype::F32 {
                return Ok((whole, sharded));
            }
            // SAFETY: it is known to this call only, which uses it on the compute stream, or here when that is done.
            let wide =
                unsafe { ctx.account().allocate(Category::OwnerStep, Dtype::F32, bucket.layout.size) }?;
            cast(compute, &whole, &wide)?;
            Ok((wide, true))
        };
        let (weights, copied) = whole(bucket.optimizer_weight())?;
        let (grads, _) = whole(main_grad)?;
        compute.record().synchronize()?;
        for item in owned {
            if self.owner(item) == Some(ctx.comm.rank()) {
                let (weights, grads) = (weights.range(item.range()), grads.range(item.range()));
                self.step_param(ctx, due, ParamId::new(item.param), &weights, &grads)?;
            }
        }
        for item in owned {
            let owner = self.owner(item).expect("owned");
            let tag = moment.tag(&ctx.layout.params[item.param].name.as_str().into());
            ctx.comm.broadcast(compute, tag, weights.range(item.range()), owner)?;
        }
        if copied {
            let own = bucket.owned.clone();
            for item in owned {
                let part = item.start.max(own.start)..(item.start + item.len).min(own.end);
                if !part.is_empty() {
                    cast(compute, &weights.range(part.clone()), &bucket.optimizer_weight().part(part))?;
                }
            }
        }
        Ok(())
    }

    fn step_param(
        &mut self,
        ctx: &Ctx,
        due: &DueStep,
        param: ParamId,
        weights: &Slice,
        grads: &Slice,
    ) -> Result<()> {
        let spec = ctx.spec(param);
        let overrides = *self.rest.param_groups().of(param).overrides();
        let (states, lr) = (&self.states[param], self.rule.learning_rate() * overrides.lr_factor);
        let (steps, rule, backend) =
            (self.rest.unit_steps(ctx.unit_of(param)), &mut self.rule, &*ctx.backend);
        // SAFETY: reductions are done, no weights are gathered (`finish_grad_sync`) and the gather of this
        // bucket is complete, so this thread is the only user of these buffers; they are different ones.
        let updated = unsafe {
            update_anywhere(backend, weights, |weights| {
                read_anywhere(backend, grads, |grads| {
                    let scaled: Vec<f32>;
                    let grads = if due.at.grad_scale == 1.0 {
                        grads
                    } else {
                        scaled = grads.iter().map(|grad| grad * due.at.grad_scale).collect();
                        &scaled
                    };
                    update_all_anywhere(backend, states, |states| {
                        rule.update(steps, &mut WholeParam { spec, weights, grads, states, lr, overrides })
                    })
                })
            })???
        };
        updated.map_err(|error| Error::Param {
            param: spec.name.clone(),
            message: format!("owner rule {}: {error}", self.rule.name()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{LayoutOptions, ShardAlignment, UnitSpec};
    use crate::spec::GroupKey;

    fn layout(units: &[&[usize]], ranks: usize) -> ModelLayout {
        let spec = |unit: usize, index: usize, n: usize| ParamSpec {
            name: format!("{unit}.{index}"),
            shape: vec![n],
            key: GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit },
            no_decay: false,
            tp: None,
            tp_parts: 1,
            shared: false,
            aliases: Vec::new(),
            fused: Vec::new(),
        };
        let of_unit = |(unit, params): (usize, &&[usize])| {
            params.iter().enumerate().map(|(index, &n)| spec(unit, index, n)).collect::<Vec<_>>()
        };
        let params = units.iter().enumerate().flat_map(of_unit).collect();
        let names: Vec<UnitSpec> = (0..units.len()).map(|unit| UnitSpec::new(unit.to_string())).collect();
        let options =
            LayoutOptions { ranks, outer: 1, alignment: ShardAlignment::Element, bucket_size: None };
        ModelLayout::build(params, &names, &options).unwrap()
    }

    fn owners(units: &[&[usize]], ranks: usize) -> Vec<Option<usize>> {
        let layout = layout(units, ranks);
        let cost = |param: ParamId| Some(layout.params[param.index()].numel() as u64);
        choose_owners(&layout, ranks, cost).iter().copied().collect()
    }

    #[test]
    fn the_dearest_parameter_goes_to_the_rank_with_the_least_work() {
        assert_eq!(owners(&[&[1, 3, 2]], 2), [Some(1), Some(0), Some(1)]);
        // Rank 0 has had the dear one of the first bucket: it gets the cheap one of the second.
        assert_eq!(owners(&[&[10, 1], &[10, 1]], 2), [Some(0), Some(1), Some(1), Some(0)]);
        assert_eq!(owners(&[&[5], &[5], &[5], &[5]], 2), [0, 1, 0, 1].map(Some));
    }

    #[test]
    fn parameters_without_cost_have_no_owner() {
        let layout = layout(&[&[4, 4]], 3);
        let owners = choose_owners(&layout, 3, |param| (param.index() == 1).then_some(4));
        assert_eq!(owners.iter().copied().collect::<Vec<_>>(), [None, Some(0)]);
    }
}
