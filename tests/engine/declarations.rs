//! What is declared of a parameter against what the model is at run time: shapes, tensor-parallel dims,
//! trainability, initial values, variants.

use candle_core::{Result, Tensor};
use fsdp::mesh::Topology;
use fsdp::prelude::*;
use fsdp::spec::TpPlacement;

use crate::fixtures::{Two, config, full, gradients, named, on_ranks, weights};

#[derive(FsdpUnit)]
struct Linear<const IN: usize, const OUT: usize> {
    #[fsdp(shape = [OUT, IN])]
    weight: Param,
    bias: Param,
}

impl<const IN: usize, const OUT: usize> Linear<IN, OUT> {
    fn new() -> Self {
        Linear { weight: Param::new((OUT, IN)), bias: Param::new(OUT).with_init(Init::Zeros) }
    }
}

#[test]
fn a_shape_that_was_declared_otherwise_is_refused_with_both() {
    #[derive(FsdpUnit)]
    struct Model {
        layers: Vec<Unit<Linear<2, 4>>>,
    }
    on_ranks(2, |world| {
        let swapped = Linear { weight: Param::new((2, 4)), bias: Param::new(4) };
        let model = Model { layers: vec![Unit::new(Linear::new()), Unit::new(swapped)] };
        let text = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        assert_eq!(
            text,
            "parameter `layers.1.weight`: its declared shape is [4, 2], but it was made with [2, 4]"
        );
        Ok(())
    });
}

#[derive(FsdpUnit)]
struct Mlp {
    #[fsdp(tp = column)]
    up: Linear<6, 8>,
    #[fsdp(tp = row)]
    down: Linear<8, 6>,
    #[fsdp(tp = replicate)]
    gate: Linear<6, 1>,
    norm: Param,
    #[fsdp(tp = dim(2))]
    heads: Param,
}

fn mlp(heads: &[usize]) -> Mlp {
    Mlp {
        up: Linear::new(),
        down: Linear::new(),
        gate: Linear::new(),
        norm: Param::new(6),
        heads: Param::new(heads),
    }
}

#[test]
fn a_layout_is_of_the_parts_that_tensor_parallel_ranks_hold() {
    let mesh = Topology::new(&[("dp_shard", 2), ("tp", 4)], 8).unwrap();
    let layout = mlp(&[1, 2, 12]).layout(&mesh, &FsdpConfig::default()).unwrap();
    let of = |name: &str| layout.params.iter().find(|spec| spec.name == name).unwrap();
    /// Name, dims of the whole and of the part, the dim that is cut.
    type Cut<'a> = (&'a str, &'a [usize], &'a [usize], Option<usize>);
    let cases: [Cut<'_>; 8] = [
        ("up.weight", &[8, 6], &[2, 6], Some(0)),
        ("up.bias", &[8], &[2], Some(0)),
        ("down.weight", &[6, 8], &[6, 2], Some(1)),
        ("down.bias", &[6], &[6], None),
        ("gate.weight", &[1, 6], &[1, 6], None),
        ("gate.bias", &[1], &[1], None),
        ("norm", &[6], &[6], None),
        ("heads", &[1, 2, 12], &[1, 2, 3], Some(2)),
    ];
    for (name, whole, part, dim) in cases {
        let spec = of(name);
        assert_eq!(spec.shape, part, "{name}");
        assert_eq!(spec.full_shape(), whole, "{name}");
        assert_eq!(spec.partition_dim(), dim, "{name}");
        assert_eq!(spec.is_replicated(), dim.is_none(), "{name}");
        assert_eq!(
            layout.item_of(layout.params.iter().position(|p| p.name == name).unwrap()).len,
            spec.numel()
        );
    }
    assert_eq!(of("down.bias").tp, Some(TpPlacement::Replicate));
    assert_eq!(layout.buckets[0].ranks, 2);
}

#[test]
fn a_dim_that_tensor_parallel_ranks_cannot_share_is_named() {
    let mesh = Topology::new(&[("dp_shard", 2), ("tp", 4)], 8).unwrap();
    let error = |heads: &[usize]| mlp(heads).layout(&mesh, &FsdpConfig::default()).unwrap_err().to_string();
    assert_eq!(
        error(&[1, 2, 10]),
        "parameter `heads`: `tp = dim(2)` cuts dim 2 of its shape [1, 2, 10], but 10 cannot be shared evenly by the \
         4 tensor-parallel ranks of mesh dp_shard=2 x tp=4"
    );
    assert_eq!(
        error(&[12, 4]),
        "parameter `heads`: `tp = dim(2)` cuts dim 2, which its shape [12, 4] does not have"
    );
    // The dim must exist even where nothing is cut yet.
    let text = mlp(&[12]).layout(&Topology::new(&[("dp_shard", 1)], 1).unwrap(), &FsdpConfig::default());
    assert!(text.unwrap_err().to_string().contains("which its shape [12] does not have"));
}

#[test]
fn tied_parameters_are_cut_alike() {
    #[derive(FsdpUnit)]
    struct Tied {
        #[fsdp(tp = column)]
        embed: Param,
        #[fsdp(tp = row, tie_with = "embed")]
        head: Param,
    }
    let tied = Tied { embed: Param::new((4, 4)), head: Param::new((4, 4)) };
    let mesh = Topology::new(&[("tp", 2)], 2).unwrap();
    assert_eq!(
        tied.layout(&mesh, &FsdpConfig::default()).unwrap_err().to_string(),
        "parameter `head`: (f32, tp = row) is tied to `embed` (f32, tp = column): tied parameters must agree"
    );
}

/// `frozen * x + free * x`, both vectors.
#[derive(FsdpUnit)]
struct Half {
    #[fsdp(frozen, init = constant(2.0))]
    frozen: Param,
    #[fsdp(init = zeros)]
    free: Param,
}

impl Forward for Half {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        ((self.frozen.tensor(scope)? + self.free.tensor(scope)?)? * x)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct Halves {
    first: Unit<Half>,
    second: Unit<Half>,
}

impl Halves {
    fn new() -> Halves {
        let half = || Unit::new(Half { frozen: Param::new(3), free: Param::new(3) });
        Halves { first: half(), second: half() }
    }
}

impl Forward for Halves {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.first.forward(x, &(), scope)? + self.second.forward(x, &(), scope)?
    }
}

#[test]
fn what_is_trainable_can_be_said_at_run_time() {
    on_ranks(2, |world| {
        let halves = Halves::new();
        halves.set_requires_grad(false)?;
        halves.second.frozen.set_requires_grad(true)?;
        let model = halves.fully_shard(&world.data_parallel_mesh())?;
        let loss: Tensor = model.forward(&full(3, 5.0))?;
        model.backward(&loss)?;
        assert_eq!(gradients(&model)?, named(&[("second.frozen", &[5.0; 3])]));
        let error = model.module().first.free.set_requires_grad(true).unwrap_err().to_string();
        assert!(error.contains("`first.free`") && error.contains("before `fully_shard`"), "{error}");
        Ok(())
    });
    // As declared, if nobody says otherwise.
    on_ranks(2, |world| {
        let model = Halves::new().fully_shard(&world.data_parallel_mesh())?;
        let loss: Tensor = model.forward(&full(3, 5.0))?;
        model.backward(&loss)?;
        assert_eq!(gradients(&model)?, named(&[("first.free", &[5.0; 3]), ("second.free", &[5.0; 3])]));
        Ok(())
    });
}

#[test]
fn initial_values_are_those_of_the_innermost_attribute() {
    #[derive(FsdpUnit)]
    struct Model {
        #[fsdp(init = constant(7.0))]
        inner: Half,
        #[fsdp(init = ones)]
        layers: [Linear<1, 2>; 1],
    }
    on_ranks(2, |world| {
        let inner = Half { frozen: Param::new(2).with_init(Init::Ones), free: Param::new(2) };
        let model = Model { inner, layers: [Linear::new()] }
            .fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::OptimGradsParams))?;
        let expected: [(&str, &[f32]); 4] = [
            ("inner.frozen", &[2.0, 2.0]),
            ("inner.free", &[0.0, 0.0]),
            ("layers.0.weight", &[1.0, 1.0]),
            ("layers.0.bias", &[1.0, 1.0]),
        ];
        assert_eq!(weights(&model)?, named(&expected));
        Ok(())
    });
}

#[test]
fn ranks_with_other_variants_of_the_same_layout_learn_it() {
    #[derive(FsdpUnit)]
    enum Activation {
        Gelu(Param),
        Relu(Param),
    }
    #[derive(FsdpUnit)]
    struct Model {
        two: Two,
        mlp: Option<Activation>,
    }
    on_ranks(2, |world| {
        let scale = Param::new(4);
        let mlp = if world.rank() == 0 { Activation::Gelu(scale) } else { Activation::Relu(scale) };
        let model = Model { two: Two::zeros(2), mlp: Some(mlp) };
        let text = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        assert!(text.contains("`mlp` is the variant `Activation::Gelu`"), "{text}");
        assert!(text.contains("`mlp` is the variant `Activation::Relu`"), "{text}");
        Ok(())
    });
}

#[test]
fn ranks_that_tie_otherwise_or_lack_an_optional_module_learn_it() {
    #[derive(FsdpUnit)]
    struct Three {
        a: Param,
        b: Param,
        c: Param,
    }
    #[derive(FsdpUnit)]
    struct Dropout;
    #[derive(FsdpUnit)]
    struct Model {
        // All of a tie is in one unit: the layout is the same.
        three: Unit<Three>,
        dropout: Option<Dropout>,
    }
    let build = |of_b: bool, dropout: Option<Dropout>| {
        let (a, b) = (Param::new(4), Param::new(4));
        let c = if of_b { b.clone() } else { a.clone() };
        Model { three: Unit::new(Three { a, b, c }), dropout }
    };
    on_ranks(2, |world| {
        let (mesh, second) = (world.data_parallel_mesh(), world.rank() == 1);
        let text = build(second, None).fully_shard(&mesh).unwrap_err().to_string();
        assert!(text.contains("`three.c` is tied to `three.a`"), "{text}");
        assert!(text.contains("`three.c` is tied to `three.b`"), "{text}");
        let text = build(false, second.then_some(Dropout)).fully_shard(&mesh).unwrap_err().to_string();
        assert!(text.contains("`dropout` is the variant `None`"), "{text}");
        assert!(text.contains("`dropout` is the variant `Some`"), "{text}");
        Ok(())
    });
}

#[test]
fn a_parameter_cannot_be_tied_to_itself_but_may_be_a_clone_of_its_target() {
    #[derive(FsdpUnit)]
    struct Inner {
        w: Param,
    }
    #[derive(FsdpUnit)]
    struct ByPath {
        #[fsdp(tie_with = "inner.w")]
        inner: Inner,
    }
    #[derive(FsdpUnit)]
    struct Clones {
        #[fsdp(tie_with = "second")]
        first: Param,
        second: Param,
    }
    let mesh = Topology::new(&[("dp_shard", 2)], 2).unwrap();
    let config = FsdpConfig::default();
    // Tied to `inner.w.w`, which does not exist.
    let text = ByPath { inner: Inner { w: Param::new(4) } }.layout(&mesh, &config).unwrap_err().to_string();
    assert!(text.contains("tied to a parameter that does not exist"), "{text}");
    let param = Param::new(4);
    let layout = Clones { first: param.clone(), second: param }.layout(&mesh, &config).unwrap();
    assert_eq!(layout.params.len(), 1);
    let layout = Clones { first: Param::new(4), second: Param::new(4) }.layout(&mesh, &config).unwrap();
    assert_eq!((layout.params.len(), layout.params[0].name.as_str()), (1, "second"));
}

#[test]
fn a_parameter_that_differs_between_ranks_is_named_itself() {
    #[derive(FsdpUnit)]
    struct Model {
        first: Param,
        rest: Vec<Param>,
    }
    on_ranks(2, |world| {
        let model = Model { first: Param::new((4, 4)), rest: vec![Param::new((4, 4 + world.rank()))] };
        let text = model.fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        assert!(text.contains("`rest.0` [4, 4] f32") && text.contains("`rest.0` [4, 5] f32"), "{text}");
        Ok(())
    });
}

#[test]
fn a_rank_that_fails_alone_is_named_by_the_others() {
    on_ranks(3, |world| {
        let init = if world.rank() == 1 { Init::Normal { mean: 0.0, std: -1.0 } } else { Init::Zeros };
        let model = Half { frozen: Param::new(2), free: Param::new(2) };
        let other = Param::new(2).with_init(init);
        let text = (model, other).fully_shard(&world.data_parallel_mesh()).unwrap_err().to_string();
        let wrong = "parameter `1`: its initial value Normal { mean: 0.0, std: -1.0 } has a negative standard deviation";
        match world.rank() {
            1 => assert_eq!(text, wrong),
            rank => assert_eq!(text, format!("rank {rank}: rank 1 failed: {wrong}")),
        }
        Ok(())
    });
}
