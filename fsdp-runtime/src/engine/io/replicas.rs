//! Copies of weights: ranks that hold the same elements must hold the same values.
//!
//! Without shards every rank has a copy, with outer ranks those of the same inner rank have. Nothing that training does
//! would show that they differ: gradients are reduced, and each copy goes on by itself. So whatever writes weights from
//! outside ends here: the ranks exchange one checksum for each part of a parameter, and look closer only where two differ.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::device::{Slice, read_anywhere};
use crate::engine::build::agreement::exchange;
use crate::engine::io::load::held_part;
use crate::engine::{Ctx, Engine, Id, ParamId, UnitId};
use crate::error::{Error, Result};

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// All that a rank holds, of one unit or of all.
    Held(Option<UnitId>),
    /// What its optimizer updates: the model weights follow from it.
    Owned,
}

/// A part of a parameter that this rank holds.
struct Part {
    param: ParamId,
    /// Main weights (or others that the optimizer updates), before model weights.
    model: bool,
    /// Elements of the flattened parameter.
    elements: Range<usize>,
    values: Slice,
}

/// What tells the parts of a parameter apart: the parameter, which weights, the elements.
type Key = [u64; 4];

impl Part {
    fn key(&self) -> Key {
        [self.param.index(), usize::from(self.model), self.elements.start, self.elements.end]
            .map(|value| value as u64)
    }
}

/// What collectives are called by.
const COPIES: &str = "copies of the weights";
/// Elements of one checksum where two ranks look closer.
const BLOCK: usize = 4096;

/// Ends the writing of weights by all ranks, which went as `outcome` says on this one, where ranks hold copies. All
/// ranks must call it then.
///
/// # Errors
/// Those of the rank that failed first, on all ranks; copies that differ, with parameter, element, ranks and values.
pub(crate) fn agree_on_copies(engine: &Engine, written: Written, outcome: Result<()>) -> Result<()> {
    let ctx = &engine.ctx;
    let copies = ctx.outer_comm.size() > 1 || !ctx.config.strategy.shards_optim();
    if ctx.comm.size() == 1 || !copies {
        return outcome;
    }
    let parts = parts(ctx, written);
    let checksums = |()| {
        let mut said = Vec::new();
        for part in &parts {
            let checksum = checksum_of(ctx, &part.values)?;
            said.extend(part.key().into_iter().chain([checksum]).flat_map(u64::to_le_bytes));
        }
        Ok(((), said))
    };
    let ((), all) = exchange(engine, COPIES, outcome.and_then(checksums))?;
    // The same on all ranks: the first part of which two have different copies.
    let mut known: BTreeMap<Key, (usize, u64)> = BTreeMap::new();
    let mut differing: Option<(Key, [usize; 2])> = None;
    for (rank, said) in all.iter().enumerate() {
        for entry in numbers(said).as_chunks::<5>().0 {
            let (key, checksum) = ([entry[0], entry[1], entry[2], entry[3]], entry[4]);
            let (first, its) = *known.entry(key).or_insert((rank, checksum));
            if its != checksum && differing.is_none_or(|(least, _)| key < least) {
                differing = Some((key, [first, rank]));
            }
        }
    }
    match differing {
        Some((key, ranks)) => {
            let own = parts.iter().find(|part| part.key() == key && ranks.contains(&ctx.comm.rank()));
            Err(difference(engine, key, ranks, own.map(|part| &part.values))?)
        }
        None => Ok(()),
    }
}

/// What this rank holds of what was written.
fn parts(ctx: &Ctx, written: Written) -> Vec<Part> {
    let mut parts = Vec::new();
    let unit = if let Written::Held(unit) = written { unit } else { None };
    for bucket in ctx.buckets_of(unit) {
        for item in &bucket.layout.items {
            let mut part = |model: bool, elements: Range<usize>, values: Slice| {
                let elements = elements.start - item.start..elements.end - item.start;
                parts.push(Part { param: ParamId::new(item.param), model, elements, values });
            };
            let owned = bucket.owned_of(&item.range());
            let updated = match (&bucket.main_weight, written) {
                (Some(main), _) => Some(main),
                (None, Written::Owned) => Some(&bucket.model_weight),
                (None, Written::Held(_)) => None,
            };
            if let Some(updated) = updated.filter(|_| !owned.is_empty()) {
                part(false, owned.clone(), updated.part(owned));
            }
            if let (Written::Held(_), Some(held)) = (written, held_part(ctx, bucket, item)) {
                part(true, held.clone(), bucket.model_weight.part(held));
            }
        }
    }
    parts
}

/// Says where and how the copies of two ranks differ, whose parts `own` is one of on these ranks. All ranks must call
/// it.
fn difference(engine: &Engine, key: Key, ranks: [usize; 2], own: Option<&Slice>) -> Result<Error> {
    let ctx = &engine.ctx;
    let [param, _, start, _] = key.map(|value| value as usize);
    let blocks = own.map_or(0, |own| own.len().div_ceil(BLOCK));
    let block = |at: usize, own: &Slice| own.range(at * BLOCK..own.len().min((at + 1) * BLOCK));
    let sum = |at: usize| own.map_or(Ok(0), |own| checksum_of(ctx, &block(at, own)));
    let sums = (0..blocks).map(sum).collect::<Result<Vec<u64>>>();
    let sums = sums.map(|sums| ((), sums.into_iter().flat_map(u64::to_le_bytes).collect()));
    let ((), all) = exchange(engine, COPIES, sums)?;
    let [ours, theirs] = ranks.map(|rank| numbers(&all[rank]));
    let at = ours.iter().zip(&theirs).position(|(one, other)| one != other).unwrap_or(0);
    let bits = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    // SAFETY: as for the checksums.
    let read = |own: &Slice| unsafe { read_anywhere(&*ctx.backend, &block(at, own), bits) };
    let values = own.map_or(Ok(Vec::new()), read).map(|values| ((), values));
    let ((), all) = exchange::<_, Error>(engine, COPIES, values.map_err(Error::from))?;
    let floats = |rank: usize| -> Vec<f32> {
        all[rank].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let [ours, theirs] = ranks.map(floats);
    let values = ours.iter().zip(&theirs);
    let element = values.clone().position(|(one, other)| one.to_bits() != other.to_bits()).unwrap_or(0);
    let (one, other) = values.clone().nth(element).unwrap_or((&f32::NAN, &f32::NAN));
    let message = format!(
        "ranks {} and {} hold copies of it, and were given different ones: element {} is {one} on rank {} and {other} on \
         rank {}; all ranks must write the same values",
        ranks[0],
        ranks[1],
        start + at * BLOCK + element,
        ranks[0],
        ranks[1],
    );
    Ok(Error::Param { param: ctx.layout.params[param].name.clone(), message })
}

/// A checksum of the values' bits, as f32.
fn checksum_of(ctx: &Ctx, values: &Slice) -> Result<u64> {
    // SAFETY: nothing is under way that writes the weights (`settle`, by all who write them), and this thread, which
    // has written them in the order of the compute stream, only reads them here.
    Ok(unsafe { read_anywhere(&*ctx.backend, values, checksum)? })
}

/// FNV-1a over the bits, two values at a time.
pub(super) fn checksum(values: &[f32]) -> u64 {
    let (pairs, rest) = values.as_chunks::<2>();
    let pairs = pairs.iter().map(|[one, other]| u64::from(one.to_bits()) << 32 | u64::from(other.to_bits()));
    let words = pairs.chain(rest.iter().map(|value| u64::from(value.to_bits())));
    words.fold(0xcbf2_9ce4_8422_2325, |sum: u64, word| {
        (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29)
    })
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn every_bit_of_every_value_counts() {
        let values = [0.5f32, -1.0, 3.0];
        let sum = checksum(&values);
        for at in 0..values.len() {
            for bit in 0..32 {
                let mut other = values;
                other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
                assert_ne!(checksum(&other), sum, "bit {bit} of value {at}");
            }
        }
        assert_ne!(checksum(&[0.0]), checksum(&[-0.0]));
        assert_ne!(checksum(&[1.0, 2.0]), checksum(&[2.0, 1.0]));
        assert_ne!(checksum(&[0.0; 2]), checksum(&[0.0; 3]));
    }
}
