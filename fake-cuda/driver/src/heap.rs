//! Device and pinned memory: real host memory, with a pattern while nothing was written to it.
//!
//! A freed block stays mapped and patterned, its addresses unused, until much has been freed after it: an operation
//! that runs too late reads the pattern instead of another tensor's values.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use crate::race::Touch;

/// Both patterns are NaN as bf16, f16, f32 and f64.
const FRESH: u16 = 0xFFFA;
const FREED: u16 = 0xFFF1;
/// Bytes behind each block that nothing may write to.
const FENCE: usize = 64;
const ALIGN: usize = 4096;
/// How much freed memory stays mapped.
const QUARANTINE: usize = 512 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of a device.
    Device(usize),
    /// Memory of a device from `ncclMemAlloc`.
    Registrable(usize),
    /// Pinned host memory.
    Host,
}

impl Place {
    pub fn device(self) -> Option<usize> {
        match self {
            Place::Device(device) | Place::Registrable(device) => Some(device),
            Place::Host => None,
        }
    }
}

pub struct Block {
    memory: Memory,
    pub place: Place,
    pub context: usize,
    /// Allocated anew by each launch of a graph, and there as long as the process.
    pub of_graph: bool,
    /// The call that made it.
    pub origin: String,
    /// The call that freed it.
    pub freed: Option<String>,
    /// Who has touched it; see [`crate::race`].
    pub touches: Vec<Touch>,
}

impl Block {
    pub fn start(&self) -> usize {
        self.memory.start as usize
    }

    pub fn len(&self) -> usize {
        self.memory.len
    }

    pub fn range(&self) -> Range<usize> {
        self.start()..self.start() + self.len()
    }

    /// How a report speaks of it.
    pub fn describe(&self) -> String {
        let place = match self.place {
            Place::Host => "pinned host memory".to_owned(),
            Place::Device(device) | Place::Registrable(device) => format!("memory of device {device}"),
        };
        format!("{} bytes of {place} from {}", self.len(), self.origin)
    }
}

#[derive(Default)]
pub struct Heap {
    blocks: BTreeMap<usize, Block>,
    quarantine: VecDeque<usize>,
    quarantined: usize,
}

impl Heap {
    /// A new block with the pattern of fresh memory; `None` if the host has none.
    pub fn allocate(&mut self, len: usize, place: Place, context: usize, origin: String) -> Option<usize> {
        let memory = Memory::new(len)?;
        let start = memory.start as usize;
        let block =
            Block { memory, place, context, of_graph: false, origin, freed: None, touches: Vec::new() };
        self.blocks.insert(start, block);
        Some(start)
    }

    /// The block that holds `address`, freed ones included.
    pub fn holding(&mut self, address: usize) -> Option<&mut Block> {
        let (_, block) = self.blocks.range_mut(..=address).next_back()?;
        block.range().contains(&address).then_some(block)
    }

    /// The block that starts at `address`, freed ones included.
    pub fn starting(&mut self, address: usize) -> Option<&mut Block> {
        self.blocks.get_mut(&address)
    }

    /// Whether all of `range` may be read and written by this process.
    pub fn is_mapped(&mut self, range: &Range<usize>) -> bool {
        range.is_empty() || self.holding(range.start).is_some_and(|block| range.end <= block.range().end)
    }

    /// Patterns a block whose free has come in stream order; says whether something wrote behind its end.
    pub fn retire(&mut self, start: usize) -> bool {
        let Some(block) = self.blocks.get_mut(&start) else { return true };
        let intact = block.memory.fence_is_intact();
        block.memory.fill(FREED);
        self.quarantined += block.len();
        self.quarantine.push_back(start);
        while self.quarantined > QUARANTINE {
            let Some(oldest) = self.quarantine.pop_front() else { break };
            if let Some(block) = self.blocks.remove(&oldest) {
                self.quarantined -= block.len();
            }
        }
        intact
    }

    /// Patterns memory of a graph: as fresh, or as freed.
    pub fn repattern(&mut self, start: usize, fresh: bool) {
        if let Some(block) = self.blocks.get_mut(&start) {
            block.memory.fill(if fresh { FRESH } else { FREED });
        }
    }

    /// The blocks that nobody has freed and that are no graph's.
    pub fn live(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().filter(|block| block.freed.is_none() && !block.of_graph)
    }
}

/// Owned bytes at a fixed address, and a fence behind them.
struct Memory {
    start: *mut u8,
    len: usize,
}

// SAFETY: the bytes are reached only through the one state, under its lock, and by the owner when it is dropped.
unsafe impl Send for Memory {}

impl Memory {
    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.checked_add(FENCE)?, ALIGN).ok()
    }

    fn new(len: usize) -> Option<Self> {
        // SAFETY: the layout is not empty, for the fence.
        let start = unsafe { alloc(Self::layout(len)?) };
        if start.is_null() {
            return None;
        }
        let mut memory = Memory { start, len };
        memory.fill(FRESH);
        Some(memory)
    }

    /// Writes a pattern over the bytes and the fence.
    fn fill(&mut self, pattern: u16) {
        let [low, high] = pattern.to_le_bytes();
        for i in 0..self.len + FENCE {
            // SAFETY: `start` points to `len + FENCE` bytes, owned by this value.
            unsafe { self.start.add(i).write(if i % 2 == 0 { low } else { high }) };
        }
    }

    fn fence_is_intact(&self) -> bool {
        let [low, high] = FRESH.to_le_bytes();
        (self.len..self.len + FENCE).all(|i| {
            // SAFETY: `start` points to `len + FENCE` bytes, all written when it was made.
            (unsafe { self.start.add(i).read() }) == if i % 2 == 0 { low } else { high }
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len) {
            // SAFETY: `start` came from `alloc` with this layout, and is freed only here.
            unsafe { dealloc(self.start, layout) };
        }
    }
}
