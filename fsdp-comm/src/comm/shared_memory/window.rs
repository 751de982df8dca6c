//! A rank's window: the memory that it writes for the others to read, and the words that say how far it is.
//!
//! # Rounds
//! What a rank sends goes through [`SLOTS`] slots, in turn. All ranks go through the same rounds. In round `r` a rank waits until all
//! others are done with round `r - SLOTS`, writes slot `r % SLOTS`, and sets its word *written* to `r + 1`. A rank reads a peer's
//! slot when that word says so, and sets its word *read* to `r + 1` when it is done with the slots of all. So no slot is written
//! while it is read. Counters may overflow: they are compared by their difference.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::segment::{Segment, wake};
use crate::device::{Block, Slice};
use crate::spec::Dtype;

/// Rounds that a rank may be ahead of the slowest.
pub(super) const SLOTS: u32 = 4;
/// Bytes of a slot: it stays in the second-level cache, so that the second copy costs little.
pub(super) const SLOT: usize = 256 << 10;
/// Where the slots begin; the words are before.
const DATA: usize = 4096;
/// Bytes of a window.
pub(super) const BYTES: usize = DATA + SLOTS as usize * SLOT;

/// Words of a window.
const ARRIVED: usize = 0;
const WRITTEN: usize = 1;
const READ: usize = 2;
/// Two prints of [`PRINT`] words: those of the present collective and of the one before.
const PRINTS: usize = 3;
const PRINT: usize = 4;

/// What a call looks like: equal calls have equal ones.
pub(super) type Print = [u32; PRINT];

/// A rank's own window, or another rank's.
pub(super) struct Window {
    segment: Arc<Segment>,
    slots: Slice,
}

/// A window's slots, as the memory of slices.
struct Slots(Arc<Segment>);

// SAFETY: the address is a fixed one in the segment, whose mapping lasts as long as this keeps it. It is memory of the host.
unsafe impl Block for Slots {
    fn ptr(&self) -> NonNull<u8> {
        self.0.address(DATA)
    }

    fn is_host(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Window {
    pub(super) fn new(segment: Segment) -> Window {
        let segment = Arc::new(segment);
        let len = (BYTES - DATA) / Dtype::F32.size();
        // SAFETY: the block has that many bytes behind `DATA`. Slices of a peer's window are only read, and uses are in the order of
        // the rounds, as the module says: `Flow` makes them, and gives them to nobody.
        let slots = unsafe { Slice::of_block(Box::new(Slots(segment.clone())), Dtype::F32, len) };
        Window { segment, slots }
    }

    /// Collectives that the rank has come to.
    pub(super) fn arrived(&self) -> &AtomicU32 {
        self.segment.word(ARRIVED)
    }

    /// Rounds for which the rank has written its slot.
    pub(super) fn written(&self) -> &AtomicU32 {
        self.segment.word(WRITTEN)
    }

    /// Rounds of which the rank has read all slots.
    pub(super) fn read(&self) -> &AtomicU32 {
        self.segment.word(READ)
    }

    fn print_words(&self, number: u32) -> [&AtomicU32; PRINT] {
        let first = PRINTS + PRINT * (number as usize % 2);
        std::array::from_fn(|i| self.segment.word(first + i))
    }

    /// Says what the rank does in the collective of this number, and that it has come to it.
    pub(super) fn arrive(&self, number: u32, print: Print) {
        for (word, value) in self.print_words(number).into_iter().zip(print) {
            word.store(value, Ordering::Relaxed);
        }
        set(self.arrived(), number);
    }

    /// What the rank does in the collective of this number, once it has come to it. The rank is at the next one at most:
    /// it waits there for this one.
    pub(super) fn print(&self, number: u32) -> Print {
        self.print_words(number).map(|word| word.load(Ordering::Relaxed))
    }

    /// The slot of a round, of `lanes` equal lanes.
    pub(super) fn lanes(&self, round: u32, lanes: usize) -> Lanes<'_> {
        let slot = (round % SLOTS) as usize * SLOT;
        Lanes { slots: &self.slots, slot, bytes: lane_bytes(lanes) }
    }
}

/// Sets a word of this rank's own window, and wakes those who wait for that.
pub(super) fn set(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
    wake(word);
}

/// Bytes of a lane, if a slot has so many.
pub(super) fn lane_bytes(lanes: usize) -> usize {
    let bytes = SLOT / lanes / 64 * 64;
    assert!(bytes > 0, "{lanes} lanes in a slot of {SLOT} bytes");
    bytes
}

/// A slot in a round: a lane for each rank that reads something else, or one for all.
pub(super) struct Lanes<'a> {
    slots: &'a Slice,
    slot: usize,
    bytes: usize,
}

impl Lanes<'_> {
    /// `len` elements of a lane from byte `at` on.
    pub(super) fn slice(&self, lane: usize, at: usize, dtype: Dtype, len: usize) -> Slice {
        let all = self.slots.reinterpreted(dtype, self.slots.bytes() / dtype.size());
        let start = (self.slot + lane * self.bytes + at) / dtype.size();
        assert!(
            at + len * dtype.size() <= self.bytes,
            "{len} elements of {dtype} at {at} in a lane of {}",
            self.bytes
        );
        all.range(start..start + len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_slots_have_room() {
        const { assert!((PRINTS + 2 * PRINT) * 64 <= DATA) };
        assert!(lane_bytes(crate::comm::MAX_RANKS) >= 64);
        assert_eq!(lane_bytes(1), SLOT);
        assert_eq!(lane_bytes(3) % 64, 0);
        // Overflowing counters keep their slots.
        assert_eq!(u32::MAX.wrapping_add(1) % SLOTS, (u32::MAX % SLOTS + 1) % SLOTS);
    }
}
