//! What does not fit is told, all of it, on all ranks, and nothing is changed.

use std::fmt::Write;
use std::path::Path;

use candle_core::Tensor;
use fsdp::checkpoint::{CheckpointError, Checkpoints, Contents, Restore};
use fsdp::files::Mismatch;
use fsdp::prelude::*;

#[derive(FsdpUnit)]
struct Saved {
    a: Param,
    b: Param,
    z: Param,
    size: Param,
}

#[derive(FsdpUnit)]
struct Loaded {
    a: Param,
    b: Param,
    c: Param,
    size: Param,
}

fn constant(len: usize, value: f32) -> Param {
    Param::new(len).with_init(Init::Constant(value))
}

fn save(dir: &Path) {
    launch::local(2, |world| -> fsdp::Result<()> {
        let model =
            Saved { a: constant(3, 1.0), b: constant(4, 2.0), z: constant(5, 3.0), size: constant(6, 4.0) };
        let model = model.fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(dir).save(Contents::of(&model)).map(drop)
    })
    .unwrap();
}

fn loaded(world: &fsdp::launch::World) -> fsdp::Result<Fsdp<Loaded>> {
    let model =
        Loaded { a: constant(3, 7.0), b: constant(4, 7.0), c: constant(5, 7.0), size: constant(7, 7.0) };
    model.fully_shard(&world.data_parallel_mesh())
}

fn values<M>(model: &Fsdp<M>) -> fsdp::Result<String> {
    let mut text = String::new();
    model.visit_weights(|spec, values| {
        write!(text, "{}={:?} ", spec.name, values[0]).expect("a string grows");
        assert!(values.iter().all(|value| *value == values[0]));
        Ok(())
    })?;
    Ok(text)
}

#[test]
fn a_strict_restore_lists_everything_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path());
    let errors = launch::local(3, |world| -> fsdp::Result<String> {
        let mut model = loaded(&world)?;
        let error = Checkpoints::new(dir.path()).restore_latest(Restore::new(&mut model)).unwrap_err();
        let fsdp::Error::Checkpoint(typed) = &error else { panic!("{error}") };
        let CheckpointError::Mismatch { sections, .. } = &**typed else { panic!("{error}") };
        let (section, Mismatch { missing, unexpected, shapes, dtypes, .. }) = &sections[0];
        assert_eq!((sections.len(), section.as_str()), (1, "model"));
        assert_eq!(
            (missing.as_slice(), unexpected.as_slice()),
            (&["c".to_owned()][..], &["z".to_owned()][..])
        );
        assert_eq!((shapes.len(), shapes[0].name.as_str(), dtypes.len()), (1, "size", 0));
        assert_eq!(values(&model)?, "a=7.0 b=7.0 c=7.0 size=7.0 ");
        Ok(error.to_string())
    })
    .unwrap();
    assert!(errors.iter().all(|error| *error == errors[0]));
    let text = errors[0].split_once(" does not fit:").unwrap().1;
    let expected =
        "\n model:\n  1 missing: c\n  1 unexpected: z\n  1 of another shape: size (model [7], file [6])";
    assert_eq!(text, expected);
}

#[test]
fn another_restore_loads_the_rest_and_says_what_it_left() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path());
    launch::local(3, |world| -> fsdp::Result<()> {
        let mut model = loaded(&world)?;
        let restore = Restore::new(&mut model).strict(false);
        let restored = Checkpoints::new(dir.path()).restore_latest(restore)?.unwrap();
        let (section, left) = &restored.skipped[0];
        assert_eq!(
            (section.as_str(), &left.missing[0], &left.unexpected[0]),
            ("model", &"c".into(), &"z".into())
        );
        assert_eq!(values(&model)?, "a=1.0 b=2.0 c=7.0 size=7.0 ");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_checkpoint_that_one_rank_does_not_see_is_an_error_on_all() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path());
    let elsewhere = dir.path().join("elsewhere");
    let errors = launch::local(2, |world| -> fsdp::Result<String> {
        let mut model = loaded(&world)?;
        let place = if world.rank() == 0 { dir.path() } else { &elsewhere };
        Ok(Checkpoints::new(place).restore_latest(Restore::new(&mut model)).unwrap_err().to_string())
    })
    .unwrap();
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].starts_with(&format!("rank 1: cannot open `{}", elsewhere.display())), "{}", errors[0]);
}

#[test]
fn dtypes_that_lose_bits_are_refused_or_rounded() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path();
    let narrow = MixedPrecision { main_weights: false, ..MixedPrecision::BF16 };
    let model = |world: &fsdp::launch::World, precision| {
        let config = FsdpConfig { precision, ..FsdpConfig::default() };
        constant(5, 1.0 + f32::EPSILON).fully_shard_with(&world.data_parallel_mesh(), &config)
    };
    launch::local(2, |world| -> fsdp::Result<()> {
        let (wide, store) = (model(&world, MixedPrecision::F32)?, Checkpoints::new(place));
        store.save(Contents::of(&wide))?;
        let mut narrow = model(&world, narrow)?;
        let error = store.restore_latest(Restore::new(&mut narrow)).unwrap_err().to_string();
        assert!(error.ends_with("1 of another dtype:  (model BF16, file F32)"), "{error}");
        let restored = store.restore_latest(Restore::new(&mut narrow).strict(false))?.unwrap();
        assert_eq!(restored.skipped[0].1.dtypes.len(), 1);
        // Bits are never lost by widening.
        let store = Checkpoints::new(place.join("narrow"));
        store.save(Contents::of(&narrow))?;
        let mut wide = wide;
        store.restore_latest(Restore::new(&mut wide))?.unwrap();
        Ok(())
    })
    .unwrap();
}

#[test]
fn an_optimizer_of_another_rule_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = constant(5, 1.0).fully_shard(&world.data_parallel_mesh())?;
        let (adamw, mut sgd) = (model.optimizer(AdamW::default())?, model.optimizer(Sgd::default())?);
        let store = Checkpoints::new(dir.path());
        store.save(Contents::of(&model).optimizer(&adamw))?;
        let error =
            store.restore_latest(Restore::new(&mut model).optimizer(&mut sgd)).unwrap_err().to_string();
        assert!(error.ends_with("` does not fit: its optimizer is adamw, expected sgd"), "{error}");
        // Without an optimizer, weights are restored and the rest is told.
        let restored = store.restore_latest(Restore::new(&mut model))?.unwrap();
        assert_eq!(restored.unused, ["optimizer.exp_avg", "optimizer.exp_avg_sq"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_strict_restore_lists_what_is_missing_of_an_optimizer_too() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path());
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = loaded(&world)?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        let restore = Restore::new(&mut model).optimizer(&mut optimizer);
        let error = Checkpoints::new(dir.path()).restore_latest(restore).unwrap_err().to_string();
        let (_, text) = error.split_once(" does not fit:").expect("it is one of what does not fit");
        assert!(text.starts_with("\n model:\n  1 missing: c\n"), "{text}");
        assert!(text.contains("\n optimizer.exp_avg:\n  4 missing: a, b, c, size\n"), "{text}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn what_a_checkpoint_has_not_is_left_where_that_will_do() {
    let dir = tempfile::tempdir().unwrap();
    let x = Tensor::full(3f32, 5, &candle_core::Device::Cpu).unwrap();
    let dot = |world: &fsdp::launch::World, value| {
        Dot { w: constant(5, value) }.fully_shard(&world.data_parallel_mesh())
    };
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = dot(&world, 1.0)?;
        let mut adamw = model.optimizer(AdamW::default().lr(0.25).weight_decay(0.0))?;
        let loss: Tensor = model.forward(&x)?;
        model.backward(&loss)?;
        adamw.step(&mut model)?;
        for (place, with) in [("none", false), ("adamw", true)] {
            let contents = Contents::of(&model);
            let contents = if with { contents.optimizer(&adamw) } else { contents };
            Checkpoints::new(dir.path().join(place)).save(contents)?;
        }
        Ok(())
    })
    .unwrap();
    launch::local(3, |world| -> fsdp::Result<()> {
        let (none, with) = (Checkpoints::new(dir.path().join("none")), dir.path().join("adamw"));
        let with = Checkpoints::new(with);
        let mut model = dot(&world, 7.0)?;
        let (mut adamw, mut sgd) = (model.optimizer(AdamW::default())?, model.optimizer(Sgd::default())?);
        let mut average = model.ema(0.5)?;
        average.update(&model)?;
        let lr = sgd.learning_rate();

        let restore = Restore::new(&mut model).optimizer(&mut adamw).average("ema", &mut average);
        let restored = none.restore_latest(restore.strict(false))?.unwrap();
        let left = |at: usize| {
            let (section, wrong) = &restored.skipped[at];
            (section.as_str(), wrong.missing.join(" "), wrong.unexpected.join(" "))
        };
        assert_eq!(restored.skipped.len(), 2);
        assert_eq!(left(0), ("ema", "w".into(), String::new()));
        assert_eq!(left(1), ("optimizer", "adamw".into(), String::new()));
        // The weights are those of the checkpoint, the rest is as it was.
        assert_eq!(values(&model)?, "w=0.75 ");
        assert_eq!((model.step_count(), adamw.steps(), average.updates()), (0, 0, 1));
        model.with_ema(&mut average, |model| {
            assert_eq!(values(model)?, "w=7.0 ");
            Ok(())
        })?;

        let restore = Restore::new(&mut model).optimizer(&mut sgd).strict(false);
        let restored = with.restore_latest(restore)?.unwrap();
        let (section, wrong) = &restored.skipped[0];
        assert_eq!((restored.skipped.len(), section.as_str()), (1, "optimizer"));
        assert_eq!((&wrong.missing[..], &wrong.unexpected[..]), (&["sgd".into()][..], &["adamw".into()][..]));
        assert_eq!((model.step_count(), sgd.steps(), sgd.learning_rate()), (0, 0, lr));
        assert_eq!(restored.unused, ["optimizer.exp_avg", "optimizer.exp_avg_sq"]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_save_in_the_middle_of_a_step_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let x = Tensor::ones(5, candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = Dot { w: constant(5, 1.0) }.fully_shard(&world.data_parallel_mesh())?;
        let loss: Tensor = model.forward(&x)?;
        model.backward(&loss)?;
        let error = Checkpoints::new(dir.path()).save(Contents::of(&model)).unwrap_err().to_string();
        assert!(error.contains("this step has gradients already"), "{error}");
        let mut optimizer = model.optimizer(Sgd::default())?;
        optimizer.step(&mut model)?;
        Checkpoints::new(dir.path()).save(Contents::of(&model)).map(drop)
    })
    .unwrap();
}

#[derive(FsdpUnit)]
struct Dot {
    w: Param,
}

impl Forward for Dot {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        (x * self.w.tensor(scope)?)?.sum_all()
    }
}

#[test]
fn values_that_differ_by_rank_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let model = constant(5, 1.0).fully_shard(&world.data_parallel_mesh())?;
        let contents = Contents::of(&model).value("cursor", &world.rank());
        let error = Checkpoints::new(dir.path()).save(contents).unwrap_err().to_string();
        let (rank, other) = (world.rank(), 1 - world.rank());
        let expected = format!(
            "the ranks differ: rank {rank} has to save `cursor` = {rank}; rank {other} has to save `cursor` = {other}"
        );
        assert_eq!(error, expected);
        Ok(())
    })
    .unwrap();
    assert!(Checkpoints::new(dir.path()).latest().unwrap().is_none());
}
