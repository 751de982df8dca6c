//! Fused parameters: the tensors that checkpoints know them as, and what of them is refused.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use fsdp::mesh::Topology;
use fsdp::prelude::*;
use fsdp::spec::ParamSpec;

use crate::fixtures::on_ranks;

#[derive(FsdpUnit)]
struct Linear {
    weight: Param,
    bias: Param,
}

impl Linear {
    fn of_rows(rows: &[usize]) -> Linear {
        let outputs = rows.iter().sum();
        Linear {
            weight: Param::new((outputs, 3)).with_fused_rows(rows),
            bias: Param::new(outputs).with_fused_rows(rows),
        }
    }
}

fn layout<M: FsdpUnit>(model: &M) -> fsdp::Result<Vec<ParamSpec>> {
    let mesh = Topology::new(&[("dp_shard", 2)], 2).unwrap();
    Ok(model.layout(&mesh, &FsdpConfig::default())?.params)
}

fn refusal<M: FsdpUnit>(model: &M) -> String {
    layout(model).unwrap_err().to_string()
}

/// Names, shapes and elements of the tensors of all parameters.
fn tensors(params: &[ParamSpec]) -> Vec<String> {
    let tensors = params.iter().flat_map(ParamSpec::tensors);
    tensors.map(|tensor| format!("{} {:?} {:?}", tensor.name, tensor.shape, tensor.elements)).collect()
}

#[test]
fn the_parts_take_the_place_of_the_field_in_every_parameter_inside() {
    #[derive(FsdpUnit)]
    struct Attention {
        #[fsdp(fused("q_proj", "k_proj", "v_proj"), frozen)]
        qkv: Linear,
        o_proj: Param,
    }
    #[derive(FsdpUnit)]
    struct Layer {
        #[fsdp(rename = "self_attn")]
        attention: Attention,
        #[fsdp(fused("mlp.gate.weight", "mlp.up.weight"))]
        gate_up: Param,
    }
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(rename = "model.layers")]
        layers: Vec<Unit<Layer>>,
    }
    let attention = Attention { qkv: Linear::of_rows(&[4, 2, 2]), o_proj: Param::new((4, 3)) };
    let model = Model { layers: vec![Unit::new(Layer { attention, gate_up: Param::new((6, 3)) })] };
    let params = layout(&model).unwrap();
    let names: Vec<_> = params.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "model.layers.0.self_attn.qkv.weight",
            "model.layers.0.self_attn.qkv.bias",
            "model.layers.0.self_attn.o_proj",
            "model.layers.0.gate_up"
        ]
    );
    assert!(!params[0].key.requires_grad);
    assert_eq!(
        tensors(&params),
        [
            "model.layers.0.self_attn.q_proj.weight [4, 3] 0..12",
            "model.layers.0.self_attn.k_proj.weight [2, 3] 12..18",
            "model.layers.0.self_attn.v_proj.weight [2, 3] 18..24",
            "model.layers.0.self_attn.q_proj.bias [4] 0..4",
            "model.layers.0.self_attn.k_proj.bias [2] 4..6",
            "model.layers.0.self_attn.v_proj.bias [2] 6..8",
            "model.layers.0.self_attn.o_proj [4, 3] 0..12",
            "model.layers.0.mlp.gate.weight [3, 3] 0..9",
            "model.layers.0.mlp.up.weight [3, 3] 9..18",
        ]
    );
}

#[test]
fn elements_of_containers_and_contents_of_variants_are_named_inside_the_parts() {
    #[derive(FsdpUnit)]
    enum Mixer {
        Alone(#[fsdp(fused("q", "k"))] Param),
        Among(#[fsdp(fused("gate", "up"))] Option<Param>, Param),
    }
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(fused("a", "b"))]
        list: Vec<Unit<Param>>,
        #[fsdp(fused("c", "d"))]
        map: BTreeMap<String, (Param,)>,
        mixers: [Mixer; 2],
    }
    let param = || Param::new(2);
    let model = Model {
        list: vec![Unit::new(param()), Unit::new(param())],
        map: BTreeMap::from([("x".to_string(), (param(),))]),
        mixers: [Mixer::Alone(param()), Mixer::Among(Some(param()), param())],
    };
    let params = layout(&model).unwrap();
    let names: Vec<_> = params.iter().flat_map(ParamSpec::tensors).map(|tensor| tensor.name).collect();
    assert_eq!(
        names,
        [
            "a.0",
            "b.0",
            "a.1",
            "b.1",
            "c.x.0",
            "d.x.0",
            "mixers.0.q",
            "mixers.0.k",
            "mixers.1.gate",
            "mixers.1.up",
            "mixers.1.1",
        ]
    );
}

#[derive(FsdpUnit)]
struct Fused {
    #[fsdp(fused("q", "k"))]
    qk: Param,
}

#[test]
fn parts_that_the_parameter_does_not_have_are_refused() {
    let refusal = |param: Param| refusal(&Fused { qk: param });
    assert_eq!(
        refusal(Param::new((7, 3))),
        "parameter `qk`: dim 0 of its shape [7, 3] is not 2 equal parts (`q`, `k`): say the rows of each with \
         `Param::with_fused_rows`"
    );
    assert_eq!(
        refusal(Param::new((7, 3)).with_fused_rows([4, 2])),
        "parameter `qk`: was made of parts of [4, 2] rows, but dim 0 of its shape [7, 3] is 7"
    );
    assert_eq!(
        refusal(Param::new(0).with_fused_rows([usize::MAX, 1])),
        format!(
            "parameter `qk`: was made of parts of [{}, 1] rows, but dim 0 of its shape [0] is 0",
            usize::MAX
        )
    );
    assert_eq!(
        refusal(Param::new((8, 3)).with_fused_rows([4, 2, 2])),
        "parameter `qk`: was made of 3 parts, of [4, 2, 2] rows, but `fused` names 2: `q`, `k`"
    );
    assert_eq!(
        refusal(Param::new(())),
        "parameter `qk`: `qk` is declared `fused` along dim 0, but its shape [] has no dims"
    );
    let empty = Fused { qk: Param::new((3, 0)).with_fused_rows([3, 0]) };
    assert_eq!(tensors(&layout(&empty).unwrap()), ["q [3, 0] 0..0", "k [0, 0] 0..0"]);
}

#[test]
fn rows_without_names_are_refused() {
    #[derive(FsdpUnit)]
    struct Model {
        qk: Param,
    }
    assert_eq!(
        refusal(&Model { qk: Param::new(4).with_fused_rows([2, 2]) }),
        "parameter `qk`: was made of parts of [2, 2] rows, but nothing names them: write `#[fsdp(fused(..))]`"
    );
}

#[test]
fn fused_inside_fused_is_refused_with_both_fields() {
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(fused("x", "y"))]
        list: Vec<Fused>,
    }
    assert_eq!(
        refusal(&Model { list: vec![Fused { qk: Param::new(4) }] }),
        "parameter `list.0.qk`: both `list` and `list.0.qk` inside it are declared `fused`: say it once"
    );
}

#[test]
fn a_name_that_two_tensors_have_is_refused_with_both() {
    #[derive(FsdpUnit)]
    struct Plain {
        w: Param,
    }
    #[derive(FsdpUnit)]
    struct Root<T> {
        #[fsdp(rename = "y")]
        inner: T,
        #[fsdp(fused("x.w", "y.w"))]
        fused: Param,
    }
    assert_eq!(
        refusal(&Root { inner: Plain { w: Param::new(2) }, fused: Param::new(4) }),
        "parameter `fused`: its part `y.w` has the name of a parameter; rename one of the two"
    );
    #[derive(FsdpUnit)]
    struct Other {
        #[fsdp(fused("v", "w"))]
        vw: Param,
    }
    assert_eq!(
        refusal(&Root { inner: Other { vw: Param::new(2) }, fused: Param::new(4) }),
        "parameter `fused`: its part `y.w` has the name of a part of `y.vw`; rename one of the two"
    );
    #[derive(FsdpUnit)]
    struct Kept {
        #[fsdp(buffer)]
        w: Tensor,
    }
    let kept = || Kept { w: Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap() };
    assert_eq!(
        refusal(&Root { inner: kept(), fused: Param::new(4) }),
        "parameter `fused`: its part `y.w` has the name of a buffer; rename one of the two"
    );
    #[derive(FsdpUnit)]
    struct Buffers {
        #[fsdp(rename = "y")]
        inner: Kept,
        #[fsdp(buffer, rename = "y.w")]
        again: Tensor,
    }
    let buffers = Buffers { inner: kept(), again: Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap() };
    assert_eq!(refusal(&buffers), "two buffers are named `y.w`; rename one of the fields");
    #[derive(FsdpUnit)]
    struct Mixed {
        #[fsdp(rename = "y")]
        inner: Kept,
        #[fsdp(rename = "y.w")]
        param: Param,
    }
    assert_eq!(
        refusal(&Mixed { inner: kept(), param: Param::new(2) }),
        "parameter `y.w`: a buffer has this name too; rename one of the fields"
    );
    // The same inside another struct is another name.
    let inside = || Root { inner: (), fused: Param::new(4) };
    assert!(layout(&(inside(), inside())).is_ok());
}

#[test]
fn tied_parameters_are_fused_as_their_target_is() {
    #[derive(FsdpUnit)]
    struct Follows {
        first: Fused,
        #[fsdp(tie_with = "first.qk")]
        second: Param,
    }
    let model = Follows { first: Fused { qk: Param::new((4, 2)) }, second: Param::new((4, 2)) };
    let params = layout(&model).unwrap();
    assert_eq!(tensors(&params), ["first.q [2, 2] 0..4", "first.k [2, 2] 4..8"]);
    assert_eq!(params[0].aliases, ["second"]);
    assert!(params[0].tensors().iter().all(|tensor| tensor.aliases.is_empty()));

    // Clones have their parts under the names of both places.
    let qk = Param::new((4, 2)).with_fused_rows([3, 1]);
    let params = layout(&(Fused { qk: qk.clone() }, Fused { qk: qk.clone() }, qk)).unwrap();
    assert_eq!(tensors(&params), ["0.q [3, 2] 0..6", "0.k [1, 2] 6..8"]);
    let aliases: Vec<_> = params[0].tensors().into_iter().map(|tensor| tensor.aliases.to_vec()).collect();
    assert_eq!(aliases, [["1.q"], ["1.k"]]);
    assert_eq!(params[0].aliases, ["1.qk", "2"]);

    #[derive(FsdpUnit)]
    struct Module {
        w: Param,
    }
    #[derive(FsdpUnit)]
    struct Disagree {
        target: Module,
        #[fsdp(fused("x", "y"))]
        tied: Tied,
    }
    #[derive(FsdpUnit)]
    struct Tied {
        #[fsdp(tie_with = "target.w")]
        w: Param,
    }
    let module = || Module { w: Param::new(4) };
    assert_eq!(
        refusal(&Disagree { target: module(), tied: Tied { w: Param::new(4) } }),
        "parameter `tied.w`: (fused of [2, 2] rows) is tied to `target.w` (not fused): tied parameters must agree"
    );
    #[derive(FsdpUnit)]
    struct Rows {
        #[fsdp(fused("x", "y"))]
        target: Module,
        tied: Tied,
    }
    let target = Module { w: Param::new(4).with_fused_rows([3, 1]) };
    let tied = |rows: [usize; 2]| Tied { w: Param::new(4).with_fused_rows(rows) };
    assert_eq!(
        refusal(&Rows { target, tied: tied([2, 2]) }),
        "parameter `tied.w`: (fused of [2, 2] rows) is tied to `target.w` (fused of [3, 1] rows): tied parameters \
         must agree"
    );
    let target = Module { w: Param::new(4).with_fused_rows([3, 1]) };
    assert_eq!(
        tensors(&layout(&Rows { target, tied: tied([3, 1]) }).unwrap()),
        ["x.w [3] 0..3", "y.w [1] 3..4"]
    );
}

#[test]
fn ranks_that_cut_a_parameter_otherwise_are_named() {
    on_ranks(2, |world| {
        let rows = if world.rank() == 1 { [3, 1] } else { [2, 2] };
        let model = Fused { qk: Param::new((4, 2)).with_fused_rows(rows) };
        let text = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        let lines = [
            "`qk` [4, 2] f32, fused of 2 rows of `q`, 2 rows of `k`",
            "`qk` [4, 2] f32, fused of 3 rows of `q`, 1 rows of `k`",
        ];
        assert!(lines.iter().all(|line| text.contains(line)), "{text}");
        Ok(())
    });
}

#[test]
fn tensor_parallel_ranks_share_each_part() {
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(fused("gate", "up"), tp = column)]
        gate_up: Linear,
        #[fsdp(fused("x", "y"), tp = row)]
        by_rows: Param,
    }
    let mesh = |tp| Topology::new(&[("dp_shard", 2), ("tp", tp)], 2 * tp).unwrap();
    let model = |rows: &[usize]| Model { gate_up: Linear::of_rows(rows), by_rows: Param::new((2, 6)) };
    let config = FsdpConfig::default();
    let params = model(&[4, 6]).layout(&mesh(2), &config).unwrap().params;
    assert_eq!(
        tensors(&params),
        [
            "gate.weight [2, 3] 0..6",
            "up.weight [3, 3] 6..15",
            "gate.bias [2] 0..2",
            "up.bias [3] 2..5",
            "x [1, 3] 0..3",
            "y [1, 3] 3..6",
        ]
    );
    assert_eq!(
        model(&[3, 5]).layout(&mesh(2), &config).unwrap_err().to_string(),
        "parameter `gate_up.weight`: its part `gate.weight` has 3 rows, which 2 tensor-parallel ranks cannot share \
         evenly"
    );
    assert!(model(&[3, 5]).layout(&mesh(1), &config).is_ok());
}
