//! A fixed pool of flat buffers: a few slots for each class of units that have the same buffer shapes.

use std::sync::Arc;

use super::{Account, Category};
use crate::comm::CommError;
use crate::device::{Event, Memory, Slice, Stream};
use crate::spec::Dtype;

/// Dtype and elements of each buffer of a unit: units with equal shapes share slots.
pub(crate) type Shapes = Vec<(Dtype, usize)>;

/// A slot of a [`Pool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SlotId {
    class: usize,
    slot: usize,
}

#[derive(Default)]
struct Slot {
    buffers: Option<Vec<Slice>>,
    held: bool,
    /// The buffers may be written again after this.
    free_after: Option<Arc<dyn Event>>,
    /// The pool's clock at the last release: the slot idle for longest is taken first.
    released: u64,
}

struct Class {
    /// The only unit of the class, whatever others look like.
    alone: Option<usize>,
    shapes: Shapes,
    slots: Vec<Slot>,
}

/// Buffers that are used over and over: at most `depth` sets for each class, allocated at first use, their
/// addresses stable from then on (unless the pool is told not to keep them).
pub(crate) struct Pool {
    account: Account,
    category: Category,
    classes: Vec<Class>,
    class_of_unit: Vec<Option<usize>>,
    keep: bool,
    clock: u64,
}

impl Pool {
    /// A pool for units of these shapes (empty shapes: the unit needs no buffer). A class has as many slots
    /// as it has units, but at most `depth`; a unit that is to be `alone` is a class of its own. With `keep`
    /// false a slot's buffers are freed whenever it is released.
    pub(crate) fn new(
        account: Account,
        category: Category,
        shapes: Vec<Shapes>,
        alone: impl Fn(usize) -> bool,
        depth: usize,
        keep: bool,
    ) -> Pool {
        let mut classes: Vec<Class> = Vec::new();
        let class_of_unit = shapes
            .into_iter()
            .enumerate()
            .map(|(unit, shapes)| {
                let alone = alone(unit).then_some(unit);
                if shapes.is_empty() {
                    return None;
                }
                let same = |class: &Class| class.alone == alone && class.shapes == shapes;
                let class = classes.iter().position(same).unwrap_or_else(|| {
                    classes.push(Class { alone, shapes, slots: Vec::new() });
                    classes.len() - 1
                });
                if classes[class].slots.len() < depth {
                    classes[class].slots.push(Slot::default());
                }
                Some(class)
            })
            .collect();
        Pool { account, category, classes, class_of_unit, keep, clock: 0 }
    }

    /// Whether no unit needs a buffer.
    pub(crate) fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// Whether the addresses of the slots are stable once they are allocated.
    pub(crate) fn is_kept(&self) -> bool {
        self.keep
    }

    /// Allocates all slots now, in `memory`, whatever else the pool's buffers are in. To be called before the first use.
    ///
    /// # Errors
    /// Those of [`Account::allocate`].
    pub(crate) fn settle(&mut self, memory: Arc<dyn Memory>) -> Result<(), CommError> {
        let account = self.account.in_memory(memory);
        for class in &mut self.classes {
            for slot in &mut class.slots {
                slot.buffers = Some(allocate(&account, self.category, &class.shapes)?);
            }
        }
        Ok(())
    }

    /// Buffers of the slots that `units` draw from, as far as they are allocated, in an order that is the same on ranks
    /// that have made the same pool.
    pub(crate) fn buffers_of(&self, units: impl Fn(usize) -> bool) -> Vec<Slice> {
        let drawn = |class: usize| {
            let mut all = self.class_of_unit.iter().enumerate();
            all.any(|(unit, of)| *of == Some(class) && units(unit))
        };
        let classes = self.classes.iter().enumerate().filter(|(index, _)| drawn(*index));
        let slots = classes.flat_map(|(_, class)| &class.slots);
        slots.flat_map(|slot| slot.buffers.iter().flatten().cloned()).collect()
    }

    /// Takes an idle slot for `unit`. Work on `stream` that is enqueued from now on may write its buffers.
    ///
    /// # Errors
    /// Those of [`Stream::wait`] for the slot's last user, and of [`Account::allocate`].
    pub(crate) fn acquire(
        &mut self,
        unit: usize,
        stream: &dyn Stream,
    ) -> Result<Option<(SlotId, Vec<Slice>)>, CommError> {
        let Some(class_index) = self.class_of_unit[unit] else {
            return Ok(None);
        };
        let class = &mut self.classes[class_index];
        let idle = class.slots.iter_mut().enumerate().filter(|(_, slot)| !slot.held);
        let Some((index, slot)) = idle.min_by_key(|(_, slot)| slot.released) else {
            return Ok(None);
        };
        if let Some(event) = slot.free_after.take() {
            stream.wait(&event)?;
        }
        let (account, category) = (&self.account, self.category);
        let buffers = match &slot.buffers {
            Some(buffers) => buffers.clone(),
            None => slot.buffers.insert(allocate(account, category, &class.shapes)?).clone(),
        };
        slot.held = true;
        Ok(Some((SlotId { class: class_index, slot: index }, buffers)))
    }

    /// Buffers for `unit` outside the fixed slots: freed when the last handle goes. For what the bound cannot
    /// hold, such as units nested deeper than the pool.
    ///
    /// # Errors
    /// Those of [`Account::allocate`].
    pub(crate) fn fallback(&self, unit: usize) -> Result<Vec<Slice>, CommError> {
        match self.class_of_unit[unit] {
            Some(class) => allocate(&self.account, self.category, &self.classes[class].shapes),
            None => Ok(Vec::new()),
        }
    }

    /// True if `unit` and `other` draw from the same slots.
    pub(crate) fn same_class(&self, unit: usize, other: usize) -> bool {
        self.class_of_unit[unit] == self.class_of_unit[other]
    }

    /// Gives the slot back; its buffers are written again only after `last_use`, which is `None` if the order of
    /// streams is such that they are anyway.
    pub(crate) fn release(&mut self, id: SlotId, last_use: Option<Arc<dyn Event>>) {
        self.clock += 1;
        let slot = &mut self.classes[id.class].slots[id.slot];
        slot.released = self.clock;
        debug_assert!(slot.held, "a slot is released once");
        slot.held = false;
        slot.free_after = last_use;
        if !self.keep {
            slot.buffers = None;
        }
    }
}

fn allocate(account: &Account, category: Category, shapes: &Shapes) -> Result<Vec<Slice>, CommError> {
    shapes.iter().map(|&(dtype, len)| account.allocate(category, dtype, len)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::ComputeStream;

    fn pool(keep: bool) -> (Pool, Account) {
        let account = Account::default();
        let block: Shapes = vec![(Dtype::F32, 64)];
        let shapes = vec![vec![(Dtype::BF16, 32)], block.clone(), block.clone(), block, vec![]];
        (Pool::new(account.clone(), Category::GatherPool, shapes, |unit| unit == 0, 2, keep), account)
    }

    #[test]
    fn a_class_never_has_more_than_its_slots() {
        let (mut pool, account) = pool(true);
        let stream = ComputeStream::new("compute");
        let (first, buffers) = pool.acquire(1, &*stream).unwrap().unwrap();
        pool.acquire(2, &*stream).unwrap().unwrap();
        assert!(pool.acquire(3, &*stream).unwrap().is_none());
        pool.release(first, Some(stream.record()));
        let (_, again) = pool.acquire(3, &*stream).unwrap().unwrap();
        assert_eq!(again[0].as_ptr(), buffers[0].as_ptr());
        assert_eq!(account.usage(Category::GatherPool).peak, 2 * 64 * 4);
    }

    #[test]
    fn a_unit_without_buffers_gets_none() {
        let (mut pool, _) = pool(true);
        assert!(pool.acquire(4, &*ComputeStream::new("compute")).unwrap().is_none());
        assert!(pool.fallback(4).unwrap().is_empty());
    }

    #[test]
    fn a_pool_that_is_settled_allocates_no_more() {
        let (mut pool, account) = pool(true);
        pool.settle(Arc::new(crate::device::HostMemory)).unwrap();
        let whole = (32 * 2 + 2 * 64 * 4, pool.buffers_of(|unit| unit == 3));
        assert_eq!((account.usage(Category::GatherPool).current, whole.1.len()), (whole.0, 2));
        let stream = ComputeStream::new("compute");
        for unit in [1, 2] {
            let (_, buffers) = pool.acquire(unit, &*stream).unwrap().unwrap();
            assert!(whole.1.iter().any(|known| known.as_ptr() == buffers[0].as_ptr()));
        }
        assert_eq!(account.usage(Category::GatherPool).peak, whole.0);
    }

    #[test]
    fn without_keep_memory_goes_back_at_release() {
        let (mut pool, account) = pool(false);
        let stream = ComputeStream::new("compute");
        let (id, buffers) = pool.acquire(0, &*stream).unwrap().unwrap();
        drop(buffers);
        pool.release(id, None);
        assert_eq!(account.usage(Category::GatherPool).current, 0);
    }
}
