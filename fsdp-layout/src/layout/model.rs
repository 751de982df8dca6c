//! From parameters to buckets: grouping, and the index of the whole model.

use std::collections::{HashMap, HashSet};

use super::bucket::{BucketLayout, Item, element_alignment, element_start};
use super::{LayoutError, ShardAlignment, row};
use crate::spec::{Dtype, GroupKey, ParamSpec};

/// A communication unit: its parameters are gathered and reduced together. Unit 0 is the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitSpec {
    /// Path of the module; empty for the root.
    pub path: String,
    /// The unit that this one is inside of, which comes before it; `None` for the root and what is directly in it.
    pub enclosing: Option<usize>,
}

impl UnitSpec {
    /// A unit that is inside of none but the root.
    pub fn new(path: impl Into<String>) -> UnitSpec {
        UnitSpec { path: path.into(), enclosing: None }
    }
}

/// A unit and its buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitLayout {
    /// Path of the module; empty for the root.
    pub path: String,
    /// The unit that this one is inside of; `None` for the root and what is directly in it.
    pub enclosing: Option<usize>,
    /// Indices into [`ModelLayout::buckets`], ascending; may be empty.
    pub buckets: Vec<usize>,
}

impl UnitLayout {
    fn empty(unit: &UnitSpec) -> UnitLayout {
        UnitLayout { path: unit.path.clone(), enclosing: unit.enclosing, buckets: Vec::new() }
    }
}

/// How to lay a model out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutOptions {
    /// Ranks that share the shards.
    pub ranks: usize,
    /// Outer ranks that share the optimizer state of a shard; 1 if they do not.
    pub outer: usize,
    /// Where shard boundaries may fall.
    pub alignment: ShardAlignment,
    /// A bucket of the root takes no more parameters once it has this many elements; `None` for one bucket a
    /// group. The buckets of other units are not limited.
    pub bucket_size: Option<usize>,
}

/// The layout of a model over the ranks of one mesh dimension.
#[derive(Clone, Debug)]
pub struct ModelLayout {
    /// The parameters, in declaration order.
    pub params: Vec<ParamSpec>,
    /// The units; index 0 is the root.
    pub units: Vec<UnitLayout>,
    /// All flat buffers, groups in order of their first parameter.
    pub buckets: Vec<BucketLayout>,
    places: Vec<(usize, usize)>,
}

impl ModelLayout {
    /// Lays `params` out in buckets.
    ///
    /// Parameters of one [`GroupKey`] share a bucket, with three exceptions: a group of the root is closed at
    /// `bucket_size`, a shared (tied) parameter has a bucket of its own, and [`ShardAlignment::Row`] may cut
    /// a group into several where that saves padding. Under [`ShardAlignment::Element`] items are in
    /// declaration order; under `Row` in the order that packs best.
    ///
    /// The result depends on the arguments only: every rank computes the same one.
    ///
    /// # Errors
    /// If there are no ranks or units, a key names an unknown unit, two parameters have one name, or a bucket
    /// would exceed 2^63 bytes.
    pub fn build(
        params: Vec<ParamSpec>,
        units: &[UnitSpec],
        options: &LayoutOptions,
    ) -> Result<ModelLayout, LayoutError> {
        check(&params, units, options)?;
        let mut layout = ModelLayout {
            places: vec![(0, 0); params.len()],
            units: units.iter().map(UnitLayout::empty).collect(),
            buckets: Vec::new(),
            params,
        };
        for members in members_of_buckets(&layout.params, options.bucket_size) {
            let key = layout.params[members[0]].key;
            for (items, size) in place(&layout.params, key.dtype, &members, options)? {
                let bucket = layout.buckets.len();
                for (item, place) in items.iter().enumerate() {
                    layout.places[place.param] = (bucket, item);
                }
                layout.units[key.unit].buckets.push(bucket);
                layout.buckets.push(BucketLayout {
                    key,
                    ranks: options.ranks,
                    outer: options.outer,
                    alignment: options.alignment,
                    items,
                    size,
                });
            }
        }
        Ok(layout)
    }

    /// The bucket and the item in it that hold a parameter.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn place_of(&self, param: usize) -> (usize, usize) {
        self.places[param]
    }

    /// The item that holds a parameter.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn item_of(&self, param: usize) -> Item {
        let (bucket, item) = self.places[param];
        self.buckets[bucket].items[item]
    }

    /// One line a parameter with all that ranks must agree on, so that two ranks can name the first that
    /// differs.
    pub fn fingerprint(&self) -> Vec<String> {
        self.params
            .iter()
            .enumerate()
            .map(|(index, param)| {
                let (bucket, item) = self.places[index];
                let GroupKey { dtype, expert, requires_grad, unit } = param.key;
                format!(
                    "`{}` {:?} {dtype}, unit `{}`, {}{}{}, bucket {bucket} of {} x {}, start {}",
                    param.name,
                    param.shape,
                    if unit == 0 { "(root)" } else { &self.units[unit].path },
                    if requires_grad { "trainable" } else { "frozen" },
                    if expert { ", expert" } else { "" },
                    if param.shared { ", shared" } else { "" },
                    self.buckets[bucket].ranks,
                    self.buckets[bucket].shard_len(),
                    self.buckets[bucket].items[item].start,
                )
            })
            .collect()
    }

    /// Dtype and size in elements of a unit's buckets: units of one class can take turns in the same pool
    /// buffers.
    ///
    /// # Panics
    /// If there is no such unit.
    pub fn shape_class(&self, unit: usize) -> Vec<(Dtype, usize)> {
        self.units[unit]
            .buckets
            .iter()
            .map(|&bucket| (self.buckets[bucket].key.dtype, self.buckets[bucket].size))
            .collect()
    }

    /// Elements of all parameters.
    pub fn numel(&self) -> usize {
        self.buckets.iter().map(BucketLayout::numel).sum()
    }
}

fn check(params: &[ParamSpec], units: &[UnitSpec], options: &LayoutOptions) -> Result<(), LayoutError> {
    if options.ranks == 0 || options.outer == 0 {
        return Err(LayoutError::NoRanks);
    }
    if units.is_empty() {
        return Err(LayoutError::NoRoot);
    }
    let mut names = HashSet::with_capacity(params.len());
    for param in params {
        if param.key.unit >= units.len() {
            return Err(LayoutError::UnknownUnit {
                param: param.name.clone(),
                unit: param.key.unit,
                units: units.len(),
            });
        }
        if !names.insert(param.name.as_str()) {
            return Err(LayoutError::DuplicateName { param: param.name.clone() });
        }
    }
    Ok(())
}

/// Indices of the parameters of each bucket: groups in order of their first parameter, buckets of a group in
/// the order in which they were opened.
fn members_of_buckets(params: &[ParamSpec], bucket_size: Option<usize>) -> Vec<Vec<usize>> {
    struct Group {
        buckets: Vec<Vec<usize>>,
        /// The bucket that takes the next parameter, and its elements so far.
        open: Option<(usize, usize)>,
    }

    let mut group_of: HashMap<GroupKey, usize> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    for (index, param) in params.iter().enumerate() {
        let group = *group_of.entry(param.key).or_insert_with(|| {
            groups.push(Group { buckets: Vec::new(), open: None });
            groups.len() - 1
        });
        let Group { buckets, open } = &mut groups[group];
        if param.shared {
            buckets.push(vec![index]);
            continue;
        }
        let (bucket, before) = open.take().unwrap_or_else(|| {
            buckets.push(Vec::new());
            (buckets.len() - 1, 0)
        });
        buckets[bucket].push(index);
        let numel = before.saturating_add(param.shape.iter().fold(1, |n: usize, &dim| n.saturating_mul(dim)));
        let closed = param.key.unit == 0 && bucket_size.is_some_and(|limit| numel >= limit);
        *open = if closed { None } else { Some((bucket, numel)) };
    }
    groups.into_iter().flat_map(|group| group.buckets).collect()
}

/// Items and padded sizes of the bucket, or buckets, that `members` make.
fn place(
    params: &[ParamSpec],
    dtype: Dtype,
    members: &[usize],
    options: &LayoutOptions,
) -> Result<Vec<(Vec<Item>, usize)>, LayoutError> {
    let align = element_alignment(dtype);
    let parts = options.ranks.saturating_mul(options.outer);
    let mut items = Vec::with_capacity(members.len());
    let mut cursor = 0usize;
    for &index in members {
        let param = &params[index];
        // An empty parameter may have dims whose product overflows.
        let len = if param.shape.contains(&0) {
            0
        } else {
            param
                .shape
                .iter()
                .try_fold(1usize, |n, &dim| n.checked_mul(dim))
                .filter(|&len| len <= row::MAX_ELEMENTS)
                .ok_or_else(|| too_large(param))?
        };
        let row = if len == 0 { 1 } else { param.shape.iter().skip(1).product() };
        let start = element_start(cursor, len, align);
        items.push(Item { param: index, start, len, row });
        cursor = start + len;
        let room = align.checked_mul(parts).and_then(|multiple| cursor.checked_next_multiple_of(multiple));
        if room.is_none_or(|size| size > row::MAX_ELEMENTS) {
            return Err(too_large(param));
        }
    }
    match options.alignment {
        ShardAlignment::Element => Ok(vec![(items, cursor.next_multiple_of(align * parts))]),
        ShardAlignment::Row => {
            let placements = row::place(&items, parts, align).ok_or_else(|| {
                let longest = items.iter().max_by_key(|item| item.row).map_or(members[0], |item| item.param);
                too_large(&params[longest])
            })?;
            Ok(placements.into_iter().map(|placement| (placement.items, placement.size)).collect())
        }
    }
}

fn too_large(param: &ParamSpec) -> LayoutError {
    LayoutError::TooLarge { param: param.name.clone(), shape: param.shape.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: GroupKey = GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit: 0 };

    fn param(name: &str, shape: &[usize], key: GroupKey) -> ParamSpec {
        ParamSpec {
            name: name.into(),
            shape: shape.into(),
            key,
            no_decay: false,
            tp: None,
            tp_parts: 1,
            shared: false,
            aliases: Vec::new(),
            fused: Vec::new(),
        }
    }

    fn units(n: usize) -> Vec<UnitSpec> {
        (0..n).map(|u| UnitSpec::new(if u == 0 { String::new() } else { format!("layers.{u}") })).collect()
    }

    fn options(ranks: usize) -> LayoutOptions {
        LayoutOptions { ranks, outer: 1, alignment: ShardAlignment::Element, bucket_size: None }
    }

    fn names(layout: &ModelLayout) -> Vec<Vec<&str>> {
        let name = |item: &Item| layout.params[item.param].name.as_str();
        layout.buckets.iter().map(|bucket| bucket.items.iter().map(name).collect()).collect()
    }

    #[test]
    fn parameters_of_one_key_share_a_bucket() {
        let unit1 = GroupKey { unit: 1, ..KEY };
        let layout = ModelLayout::build(
            vec![
                param("embed", &[4, 4], KEY),
                param("layers.1.a", &[4, 4], unit1),
                param("layers.1.frozen", &[3], GroupKey { requires_grad: false, ..unit1 }),
                param("layers.1.half", &[3], GroupKey { dtype: Dtype::BF16, ..unit1 }),
                param("layers.1.b", &[4], unit1),
                param("layers.1.expert", &[4], GroupKey { expert: true, ..unit1 }),
                param("head", &[4, 4], KEY),
            ],
            &units(2),
            &options(2),
        )
        .unwrap();
        assert_eq!(
            names(&layout),
            [
                vec!["embed", "head"],
                vec!["layers.1.a", "layers.1.b"],
                vec!["layers.1.frozen"],
                vec!["layers.1.half"],
                vec!["layers.1.expert"]
            ]
        );
        assert_eq!(layout.units[0].buckets, [0]);
        assert_eq!(layout.units[1].buckets, [1, 2, 3, 4]);
        assert_eq!(layout.place_of(4), (1, 1));
        assert_eq!(
            layout.shape_class(1),
            [(Dtype::F32, 32), (Dtype::F32, 32), (Dtype::BF16, 64), (Dtype::F32, 32)]
        );
    }

    #[test]
    fn root_closes_a_bucket_at_bucket_size_and_units_do_not() {
        let unit1 = GroupKey { unit: 1, ..KEY };
        let params = vec![
            param("a", &[60], KEY),
            param("b", &[50], KEY),
            param("c", &[10], KEY),
            param("layers.1.a", &[200], unit1),
            param("layers.1.b", &[200], unit1),
        ];
        let options = LayoutOptions { bucket_size: Some(100), ..options(2) };
        let layout = ModelLayout::build(params, &units(2), &options).unwrap();
        assert_eq!(names(&layout), [vec!["a", "b"], vec!["c"], vec!["layers.1.a", "layers.1.b"]]);
    }

    #[test]
    fn a_shared_parameter_is_alone_in_its_bucket() {
        let shared = ParamSpec { shared: true, ..param("embed", &[4, 4], KEY) };
        let params = vec![param("first", &[4], KEY), shared, param("norm", &[4], KEY)];
        let layout = ModelLayout::build(params, &units(1), &options(2)).unwrap();
        assert_eq!(names(&layout), [vec!["first", "norm"], vec!["embed"]]);
    }

    #[test]
    fn scalars_empties_and_more_ranks_than_elements() {
        for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
            let params = vec![
                param("scalar", &[], KEY),
                param("empty", &[0, 5], KEY),
                param("no columns", &[5, 0], KEY),
                param("huge but empty", &[usize::MAX, usize::MAX, 0], KEY),
                param("one", &[1, 1], KEY),
            ];
            let options = LayoutOptions { alignment, ..options(64) };
            let layout = ModelLayout::build(params, &units(1), &options).unwrap();
            let lens: Vec<usize> = (0..5).map(|p| layout.item_of(p).len).collect();
            assert_eq!(lens, [1, 0, 0, 0, 1]);
            let owned: usize = (0..64)
                .map(|rank| (0..5).map(|i| layout.buckets[0].item_in_shard(i, rank).len()).sum::<usize>())
                .sum();
            assert_eq!(owned, 2);
        }
    }

    #[test]
    fn a_group_of_empties_has_a_bucket_of_size_0() {
        for alignment in [ShardAlignment::Element, ShardAlignment::Row] {
            let options = LayoutOptions { alignment, ..options(3) };
            let layout = ModelLayout::build(vec![param("empty", &[0, 5], KEY)], &units(1), &options).unwrap();
            assert_eq!(layout.buckets[0].size, 0);
            assert_eq!(layout.buckets[0].pads().count(), 0);
            assert!(layout.buckets[0].item_in_shard(0, 2).is_empty());
        }
    }

    #[test]
    fn sizes_above_2_to_the_31_are_exact() {
        let half = GroupKey { dtype: Dtype::BF16, ..KEY };
        let build = |alignment| {
            let params = vec![param("w", &[2_147_483_650], half)];
            ModelLayout::build(params, &units(1), &LayoutOptions { alignment, ..options(4) }).unwrap()
        };
        let element = build(ShardAlignment::Element);
        assert_eq!(element.buckets[0].size, 2_147_483_776); // the next multiple of 4 x 32
        assert_eq!(element.buckets[0].shard_len(), 536_870_944);
        assert_eq!(element.buckets[0].padding(), 126);
        let row = build(ShardAlignment::Row);
        assert_eq!(row.buckets[0].size, 2_147_483_652);
        assert_eq!(row.buckets[0].shard_len(), 536_870_913);
        assert_eq!(row.buckets[0].padding(), 2);
    }

    #[test]
    fn rows_of_one_parameter_go_to_ranks_as_evenly_as_rows_can() {
        // (dim 0, ranks) and the rows each rank must hold.
        for (rows, ranks, expected) in [
            (7, 3, vec![3, 3, 1]),
            (5, 2, vec![3, 2]),
            (3, 8, vec![1, 1, 1, 0, 0, 0, 0, 0]),
            (10, 4, vec![3, 3, 3, 1]),
        ] {
            let options = LayoutOptions { alignment: ShardAlignment::Row, ..options(ranks) };
            let layout = ModelLayout::build(vec![param("w", &[rows, 6], KEY)], &units(1), &options).unwrap();
            let held: Vec<usize> =
                (0..ranks).map(|rank| layout.buckets[0].item_in_shard(0, rank).len() / 6).collect();
            assert_eq!(held, expected);
        }
    }

    #[test]
    fn one_rank_holds_everything() {
        let layout = ModelLayout::build(vec![param("p", &[1], KEY)], &units(1), &options(1)).unwrap();
        assert_eq!(layout.buckets[0].item_in_shard(0, 0).in_item, 0..1);
        assert_eq!(layout.buckets[0].shard_len(), 16);
    }

    #[test]
    fn fingerprints_differ_at_the_parameter_that_differs() {
        let build = |shape: &[usize]| {
            let params = vec![param("a", &[4], KEY), param("b", shape, KEY), param("c", &[4], KEY)];
            ModelLayout::build(params, &units(1), &options(2)).unwrap().fingerprint()
        };
        let (left, right) = (build(&[2, 3]), build(&[3, 2]));
        let differing: Vec<usize> = (0..3).filter(|&i| left[i] != right[i]).collect();
        assert_eq!(differing, [1]);
        assert_eq!(left[1], "`b` [2, 3] f32, unit `(root)`, trainable, bucket 0 of 2 x 32, start 16");
    }

    #[test]
    fn bad_input_is_an_error_that_names_the_parameter() {
        let build = |params, units: &[UnitSpec], ranks| {
            ModelLayout::build(params, units, &options(ranks)).unwrap_err().to_string()
        };
        assert_eq!(build(vec![], &units(1), 0), "a layout needs at least 1 rank, got 0");
        assert_eq!(build(vec![], &[], 1), "a layout needs the root unit at index 0, got no units");
        let stray = param("w", &[1], GroupKey { unit: 3, ..KEY });
        assert_eq!(build(vec![stray], &units(2), 1), "parameter `w` is in unit 3, but there are 2 units");
        let twice = vec![param("w", &[1], KEY), param("w", &[1], KEY)];
        assert_eq!(build(twice, &units(1), 1), "two parameters are named `w`");
        for shape in [vec![usize::MAX, 2], vec![1 << 62]] {
            let error = build(vec![param("w", &shape, KEY)], &units(1), 1);
            assert!(error.starts_with("parameter `w` of shape"), "{error}");
        }
    }
}
