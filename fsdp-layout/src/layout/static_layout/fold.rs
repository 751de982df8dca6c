//! From a model's [`Tree`] to its buckets, in constant expressions.
//!
//! Each distinct part is folded once: the elements of an array are alike unless a tie tells them apart, so
//! those that are units are counted, and those inside a unit are appended in one go.

use super::descent::{Inherited, Leaf, Path, count, require_known, too_large};
use super::message::Message;
use super::rows::Rows;
use super::ties::{Place, Ties};
use super::{MAX_BUCKETS, MAX_UNIT_KINDS, StaticBucket, StaticLayout, StaticOptions, full};
use crate::layout::ShardAlignment;
use crate::layout::bucket::{element_alignment, element_start};
use crate::layout::row::MAX_ELEMENTS;
use crate::spec::{Dtype, Tree};

/// dtype, expert and requires_grad have no more values than this.
const MAX_KEYS: usize = 12;

/// Most parameters that are tied to from another unit, or from the root.
const MAX_ALONE: usize = 64;

/// A bucket that takes further parameters.
#[derive(Clone, Copy)]
struct OpenBucket {
    bucket: StaticBucket,
    /// Where its last parameter ends, in elements, if they follow each other.
    end: usize,
    rows: Rows,
    /// When it was opened: groups are in the order of their first parameters.
    opened: usize,
}

/// A unit, or the root, that takes further parameters.
#[derive(Clone, Copy)]
struct OpenUnit {
    buckets: [OpenBucket; MAX_KEYS],
    len: usize,
}

impl OpenBucket {
    const NONE: OpenBucket = OpenBucket::new(StaticBucket::NONE, 0);

    const fn new(bucket: StaticBucket, opened: usize) -> OpenBucket {
        OpenBucket { bucket, end: 0, rows: Rows::NONE, opened }
    }

    /// Elements with the padding; `None` if they are too many.
    const fn size(&self, options: &StaticOptions) -> Option<usize> {
        let Some(ranks) = options.ranks.checked_mul(options.outer) else { return None };
        if let ShardAlignment::Row = options.alignment {
            return self.rows.most(self.bucket.numel, ranks, element_alignment(self.bucket.dtype));
        }
        let Some(multiple) = element_alignment(self.bucket.dtype).checked_mul(ranks) else { return None };
        match self.end.checked_next_multiple_of(multiple) {
            Some(size) if size <= MAX_ELEMENTS => Some(size),
            _ => None,
        }
    }
}

/// Most bytes of units that are around one unit, each inside the next.
#[derive(Clone, Copy)]
struct Around {
    gathered: u64,
    unreduced: u64,
    /// There is a unit.
    some: bool,
}

impl Around {
    const NONE: Around = Around { gathered: 0, unreduced: 0, some: false };

    /// Of the units here and there.
    const fn or(self, other: Around) -> Around {
        Around {
            gathered: if self.gathered > other.gathered { self.gathered } else { other.gathered },
            unreduced: if self.unreduced > other.unreduced { self.unreduced } else { other.unreduced },
            some: self.some || other.some,
        }
    }

    /// Of the units inside `unit`, and it.
    const fn inside(self, unit: &[StaticBucket], wire: Dtype) -> Around {
        let mut around = Around { some: true, ..self };
        let mut i = 0;
        while self.some && i < unit.len() {
            let extent = unit[i].extent();
            around.gathered = around.gathered.saturating_add(extent.gathered_bytes());
            around.unreduced = around.unreduced.saturating_add(extent.unreduced_bytes(wire));
            i += 1;
        }
        around
    }
}

impl OpenUnit {
    const NONE: OpenUnit = OpenUnit { buckets: [OpenBucket::NONE; MAX_KEYS], len: 0 };
}

pub(super) struct Fold {
    layout: StaticLayout,
    ties: Ties,
    /// Buckets of one parameter in the root.
    alone: [OpenBucket; MAX_ALONE],
    alone_len: usize,
    /// Ordinal of the next parameter.
    ordinal: usize,
    /// Buckets opened so far.
    opened: usize,
}

/// The layout of the model that `tree` tells of.
#[track_caller]
pub(super) const fn lay_out(tree: &Tree, options: &StaticOptions) -> StaticLayout {
    if options.ranks == 0 {
        panic!("a layout needs at least 1 rank, got 0");
    }
    if options.outer == 0 {
        panic!("a layout needs at least 1 outer rank, got 0");
    }
    if options.tp == 0 {
        panic!("a layout needs at least 1 tensor-parallel rank, got 0");
    }
    require_known(tree, &Path::ROOT, false);
    let mut fold = Fold {
        layout: StaticLayout::empty(*options),
        ties: Ties::of(tree, options.precision.param),
        alone: [OpenBucket::NONE; MAX_ALONE],
        alone_len: 0,
        ordinal: 0,
        opened: 0,
    };
    let mut root = OpenUnit::NONE;
    let around = fold.fold(tree, &Path::ROOT, &Inherited::NONE, &mut root, 1);
    fold.layout.enclosing_gathered = around.gathered;
    fold.layout.enclosing_unreduced = around.unreduced;
    fold.close_root(&root);
    fold.layout
}

impl Fold {
    /// Adds what is in `tree` to `unit`, and the units in it `times`. Returns what is around units in it.
    #[track_caller]
    const fn fold(
        &mut self,
        tree: &Tree,
        path: &Path<'_>,
        inherited: &Inherited,
        unit: &mut OpenUnit,
        times: usize,
    ) -> Around {
        let mut around = Around::NONE;
        match *tree {
            Tree::Param => {
                if let Some(leaf) = inherited.leaf() {
                    self.add(&leaf, path, unit);
                }
            }
            Tree::Fields(fields) => {
                let mut i = 0;
                while i < fields.len() {
                    let field = &fields[i];
                    let (path, inherited) = (path.field(field.name), inherited.field(field));
                    around = around.or(self.fold(field.tree, &path, &inherited, unit, times));
                    i += 1;
                }
            }
            Tree::Unit(content) => {
                let mut inside = OpenUnit::NONE;
                let in_it = self.fold(content, path, inherited, &mut inside, times);
                let wire = self.layout.options.precision.reduce;
                around = in_it.inside(self.close(&inside, times), wire);
            }
            Tree::Array(0, _) => {}
            Tree::Array(len, element) => {
                let (each, start) = (count(element), self.ordinal);
                if self.ties.elements_are_alike(start, each, len) {
                    let before = *unit;
                    around = self.fold(element, &path.element(0), inherited, unit, times * len);
                    self.repeat(&before, unit, len, path);
                    self.ordinal = start + len * each;
                    return around;
                }
                let mut i = 0;
                while i < len {
                    around = around.or(self.fold(element, &path.element(i), inherited, unit, times));
                    i += 1;
                }
            }
            Tree::Tuple(elements) => {
                let mut i = 0;
                while i < elements.len() {
                    around = around.or(self.fold(elements[i], &path.element(i), inherited, unit, times));
                    i += 1;
                }
            }
            Tree::Unknown(_) => {}
        }
        around
    }

    /// Adds one parameter.
    #[track_caller]
    const fn add(&mut self, leaf: &Leaf, path: &Path<'_>, unit: &mut OpenUnit) {
        let place = self.ties.place(self.ordinal);
        self.ordinal += 1;
        let bucket = match place {
            Place::Elsewhere => return,
            Place::Alone => {
                if self.alone_len == MAX_ALONE {
                    full(MAX_ALONE, "buckets of parameters that are tied to from elsewhere");
                }
                self.alone_len += 1;
                self.opened += 1;
                let bucket = &mut self.alone[self.alone_len - 1];
                *bucket = OpenBucket::new(self.layout.new_bucket(leaf), self.opened);
                bucket
            }
            Place::Group => {
                let new = self.layout.new_bucket(leaf);
                let mut i = 0;
                while i < unit.len && !unit.buckets[i].bucket.is_same_group(&new) {
                    i += 1;
                }
                if i == unit.len {
                    unit.len += 1;
                    self.opened += 1;
                    unit.buckets[i] = OpenBucket::new(new, self.opened);
                }
                &mut unit.buckets[i]
            }
        };
        let len = leaf.numel(self.layout.options.tp, path);
        let start = element_start(bucket.end, len, element_alignment(bucket.bucket.dtype));
        bucket.end = start + len;
        bucket.bucket.params += 1;
        bucket.bucket.numel += len;
        bucket.rows.add(len, leaf.row(self.layout.options.tp, len));
        if bucket.size(&self.layout.options).is_none() {
            too_large(leaf.shape, path);
        }
    }

    /// Makes what was added since `before` be there `len` times.
    #[track_caller]
    const fn repeat(&self, before: &OpenUnit, unit: &mut OpenUnit, len: usize, path: &Path<'_>) {
        let mut i = 0;
        while i < unit.len {
            let (before, after) = (&before.buckets[i], &mut unit.buckets[i]);
            let align = element_alignment(after.bucket.dtype);
            after.bucket.params = before.bucket.params + (after.bucket.params - before.bucket.params) * len;
            after.rows.repeat(&before.rows, len);
            let added = after.bucket.numel - before.bucket.numel;
            if added > 0 {
                // The first element begins at a multiple of the alignment, hence so do the others, and all have
                // the same gaps.
                let each = after.end - before.end.next_multiple_of(align);
                let further = (len - 1).checked_mul(each.next_multiple_of(align));
                let end = match further {
                    Some(further) => after.end.checked_add(further),
                    None => None,
                };
                after.end = match end {
                    Some(end) => end,
                    None => usize::MAX,
                };
                after.bucket.numel = before.bucket.numel.saturating_add(added.saturating_mul(len));
                if after.size(&self.layout.options).is_none() {
                    let mut message = Message::new();
                    message.text("the elements of `").path(path);
                    message.text("` make a bucket of more than 2^63 bytes").fail()
                }
            }
            i += 1;
        }
    }

    /// Ends a unit that is there `times`. Returns its buckets.
    #[track_caller]
    const fn close(&mut self, unit: &OpenUnit, times: usize) -> &[StaticBucket] {
        let start = self.layout.buckets_len;
        let mut i = 0;
        while i < unit.len {
            self.push(&unit.buckets[i]);
            i += 1;
        }
        let layout = &mut self.layout;
        let mut kind = 0;
        while kind < layout.kinds_len {
            if layout.kind(kind).is_alike(layout.buckets.split_at(start).1.split_at(unit.len).0) {
                layout.buckets_len = start;
                layout.kinds[kind].count += times;
                return self.layout.kind(kind).buckets;
            }
            kind += 1;
        }
        if layout.kinds_len == MAX_UNIT_KINDS {
            full(MAX_UNIT_KINDS, "kinds of units");
        }
        layout.kinds[kind] = super::Kind { count: times, start, len: unit.len };
        layout.kinds_len += 1;
        self.layout.kind(kind).buckets
    }

    /// Ends the root: groups in the order of their first parameters, buckets of a group in the order in which
    /// they were opened.
    #[track_caller]
    const fn close_root(&mut self, root: &OpenUnit) {
        let start = self.layout.buckets_len;
        let total = root.len + self.alone_len;
        let mut taken = [false; MAX_KEYS + MAX_ALONE];
        let mut done = 0;
        let mut group: Option<StaticBucket> = None;
        while done < total {
            // The earliest of the present group, else of all.
            let mut next: Option<usize> = None;
            let mut i = 0;
            while i < total {
                let bucket = self.of_root(root, i);
                let in_group = match &group {
                    Some(group) => bucket.bucket.is_same_group(group),
                    None => true,
                };
                let earlier = match next {
                    Some(next) => bucket.opened < self.of_root(root, next).opened,
                    None => true,
                };
                if !taken[i] && in_group && earlier {
                    next = Some(i);
                }
                i += 1;
            }
            let Some(next) = next else {
                group = None;
                continue;
            };
            let bucket = *self.of_root(root, next);
            taken[next] = true;
            done += 1;
            group = Some(bucket.bucket);
            self.push(&bucket);
        }
        self.layout.root = super::Kind { count: 1, start, len: total };
    }

    const fn of_root<'a>(&'a self, root: &'a OpenUnit, index: usize) -> &'a OpenBucket {
        if index < root.len { &root.buckets[index] } else { &self.alone[index - root.len] }
    }

    #[track_caller]
    const fn push(&mut self, bucket: &OpenBucket) {
        let size = match bucket.size(&self.layout.options) {
            Some(size) => size,
            None => panic!("each parameter was checked when it was added"),
        };
        if self.layout.buckets_len == MAX_BUCKETS {
            full(MAX_BUCKETS, "buckets of unlike units");
        }
        self.layout.buckets[self.layout.buckets_len] = StaticBucket { size, ..bucket.bucket };
        self.layout.buckets_len += 1;
    }
}
