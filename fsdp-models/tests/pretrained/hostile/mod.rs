//! Damaged and hostile files of every kind that is read: errors that are short, no panics, no memory on their word, nothing
//! outside their directory.
//!
//! `FSDP_HOSTILE_FACTOR=4` makes that many times as many of them; see `tests/README.md`.

mod allocator;
mod damage;
mod tokenizers;

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use fsdp::Fsdp;
use fsdp::prelude::*;
use fsdp_models::data::{Batches, Part, TokenFile};
use fsdp_models::lora::{LoraConfig, load_adapters, save_adapters};
use fsdp_models::pretrained::{Pretrained, Strictness};
use fsdp_models::{Llama, Tokenizer};
use safetensors::Dtype;
use serde_json::json;

use super::fixtures::{
    config, gguf_metadata, quantise, tensors, write_gguf, write_indexed, write_single, write_tensors,
};
use damage::Random;

/// Longest message, in characters.
const MESSAGE: usize = 2000;

/// Largest allocation beside what is in proportion to the file. An expression takes some MiB where it is compiled.
const ALLOWANCE: usize = 16 << 20;

/// Files of a kind for each that a short run has.
fn factor() -> usize {
    std::env::var("FSDP_HOSTILE_FACTOR")
        .map_or(1, |factor| factor.parse().expect("FSDP_HOSTILE_FACTOR is a number"))
}

/// How a file is damaged.
#[derive(Clone, Copy)]
enum Damage {
    /// Anywhere, in the first bytes above all.
    Bytes(usize),
    /// As JSON, or anywhere.
    Json,
}

/// Reads `file`, damaged in `cases` times `FSDP_HOSTILE_FACTOR` ways, by `read`.
fn survives(
    seed: u64,
    cases: usize,
    file: &Path,
    damage: Damage,
    mut read: impl FnMut() -> fsdp_models::Result<()>,
) {
    let cases = cases * factor();
    let sound = fs::read(file).unwrap();
    // Candle's errors carry backtraces where those are on, for which the symbols of the program are read.
    let backtraces = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    let mut random = Random(seed);
    let mut refused = 0;
    for case in 0..cases {
        let bytes = match damage {
            Damage::Json if random.below(2) == 0 => damage::json(&mut random, &sound),
            Damage::Json => damaged(&mut random, &sound, usize::MAX),
            Damage::Bytes(header) => damaged(&mut random, &sound, header),
        };
        fs::write(file, &bytes).unwrap();
        let label = format!("{}, case {case} of seed {seed}", file.display());
        allocator::LARGEST.set(0);
        let outcome =
            catch_unwind(AssertUnwindSafe(&mut read)).unwrap_or_else(|_| panic!("{label}: it panics"));
        let largest = allocator::LARGEST.get();
        let limit = 64 * sound.len().max(bytes.len()) + ALLOWANCE + if backtraces { 64 << 20 } else { 0 };
        assert!(largest <= limit, "{label}: it takes {largest} bytes of a file of {}", bytes.len());
        if let Err(error) = outcome {
            refused += 1;
            let message = error.to_string();
            let control = message.contains(|c: char| c.is_control() && c != '\n');
            let length = message.chars().count();
            assert!(
                (1..MESSAGE).contains(&length) && !control,
                "{label}: a message of {length} characters: {message:?}"
            );
        }
    }
    assert!(refused > 0 && refused < cases, "{}: {refused} of {cases} were refused", file.display());
    fs::write(file, &sound).unwrap();
    read().unwrap();
}

fn damaged(random: &mut Random, sound: &[u8], header: usize) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    damage::bytes(random, &mut bytes, header);
    bytes
}

/// All that is done with a tokenizer.
fn tokenize(path: &Path) -> fsdp_models::Result<()> {
    let tokenizer = Tokenizer::open(path)?;
    let saved = tempfile::tempdir().unwrap();
    tokenizer.save(saved.path())?;
    for text in ["", "a b", "Ünï \u{1f980}\0</s>", &"a b ".repeat(100)] {
        let ids = tokenizer.encode(text)?;
        tokenizer.encode_prompt(text)?;
        tokenizer.decode(&ids)?;
    }
    tokenizer.decode(&[0, u32::MAX, 5, 5]).map(drop)
}

/// A model to load into.
fn model() -> Fsdp<Llama> {
    Llama::new(&config(true)).unwrap().fully_shard(&DeviceMesh::single()).unwrap()
}

fn load(path: &Path, model: &mut Fsdp<Llama>) -> fsdp_models::Result<()> {
    let pretrained = Pretrained::open(path)?;
    pretrained.check()?;
    pretrained.load(model, Strictness::Strict)?;
    pretrained.load(model, Strictness::Lenient)?;
    Ok(())
}

#[test]
fn damaged_gguf_files() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut metadata = gguf_metadata(&config);
    let texts =
        |texts: &[&str]| Value::Array(texts.iter().map(|text| Value::String((*text).into())).collect());
    metadata.extend([
        ("general.alignment", Value::U32(32)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(&["a", "b", "Ġ", "Ġb", "<s>"])),
        ("tokenizer.ggml.merges", texts(&["Ġ b"])),
        ("tokenizer.ggml.eos_token_id", Value::U32(4)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
    ]);
    write_gguf(&path, &metadata, &quantise(&config, &tensors(&config), GgmlDType::Q4_1));
    let mut model = model();
    survives(1, 400, &path, Damage::Bytes(2400), || load(&path, &mut model));
    survives(11, 200, &path, Damage::Bytes(2400), || tokenize(&path));
}

#[test]
fn damaged_safetensors_files() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &config, &tensors(&config), Dtype::BF16);
    let mut model = model();
    survives(2, 400, &dir.path().join("model.safetensors"), Damage::Bytes(1800), || {
        load(dir.path(), &mut model)
    });
}

#[test]
fn damaged_indices_and_configurations() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_indexed(dir.path(), &config, &tensors(&config), Dtype::BF16, 3);
    let generation = json!({"bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": true, "temperature": 0.6, "top_p": 0.9});
    fs::write(dir.path().join("generation_config.json"), generation.to_string()).unwrap();
    let mut model = model();
    for (seed, cases, name) in [
        (3, 400, "model.safetensors.index.json"),
        (4, 400, "config.json"),
        (5, 200, "generation_config.json"),
    ] {
        survives(seed, cases, &dir.path().join(name), Damage::Json, || load(dir.path(), &mut model));
    }
}

/// A tokenizer with a part of every kind.
fn tokenizer_json() -> serde_json::Value {
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
               "special": true})
    };
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 32, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "<unk>"},
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFKC"},
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated", "invert": false},
            {"type": "Digits", "individual_digits": true},
        ]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "▁": 5, "▁a": 6, "1": 7},
                  "merges": [["▁", "a"]]},
    })
}

#[test]
fn damaged_tokenizers() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("tokenizer.json"), tokenizer_json().to_string()).unwrap();
    let config = json!({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>",
        "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true},
        "clean_up_tokenization_spaces": false, "add_bos_token": true});
    fs::write(at("tokenizer_config.json"), config.to_string()).unwrap();
    fs::write(at("generation_config.json"), json!({"eos_token_id": [2, 1]}).to_string()).unwrap();
    let read = || tokenize(dir.path());
    for (seed, cases, name) in
        [(6, 600, "tokenizer.json"), (7, 200, "tokenizer_config.json"), (8, 100, "generation_config.json")]
    {
        survives(seed, cases, &at(name), Damage::Json, read);
    }
}

#[test]
fn damaged_adapters() {
    let dir = tempfile::tempdir().unwrap();
    let mut adapted = Llama::new(&config(true)).unwrap();
    adapted.add_adapters(&LoraConfig { rank: 2, ..LoraConfig::default() }).unwrap();
    let mut adapted = adapted.fully_shard(&DeviceMesh::single()).unwrap();
    save_adapters(&adapted, dir.path(), Some("base")).unwrap();
    let mut read = || {
        let lora = LoraConfig::from_peft(dir.path())?;
        // Its ranks and names are multiplied with the model's sizes.
        Llama::new(&config(true))?.add_adapters(&lora)?;
        load_adapters(&mut adapted, dir.path())?;
        Ok(())
    };
    survives(9, 200, &dir.path().join("adapter_config.json"), Damage::Json, &mut read);
    survives(10, 200, &dir.path().join("adapter_model.safetensors"), Damage::Bytes(900), read);
}

#[test]
fn damaged_token_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokens.safetensors");
    let ids: Vec<u8> = (0..24i32).flat_map(i32::to_le_bytes).collect();
    let view = safetensors::tensor::TensorView::new(Dtype::I32, vec![2, 4, 3], &ids).unwrap();
    safetensors::serialize_to_file([("tokens", view)], None, &path).unwrap();
    survives(12, 200, &path, Damage::Bytes(80), || {
        let tokens = TokenFile::open(&path, 24)?;
        for served in [0, 4, u64::MAX] {
            let batch = tokens.check_steps(served, 1).and_then(|()| tokens.batch(served, Part::WHOLE));
            assert!(batch.is_ok() || served > 0);
        }
        Ok(())
    });
    // Names, of which a message could show all.
    let many = (0..3000).map(|name| (format!("{name:0>300}"), (vec![1], vec![0.0]))).collect();
    write_tensors(&path, &many, |_| Dtype::F32);
    let message = TokenFile::open(&path, 24).unwrap_err().to_string();
    assert!(
        message.contains("has no tensor `tokens`") && message.contains(" more") && message.len() < MESSAGE,
        "{message}"
    );
}
