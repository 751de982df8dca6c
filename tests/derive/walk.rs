//! What a derived walk tells a visitor: names, order, inherited attributes, ties, buffers.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use fsdp::{FsdpUnit, Init, Param};
use fsdp_runtime::engine::{Fused, Tie, UnitCell, Visitor, Walker};
use fsdp_runtime::spec::{Attrs, Dtype, TpPlacement};

struct Seen<'a> {
    name: String,
    attrs: Attrs,
    tie: Option<Tie>,
    fused: Option<Fused>,
    param: &'a Param,
}

#[derive(Default)]
struct Recorder<'a> {
    params: Vec<Seen<'a>>,
    buffers: Vec<(String, &'a Tensor)>,
    variants: Vec<String>,
}

impl<'a> Visitor<'a> for Recorder<'a> {
    fn param(
        &mut self,
        name: &str,
        attrs: &Attrs,
        tie: Option<&Tie>,
        fused: Option<&Fused>,
        param: &'a Param,
    ) {
        let (name, tie, fused) = (name.to_string(), tie.cloned(), fused.cloned());
        self.params.push(Seen { name, attrs: *attrs, tie, fused, param });
    }

    fn enter_unit(&mut self, _path: &str, _cell: &'a UnitCell) {}

    fn leave_unit(&mut self) {}

    fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
        self.buffers.push((name.to_string(), tensor));
    }

    fn variant(&mut self, path: &str, name: &'static str) {
        self.variants.push(format!("{path}={name}"));
    }
}

fn walk<M: FsdpUnit>(module: &M) -> Recorder<'_> {
    let mut recorder = Recorder::default();
    module.walk(&mut Walker::new(&mut recorder));
    recorder
}

fn names<M: FsdpUnit>(module: &M) -> Vec<String> {
    walk(module).params.into_iter().map(|seen| seen.name).collect()
}

fn attrs_of<M: FsdpUnit>(module: &M, name: &str) -> Attrs {
    let recorder = walk(module);
    recorder.params.iter().find(|seen| seen.name == name).unwrap_or_else(|| panic!("no {name}")).attrs
}

fn param() -> Param {
    Param::new(1)
}

#[derive(FsdpUnit)]
struct Leaf {
    weight: Param,
}

fn leaf() -> Leaf {
    Leaf { weight: param() }
}

#[test]
fn declaration_order_with_renames() {
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(rename = "model.embed_tokens")]
        embed: Leaf,
        #[fsdp(rename = "model.layers")]
        layers: Vec<Leaf>,
        eps: f64,
        #[fsdp(rename = "model.norm.weight")]
        norm: Param,
        lm_head: Leaf,
    }
    let model =
        Model { embed: leaf(), layers: vec![leaf(), leaf()], eps: 1e-5, norm: param(), lm_head: leaf() };
    assert_eq!(model.eps, 1e-5);
    assert_eq!(
        names(&model),
        [
            "model.embed_tokens.weight",
            "model.layers.0.weight",
            "model.layers.1.weight",
            "model.norm.weight",
            "lm_head.weight",
        ]
    );
}

#[test]
fn tuple_and_unit_structs() {
    #[derive(FsdpUnit)]
    struct Pair(Leaf, u8, #[fsdp(rename = "head")] Param, Param);
    #[derive(FsdpUnit)]
    struct Nothing;
    let pair = Pair(leaf(), 3, param(), param());
    assert_eq!(pair.1, 3);
    assert_eq!(names(&pair), ["0.weight", "head", "3"]);
    assert_eq!(names(&Nothing), [""; 0]);
}

#[test]
fn containers_name_their_elements() {
    #[derive(FsdpUnit)]
    struct Model {
        v: Vec<Leaf>,
        some: Option<Leaf>,
        none: Option<Leaf>,
        boxed: Box<Leaf>,
        arc: Arc<Leaf>,
        array: [Leaf; 2],
        t: (Leaf, Leaf),
        bm: BTreeMap<String, Leaf>,
        vv: Vec<Vec<Leaf>>,
        ob: Option<Box<Leaf>>,
        vp: Vec<Param>,
        tp: (Param, Leaf),
    }
    let model = Model {
        v: vec![leaf()],
        some: Some(leaf()),
        none: None,
        boxed: Box::new(leaf()),
        arc: Arc::new(leaf()),
        array: [leaf(), leaf()],
        t: (leaf(), leaf()),
        bm: ["b", "a"].into_iter().map(|key| (key.to_string(), leaf())).collect(),
        vv: vec![vec![leaf()], vec![]],
        ob: Some(Box::new(leaf())),
        vp: vec![param()],
        tp: (param(), leaf()),
    };
    assert_eq!(
        names(&model),
        [
            "v.0.weight",
            "some.weight",
            "boxed.weight",
            "arc.weight",
            "array.0.weight",
            "array.1.weight",
            "t.0.weight",
            "t.1.weight",
            "bm.a.weight",
            "bm.b.weight",
            "vv.0.0.weight",
            "ob.weight",
            "vp.0",
            "tp.0",
            "tp.1.weight",
        ]
    );
}

#[test]
fn names_are_without_raw_marks() {
    #[derive(FsdpUnit)]
    struct Model {
        r#type: Param,
        r#match: Leaf,
        r#normal: Param,
    }
    let model = Model { r#type: param(), r#match: leaf(), normal: param() };
    assert_eq!(names(&model), ["type", "match.weight", "normal"]);
}

#[test]
fn const_generic_modules_keep_their_keys_apart() {
    #[derive(FsdpUnit)]
    struct Linear<const IN: usize, const OUT: usize = 4> {
        weight: Param,
        bias: Param,
    }
    #[derive(FsdpUnit)]
    struct Stack<const N: usize, T = Linear<2>> {
        layers: [T; N],
    }
    let linear = || Linear::<2> { weight: Param::new((4, 2)), bias: Param::new(4) };
    let two: Stack<2> = Stack { layers: [linear(), linear()] };
    let one: Stack<1> = Stack { layers: [linear()] };
    assert_eq!(names(&two), ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]);
    assert_eq!(names(&one), ["layers.0.weight", "layers.0.bias"]);
}

#[test]
fn a_recursive_model_is_a_finite_tree() {
    #[derive(FsdpUnit)]
    struct Node {
        w: Param,
        next: Option<Box<Node>>,
    }
    let node = |next| Node { w: param(), next };
    let list = node(Some(Box::new(node(Some(Box::new(node(None)))))));
    assert_eq!(names(&list), ["w", "next.w", "next.next.w"]);
    assert_eq!(walk(&list).params.iter().map(|seen| seen.param.numel()).sum::<usize>(), 3);
}

#[test]
fn an_enum_walks_its_live_variant_under_its_own_name() {
    #[derive(FsdpUnit)]
    enum Ffn {
        Dense {
            up: Leaf,
            #[fsdp(frozen)]
            down: Leaf,
            width: usize,
        },
        Routed(Vec<Leaf>, #[fsdp(rename = "router")] Param),
        Identity,
    }
    #[derive(FsdpUnit)]
    struct Block {
        ffn: Ffn,
    }
    let dense = Block { ffn: Ffn::Dense { up: leaf(), down: leaf(), width: 3 } };
    let Ffn::Dense { width, .. } = &dense.ffn else { unreachable!() };
    assert_eq!(*width, 3);
    assert_eq!(names(&dense), ["ffn.up.weight", "ffn.down.weight"]);
    assert_eq!(attrs_of(&dense, "ffn.down.weight").frozen, Some(true));
    assert_eq!(names(&Block { ffn: Ffn::Routed(vec![leaf()], param()) }), ["ffn.0.0.weight", "ffn.router"]);
    assert_eq!(names(&Block { ffn: Ffn::Identity }), [""; 0]);
}

#[test]
fn attributes_are_inherited_and_the_innermost_wins() {
    #[derive(FsdpUnit)]
    struct Inner {
        plain: Param,
        #[fsdp(frozen = false, dtype = "f32", tp = replicate)]
        own: Param,
    }
    #[derive(FsdpUnit)]
    struct Middle {
        #[fsdp(no_decay, tp = dim(2))]
        inner: Vec<Inner>,
        outside: Param,
    }
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(frozen, dtype = "bf16", tp = column, expert)]
        middle: Middle,
        after: Param,
    }
    let inner = || Inner { plain: param(), own: param() };
    let model = Model { middle: Middle { inner: vec![inner()], outside: param() }, after: param() };
    let outside = Attrs {
        tp: Some(TpPlacement::Column),
        expert: Some(true),
        frozen: Some(true),
        no_decay: None,
        dtype: Some(Dtype::BF16),
        ..Attrs::NONE
    };
    let plain = Attrs { tp: Some(TpPlacement::Dim(2)), no_decay: Some(true), ..outside };
    let own =
        Attrs { tp: Some(TpPlacement::Replicate), frozen: Some(false), dtype: Some(Dtype::F32), ..plain };
    assert_eq!(attrs_of(&model, "middle.inner.0.plain"), plain);
    assert_eq!(attrs_of(&model, "middle.inner.0.own"), own);
    assert_eq!(attrs_of(&model, "middle.outside"), outside);
    assert_eq!(attrs_of(&model, "after"), Attrs::NONE);
}

#[test]
fn every_spelling_of_a_value() {
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(dtype = "f32", tp = column)]
        a: Param,
        #[fsdp(dtype = "bf16", tp = row)]
        b: Param,
        #[fsdp(dtype = "f16", tp = replicate)]
        c: Param,
        #[fsdp(tp = dim(0), no_decay = true)]
        #[fsdp(expert = false)]
        d: Param,
    }
    let model = Model { a: param(), b: param(), c: param(), d: param() };
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| attrs_of(&model, name));
    assert_eq!([a.dtype, b.dtype, c.dtype], [Dtype::F32, Dtype::BF16, Dtype::F16].map(Some));
    assert_eq!([a.tp, b.tp, c.tp], [TpPlacement::Column, TpPlacement::Row, TpPlacement::Replicate].map(Some));
    let expected =
        Attrs { tp: Some(TpPlacement::Dim(0)), no_decay: Some(true), expert: Some(false), ..Attrs::NONE };
    assert_eq!(d, expected);
}

#[test]
fn ties_name_their_target_from_the_struct_and_from_the_root() {
    #[derive(FsdpUnit)]
    struct Decoder {
        embed: Leaf,
        #[fsdp(tie_with = "embed")]
        head: Leaf,
        after: Param,
    }
    #[derive(FsdpUnit)]
    struct Model {
        decoder: Decoder,
    }
    let model = Model { decoder: Decoder { embed: leaf(), head: leaf(), after: param() } };
    let recorder = walk(&model);
    let ties: Vec<_> = recorder.params.iter().map(|seen| (seen.name.as_str(), seen.tie.clone())).collect();
    let tie = Tie { relative: "decoder.embed.weight".to_string(), absolute: "embed.weight".to_string() };
    assert_eq!(
        ties,
        [("decoder.embed.weight", None), ("decoder.head.weight", Some(tie)), ("decoder.after", None)]
    );
}

#[test]
fn fused_holds_for_what_is_inside_and_ends_with_the_field() {
    #[derive(FsdpUnit)]
    struct Attention {
        #[fsdp(fused("q.proj", "k"), no_decay)]
        qk: Vec<Leaf>,
        after: Param,
    }
    #[derive(FsdpUnit)]
    struct Outer {
        #[fsdp(rename = "attn")]
        attention: Attention,
        #[fsdp(fused("x", "y"))]
        nested: Attention,
    }
    let attention = || Attention { qk: vec![leaf()], after: param() };
    let outer = Outer { attention: attention(), nested: attention() };
    let recorder = walk(&outer);
    let fused = |field: &str, parts: [&str; 2], outer: Option<&str>| {
        let parts = parts.map(str::to_string).to_vec();
        Some(Fused { field: field.to_string(), parts, outer: outer.map(str::to_string) })
    };
    let seen: Vec<_> = recorder.params.iter().map(|seen| (seen.name.as_str(), seen.fused.clone())).collect();
    assert_eq!(
        seen,
        [
            ("attn.qk.0.weight", fused("attn.qk", ["attn.q.proj.0.weight", "attn.k.0.weight"], None)),
            ("attn.after", None),
            (
                "nested.qk.0.weight",
                fused("nested.qk", ["nested.q.proj.0.weight", "nested.k.0.weight"], Some("nested"))
            ),
            ("nested.after", fused("nested", ["x.after", "y.after"], None)),
        ]
    );
}

#[test]
fn buffers_are_reported_apart_and_skipped_fields_not_at_all() {
    #[derive(FsdpUnit)]
    struct BatchNorm {
        weight: Param,
        #[fsdp(buffer)]
        running_mean: Tensor,
        #[fsdp(buffer, rename = "stats.count")]
        count: Tensor,
        #[fsdp(skip)]
        cache: Option<Tensor>,
        #[fsdp(skip)]
        hidden: Param,
    }
    #[derive(FsdpUnit)]
    struct Model {
        norm: BatchNorm,
    }
    let zeros = || Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    let norm =
        BatchNorm { weight: param(), running_mean: zeros(), count: zeros(), cache: None, hidden: param() };
    let model = Model { norm };
    let recorder = walk(&model);
    let buffers: Vec<&str> = recorder.buffers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(buffers, ["norm.running_mean", "norm.stats.count"]);
    assert_eq!(recorder.buffers[1].1.id(), model.norm.count.id());
    assert_eq!(names(&model), ["norm.weight"]);
    assert_eq!((model.norm.cache.is_none(), model.norm.hidden.numel()), (true, 1));
}

#[test]
fn field_names_do_not_clash_with_what_the_expansion_calls_its_own() {
    macro_rules! model {
        ($($field:ident)*) => {
            #[derive(FsdpUnit)]
            struct Model { $($field: Param,)* }
            #[derive(FsdpUnit)]
            enum Choice { Only { $($field: Param,)* } }
            const NAMES: &[&str] = &[$(stringify!($field)),*];
            fn numbered() -> impl FnMut() -> Param {
                let mut index = 0.0;
                move || {
                    index += 1.0;
                    Param::new(1).with_init(Init::Constant(index))
                }
            }
            fn model() -> Model {
                let mut next = numbered();
                Model { $($field: next(),)* }
            }
            fn choice() -> Choice {
                let mut next = numbered();
                Choice::Only { $($field: next(),)* }
            }
        };
    }
    model! {
        this layout offset params mesh f visitor path prefix name out result i len shape dtype unit field value buf
        index _0 __self walker walk attrs field0 field1 __fsdp tie_with tp
    }
    fn check<M: FsdpUnit>(module: &M) {
        let recorder = walk(module);
        assert_eq!(recorder.params.len(), NAMES.len());
        for (index, seen) in recorder.params.iter().enumerate() {
            assert_eq!(seen.name, NAMES[index]);
            assert_eq!(*seen.param.init(), Init::Constant(index as f32 + 1.0), "{}", seen.name);
        }
    }
    check(&model());
    check(&choice());
}

#[test]
fn the_only_field_of_a_tuple_variant_is_named_as_the_enum() {
    #[derive(FsdpUnit)]
    enum Ffn {
        Dense(Leaf),
        Routed(#[fsdp(rename = "experts")] Vec<Leaf>),
        Nested(Box<Ffn>),
    }
    #[derive(FsdpUnit)]
    struct Block {
        ffn: Ffn,
    }
    let named = |ffn| {
        let block = Block { ffn };
        let recorder = walk(&block);
        let names: Vec<String> = recorder.params.into_iter().map(|seen| seen.name).collect();
        (names.join(" "), recorder.variants.join(" "))
    };
    let of = |names: &str, variants: &str| (names.to_string(), variants.to_string());
    assert_eq!(named(Ffn::Dense(leaf())), of("ffn.weight", "ffn=Ffn::Dense"));
    assert_eq!(named(Ffn::Routed(vec![leaf()])), of("ffn.experts.0.weight", "ffn=Ffn::Routed"));
    let nested = Ffn::Nested(Box::new(Ffn::Dense(leaf())));
    assert_eq!(named(nested), of("ffn.weight", "ffn=Ffn::Nested ffn=Ffn::Dense"));
}

#[test]
fn fields_are_renamed_by_rule_unless_they_have_a_name() {
    #[derive(FsdpUnit)]
    #[fsdp(rename_all = "camelCase")]
    struct Mlp {
        up_proj: Leaf,
        #[fsdp(rename = "down_proj")]
        down: Leaf,
        #[fsdp(buffer)]
        running_mean: Tensor,
    }
    #[derive(FsdpUnit)]
    #[fsdp(rename_all = "SCREAMING-KEBAB-CASE")]
    enum Ffn {
        Plain { mlp_layer: Mlp },
    }
    let zeros = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    let ffn = Ffn::Plain { mlp_layer: Mlp { up_proj: leaf(), down: leaf(), running_mean: zeros } };
    assert_eq!(names(&ffn), ["MLP-LAYER.upProj.weight", "MLP-LAYER.down_proj.weight"]);
    assert_eq!(walk(&ffn).buffers[0].0, "MLP-LAYER.runningMean");
}

#[test]
fn initial_values_are_inherited_and_shapes_are_not() {
    const STD: f32 = 0.25;
    #[derive(FsdpUnit)]
    struct Linear<const IN: usize, const OUT: usize> {
        #[fsdp(shape = [OUT, 2 * IN])]
        weight: Param,
        #[fsdp(init = constant(-1.0), shape = [OUT])]
        bias: Option<Param>,
        scales: Vec<Param>,
    }
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(init = normal(0.0, STD / 2.0))]
        head: Linear<2, 3>,
        #[fsdp(init = uniform(-1.0, 1.0), shape = [Self::DIM])]
        extra: [Param; 2],
        #[fsdp(init = ones)]
        gain: Param,
        #[fsdp(init = zeros)]
        shift: Param,
        plain: Linear<1, 1>,
    }
    impl Model {
        const DIM: usize = 7;
    }
    fn linear<const IN: usize, const OUT: usize>() -> Linear<IN, OUT> {
        Linear { weight: param(), bias: Some(param()), scales: vec![param()] }
    }
    let model =
        Model { head: linear(), extra: [param(), param()], gain: param(), shift: param(), plain: linear() };
    let said = |name: &str| {
        let attrs = attrs_of(&model, name);
        (attrs.init, attrs.shape)
    };
    let normal = Some(Init::Normal { mean: 0.0, std: 0.125 });
    assert_eq!(said("head.weight"), (normal, Some(&[3, 4][..])));
    assert_eq!(said("head.bias"), (Some(Init::Constant(-1.0)), Some(&[3][..])));
    assert_eq!(said("head.scales.0"), (normal, None));
    assert_eq!(said("extra.1"), (Some(Init::Uniform { low: -1.0, high: 1.0 }), Some(&[7][..])));
    assert_eq!(said("gain"), (Some(Init::Ones), None));
    assert_eq!(said("shift"), (Some(Init::Zeros), None));
    assert_eq!(said("plain.weight"), (None, Some(&[1, 2][..])));
}

#[test]
fn a_row_parallel_layer_has_whole_biases_unless_it_says_otherwise() {
    #[derive(FsdpUnit)]
    struct Linear {
        weight: Param,
        bias: Param,
        #[fsdp(tp = row)]
        own: Param,
    }
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(tp = row)]
        down: Linear,
        #[fsdp(tp = column)]
        up: Vec<Param>,
    }
    let linear = Linear { weight: Param::new((2, 2)), bias: param(), own: param() };
    let model = Model { down: linear, up: vec![param(), Param::new(())] };
    let tp = |name: &str| attrs_of(&model, name).tp;
    assert_eq!(tp("down.weight"), Some(TpPlacement::Row));
    assert_eq!(tp("down.bias"), Some(TpPlacement::Replicate));
    assert_eq!(tp("down.own"), Some(TpPlacement::Row));
    assert_eq!(tp("up.0"), Some(TpPlacement::Column));
    // Said of the field itself, so it is a mistake to be reported, not a bias to be kept whole.
    assert_eq!(tp("up.1"), Some(TpPlacement::Column));
}

#[test]
fn buffers_may_be_absent_or_several() {
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(buffer)]
        mean: Option<Tensor>,
        #[fsdp(buffer)]
        gone: Option<Tensor>,
        #[fsdp(buffer, rename = "stats")]
        many: Vec<[Tensor; 2]>,
    }
    let zeros = || Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    let model = Model { mean: Some(zeros()), gone: None, many: vec![[zeros(), zeros()]] };
    let names: Vec<String> = walk(&model).buffers.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["mean", "stats.0.0", "stats.0.1"]);
}
