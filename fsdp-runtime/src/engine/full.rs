//! Whole parameters and gradients, gathered one bucket at a time, and the install of optimized weights.

use super::core::Engine;
use crate::buffer::{DataParallelBuffer, GroupBuffers};
use crate::comm::{Gather, HostOp, Phase, Tag};
use crate::device::{Slice, cast, read_anywhere};
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::pipeline::Change;
use crate::spec::{Dtype, ParamSpec};

impl Engine {
    pub(crate) fn visit_weights(
        &self,
        mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
    ) -> Result<()> {
        (0..self.units.len()).try_for_each(|unit| self.visit_unit_weights(unit, &mut visit))
    }

    pub(crate) fn visit_unit_weights(
        &self,
        unit: usize,
        mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.settle_intact()?;
        let tag = self.tag("weights", Phase::Setup);
        if self.outer_comm.size() > 1 {
            // What only a group reads all must have come to alike.
            self.comm.host_barrier(tag.clone())?;
        }
        for &group in &self.units[unit].groups {
            let group = &self.groups[group];
            self.visit_bucket(group, group.optimizer_weight(), &tag, &mut visit)?;
        }
        Ok(())
    }

    pub(crate) fn visit_gradients(
        &self,
        mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
    ) -> Result<()> {
        (0..self.units.len()).try_for_each(|unit| self.visit_unit_gradients(unit, &mut visit))
    }

    pub(crate) fn visit_unit_gradients(
        &self,
        unit: usize,
        mut visit: impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.finish_grad_sync()?;
        if !self.state.lock().reduce.has_gradient(unit) {
            return Ok(());
        }
        let tag = self.tag("gradients", Phase::Optimizer);
        for &group in &self.units[unit].groups {
            let group = &self.groups[group];
            if let Some(grads) = &group.main_grad {
                self.visit_bucket(group, grads, &tag, &mut visit)?;
            }
        }
        Ok(())
    }

    fn visit_bucket(
        &self,
        group: &GroupBuffers,
        buffer: &DataParallelBuffer,
        tag: &Tag,
        visit: &mut impl FnMut(&ParamSpec, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let layout = &group.layout;
        let compute = &*self.streams.compute;
        let whole = self.gather_whole(group, buffer, tag, None)?;
        let values = if whole.dtype() == Dtype::F32 {
            whole
        } else {
            // SAFETY: it is known to this call only, which writes it on the compute stream and reads it when that is done.
            let wide = unsafe { self.account.allocate_briefly(Dtype::F32, layout.size) }?;
            cast(compute, &whole, &wide)?;
            wide
        };
        compute.record().synchronize()?;
        for item in &layout.items {
            let visit = |values: &[f32]| visit(&self.layout.params[item.param], values);
            // SAFETY: `gather_whole` or this call has made the buffer, nobody else has it, and what wrote it is done, as the
            // event says.
            unsafe { read_anywhere(&*self.backend, &values.range(item.range()), visit)?? };
        }
        Ok(())
    }

    /// The whole of one of a group's buffers, in a new one that is counted under `category`, valid in the order of
    /// the compute stream. Every rank must call it.
    pub(crate) fn gather_whole(
        &self,
        group: &GroupBuffers,
        buffer: &DataParallelBuffer,
        tag: &Tag,
        category: Option<Category>,
    ) -> Result<Slice> {
        let layout = &group.layout;
        let shard = if layout.outer > 1 && layout.key.requires_grad {
            let owned = buffer.part(group.owned.clone());
            // SAFETY: it is known to this call only: two gathers on the compute stream use it, one after the other.
            let shard = unsafe { self.account.allocate_briefly(owned.dtype(), layout.shard_len()) }?;
            let part = Gather { send: owned, recv: shard.clone() };
            self.outer_comm.all_gather(&*self.streams.compute, tag.clone(), vec![part])?;
            shard
        } else {
            buffer.shard()
        };
        let dtype = shard.dtype();
        let whole = match category {
            // SAFETY: it is known to this call and to the caller, which both use it in the order of the compute stream.
            Some(category) => unsafe { self.account.allocate(category, dtype, layout.size) }?,
            // SAFETY: as above.
            None => unsafe { self.account.allocate_briefly(dtype, layout.size) }?,
        };
        let part = Gather { send: shard, recv: whole.clone() };
        self.shard_comm.all_gather(&*self.streams.compute, tag.clone(), vec![part])?;
        Ok(whole)
    }

    pub(crate) fn install_optimized_model_weights(&self) -> Result<()> {
        // Peers may still read the shards for a gather.
        self.settle()?;
        for group in &self.groups {
            if let Some(main) = &group.main_weight {
                cast(&*self.streams.compute, main.data(), &group.model_weight.part(main.held()))?;
            }
        }
        Ok(self.weights_changed(Change::Step)?)
    }

    pub(crate) fn parameters_without_gradient(&self) -> Result<Vec<String>> {
        let mut received: Vec<f64> =
            self.state.lock().received.iter().map(|&received| f64::from(u8::from(received))).collect();
        self.comm.host_reduce(
            self.tag("received gradients", Phase::Optimizer),
            HostOp::Max,
            &mut received,
        )?;
        let missing = self.layout.params.iter().zip(received);
        let missing =
            missing.filter(|(spec, received)| spec.key.requires_grad && spec.numel() > 0 && *received == 0.0);
        Ok(missing.map(|(spec, _)| spec.name.clone()).collect())
    }

    /// Before the first optimizer step: says which trainable parameters got no gradient anywhere.
    pub(crate) fn report_missing_gradients(&self) -> Result<()> {
        let missing = self.parameters_without_gradient()?;
        if missing.is_empty() {
            return Ok(());
        }
        let message = format!(
            "no gradient reached these trainable parameters on any rank: {}. An op without a backward may cut the graph above them; if they \
             are meant to be unused, mark them `#[fsdp(frozen)]`",
            missing.join(", ")
        );
        if self.config.strict_gradients {
            return Err(Error::Usage(message));
        }
        if self.comm.rank() == 0 {
            eprintln!("fsdp: warning: {message}");
        }
        Ok(())
    }
}
