//! Weights written into the shards, from initial values or from elsewhere.

use std::ops::Range;

use super::core::Engine;
use super::replicas::Written;
use crate::buffer::GroupBuffers;
use crate::comm::{CommError, Phase};
use crate::device::{Slice, cast, update_anywhere};
use crate::error::Result;
use crate::layout::Item;
use crate::pipeline::{Change, Moment};
use crate::spec::{Dtype, ParamSpec};

impl Engine {
    /// Writes the weights this rank holds: `write(param, spec, elements of the flattened parameter, values)`
    /// for each part of a parameter; `values` begin as the present ones. Both the main weights and the model weights
    /// get them.
    pub(crate) fn fill_weights(
        &self,
        write: impl FnMut(usize, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.fill_unit_weights(None, write)
    }

    /// The same for one unit, or for all of them.
    ///
    /// Where ranks hold copies ([`Engine::agree_on_copies`]) all must call it.
    pub(crate) fn fill_unit_weights(
        &self,
        unit: Option<usize>,
        write: impl FnMut(usize, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.complete_shards()?;
        let written = self.write_weights(unit, write);
        // Whatever was written before an error counts.
        self.weights_changed(Change::Loaded(unit))?;
        if unit.is_none() && written.is_ok() {
            self.forget_changed();
        }
        self.agree_on_copies(Written::Held(unit), written)
    }

    /// Settles, and has the present values of what this rank holds here, those included that other outer ranks have updated.
    fn complete_shards(&self) -> Result<()> {
        self.settle()?;
        let mut state = self.state.lock();
        let moment = Moment { phase: Phase::Setup, step: state.step };
        Ok(state.gather.complete_shards(&self.groups, moment)?)
    }

    fn write_weights(
        &self,
        unit: Option<usize>,
        mut write: impl FnMut(usize, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        self.settle()?;
        let groups = self.groups.iter().filter(|group| unit.is_none_or(|unit| group.layout.key.unit == unit));
        for group in groups {
            for item in &group.layout.items {
                let Some(part) = self.held_part(group, item) else { continue };
                let place = self.f32_place(group, &part)?;
                let first = part.start - item.start;
                for values in cuts(place.slice()) {
                    let elements = first + values.start..first + values.end;
                    let spec = &self.layout.params[item.param];
                    let write = |values: &mut [f32]| write(item.param, spec, elements, values);
                    // SAFETY: nothing is under way that uses the weights (`settle`, above), and nothing begins: the model is
                    // borrowed mutably, or is being made, and a unit can be entered by its own forward or backward only.
                    // Otherwise the buffer is new and ours alone. What wrote it is done.
                    unsafe { update_anywhere(&*self.backend, &place.slice().range(values), write)?? };
                }
                match place {
                    F32Place::Weights(_) => {}
                    F32Place::Main(main) => {
                        cast(&*self.streams.compute, &main, &group.model_weight.part(part))?;
                    }
                    F32Place::Copy(values) => self.store(group, &part, &values)?,
                }
            }
        }
        Ok(())
    }

    /// Writes what this rank holds of the `elements` of a parameter, whose values in f32 are `values`.
    fn store_elements(&self, param: usize, elements: Range<usize>, values: &Slice) -> Result<(), CommError> {
        let (group, item) = self.layout.place_of(param);
        let group = &self.groups[group];
        let item = &group.layout.items[item];
        let Some(held) = self.held_part(group, item) else { return Ok(()) };
        let first = item.start + elements.start;
        let start = held.start.max(first);
        let end = held.end.min(item.start + elements.end);
        if start >= end {
            return Ok(());
        }
        self.store(group, &(start..end), &values.range(start - first..end - first))
    }

    /// The elements of the bucket that are of this parameter and this rank has weights for.
    pub(super) fn held_part(&self, group: &GroupBuffers, item: &Item) -> Option<Range<usize>> {
        let extent =
            if self.config.strategy.shards_optim() { group.shard.clone() } else { 0..group.layout.size };
        let part = item.start.max(extent.start)..(item.start + item.len).min(extent.end);
        (!part.is_empty()).then_some(part)
    }

    /// Where these weights are in f32, or a copy of them.
    fn f32_place(&self, group: &GroupBuffers, part: &Range<usize>) -> Result<F32Place, CommError> {
        let compute = &*self.streams.compute;
        let weights = group.model_weight.part(part.clone());
        let place = match &group.main_weight {
            None if weights.dtype() == Dtype::F32 => F32Place::Weights(weights),
            Some(main) if owned_of(group, part) == *part => F32Place::Main(main.part(part.clone())),
            main => {
                // SAFETY: it is known to this call and to its caller, which use it on the compute stream, or on the host
                // when that is done.
                let values = unsafe { self.account.allocate_briefly(Dtype::F32, part.len()) }?;
                cast(compute, &weights, &values)?;
                if let Some(main) = main {
                    let owned = owned_of(group, part);
                    if !owned.is_empty() {
                        let target = values.range(owned.start - part.start..owned.end - part.start);
                        cast(compute, &main.part(owned), &target)?;
                    }
                }
                F32Place::Copy(values)
            }
        };
        compute.record().synchronize()?;
        Ok(place)
    }

    fn store(&self, group: &GroupBuffers, part: &Range<usize>, values: &Slice) -> Result<(), CommError> {
        let compute = &*self.streams.compute;
        if let Some(main) = &group.main_weight {
            let owned = owned_of(group, part);
            if !owned.is_empty() {
                let source = values.range(owned.start - part.start..owned.end - part.start);
                cast(compute, &source, &main.part(owned))?;
            }
        }
        cast(compute, values, &group.model_weight.part(part.clone()))
    }
}

/// Weights that are written one part after the other.
#[must_use = "the model has the weights once this is finished"]
pub(crate) struct Stores<'a> {
    engine: &'a Engine,
}

impl Engine {
    /// Begins to write weights part by part: nothing that uses them is under way. All ranks must call it.
    pub(crate) fn begin_stores(&self) -> Result<Stores<'_>> {
        self.complete_shards()?;
        Ok(Stores { engine: self })
    }
}

impl<'a> Stores<'a> {
    pub(crate) fn engine(&self) -> &'a Engine {
        self.engine
    }

    /// Writes what this rank holds of the `elements` of a parameter, whose values in f32 are `values`.
    pub(crate) fn store(
        &self,
        param: usize,
        elements: Range<usize>,
        values: &Slice,
    ) -> Result<(), CommError> {
        self.engine.store_elements(param, elements, values)
    }

    /// All are written; all ranks must call it.
    pub(crate) fn finish(self) -> Result<()> {
        self.engine.weights_changed(Change::Loaded(None))?;
        self.engine.forget_changed();
        self.engine.agree_on_copies(Written::Held(None), Ok(()))
    }
}

/// What of a slice is written at a time: of a device's memory as much as is copied at a time.
fn cuts(slice: &Slice) -> impl Iterator<Item = Range<usize>> {
    const AT_ONCE: usize = 4 << 20;
    let len = slice.len();
    let step = if slice.is_host() { len } else { AT_ONCE };
    (0..len).step_by(step.max(1)).map(move |start| start..(start + step).min(len))
}

/// Weights in f32.
enum F32Place {
    /// The model weights themselves, which have no main weights.
    Weights(Slice),
    /// The main weights.
    Main(Slice),
    Copy(Slice),
}

impl F32Place {
    fn slice(&self) -> &Slice {
        match self {
            F32Place::Weights(slice) | F32Place::Main(slice) | F32Place::Copy(slice) => slice,
        }
    }
}

/// The elements of `part` whose main weights this rank has.
fn owned_of(group: &GroupBuffers, part: &Range<usize>) -> Range<usize> {
    let start = part.start.max(group.owned.start);
    start..part.end.min(group.owned.end).max(start)
}
