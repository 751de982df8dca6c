//! Optimizer steps that need whole parameters, each on the one rank that owns it.

use crate::buffer::{BucketBuffers, DataParallelBuffer};
use crate::comm::Phase;
use crate::device::{Slice, cast, read_anywhere, update_all_anywhere, update_anywhere};
use crate::engine::io::whole;
use crate::engine::optim::sharded::{DueStep, StateLayout};
use crate::engine::schedule::Moment;
use crate::engine::{Ctx, Fsdp, Id, ParamGroups, ParamId, ShardedOptimizer, Table, UnitId};
use crate::error::{Error, Result};
use crate::layout::Item;
use crate::memory::Category;
use crate::optim::{Optimizer, OwnerRule, ParamGroup, WholeParam, choose_owners};
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
    /// The optimizer of the parameters without owner.
    pub(crate) rest: ShardedOptimizer<O>,
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
        let owners = choose_owners(&ctx.layout, ctx.comm.size(), |param| cost(ParamId::new(param)));
        let owners = Table::<ParamId, _>::from(owners);
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

impl<R: OwnerRule, O: Optimizer> OwnerOptimizer<R, O> {
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
        if !self.rest.begun {
            let (name, lr) = (self.rule.name(), self.rule.learning_rate());
            lines.push(format!("owner rule {name}, learning rate {lr}"));
            lines.extend(self.owners().map(|(name, owner)| format!("`{name}` has the owner {owner:?}")));
        }
        let Some(due) = self.rest.begin(engine, lines)? else { return Ok(false) };
        let number = engine.step().number;
        for bucket in &ctx.resources.buckets {
            let items = bucket.layout.items.iter().copied();
            let owned: Vec<Item> = items.filter(|item| self.owner(item).is_some()).collect();
            if !owned.is_empty() && due.with_gradient[UnitId::of(&bucket.layout)] {
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
        bucket: &BucketBuffers,
        owned: &[Item],
    ) -> Result<()> {
        let Some(main_grad) = &bucket.main_grad else { return Ok(()) };
        let compute = ctx.compute();
        let moment = Moment { phase: Phase::Optimizer, step };
        let sharded = ctx.config.strategy.shards_optim() || bucket.layout.outer > 1;
        let tag = moment.tag(&ctx.unit(UnitId::of(&bucket.layout)).path);
        let category = Some(Category::OwnerStep);
        let whole = |buffer: &DataParallelBuffer| -> Result<Slice> {
            let whole = match sharded {
                true => whole::gather_whole(ctx, bucket, buffer, &tag, category)?,
                false => buffer.data().clone(),
            };
            Ok(whole::widened(ctx, whole, category)?)
        };
        let own_weights = bucket.optimizer_weight();
        let (weights, grads) = (whole(own_weights)?, whole(main_grad)?);
        let copied = sharded || own_weights.data().dtype() != Dtype::F32;
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
            for part in owned.iter().map(|item| bucket.owned_of(&item.range())) {
                if !part.is_empty() {
                    cast(compute, &weights.range(part.clone()), &own_weights.part(part))?;
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
            (self.rest.counts.unit_steps[ctx.unit_of(param)], &mut self.rule, &*ctx.backend);
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
