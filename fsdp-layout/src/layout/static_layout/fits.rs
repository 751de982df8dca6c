//! Whether a model fits a rank's memory, asked at compile time.

use super::message::Message;
use super::{StaticLayout, StaticOptions};
use crate::layout::{MemoryPlan, Schedule, ShardAlignment};
use crate::policy::{MixedPrecision, OuterStrategy, ReshardAfterForward, Strategy};
use crate::spec::Tree;

/// The keys of `fsdp::assert_fits!`.
#[derive(Clone, Copy, Debug)]
pub struct FitOptions {
    /// What is sharded.
    pub strategy: Strategy,
    /// Ranks that share the shards: the size of the mesh's `dp_shard` dim.
    pub ranks: usize,
    /// Memory of one rank: a number and a unit, such as `"80 GiB"` or `"1.5 TB"`.
    pub budget: &'static str,
    /// Dtypes.
    pub precision: MixedPrecision,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// f32 buffers that the optimizer keeps.
    pub optimizer_states: usize,
    /// What the outer ranks share.
    pub outer: OuterStrategy,
    /// Outer ranks: the size of the mesh's `dp_outer` dim.
    pub outer_ranks: usize,
    /// Where shard boundaries may fall.
    pub alignment: ShardAlignment,
    /// Whether units keep their whole weights between forward and backward.
    pub reshard: ReshardAfterForward,
    /// Units gathered ahead.
    pub prefetch: usize,
    /// Most elements gathered at a time.
    pub gather_budget: Option<usize>,
    /// Most elements unreduced at a time.
    pub reduce_budget: Option<usize>,
    /// Some microbatches reduce nothing.
    pub no_sync: bool,
    /// The pools are registered.
    pub registered: bool,
}

impl FitOptions {
    /// ZeRO-3, one rank, FP32, no tensor parallelism, AdamW, the default schedule. There is no budget that fits all.
    pub const DEFAULT: FitOptions = FitOptions {
        strategy: Strategy::OptimGradsParams,
        ranks: 1,
        budget: "",
        precision: MixedPrecision::F32,
        tp: 1,
        optimizer_states: 2,
        outer: OuterStrategy::NoShard,
        outer_ranks: 1,
        alignment: ShardAlignment::Element,
        reshard: Schedule::DEFAULT.reshard,
        prefetch: Schedule::DEFAULT.prefetch,
        gather_budget: Schedule::DEFAULT.gather_budget,
        reduce_budget: Schedule::DEFAULT.reduce_budget,
        no_sync: Schedule::DEFAULT.no_sync,
        registered: Schedule::DEFAULT.registered,
    };

    const fn layout(&self) -> StaticOptions {
        let FitOptions { ranks, tp, precision, alignment, outer, outer_ranks, .. } = *self;
        let outer = if let OuterStrategy::Optim = outer { outer_ranks } else { 1 };
        StaticOptions { ranks, outer, alignment, tp, precision }
    }

    const fn schedule(&self) -> Schedule {
        let FitOptions { prefetch, gather_budget, reduce_budget, reshard, no_sync, registered, .. } = *self;
        Schedule { prefetch, gather_budget, reduce_budget, reshard, no_sync, registered }
    }

    /// Fails where `fully_shard` would.
    #[track_caller]
    const fn check(&self) {
        if self.outer_ranks == 0 {
            panic!("there is at least 1 outer rank, got 0");
        }
        let shares = matches!(self.outer, OuterStrategy::Optim) && self.outer_ranks > 1;
        if shares && self.ranks > 1 && !self.strategy.shards_optim() {
            let mut message = Message::new();
            message
                .text("the outer strategy `optim` cuts the optimizer state of a shard, but with strategy `");
            message.text(self.strategy.name()).text("` the inner ranks have no shards").fail();
        }
        if let ReshardAfterForward::Ranks(group) = self.reshard
            && (group == 0 || !self.ranks.is_multiple_of(group))
        {
            let mut message = Message::new();
            message.text("units are to be resharded after forward to groups of ").number(group as u64);
            message.text(" ranks, which do not divide ").number(self.ranks as u64).fail();
        }
    }
}

/// What `fsdp::assert_fits!` asks of a model's tree, `name` being the model's type as it was written.
///
/// # Panics
/// If the model needs more than the budget, or as [`StaticLayout::of`] does.
#[track_caller]
pub const fn require_fit(tree: &Tree, name: &str, options: &FitOptions) {
    let FitOptions { strategy, ranks, outer_ranks, budget, tp, optimizer_states, .. } = *options;
    options.check();
    let room = parse_budget(budget);
    let layout = StaticLayout::of(tree, &options.layout());
    let plan = layout.memory_with(strategy, &options.schedule());
    let needed = plan.total(optimizer_states);
    if needed <= room {
        return;
    }
    let unit = unit_for(needed);
    let mut message = Message::new();
    message.text(name).text(" needs ");
    // Rounded up, so that it is seen to be more than the budget.
    tenths(&mut message, needed.saturating_mul(10).div_ceil(unit.1));
    message.text(" ").text(unit.0).text(" a rank with ").text(strategy.name()).text(" over ");
    if outer_ranks > 1 {
        message.number(outer_ranks as u64).text(" x ");
    }
    message.number(ranks as u64).text(if ranks == 1 && outer_ranks == 1 { " rank" } else { " ranks" });
    if tp > 1 {
        message.text(" of ").number(tp as u64).text(" tensor-parallel parts");
    }
    describe(&mut message, &plan, optimizer_states, unit.1);
    message.text(": more than the budget of ").text(budget).fail()
}

const fn describe(message: &mut Message, plan: &MemoryPlan, optimizer_states: usize, unit: u64) {
    let parts = [
        ("model weights ", plan.model_weights),
        ("main weights ", plan.main_weights),
        ("main gradients ", plan.main_grads),
        ("optimizer state ", plan.optimizer_state.saturating_mul(optimizer_states as u64)),
        ("gather pool ", plan.gather_pool),
        ("reduce pool ", plan.reduce_pool),
    ];
    let mut before = " (";
    let mut i = 0;
    while i < parts.len() {
        let (what, bytes) = parts[i];
        if bytes > 0 {
            message.text(before).text(what);
            tenths(message, (bytes.saturating_mul(20) / unit).div_ceil(2));
            before = ", ";
        }
        i += 1;
    }
    message.text(")");
}

/// The number `tenths / 10`, with one decimal.
const fn tenths(message: &mut Message, tenths: u64) {
    message.number(tenths / 10).text(".").number(tenths % 10);
}

/// Units of a budget, and their bytes.
const UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
];

/// The largest binary unit of which there is at least one.
const fn unit_for(bytes: u64) -> (&'static str, u64) {
    let mut unit = UNITS[0];
    let mut i = 5;
    while i < UNITS.len() && (UNITS[i].1 <= bytes && UNITS[i].1 <= 1 << 30) {
        unit = UNITS[i];
        i += 1;
    }
    unit
}

/// Bytes of a budget.
#[track_caller]
pub(super) const fn parse_budget(budget: &str) -> u64 {
    let text = budget.as_bytes();
    if text.is_empty() {
        panic!("a budget is missing: write `budget = \"80 GiB\"`");
    }
    let mut at = 0;
    let mut digits: u128 = 0;
    // 1 for each digit before the point, then 10 to the number of those after it.
    let mut scale: u128 = 1;
    let mut seen = (false, false);
    while at < text.len() && (text[at].is_ascii_digit() || text[at] == b'.') {
        match text[at] {
            b'.' if seen.0 && !seen.1 => seen.1 = true,
            b'.' => not_a_budget(budget),
            digit => {
                digits = digits * 10 + (digit - b'0') as u128;
                scale *= if seen.1 { 10 } else { 1 };
                seen.0 = true;
            }
        }
        if at > 20 {
            not_a_budget(budget);
        }
        at += 1;
    }
    if !seen.0 || text[at - 1] == b'.' {
        not_a_budget(budget);
    }
    if at < text.len() && text[at] == b' ' {
        at += 1;
    }
    let unit = text.split_at(at).1;
    let mut i = 0;
    while i < UNITS.len() {
        if is_same(unit, UNITS[i].0.as_bytes()) {
            let bytes = digits * UNITS[i].1 as u128 / scale;
            if bytes > u64::MAX as u128 {
                not_a_budget(budget);
            }
            return bytes as u64;
        }
        i += 1;
    }
    not_a_budget(budget)
}

#[track_caller]
const fn not_a_budget(budget: &str) -> ! {
    let mut message = Message::new();
    message.text("`").text(budget).text("` is no budget: expected a number and one of ");
    let mut i = 0;
    while i < UNITS.len() {
        message.text(UNITS[i].0).text(if i + 1 < UNITS.len() { ", " } else { "" });
        i += 1;
    }
    message.text(", such as `80 GiB`").fail()
}

const fn is_same(left: &[u8], right: &[u8]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let mut i = 0;
    while i < left.len() {
        if left[i] != right[i] {
            return false;
        }
        i += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_read_exactly() {
        const GPU: u64 = parse_budget("80 GiB");
        assert_eq!(GPU, 80 << 30);
        for (budget, bytes) in [
            ("0B", 0),
            ("1 B", 1),
            ("1.5 KB", 1_500),
            ("2MB", 2_000_000),
            ("141 GB", 141_000_000_000),
            ("1.25TB", 1_250_000_000_000),
            ("0.5 KiB", 512),
            ("1.5 MiB", 3 << 19),
            ("0.125 TiB", 1 << 37),
            ("0.3 B", 0),
        ] {
            assert_eq!(parse_budget(budget), bytes, "{budget}");
        }
    }

    #[test]
    fn what_is_no_budget_is_refused() {
        for budget in [
            "", "80", "GiB", "80 gib", "80  GiB", " 80 GiB", "80 GiB ", "-1 B", "1. GiB", ".5 GiB",
            "1.2.3 B", "1e3 B",
        ] {
            assert!(std::panic::catch_unwind(|| parse_budget(budget)).is_err(), "{budget}");
        }
        let long = "9".repeat(40) + " B";
        let long: &'static str = long.leak();
        assert!(std::panic::catch_unwind(|| parse_budget(long)).is_err());
    }

    #[test]
    fn the_unit_suits_the_size() {
        assert_eq!(unit_for(1023).0, "B");
        assert_eq!(unit_for(1024).0, "KiB");
        assert_eq!(unit_for((1 << 30) - 1).0, "MiB");
        assert_eq!(unit_for(1 << 45).0, "GiB");
    }
}
