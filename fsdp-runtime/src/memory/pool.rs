//! Pools of flat buffers that units use in turn, within one bound over all of them.
//!
//! Units whose buffers have equal shapes form a class. A buffer that is given back stays for the next unit of its class, if the
//! bound has room for it. It is freed when a unit of another class needs the room. So where units are alike, a few buffers serve
//! all of them; where no two are alike, a buffer lives as long as its unit holds it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::{Account, Category};
use crate::comm::CommError;
use crate::device::{Memory, Slice};
use crate::layout::PoolLimit;
use crate::spec::Dtype;

/// Dtype and elements of each buffer of a unit.
pub(crate) type Shapes = Vec<(Dtype, usize)>;

/// Elements of each parameter in a buffer.
pub(crate) type Parts = Vec<Range<usize>>;

/// The buffers that a unit holds. They are given back by [`Pool::release`].
#[derive(Debug)]
pub(crate) struct Lease {
    buffers: Vec<Slice>,
    class: usize,
    /// The unit whose parameters they are in pieces for.
    cut_for: usize,
    /// They are of those that [`Pool::settle`] has allocated.
    settled: bool,
}

impl Lease {
    /// One for each of the unit's shapes.
    pub(crate) fn buffers(&self) -> &[Slice] {
        &self.buffers
    }
}

struct Class {
    /// The only unit of the class, whatever others look like: it is outside the bound.
    alone: Option<usize>,
    shapes: Shapes,
    units: usize,
    /// Buffers that wait for a unit, and when they were given back: those that wait for longest first.
    idle: VecDeque<(u64, Lease)>,
}

impl Class {
    fn bytes(&self) -> u64 {
        self.shapes.iter().map(|&(dtype, len)| (dtype.size() * len) as u64).sum()
    }
}

/// Buffers that are used over and over, allocated when no unit has left some of the same shapes.
pub(crate) struct Pool {
    account: Account,
    category: Category,
    classes: Vec<Class>,
    class_of_unit: Vec<Option<usize>>,
    /// By unit and buffer, what is to be a piece of its own; nothing where buffers are not in pieces.
    parts: Vec<Vec<Parts>>,
    limit: PoolLimit,
    /// Bytes that `limit` allows for.
    room: u64,
    /// Bytes that are allocated under it, held or idle.
    allocated: u64,
    keep: bool,
    settled: bool,
    clock: u64,
}

impl Pool {
    /// A pool for units of these shapes (empty shapes: the unit needs no buffer). A unit that is to be `alone` is a class
    /// of its own and outside `limit`. With `keep` false buffers are freed when they are given back.
    pub(crate) fn new(
        account: Account,
        category: Category,
        shapes: Vec<Shapes>,
        alone: impl Fn(usize) -> bool,
        limit: PoolLimit,
        keep: bool,
    ) -> Pool {
        let mut classes: Vec<Class> = Vec::new();
        let class_of_unit = shapes.into_iter().enumerate().map(|(unit, shapes)| {
            let alone = alone(unit).then_some(unit);
            if shapes.is_empty() {
                return None;
            }
            let same = |class: &Class| class.alone == alone && class.shapes == shapes;
            let class = classes.iter().position(same).unwrap_or_else(|| {
                classes.push(Class { alone, shapes, units: 0, idle: VecDeque::new() });
                classes.len() - 1
            });
            classes[class].units += 1;
            Some(class)
        });
        let class_of_unit = class_of_unit.collect();
        let (parts, room, allocated, settled, clock) = (Vec::new(), 0, 0, false, 0);
        let mut pool = Pool {
            account,
            category,
            classes,
            class_of_unit,
            parts,
            limit,
            room,
            allocated,
            keep,
            settled,
            clock,
        };
        pool.set_limit(limit);
        pool
    }

    /// Has the pool make its buffers in pieces where they are in memory of the host: `parts` are those of each buffer of
    /// each unit. Units whose buffers are as long but cut elsewhere take turns all the same.
    pub(crate) fn in_pieces(mut self, parts: Vec<Vec<Parts>>) -> Pool {
        if self.account.is_host() {
            self.parts = parts;
        }
        self
    }

    fn parts_of(&self, unit: usize) -> &[Parts] {
        self.parts.get(unit).map_or(&[], Vec::as_slice)
    }

    /// Sets the bound. Units hold no more than it allows for, but where some are held inside others.
    pub(crate) fn set_limit(&mut self, limit: PoolLimit) {
        let comes_and_goes = |class: &&Class| class.alone.is_none() && !(self.settled && class.units > 1);
        let shared = self.classes.iter().filter(comes_and_goes);
        let units: Vec<(u64, u64)> = shared.map(|class| (class.bytes(), class.units as u64)).collect();
        (self.limit, self.room) = (limit, limit.room(&units));
    }

    /// Has the unit be `alone` from now on, or take turns with those that are alike. It must hold no buffers, and the pool
    /// must not be settled.
    pub(crate) fn set_alone(&mut self, unit: usize, alone: bool) {
        let Some(from) = self.class_of_unit[unit] else { return };
        let alone = alone.then_some(unit);
        if self.classes[from].alone == alone {
            return;
        }
        let shapes = self.classes[from].shapes.clone();
        let same = |class: &Class| class.alone == alone && class.shapes == shapes;
        let to = self.classes.iter().position(same).unwrap_or_else(|| {
            self.classes.push(Class { alone, shapes, units: 0, idle: VecDeque::new() });
            self.classes.len() - 1
        });
        self.classes[from].units -= 1;
        self.classes[to].units += 1;
        self.class_of_unit[unit] = Some(to);
        if self.classes[from].alone.is_some() {
            // Nobody else takes what it had.
            self.classes[from].idle.clear();
        }
        self.set_limit(self.limit);
        while self.allocated > self.room && self.free_oldest() {}
    }

    /// Whether no unit needs a buffer.
    pub(crate) fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// Whether buffers stay when they are given back.
    pub(crate) fn is_kept(&self) -> bool {
        self.keep
    }

    /// Whether the unit's buffers are under the bound.
    pub(crate) fn is_shared(&self, unit: usize) -> bool {
        self.class_of_unit[unit].is_some_and(|class| self.classes[class].alone.is_none())
    }

    /// Allocates the buffers of classes that repeat now, as many as units may hold at a time, and those of units that
    /// are alone, in `memory`: they stay where they are. Other units have memory that comes and goes, as always. To be
    /// called before the first use.
    ///
    /// # Errors
    /// Those of [`Account::allocate`].
    pub(crate) fn settle(&mut self, memory: Arc<dyn Memory>) -> Result<(), CommError> {
        let account = self.account.in_memory(memory);
        for (index, class) in self.classes.iter_mut().enumerate() {
            let sets = match class.alone {
                Some(_) => 1,
                None if class.units > 1 => class.units.min(self.limit.units),
                None => 0,
            };
            for _ in 0..sets {
                let buffers = allocate(&account, self.category, &class.shapes, &[])?;
                class.idle.push_back((0, Lease { buffers, class: index, cut_for: 0, settled: true }));
            }
        }
        self.settled = true;
        self.set_limit(self.limit);
        Ok(())
    }

    /// Buffers that wait for one of `units`, in an order that is the same on ranks that have made the same pool.
    pub(crate) fn buffers_of(&self, units: impl Fn(usize) -> bool) -> Vec<Slice> {
        let drawn = |class: usize| {
            let mut all = self.class_of_unit.iter().enumerate();
            all.any(|(unit, of)| *of == Some(class) && units(unit))
        };
        let classes = self.classes.iter().enumerate().filter(|(index, _)| drawn(*index));
        let leases = classes.flat_map(|(_, class)| &class.idle);
        leases.flat_map(|(_, lease)| lease.buffers.iter().cloned()).collect()
    }

    /// Takes buffers for `unit`: those that a unit of its class has left, else new ones, for which others that are idle
    /// are freed as far as the bound asks for it. `None` if it needs none.
    ///
    /// # Errors
    /// Those of [`Account::allocate`].
    pub(crate) fn acquire(&mut self, unit: usize) -> Result<Option<Lease>, CommError> {
        let Some(index) = self.class_of_unit[unit] else { return Ok(None) };
        if let Some(lease) = self.take_idle(unit, index)? {
            return Ok(Some(lease));
        }
        let class = &self.classes[index];
        if class.alone.is_none() {
            let bytes = class.bytes();
            while self.allocated + bytes > self.room && self.free_oldest() {}
            self.allocated += bytes;
        }
        let buffers =
            allocate(&self.account, self.category, &self.classes[index].shapes, self.parts_of(unit))?;
        Ok(Some(Lease { buffers, class: index, cut_for: unit, settled: false }))
    }

    /// What a unit of the class has left, in the pieces that `unit` needs: what is in others is freed, and allocated anew.
    fn take_idle(&mut self, unit: usize, class: usize) -> Result<Option<Lease>, CommError> {
        let alike = |(_, lease): &(u64, Lease)| self.parts_of(lease.cut_for) == self.parts_of(unit);
        let at = self.classes[class].idle.iter().position(alike);
        if let Some((_, lease)) = at.and_then(|at| self.classes[class].idle.remove(at)) {
            return Ok(Some(lease));
        }
        let Some((_, mut lease)) = self.classes[class].idle.pop_front() else { return Ok(None) };
        lease.buffers.clear();
        lease.buffers =
            allocate(&self.account, self.category, &self.classes[class].shapes, self.parts_of(unit))?;
        lease.cut_for = unit;
        Ok(Some(lease))
    }

    /// Takes the buffers back, which are written again or freed from now on: whoever calls sees to the order of streams.
    /// What was there beyond the bound is freed.
    pub(crate) fn release(&mut self, lease: Lease) {
        let class = &mut self.classes[lease.class];
        self.clock += 1;
        if lease.settled {
            class.idle.push_front((self.clock, lease));
        } else if self.keep {
            class.idle.push_back((self.clock, lease));
            while self.allocated > self.room && self.free_oldest() {}
        } else if class.alone.is_none() {
            self.allocated -= class.bytes();
        }
    }

    /// Frees what a unit that is alone in its class has given back, unless it was settled.
    pub(crate) fn free_alone(&mut self, unit: usize) {
        if let Some(class) = self.class_of_unit[unit]
            && self.classes[class].alone.is_some()
        {
            self.classes[class].idle.retain(|(_, lease)| lease.settled);
        }
    }

    /// Frees what is idle for longest and not settled; false if there is none.
    fn free_oldest(&mut self) -> bool {
        let shared = self.classes.iter_mut().filter(|class| class.alone.is_none());
        let waiting = shared.filter_map(|class| {
            let at = class.idle.iter().position(|(_, lease)| !lease.settled)?;
            Some((class.idle[at].0, at, class))
        });
        let Some((_, at, class)) = waiting.min_by_key(|(since, ..)| *since) else { return false };
        class.idle.remove(at);
        self.allocated -= class.bytes();
        true
    }
}

fn allocate(
    account: &Account,
    category: Category,
    shapes: &Shapes,
    parts: &[Parts],
) -> Result<Vec<Slice>, CommError> {
    // SAFETY: a set of buffers has one holder at a time. A slot's next one gets it when the last one has given it back,
    // on a stream that waits for the last use (`acquire`); a fallback has one holder ever. How holders order their own
    // streams is said where the pipelines launch work.
    let allocate = |(&(dtype, len), parts): (&(Dtype, usize), &[Range<usize>])| unsafe {
        account.allocate_in_pieces(category, dtype, len, parts)
    };
    let parts = parts.iter().map(Vec::as_slice).chain(std::iter::repeat(&[][..]));
    shapes.iter().zip(parts).map(allocate).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: PoolLimit = PoolLimit { units: 2, bytes: None };

    /// Unit 0 is alone, of 64 bytes; 1, 2 and 3 have 256 bytes each, 4 has 128 and 5 nothing.
    fn pool(keep: bool) -> (Pool, Account) {
        let account = Account::default();
        let block: Shapes = vec![(Dtype::F32, 64)];
        let shapes = vec![
            vec![(Dtype::BF16, 32)],
            block.clone(),
            block.clone(),
            block,
            vec![(Dtype::F32, 32)],
            vec![],
        ];
        (Pool::new(account.clone(), Category::GatherPool, shapes, |unit| unit == 0, TWO, keep), account)
    }

    fn take(pool: &mut Pool, unit: usize) -> Lease {
        pool.acquire(unit).unwrap().unwrap()
    }

    fn bytes(account: &Account) -> (usize, usize) {
        let usage = account.usage(Category::GatherPool);
        (usage.current, usage.peak)
    }

    #[test]
    fn units_of_a_class_take_turns_in_the_same_buffers() {
        let (mut pool, account) = pool(true);
        let (first, second) = (take(&mut pool, 1), take(&mut pool, 2));
        let address = first.buffers()[0].as_ptr();
        pool.release(first);
        let third = take(&mut pool, 3);
        assert_eq!(third.buffers()[0].as_ptr(), address);
        pool.release(second);
        pool.release(third);
        assert_eq!(bytes(&account), (2 * 256, 2 * 256));
    }

    #[test]
    fn a_unit_that_is_alone_from_now_on_has_memory_of_its_own_until_it_is_not() {
        let (mut pool, account) = pool(true);
        let leases = [1, 2].map(|unit| take(&mut pool, unit));
        leases.into_iter().for_each(|lease| pool.release(lease));
        assert_eq!(bytes(&account).0, 2 * 256);
        for unit in [1, 2] {
            pool.set_alone(unit, true);
            assert!(!pool.is_shared(unit));
        }
        // One unit of 256 bytes and one of 128 are left to take turns: there is room for both.
        assert_eq!(bytes(&account).0, 256);
        let leases = [1, 2, 3, 4].map(|unit| take(&mut pool, unit));
        assert_eq!(bytes(&account).0, 3 * 256 + 128);
        leases.into_iter().for_each(|lease| pool.release(lease));
        pool.set_alone(1, false);
        assert_eq!(bytes(&account).0, 2 * 256 + 128);
        pool.set_alone(2, false);
        pool.set_alone(2, false);
        let leases = [1, 2].map(|unit| take(&mut pool, unit));
        leases.into_iter().for_each(|lease| pool.release(lease));
        assert_eq!(bytes(&account).0, 2 * 256);
    }

    #[test]
    fn a_unit_of_another_class_has_what_is_idle_freed() {
        let (mut pool, account) = pool(true);
        let (first, second) = (take(&mut pool, 1), take(&mut pool, 2));
        pool.release(second);
        let small = take(&mut pool, 4);
        assert_eq!(bytes(&account), (256 + 128, 2 * 256));
        // There is room for no more than what two units hold: the small one's goes again.
        pool.release(small);
        let third = take(&mut pool, 3);
        assert_eq!(bytes(&account), (2 * 256, 2 * 256));
        pool.release(first);
        pool.release(third);
        // The unit that is alone takes no one's room.
        take(&mut pool, 0);
        assert_eq!(bytes(&account).1, 2 * 256 + 64);
    }

    #[test]
    fn units_held_inside_others_get_memory_beyond_the_bound_and_it_goes_again() {
        let (mut pool, account) = pool(true);
        let held: Vec<Lease> = (1..4).map(|unit| take(&mut pool, unit)).collect();
        assert_eq!(bytes(&account).0, 3 * 256);
        held.into_iter().for_each(|lease| pool.release(lease));
        assert_eq!(bytes(&account).0, 2 * 256);
        let small = take(&mut pool, 4);
        assert_eq!(bytes(&account).0, 256 + 128);
        pool.release(small);
    }

    #[test]
    fn a_unit_without_buffers_gets_none() {
        let (mut pool, _) = pool(true);
        assert!(pool.acquire(5).unwrap().is_none());
        assert!(!pool.is_shared(5) && !pool.is_shared(0) && pool.is_shared(4));
    }

    #[test]
    fn what_is_settled_stays_where_it_is() {
        let (mut pool, account) = pool(true);
        pool.settle(Arc::new(crate::device::HostMemory)).unwrap();
        // Two sets of the class that repeats, and the one of the unit that is alone.
        let known = pool.buffers_of(|_| true);
        assert_eq!((known.len(), bytes(&account).0), (3, 2 * 256 + 64));
        for unit in [1, 4, 2, 3, 4, 1] {
            let (lease, other) = (take(&mut pool, unit), take(&mut pool, 2));
            let is_known = known.iter().any(|known| known.as_ptr() == lease.buffers()[0].as_ptr());
            assert_eq!(is_known, unit != 4, "{unit}");
            pool.release(lease);
            pool.release(other);
        }
        assert_eq!(bytes(&account).1, 2 * 256 + 64 + 128);
    }

    #[test]
    fn without_keep_memory_goes_back_at_release() {
        let (mut pool, account) = pool(false);
        for unit in [0, 1, 4, 1] {
            let lease = take(&mut pool, unit);
            pool.release(lease);
            assert_eq!(bytes(&account).0, 0);
        }
    }

    #[test]
    fn a_deeper_limit_has_room_for_more() {
        let (mut pool, account) = pool(true);
        pool.set_limit(PoolLimit { units: 3, bytes: None });
        let held: Vec<Lease> = (1..4).map(|unit| take(&mut pool, unit)).collect();
        held.into_iter().for_each(|lease| pool.release(lease));
        let held: Vec<Lease> = (1..4).map(|unit| take(&mut pool, unit)).collect();
        assert_eq!((bytes(&account).1, held.len()), (3 * 256, 3));
    }
}
