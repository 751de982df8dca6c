//! What a model is beyond its tensors' names and shapes: the variants of its enums, its ties, its buffers.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use fsdp::checkpoint::{Checkpoint, Checkpoints, Contents, Index, ModelDescription, Restore};
use fsdp::launch::World;
use fsdp::prelude::*;

fn constant(value: f32) -> Param {
    Param::new(5).with_init(Init::Constant(value))
}

fn save<M: FsdpUnit + Send>(dir: &Path, model: impl Fn() -> M + Sync) {
    launch::local(2, |world| -> fsdp::Result<()> {
        let model = model().fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(dir).save(Contents::of(&model)).map(drop)
    })
    .unwrap();
}

/// The first value of each parameter.
fn values<M>(model: &Fsdp<M>) -> fsdp::Result<Vec<(String, f32)>> {
    let mut all = Vec::new();
    model.visit_weights(|spec, values| {
        assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
        all.push((spec.name.clone(), values[0]));
        Ok(())
    })?;
    Ok(all)
}

/// What a restore that is refused says on all ranks, strict or verified; nothing has changed.
fn refusal<M: FsdpUnit + Send>(dir: &Path, model: impl Fn() -> M + Sync) -> String {
    let texts = launch::local(3, |world| -> fsdp::Result<String> {
        let mut model = model().fully_shard(&world.data_parallel_mesh())?;
        let before = values(&model)?;
        let store = Checkpoints::new(dir);
        let error = store.restore_latest(Restore::new(&mut model)).unwrap_err().to_string();
        let verified = store.restore_latest(Restore::new(&mut model).verified()).unwrap_err();
        assert_eq!(verified.to_string(), error);
        assert_eq!(values(&model)?, before);
        Ok(error)
    })
    .unwrap();
    assert!(texts.iter().all(|text| *text == texts[0]));
    texts[0].split_once(" does not fit:").expect("it is one of what does not fit").1.to_owned()
}

/// The values after a restore, by `how`.
fn restored<M: FsdpUnit + Send>(
    dir: &Path,
    model: impl Fn() -> M + Sync,
    how: impl Fn(Restore<'_>) -> Restore<'_> + Sync,
) -> Vec<(String, f32)> {
    let mut all = launch::local(3, |world| -> fsdp::Result<_> {
        let mut model = model().fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(dir).restore_latest(how(Restore::new(&mut model)))?.unwrap();
        values(&model)
    })
    .unwrap();
    all.swap_remove(0)
}

fn named(values: &[(&str, f32)]) -> Vec<(String, f32)> {
    values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

#[derive(FsdpUnit)]
enum Act {
    Relu { w: Param },
    Sqr { w: Param },
    Scaled(Param),
    Nested(Box<Act>),
    Identity,
    Tanh,
}

#[derive(FsdpUnit)]
struct Net {
    act: Act,
}

#[test]
fn a_restore_into_another_variant_names_both() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || Net { act: Act::Relu { w: constant(3.0) } });
    let text = refusal(dir.path(), || Net { act: Act::Sqr { w: constant(1.0) } });
    assert_eq!(text, "\n model:\n  1 of another variant: act (model Act::Sqr, file Act::Relu)");
    // Tensors of other names follow from it.
    let text = refusal(dir.path(), || Net { act: Act::Scaled(constant(1.0)) });
    assert_eq!(
        text,
        "\n model:\n  1 of another variant: act (model Act::Scaled, file Act::Relu)\n  1 missing: act\n  \
         1 unexpected: act.w"
    );
    // What fits is loaded if that is asked for, and the variant is told.
    let sqr = || Net { act: Act::Sqr { w: constant(1.0) } };
    let loaded = restored(dir.path(), sqr, |restore| restore.strict(false));
    assert_eq!(loaded, named(&[("act.w", 3.0)]));
    let same = restored(dir.path(), || Net { act: Act::Relu { w: constant(1.0) } }, |restore| restore);
    assert_eq!(same, named(&[("act.w", 3.0)]));
}

#[test]
fn checkpoints_of_other_variants_differ() {
    use fsdp_models::checkpoint::{Side, diff};
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    save(dirs[0].path(), || Net { act: Act::Relu { w: constant(3.0) } });
    save(dirs[1].path(), || Net { act: Act::Sqr { w: constant(3.0) } });
    let [a, b] = dirs.map(|dir| {
        let latest = Checkpoints::new(dir.path()).list().unwrap().pop().unwrap();
        (Side::open(&latest.path).unwrap(), dir)
    });
    let differences = diff(&a.0, &b.0, None, |_, _| ()).unwrap();
    let facts: Vec<_> = differences.facts.iter().map(|fact| (&*fact.name, &*fact.a, &*fact.b)).collect();
    assert_eq!(facts, [("variant of act", "Act::Relu", "Act::Sqr")]);
    assert!(diff(&a.0, &a.0, None, |_, _| ()).unwrap().facts.is_empty());
}

#[test]
fn what_another_restore_leaves_names_the_variant() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || Net { act: Act::Relu { w: constant(3.0) } });
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model =
            Net { act: Act::Sqr { w: constant(1.0) } }.fully_shard(&world.data_parallel_mesh())?;
        let restore = Restore::new(&mut model).strict(false);
        let restored = Checkpoints::new(dir.path()).restore_latest(restore)?.unwrap();
        let (section, wrong) = &restored.skipped[0];
        assert_eq!((restored.skipped.len(), section.as_str(), wrong.variants.len()), (1, "model", 1));
        let variant = &wrong.variants[0];
        let words = (variant.name.as_str(), variant.expected.as_str(), variant.found.as_str());
        assert_eq!(words, ("act", "Act::Sqr", "Act::Relu"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn variants_inside_of_others_and_without_parameters_count() {
    let nested = |act: Act| Net { act: Act::Nested(Box::new(act)) };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || nested(Act::Relu { w: constant(3.0) }));
    let text = refusal(dir.path(), || nested(Act::Sqr { w: constant(3.0) }));
    assert!(text.ends_with("act (model Act::Nested(Act::Sqr), file Act::Nested(Act::Relu))"), "{text}");

    // The root itself, behind a list, in a unit, and as an option: none of them has a parameter of its own.
    #[derive(FsdpUnit)]
    struct Dropout;
    #[derive(FsdpUnit)]
    struct Stack {
        w: Param,
        acts: Vec<Act>,
        last: Unit<Net>,
        dropout: Option<Dropout>,
        choice: Option<Act>,
    }
    let stack = |act: Act, last: Act, dropout: Option<Dropout>, choice: Option<Act>| {
        let (acts, last) = (vec![Act::Tanh, act], Unit::new(Net { act: last }));
        Stack { w: constant(3.0), acts, last, dropout, choice }
    };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || stack(Act::Tanh, Act::Identity, Some(Dropout), Some(Act::Tanh)));
    let text = refusal(dir.path(), || stack(Act::Identity, Act::Tanh, None, Some(Act::Identity)));
    assert_eq!(
        text,
        "\n model:\n  4 of another variant: acts.1 (model Act::Identity, file Act::Tanh), \
         choice (model Some(Act::Identity), file Some(Act::Tanh)), dropout (model nothing, file Some), \
         last.act (model Act::Tanh, file Act::Identity)"
    );
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || Act::Relu { w: constant(1.0) });
    let text = refusal(dir.path(), || Act::Sqr { w: constant(1.0) });
    assert!(text.ends_with("(root) (model Act::Sqr, file Act::Relu)"), "{text}");
}

#[derive(FsdpUnit)]
struct Tied {
    emb: Param,
    other: Param,
    #[fsdp(tie_with = "emb")]
    head: Param,
}

#[derive(FsdpUnit)]
struct Untied {
    emb: Param,
    other: Param,
    head: Param,
}

/// As [`Tied`], but the first name is another one.
#[derive(FsdpUnit)]
struct Turned {
    head: Param,
    other: Param,
    #[fsdp(tie_with = "head")]
    emb: Param,
}

#[derive(FsdpUnit)]
struct OtherTie {
    emb: Param,
    other: Param,
    #[fsdp(tie_with = "other")]
    head: Param,
}

fn tied(value: f32) -> Tied {
    Tied { emb: constant(value), other: constant(2.0), head: constant(value) }
}

fn untied(emb: f32, head: f32) -> Untied {
    Untied { emb: constant(emb), other: constant(2.0), head: constant(head) }
}

#[test]
fn a_tied_tensor_is_not_restored_into_an_untied_model_unless_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || tied(4.0));
    let text = refusal(dir.path(), || untied(7.0, 8.0));
    assert_eq!(
        text,
        "\n model:\n  1 tied otherwise: head (model not tied, file tied to `emb`)\n  1 missing: head\n \
         `Restore::untied` fills each tensor that was tied from the one that was saved"
    );
    let filled = restored(dir.path(), || untied(7.0, 8.0), |restore| restore.untied());
    assert_eq!(filled, named(&[("emb", 4.0), ("other", 2.0), ("head", 4.0)]));
    // A model that ties them needs no leave, whichever name comes first.
    let turned = || Turned { head: constant(7.0), other: constant(7.0), emb: constant(7.0) };
    let same = restored(dir.path(), turned, |restore| restore);
    assert_eq!(same, named(&[("head", 4.0), ("other", 2.0)]));
}

#[test]
fn what_was_not_tied_or_otherwise_is_refused_with_both_ties() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || untied(4.0, 5.0));
    let text = refusal(dir.path(), || tied(7.0));
    assert_eq!(
        text,
        "\n model:\n  1 tied otherwise: head (model tied to `emb`, file not tied)\n  1 unexpected: head"
    );
    // The tensors are the same ones.
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || tied(4.0));
    let other = || OtherTie { emb: constant(7.0), other: constant(7.0), head: constant(7.0) };
    let text = refusal(dir.path(), other);
    let line = "\n model:\n  1 tied otherwise: head (model tied to `other`, file tied to `emb`)";
    assert_eq!(text, line);
}

/// `sum(x * (emb + 10 other + 100 head))`.
impl Forward for Tied {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        let (emb, other) = (self.emb.tensor(scope)?, self.other.tensor(scope)?);
        let sum = (emb + (other * 10.0)?)? + (self.head.tensor(scope)? * 100.0)?;
        (x * sum?)?.sum_all()
    }
}

#[test]
fn the_state_of_the_optimizer_is_untied_with_the_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let x = Tensor::ones(5, DType::F32, &Device::Cpu).unwrap();
    launch::local(2, |world| -> fsdp::Result<()> {
        let mut model = tied(4.0).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.5).momentum(0.25))?;
        let loss: Tensor = model.forward(&x)?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        Checkpoints::new(dir.path()).save(Contents::of(&model).optimizer(&optimizer)).map(drop)
    })
    .unwrap();
    let saved = |world: World| -> fsdp::Result<()> {
        let mut model = untied(7.0, 8.0).fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.5).momentum(0.25))?;
        let restore = Restore::new(&mut model).optimizer(&mut optimizer).untied();
        Checkpoints::new(dir.path()).restore_latest(restore)?.unwrap();
        let again = dir.path().join("again");
        let path = Checkpoints::new(again).save(Contents::of(&model).optimizer(&optimizer))?;
        let again = Checkpoint::open(path)?;
        // The gradient was 1 + 100.
        let section = again.index().tensors.keys().find(|name| name.starts_with("optimizer.")).unwrap();
        for (name, expected) in [("emb", 101.0), ("other", 10.0), ("head", 101.0)] {
            let mut values = [0.0; 5];
            again.read_f32(section, name, 0, &mut values)?;
            assert_eq!(values, [expected; 5], "{section} of {name}");
        }
        Ok(())
    };
    launch::local(2, saved).unwrap();
}

#[test]
fn a_buffer_and_a_parameter_of_one_name_are_not_the_same() {
    #[derive(FsdpUnit)]
    struct WithBuffer {
        #[fsdp(buffer)]
        w: Tensor,
    }
    #[derive(FsdpUnit)]
    struct WithParam {
        w: Param,
    }
    let buffer = || WithBuffer { w: Tensor::full(3f32, 5, &Device::Cpu).unwrap() };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), buffer);
    let text = refusal(dir.path(), || WithParam { w: constant(1.0) });
    assert_eq!(text, "\n model:\n  1 of another kind: w (model parameter, file buffer)");
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || WithParam { w: constant(1.0) });
    let text = refusal(dir.path(), buffer);
    assert_eq!(text, "\n model:\n  1 of another kind: w (model buffer, file parameter)");
}

#[test]
fn the_index_says_what_the_model_is() {
    #[derive(FsdpUnit)]
    struct All {
        tied: Tied,
        act: Option<Act>,
        none: Option<Param>,
        #[fsdp(buffer)]
        mean: Tensor,
    }
    let all = || All {
        tied: tied(1.0),
        act: Some(Act::Nested(Box::new(Act::Tanh))),
        none: None,
        mean: Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap(),
    };
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), all);
    let index = Index::read(Checkpoints::new(dir.path()).latest().unwrap().unwrap()).unwrap();
    let text = |text: &str| text.to_owned();
    let expected = ModelDescription {
        variants: [(text("act"), text("Some(Act::Nested(Act::Tanh))"))].into(),
        ties: [(text("tied.head"), text("tied.emb"))].into(),
        buffers: [text("mean")].into(),
    };
    assert_eq!((index.version(), index.model), (2, Some(expected)));
}

/// Rewrites the index of the only checkpoint, with the right checksum.
fn rewrite(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = Checkpoints::new(dir).latest().unwrap().unwrap().join("index.json");
    let mut index: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index.as_object_mut().unwrap().remove("crc32");
    change(&mut index);
    let text = serde_json::to_string_pretty(&index).unwrap();
    let body = text.strip_suffix("\n}").unwrap();
    let checksum = crc32fast::hash(body.as_bytes());
    std::fs::write(path, format!("{body},\n  \"crc32\": \"{checksum:08x}\"\n}}\n")).unwrap();
}

#[test]
fn a_checkpoint_of_the_first_version_is_restored_by_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), || Net { act: Act::Relu { w: constant(3.0) } });
    rewrite(dir.path(), |index| {
        index["version"] = 1.into();
        index.as_object_mut().unwrap().remove("model");
    });
    let loaded = restored(dir.path(), || Net { act: Act::Relu { w: constant(1.0) } }, |restore| restore);
    assert_eq!(loaded, named(&[("act.w", 3.0)]));
    // Not of a version that has one.
    rewrite(dir.path(), |index| index["version"] = 2.into());
    let error = Checkpoint::open(Checkpoints::new(dir.path()).latest().unwrap().unwrap()).unwrap_err();
    let error = error.to_string();
    assert!(error.ends_with("it does not describe its model, which version 2 does"), "{error}");
}

#[test]
fn an_index_with_an_entry_that_is_not_known_is_refused_by_name() {
    for place in ["", "/model", "/written_by", "/tensors/model/act.w"] {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), || Net { act: Act::Relu { w: constant(3.0) } });
        rewrite(dir.path(), |index| {
            index.pointer_mut(place).unwrap()["quantised"] = "int4".into();
        });
        let error = Checkpoint::open(Checkpoints::new(dir.path()).latest().unwrap().unwrap()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("unknown field `quantised`"), "{place}: {error}");
    }
}
