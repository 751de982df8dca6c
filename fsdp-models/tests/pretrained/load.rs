//! Weights of Hugging Face's directories into the shards.

use std::fs;
use std::path::Path;

use candle_core::Tensor;
use fsdp::prelude::*;
use fsdp_models::pretrained::{LoadReport, Pretrained, SaveOptions, Strictness, Weights, save_pretrained};
use fsdp_models::{Llama, LlamaConfig};
use safetensors::Dtype as Stored;

use super::fixtures::{
    Tensors, assert_same, config, gathered, tensors, values, write_config, write_indexed, write_single,
    write_tensors,
};

/// What each rank has after a load, the same on all.
fn loaded(dir: &Path, ranks: usize, fsdp: &FsdpConfig) -> Tensors {
    let mut all = launch::local(ranks, |world| -> fsdp_models::Result<Tensors> {
        let model = Llama::from_pretrained(dir, &world.data_parallel_mesh(), fsdp)?;
        Ok(gathered(&model))
    })
    .unwrap();
    let last = all.pop().unwrap();
    all.iter().for_each(|other| assert_same(other, &last));
    last
}

#[test]
fn each_rank_gets_its_part_of_every_kind_of_directory() {
    for tied in [false, true] {
        let config = config(tied);
        let expected = tensors(&config);
        for dtype in [Stored::F32, Stored::BF16, Stored::F16, Stored::F64] {
            let dir = tempfile::tempdir().unwrap();
            write_single(dir.path(), &config, &expected, dtype);
            for ranks in 1..=3 {
                assert_same(&loaded(dir.path(), ranks, &FsdpConfig::default()), &expected);
            }
            let dir = tempfile::tempdir().unwrap();
            write_indexed(dir.path(), &config, &expected, dtype, 3);
            assert_same(&loaded(dir.path(), 2, &FsdpConfig::default()), &expected);
        }
    }
}

#[test]
fn every_strategy_and_precision_loads_the_same() {
    let config = config(true);
    let expected = tensors(&config);
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &config, &expected, Stored::F32);
    for strategy in Strategy::ALL {
        for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
            let fsdp = FsdpConfig { strategy, precision, ..FsdpConfig::default() };
            assert_same(&loaded(dir.path(), 2, &fsdp), &expected);
        }
    }
    let outer = FsdpConfig { outer: OuterStrategy::Optim, ..FsdpConfig::default() };
    launch::local(4, |world| -> fsdp_models::Result<()> {
        let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 2)]).map_err(fsdp::Error::from)?;
        assert_same(&gathered(&Llama::from_pretrained(dir.path(), &mesh, &outer)?), &expected);
        Ok(())
    })
    .unwrap();
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

#[test]
fn a_tied_head_in_the_file_is_passed_over_or_stands_for_the_embedding() {
    let (tied, untied) = (config(true), config(false));
    let mut expected = tensors(&tied);
    let mut file = expected.clone();
    file.insert(HEAD.into(), file[EMBEDDING].clone());
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &tied, &file, Stored::F32);
    assert_same(&loaded(dir.path(), 2, &FsdpConfig::default()), &expected);
    let said = report(dir.path(), &tied);
    assert_eq!((&said.ignored[..], &said.notes[..]), (&[HEAD.to_owned()][..], &[][..]));
    assert_eq!(
        said.to_string(),
        "20 tensors were loaded; passed over, as they say nothing new: lm_head.weight"
    );
    assert!(said.has_remarks());

    file.remove(EMBEDDING);
    file.insert(HEAD.into(), tensors(&untied)[HEAD].clone());
    expected.insert(EMBEDDING.into(), file[HEAD].clone());
    write_single(dir.path(), &tied, &file, Stored::F32);
    assert_same(&loaded(dir.path(), 2, &FsdpConfig::default()), &expected);

    let file = tensors(&tied);
    write_single(dir.path(), &tied, &file, Stored::F32);
    assert!(!report(dir.path(), &tied).has_remarks());
    write_single(dir.path(), &untied, &file, Stored::F32);
    let message = Llama::from_pretrained(dir.path(), &DeviceMesh::single(), &FsdpConfig::default());
    let message = message.unwrap_err().to_string();
    assert!(message.ends_with("does not fit the model:\n  1 missing: lm_head.weight"), "{message}");
}

/// As `transformers` 5.24: the configuration is wrong about such a file, and both tensors are kept.
#[test]
fn a_head_that_differs_from_the_embedding_is_kept_whatever_the_configuration_says() {
    let (tied, untied) = (config(true), config(false));
    let last_value =
        |file: &mut Tensors, value: f32| *file.get_mut(HEAD).unwrap().1.last_mut().unwrap() = value;
    let mut equal = tensors(&untied);
    equal.insert(HEAD.into(), equal[EMBEDDING].clone());
    let mut at_the_end = equal.clone();
    last_value(&mut at_the_end, 0.5);
    let logits = |dir: &Path| -> Vec<f32> {
        let model = Llama::from_pretrained(dir, &DeviceMesh::single(), &FsdpConfig::default()).unwrap();
        let ids = Tensor::new(&[[1u32, 7, 3, 9, 2]], &candle_core::Device::Cpu).unwrap();
        let logits: Tensor = model.evaluate(&ids).unwrap();
        logits.flatten_all().unwrap().to_vec1().unwrap()
    };
    for file in [tensors(&untied), at_the_end] {
        for dtype in [Stored::F32, Stored::BF16] {
            let [wrong, right, saved] = [(), (), ()].map(|()| tempfile::tempdir().unwrap());
            write_single(wrong.path(), &tied, &file, dtype);
            write_indexed(right.path(), &untied, &file, dtype, 2);
            for ranks in 1..=3 {
                assert_same(&loaded(wrong.path(), ranks, &FsdpConfig::default()), &file);
            }
            assert_eq!(logits(wrong.path()), logits(right.path()));
            write_indexed(wrong.path(), &tied, &file, dtype, 3);
            let pretrained = Pretrained::open(wrong.path()).unwrap();
            assert!(!pretrained.config().tie_word_embeddings);
            let mut model = pretrained.model().unwrap().fully_shard(&DeviceMesh::single()).unwrap();
            let report = pretrained.load(&mut model, Strictness::Strict).unwrap();
            assert_eq!(
                report.to_string(),
                "21 tensors were loaded; lm_head.weight is not model.embed_tokens.weight, though `tie_word_embeddings` is true: \
                 the model has both, not tied"
            );
            // What is saved of it says so.
            pretrained.save(&model, saved.path(), &SaveOptions::default()).unwrap();
            assert!(!report_of(saved.path()).has_remarks());
            assert_same(&loaded(saved.path(), 2, &FsdpConfig::default()), &file);
        }
    }
    // Zeros of both signs are equal, and a NaN is not even equal to itself.
    for (embedding, head, apart) in [(0.0, -0.0, false), (f32::NAN, f32::NAN, true)] {
        let mut file = equal.clone();
        last_value(&mut file, head);
        *file.get_mut(EMBEDDING).unwrap().1.last_mut().unwrap() = embedding;
        let dir = tempfile::tempdir().unwrap();
        write_single(dir.path(), &tied, &file, Stored::F32);
        assert_eq!(Pretrained::open(dir.path()).unwrap().config().tie_word_embeddings, !apart);
    }
}

fn report_of(dir: &Path) -> LoadReport {
    report(dir, Pretrained::open(dir).unwrap().config())
}

fn report(dir: &Path, config: &LlamaConfig) -> LoadReport {
    let mut model = Llama::new(config).unwrap().fully_shard(&DeviceMesh::single()).unwrap();
    Pretrained::open(dir).unwrap().load(&mut model, Strictness::Strict).unwrap()
}

#[test]
fn frequencies_of_old_checkpoints_are_ignored() {
    let config = config(false);
    let mut file = tensors(&config);
    let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
    file.insert(name.into(), (vec![8], values(name, 8)));
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &config, &file, Stored::F32);
    let report = report(dir.path(), &config);
    assert_eq!((report.ignored, report.loaded), (vec![name.to_owned()], file.len() - 1));
}

/// A file with one mistake of each kind.
fn spoiled(dir: &Path) -> (LlamaConfig, Tensors) {
    let config = config(false);
    let mut file = tensors(&config);
    file.remove("model.norm.weight").unwrap();
    file.insert("model.layers.2.mlp.up_proj.weight".into(), (vec![2], vec![0.0; 2]));
    let transposed = &mut file.get_mut("model.layers.1.mlp.down_proj.weight").unwrap().0;
    transposed.reverse();
    write_config(dir, &config);
    let integers = "model.layers.0.mlp.gate_proj.weight";
    write_tensors(&dir.join("model.safetensors"), &file, |name| {
        if name == integers { Stored::I64 } else { Stored::F32 }
    });
    (config, file)
}

#[test]
fn all_that_does_not_fit_is_said_at_once_on_every_rank_and_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (config, _) = spoiled(dir.path());
    let path = dir.path().join("model.safetensors");
    let expected = format!(
        "`{}` does not fit the model:\
         \n  1 missing: model.norm.weight\
         \n  1 unexpected: model.layers.2.mlp.up_proj.weight\
         \n  1 of another shape: model.layers.1.mlp.down_proj.weight (model [64, 96], file [96, 64])\
         \n  1 of another dtype: model.layers.0.mlp.gate_proj.weight (model a float, file I64)",
        path.display()
    );
    launch::local(3, |world| -> fsdp_models::Result<()> {
        let mut model = Llama::new(&config)?.fully_shard(&world.data_parallel_mesh())?;
        let before = gathered(&model);
        let error = Pretrained::open(dir.path())?.load(&mut model, Strictness::Strict).unwrap_err();
        assert_eq!(error.to_string(), expected);
        assert_same(&gathered(&model), &before);
        let mesh = world.data_parallel_mesh();
        let error = Llama::from_pretrained(dir.path(), &mesh, &FsdpConfig::default()).unwrap_err();
        assert_eq!(error.to_string(), expected);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_lenient_load_takes_what_fits_and_leaves_the_rest_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (config, file) = spoiled(dir.path());
    for precision in [MixedPrecision::F32, MixedPrecision::BF16] {
        launch::local(2, |world| -> fsdp_models::Result<()> {
            let fsdp = FsdpConfig { precision, ..FsdpConfig::default() };
            let mut model = Llama::new(&config)?.fully_shard_with(&world.data_parallel_mesh(), &fsdp)?;
            let mut expected = gathered(&model);
            let report = Pretrained::open(dir.path())?.load(&mut model, Strictness::Lenient)?;
            let skipped = &report.skipped;
            assert_eq!(skipped.missing, ["model.norm.weight"]);
            assert_eq!(skipped.unexpected, ["model.layers.2.mlp.up_proj.weight"]);
            assert_eq!(skipped.shapes[0].name, "model.layers.1.mlp.down_proj.weight");
            assert_eq!(skipped.dtypes[0].name, "model.layers.0.mlp.gate_proj.weight");
            assert_eq!(report.loaded, expected.len() - 3);
            assert!(
                report.to_string().starts_with("18 tensors were loaded, skipped:\n  1 missing"),
                "{report}"
            );
            for (name, content) in &mut expected {
                let kept = skipped.missing.contains(name)
                    || skipped.shapes[0].name == *name
                    || skipped.dtypes[0].name == *name;
                if !kept {
                    content.clone_from(&file[name]);
                }
            }
            assert_same(&gathered(&model), &expected);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn ranks_that_have_other_files_all_fail_alike() {
    let config = config(true);
    let [good, bad] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    write_single(good.path(), &config, &tensors(&config), Stored::F32);
    let mut file = tensors(&config);
    file.remove("model.norm.weight");
    write_single(bad.path(), &config, &file, Stored::F32);
    let messages = launch::local(3, |world| -> fsdp_models::Result<String> {
        let mut model = Llama::new(&config)?.fully_shard(&world.data_parallel_mesh())?;
        let before = gathered(&model);
        let dir = if world.rank() == 1 { bad.path() } else { good.path() };
        let error = Pretrained::open(dir)?.load(&mut model, Strictness::Strict).unwrap_err();
        assert_same(&gathered(&model), &before);
        Ok(error.to_string())
    })
    .unwrap();
    assert!(messages[0].contains("1 missing: model.norm.weight"), "{}", messages[0]);
    assert!(messages.iter().all(|message| *message == messages[0]), "{messages:?}");
}

#[test]
fn a_file_cut_short_after_it_was_opened_is_an_error_with_the_offset_on_all_ranks() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &config, &tensors(&config), Stored::F32);
    let pretrained = Pretrained::open(dir.path()).unwrap();
    let path = dir.path().join("model.safetensors");
    let len = fs::metadata(&path).unwrap().len();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len - 100).unwrap();
    let messages = launch::local(2, |world| -> fsdp_models::Result<String> {
        let mut model = Llama::new(&config)?.fully_shard(&world.data_parallel_mesh())?;
        Ok(pretrained.load(&mut model, Strictness::Strict).unwrap_err().to_string())
    })
    .unwrap();
    assert!(messages[0].starts_with(&format!("cannot read `{}`: ", path.display())), "{}", messages[0]);
    assert!(messages[0].contains(" bytes at offset "), "{}", messages[0]);
    assert_eq!(messages[0], messages[1]);
}

#[derive(FsdpUnit)]
struct Inner {
    weight: Param,
}

/// Not a Llama: a head tied to what comes first.
#[derive(FsdpUnit)]
struct Tied {
    first: Inner,
    middle: Unit<Inner>,
    #[fsdp(tie_with = "first")]
    last: Inner,
}

impl Tied {
    fn new() -> Tied {
        let inner = |rows: usize| Inner { weight: Param::new((rows, 3)) };
        Tied { first: inner(5), middle: Unit::new(inner(2)), last: inner(5) }
    }
}

#[test]
fn any_model_loads_a_tied_parameter_by_any_of_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights.safetensors");
    let content = |name: &str, rows: usize| (name.to_owned(), (vec![rows, 3], values(name, rows * 3)));
    let cases = [
        (vec!["first.weight"], "first.weight", vec![]),
        (vec!["last.weight"], "last.weight", vec![]),
        (vec!["first.weight", "last.weight"], "first.weight", vec!["last.weight"]),
    ];
    for (names, read, ignored) in cases {
        let mut file: Tensors = names.iter().map(|name| content(name, 5)).collect();
        for name in &ignored {
            file.insert((*name).to_owned(), file[read].clone());
        }
        file.extend([content("middle.weight", 2)]);
        write_tensors(&path, &file, |_| Stored::F32);
        launch::local(2, |world| -> fsdp_models::Result<()> {
            let mut model = Tied::new().fully_shard(&world.data_parallel_mesh())?;
            let report = Weights::open(&path)?.load(&mut model, Strictness::Strict)?;
            assert_eq!(
                (report.loaded, &report.ignored[..]),
                (2, &ignored.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()[..])
            );
            let weights = gathered(&model);
            assert_eq!(weights["first.weight"].1, file[read].1);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn tensors_that_differ_are_not_loaded_into_one_tied_parameter() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights.safetensors");
    let content = |name: &str, rows: usize| (name.to_owned(), (vec![rows, 3], values(name, rows * 3)));
    let whole: Tensors = [content("first.weight", 5), content("middle.weight", 2)].into();
    let mut one_value = whole.clone();
    one_value.insert("last.weight".into(), whole["first.weight"].clone());
    *one_value.get_mut("last.weight").unwrap().1.last_mut().unwrap() += 1.0;
    let mut other_shape = whole.clone();
    other_shape.extend([content("last.weight", 4)]);
    for file in [one_value, other_shape] {
        write_tensors(&path, &file, |_| Stored::F32);
        let expected = format!(
            "`{}`: `last.weight` differs from `first.weight`, and the model ties them: it has one parameter for both",
            path.display()
        );
        for strictness in [Strictness::Strict, Strictness::Lenient] {
            launch::local(2, |world| -> fsdp_models::Result<()> {
                let mut model = Tied::new().fully_shard(&world.data_parallel_mesh())?;
                let before = gathered(&model);
                let error = Weights::open(&path)?.load(&mut model, strictness).unwrap_err();
                assert_eq!(error.to_string(), expected);
                assert_same(&gathered(&model), &before);
                Ok(())
            })
            .unwrap();
        }
    }
}

/// Two projections in one parameter.
#[derive(FsdpUnit)]
struct FusedBlock {
    #[fsdp(fused("q_proj.weight", "k_proj.weight"))]
    projections: Param,
    norm: Inner,
}

#[test]
fn a_fused_parameter_is_loaded_from_its_parts_and_saved_as_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let content = |name: &str, rows: usize| (name.to_owned(), (vec![rows, 3], values(name, rows * 3)));
    let mut file: Tensors =
        [content("q_proj.weight", 7), content("k_proj.weight", 4), content("norm.weight", 2)].into();
    write_tensors(&path, &file, |_| Stored::BF16);
    let model = || FusedBlock {
        projections: Param::new((11, 3)).with_fused_rows([7, 4]),
        norm: Inner { weight: Param::new((2, 3)) },
    };
    for ranks in 1..=3 {
        launch::local(ranks, |world| -> fsdp_models::Result<()> {
            let mut model = model().fully_shard(&world.data_parallel_mesh())?;
            let report = Weights::open(&path)?.load(&mut model, Strictness::Strict)?;
            assert_eq!(report.loaded, 3);
            assert_same(&gathered(&model), &file);
            let again = dir.path().join("again");
            save_pretrained(&model, &serde_json::Map::new(), &again, &SaveOptions::default())?;
            Weights::open(&again)?.load(&mut model, Strictness::Strict)?;
            assert_same(&gathered(&model), &file);
            Ok(())
        })
        .unwrap();
    }
    // A part that is not there keeps its rows.
    file.remove("q_proj.weight");
    write_tensors(&path, &file, |_| Stored::BF16);
    launch::local(2, |world| -> fsdp_models::Result<()> {
        let mut model = model().fully_shard(&world.data_parallel_mesh())?;
        let mut expected = gathered(&model);
        let report = Weights::open(&path)?.load(&mut model, Strictness::Lenient)?;
        assert_eq!(report.skipped.missing, ["q_proj.weight"]);
        expected.extend(file.clone());
        assert_same(&gathered(&model), &expected);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_loaded_model_trains() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &config, &tensors(&config), Stored::BF16);
    launch::local(2, |world| -> fsdp_models::Result<()> {
        let mut model =
            Llama::from_pretrained(dir.path(), &world.data_parallel_mesh(), &FsdpConfig::default())?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        let ids = Tensor::new(&[[1u32, 7, 3, 9, 2]], &candle_core::Device::Cpu)?;
        let batch = (ids.narrow(1, 0, 4)?.contiguous()?, ids.narrow(1, 1, 4)?.contiguous()?);
        let mut losses = Vec::new();
        for _ in 0..5 {
            let loss: Tensor = model.forward(&batch)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        assert!(losses[4] < losses[0], "{losses:?}");
        Ok(())
    })
    .unwrap();
}
