//! What went wrong for others with checkpoints, with the values that are right; tests/README.md lists them.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fsdp::checkpoint::{Checkpoint, Checkpoints, Contents, Restore};
use fsdp::launch::World;
use fsdp::prelude::*;
use fsdp_test_support::{assert_close, relative};

/// The loss is `sum_i w_i * x_i`, so that dloss/dw = x.
#[derive(FsdpUnit)]
struct Dot {
    w: Param,
}

impl Dot {
    fn new(len: usize, value: f32) -> Unit<Dot> {
        Unit::new(Dot { w: Param::new(len).with_init(Init::Constant(value)) })
    }
}

impl Forward for Dot {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        let w = self.w.tensor(scope)?;
        (x.to_dtype(w.dtype())? * w)?.to_dtype(DType::F32)?.sum_all()
    }
}

#[derive(FsdpUnit)]
struct Dots {
    dot: Unit<Dot>,
}

impl Forward for Dots {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        self.dot.forward(x, &(), scope)
    }
}

fn full(len: usize, value: f32) -> Tensor {
    Tensor::full(value, len, &Device::Cpu).unwrap()
}

fn dots(world: &World, len: usize, value: f32) -> fsdp::Result<Fsdp<Dots>> {
    Dots { dot: Dot::new(len, value) }.fully_shard(&world.data_parallel_mesh())
}

fn weights<M>(model: &Fsdp<M>) -> fsdp::Result<BTreeMap<String, Vec<f32>>> {
    let mut all = BTreeMap::new();
    model.visit_weights(|spec, values| {
        all.insert(spec.name.clone(), values.to_vec());
        Ok(())
    })?;
    Ok(all)
}

fn step<O: fsdp::optim::Optimizer, M: Forward>(
    model: &mut Fsdp<M>,
    optimizer: &mut ShardedOptimizer<O>,
    x: &Tensor,
) -> fsdp::Result<()> {
    let loss: Tensor = model.forward(x)?;
    model.backward(&loss)?;
    optimizer.step(model)?;
    Ok(())
}

fn adam() -> AdamW {
    AdamW::default().lr(1e-3).betas(0.9, 0.999).eps(1e-8).weight_decay(0.0)
}

/// More ranks than elements, and back to one.
#[test]
fn more_ranks_than_elements() {
    let dir = tempfile::tempdir().unwrap();
    let single = launch::local(1, |world| train_three(&world, 3.5, None)).unwrap().remove(0);
    let mut many =
        launch::local(8, |world| train_three(&world, world.rank() as f32, Some(dir.path()))).unwrap();
    let many = many.remove(0);
    assert_close(&many, &single, relative(1e-6), "8 ranks");
    let loaded = launch::local(1, |world| -> fsdp::Result<_> {
        let mut model = dots(&world, 3, 9.0)?;
        let mut optimizer = model.optimizer(adam())?;
        let restore = Restore::new(&mut model).optimizer(&mut optimizer);
        Checkpoints::new(dir.path()).restore_latest(restore)?.unwrap();
        Ok(weights(&model)?.remove("dot.w").unwrap())
    })
    .unwrap();
    assert_eq!(loaded[0], many);
}

fn train_three(world: &World, x: f32, save: Option<&Path>) -> fsdp::Result<Vec<f32>> {
    let mut model = dots(world, 3, 0.0)?;
    let mut optimizer = model.optimizer(adam())?;
    for _ in 0..3 {
        let loss: Tensor = model.forward(&full(3, x))?;
        model.backward(&loss)?;
        model.clip_grad_norm(1.0)?;
        optimizer.step(&mut model)?;
    }
    if let Some(dir) = save {
        Checkpoints::new(dir).save(Contents::of(&model).optimizer(&optimizer))?;
    }
    Ok(weights(&model)?.remove("dot.w").unwrap())
}

/// The parts of a tensor tile it, also where ranks do not divide it or outnumber its elements.
#[test]
fn parts_tile_their_tensor() {
    type Part = (usize, usize);
    let parts = |len: usize, ranks: usize, alignment: ShardAlignment| -> Vec<Part> {
        let dir = tempfile::tempdir().unwrap();
        launch::local(ranks, |world| -> fsdp::Result<()> {
            let config = FsdpConfig { alignment, ..FsdpConfig::default() };
            let dots = Dots { dot: Dot::new(len, 1.0) };
            let model = dots.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            Checkpoints::new(dir.path()).save(Contents::of(&model)).map(drop)
        })
        .unwrap();
        let checkpoint = Checkpoint::open(dir.path().join("step-00000000")).unwrap();
        let parts = &checkpoint.tensor("model", "dot.w").unwrap().parts;
        parts.iter().map(|part| (part.start, part.len)).collect()
    };
    let tiles: [(usize, usize, &[Part]); 4] = [
        (7, 3, &[(0, 3), (3, 3), (6, 1)]),
        (5, 2, &[(0, 3), (3, 2)]),
        (3, 8, &[(0, 1), (1, 1), (2, 1)]),
        (10, 4, &[(0, 3), (3, 3), (6, 3), (9, 1)]),
    ];
    for (len, ranks, expected) in tiles {
        assert_eq!(parts(len, ranks, ShardAlignment::Row), expected, "{len} elements on {ranks} ranks");
        // Here shards are of 64 bytes at least.
        assert_eq!(parts(len, ranks, ShardAlignment::Element), [(0, len)]);
    }
    assert_eq!(parts(40, 3, ShardAlignment::Element), [(0, 16), (16, 16), (32, 8)]);
}

/// Padding is in no file, and no NaN of it anywhere.
#[test]
fn padding_is_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let norms = launch::local(4, |world| -> fsdp::Result<f64> {
        let config = FsdpConfig { poison: true, ..FsdpConfig::default() };
        let mut model =
            Dots { dot: Dot::new(10, 0.0) }.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = model.optimizer(adam())?;
        let mut first = None;
        for _ in 0..3 {
            let loss: Tensor = model.forward(&full(10, 1.0))?;
            model.backward(&loss)?;
            first.get_or_insert(model.clip_grad_norm(1.0)?);
            optimizer.step(&mut model)?;
        }
        Checkpoints::new(dir.path()).save(Contents::of(&model).optimizer(&optimizer))?;
        Ok(first.expect("there were steps"))
    })
    .unwrap();
    assert_close(&norms[0], &10f64.sqrt(), relative(1e-7), "the norm");
    let checkpoint = Checkpoint::open(dir.path().join("step-00000003")).unwrap();
    for section in ["model", "optimizer.exp_avg", "optimizer.exp_avg_sq"] {
        let parts = &checkpoint.tensor(section, "dot.w").unwrap().parts;
        assert_eq!(parts.iter().map(|part| part.len).sum::<usize>(), 10);
        let mut values = [f32::NAN; 10];
        checkpoint.read_f32(section, "dot.w", 0, &mut values).unwrap();
        assert!(values.iter().all(|value| value.is_finite() && *value == values[0]));
    }
    // Header and 3 x 10 f32, nothing else.
    let bytes: u64 = checkpoint.index().files.iter().map(|file| file.bytes).sum();
    let headers: u64 = std::fs::read_dir(checkpoint.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .map(|path| 8 + u64::from_le_bytes(std::fs::read(path).unwrap()[..8].try_into().unwrap()))
        .sum();
    assert_eq!(bytes - headers, 3 * 10 * 4);
}

/// Main weights are not rebuilt from rounded ones.
#[test]
fn main_weights_come_back_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let config = FsdpConfig { precision: MixedPrecision::BF16, ..FsdpConfig::default() };
    let model =
        |world: &World| Dots { dot: Dot::new(1, 1.0) }.fully_shard_with(&world.data_parallel_mesh(), &config);
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = model(&world)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
        step(&mut model, &mut optimizer, &full(1, f32::powi(2.0, -9)))?;
        Checkpoints::new(dir.path()).save(Contents::of(&model).optimizer(&optimizer)).map(drop)
    })
    .unwrap();
    for ranks in [1, 2, 3] {
        let read = launch::local(ranks, |world| -> fsdp::Result<u32> {
            let mut model = model(&world)?;
            Checkpoints::new(dir.path()).restore_latest(Restore::new(&mut model))?.unwrap();
            Ok(weights(&model)?["dot.w"][0].to_bits())
        });
        assert_eq!(read.unwrap(), vec![0x3F7F_8000; ranks]);
    }
}

/// Moments and step go on, in an optimizer that has never stepped.
#[test]
fn the_sixth_step_is_that_of_an_uninterrupted_run() {
    let dir = tempfile::tempdir().unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = dots(&world, 4, 0.0)?;
        let mut optimizer = model.optimizer(adam())?;
        for _ in 0..5 {
            step(&mut model, &mut optimizer, &full(4, 4.0))?;
        }
        Checkpoints::new(dir.path()).save(Contents::of(&model).optimizer(&optimizer)).map(drop)
    })
    .unwrap();
    for ranks in [1, 2, 3] {
        launch::local(ranks, |world| -> fsdp::Result<()> {
            let mut model = dots(&world, 4, 7.0)?;
            let mut optimizer = model.optimizer(adam())?;
            let restore = Restore::new(&mut model).optimizer(&mut optimizer);
            Checkpoints::new(dir.path()).restore_latest(restore)?.unwrap();
            let before = weights(&model)?;
            step(&mut model, &mut optimizer, &full(4, 1.0))?;
            let after = weights(&model)?;
            let pairs = before["dot.w"].iter().zip(&after["dot.w"]);
            let updates: Vec<f32> = pairs.map(|(before, after)| before - after).collect();
            assert_close(&updates, &vec![9.146_172e-4; 4], relative(1e-5), "updates");
            Ok(())
        })
        .unwrap();
    }
}

#[derive(FsdpUnit)]
struct Optional {
    always: Param,
    sometimes: Option<Unit<Dot>>,
}

/// What is there only on one side is told.
#[test]
fn an_optional_module_that_is_missing_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let model = |sometimes: Option<f32>| Optional {
        always: Param::new(2).with_init(Init::Zeros),
        sometimes: sometimes.map(|value| Dot::new(3, value)),
    };
    launch::local(2, |world| -> fsdp::Result<()> {
        let mesh = world.data_parallel_mesh();
        let (with, without) = (dir.path().join("with"), dir.path().join("without"));
        let (with, without) = (Checkpoints::new(with), Checkpoints::new(without));
        with.save(Contents::of(&model(Some(5.0)).fully_shard(&mesh)?))?;
        without.save(Contents::of(&model(None).fully_shard(&mesh)?))?;

        let mut some = model(Some(0.0)).fully_shard(&mesh)?;
        with.restore_latest(Restore::new(&mut some))?.unwrap();
        assert_eq!(weights(&some)?["sometimes.w"], [5.0; 3]);
        let mut none = model(None).fully_shard(&mesh)?;
        let error = with.restore_latest(Restore::new(&mut none)).unwrap_err().to_string();
        assert!(error.ends_with("1 unexpected: sometimes.w"), "{error}");
        let mut three = model(Some(3.0)).fully_shard(&mesh)?;
        let error = without.restore_latest(Restore::new(&mut three)).unwrap_err().to_string();
        assert!(error.ends_with("1 missing: sometimes.w"), "{error}");
        let restored = without.restore_latest(Restore::new(&mut three).strict(false))?.unwrap();
        assert_eq!(restored.skipped[0].1.missing, ["sometimes.w"]);
        assert_eq!(weights(&three)?["sometimes.w"], [3.0; 3]);
        Ok(())
    })
    .unwrap();
}

#[derive(FsdpUnit)]
struct Tied {
    emb: Param,
    #[fsdp(tie_with = "emb")]
    head: Param,
}

impl Forward for Tied {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        let (emb, head) = (self.emb.tensor(scope)?, self.head.tensor(scope)?);
        ((x * emb)?.tanh()? * head)?.sum_all()
    }
}

/// A tie holds after a load and at another number of ranks, with one slot and one summed gradient.
#[test]
fn ties_survive_a_load() {
    let dir = tempfile::tempdir().unwrap();
    let config = FsdpConfig { seed: 7, ..FsdpConfig::default() };
    let run = |ranks: usize, steps: std::ops::Range<usize>, restore: bool, save: bool| {
        launch::local(ranks, |world| -> fsdp::Result<Vec<f32>> {
            let tied = Tied { emb: Param::new(6), head: Param::new(6) };
            let mut model = tied.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(adam())?;
            let store = Checkpoints::new(dir.path());
            if restore {
                store.restore_latest(Restore::new(&mut model).optimizer(&mut optimizer))?.unwrap();
            }
            for _ in steps.clone() {
                step(&mut model, &mut optimizer, &full(6, 0.7))?;
            }
            if save {
                store.save(Contents::of(&model).optimizer(&optimizer))?;
            }
            assert_eq!(model.layout().params.len(), 1);
            Ok(weights(&model)?.remove("emb").unwrap())
        })
        .unwrap()
        .remove(0)
    };
    let whole = run(2, 0..4, false, false);
    run(2, 0..3, false, true);
    let resumed = run(3, 3..4, true, false);
    assert_close(&resumed, &whole, relative(1e-6), "resumed");
    let stored = Checkpoint::open(dir.path().join("step-00000003")).unwrap();
    assert_eq!(stored.index().tensors["model"].keys().collect::<Vec<_>>(), ["emb"]);
}

#[derive(FsdpUnit)]
struct Adapted {
    #[fsdp(dtype = "bf16", frozen)]
    base: Param,
    #[fsdp(dtype = "f32")]
    lora: Param,
}

impl Forward for Adapted {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        let base = self.base.tensor(scope)?.to_dtype(DType::F32)?;
        x.matmul(&base)?.matmul(&self.lora.tensor(scope)?)?.sum_all()
    }
}

/// Each parameter keeps its dtype.
#[test]
fn a_base_in_bf16_and_adapters_in_f32_are_saved_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let adapted = Adapted { base: Param::new((4, 4)), lora: Param::new((4, 2)) };
        let mut model = adapted.fully_shard(&world.data_parallel_mesh())?;
        let before = weights(&model)?.remove("base");
        let mut optimizer = model.optimizer(adam())?;
        let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
        step(&mut model, &mut optimizer, &x)?;
        assert_eq!(weights(&model)?.remove("base"), before);
        Checkpoints::new(dir.path()).save(Contents::of(&model).optimizer(&optimizer)).map(drop)
    })
    .unwrap();
    let stored = Checkpoint::open(dir.path().join("step-00000001")).unwrap();
    let dtype = |name| stored.tensor("model", name).unwrap().dtype.name();
    assert_eq!((dtype("base"), dtype("lora")), ("BF16", "F32"));
    assert!(stored.tensor("optimizer.exp_avg", "base").is_err());
}

#[derive(FsdpUnit)]
struct Raw {
    r#type: Param,
    r#normal: Param,
}

#[derive(FsdpUnit)]
struct Plain {
    r#type: Param,
    normal: Param,
}

/// Raw identifiers are saved without their prefix.
#[test]
fn raw_identifiers_are_plain_names() {
    let dir = tempfile::tempdir().unwrap();
    let store = Checkpoints::new(dir.path());
    launch::local(2, |world| -> fsdp::Result<()> {
        let mesh = world.data_parallel_mesh();
        store.save(Contents::of(
            &Raw { r#type: Param::new(3), r#normal: Param::new(2) }.fully_shard(&mesh)?,
        ))?;
        let mut plain = Plain { r#type: Param::new(3), normal: Param::new(2) }.fully_shard(&mesh)?;
        store.restore_latest(Restore::new(&mut plain)).map(drop)
    })
    .unwrap();
    let path = store.latest().unwrap().unwrap();
    let names: Vec<String> =
        Checkpoint::open(path).unwrap().index().tensors["model"].keys().cloned().collect();
    assert_eq!(names, ["normal", "type"]);
}
