//! One model for each thing that can be said of parameters, containers, units and ties.

use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fsdp::layout::{Schedule, StaticLayout, StaticOptions};
use fsdp::prelude::*;

use super::{Model, assert_figures_agree};

/// Structs with their models: each field has its type, attributes and value.
macro_rules! model {
    ($(#[$attr:meta])* struct $name:ident { $($(#[$said:meta])* $field:ident: $ty:ty = $value:expr,)* }) => {
        #[derive(FsdpUnit)]
        $(#[$attr])*
        struct $name { $($(#[$said])* $field: $ty,)* }

        impl Model for $name {
            fn new() -> Self {
                $name { $($field: $value,)* }
            }
        }
    };
}

fn param(shape: &[usize]) -> Param {
    Param::new(shape)
}

fn unit<M: Model>() -> Unit<M> {
    Unit::new(M::new())
}

fn array<T, const N: usize>(make: impl Fn() -> T) -> [T; N] {
    std::array::from_fn(|_| make())
}

model! {
    struct Linear {
        #[fsdp(shape = [6, 10])]
        weight: Param = param(&[6, 10]),
        #[fsdp(shape = [6])]
        bias: Param = param(&[6]),
    }
}

#[test]
fn plain_scalar_and_empty_parameters() {
    model! {
        struct Plain {
            #[fsdp(shape = [])]
            scale: Param = param(&[]),
            #[fsdp(shape = [5, 7])]
            weight: Param = param(&[5, 7]),
            #[fsdp(shape = [0, 9])]
            none: Param = param(&[0, 9]),
            linear: Linear = Linear::new(),
            #[fsdp(shape = [1])]
            last: Param = param(&[1]),
        }
    }
    assert_figures_agree::<Plain>(&[1]);
    model! { struct Nothing {} }
    assert_figures_agree::<Nothing>(&[1, 2]);
    model! {
        struct Empty {
            #[fsdp(shape = [0])]
            none: Unit<Param> = Unit::new(param(&[0])),
        }
    }
    assert_figures_agree::<Empty>(&[1]);
}

#[test]
fn fused_parameters() {
    model! {
        struct Fused {
            #[fsdp(fused("q", "k", "v"), shape = [12, 5], tp = column)]
            qkv: Param = param(&[12, 5]).with_fused_rows([8, 2, 2]),
            #[fsdp(fused("gate", "up"))]
            gate_up: Unit<Linear> = unit(),
        }
    }
    assert_figures_agree::<Fused>(&[1, 2]);
}

#[test]
fn units_in_units() {
    model! {
        struct Inner {
            linear: Linear = Linear::new(),
        }
    }
    model! {
        struct Middle {
            #[fsdp(shape = [3])]
            before: Param = param(&[3]),
            inner: [Unit<Inner>; 3] = array(unit),
            linear: Linear = Linear::new(),
        }
    }
    model! {
        struct Outer {
            first: Unit<Linear> = unit(),
            middle: [Unit<Middle>; 5] = array(unit),
            pairs: [(Unit<Linear>, Unit<Middle>); 2] = array(|| (unit(), unit())),
            twice: Unit<Unit<Linear>> = Unit::new(unit()),
            root: Linear = Linear::new(),
        }
    }
    assert_figures_agree::<Outer>(&[1, 2]);
    const LAYOUT: StaticLayout = StaticLayout::of(&Outer::TREE, &StaticOptions::DEFAULT);
    // Linear, Middle, and the unit that holds nothing but a unit.
    const _: () = assert!(LAYOUT.kinds() == 3);
    // 1 + 5 x 4 + 2 x 5 + 2, and the root.
    const _: () = assert!(LAYOUT.units() == 34);
}

#[test]
fn groups_by_dtype_expert_and_trainability() {
    model! {
        struct Mixed {
            plain: Linear = Linear::new(),
            #[fsdp(frozen)]
            frozen: Linear = Linear::new(),
            #[fsdp(dtype = "f32", shape = [33])]
            router: Param = param(&[33]),
            #[fsdp(expert)]
            experts: [Linear; 4] = array(Linear::new),
            #[fsdp(dtype = "bf16", expert, frozen)]
            odd: Linear = Linear::new(),
            #[fsdp(dtype = "f16")]
            again: Linear = Linear::new(),
        }
    }
    model! {
        struct Groups {
            root: Mixed = Mixed::new(),
            units: [Unit<Mixed>; 3] = array(unit),
            #[fsdp(frozen)]
            adapted: [Unit<Mixed>; 2] = array(unit),
            #[fsdp(frozen)]
            all_frozen: Unit<Linear> = unit(),
        }
    }
    assert_figures_agree::<Groups>(&[1, 2]);
}

#[test]
fn units_that_differ_only_in_what_is_frozen_share_the_gather_pool() {
    model! {
        struct Block {
            #[fsdp(shape = [64])]
            weight: Param = param(&[64]),
            #[fsdp(shape = [64], frozen)]
            frozen: Param = param(&[64]),
        }
    }
    model! {
        struct Swapped {
            #[fsdp(shape = [64], frozen)]
            frozen: Param = param(&[64]),
            #[fsdp(shape = [64])]
            weight: Param = param(&[64]),
        }
    }
    model! {
        struct Both {
            one: Unit<Block> = unit(),
            other: [Unit<Swapped>; 3] = array(unit),
            more: [Unit<Block>; 3] = array(unit),
        }
    }
    assert_figures_agree::<Both>(&[1, 2]);
    let gather_pool = |ranks| {
        let layout = StaticLayout::of(&Both::TREE, &StaticOptions { ranks, ..StaticOptions::DEFAULT });
        assert_eq!(layout.kinds(), 2);
        layout.memory(Strategy::OptimGradsParams).gather_pool
    };
    // One rank's shards are whole.
    assert_eq!((gather_pool(1), gather_pool(2)), (0, 2 * 2 * 64 * 4));
}

#[test]
fn schedules_outer_ranks_and_whole_rows_cost_what_they_say() {
    model! {
        struct Narrow {
            #[fsdp(shape = [64, 16])]
            weight: Param = param(&[64, 16]),
        }
    }
    model! {
        struct Wide {
            #[fsdp(shape = [64, 32])]
            weight: Param = param(&[64, 32]),
        }
    }
    model! {
        struct Net {
            root: Narrow = Narrow::new(),
            narrow: [Unit<Narrow>; 6] = array(unit),
            wide: Unit<Wide> = unit(),
        }
    }
    const KIB: u64 = 1 << 10;
    const OF_4: StaticOptions = StaticOptions { ranks: 4, ..StaticOptions::DEFAULT };
    const LAYOUT: StaticLayout = StaticLayout::of(&Net::TREE, &OF_4);
    const DEFAULT: Schedule = Schedule::DEFAULT;
    const fn pools(schedule: &Schedule) -> (u64, u64) {
        let plan = LAYOUT.memory_with(Strategy::OptimGradsParams, schedule);
        (plan.gather_pool / KIB, plan.reduce_pool / KIB)
    }
    // Root and narrow units of 4 KiB, six of these, and one of 8 KiB.
    const _: () = assert!(matches!(pools(&DEFAULT), (16, 16)));
    const _: () = assert!(matches!(pools(&Schedule { prefetch: 3, ..DEFAULT }), (24, 16)));
    const _: () = assert!(matches!(pools(&Schedule { prefetch: 100, ..DEFAULT }), (36, 16)));
    const _: () = assert!(matches!(pools(&Schedule { gather_budget: Some(0), ..DEFAULT }), (12, 16)));
    const _: () = assert!(matches!(pools(&Schedule { reduce_budget: Some(1024), ..DEFAULT }), (16, 12)));
    const _: () = assert!(matches!(pools(&Schedule { reduce_budget: Some(5120), ..DEFAULT }), (16, 24)));
    const _: () = assert!(matches!(pools(&Schedule { no_sync: true, ..DEFAULT }), (16, 36)));
    const _: () = assert!(matches!(pools(&Schedule { registered: true, ..DEFAULT }), (20, 20)));
    const NEVER: Schedule = Schedule { reshard: ReshardAfterForward::Never, ..DEFAULT };
    const _: () = assert!(matches!(pools(&NEVER), (36, 16)));
    const PAIRS: Schedule = Schedule { reshard: ReshardAfterForward::Ranks(2), ..DEFAULT };
    const _: () = assert!(matches!(pools(&PAIRS), (32, 16)));

    // 9216 elements, over 4 ranks and 2 outer ones.
    const SHARED: StaticLayout = StaticLayout::of(&Net::TREE, &StaticOptions { outer: 2, ..OF_4 });
    const _: () = assert!(SHARED.memory(Strategy::OptimGradsParams).optimizer_state == 4 * 9216 / 8);
    const _: () = assert!(SHARED.memory(Strategy::OptimGradsParams).main_grads == 4 * 9216 / 4);
    // 13 shards of whole rows: 5 rows each, where the wide unit's 64 rows need 65.
    const ROWS: StaticOptions = StaticOptions { ranks: 13, alignment: ShardAlignment::Row, ..OF_4 };
    const OF_ROWS: StaticLayout = StaticLayout::of(&Net::TREE, &ROWS);
    const _: () = assert!(OF_ROWS.kind(1).buckets[0].size == 65 * 32);
    const _: () = assert!(OF_ROWS.memory(Strategy::OptimGradsParams).model_weights == 4 * 5 * (7 * 16 + 32));
    assert_figures_agree::<Net>(&[1]);
}

#[test]
fn containers_of_constant_length() {
    model! {
        struct Containers {
            #[fsdp(shape = [3, 3])]
            array: [Param; 5] = array(|| param(&[3, 3])),
            #[fsdp(shape = [17])]
            nested: [[Box<Param>; 3]; 2] = array(|| array(|| Box::new(param(&[17])))),
            #[fsdp(shape = [4])]
            units: [Unit<Param>; 3] = array(|| Unit::new(param(&[4]))),
            tuple: (Linear, [Linear; 2], ()) = (Linear::new(), array(Linear::new), ()),
            shared: Arc<Linear> = Arc::new(Linear::new()),
            marker: PhantomData<u8> = PhantomData,
            none: [Vec<Linear>; 0] = [],
            #[fsdp(buffer)]
            mean: Tensor = Tensor::zeros(9, DType::F32, &Device::Cpu).unwrap(),
            #[fsdp(skip)]
            skipped: Option<Linear> = None,
        }
    }
    assert!(Containers::new().skipped.is_none());
    assert_figures_agree::<Containers>(&[1]);
    model! {
        struct Wrapped {
            units: [Unit<Containers>; 3] = array(unit),
            arrays: [Containers; 3] = array(Containers::new),
        }
    }
    assert_figures_agree::<Wrapped>(&[1]);
}

#[test]
fn const_generics() {
    #[derive(FsdpUnit)]
    struct Dense<const IN: usize, const OUT: usize> {
        #[fsdp(shape = [OUT, IN])]
        weight: Param,
        #[fsdp(shape = [OUT])]
        bias: Param,
    }
    #[derive(FsdpUnit)]
    struct Stack<const N: usize, T> {
        layers: [Unit<T>; N],
        narrow: Dense<3, 5>,
    }
    impl<const IN: usize, const OUT: usize> Model for Dense<IN, OUT> {
        fn new() -> Self {
            Dense { weight: param(&[OUT, IN]), bias: param(&[OUT]) }
        }
    }
    impl<const N: usize, T: Model> Model for Stack<N, T> {
        fn new() -> Self {
            Stack { layers: array(unit), narrow: Model::new() }
        }
    }
    assert_figures_agree::<Stack<7, Dense<10, 33>>>(&[1]);
    assert_figures_agree::<Stack<2, Stack<3, Dense<2, 4>>>>(&[1]);
}

#[test]
fn tensor_parallel_parts() {
    model! {
        struct Cut {
            #[fsdp(tp = column)]
            up: Linear = Linear::new(),
            // The bias has no dim 1: every rank holds it whole.
            #[fsdp(tp = row)]
            down: Linear = Linear::new(),
            #[fsdp(tp = dim(2), shape = [3, 5, 8])]
            third: [Param; 2] = array(|| param(&[3, 5, 8])),
            #[fsdp(tp = replicate)]
            norm: Linear = Linear::new(),
        }
    }
    model! {
        struct Parallel {
            #[fsdp(tp = replicate)]
            blocks: [Unit<Cut>; 3] = array(unit),
            #[fsdp(tp = column, shape = [12, 2])]
            embed: Param = param(&[12, 2]),
            #[fsdp(tie_with = "embed", tp = dim(0), shape = [12, 2])]
            head: Param = param(&[12, 2]),
        }
    }
    assert_figures_agree::<Parallel>(&[1, 2]);
    const TWO: StaticOptions = StaticOptions { tp: 2, ..StaticOptions::DEFAULT };
    const NUMEL: usize = StaticLayout::of(&Parallel::TREE, &TWO).numel();
    assert_eq!(NUMEL, 3 * (33 + 36 + 120 + 66) + 12);
}

model! {
    struct Tied {
        q: Linear = Linear::new(),
        #[fsdp(tie_with = "q")]
        k: Linear = Linear::new(),
        #[fsdp(tie_with = "k.bias", shape = [6])]
        v: Param = param(&[6]),
    }
}

#[test]
fn ties_in_chains_and_before_their_targets() {
    model! {
        struct Chain {
            #[fsdp(tie_with = "b", shape = [20])]
            a: Param = param(&[20]),
            #[fsdp(tie_with = "block.c", shape = [20])]
            b: Param = param(&[20]),
            block: Block = Block::new(),
            #[fsdp(tie_with = "a", shape = [20])]
            d: Unit<Param> = Unit::new(param(&[20])),
        }
    }
    model! {
        struct Block {
            #[fsdp(shape = [20])]
            c: Param = param(&[20]),
        }
    }
    assert_figures_agree::<Chain>(&[1]);
    assert_figures_agree::<Tied>(&[1, 2]);
}

#[test]
fn ties_across_units() {
    model! {
        struct Names {
            #[fsdp(rename = "model.embed", shape = [30, 4])]
            embed: Unit<Param> = Unit::new(param(&[30, 4])),
            #[fsdp(rename = "model.layers")]
            layers: [Unit<Linear>; 4] = array(unit),
            #[fsdp(shape = [2])]
            norm: Param = param(&[2]),
            #[fsdp(tie_with = "model.embed", shape = [30, 4])]
            head: Param = param(&[30, 4]),
            #[fsdp(tie_with = "model.layers.2")]
            copy: Unit<Linear> = unit(),
        }
    }
    assert_figures_agree::<Names>(&[1]);
    const LAYOUT: StaticLayout = StaticLayout::of(&Names::TREE, &StaticOptions::DEFAULT);
    // The embedding and both parameters of layer 2 are alone in the root; the norm has the group's bucket.
    const _: () = assert!(LAYOUT.root().buckets.len() == 4);
    const _: () = assert!(LAYOUT.units() == 7);
}

#[test]
fn ties_inside_the_elements_of_an_array() {
    model! {
        struct Across {
            left: Unit<Linear> = unit(),
            #[fsdp(tie_with = "left")]
            right: Unit<Linear> = unit(),
        }
    }
    model! {
        struct Repeated {
            alike: [Unit<Tied>; 6] = array(unit),
            plain: [Tied; 3] = array(Tied::new),
            nested: [[Unit<Tied>; 2]; 2] = array(|| array(unit)),
            across: [Across; 2] = array(Across::new),
            #[fsdp(tie_with = "alike.3.q")]
            fourth: Linear = Linear::new(),
        }
    }
    assert_figures_agree::<Repeated>(&[1, 2]);
    model! { struct Alike { layers: [Unit<Tied>; 200] = array(unit), } }
    const LAYOUT: StaticLayout = StaticLayout::of(&Alike::TREE, &StaticOptions::DEFAULT);
    const _: () = assert!(LAYOUT.numel() == 200 * 66);
    assert_figures_agree::<Alike>(&[1]);
}

#[test]
fn elements_tied_to_one_parameter() {
    model! {
        struct Layer {
            #[fsdp(tie_with = "layers.0.shared", shape = [9])]
            shared: Param = param(&[9]),
            #[fsdp(tie_with = "embed", shape = [5])]
            bias: Param = param(&[5]),
            linear: Linear = Linear::new(),
        }
    }
    model! {
        struct Albert {
            #[fsdp(shape = [5])]
            embed: Param = param(&[5]),
            layers: [Unit<Layer>; 100] = array(unit),
        }
    }
    assert_figures_agree::<Albert>(&[1]);
    model! {
        struct Copies {
            first: [Unit<Linear>; 3] = array(unit),
            #[fsdp(tie_with = "first")]
            second: [Unit<Linear>; 3] = array(unit),
        }
    }
    assert_figures_agree::<Copies>(&[1]);
    // As many ties as there is room for.
    model! {
        struct Most {
            first: [Unit<Linear>; 32] = array(unit),
            #[fsdp(tie_with = "first")]
            second: [Unit<Linear>; 32] = array(unit),
        }
    }
    const LAYOUT: StaticLayout = StaticLayout::of(&Most::TREE, &StaticOptions::DEFAULT);
    const _: () = assert!(LAYOUT.root().buckets.len() == 64);
    assert_figures_agree::<Most>(&[1]);
}
