//! The tokenizer inside a GGUF file.

use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use serde_json::{Map, json};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

use super::{TokenizerError, guarded};
use crate::pretrained::gguf::read_content;

/// How Llama 3 cuts text, from its `tokenizer.json`.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The ways of cutting text that are known, in llama.cpp's words.
const KNOWN: &str = "gpt-2, smollm or llama-bpe";

/// The tokenizer and what `tokenizer_config.json` would say of it.
pub(super) fn open(path: &Path) -> crate::Result<(tokenizers::Tokenizer, Map<String, serde_json::Value>)> {
    let (_, content) = read_content(path)?;
    let invalid = |reason: String| TokenizerError::Invalid { path: path.to_path_buf(), reason };
    let cut = pre_tokenizer(&content).map_err(invalid)?;
    let mut tokenizer = guarded(path, || tokenizers::Tokenizer::from_gguf(&content).map_err(reason))?;
    // candle's puts a space before every text and cuts as GPT-2 whatever it does not know.
    tokenizer.with_pre_tokenizer(Some(cut));
    let config = config(&content, &tokenizer);
    Ok((tokenizer, config))
}

/// The error's words, without the backtrace that `RUST_BACKTRACE` adds to them.
fn reason(error: candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => inner.to_string(),
        other => other.to_string(),
    }
}

fn pre_tokenizer(content: &Content) -> Result<PreTokenizerWrapper, String> {
    let key = "tokenizer.ggml.pre";
    let pre = match content.metadata.get(key) {
        Some(Value::String(pre)) => pre.as_str(),
        Some(_) => return Err(format!("`{key}` is no text: expected {KNOWN}")),
        None => return Err(format!("it has no `{key}`: expected {KNOWN}")),
    };
    let space = matches!(content.metadata.get("tokenizer.ggml.add_space_prefix"), Some(Value::Bool(true)));
    let bytes = |regex| ByteLevel::new(space, true, regex);
    Ok(match pre {
        "gpt-2" | "gpt2" => bytes(true).into(),
        "smollm" => Sequence::new(vec![Digits::new(true).into(), bytes(true).into()]).into(),
        "llama-bpe" | "llama3" | "llama-v3" => {
            let pattern = SplitPattern::Regex(LLAMA3.to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
            let split = split.map_err(|error| error.to_string())?;
            Sequence::new(vec![split.into(), bytes(false).into()]).into()
        }
        other => return Err(format!("`{key}` is `{other}`: expected {KNOWN}")),
    })
}

fn config(content: &Content, tokenizer: &tokenizers::Tokenizer) -> Map<String, serde_json::Value> {
    let mut config = Map::new();
    config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    config.insert("clean_up_tokenization_spaces".into(), json!(false));
    for (key, field) in [
        ("tokenizer.ggml.bos_token_id", "bos_token"),
        ("tokenizer.ggml.eos_token_id", "eos_token"),
        ("tokenizer.ggml.unknown_token_id", "unk_token"),
        ("tokenizer.ggml.padding_token_id", "pad_token"),
    ] {
        let id = content.metadata.get(key).and_then(|id| u32::try_from(id.to_u64().ok()?).ok());
        if let Some(token) = id.and_then(|id| tokenizer.id_to_token(id)) {
            config.insert(field.into(), json!(token));
        }
    }
    if let Some(Value::String(template)) = content.metadata.get("tokenizer.chat_template") {
        config.insert("chat_template".into(), json!(template));
    }
    config
}
