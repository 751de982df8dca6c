//! The tokenizer inside a GGUF file.

use std::path::PathBuf;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use serde_json::{Map, json};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

use super::guard::guarded;
use super::tables::GGUF;
use super::{Tokenizer, TokenizerError};
use crate::gguf::read_content;
use crate::settings::Setting;

/// How Llama 3 cuts text, from its `tokenizer.json`.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The ways of cutting text that are known, in llama.cpp's words.
const KNOWN: &str = "gpt-2, smollm or llama-bpe";

pub(super) fn open(path: PathBuf) -> crate::Result<Tokenizer> {
    let (_, mut content) = read_content(&path)?;
    let ours = content.metadata.iter().filter(|(key, _)| key.starts_with("tokenizer."));
    GGUF.check(ours).into_result(Some(&path)).map_err(TokenizerError::from)?;
    let invalid = |reason: String| TokenizerError::Invalid { path: path.clone(), reason };
    let cut = PreTokenizer::of(&content).map_err(invalid)?;
    complete(&mut content, cut).map_err(invalid)?;
    let inner = guarded(|| tokenizers::Tokenizer::from_gguf(&content).map_err(reason));
    let mut inner = inner.map_err(invalid)?;
    // candle's puts a space before every text and cuts as GPT-2 whatever it does not know.
    inner.with_pre_tokenizer(Some(cut.build(&content).map_err(invalid)?));
    let config = config(&content, &inner);
    let id = |key| token_id(&content, key).filter(|&id| inner.id_to_token(id).is_some());
    let (bos, eos) = (id(BOS), id(EOS));
    let ends = [EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"]
        .into_iter()
        .filter_map(id)
        .collect();
    Ok(Tokenizer::new(path, inner, config, bos, eos, ends))
}

const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";

/// What a file leaves out is as in llama.cpp: its kind of pre-tokenizer decides. A token that is to be added must be known.
fn complete(content: &mut Content, cut: PreTokenizer) -> Result<(), String> {
    let llama3 = cut == PreTokenizer::Llama3;
    content.metadata.entry(ADD_BOS.into()).or_insert(Value::Bool(llama3));
    // Words that are in the vocabulary are taken whole, whatever the merges would make of them.
    content.metadata.entry("tokenizer.ggml.ignore_merges".into()).or_insert(Value::Bool(llama3));
    for (add, token) in [(ADD_BOS, BOS), (ADD_EOS, EOS)] {
        let adds = match content.metadata.get(add) {
            None => false,
            Some(Value::Bool(adds)) => *adds,
            Some(other) => return Err(format!("`{add}` is {}: expected a boolean", other.shown())),
        };
        let tokens = match content.metadata.get("tokenizer.ggml.tokens") {
            Some(Value::Array(tokens)) => tokens.len(),
            _ => 0,
        };
        if adds && token_id(content, token).is_none_or(|id| id as usize >= tokens) {
            return Err(format!("a token is added to every prompt, and `{token}` does not say which"));
        }
    }
    Ok(())
}

fn token_id(content: &Content, key: &str) -> Option<u32> {
    u32::try_from(content.metadata.get(key)?.to_u64().ok()?).ok()
}

/// The error's words, without the backtrace that `RUST_BACKTRACE` adds to them.
fn reason(error: candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => inner.to_string(),
        other => other.to_string(),
    }
}

/// The ways of cutting a text that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PreTokenizer {
    Gpt2,
    SmolLm,
    Llama3,
}

impl PreTokenizer {
    fn of(content: &Content) -> Result<Self, String> {
        let key = "tokenizer.ggml.pre";
        match content.metadata.get(key) {
            Some(Value::String(pre)) => match pre.as_str() {
                "gpt-2" | "gpt2" => Ok(PreTokenizer::Gpt2),
                "smollm" => Ok(PreTokenizer::SmolLm),
                "llama-bpe" | "llama3" | "llama-v3" => Ok(PreTokenizer::Llama3),
                _ => {
                    let shown = Value::String(pre.clone()).shown();
                    Err(format!("`{key}` is {shown}: expected {KNOWN}"))
                }
            },
            Some(_) => Err(format!("`{key}` is no text: expected {KNOWN}")),
            None => Err(format!("it has no `{key}`: expected {KNOWN}")),
        }
    }

    fn build(self, content: &Content) -> Result<PreTokenizerWrapper, String> {
        let space =
            matches!(content.metadata.get("tokenizer.ggml.add_space_prefix"), Some(Value::Bool(true)));
        let bytes = |regex| ByteLevel::new(space, true, regex);
        Ok(match self {
            PreTokenizer::Gpt2 => bytes(true).into(),
            PreTokenizer::SmolLm => Sequence::new(vec![Digits::new(true).into(), bytes(true).into()]).into(),
            PreTokenizer::Llama3 => {
                let pattern = SplitPattern::Regex(LLAMA3.to_owned());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                let split = split.map_err(|error| error.to_string())?;
                Sequence::new(vec![split.into(), bytes(false).into()]).into()
            }
        })
    }
}

fn config(content: &Content, tokenizer: &tokenizers::Tokenizer) -> Map<String, serde_json::Value> {
    let mut config = Map::new();
    config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    config.insert("clean_up_tokenization_spaces".into(), json!(false));
    for (key, field) in [
        (BOS, "bos_token"),
        (EOS, "eos_token"),
        ("tokenizer.ggml.unknown_token_id", "unk_token"),
        ("tokenizer.ggml.padding_token_id", "pad_token"),
    ] {
        if let Some(token) = token_id(content, key).and_then(|id| tokenizer.id_to_token(id)) {
            config.insert(field.into(), json!(token));
        }
    }
    if let Some(Value::String(template)) = content.metadata.get("tokenizer.chat_template") {
        config.insert("chat_template".into(), json!(template));
    }
    config
}
