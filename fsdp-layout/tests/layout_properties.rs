//! Every element of every parameter has exactly one owner, whatever the shapes, the ranks and the alignment.

use fsdp_layout::layout::{LayoutOptions, ModelLayout, ShardAlignment, UnitSpec};
use fsdp_layout::spec::{Dtype, GroupKey, ParamSpec};
use proptest::prelude::*;

/// Scalars, vectors, matrices and stacks of matrices; some empty, many with rows that have no small common
/// multiple.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        1 => Just(vec![]),
        3 => (0usize..200).prop_map(|n| vec![n]),
        6 => (0usize..40, 0usize..40).prop_map(|(a, b)| vec![a, b]),
        2 => (1usize..6, 1usize..6, 1usize..6).prop_map(|(a, b, c)| vec![a, b, c]),
        2 => (1usize..20, prop::sample::select(vec![16usize, 32, 48, 64, 172])).prop_map(|(a, b)| vec![a, b]),
    ]
}

fn key() -> impl Strategy<Value = GroupKey> {
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::BF16]);
    (dtype, prop::bool::weighted(0.1), prop::bool::weighted(0.8), 0usize..3)
        .prop_map(|(dtype, expert, requires_grad, unit)| GroupKey { dtype, expert, requires_grad, unit })
}

fn params() -> impl Strategy<Value = Vec<ParamSpec>> {
    prop::collection::vec((shape(), key(), prop::bool::weighted(0.1)), 0..24).prop_map(|specs| {
        let spec = |(i, (shape, key, shared)): (usize, (Vec<usize>, GroupKey, bool))| ParamSpec {
            name: format!("p{i}"),
            shape,
            key,
            no_decay: false,
            tp: None,
            tp_parts: 1,
            shared,
            aliases: Vec::new(),
            fused: Vec::new(),
        };
        specs.into_iter().enumerate().map(spec).collect()
    })
}

fn options() -> impl Strategy<Value = LayoutOptions> {
    let alignment = prop::sample::select(vec![ShardAlignment::Element, ShardAlignment::Row]);
    (1usize..=64, alignment, prop::option::of(1usize..2000))
        .prop_map(|(ranks, alignment, bucket_size)| LayoutOptions { ranks, outer: 1, alignment, bucket_size })
}

fn units() -> Vec<UnitSpec> {
    ["", "layers.0", "layers.1"].map(UnitSpec::new).to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_element_has_one_owner(params in params(), options in options()) {
        let layout = ModelLayout::build(params, &units(), &options).unwrap();
        let mut seen = vec![0; layout.params.len()];
        for bucket in &layout.buckets {
            prop_assert_eq!(bucket.size % options.ranks, 0);
            let mut end = 0;
            for (index, item) in bucket.items.iter().enumerate() {
                seen[item.param] += 1;
                prop_assert_eq!(&layout.params[item.param].key, &bucket.key);
                prop_assert_eq!(item.len, layout.params[item.param].numel());
                prop_assert!(item.start >= end, "items {} and {} overlap", index.wrapping_sub(1), index);
                end = item.start + item.len;
                let mut next = 0;
                for rank in 0..options.ranks {
                    let part = bucket.item_in_shard(index, rank);
                    prop_assert_eq!(part.in_item.len(), part.in_shard.len());
                    prop_assert!(part.in_shard.end <= bucket.shard_len());
                    if part.is_empty() {
                        continue;
                    }
                    prop_assert_eq!(part.in_item.start, next);
                    let in_bucket = bucket.shard_range(rank).start + part.in_shard.start;
                    prop_assert_eq!(in_bucket, item.start + part.in_item.start);
                    next = part.in_item.end;
                }
                prop_assert_eq!(next, item.len);
            }
            prop_assert!(end <= bucket.size);
            prop_assert_eq!(bucket.pads().map(|pad| pad.len()).sum::<usize>(), bucket.padding());
        }
        prop_assert!(seen.iter().all(|&n| n == 1));
        for param in 0..layout.params.len() {
            let (bucket, item) = layout.place_of(param);
            prop_assert_eq!(layout.buckets[bucket].items[item].param, param);
        }
        for (unit, spec) in layout.units.iter().enumerate() {
            prop_assert!(spec.buckets.iter().all(|&bucket| layout.buckets[bucket].key.unit == unit));
        }
        prop_assert_eq!(layout.units.iter().map(|u| u.buckets.len()).sum::<usize>(), layout.buckets.len());
    }

    #[test]
    fn shard_then_gather_is_the_identity(params in params(), options in options()) {
        let layout = ModelLayout::build(params, &units(), &options).unwrap();
        let value = |param: usize, element: usize| (param * 100_003 + element) as u32;
        for bucket in &layout.buckets {
            let mut gathered = Vec::new();
            for rank in 0..options.ranks {
                let mut shard = vec![u32::MAX; bucket.shard_len()];
                for (index, item) in bucket.items.iter().enumerate() {
                    let part = bucket.item_in_shard(index, rank);
                    for (slot, element) in shard[part.in_shard].iter_mut().zip(part.in_item) {
                        *slot = value(item.param, element);
                    }
                }
                gathered.extend(shard);
            }
            prop_assert_eq!(gathered.len(), bucket.size);
            for item in &bucket.items {
                for (element, &got) in gathered[item.range()].iter().enumerate() {
                    prop_assert_eq!(got, value(item.param, element));
                }
            }
            for pad in bucket.pads() {
                prop_assert!(gathered[pad].iter().all(|&got| got == u32::MAX));
            }
        }
    }

    #[test]
    fn element_alignment_pads_under_64_bytes_for_each_parameter_and_rank(
        params in params(),
        options in options(),
    ) {
        let options = LayoutOptions { alignment: ShardAlignment::Element, ..options };
        let layout = ModelLayout::build(params, &units(), &options).unwrap();
        for bucket in &layout.buckets {
            let bytes = bucket.key.dtype.size();
            prop_assert!(bucket.padding() * bytes < 64 * (bucket.items.len() + options.ranks));
            prop_assert_eq!(bucket.shard_len() * bytes % 64, 0);
            for item in bucket.items.iter().filter(|item| item.len > 0) {
                prop_assert_eq!(item.start * bytes % 64, 0);
            }
        }
    }

    #[test]
    fn row_alignment_cuts_no_row(params in params(), options in options()) {
        let options = LayoutOptions { alignment: ShardAlignment::Row, ..options };
        let layout = ModelLayout::build(params, &units(), &options).unwrap();
        for bucket in &layout.buckets {
            for (index, item) in bucket.items.iter().enumerate() {
                for rank in 0..options.ranks {
                    let part = bucket.item_in_shard(index, rank);
                    prop_assert_eq!(part.in_item.start % item.row, 0);
                    prop_assert_eq!(part.len() % item.row, 0);
                }
            }
        }
    }
}
