//! Checkpoints of several files, and directories that hold none.

use std::fs;
use std::path::Path;

use fsdp_models::pretrained::{Pretrained, Weights};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::fixtures::{config, tensors, write_config, write_indexed, write_single};

const INDEX: &str = "model.safetensors.index.json";

fn change(dir: &Path, change: impl FnOnce(&mut Value)) {
    let path = dir.join(INDEX);
    let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    fs::write(&path, index.to_string()).unwrap();
}

fn message(dir: &Path) -> String {
    Weights::open(dir).unwrap_err().to_string()
}

#[test]
fn an_index_leads_nowhere_but_into_its_directory() {
    let config = config(true);
    let outer = tempfile::tempdir().unwrap();
    let dir = outer.path().join("model");
    fs::create_dir(&dir).unwrap();
    write_indexed(&dir, &config, &tensors(&config), Dtype::F32, 2);
    let outside = outer.path().join("model-00001-of-00002.safetensors");
    fs::rename(dir.join("model-00001-of-00002.safetensors"), &outside).unwrap();
    let absolute = outside.to_str().unwrap().to_owned();
    let first = "model.embed_tokens.weight";
    for trick in [
        "../model-00001-of-00002.safetensors",
        &absolute,
        "./../model-00001-of-00002.safetensors",
        "sub/model.safetensors",
        "..",
        ".",
        "",
        "a\\b.safetensors",
        "c:model.safetensors",
        "nul\0",
    ] {
        change(&dir, |index| index["weight_map"][first] = json!(trick));
        let expected = format!(
            "`{}` is not the index of its files: {trick:?} is no name of a file in its directory",
            dir.join(INDEX).display()
        );
        assert_eq!(message(&dir), expected);
    }
}

#[test]
fn an_index_that_is_not_that_of_its_files_is_refused() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_indexed(dir.path(), &config, &tensors(&config), Dtype::F32, 2);
    let start = format!("`{}` is not the index of its files: ", dir.path().join(INDEX).display());
    let [first, second] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    change(dir.path(), |index| {
        let map = index["weight_map"].as_object_mut().unwrap();
        map.remove("model.norm.weight");
        map.insert("model.embed_tokens.weight".into(), json!(second));
    });
    let expected = format!(
        "{start}model.embed_tokens.weight is not in {second}, model.embed_tokens.weight of {first} is not in the index, \
         model.norm.weight of {second} is not in the index"
    );
    assert_eq!(message(dir.path()), expected);
    change(dir.path(), |index| index["weight_map"]["model.norm.weight"] = json!("gone.safetensors"));
    let expected = format!("cannot read `{}`: ", dir.path().join("gone.safetensors").display());
    assert!(message(dir.path()).starts_with(&expected), "{}", message(dir.path()));
    change(dir.path(), |index| index["weight_map"] = json!(["model.norm.weight"]));
    let index = dir.path().join(INDEX);
    let expected = format!("`{}`: weight_map is a list of 1: expected a map of texts", index.display());
    assert_eq!(message(dir.path()), expected);
    change(dir.path(), |index| index["weight_map"] = json!({"model.norm.weight": 3}));
    let expected = format!("`{}`: weight_map holds 3: expected a map of texts", index.display());
    assert_eq!(message(dir.path()), expected);
}

#[test]
fn a_single_file_comes_before_an_index_and_a_directory_without_weights_says_so() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let expected =
        format!("`{}` has neither model.safetensors nor model.safetensors.index.json", dir.path().display());
    assert_eq!(message(dir.path()), expected);
    fs::write(dir.path().join(INDEX), "{").unwrap();
    write_single(dir.path(), &config, &tensors(&config), Dtype::F32);
    assert_eq!(Weights::open(dir.path()).unwrap().path(), dir.path().join("model.safetensors"));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    let message = Pretrained::open(dir.path()).unwrap_err().to_string();
    assert!(
        message.starts_with(&format!("cannot read `{}`", dir.path().join("config.json").display())),
        "{message}"
    );
}

#[test]
fn a_configuration_of_a_larger_model_is_refused_before_anything_is_built() {
    let dir = tempfile::tempdir().unwrap();
    let small = config(true);
    write_single(dir.path(), &small, &tensors(&small), Dtype::F32);
    let mut large = small.clone();
    large.num_hidden_layers = 60_000;
    write_config(dir.path(), &large);
    let message = Pretrained::open(dir.path()).unwrap_err().to_string();
    assert!(message.ends_with("num_hidden_layers is 60000, and the file has 20 tensors"), "{message}");
    // Its rotary tables are as long as the texts that it is given.
    let mut long = small.clone();
    long.max_position_embeddings = 4_000_000_000;
    write_config(dir.path(), &long);
    Pretrained::open(dir.path()).unwrap().model().unwrap();
}

#[test]
fn what_an_index_says_beyond_its_map_is_refused_by_name() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_indexed(dir.path(), &config, &tensors(&config), Dtype::F32, 2);
    change(dir.path(), |index| {
        index["metadata"] = json!({"total_parameters": 7, "total_size": 28, "anything": [1]});
        index["nothing"] = json!(null);
    });
    Weights::open(dir.path()).unwrap();
    change(dir.path(), |index| {
        index["deltas"] = json!({"of": "another"});
        index["scale"] = json!(2.0);
    });
    let expected = format!(
        "`{}`: unknown settings `deltas` (a map of 1), `scale` (2.0): they may change what the file means; if they do not, remove them",
        dir.path().join(INDEX).display()
    );
    assert_eq!(message(dir.path()), expected);
}
