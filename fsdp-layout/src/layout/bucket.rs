//! One flat buffer: its items, its shards, and the maps between them.

use std::ops::Range;

use super::{ITEM_ALIGNMENT_BYTES, ShardAlignment};
use crate::spec::{Dtype, GroupKey};

/// A parameter's place in its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index into [`ModelLayout::params`](super::ModelLayout::params).
    pub param: usize,
    /// First element in the bucket.
    pub start: usize,
    /// Number of elements; may be 0.
    pub len: usize,
    /// Elements of one row: the product of the dims after the first; 1 for fewer than two dims or an empty
    /// parameter.
    pub row: usize,
}

impl Item {
    /// The item's elements in the bucket.
    pub const fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// The part of an item that one rank's shard holds. Both ranges have the same length, which may be 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ItemShard {
    /// Elements of the flattened parameter.
    pub in_item: Range<usize>,
    /// Where they are in the shard.
    pub in_shard: Range<usize>,
}

impl ItemShard {
    /// The rank holds no element of the item.
    pub fn is_empty(&self) -> bool {
        self.in_item.is_empty()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.in_item.len()
    }
}

/// One flat buffer of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketLayout {
    /// What its parameters have in common.
    pub key: GroupKey,
    /// Number of shards.
    pub ranks: usize,
    /// Parts of each shard whose optimizer state is on different outer ranks; 1 if they do not share it.
    pub outer: usize,
    /// Where shard boundaries may fall.
    pub alignment: ShardAlignment,
    /// The parameters, in order of start; they do not overlap.
    pub items: Vec<Item>,
    /// Elements of the buffer, padding included: a multiple of `ranks * outer`.
    pub size: usize,
}

impl BucketLayout {
    /// The elements of each parameter, in order.
    pub fn parts(&self) -> Vec<Range<usize>> {
        self.items.iter().map(Item::range).collect()
    }

    /// Elements of one shard.
    pub const fn shard_len(&self) -> usize {
        self.size / self.ranks
    }

    /// The elements of the bucket that `rank` owns.
    pub const fn shard_range(&self, rank: usize) -> Range<usize> {
        let len = self.shard_len();
        rank * len..(rank + 1) * len
    }

    /// The part of the shard of `rank` that the outer rank `outer` updates.
    pub const fn outer_part(&self, rank: usize, outer: usize) -> Range<usize> {
        let len = self.shard_len() / self.outer;
        let start = rank * self.shard_len() + outer * len;
        start..start + len
    }

    /// The part of item `item` (an index into `items`) in the shard of `rank`.
    ///
    /// Over all ranks the `in_item` ranges tile the item: they are disjoint, ascending and complete.
    ///
    /// # Panics
    /// If there is no such item.
    pub fn item_in_shard(&self, item: usize, rank: usize) -> ItemShard {
        let item = self.items[item];
        let shard = self.shard_range(rank);
        let start = shard.start.clamp(item.start, item.start + item.len);
        let end = shard.end.clamp(item.start, item.start + item.len);
        if start == end {
            return ItemShard { in_item: 0..0, in_shard: 0..0 };
        }
        ItemShard {
            in_item: start - item.start..end - item.start,
            in_shard: start - shard.start..end - shard.start,
        }
    }

    /// Elements that belong to a parameter.
    pub fn numel(&self) -> usize {
        self.items.iter().map(|item| item.len).sum()
    }

    /// Elements that belong to none.
    pub fn padding(&self) -> usize {
        self.size - self.numel()
    }

    /// The ranges of the bucket that belong to no item, ascending, none of them empty.
    pub fn pads(&self) -> impl Iterator<Item = Range<usize>> {
        let ends = std::iter::once(0).chain(self.items.iter().map(|item| item.start + item.len));
        let starts = self.items.iter().map(|item| item.start).chain(std::iter::once(self.size));
        ends.zip(starts).filter(|(end, start)| end < start).map(|(end, start)| end..start)
    }

    /// Bytes of the whole buffer in the dtype of the model weights.
    pub const fn bytes(&self) -> usize {
        self.size * self.key.dtype.size()
    }
}

/// Elements of a bucket under [`ShardAlignment::Element`], from the element counts of its items in order.
///
/// The placement behind [`ModelLayout::build`](super::ModelLayout::build), for constant expressions. Every
/// item starts at the next multiple of 64 bytes and the total is padded to `ranks` × 64 bytes, so that
/// padding stays under 64 bytes × (items + ranks).
pub const fn element_bucket_size(numels: &[usize], dtype: Dtype, ranks: usize) -> usize {
    let align = element_alignment(dtype);
    let mut end = 0;
    let mut i = 0;
    while i < numels.len() {
        end = element_start(end, numels[i], align) + numels[i];
        i += 1;
    }
    end.next_multiple_of(align * ranks)
}

/// Elements in 64 bytes.
pub(super) const fn element_alignment(dtype: Dtype) -> usize {
    ITEM_ALIGNMENT_BYTES / dtype.size()
}

/// Where an item of `len` elements goes after `cursor`. An empty one needs no place, hence no padding.
pub(super) const fn element_start(cursor: usize, len: usize, align: usize) -> usize {
    if len == 0 { cursor } else { cursor.next_multiple_of(align) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(lens: &[usize], ranks: usize) -> BucketLayout {
        let key = GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit: 0 };
        let mut cursor = 0;
        let mut items = Vec::new();
        for (param, &len) in lens.iter().enumerate() {
            let start = element_start(cursor, len, 16);
            items.push(Item { param, start, len, row: 1 });
            cursor = start + len;
        }
        let size = element_bucket_size(lens, Dtype::F32, ranks);
        BucketLayout { key, ranks, outer: 1, alignment: ShardAlignment::Element, items, size }
    }

    #[test]
    fn bucket_size_is_a_constant_expression() {
        const SIZE: usize = element_bucket_size(&[20, 1, 7], Dtype::F32, 2);
        assert_eq!(SIZE, 64); // 0..20, 32..33, 48..55, padded to 2 x 16
        assert_eq!(element_bucket_size(&[], Dtype::BF16, 4), 0);
        assert_eq!(element_bucket_size(&[1], Dtype::BF16, 4), 128);
    }

    #[test]
    fn item_in_shard_is_the_intersection() {
        let bucket = bucket(&[20, 1, 0, 7], 2);
        assert_eq!(bucket.shard_len(), 32);
        assert_eq!(bucket.item_in_shard(0, 0), ItemShard { in_item: 0..20, in_shard: 0..20 });
        assert!(bucket.item_in_shard(0, 1).is_empty());
        assert!(bucket.item_in_shard(1, 0).is_empty());
        assert_eq!(bucket.item_in_shard(1, 1), ItemShard { in_item: 0..1, in_shard: 0..1 });
        assert!(bucket.item_in_shard(2, 0).is_empty() && bucket.item_in_shard(2, 1).is_empty());
        assert_eq!(bucket.item_in_shard(3, 1), ItemShard { in_item: 0..7, in_shard: 16..23 });
    }

    #[test]
    fn pads_and_items_tile_the_bucket() {
        let bucket = bucket(&[20, 1, 0, 16], 2);
        assert_eq!(bucket.pads().collect::<Vec<_>>(), [20..32, 33..48]);
        assert_eq!(bucket.padding(), 27);
    }
}
