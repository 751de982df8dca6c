//! Models of real size, evaluated by the compiler.

use fsdp::layout::{StaticLayout, StaticOptions};
use fsdp::prelude::*;

use super::{Model, assert_figures_agree};

const GIB: u64 = 1 << 30;
const OF_8: StaticOptions =
    StaticOptions { ranks: 8, precision: MixedPrecision::BF16, ..StaticOptions::DEFAULT };
const OF_1024: StaticOptions = StaticOptions { ranks: 1024, ..OF_8 };

#[derive(FsdpUnit)]
struct Linear<const IN: usize, const OUT: usize> {
    #[fsdp(shape = [OUT, IN])]
    weight: Param,
}

#[derive(FsdpUnit)]
struct Biased<const IN: usize, const OUT: usize> {
    #[fsdp(shape = [OUT, IN])]
    weight: Param,
    #[fsdp(shape = [OUT], no_decay)]
    bias: Param,
}

#[derive(FsdpUnit)]
struct Norm<const DIM: usize> {
    #[fsdp(shape = [DIM], dtype = "f32")]
    weight: Param,
}

impl<const IN: usize, const OUT: usize> Model for Linear<IN, OUT> {
    fn new() -> Self {
        Linear { weight: Param::new((OUT, IN)) }
    }
}

impl<const IN: usize, const OUT: usize> Model for Biased<IN, OUT> {
    fn new() -> Self {
        Biased { weight: Param::new((OUT, IN)), bias: Param::new(OUT) }
    }
}

impl<const DIM: usize> Model for Norm<DIM> {
    fn new() -> Self {
        Norm { weight: Param::new(DIM) }
    }
}

/// A struct of modules, and its model.
macro_rules! module {
    (struct $name:ident { $($(#[$said:meta])* $field:ident: $ty:ty,)* }) => {
        #[derive(FsdpUnit)]
        struct $name { $($(#[$said])* $field: $ty,)* }

        impl Model for $name {
            fn new() -> Self {
                $name { $($field: Model::new(),)* }
            }
        }
    };
}

impl<M: Model> Model for Unit<M> {
    fn new() -> Self {
        Unit::new(M::new())
    }
}

impl<M: Model, const N: usize> Model for [M; N] {
    fn new() -> Self {
        std::array::from_fn(|_| M::new())
    }
}

impl<A: Model, B: Model> Model for (A, B) {
    fn new() -> Self {
        (A::new(), B::new())
    }
}

// An embedding is a table of the shape of a linear layer's weight.
module! {
    struct Gpt2Xl {
        #[fsdp(rename = "wte")]
        tokens: Linear<1600, 50257>,
        #[fsdp(rename = "wpe")]
        positions: Linear<1600, 1024>,
        h: [Unit<Gpt2Block>; 48],
        ln_f: LayerNorm,
        #[fsdp(tie_with = "wte")]
        lm_head: Linear<1600, 50257>,
    }
}

module! {
    struct Gpt2Block {
        ln_1: LayerNorm,
        #[fsdp(tp = column)]
        attn_in: Biased<1600, 4800>,
        #[fsdp(tp = row)]
        attn_out: Biased<1600, 1600>,
        ln_2: LayerNorm,
        #[fsdp(tp = column)]
        mlp_in: Biased<1600, 6400>,
        #[fsdp(tp = row)]
        mlp_out: Biased<6400, 1600>,
    }
}

#[derive(FsdpUnit)]
struct LayerNorm {
    #[fsdp(shape = [1600])]
    weight: Param,
    #[fsdp(shape = [1600])]
    bias: Param,
}

impl Model for LayerNorm {
    fn new() -> Self {
        LayerNorm { weight: Param::new(1600), bias: Param::new(1600) }
    }
}

const GPT2_XL: StaticLayout = StaticLayout::of(&Gpt2Xl::TREE, &OF_8);
const _: () = assert!(GPT2_XL.numel() == 1_557_611_200);
const _: () = assert!(GPT2_XL.units() == 49 && GPT2_XL.kinds() == 1);
// The embedding, shared with the head, is alone in the root's second bucket, and the largest.
const _: () = assert!(GPT2_XL.root().buckets.len() == 2);
const _: () = assert!(GPT2_XL.largest_unit().numel() == 80_411_200 + 1_638_400 + 3_200);
const _: () = assert!(GPT2_XL.largest_unit().bytes() == GPT2_XL.root().bytes());
const _: () = assert!(GPT2_XL.padding() < 1600 * 49 * 12);
const _: () = assert!(GPT2_XL.bytes_per_rank(Strategy::OptimGradsParams, 2) < 5 * GIB);
const _: () = assert!(GPT2_XL.bytes_per_rank(Strategy::NoShard, 2) > 25 * GIB);
fsdp::assert_fits!(Gpt2Xl, strategy = Strategy::OptimGradsParams, ranks = 8, budget = "80 GiB");
// Rows of 1, 1600, 6400 and the root's: what keeps them whole costs little.
const OF_8_ROWS: StaticLayout =
    StaticLayout::of(&Gpt2Xl::TREE, &StaticOptions { alignment: ShardAlignment::Row, ..OF_8 });
const _: () = assert!(OF_8_ROWS.numel() + OF_8_ROWS.padding() < 1_557_611_200 / 1000 * 1003);
fsdp::assert_fits!(
    Gpt2Xl,
    ranks = 8,
    outer = OuterStrategy::Optim,
    outer_ranks = 4,
    alignment = ShardAlignment::Row,
    reshard = ReshardAfterForward::Never,
    prefetch = 2,
    budget = "12 GiB",
);
fsdp::assert_fits!(
    Gpt2Xl,
    budget = "5 GiB",
    precision = MixedPrecision::BF16,
    ranks = 8,
    tp = 1,
    optimizer_states = 2,
);

// Llama 3.1 405B.
module! {
    struct Llama405B {
        #[fsdp(rename = "model.embed_tokens", tp = column)]
        embed: Linear<16384, 128256>,
        #[fsdp(rename = "model.layers")]
        layers: [Unit<LlamaBlock>; 126],
        #[fsdp(rename = "model.norm")]
        norm: Norm<16384>,
        #[fsdp(tp = column)]
        lm_head: Linear<16384, 128256>,
    }
}

module! {
    struct LlamaBlock {
        input_norm: Norm<16384>,
        #[fsdp(tp = column)]
        q: Linear<16384, 16384>,
        #[fsdp(tp = column)]
        kv: (Linear<16384, 1024>, Linear<16384, 1024>),
        #[fsdp(tp = row)]
        o: Linear<16384, 16384>,
        post_norm: Norm<16384>,
        #[fsdp(tp = column)]
        gate_up: [Linear<16384, 53248>; 2],
        #[fsdp(tp = row)]
        down: Linear<53248, 16384>,
    }
}

const LLAMA: StaticLayout = StaticLayout::of(&Llama405B::TREE, &OF_1024);
const _: () = assert!(LLAMA.numel() == 405_853_388_800);
const _: () = assert!(LLAMA.units() == 127 && LLAMA.params() == 3 + 126 * 9);
const _: () = assert!(LLAMA.bytes_per_rank(Strategy::OptimGradsParams, 2) < 80 * GIB);
fsdp::assert_fits!(Llama405B, ranks = 1024, tp = 2, precision = MixedPrecision::BF16, budget = "80 GiB");

// 61 layers of 64 experts, once with the experts in their layer's unit and once each in its own.
module! {
    struct Experts {
        layers: [Unit<ExpertBlock>; 61],
        flat: [ExpertBlock; 61],
        apart: [Unit<ApartBlock>; 61],
    }
}

module! {
    struct ExpertBlock {
        norm: Norm<7168>,
        router: Linear<7168, 64>,
        #[fsdp(expert)]
        experts: [Expert; 64],
    }
}

module! {
    struct ApartBlock {
        norm: Norm<7168>,
        #[fsdp(expert)]
        experts: [Unit<Expert>; 64],
    }
}

module! {
    struct Expert {
        gate: Linear<7168, 2048>,
        up: Linear<7168, 2048>,
        down: Linear<2048, 7168>,
    }
}

const EXPERTS: StaticLayout = StaticLayout::of(&Experts::TREE, &OF_1024);
const EXPERT: usize = 3 * 7168 * 2048;
const _: () = assert!(EXPERTS.numel() == 61 * (3 * (7168 + 64 * EXPERT) + 2 * 7168 * 64));
const _: () = assert!(EXPERTS.units() == 1 + 61 + 61 * 65 && EXPERTS.kinds() == 3);

#[test]
fn figures_of_gpt2_xl() {
    assert_figures_agree::<Gpt2Xl>(&[1, 2]);
}

#[test]
fn figures_of_a_llama() {
    assert_figures_agree::<Llama405B>(&[1, 2]);
}

#[test]
fn figures_of_many_experts() {
    let layout = EXPERTS;
    let mesh = fsdp::mesh::Topology::new(&[("dp_shard", 1024)], 1024).unwrap();
    let config = FsdpConfig { precision: MixedPrecision::BF16, ..Default::default() };
    let built = Box::new(Experts::new()).layout(&mesh, &config).unwrap();
    super::assert_layouts_agree(&layout, &built, "experts");
}
