//! The layout of a model whose shapes are constant, in constant expressions.

mod descent;
mod fits;
mod fold;
mod lookup;
mod message;
mod rows;
mod ties;

pub use fits::FitOptions;
pub use fits::require_fit;

use self::descent::{Inherited, Leaf, Path};
use super::memory::{BucketExtent, PooledUnits, Schedule, keeps_whole, needs_wire_buckets};
use super::{MemoryPlan, PoolLimit, ShardAlignment};
use crate::policy::{MixedPrecision, ReshardAfterForward, Strategy};
use crate::spec::{Dtype, Field, Tree};

/// Most kinds of units.
const MAX_UNIT_KINDS: usize = 64;

/// Most buckets of the root and one unit of each kind.
const MAX_BUCKETS: usize = 256;

/// What a [`StaticLayout`] depends on beside the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticOptions {
    /// Ranks that share the shards: the size of the mesh's `dp_shard` dim.
    pub ranks: usize,
    /// Outer ranks that share the optimizer state of a shard: the size of `dp_outer` with
    /// [`OuterStrategy::Optim`](crate::policy::OuterStrategy::Optim), else 1.
    pub outer: usize,
    /// Where shard boundaries may fall.
    pub alignment: ShardAlignment,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// Dtypes.
    pub precision: MixedPrecision,
}

impl StaticOptions {
    /// One rank, boundaries anywhere, no tensor parallelism, all FP32.
    pub const DEFAULT: StaticOptions = StaticOptions {
        ranks: 1,
        outer: 1,
        alignment: ShardAlignment::Element,
        tp: 1,
        precision: MixedPrecision::F32,
    };
}

impl Default for StaticOptions {
    fn default() -> Self {
        StaticOptions::DEFAULT
    }
}

/// The layout of a model, computed from its type alone: usable in constant expressions.
///
/// Its figures are those of the run-time [`ModelLayout`](super::ModelLayout) without a `bucket_size`, provided that the
/// model is what its type says. Under [`ShardAlignment::Row`] sizes and padding are upper bounds: the run-time layout
/// searches for the order that packs best, and may cut a group in several buckets. What the type does not tell: a parameter that was made
/// with a dtype of its own, cloned into two fields, or frozen by a call is not seen, and names are compared at run time only. Every parameter must
/// have a declared shape (`#[fsdp(shape = [OUT, IN])]`), and containers a constant length; anything else ends
/// the evaluation with a message that names the field.
///
/// Units that are laid out alike are one entry with a count. There is room for 64 such kinds of units, 256
/// buckets of unlike units and 64 ties.
///
/// ```
/// use fsdp_layout::layout::{StaticLayout, StaticOptions};
/// use fsdp_layout::policy::Strategy;
/// use fsdp_layout::spec::{Attrs, Field, Tree};
///
/// // What `#[derive(FsdpUnit)]` writes of a model: twelve units of 100 x 100, and a head in the root.
/// const fn weight(shape: &'static [usize]) -> Field {
///     Field { name: "weight", attrs: Attrs { shape: Some(shape), ..Attrs::NONE }, tree: &Tree::Param }
/// }
/// const LAYERS: Tree = Tree::Array(12, &Tree::Unit(&Tree::Fields(&[weight(&[100, 100])])));
/// const NET: Tree = Tree::Fields(&[
///     Field { name: "layers", attrs: Attrs::NONE, tree: &LAYERS },
///     Field { name: "head", attrs: Attrs::NONE, tree: &Tree::Fields(&[weight(&[10, 100])]) },
/// ]);
///
/// const OPTIONS: StaticOptions = StaticOptions { ranks: 8, ..StaticOptions::DEFAULT };
/// const LAYOUT: StaticLayout = StaticLayout::of(&NET, &OPTIONS);
/// const _: () = assert!(LAYOUT.numel() == 12 * 10_000 + 1_000);
/// const _: () = assert!(LAYOUT.root().padding() == 24); // to 8 shards of a multiple of 64 bytes
/// const _: () = assert!(LAYOUT.bytes_per_rank(Strategy::OptimGradsParams, 2) < 512 << 10);
/// ```
#[derive(Clone, Debug)]
pub struct StaticLayout {
    options: StaticOptions,
    root: Kind,
    kinds: [Kind; MAX_UNIT_KINDS],
    kinds_len: usize,
    buckets: [StaticBucket; MAX_BUCKETS],
    buckets_len: usize,
    /// Most bytes of weights, and of gradients that travel, of units around one unit.
    enclosing_gathered: u64,
    enclosing_unreduced: u64,
}

/// So many units whose buckets are `len` entries of the table from `start` on.
#[derive(Clone, Copy, Debug)]
struct Kind {
    count: usize,
    start: usize,
    len: usize,
}

/// A flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticBucket {
    /// Element type of the model weights.
    pub dtype: Dtype,
    /// Its parameters belong to an expert.
    pub expert: bool,
    /// Its parameters are trainable.
    pub requires_grad: bool,
    /// Number of parameters.
    pub params: usize,
    /// Elements that belong to a parameter.
    pub numel: usize,
    /// Elements of the buffer, padding included.
    pub size: usize,
    ranks: usize,
    outer: usize,
}

impl StaticBucket {
    const NONE: StaticBucket = StaticBucket {
        dtype: Dtype::F32,
        expert: false,
        requires_grad: false,
        params: 0,
        numel: 0,
        size: 0,
        ranks: 1,
        outer: 1,
    };

    /// Elements that belong to no parameter.
    pub const fn padding(&self) -> usize {
        self.size - self.numel
    }

    /// Elements of one shard.
    pub const fn shard_len(&self) -> usize {
        self.size / self.ranks
    }

    /// Bytes of the whole buffer in the dtype of the model weights.
    pub const fn bytes(&self) -> u64 {
        self.extent().whole_bytes()
    }

    const fn extent(&self) -> BucketExtent {
        BucketExtent {
            dtype: self.dtype,
            requires_grad: self.requires_grad,
            size: self.size,
            shard_len: self.shard_len(),
            outer: self.outer,
        }
    }

    const fn is_same_group(&self, other: &StaticBucket) -> bool {
        self.dtype as u8 == other.dtype as u8
            && self.expert == other.expert
            && self.requires_grad == other.requires_grad
    }
}

/// Units that are laid out alike, or the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaticUnit<'a> {
    /// How many units are like this.
    pub count: usize,
    /// The buckets of each, in the order of their first parameters.
    pub buckets: &'a [StaticBucket],
}

/// The sum over a slice of a figure of each entry.
macro_rules! sum {
    ($entries:expr, $entry:ident => $figure:expr) => {{
        let entries = $entries;
        let mut sum = 0;
        let mut i = 0;
        while i < entries.len() {
            let $entry = &entries[i];
            sum += $figure;
            i += 1;
        }
        sum
    }};
}

impl StaticUnit<'_> {
    /// Elements of the parameters of one such unit.
    pub const fn numel(&self) -> usize {
        sum!(self.buckets, bucket => bucket.numel)
    }

    /// Parameters of one such unit.
    pub const fn params(&self) -> usize {
        sum!(self.buckets, bucket => bucket.params)
    }

    /// Elements of one such unit that belong to no parameter.
    pub const fn padding(&self) -> usize {
        sum!(self.buckets, bucket => bucket.padding())
    }

    /// Bytes of the whole weights of one such unit, padding included: what is gathered for it.
    pub const fn bytes(&self) -> u64 {
        sum!(self.buckets, bucket => bucket.bytes())
    }

    const fn is_alike(&self, buckets: &[StaticBucket]) -> bool {
        if self.buckets.len() != buckets.len() {
            return false;
        }
        let mut i = 0;
        while i < buckets.len() {
            let (left, right) = (&self.buckets[i], &buckets[i]);
            let same = left.is_same_group(right)
                && left.params == right.params
                && left.numel == right.numel
                && left.size == right.size;
            if !same {
                return false;
            }
            i += 1;
        }
        true
    }

    /// Bytes, per unit, of the buckets that count in a pool.
    const fn pooled_bytes(&self, pool: Pool) -> u64 {
        sum!(self.buckets, bucket => pool.bytes(bucket))
    }

    /// Takes turns with `other` in the same buffers of a pool.
    const fn is_same_class(&self, other: &StaticUnit<'_>, pool: Pool) -> bool {
        let (mut i, mut j) = (0, 0);
        loop {
            while i < self.buckets.len() && !pool.counts(&self.buckets[i]) {
                i += 1;
            }
            while j < other.buckets.len() && !pool.counts(&other.buckets[j]) {
                j += 1;
            }
            if i == self.buckets.len() || j == other.buckets.len() {
                return i == self.buckets.len() && j == other.buckets.len();
            }
            let (left, right) = (&self.buckets[i], &other.buckets[j]);
            if left.dtype as u8 != right.dtype as u8 || left.size != right.size {
                return false;
            }
            i += 1;
            j += 1;
        }
    }
}

/// A pool of whole buffers.
#[derive(Clone, Copy)]
enum Pool {
    Gather,
    /// In this dtype.
    Reduce(Dtype),
}

impl Pool {
    const fn counts(self, bucket: &StaticBucket) -> bool {
        match self {
            Pool::Gather => true,
            Pool::Reduce(_) => bucket.requires_grad,
        }
    }

    const fn bytes(self, bucket: &StaticBucket) -> u64 {
        match self {
            Pool::Gather => bucket.extent().gathered_bytes(),
            Pool::Reduce(wire) => bucket.extent().unreduced_bytes(wire),
        }
    }
}

impl StaticLayout {
    /// The layout of the models whose type tells `tree`.
    ///
    /// # Panics
    /// If the type does not tell all about the parameters, a tie cannot be resolved, a parameter cannot be
    /// shared evenly by the tensor-parallel ranks, there are no ranks, or the model is larger than the tables
    /// have room for. In a constant expression that is a compile-time error.
    #[track_caller]
    pub const fn of(tree: &Tree, options: &StaticOptions) -> StaticLayout {
        fold::lay_out(tree, options)
    }

    const fn empty(options: StaticOptions) -> StaticLayout {
        let none = Kind { count: 0, start: 0, len: 0 };
        StaticLayout {
            options,
            root: none,
            kinds: [none; MAX_UNIT_KINDS],
            kinds_len: 0,
            buckets: [StaticBucket::NONE; MAX_BUCKETS],
            buckets_len: 0,
            enclosing_gathered: 0,
            enclosing_unreduced: 0,
        }
    }

    const fn new_bucket(&self, leaf: &Leaf) -> StaticBucket {
        StaticBucket {
            dtype: match leaf.dtype {
                Some(dtype) => dtype,
                None => self.options.precision.param,
            },
            expert: leaf.expert,
            requires_grad: leaf.requires_grad,
            ranks: self.options.ranks,
            outer: self.options.outer,
            ..StaticBucket::NONE
        }
    }

    const fn unit(&self, kind: Kind) -> StaticUnit<'_> {
        StaticUnit { count: kind.count, buckets: self.buckets.split_at(kind.start).1.split_at(kind.len).0 }
    }

    /// What it was computed for.
    pub const fn options(&self) -> &StaticOptions {
        &self.options
    }

    /// The root: the parameters that are in no unit, each group in one bucket, and those that are tied to
    /// from elsewhere, each in its own.
    pub const fn root(&self) -> StaticUnit<'_> {
        self.unit(self.root)
    }

    /// Number of kinds of units, the root left out.
    pub const fn kinds(&self) -> usize {
        self.kinds_len
    }

    /// The units of one kind, in the order in which the first of each kind ends.
    ///
    /// # Panics
    /// If there is no such kind.
    #[track_caller]
    pub const fn kind(&self, kind: usize) -> StaticUnit<'_> {
        if kind >= self.kinds_len {
            panic!("there is no such kind of units");
        }
        self.unit(self.kinds[kind])
    }

    /// Number of units, the root included.
    pub const fn units(&self) -> usize {
        1 + sum!(self.kinds.split_at(self.kinds_len).0, kind => kind.count)
    }

    /// Number of buckets.
    pub const fn buckets(&self) -> usize {
        self.root.len + sum!(self.kinds.split_at(self.kinds_len).0, kind => kind.count * kind.len)
    }

    /// Number of parameters, tied ones once.
    pub const fn params(&self) -> usize {
        let units = self.kinds.split_at(self.kinds_len).0;
        self.root().params() + sum!(units, kind => kind.count * self.unit(*kind).params())
    }

    /// Elements of all parameters, tied ones once: of the part that a tensor-parallel rank holds.
    pub const fn numel(&self) -> usize {
        let units = self.kinds.split_at(self.kinds_len).0;
        self.root().numel() + sum!(units, kind => kind.count * self.unit(*kind).numel())
    }

    /// Elements that belong to no parameter, over all buckets.
    pub const fn padding(&self) -> usize {
        let units = self.kinds.split_at(self.kinds_len).0;
        self.root().padding() + sum!(units, kind => kind.count * self.unit(*kind).padding())
    }

    /// The unit, or the root, whose whole weights are most bytes: what a rank must be able to gather.
    pub const fn largest_unit(&self) -> StaticUnit<'_> {
        let mut largest = self.root();
        let mut kind = 0;
        while kind < self.kinds_len {
            if self.kind(kind).bytes() > largest.bytes() {
                largest = self.kind(kind);
            }
            kind += 1;
        }
        largest
    }

    /// What a rank will hold under `strategy`, with the [default](Schedule::DEFAULT) schedule.
    pub const fn memory(&self, strategy: Strategy) -> MemoryPlan {
        self.memory_with(strategy, &Schedule::DEFAULT)
    }

    /// Bytes a rank holds under `strategy` and `schedule`, by category.
    pub const fn memory_with(&self, strategy: Strategy, schedule: &Schedule) -> MemoryPlan {
        let precision = &self.options.precision;
        let mut plan = MemoryPlan::NONE;
        plan.add_unit(self.root(), strategy, precision);
        let mut kind = 0;
        while kind < self.kinds_len {
            plan.add_unit(self.kind(kind), strategy, precision);
            kind += 1;
        }
        if strategy.shards_params() {
            let limit = schedule.gather_limit(self.widest());
            let alone = keeps_whole(schedule.reshard);
            plan.gather_pool = self.pool_bound(Pool::Gather, alone, limit, schedule.registered);
            plan.gather_pool = plan.gather_pool.saturating_add(self.kept_bytes(schedule.reshard));
        }
        if needs_wire_buckets(strategy, precision) {
            let limit = schedule.reduce_limit(precision.reduce);
            let alone = schedule.no_sync && strategy.shards_grads();
            let pool = Pool::Reduce(precision.reduce);
            plan.reduce_pool = self.pool_bound(pool, alone, limit, schedule.registered);
        }
        plan
    }

    /// Bytes that a rank needs under `strategy`, pools included, with an optimizer of `state_buffers` f32
    /// buffers (AdamW: 2). Activations are not counted.
    pub const fn bytes_per_rank(&self, strategy: Strategy, state_buffers: usize) -> u64 {
        self.memory(strategy).total(state_buffers)
    }

    /// Bytes of an element of the widest dtype.
    const fn widest(&self) -> usize {
        let mut widest = 0;
        let mut i = 0;
        while i < self.buckets_len {
            if self.buckets[i].dtype.size() > widest {
                widest = self.buckets[i].dtype.size();
            }
            i += 1;
        }
        widest
    }

    /// Bytes of what all units but the root keep of their whole weights between forward and backward.
    const fn kept_bytes(&self, reshard: ReshardAfterForward) -> u64 {
        let units = self.kinds.split_at(self.kinds_len).0;
        sum!(units, kind => kind.count as u64 * sum!(
            self.unit(*kind).buckets, bucket => bucket.extent().kept_bytes(reshard)
        ))
    }

    /// The bound of a pool, outside of which are the root and, if they are `alone`, all units.
    const fn pool_bound(&self, pool: Pool, alone: bool, limit: PoolLimit, registered: bool) -> u64 {
        let mut own = self.root().pooled_bytes(pool);
        let mut classes = [(0, 0); MAX_UNIT_KINDS];
        let mut kind = 0;
        while kind < self.kinds_len {
            let unit = self.kind(kind);
            let mut class = 0;
            while class < kind && !unit.is_same_class(&self.kind(class), pool) {
                class += 1;
            }
            let count = unit.count as u64;
            if alone {
                own = own.saturating_add(unit.pooled_bytes(pool).saturating_mul(count));
            } else {
                classes[class] = (unit.pooled_bytes(pool), classes[class].1 + count);
            }
            kind += 1;
        }
        let enclosing = match pool {
            _ if alone => 0,
            Pool::Gather => self.enclosing_gathered,
            Pool::Reduce(_) => self.enclosing_unreduced,
        };
        PooledUnits { alone: own, enclosing, classes: &mut classes }.bound(limit, registered)
    }
}

impl MemoryPlan {
    const fn add_unit(&mut self, unit: StaticUnit<'_>, strategy: Strategy, precision: &MixedPrecision) {
        let mut i = 0;
        while i < unit.buckets.len() {
            self.add(&unit.buckets[i].extent(), strategy, precision, unit.count as u64);
            i += 1;
        }
    }
}

/// Checks the declared shapes in `tree` against the number of tensor-parallel ranks. What has no declared shape, and what
/// is in containers of any length or in enums, is left to run time; so are a module's own fields, which
/// [`check_tp_field`] checks.
///
/// # Panics
/// At the first parameter that `ranks` ranks cannot share evenly, naming it.
#[track_caller]
pub const fn check_tp_size(tree: &Tree, ranks: usize) {
    if ranks == 0 {
        panic!("`tp_size` is the number of tensor-parallel ranks: at least 1, got 0");
    }
    descent::check_tp_size(tree, &Path::ROOT, &Inherited::NONE, ranks);
}

/// Checks a field that has a declared shape and a placement of its own, in whatever container its parameters are.
///
/// # Panics
/// If `ranks` tensor-parallel ranks cannot share it evenly.
#[track_caller]
pub const fn check_tp_field(field: &Field, ranks: usize) {
    if let Some(leaf) = Inherited::NONE.field(field).leaf()
        && ranks > 0
    {
        leaf.check_tp(ranks, &Path::ROOT.field(field.name));
    }
}

#[track_caller]
const fn full(room: usize, what: &str) -> ! {
    let mut message = message::Message::new();
    message.text("the compile-time layout has room for ").number(room as u64).text(" ").text(what);
    message.text(", and the model has more").fail()
}
