//! What is in the place of a file and is none: refused by every reader, and never waited for.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use fsdp_models::data::{TextDataset, TextOptions, TokenFile};
use fsdp_models::lora::LoraConfig;
use fsdp_models::pretrained::{Pretrained, Weights};
use fsdp_models::{LlamaConfig, Tokenizer};
use safetensors::Dtype;

use super::fixtures::{config, tensors, write_indexed, write_single};

/// Puts something in the place of a file.
type Change<'a> = &'a dyn Fn(&Path);

/// Each of them in place of `file`, which `read` must refuse.
fn refused(file: &Path, read: &dyn Fn() -> fsdp_models::Result<()>) {
    let pipe = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let beside = file.with_file_name("beside");
    let changes: [(&str, Change<'_>); 6] = [
        ("a pipe that nobody writes to", &pipe),
        ("a link to such a pipe", &|path| {
            pipe(&beside);
            symlink(&beside, path).unwrap();
        }),
        ("a link to a device that never ends", &|path| symlink("/dev/zero", path).unwrap()),
        ("a link to a terminal", &|path| symlink("/dev/tty", path).unwrap()),
        ("a socket", &|path| drop(UnixListener::bind(path).unwrap())),
        ("a directory", &|path| fs::create_dir(path).unwrap()),
    ];
    let sound = fs::read(file).ok();
    for (label, change) in changes {
        let _ = fs::remove_file(file);
        change(file);
        let message = read().unwrap_err().to_string();
        let expected = format!("`{}`: it is not a regular file", file.display());
        assert!(message.contains(&expected), "{} is {label}: {message}", file.display());
        let _ = fs::remove_file(file).or_else(|_| fs::remove_dir(file));
        let _ = fs::remove_file(&beside);
    }
    if let Some(sound) = sound {
        fs::write(file, sound).unwrap();
        read().unwrap();
    }
}

#[test]
fn of_a_model() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let open = || Pretrained::open(dir.path()).map(drop);
    write_single(dir.path(), &config, &tensors(&config), Dtype::BF16);
    refused(&at("config.json"), &open);
    refused(&at("config.json"), &|| Ok(LlamaConfig::from_json_file(&at("config.json")).map(drop)?));
    refused(&at("model.safetensors"), &|| Weights::open(dir.path()).map(drop));
    fs::remove_file(at("model.safetensors")).unwrap();
    write_indexed(dir.path(), &config, &tensors(&config), Dtype::BF16, 2);
    refused(&at("model.safetensors.index.json"), &open);
    refused(&at("model-00002-of-00002.safetensors"), &open);
    // Known by its name alone.
    fs::write(at("model.gguf"), "").unwrap();
    let message = |error: fsdp_models::Error| error.to_string();
    assert!(message(Pretrained::open(&at("model.gguf")).unwrap_err()).contains("GGUF"));
    fs::remove_file(at("model.gguf")).unwrap();
    assert!(Command::new("mkfifo").arg(at("model.gguf")).status().unwrap().success());
    for error in [
        Pretrained::open(&at("model.gguf")).map(drop).unwrap_err(),
        Tokenizer::open(&at("model.gguf")).map(drop).unwrap_err(),
    ] {
        let message = message(error);
        assert!(message.ends_with("model.gguf`: it is not a regular file"), "{message}");
    }
}

#[test]
fn of_a_tokenizer_of_adapters_and_of_data() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    Tokenizer::of_bytes().unwrap().save(dir.path()).unwrap();
    refused(&at("tokenizer.json"), &|| Tokenizer::open(dir.path()).map(drop));
    refused(&at("tokenizer_config.json"), &|| Tokenizer::open(dir.path()).map(drop));
    fs::write(
        at("adapter_config.json"),
        r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}"#,
    )
    .unwrap();
    refused(&at("adapter_config.json"), &|| Ok(LoraConfig::from_peft(dir.path()).map(drop)?));
    fs::write(at("text"), "some words").unwrap();
    let options = TextOptions { seq: 4, batch: 1, vocab: 256, seed: 0 };
    refused(&at("text"), &|| Ok(TextDataset::open(&[at("text")], options).map(drop)?));
    let bytes = Tokenizer::of_bytes().unwrap();
    refused(&at("text"), &|| TextDataset::tokenized(&[at("text")], &bytes, options).map(drop));
    refused(&at("tokens"), &|| Ok(TokenFile::open(&at("tokens"), 9).map(drop)?));
}
