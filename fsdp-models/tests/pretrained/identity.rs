//! What tells pretrained models apart.

use std::fs;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use fsdp_models::LlamaConfig;
use fsdp_models::pretrained::Pretrained;
use safetensors::Dtype;

use super::fixtures::{
    Tensors, config, gguf_metadata, quantise, tensors, write_gguf, write_indexed, write_single,
};

fn fingerprint(path: &Path) -> String {
    let identity = Pretrained::open(path).unwrap().identity().unwrap();
    assert_eq!(identity.name, path.display().to_string());
    identity.fingerprint
}

#[test]
fn models_of_one_architecture_are_told_apart_and_files_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let single = |name: &str, config: &LlamaConfig, tensors: &Tensors, dtype: Dtype| {
        let path = dir.path().join(name);
        fs::create_dir(&path).unwrap();
        write_single(&path, config, tensors, dtype);
        fingerprint(&path)
    };
    let (config, weights) = (config(true), tensors(&config(true)));
    let model = single("model", &config, &weights, Dtype::F32);
    // In other words, and in other files.
    let in_full = LlamaConfig { head_dim: Some(16), initializer_range: 0.5, ..config.clone() };
    assert_eq!(single("in-full", &in_full, &weights, Dtype::F32), model);
    let indexed = dir.path().join("indexed");
    fs::create_dir(&indexed).unwrap();
    write_indexed(&indexed, &config, &weights, Dtype::F32, 3);
    assert_eq!(fingerprint(&indexed), model);

    // One element, one constant of the arithmetic, one dtype.
    for (at, name) in weights.keys().enumerate() {
        let mut changed = weights.clone();
        let values = &mut changed.get_mut(name).unwrap().1;
        let middle = values.len() / 2;
        values[middle] += 0.5;
        assert_ne!(single(&format!("changed-{at}"), &config, &changed, Dtype::F32), model, "{name}");
    }
    let turned = LlamaConfig { rope_theta: 500_000.0, ..config.clone() };
    assert_ne!(single("turned", &turned, &weights, Dtype::F32), model);
    assert_ne!(single("narrow", &config, &weights, Dtype::BF16), model);
}

#[test]
fn quantised_models_have_one_too() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(true);
    let write = |name: &str, weights: &Tensors| {
        let path = dir.path().join(name);
        write_gguf(&path, &gguf_metadata(&config), &quantise(&config, weights, GgmlDType::Q8_0));
        fingerprint(&path)
    };
    let mut weights = tensors(&config);
    let model = write("model.gguf", &weights);
    assert_eq!(write("again.gguf", &weights), model);
    weights.get_mut("model.layers.1.mlp.up_proj.weight").unwrap().1[17] += 0.5;
    assert_ne!(write("changed.gguf", &weights), model);
}
