//! Tokenizers from `tokenizer.json` and from GGUF files.

use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use fsdp_models::Tokenizer;
use serde_json::json;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

/// The tokens of single bytes, sorted, then `Ġa`, `12` and two special ones.
fn vocabulary() -> Vec<String> {
    let mut bytes: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
    bytes.sort();
    bytes.extend(["Ġa", "12", "<s>", "</s>"].map(str::to_owned));
    bytes
}

const MERGES: [&str; 2] = ["Ġ a", "1 2"];

/// Writes a GGUF file that has nothing but a tokenizer.
fn write_gguf(path: &Path, change: impl FnOnce(&mut Vec<(&'static str, Value)>)) {
    let strings = |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
    let tokens = vocabulary();
    let kinds = (0..tokens.len()).map(|id| Value::I32(if id < tokens.len() - 2 { 1 } else { 3 })).collect();
    let mut metadata = vec![
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("gpt-2".into())),
        ("tokenizer.ggml.tokens", strings(tokens)),
        ("tokenizer.ggml.token_type", Value::Array(kinds)),
        ("tokenizer.ggml.merges", strings(MERGES.map(str::to_owned).to_vec())),
        ("tokenizer.ggml.bos_token_id", Value::U32(258)),
        ("tokenizer.ggml.eos_token_id", Value::U32(259)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true)),
    ];
    change(&mut metadata);
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &[]).unwrap();
}

fn replace(metadata: &mut [(&'static str, Value)], key: &str, value: Value) {
    metadata.iter_mut().find(|(known, _)| *known == key).unwrap().1 = value;
}

const TEXT: &str = "a b a 12 345\n  \"ünï\"  cø\u{1f980}</s>";

#[test]
fn text_survives_a_gguf_tokenizer_and_nothing_is_put_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    write_gguf(&path, |_| {});
    let tokenizer = Tokenizer::open(&path).unwrap();
    let id = |text: &str| tokenizer.token(text).unwrap();
    let ids = tokenizer.encode("a b a 12 ").unwrap();
    assert_eq!(ids, ["a", "Ġ", "b", "Ġa", "Ġ", "12", "Ġ"].map(id));
    assert_eq!(tokenizer.encode_prompt("a").unwrap(), ["<s>", "a"].map(id));
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(258), Some(259)));
    assert_eq!(tokenizer.vocab_size(), 260);
    let ids = tokenizer.encode(TEXT).unwrap();
    assert_eq!(ids.last(), Some(&259));
    // Special tokens and unknown ids have no text.
    assert_eq!(
        tokenizer.decode(&[&ids[..], &[1 << 20]].concat()).unwrap(),
        TEXT.strip_suffix("</s>").unwrap()
    );
    assert_eq!(tokenizer.encode("").unwrap(), [0u32; 0]);
}

#[test]
fn digits_are_cut_as_the_file_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for (pre, expected) in [("gpt-2", 1), ("smollm", 2), ("llama-bpe", 1)] {
        write_gguf(&path, |metadata| replace(metadata, "tokenizer.ggml.pre", Value::String(pre.into())));
        assert_eq!(Tokenizer::open(&path).unwrap().encode("12").unwrap().len(), expected, "{pre}");
    }
}

#[test]
fn kinds_that_would_cut_text_wrongly_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let message = |key: &str, value: &str| {
        write_gguf(&path, |metadata| replace(metadata, key, Value::String(value.into())));
        Tokenizer::open(&path).unwrap_err().to_string()
    };
    let start = format!("`{}` holds no usable tokenizer: ", path.display());
    let expected = format!("{start}`tokenizer.ggml.pre` is `mpt`: expected gpt-2, smollm or llama-bpe");
    assert_eq!(message("tokenizer.ggml.pre", "mpt"), expected);
    assert_eq!(
        message("tokenizer.ggml.model", "llama"),
        format!("{start}unsupported tokenizer model `llama`")
    );
    write_gguf(&path, |metadata| metadata.retain(|(key, _)| *key != "tokenizer.ggml.pre"));
    let message = Tokenizer::open(&path).unwrap_err().to_string();
    assert_eq!(
        message,
        format!("{start}it has no `tokenizer.ggml.pre`: expected gpt-2, smollm or llama-bpe")
    );
}

#[test]
fn a_gguf_tokenizer_is_saved_as_a_directory_that_gives_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    write_gguf(&path, |metadata| {
        replace(metadata, "tokenizer.ggml.pre", Value::String("smollm".into()));
        metadata.push(("tokenizer.chat_template", Value::String("{{ messages }}".into())));
    });
    let tokenizer = Tokenizer::open(&path).unwrap();
    tokenizer.save(dir.path()).unwrap();
    for place in [dir.path().to_path_buf(), dir.path().join("tokenizer.json")] {
        let saved = Tokenizer::open(&place).unwrap();
        assert_eq!(saved.encode_prompt(TEXT).unwrap(), tokenizer.encode_prompt(TEXT).unwrap());
        assert_eq!((saved.bos(), saved.eos()), (Some(258), Some(259)));
    }
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(dir.path().join("tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!((&config["eos_token"], &config["chat_template"]), (&json!("</s>"), &json!("{{ messages }}")));
    let error = tokenizer.save(&dir.path().join("nowhere")).unwrap_err().to_string();
    assert!(error.starts_with("cannot write"), "{error}");
}

#[test]
fn what_ends_a_text_is_found_beside_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let vocab = vocabulary().into_iter().zip(0..).collect::<std::collections::HashMap<String, u32>>();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), vec![]);
    let mut inner = tokenizers::Tokenizer::new(bpe.build().unwrap());
    inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    write("tokenizer.json", &inner.to_string(false).unwrap());
    let eos = || Tokenizer::open(dir.path()).unwrap().eos();
    assert_eq!(eos(), None);
    write("config.json", r#"{"eos_token_id": [7, 8]}"#);
    assert_eq!(eos(), Some(7));
    write("generation_config.json", r#"{"eos_token_id": 9}"#);
    assert_eq!(eos(), Some(9));
    write("tokenizer_config.json", r#"{"eos_token": {"content": "</s>", "special": true}}"#);
    assert_eq!(eos(), Some(259));
    write("tokenizer_config.json", "[]");
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer_config.json` holds no usable tokenizer: "), "{message}");
    write("tokenizer.json", "{}");
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json` holds no usable tokenizer: "), "{message}");
    let message = Tokenizer::open(&dir.path().join("none")).unwrap_err().to_string();
    assert!(message.starts_with("cannot open"), "{message}");
}
