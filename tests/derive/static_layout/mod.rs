//! The compile-time layout of a type is the run-time layout of its models.

mod drawn;
mod small;
mod transformers;

use fsdp::layout::{
    MemoryPlan, ModelLayout, StaticBucket, StaticLayout, StaticOptions, StaticUnit, UnitLayout,
};
use fsdp::mesh::Topology;
use fsdp::prelude::*;

const RANKS: [usize; 7] = [1, 2, 3, 4, 7, 8, 64];

/// A model that can be made.
trait Model: FsdpUnit {
    fn new() -> Self;
}

/// Every figure of the type is that of the model, over the ranks, strategies and precisions.
fn assert_figures_agree<M: Model>(tp: &[usize]) {
    let model = M::new();
    let half = MixedPrecision {
        reduce: Dtype::BF16,
        main_grads: Dtype::BF16,
        main_weights: false,
        ..MixedPrecision::F16
    };
    for &tp in tp {
        for ranks in RANKS {
            for precision in [MixedPrecision::F32, MixedPrecision::BF16, half] {
                let mesh = Topology::new(&[("dp_shard", ranks), ("tp", tp)], ranks * tp).unwrap();
                let config = FsdpConfig { precision, ..Default::default() };
                let built = model.layout(&mesh, &config).unwrap();
                let options = StaticOptions { ranks, tp, precision, ..StaticOptions::DEFAULT };
                let fixed = StaticLayout::of(&M::TREE, &options);
                assert_alignment_and_outer_ranks_agree(&model, tp, &options);
                let context =
                    format!("{}, {ranks} ranks, tp {tp}, {precision:?}", std::any::type_name::<M>());
                assert_layouts_agree(&fixed, &built, &context);
                for strategy in Strategy::ALL {
                    let plan = MemoryPlan::new(&built, strategy, &precision);
                    assert_eq!(fixed.memory(strategy), plan, "{context}, {strategy}");
                    let pools = plan.gather_pool + plan.reduce_pool;
                    assert_eq!(
                        fixed.bytes_per_rank(strategy, 2),
                        plan.persistent(2) + pools,
                        "{context}, {strategy}"
                    );
                }
            }
        }
    }
}

/// Type and model agree where outer ranks share the optimizer state; where rows are kept whole the type knows a bound.
fn assert_alignment_and_outer_ranks_agree<M: FsdpUnit>(model: &M, tp: usize, options: &StaticOptions) {
    let StaticOptions { ranks, precision, .. } = *options;
    for (outer, alignment) in
        [(2, ShardAlignment::Element), (1, ShardAlignment::Row), (3, ShardAlignment::Row)]
    {
        let dims = [("dp_outer", outer), ("dp_shard", ranks), ("tp", tp)];
        let mesh = Topology::new(&dims, outer * ranks * tp).unwrap();
        let config = FsdpConfig { precision, alignment, outer: OuterStrategy::Optim, ..Default::default() };
        let built = model.layout(&mesh, &config).unwrap();
        let fixed = StaticLayout::of(&M::TREE, &StaticOptions { outer, alignment, ..*options });
        for strategy in [Strategy::Optim, Strategy::OptimGradsParams] {
            let plan = MemoryPlan::new(&built, strategy, &precision);
            let known = fixed.memory(strategy);
            let context = format!("{}, {ranks} x {outer}, {strategy}", std::any::type_name::<M>());
            if alignment == ShardAlignment::Element {
                assert_eq!(known, plan, "{context}");
            } else {
                assert!(plan.total(2) <= known.total(2), "{plan:?} {known:?} {context}");
                assert!(plan.gather_pool <= known.gather_pool, "{plan:?} {known:?} {context}");
                assert!(plan.optimizer_state <= known.optimizer_state, "{plan:?} {known:?} {context}");
            }
        }
    }
}

fn assert_layouts_agree(fixed: &StaticLayout, built: &ModelLayout, context: &str) {
    assert_eq!(fixed.numel(), built.numel(), "{context}");
    assert_eq!(fixed.params(), built.params.len(), "{context}");
    assert_eq!(fixed.units(), built.units.len(), "{context}");
    assert_eq!(fixed.buckets(), built.buckets.len(), "{context}");
    let padding: usize = built.buckets.iter().map(|bucket| bucket.padding()).sum();
    assert_eq!(fixed.padding(), padding, "{context}");

    let bytes =
        |unit: &UnitLayout| unit.buckets.iter().map(|&bucket| built.buckets[bucket].bytes()).sum::<usize>();
    let largest = built.units.iter().map(bytes).max().unwrap();
    assert_eq!(fixed.largest_unit().bytes(), largest as u64, "{context}");

    assert_eq!(of_unit(fixed.root()), of_built(built, &built.units[0]), "{context}");
    let kinds = (0..fixed.kinds()).map(|kind| fixed.kind(kind));
    let mut ours: Vec<_> = kinds.flat_map(|kind| vec![of_unit(kind); kind.count]).collect();
    let mut theirs: Vec<_> = built.units[1..].iter().map(|unit| of_built(built, unit)).collect();
    ours.sort();
    theirs.sort();
    assert_eq!(ours, theirs, "{context}");
}

/// Key, parameters, elements, size, padding and shard of a bucket.
type Figures = (Dtype, bool, bool, [usize; 5]);

fn of_unit(unit: StaticUnit<'_>) -> Vec<Figures> {
    let figures = |bucket: &StaticBucket| {
        let StaticBucket { dtype, expert, requires_grad, params, numel, size, .. } = *bucket;
        (dtype, expert, requires_grad, [params, numel, size, bucket.padding(), bucket.shard_len()])
    };
    unit.buckets.iter().map(figures).collect()
}

fn of_built(built: &ModelLayout, unit: &UnitLayout) -> Vec<Figures> {
    let figures = |&bucket: &usize| {
        let bucket = &built.buckets[bucket];
        let figures = [bucket.items.len(), bucket.numel(), bucket.size, bucket.padding(), bucket.shard_len()];
        (bucket.key.dtype, bucket.key.expert, bucket.key.requires_grad, figures)
    };
    unit.buckets.iter().map(figures).collect()
}
