//! The order in which units run, learnt in one pass and checked in the next.

use super::super::ids::UnitId;

/// Follows a pass over the units and foretells what comes next, once a whole pass was seen.
#[derive(Debug, Default)]
pub(crate) struct Order {
    learnt: Vec<UnitId>,
    seen: Vec<UnitId>,
    following: bool,
}

impl Order {
    /// A pass begins.
    pub(crate) fn begin(&mut self) {
        self.seen.clear();
        self.following = !self.learnt.is_empty();
    }

    /// `unit` runs now. The first one that differs from the learnt order switches foretelling off for this
    /// pass.
    pub(crate) fn advance(&mut self, unit: UnitId) {
        if self.learnt.get(self.seen.len()) != Some(&unit) {
            self.following = false;
        }
        self.seen.push(unit);
    }

    /// No unit has run in the pass so far.
    pub(crate) fn is_at_start(&self) -> bool {
        self.seen.is_empty()
    }

    /// The pass is over; the next one is expected to be like it.
    pub(crate) fn end(&mut self) {
        if self.learnt != self.seen {
            std::mem::swap(&mut self.learnt, &mut self.seen);
        }
        self.following = false;
    }

    /// The units that will run next, nearest first; nothing while the order is unknown.
    pub(crate) fn upcoming(&self) -> impl Iterator<Item = UnitId> + '_ {
        let from = if self.following { self.seen.len() } else { self.learnt.len() };
        self.learnt[from.min(self.learnt.len())..].iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::ids::Id;
    use super::*;

    fn pass(order: &mut Order, units: &[usize]) -> Vec<Vec<usize>> {
        order.begin();
        let foretold = units.iter().map(|&unit| {
            order.advance(UnitId::new(unit));
            order.upcoming().map(UnitId::index).collect()
        });
        let foretold = foretold.collect();
        order.end();
        foretold
    }

    #[test]
    fn the_second_pass_is_foretold() {
        let mut order = Order::default();
        assert_eq!(pass(&mut order, &[1, 2, 3]), [vec![], vec![], vec![]] as [Vec<usize>; 3]);
        assert_eq!(pass(&mut order, &[1, 2, 3]), [vec![2, 3], vec![3], vec![]]);
    }

    #[test]
    fn another_order_is_noticed_and_learnt() {
        let mut order = Order::default();
        pass(&mut order, &[1, 2, 3]);
        assert_eq!(pass(&mut order, &[1, 3, 2]), [vec![2, 3], vec![], vec![]]);
        assert_eq!(pass(&mut order, &[1, 3, 2]), [vec![3, 2], vec![2], vec![]]);
    }

    #[test]
    fn a_unit_that_runs_twice_is_foretold_twice() {
        let mut order = Order::default();
        pass(&mut order, &[1, 2, 1]);
        assert_eq!(pass(&mut order, &[1, 2, 1])[0], [2, 1]);
    }
}
