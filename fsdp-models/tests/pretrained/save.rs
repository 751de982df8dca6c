//! Models saved as directories of Hugging Face's.

use std::fs;
use std::path::Path;

use fsdp::files::{StoredDtype, TensorFile};
use fsdp::prelude::*;
use fsdp_models::pretrained::{
    Pretrained, PretrainedWriter, SaveOptions, StoredTensor, Strictness, Weights, check_save_place,
    save_pretrained,
};
use fsdp_models::{Llama, LlamaConfig};
use safetensors::Dtype as Stored;
use serde_json::{Value, json};

use super::fixtures::{assert_same, config, gathered, tensors, write_single};

fn entries(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A model of `ranks` ranks with the weights of [`tensors`], saved.
fn saved(config: &LlamaConfig, ranks: usize, fsdp: &FsdpConfig, dir: &Path, options: &SaveOptions<'_>) {
    let source = tempfile::tempdir().unwrap();
    write_single(source.path(), config, &tensors(config), Stored::F32);
    launch::local(ranks, |world| -> fsdp_models::Result<()> {
        let model = Llama::from_pretrained(source.path(), &world.data_parallel_mesh(), fsdp)?;
        save_pretrained(&model, &config.to_json(), dir, options)
    })
    .unwrap();
}

#[test]
fn what_is_saved_is_loaded_again_to_the_bit() {
    for tied in [false, true] {
        let config = config(tied);
        let expected = tensors(&config);
        for (ranks, precision) in
            [(1, MixedPrecision::F32), (2, MixedPrecision::BF16), (3, MixedPrecision::F32)]
        {
            let fsdp = FsdpConfig { precision, ..FsdpConfig::default() };
            for dtype in [None, Some(Dtype::F32), Some(Dtype::BF16), Some(Dtype::F16)] {
                for max_shard_bytes in [u64::MAX, 30_000, 0] {
                    let dir = tempfile::tempdir().unwrap();
                    let options = SaveOptions { dtype, max_shard_bytes, ..SaveOptions::default() };
                    saved(&config, ranks, &fsdp, dir.path(), &options);
                    launch::local(4 - ranks, |world| -> fsdp_models::Result<()> {
                        let mesh = world.data_parallel_mesh();
                        let model = Llama::from_pretrained(dir.path(), &mesh, &FsdpConfig::default())?;
                        assert_same(&gathered(&model), &expected);
                        Ok(())
                    })
                    .unwrap();
                    assert_eq!(
                        Pretrained::open(dir.path()).unwrap().config(),
                        &LlamaConfig { head_dim: Some(16), ..config.clone() }
                    );
                }
            }
        }
    }
}

#[test]
fn a_single_file_has_the_names_dtype_and_order_of_the_model() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions { dtype: Some(Dtype::BF16), ..SaveOptions::default() };
    saved(&config, 2, &FsdpConfig::default(), dir.path(), &options);
    assert_eq!(entries(dir.path()), ["config.json", "model.safetensors"]);
    let file = TensorFile::open(&dir.path().join("model.safetensors")).unwrap();
    assert!(!file.contains("lm_head.weight"), "a tied head is not saved again");
    for (name, shape) in Llama::new(&config).unwrap().parameters() {
        assert_eq!((file.dtype(&name), file.shape(&name)), (Some(StoredDtype::BF16), Some(&shape[..])));
    }
    let json = read_json(&dir.path().join("config.json"));
    for (field, value) in [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("model_type", json!("llama")),
        ("torch_dtype", json!("bfloat16")),
        ("hidden_size", json!(64)),
        ("num_key_value_heads", json!(2)),
        ("tie_word_embeddings", json!(true)),
        ("rms_norm_eps", json!(1e-5)),
    ] {
        assert_eq!(json[field], value, "{field}");
    }
}

#[test]
fn several_files_are_cut_between_tensors_and_have_an_index() {
    let config = config(false);
    let dir = tempfile::tempdir().unwrap();
    let options = SaveOptions { max_shard_bytes: 60_000, ..SaveOptions::default() };
    saved(&config, 2, &FsdpConfig::default(), dir.path(), &options);
    let index = read_json(&dir.path().join("model.safetensors.index.json"));
    let elements: usize = tensors(&config).values().map(|(_, values)| values.len()).sum();
    assert_eq!(index["metadata"]["total_size"], json!(4 * elements));
    let names = entries(dir.path());
    let files: Vec<_> = names.iter().filter(|name| name.starts_with("model-")).collect();
    assert!(files.len() > 3, "{names:?}");
    assert_eq!(*files[0], format!("model-00001-of-{:05}.safetensors", files.len()));
    for name in &files {
        let file = TensorFile::open(&dir.path().join(name)).unwrap();
        let bytes: usize = file.found().map(|tensor| tensor.shape.iter().product::<usize>() * 4).sum();
        assert!(bytes <= 60_000, "{name} has {bytes} bytes");
        assert!(file.names().all(|tensor| index["weight_map"][tensor] == json!(name)));
    }
    let all = index["weight_map"].as_object().unwrap().len();
    assert_eq!(all, tensors(&config).len());
}

#[test]
fn an_older_checkpoint_in_the_same_place_leaves_nothing_behind() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let save = |max_shard_bytes| {
        let options = SaveOptions { max_shard_bytes, ..SaveOptions::default() };
        saved(&config, 2, &FsdpConfig::default(), dir.path(), &options);
        Weights::open(dir.path()).unwrap();
        entries(dir.path())
    };
    let single = save(u64::MAX);
    fs::write(dir.path().join("model-card.md"), "mine").unwrap();
    let several = save(100_000);
    let more = save(50_000);
    assert!(several.len() < more.len() && several.len() > 3, "{several:?} {more:?}");
    assert!(!more.contains(&"model.safetensors".to_owned()), "{more:?}");
    assert!(!more.contains(&several[2]), "{more:?}");
    let mut expected = single;
    expected.push("model-card.md".into());
    expected.sort();
    assert_eq!(save(u64::MAX), expected);
}

#[test]
fn a_place_that_is_not_writable_fails_on_all_ranks_alike_and_first_of_all() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let occupied = dir.path().join("file");
    fs::write(&occupied, "").unwrap();
    let directory = dir.path().join("directory");
    fs::create_dir_all(directory.join("model.safetensors")).unwrap();
    let all = launch::local(3, |world| -> fsdp_models::Result<Vec<String>> {
        let model = Llama::new(&config)?.fully_shard(&world.data_parallel_mesh())?;
        let json = config.to_json();
        let options = SaveOptions::default();
        check_save_place(&model, &dir.path().join("new/place"))?;
        Ok(vec![
            check_save_place(&model, &occupied.join("below")).unwrap_err().to_string(),
            save_pretrained(&model, &json, &occupied, &options).unwrap_err().to_string(),
            save_pretrained(&model, &json, &directory, &options).unwrap_err().to_string(),
        ])
    })
    .unwrap();
    for messages in &all {
        assert_eq!(messages, &all[0]);
        assert!(messages.iter().all(|message| message.starts_with("cannot write")), "{messages:?}");
    }
    assert!(dir.path().join("new/place").is_dir());
    assert_eq!(entries(&directory), ["model.safetensors"], "nothing is left beside it");
}

#[test]
fn a_value_beyond_the_dtype_is_named_on_all_ranks_and_the_old_files_stay() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    saved(&config, 1, &FsdpConfig::default(), dir.path(), &SaveOptions::default());
    let before = fs::read(dir.path().join("model.safetensors")).unwrap();
    launch::local(2, |world| -> fsdp_models::Result<()> {
        let mut model =
            Llama::from_pretrained(dir.path(), &world.data_parallel_mesh(), &FsdpConfig::default())?;
        model.load_weights(|spec, range, values| {
            if spec.name == "model.norm.weight" && range.contains(&5) {
                values[5 - range.start] = 70_000.0;
            }
            Ok(())
        })?;
        let options = SaveOptions { dtype: Some(Dtype::F16), ..SaveOptions::default() };
        let error = save_pretrained(&model, &config.to_json(), dir.path(), &options).unwrap_err();
        assert_eq!(
            error.to_string(),
            "element 5 of `model.norm.weight` is 70000: it becomes infinite in F16"
        );
        assert_eq!(fs::read(dir.path().join("model.safetensors")).unwrap(), before);
        let wide = SaveOptions { dtype: Some(Dtype::BF16), ..SaveOptions::default() };
        save_pretrained(&model, &config.to_json(), dir.path(), &wide)
    })
    .unwrap();
    assert_eq!(entries(dir.path()), ["config.json", "model.safetensors"]);
}

#[test]
fn an_incomplete_checkpoint_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = |name: &str| StoredTensor { name: name.into(), shape: vec![2], dtype: StoredDtype::F32 };
    let all = [tensor("a"), tensor("b")];
    let mut first = PretrainedWriter::create(dir.path(), &all, 0).unwrap();
    for name in ["a", "b"] {
        first.write_range_f32(name, 0, &[1.0, 2.0]).unwrap();
    }
    first.finish(Some(&serde_json::Map::new())).unwrap();
    let before = entries(dir.path());
    assert_eq!(before.len(), 4);
    let mut second = PretrainedWriter::create(dir.path(), &all, 0).unwrap();
    second.write_range_f32("a", 0, &[3.0, 4.0]).unwrap();
    let error = second.finish(Some(&serde_json::Map::new())).unwrap_err().to_string();
    assert!(error.ends_with("is incomplete: 0 of 2 elements of tensor `b` were written"), "{error}");
    assert_eq!(entries(dir.path()), before);
    let mut values = [0.0; 2];
    Weights::open(dir.path()).unwrap().read_range_f32("a", 0, &mut values).unwrap();
    assert_eq!(values, [1.0, 2.0]);
    let twice = PretrainedWriter::create(dir.path(), &[tensor("a"), tensor("a")], 0).unwrap_err();
    assert!(twice.to_string().contains("tensor `a` of"), "{twice}");
}

#[test]
fn what_came_with_a_model_goes_with_it() {
    let config = config(true);
    let [source, target] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    write_single(source.path(), &config, &tensors(&config), Stored::BF16);
    let mut json = config.to_json();
    json.insert("bos_token_id".into(), json!(17));
    json.insert("dtype".into(), json!("bfloat16"));
    fs::write(source.path().join("config.json"), serde_json::to_vec(&json).unwrap()).unwrap();
    let generation = json!({"eos_token_id": [257, 258], "temperature": 0.6, "do_sample": true});
    fs::write(source.path().join("generation_config.json"), generation.to_string()).unwrap();
    launch::local(2, |world| -> fsdp_models::Result<()> {
        let pretrained = Pretrained::open(source.path())?;
        let mut model = Llama::new(pretrained.config())?.fully_shard(&world.data_parallel_mesh())?;
        pretrained.load(&mut model, Strictness::Strict)?;
        pretrained.save(&model, target.path(), &SaveOptions::default())
    })
    .unwrap();
    let saved = read_json(&target.path().join("config.json"));
    assert_eq!((&saved["bos_token_id"], &saved["torch_dtype"]), (&json!(17), &json!("float32")));
    assert_eq!(saved.get("dtype"), None);
    assert_eq!(read_json(&target.path().join("generation_config.json")), generation);
    let unknown = r#"{"eos_token_id": 2, "thinking_budget": 512}"#;
    fs::write(source.path().join("generation_config.json"), unknown).unwrap();
    let message = Pretrained::open(source.path()).unwrap_err().to_string();
    let expected = "generation_config.json`: unknown setting `thinking_budget` (512): it may change what the file means; if it does \
                    not, remove it";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn a_configuration_of_another_llama_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (other, reason) in [
        (
            LlamaConfig { num_hidden_layers: 3, ..config(true) },
            "it has no `model.layers.2.input_layernorm.weight`, which the configuration has",
        ),
        (
            LlamaConfig { num_hidden_layers: 1, ..config(true) },
            "the configuration has no `model.layers.1.input_layernorm.weight`",
        ),
        (config(false), "it has no `lm_head.weight`, which the configuration has"),
        (
            LlamaConfig { vocab_size: 41, ..config(true) },
            "`model.embed_tokens.weight` is [40, 64], by the configuration [41, 64]",
        ),
    ] {
        let place = dir.path().join("saved");
        let messages = launch::local(2, |world| -> fsdp_models::Result<String> {
            let model = Llama::new(&config(true))?.fully_shard(&world.data_parallel_mesh())?;
            let saved = save_pretrained(&model, &other.to_json(), &place, &SaveOptions::default());
            Ok(saved.unwrap_err().to_string())
        });
        for message in messages.unwrap() {
            let expected =
                format!("`{}` is of another model than its configuration: {reason}", place.display());
            assert!(message.contains(&expected), "{message}");
        }
        assert!(!place.exists());
    }
}
