//! Weights written into the shards, from initial values or from elsewhere.

use std::ops::Range;

use crate::buffer::{BucketBuffers, intersection};
use crate::comm::{CommError, Phase};
use crate::device::{Slice, cast, update_anywhere};
use crate::engine::io::replicas::{Written, agree_on_copies};
use crate::engine::schedule::Change;
use crate::engine::unit::weights::settle;
use crate::engine::{Ctx, Engine, Id, ParamId, Step, UnitId};
use crate::error::Result;
use crate::layout::Item;
use crate::spec::{Dtype, ParamSpec};

/// Writes the weights that this rank holds, of one unit or of all: `write(param, spec, elements of the flattened parameter,
/// values)` for each part of a parameter; `values` begin as the present ones. Both the main weights and the model weights
/// get them.
///
/// Where ranks hold copies ([`agree_on_copies`]) all must call it.
pub(crate) fn fill_weights(
    engine: &Engine,
    unit: Option<UnitId>,
    write: impl FnMut(ParamId, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let ctx = &engine.ctx;
    complete_shards(ctx, &mut engine.step())?;
    let written = write_weights(ctx, unit, write);
    end_writing(engine, unit, written)
}

/// The shards have other weights, of one unit or of all, which all ranks must have alike where they hold copies.
fn end_writing(engine: &Engine, unit: Option<UnitId>, written: Result<()>) -> Result<()> {
    {
        let step = &mut *engine.step();
        // Whatever was written before an error counts.
        step.weights_changed(&engine.ctx, Change::Loaded(unit))?;
        if unit.is_none() && written.is_ok() {
            step.forget_changed();
        }
    }
    agree_on_copies(engine, Written::Held(unit), written)
}

/// Settles, and has the present values of what this rank holds here, those included that other outer ranks have updated.
fn complete_shards(ctx: &Ctx, step: &mut Step) -> Result<()> {
    settle(ctx, step)?;
    let moment = step.moment(Phase::Setup);
    Ok(step.gather.complete_shards(&mut step.units, moment)?)
}

/// `write` is the user's code, and runs without the lock.
fn write_weights(
    ctx: &Ctx,
    unit: Option<UnitId>,
    mut write: impl FnMut(ParamId, &ParamSpec, Range<usize>, &mut [f32]) -> Result<()>,
) -> Result<()> {
    for bucket in ctx.buckets_of(unit) {
        for item in &bucket.layout.items {
            let Some(part) = held_part(ctx, bucket, item) else { continue };
            let place = f32_place(ctx, bucket, &part)?;
            let first = part.start - item.start;
            let param = ParamId::new(item.param);
            for values in cuts(place.slice()) {
                let elements = first + values.start..first + values.end;
                let write = |values: &mut [f32]| write(param, ctx.spec(param), elements, values);
                // SAFETY: nothing is under way that uses the weights (`settle`, by who calls this), and nothing begins: the
                // model is borrowed mutably, or is being made, and a unit can be entered by its own forward or backward only.
                // Otherwise the buffer is new and ours alone. What wrote it is done.
                unsafe { update_anywhere(&*ctx.backend, &place.slice().range(values), write)?? };
            }
            match place {
                F32Place::Weights(_) => {}
                F32Place::Main(main) => cast(ctx.compute(), &main, &bucket.model_weight.part(part))?,
                F32Place::Copy(values) => store(ctx, bucket, &part, &values)?,
            }
        }
    }
    Ok(())
}

/// The elements of the bucket that are of this parameter and this rank has weights for.
pub(super) fn held_part(ctx: &Ctx, bucket: &BucketBuffers, item: &Item) -> Option<Range<usize>> {
    let sharded = ctx.config.strategy.shards_optim();
    let part = if sharded { intersection(&item.range(), &bucket.shard) } else { item.range() };
    (!part.is_empty()).then_some(part)
}

/// The main weights that this rank has of these elements of the bucket, and which of the elements these are.
fn main_part(bucket: &BucketBuffers, part: &Range<usize>) -> Option<(Slice, Range<usize>)> {
    let (main, owned) = (bucket.main_weight.as_ref()?, bucket.owned_of(part));
    let at = owned.start - part.start..owned.end - part.start;
    (!owned.is_empty()).then(|| (main.part(owned), at))
}

/// Where these weights are in f32, or a copy of them.
fn f32_place(ctx: &Ctx, bucket: &BucketBuffers, part: &Range<usize>) -> Result<F32Place, CommError> {
    let compute = ctx.compute();
    let weights = bucket.model_weight.part(part.clone());
    let place = match main_part(bucket, part) {
        None if weights.dtype() == Dtype::F32 => F32Place::Weights(weights),
        Some((main, at)) if at == (0..part.len()) => F32Place::Main(main),
        main => {
            // SAFETY: it is known to this call and to its caller, which use it on the compute stream, or on the host
            // when that is done.
            let values = unsafe { ctx.account().allocate_briefly(Dtype::F32, part.len()) }?;
            cast(compute, &weights, &values)?;
            if let Some((main, at)) = main {
                cast(compute, &main, &values.range(at))?;
            }
            F32Place::Copy(values)
        }
    };
    compute.record().synchronize()?;
    Ok(place)
}

fn store(ctx: &Ctx, bucket: &BucketBuffers, part: &Range<usize>, values: &Slice) -> Result<(), CommError> {
    let compute = ctx.compute();
    if let Some((main, at)) = main_part(bucket, part) {
        cast(compute, &values.range(at), &main)?;
    }
    cast(compute, values, &bucket.model_weight.part(part.clone()))
}

/// Weights that are written one part after the other.
#[must_use = "the model has the weights once this is finished"]
pub(crate) struct Stores<'a> {
    engine: &'a Engine,
}

impl<'a> Stores<'a> {
    /// Begins to write weights part by part: nothing that uses them is under way. All ranks must call it.
    pub(crate) fn begin(engine: &'a Engine) -> Result<Stores<'a>> {
        complete_shards(&engine.ctx, &mut engine.step())?;
        Ok(Stores { engine })
    }

    pub(crate) fn engine(&self) -> &'a Engine {
        self.engine
    }

    /// Writes what this rank holds of the `elements` of a parameter, whose values in f32 are `values`.
    pub(crate) fn store(
        &self,
        param: ParamId,
        elements: Range<usize>,
        values: &Slice,
    ) -> Result<(), CommError> {
        let ctx = &self.engine.ctx;
        let (bucket, item) = ctx.place_of(param);
        let Some(held) = held_part(ctx, bucket, item) else { return Ok(()) };
        let first = item.start + elements.start;
        let part = intersection(&held, &(first..item.start + elements.end));
        if part.is_empty() {
            return Ok(());
        }
        store(ctx, bucket, &part, &values.range(part.start - first..part.end - first))
    }

    /// All are written; all ranks must call it.
    pub(crate) fn finish(self) -> Result<()> {
        end_writing(self.engine, None, Ok(()))
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
