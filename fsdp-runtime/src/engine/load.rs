//! Weights written into the shards, from initial values or from elsewhere.

use std::ops::Range;

use super::core::Engine;
use crate::device::{Slice, cast};
use crate::error::Result;
use crate::pipeline::Change;
use crate::spec::{Dtype, ParamSpec};

impl Engine {
    /// Writes the weights this rank holds: `write(param, spec, elements of the flattened parameter, values)`
    /// for each part of a parameter; `values` begin as the present ones. Both the main weights and the model weights get them.
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
                cast(compute, &group.model_weight.part(start..end), &values)?;
                let main = group.main_weight.as_ref().map(|main| {
                    let (from, to) = (start.max(group.owned.start), end.min(group.owned.end));
                    (main, from, to.max(from))
                });
                if let Some((main, from, to)) = main.filter(|(_, from, to)| from < to) {
                    cast(compute, &main.part(from..to), &values.range(from - start..to - start))?;
                }
                compute.record().synchronize()?;
                // SAFETY: the buffer is new and ours alone, and what wrote it is done.
                let out = unsafe { values.as_mut_slice::<f32>() };
                write(
                    item.param,
                    &self.layout.params[item.param],
                    start - item.start..end - item.start,
                    out,
                )?;
                if let Some((main, from, to)) = main.filter(|(_, from, to)| from < to) {
                    cast(compute, &values.range(from - start..to - start), &main.part(from..to))?;
                }
                cast(compute, &values, &group.model_weight.part(start..end))?;
            }
        }
        Ok(self.weights_changed(Change::Loaded(unit))?)
    }
}
