//! Placement under [`ShardAlignment::Row`](super::ShardAlignment::Row): no shard boundary inside a row of any
//! item.
//!
//! The idea is that of Megatron-FSDP's `chunk_size_factor` (shards of a multiple of the rows' least common
//! multiple), with two differences. The condition is stated on what matters, the boundaries: an item that
//! meets none may start anywhere, one that meets a single boundary need only be in step with it, and only
//! rows of items longer than a shard must divide the shard. So every item keeps its rows whole, small ones
//! included, and the multiple that pads is taken over fewer rows. And where rows have no small common
//! multiple, a group becomes several buckets instead of one that is mostly padding.

use std::cmp::Reverse;

use super::bucket::Item;

/// A bucket's items, in order of start, and its padded size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) items: Vec<Item>,
    pub(super) size: usize,
}

/// A further bucket costs a collective; it must save this share of the group's elements.
pub(super) const SPLIT_SAVES: usize = 16;

/// How often a shard length that was too short is lengthened before the next common multiple is tried.
pub(super) const TRIES: usize = 64;

/// Most elements of a bucket. Main weights, gradients and optimizer state are 4 bytes an element whatever the
/// weights are.
pub(super) const MAX_ELEMENTS: usize = isize::MAX as usize / 4;

/// Places `items` (their `start` is not read) in one bucket, or several if that saves much padding.
///
/// `align` is the number of elements in 64 bytes: shards are multiples of it where that costs nothing. `None`
/// if a bucket would be too large: every rank's shard holds a whole row at least.
pub(super) fn place(items: &[Item], ranks: usize, align: usize) -> Option<Vec<Placement>> {
    let numel: usize = items.iter().map(|item| item.len).sum();
    let worth = (numel / SPLIT_SAVES).max(ranks * align);
    let Some(whole) = place_in_one(items, ranks, align) else { return split(items, ranks, align, worth) };
    if whole.size - numel > worth
        && let Some(parts) = split(items, ranks, align, worth)
        && cost(&parts, worth) < whole.size + worth
    {
        return Some(parts);
    }
    Some(vec![whole])
}

fn cost(parts: &[Placement], worth: usize) -> usize {
    parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.size).saturating_add(worth))
}

/// Starts with one bucket for each row length, which always works, and joins the two that gain most until
/// none gain.
fn split(items: &[Item], ranks: usize, align: usize, worth: usize) -> Option<Vec<Placement>> {
    let mut rows: Vec<usize> = items.iter().map(|item| item.row).collect();
    rows.sort_unstable_by_key(|&row| Reverse(row));
    rows.dedup();
    let mut parts: Vec<Placement> = rows
        .iter()
        .map(|&row| {
            let same: Vec<Item> = items.iter().filter(|item| item.row == row).copied().collect();
            place_in_one(&same, ranks, align)
        })
        .collect::<Option<_>>()?;
    loop {
        let mut best: Option<(usize, usize, usize, Placement)> = None;
        for a in 0..parts.len() {
            for b in a + 1..parts.len() {
                let both: Vec<Item> = parts[a].items.iter().chain(&parts[b].items).copied().collect();
                let Some(joined) = place_in_one(&both, ranks, align) else { continue };
                let gain = (parts[a].size + parts[b].size + worth).saturating_sub(joined.size);
                if gain > best.as_ref().map_or(0, |best| best.2) {
                    best = Some((a, b, gain, joined));
                }
            }
        }
        let Some((a, b, _, joined)) = best else { return Some(parts) };
        parts[a] = joined;
        parts.remove(b);
    }
}

/// The smallest bucket found; `None` if it would be too large.
fn place_in_one(items: &[Item], ranks: usize, align: usize) -> Option<Placement> {
    let numel: usize = items.iter().map(|item| item.len).sum();
    if numel == 0 {
        return Some(Placement {
            items: items.iter().map(|&item| Item { start: 0, ..item }).collect(),
            size: 0,
        });
    }
    // The longer an item, the more boundaries it meets: its row must divide the shard first.
    let mut by_len = items.to_vec();
    by_len.sort_by_key(|item| Reverse((item.len, item.row)));
    let mut by_row = items.to_vec();
    by_row.sort_by_key(|item| Reverse((item.row, item.len)));
    let orders = [by_row, by_len];

    let mut best: Option<Placement> = None;
    let mut factor = 1usize;
    let mut longest = orders[1].iter();
    loop {
        for multiple in [Some(factor), lcm(factor, align)].into_iter().flatten() {
            let limit = best.as_ref().map_or(usize::MAX, |best| best.size);
            if let Some(found) = shortest(&orders, numel, ranks, multiple, limit) {
                best = Some(found);
            }
        }
        let Some(wider) = longest.by_ref().find(|item| !factor.is_multiple_of(item.row)) else { break };
        let Some(wider) = lcm(factor, wider.row) else { break };
        factor = wider;
    }
    best
}

/// The shortest shard that is a multiple of `multiple` and takes the items, in a bucket no larger than
/// `limit`.
fn shortest(
    orders: &[Vec<Item>],
    numel: usize,
    ranks: usize,
    multiple: usize,
    limit: usize,
) -> Option<Placement> {
    // A shard shorter than a row would cut it.
    let longest_row = orders[0].iter().map(|item| item.row).max()?;
    let mut shard = numel.div_ceil(ranks).max(longest_row).checked_next_multiple_of(multiple)?;
    for _ in 0..TRIES {
        let size = shard.checked_mul(ranks).filter(|&size| size <= limit.min(MAX_ELEMENTS))?;
        let mut shortest_end: Option<usize> = None;
        for (order, pick) in
            orders.iter().flat_map(|order| [(order, Pick::SmallestGap), (order, Pick::First)])
        {
            let Some((items, end)) = pack(order, shard, pick) else { continue };
            if end <= size {
                return Some(Placement { items, size });
            }
            shortest_end = Some(shortest_end.map_or(end, |known| known.min(end)));
        }
        // No order fits: a row that does not divide this multiple meets two boundaries. A wider multiple will
        // have it.
        let overshoot = shortest_end? - size;
        // Less may do than what this packing overshot: go an eighth of the way, by one multiple at least.
        let target = size + overshoot / 8;
        shard = target.div_ceil(ranks).max(shard + 1).checked_next_multiple_of(multiple)?;
    }
    None
}

/// Which item goes to the end next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pick {
    /// The one that leaves the smallest gap there, the first in order of those.
    SmallestGap,
    /// The first in order: small ones stay for the gaps.
    First,
}

/// Items to the end one after another; what fits the gap that one leaves goes into it at once. Returns the
/// items by start, and the end.
fn pack(order: &[Item], shard: usize, pick: Pick) -> Option<(Vec<Item>, usize)> {
    let mut left = order.to_vec();
    let mut placed = Vec::with_capacity(order.len());
    let mut end = 0;
    while !left.is_empty() {
        let mut nearest: Option<(usize, usize)> = None;
        for (index, &item) in left.iter().enumerate() {
            let start = whole_rows_start(end, item, shard)?;
            if nearest.is_none_or(|(_, known)| start < known) {
                nearest = Some((index, start));
            }
            if start == end || pick == Pick::First {
                break;
            }
        }
        let (index, start) = nearest?;
        let item = left.remove(index);
        placed.push(Item { start, ..item });
        let mut gap = end..start;
        left.retain(|&item| {
            let fits = whole_rows_start(gap.start, item, shard).filter(|start| start + item.len <= gap.end);
            if let Some(start) = fits {
                placed.push(Item { start, ..item });
                gap.start = start + item.len;
            }
            fits.is_none()
        });
        end = start.checked_add(item.len)?;
    }
    placed.sort_by_key(|item| (item.start, item.len));
    Some((placed, end))
}

/// The least start at or after `from` at which no multiple of `shard` cuts a row of `item`; `None` if there
/// is none.
fn whole_rows_start(from: usize, item: Item, shard: usize) -> Option<usize> {
    let mut start = from;
    // Starts that differ by a shard are alike: when the second whole shard holds none, no shard does.
    for _ in 0..6 {
        let boundary = (start / shard).checked_add(1)?.checked_mul(shard)?;
        let end = start.checked_add(item.len)?;
        if end <= boundary {
            return Some(start);
        }
        let ahead = (boundary - start) % item.row;
        if ahead != 0 {
            start += ahead;
        } else if shard.is_multiple_of(item.row) || end <= boundary + shard {
            return Some(start);
        } else {
            start = boundary;
        }
    }
    None
}

pub(super) const fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(param: usize, rows: usize, row: usize) -> Item {
        Item { param, start: 0, len: rows * row, row }
    }

    #[test]
    fn start_is_in_step_with_the_boundary() {
        assert_eq!(whole_rows_start(0, item(0, 2, 5), 10), Some(0));
        assert_eq!(whole_rows_start(3, item(0, 2, 5), 10), Some(5)); // one boundary, at 10
        assert_eq!(whole_rows_start(7, item(0, 2, 3), 10), Some(7)); // 10 - 7 is a row
        assert_eq!(whole_rows_start(8, item(0, 2, 3), 10), Some(10));
        assert_eq!(whole_rows_start(0, item(0, 5, 3), 10), Some(1)); // 1..16 meets 10 after three rows
        assert_eq!(whole_rows_start(0, item(0, 9, 3), 10), None); // meets two boundaries, 3 does not divide 10
        assert_eq!(whole_rows_start(0, item(0, 9, 5), 10), Some(0));
    }

    #[test]
    fn equal_rows_pad_less_than_a_row_for_each_rank() {
        let placements = place(&[item(0, 5, 7), item(1, 4, 7), item(2, 1, 7)], 3, 16).unwrap();
        assert_eq!(placements.len(), 1);
        assert_eq!(placements[0].size, 3 * 28);
    }

    #[test]
    fn rows_without_a_small_multiple_become_two_buckets() {
        let placements = place(&[item(0, 4096, 1021), item(1, 4096, 1019)], 64, 16).unwrap();
        assert_eq!(placements.iter().map(|p| p.size).collect::<Vec<_>>(), [4096 * 1021, 4096 * 1019]);
    }

    #[test]
    fn rows_whose_multiple_overflows_become_several_buckets() {
        let row = (1usize << 31) - 1;
        let placements =
            place(&[item(0, 64, row), item(1, 64, row - 1), item(2, 64, row - 2)], 64, 16).unwrap();
        assert_eq!(placements.len(), 3);
        assert_eq!(placements.iter().map(|p| p.size).sum::<usize>(), 64 * (3 * row - 3));
    }

    #[test]
    fn a_row_too_long_for_every_rank_to_hold_one_is_refused() {
        assert_eq!(place(&[item(0, 1, 1 << 58), item(1, 4, 3)], 64, 16), None);
        assert!(place(&[item(0, 1, 1 << 54), item(1, 4, 3)], 64, 16).is_some());
    }

    #[test]
    fn small_items_fill_the_gaps() {
        // Rows 6 and 4 over shards of 12: a gap of 2 between 0..18 and 20..36 takes the two scalars.
        let placements = place(&[item(0, 3, 6), item(1, 4, 4), item(2, 1, 1), item(3, 1, 1)], 3, 16).unwrap();
        assert_eq!(placements.len(), 1);
        assert_eq!(placements[0].size, 36);
    }
}
