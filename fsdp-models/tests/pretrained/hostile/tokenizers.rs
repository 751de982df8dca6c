//! Tokenizers that the library builds, and that would fill memory or end the program when they are used.

use std::fs;
use std::path::Path;

use fsdp_models::Tokenizer;
use serde_json::{Value, json};

use super::allocator;

/// The tokenizer of bytes, with a part that is another.
fn with(dir: &Path, part: &str, value: Value) -> fsdp_models::Result<Tokenizer> {
    Tokenizer::of_bytes()?.save(dir)?;
    let path = dir.join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    *json.pointer_mut(part).unwrap() = value;
    fs::write(&path, json.to_string()).unwrap();
    Tokenizer::open(&path)
}

#[test]
fn padding_is_not_for_texts_that_are_cut_into_samples() {
    let dir = tempfile::tempdir().unwrap();
    let padding = |strategy: Value, multiple: Value| {
        json!({"strategy": strategy, "direction": "Right", "pad_to_multiple_of": multiple, "pad_id": 0, "pad_type_id": 0,
               "pad_token": "!"})
    };
    for padding in [
        padding(json!({"Fixed": 1u64 << 40}), json!(null)),
        padding(json!("BatchLongest"), json!(1u64 << 62)),
        padding(json!({"Fixed": u64::MAX}), json!(0)),
    ] {
        let tokenizer = with(dir.path(), "/padding", padding).unwrap();
        allocator::LARGEST.set(0);
        assert_eq!(tokenizer.encode("ab").unwrap(), [97, 98]);
        assert_eq!(tokenizer.encode_prompt("").unwrap(), [0; 0]);
        assert!(allocator::LARGEST.get() < 1 << 20);
    }
}

#[test]
fn what_names_what_is_not_there_or_grows_without_bound_is_refused_by_its_part() {
    let dir = tempfile::tempdir().unwrap();
    let template = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}});
    let doubled = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let doubled = |list: &str| json!({"type": "Sequence", list: vec![doubled.clone(); 60]});
    for (part, value, expected) in [
        (
            "/post_processor",
            template,
            "its template `single` names the token `[CLS]`, which it does not define",
        ),
        ("/normalizer", doubled("normalizers"), "its normalizer may make more than 4096 bytes of one"),
        ("/decoder", doubled("decoders"), "its decoder may make more than 4096 bytes of one"),
        (
            "/model/vocab/a",
            json!(u32::MAX),
            "its token `a` has the id 4294967295: expected one below 16777216",
        ),
    ] {
        let message = with(dir.path(), part, value).unwrap_err().to_string();
        assert!(
            message.contains("tokenizer.json` holds no usable tokenizer: ") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn a_panic_of_the_library_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    // It counts down below the beginning of a token of spaces.
    let strip = json!({"type": "Sequence", "decoders": [
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        {"type": "Strip", "content": " ", "start": 0, "stop": u64::MAX},
    ]});
    let tokenizer = with(dir.path(), "/decoder", strip).unwrap();
    let message = tokenizer.decode(&[32, 32]).unwrap_err().to_string();
    assert!(message.ends_with("failed to decode: its parts contradict each other"), "{message}");
    assert_eq!(tokenizer.decode(&[97, 32]).unwrap(), "a");
}
