//! Converts text to token ids and back, with the tokenizer of a pretrained model.

mod bytes;
mod gguf;
mod growth;
mod guard;
mod tables;

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use fsdp::files::{self, AtomicFile, FileError, brief_to};
use serde_json::{Map, Value};

use tokenizers::utils::padding::PaddingParams;
use tokenizers::utils::truncation::TruncationParams;

use self::guard::guarded;
use crate::config::MAX_CONFIG;
use crate::error::PretrainedError;
pub use crate::error::TokenizerError;
use crate::generation::{check_tokens, read_generation_config, token_ids};
use crate::gguf::is_gguf;
use crate::settings::read_object;

/// Largest tokenizer, in bytes.
const MAX_TOKENIZER: u64 = 1 << 29;

/// A model's tokenizer. Threads may share it.
///
/// ```no_run
/// use std::path::Path;
/// use fsdp_models::Tokenizer;
///
/// let tokenizer = Tokenizer::open(Path::new("SmolLM2-135M-Instruct.gguf"))?;
/// let ids = tokenizer.encode("The capital of France")?;
/// assert_eq!(tokenizer.decode(&ids)?, "The capital of France");
/// # Ok::<(), fsdp_models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tokenizer {
    path: PathBuf,
    /// Without truncation and padding: what the file says of them belongs to whoever saved it, and would cut texts short.
    inner: tokenizers::Tokenizer,
    /// They go with it where it is saved.
    truncation: Option<TruncationParams>,
    padding: Option<PaddingParams>,
    /// `tokenizer_config.json`, or what it would say.
    config: Map<String, Value>,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: Vec<u32>,
}

impl Tokenizer {
    /// Reads a tokenizer: of a directory that holds a `tokenizer.json`, of such a file itself, or of a GGUF file. Reads
    /// only; no rank has to do it together with others.
    ///
    /// What begins and ends a text is in `tokenizer_config.json` beside it, and as ids in `generation_config.json` or else
    /// `config.json`. Truncation and padding that the file sets are for others: texts are never cut short.
    ///
    /// # Errors
    /// There is none, it is damaged, it is of a kind that is not implemented, or one of these files has settings that are not
    /// known here, all of which are named; a GGUF file must have a byte-level vocabulary (`gpt2`) and say how it cuts text.
    pub fn open(path: &Path) -> crate::Result<Self> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        if is_gguf(&file)? { gguf::open(file) } else { Self::open_json(file) }
    }

    fn open_json(file: PathBuf) -> crate::Result<Self> {
        let inner = build(&file)?;
        let path = file.with_file_name("tokenizer_config.json");
        let config = match read_object(&path, MAX_CONFIG) {
            Err(error) if error.cause.kind() == ErrorKind::NotFound => Map::new(),
            json => json?
                .map_err(|error| TokenizerError::Invalid { path: path.clone(), reason: error.to_string() })?,
        };
        tables::check_config(&config).into_result(Some(&path)).map_err(TokenizerError::from)?;
        check_added(&inner, &config, &path)?;
        let token = |field: &str| {
            let token = config.get(field)?;
            inner.token_to_id(token.as_str().or_else(|| token.get("content")?.as_str())?)
        };
        let dir = file.parent().unwrap_or(Path::new(""));
        let (generation, model) = (read_generation_config(dir)?, read_model_config(dir)?);
        let ids = |field: &str| {
            // As for `transformers`: what is not said of completions is what is said of the model.
            let found = [&generation, &model].into_iter().flatten().map(|json| token_ids(json, field));
            found.into_iter().find(|ids| !ids.is_empty()).unwrap_or_default()
        };
        let bos = token("bos_token").or_else(|| ids("bos_token_id").first().copied());
        let mut ends = ids("eos_token_id");
        let eos = token("eos_token").or_else(|| ends.first().copied());
        ends.extend(eos);
        Ok(Self::new(file, inner, config, bos, eos, ends))
    }

    fn new(
        path: PathBuf,
        mut inner: tokenizers::Tokenizer,
        config: Map<String, Value>,
        bos: Option<u32>,
        eos: Option<u32>,
        mut ends: Vec<u32>,
    ) -> Self {
        let truncation = inner.get_truncation().cloned();
        let padding = inner.get_padding().cloned();
        inner.with_padding(None).with_truncation(None).expect("no truncation is always possible");
        ends.sort_unstable();
        ends.dedup();
        Tokenizer { path, inner, truncation, padding, config, bos, eos, ends }
    }

    /// The tokens of a text, with nothing put before or after it. Texts of special tokens, `<|im_start|>` for instance,
    /// become those tokens.
    ///
    /// # Errors
    /// The tokenizer's own, for text that it cannot cut.
    pub fn encode(&self, text: &str) -> crate::Result<Vec<u32>> {
        self.encode_as(text, false)
    }

    /// The tokens of a text with what the model expects around it, a token that begins it for instance.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> crate::Result<Vec<u32>> {
        self.encode_as(text, true)
    }

    fn encode_as(&self, text: &str, special: bool) -> crate::Result<Vec<u32>> {
        let encoding = self.attempt("encode", || self.inner.encode_fast(text, special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, special ones left out. Ids beyond the vocabulary are left out too; bytes that are no UTF-8
    /// become `U+FFFD`.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn decode(&self, ids: &[u32]) -> crate::Result<String> {
        Ok(self.attempt("decode", || self.inner.decode(ids, true))?)
    }

    fn attempt<T>(
        &self,
        action: &'static str,
        work: impl FnOnce() -> tokenizers::Result<T>,
    ) -> Result<T, TokenizerError> {
        let outcome = guarded(|| work().map_err(|error| error.to_string()));
        outcome.map_err(|reason| TokenizerError::Failed { path: self.path.clone(), action, reason })
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// All tokens of which each ends a completion, sorted: the one that ends a text, and those that the model came with for it.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Number of token ids, added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of one token, by its text in the vocabulary.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json`, for Hugging Face's libraries, with the truncation and padding that it
    /// came with. To be called by one rank.
    ///
    /// # Errors
    /// The directory does not exist or is not writable.
    pub fn save(&self, dir: &Path) -> crate::Result<()> {
        let mut inner = self.inner.clone();
        inner.with_padding(self.padding.clone());
        let json = self.attempt("save", || {
            inner.with_truncation(self.truncation.clone())?;
            inner.to_string(true)
        })?;
        let config = serde_json::to_string_pretty(&self.config).expect("a JSON value is JSON");
        for (name, text) in [("tokenizer.json", json), ("tokenizer_config.json", config)] {
            let path = dir.join(name);
            let mut file = AtomicFile::create(&path)?;
            file.write_all(text.as_bytes()).map_err(FileError::on("write", &path))?;
            file.commit()?;
        }
        Ok(())
    }
}

fn build(file: &Path) -> crate::Result<tokenizers::Tokenizer> {
    let bytes = files::read(file, MAX_TOKENIZER)?;
    tables::check_json(&bytes).into_result(Some(file)).map_err(TokenizerError::from)?;
    let invalid = |reason| TokenizerError::Invalid { path: file.to_path_buf(), reason };
    // What is no JSON the library says best.
    if let Ok(json) = serde_json::from_slice(&bytes) {
        growth::check(&json).map_err(invalid)?;
    }
    let inner = guarded(|| {
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| error.to_string())?;
        // What cannot be set could not be saved again.
        let truncation = inner.get_truncation().cloned();
        inner.with_truncation(truncation).map_err(|error| format!("its truncation cannot be: {error}"))?;
        Ok(inner)
    });
    Ok(inner.map_err(invalid)?)
}

/// Refuses tokens that `tokenizer_config.json` adds to those of `tokenizer.json`: they would be cut as plain text.
fn check_added(
    inner: &tokenizers::Tokenizer,
    config: &Map<String, Value>,
    path: &Path,
) -> Result<(), TokenizerError> {
    let Some(Value::Object(added)) = config.get("added_tokens_decoder") else { return Ok(()) };
    let differs = |(id, token): &(&String, &Value)| {
        let known = id.parse().ok().and_then(|id| inner.id_to_token(id));
        known.as_deref() != token.get("content").and_then(Value::as_str)
    };
    match added.iter().find(differs) {
        Some((id, _)) => {
            let id = brief_to(id, 20);
            let reason =
                format!("its `added_tokens_decoder` has a token {id} that tokenizer.json does not have so");
            Err(TokenizerError::Invalid { path: path.to_path_buf(), reason })
        }
        None => Ok(()),
    }
}

/// The `config.json` of a directory, of whatever model it is.
fn read_model_config(dir: &Path) -> crate::Result<Option<Map<String, Value>>> {
    let path = dir.join("config.json");
    match read_object(&path, MAX_CONFIG) {
        Err(error) if error.cause.kind() == ErrorKind::NotFound => Ok(None),
        json => {
            let json = json?.map_err(|cause| PretrainedError::Json { path: path.clone(), cause })?;
            check_tokens(&json).into_result(Some(&path)).map_err(PretrainedError::from)?;
            Ok(Some(json))
        }
    }
}
