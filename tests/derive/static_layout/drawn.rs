//! The compile-time fold does what the walk over a model does, errors included, for models drawn at random.

use fsdp::engine::{UnitCell, Walker};
use fsdp::layout::{
    MemoryPlan, ModelLayout, Schedule, ShardAlignment, StaticBucket, StaticLayout, StaticOptions, StaticUnit,
    UnitLayout,
};
use fsdp::mesh::Topology;
use fsdp::prelude::*;
use fsdp::spec::{Attrs, Field, TpPlacement, Tree};

/// A model made to a tree.
enum Node {
    Param(Param),
    Fields(&'static [Field], Vec<Node>),
    Unit(UnitCell, Box<Node>),
    List(Vec<Node>),
}

impl Node {
    fn new(tree: &Tree, shape: &'static [usize]) -> Node {
        match *tree {
            Tree::Param => Node::Param(Param::new(shape)),
            Tree::Fields(fields) => {
                let content = |field: &Field| Node::new(field.tree, field.attrs.shape.unwrap_or(&[]));
                Node::Fields(fields, fields.iter().map(content).collect())
            }
            Tree::Unit(content) => Node::Unit(UnitCell::default(), Box::new(Node::new(content, shape))),
            Tree::Array(len, element) => Node::List((0..len).map(|_| Node::new(element, shape)).collect()),
            Tree::Tuple(elements) => Node::List(elements.iter().map(|tree| Node::new(tree, shape)).collect()),
            Tree::Unknown(why) => unreachable!("{why}"),
        }
    }
}

impl FsdpUnit for Node {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        match self {
            Node::Param(param) => walker.param(param),
            Node::Fields(fields, content) => {
                for (field, node) in fields.iter().zip(content) {
                    walker.field(field, |walker| node.walk(walker));
                }
            }
            Node::Unit(cell, content) => walker.unit(cell, |walker| content.walk(walker)),
            Node::List(elements) => {
                for (index, node) in elements.iter().enumerate() {
                    walker.element(&index, |walker| node.walk(walker));
                }
            }
        }
    }
}

/// Draws trees.
struct Draw {
    state: u64,
    /// One in so many fields is tied; 0 for none.
    ties: u64,
    /// What it may be tied to.
    targets: Vec<&'static str>,
}

const DEPTH: usize = 4;

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.state >> 33) % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        bound > 0 && self.below(bound) == 0
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }

    fn model(&mut self) -> &'static Tree {
        let fields = ["a", "b", "m.c", "d"].map(|name| self.field(name, DEPTH));
        Box::leak(Box::new(Tree::Fields(fields.to_vec().leak())))
    }

    fn tree(&mut self, depth: usize) -> &'static Tree {
        let tree = match if depth == 0 { 0 } else { self.below(8) } {
            0 => Tree::Param,
            1 | 2 => Tree::Unit(self.tree(depth - 1)),
            3 | 4 => Tree::Array(self.of(&[0, 1, 2, 2, 3, 3, 4]), self.tree(depth - 1)),
            5 => Tree::Tuple((0..self.below(4)).map(|_| self.tree(depth - 1)).collect::<Vec<_>>().leak()),
            _ => {
                let names = ["a", "b", "m.c", "d"];
                let fields = names[..self.below(5) as usize].iter().map(|name| self.field(name, depth - 1));
                Tree::Fields(fields.collect::<Vec<_>>().leak())
            }
        };
        Box::leak(Box::new(tree))
    }

    fn field(&mut self, name: &'static str, depth: usize) -> Field {
        let mut attrs = Attrs::NONE;
        let shapes: [&[usize]; 6] = [&[], &[2, 4], &[40, 2], &[40], &[0, 6], &[7]];
        let rarely = if self.ties > 0 { 12 } else { 3 };
        attrs.shape = Some(if self.one_in(rarely) { self.of(&shapes) } else { shapes[1] });
        attrs.frozen = self.one_in(rarely).then(|| self.one_in(2));
        attrs.expert = self.one_in(rarely).then(|| self.one_in(2));
        attrs.dtype = self.one_in(rarely).then(|| self.of(&[Dtype::F32, Dtype::BF16, Dtype::F16]));
        attrs.tp = self.one_in(rarely).then(|| {
            self.of(&[TpPlacement::Column, TpPlacement::Row, TpPlacement::Replicate, TpPlacement::Dim(0)])
        });
        let tied = self.one_in(self.ties);
        if tied {
            let target = self.below(1 << 20) as usize;
            if !self.targets.is_empty() {
                attrs.tie_with = Some(self.targets[target % self.targets.len()]);
            }
        }
        // A tied field without a name of its own must not be the root's: see `Walker::param`.
        let name = if (1..DEPTH).contains(&depth) && self.one_in(30) { "" } else { name };
        // Modules are rarely alike enough to be tied.
        let depth = if tied && !self.one_in(6) { 0 } else { depth };
        Field { name, attrs, tree: self.tree(depth) }
    }
}

type Figures = Vec<(Dtype, bool, bool, usize, usize, usize, usize)>;

fn of_unit(unit: StaticUnit<'_>) -> Figures {
    let figures = unit.buckets.iter().map(|bucket| {
        let StaticBucket { dtype, expert, requires_grad, params, numel, size, .. } = *bucket;
        (dtype, expert, requires_grad, params, numel, size, bucket.shard_len())
    });
    figures.collect()
}

const SCHEDULES: [Schedule; 4] = [
    Schedule::DEFAULT,
    Schedule { prefetch: 3, reshard: ReshardAfterForward::Never, no_sync: true, ..Schedule::DEFAULT },
    Schedule { prefetch: 2, registered: true, ..Schedule::DEFAULT },
    Schedule { gather_budget: Some(40), reduce_budget: Some(90), ..Schedule::DEFAULT },
];

/// With rows kept whole, the fold says no less than there is.
fn assert_bounds(fixed: &StaticLayout, built: &ModelLayout, precision: &MixedPrecision, context: &str) {
    assert_eq!((fixed.numel(), fixed.params()), (built.numel(), built.params.len()), "{context}");
    for strategy in Strategy::ALL {
        let schedule = Schedule::DEFAULT;
        let plan = MemoryPlan::scheduled(built, strategy, precision, &schedule, |_| None);
        let bound = fixed.memory_with(strategy, &schedule);
        let pairs = [
            (plan.model_weights, bound.model_weights),
            (plan.main_weights, bound.main_weights),
            (plan.main_grads, bound.main_grads),
            (plan.optimizer_state, bound.optimizer_state),
            (plan.gather_pool, bound.gather_pool),
            (plan.reduce_pool, bound.reduce_pool),
        ];
        assert!(pairs.iter().all(|(plan, bound)| plan <= bound), "{strategy} {plan:?} {bound:?} {context}");
    }
}

fn assert_same(fixed: &StaticLayout, built: &ModelLayout, precision: &MixedPrecision, context: &str) {
    let of_built = |unit: &UnitLayout| -> Figures {
        let buckets = unit.buckets.iter().map(|&bucket| &built.buckets[bucket]);
        let figures = buckets.map(|bucket| {
            let key = bucket.key;
            let (params, numel) = (bucket.items.len(), bucket.numel());
            (key.dtype, key.expert, key.requires_grad, params, numel, bucket.size, bucket.shard_len())
        });
        figures.collect()
    };
    assert_eq!(of_unit(fixed.root()), of_built(&built.units[0]), "{context}");
    let kinds = (0..fixed.kinds()).map(|kind| fixed.kind(kind));
    let mut ours: Vec<_> = kinds.flat_map(|kind| vec![of_unit(kind); kind.count]).collect();
    let mut theirs: Vec<_> = built.units[1..].iter().map(of_built).collect();
    ours.sort();
    theirs.sort();
    assert_eq!(ours, theirs, "{context}");
    for strategy in Strategy::ALL {
        for schedule in SCHEDULES {
            let plan = MemoryPlan::scheduled(built, strategy, precision, &schedule, |_| None);
            assert_eq!(fixed.memory_with(strategy, &schedule), plan, "{schedule:?} {context}");
        }
    }
}

/// Compares models drawn at random: the number of those that both lay out, and that both refuse.
fn compare(cases: u64, ties: u64) -> (usize, usize) {
    let (mut laid_out, mut refused) = (0, 0);
    for seed in 0..cases {
        let mut draw = Draw { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), ties, targets: Vec::new() };
        let mut tree = draw.model();
        if ties > 0 {
            // The same again, tied to names that there are, from the root and from further inside.
            let mesh = Topology::new(&[("dp_shard", 1)], 1).unwrap();
            let Ok(untied) = Node::new(tree, &[]).layout(&mesh, &FsdpConfig::default()) else { continue };
            let names = untied.params.iter().map(|spec| &*spec.name.clone().leak());
            let ends =
                names.flat_map(|name| name.match_indices('.').map(|(dot, _)| &name[dot + 1..]).chain([name]));
            let starts =
                ends.flat_map(|name| name.match_indices('.').map(|(dot, _)| &name[..dot]).chain([name]));
            draw = Draw { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), ties, targets: starts.collect() };
            tree = draw.model();
        }
        let (ranks, tp) = (draw.of(&[1, 2, 3, 7]), draw.of(&[1, 1, 2]));
        let precision = draw.of(&[MixedPrecision::F32, MixedPrecision::BF16]);
        let (outer, alignment) =
            (draw.of(&[1, 1, 2]), draw.of(&[ShardAlignment::Element, ShardAlignment::Row]));
        let mesh = [("dp_outer", outer), ("dp_shard", ranks), ("tp", tp)];
        let mesh = Topology::new(&mesh, outer * ranks * tp).unwrap();
        let config = FsdpConfig { precision, alignment, outer: OuterStrategy::Optim, ..Default::default() };
        let built = Node::new(tree, &[]).layout(&mesh, &config);
        if built.as_ref().is_err_and(|error| error.to_string().contains("two parameters have this name")) {
            continue;
        }
        let options = StaticOptions { ranks, outer, alignment, tp, precision };
        let fixed = std::panic::catch_unwind(|| StaticLayout::of(tree, &options));
        let context = format!("seed {seed}: {tree:#?}");
        match (built, fixed) {
            (Ok(built), Ok(fixed)) => {
                let compare = if alignment == ShardAlignment::Row { assert_bounds } else { assert_same };
                compare(&fixed, &built, &precision, &context);
                laid_out += 1;
            }
            (Err(_), Err(_)) => refused += 1,
            (Err(error), Ok(_)) => panic!("only the walk refuses: {error}\n{context}"),
            (Ok(_), Err(message)) => {
                let message = message.downcast_ref::<String>();
                if message.is_some_and(|message| message.contains("has room for")) {
                    continue;
                }
                panic!("only the fold refuses: {message:?}\n{context}")
            }
        }
    }
    (laid_out, refused)
}

#[test]
fn the_fold_is_the_walk_without_ties() {
    let (laid_out, refused) = compare(4000, 0);
    assert!(laid_out > 2000 && refused > 20, "{laid_out} {refused}");
}

#[test]
fn the_fold_is_the_walk_with_ties() {
    let (laid_out, refused) = compare(10000, 8);
    assert!(laid_out > 2000 && refused > 2000, "{laid_out} {refused}");
}
