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
    for (pre, expected) in [("gpt-2", 1), ("smollm", 2), ("llama-bpe", 1), ("llama3", 1), ("gpt2", 1)] {
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

/// llama.cpp's rules for what a file leaves out: `llama-bpe` begins every prompt with a token, and takes words that are in the
/// vocabulary whole.
#[test]
fn what_a_gguf_file_leaves_out_is_as_in_llama_cpp() {
    type Metadata = Vec<(&'static str, Value)>;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let open = |pre: &str, change: &dyn Fn(&mut Metadata)| {
        write_gguf(&path, |metadata| {
            metadata.retain(|(key, _)| *key != "tokenizer.ggml.add_bos_token");
            replace(metadata, "tokenizer.ggml.pre", Value::String(pre.into()));
            change(metadata);
        });
        Tokenizer::open(&path)
    };
    let prompt =
        |pre: &str, change: &dyn Fn(&mut Metadata)| open(pre, change).unwrap().encode_prompt("b").unwrap();
    let b = open("gpt-2", &|_| {}).unwrap().token("b").unwrap();
    for (pre, begins) in
        [("llama-bpe", true), ("llama3", true), ("llama-v3", true), ("gpt-2", false), ("smollm", false)]
    {
        let expected = if begins { vec![258, b] } else { vec![b] };
        assert_eq!(prompt(pre, &|_| {}), expected, "{pre}");
        assert_eq!(open(pre, &|_| {}).unwrap().encode("b").unwrap(), [b], "{pre}");
        for said in [true, false] {
            let expected = if said { vec![258, b] } else { vec![b] };
            let say =
                |metadata: &mut Vec<_>| metadata.push(("tokenizer.ggml.add_bos_token", Value::Bool(said)));
            assert_eq!(prompt(pre, &say), expected, "{pre} {said}");
        }
        let end = |metadata: &mut Vec<_>| metadata.push(("tokenizer.ggml.add_eos_token", Value::Bool(true)));
        assert_eq!(prompt(pre, &end).last(), Some(&259), "{pre}");
        // A word of the vocabulary that no merge leads to.
        let word = |metadata: &mut Vec<(&'static str, Value)>| {
            let Some((_, Value::Array(tokens))) =
                metadata.iter_mut().find(|(key, _)| *key == "tokenizer.ggml.tokens")
            else {
                unreachable!();
            };
            tokens[257] = Value::String("bbb".into());
            replace(metadata, "tokenizer.ggml.merges", Value::Array(vec![Value::String("Ġ a".into())]));
        };
        let whole = open(pre, &word).unwrap().encode("bbb").unwrap();
        assert_eq!(whole, if begins { vec![257] } else { vec![b; 3] }, "{pre}");
    }
    let without = |metadata: &mut Vec<(&'static str, Value)>| {
        metadata.retain(|(key, _)| !key.ends_with("bos_token_id"))
    };
    open("smollm", &without).unwrap();
    let message = open("llama-bpe", &without).unwrap_err().to_string();
    assert!(
        message.ends_with(
            "a token is added to every prompt, and `tokenizer.ggml.bos_token_id` does not say which"
        ),
        "{message}"
    );
    let unknown =
        |metadata: &mut Vec<_>| metadata.push(("tokenizer.ggml.normalizer.lowercase", Value::Bool(true)));
    let message = open("gpt-2", &unknown).unwrap_err().to_string();
    assert!(message.contains("unknown setting `tokenizer.ggml.normalizer.lowercase` (true): "), "{message}");
}

/// A directory with a tokenizer whose tokens are bytes, changed.
fn write_json(dir: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let vocab = vocabulary().into_iter().zip(0..).collect::<tokenizers::models::bpe::Vocab>();
    let mut inner =
        tokenizers::Tokenizer::new(BPE::builder().vocab_and_merges(vocab, vec![]).build().unwrap());
    inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    let mut json = serde_json::from_str(&inner.to_string(false).unwrap()).unwrap();
    change(&mut json);
    fs::write(dir.join("tokenizer.json"), json.to_string()).unwrap();
}

#[test]
fn what_a_file_says_of_truncation_and_padding_cuts_no_text_short_and_is_saved_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let text = "no text is cut short ".repeat(450);
    let truncation = |length: u64, side: &str| json!({"direction": side, "max_length": length, "strategy": "LongestFirst", "stride": 0});
    let padding = |strategy: serde_json::Value, multiple: Option<u64>| {
        json!({"strategy": strategy, "direction": "Left", "pad_to_multiple_of": multiple, "pad_id": 0, "pad_type_id": 0,
               "pad_token": "!"})
    };
    for (truncation, padding) in [
        (truncation(32, "Right"), json!(null)),
        (truncation(1, "Left"), padding(json!("BatchLongest"), Some(8))),
        (json!(null), padding(json!({"Fixed": 20_000}), None)),
        (json!(null), padding(json!({"Fixed": 1u64 << 40}), Some(1 << 62))),
    ] {
        write_json(dir.path(), |json| {
            json["truncation"] = truncation.clone();
            json["padding"] = padding.clone();
        });
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        for ids in [tokenizer.encode(&text).unwrap(), tokenizer.encode_prompt(&text).unwrap()] {
            assert_eq!(ids.len(), text.len());
            assert!(ids.chunks(21).all(|part| part == &ids[..21]), "the text is a repetition of 21 bytes");
        }
        let saved = tempfile::tempdir().unwrap();
        tokenizer.save(saved.path()).unwrap();
        let json: serde_json::Value =
            serde_json::from_slice(&fs::read(saved.path().join("tokenizer.json")).unwrap()).unwrap();
        assert_eq!((&json["truncation"], &json["padding"]), (&truncation, &padding));
        assert_eq!(Tokenizer::open(saved.path()).unwrap().encode(&text).unwrap().len(), text.len());
    }
    // What could not be saved again is refused at once.
    let stride = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9});
    write_json(dir.path(), |json| json["truncation"] = stride.clone());
    let error = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("its truncation cannot be: ") && error.contains("stride set to 9"), "{error}");
}

#[test]
fn settings_that_would_cut_text_in_another_way_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let message = || Tokenizer::open(dir.path()).unwrap_err().to_string();
    write_json(dir.path(), |json| {
        json["lattice"] = json!({"beam": 4});
        json["model"]["dropout"] = json!(0.1);
        json["model"]["smoothing"] = json!(true);
    });
    let expected = format!(
        "`{}`: model.dropout is 0.1: only 0 is supported; unknown settings `lattice` (a map of 1), `model.smoothing` (true): they may \
         change what the file means; if they do not, remove them",
        dir.path().join("tokenizer.json").display()
    );
    assert_eq!(message(), expected);
    write_json(dir.path(), |json| json["model"]["dropout"] = json!(0.0));
    let config = |text: &str| fs::write(dir.path().join("tokenizer_config.json"), text).unwrap();
    for (text, expected) in [
        (r#"{"split_special_tokens": true}"#, "split_special_tokens is true: only false is supported"),
        (
            r#"{"do_lower_case": true, "use_fast": true, "padding": "max_length"}"#,
            "unknown setting `do_lower_case` (true): ",
        ),
        (
            r#"{"added_tokens_decoder": {"258": {"content": "<s>"}, "300": {"content": "<tool>"}}}"#,
            "its `added_tokens_decoder` has a token 300 that tokenizer.json does not have so",
        ),
        (
            r#"{"added_tokens_decoder": {"257": {"content": "<s>"}}}"#,
            "its `added_tokens_decoder` has a token 257 that tokenizer.json does not have so",
        ),
    ] {
        config(text);
        let message = message();
        assert!(message.contains("tokenizer_config.json`") && message.contains(expected), "{message}");
    }
    // What Hugging Face's libraries write for Llamas.
    config(
        r#"{"add_prefix_space": null, "added_tokens_decoder": {"258": {"content": "<s>", "lstrip": false, "special": true}},
            "additional_special_tokens": ["<s>"], "backend": "tokenizers", "bos_token": "<s>", "chat_template": "{{ x }}",
            "clean_up_tokenization_spaces": false, "do_lower_case": false, "eos_token": "</s>", "extra_special_tokens": {},
            "is_local": true, "legacy": true, "model_input_names": ["input_ids"], "model_max_length": 1e30, "pad_token": "</s>",
            "padding_side": "right", "sp_model_kwargs": {}, "spaces_between_special_tokens": false, "split_special_tokens": false,
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": null, "use_default_system_prompt": false,
            "vocab_size": 49152}"#,
    );
    assert_eq!(Tokenizer::open(dir.path()).unwrap().bos(), Some(258));
}

/// What `transformers` 5.24 makes of the same files: beside a `tokenizer.json` the two settings do not count.
#[test]
fn what_comes_around_a_prompt_is_what_tokenizer_json_says() {
    let dir = tempfile::tempdir().unwrap();
    let template = json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [258], "tokens": ["<s>"]}}});
    for said in [
        json!({}),
        json!({"add_bos_token": true}),
        json!({"add_bos_token": false}),
        json!({"add_bos_token": true, "add_eos_token": true}),
        json!({"add_eos_token": true}),
    ] {
        let mut config = said;
        config["bos_token"] = json!("<s>");
        config["eos_token"] = json!({"content": "</s>"});
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        for (template, begins) in [(template.clone(), true), (json!(null), false)] {
            write_json(dir.path(), |json| json["post_processor"] = template);
            let tokenizer = Tokenizer::open(dir.path()).unwrap();
            let a = tokenizer.token("a").unwrap();
            let expected = if begins { vec![258, a] } else { vec![a] };
            assert_eq!(tokenizer.encode_prompt("a").unwrap(), expected, "{config}");
            assert_eq!(tokenizer.encode("a").unwrap(), [a]);
        }
    }
}

#[test]
fn everything_that_ends_a_text_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    write_gguf(&path, |metadata| metadata.push(("tokenizer.ggml.eot_token_id", Value::U32(256))));
    let tokenizer = Tokenizer::open(&path).unwrap();
    assert_eq!((tokenizer.eos(), tokenizer.ends()), (Some(259), &[256, 259][..]));

    write_json(dir.path(), |_| {});
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let ends = || Tokenizer::open(dir.path()).unwrap().ends().to_vec();
    assert_eq!(ends(), [0u32; 0]);
    write("config.json", r#"{"model_type": "qwen2", "eos_token_id": [7, 8]}"#);
    assert_eq!(ends(), [7, 8]);
    write("generation_config.json", r#"{"max_length": 20}"#);
    assert_eq!(ends(), [7, 8]);
    write("generation_config.json", r#"{"eos_token_id": [257, 258, 257]}"#);
    assert_eq!(ends(), [257, 258]);
    write("tokenizer_config.json", r#"{"eos_token": "</s>"}"#);
    assert_eq!(ends(), [257, 258, 259]);
    write("generation_config.json", "{\"eos_token_id\": ");
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(message.contains("generation_config.json` is not a JSON object: "), "{message}");
}

/// Read as none, a text would never end.
#[test]
fn tokens_that_are_no_ids_are_refused_by_the_name_of_the_setting() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let ids = "expected the id of a token or a list of ids";
    let token = "expected the text of a token, or a map with it as `content`";
    for (file, json, expected) in [
        ("generation_config.json", r#"{"eos_token_id": ["a"]}"#, format!("eos_token_id holds `a`: {ids}")),
        ("generation_config.json", r#"{"eos_token_id": -1}"#, format!("eos_token_id is -1: {ids}")),
        ("generation_config.json", r#"{"bos_token_id": 1.5}"#, format!("bos_token_id is 1.5: {ids}")),
        (
            "config.json",
            r#"{"model_type": "qwen2", "eos_token_id": [2, -1]}"#,
            format!("eos_token_id holds -1: {ids}"),
        ),
        ("tokenizer_config.json", r#"{"eos_token": 2}"#, format!("eos_token is 2: {token}")),
        (
            "tokenizer_config.json",
            r#"{"bos_token": {"special": true}}"#,
            format!("bos_token is a map of 1: {token}"),
        ),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": [1]}"#,
            "added_tokens_decoder is a list of 1: expected a map".into(),
        ),
    ] {
        write_json(dir.path(), |_| {});
        write(file, json);
        let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(message.ends_with(&format!("{file}`: {expected}")), "{message}");
        fs::remove_file(dir.path().join(file)).unwrap();
    }
    write_json(dir.path(), |json| json["model"]["ignore_merges"] = json!("yes"));
    let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
    assert!(
        message.ends_with("tokenizer.json`: model.ignore_merges is `yes`: expected true or false"),
        "{message}"
    );
    let path = dir.path().join("model.gguf");
    write_gguf(&path, |metadata| replace(metadata, "tokenizer.ggml.eos_token_id", Value::I32(-1)));
    let message = Tokenizer::open(&path).unwrap_err().to_string();
    let expected = "model.gguf`: tokenizer.ggml.eos_token_id is -1: expected the id of a token";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn what_ends_a_text_is_found_beside_the_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write_json(dir.path(), |_| {});
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
    assert!(message.starts_with("cannot read"), "{message}");
}

#[test]
fn a_tokenizer_whose_parts_contradict_each_other_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    // A template with a token that it does not describe.
    write_json(dir.path(), |json| {
        json["post_processor"] = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": {},
            "single": [{"SpecialToken": {"id": "[ABSENT]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]});
    });
    let outcome = Tokenizer::open(dir.path()).and_then(|tokenizer| tokenizer.encode_prompt("a"));
    let message = outcome.unwrap_err().to_string();
    assert!(
        message.contains("tokenizer.json`")
            && message.contains("the token `[ABSENT]`, which it does not define"),
        "{message}"
    );
}
