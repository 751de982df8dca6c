//! Text to token ids and back, with the tokenizer that a pretrained model came with.

mod bytes;
mod gguf;

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use fsdp::files::{self, AtomicFile, FileError, said};
use serde_json::{Map, Value};

use crate::config::MAX_CONFIG;
use crate::pretrained::is_gguf;

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
    inner: tokenizers::Tokenizer,
    /// `tokenizer_config.json`, or what it would say.
    config: Map<String, Value>,
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Tokenizer {
    /// Reads a tokenizer: of a directory that holds a `tokenizer.json`, of such a file itself, or of a GGUF file. Reads
    /// only; no rank has to do it together with others.
    ///
    /// What begins and ends a text is in `tokenizer_config.json` beside it, else as an id in `generation_config.json` or
    /// `config.json`.
    ///
    /// # Errors
    /// There is none, it is damaged, or it is of a kind that is not implemented; a GGUF file must have a byte-level
    /// vocabulary (`gpt2`) and say how it cuts text.
    pub fn open(path: &Path) -> crate::Result<Self> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        let (inner, config) = if is_gguf(&file)? { gguf::open(&file)? } else { open_json(&file)? };
        let token = |field: &str| {
            let token = config.get(field)?;
            inner.token_to_id(token.as_str().or_else(|| token.get("content")?.as_str())?)
        };
        let dir = file.parent().unwrap_or(Path::new(""));
        let id = |field: &str| {
            ["generation_config.json", "config.json"].iter().find_map(|name| {
                let json: Value =
                    serde_json::from_slice(&files::read(&dir.join(name), MAX_CONFIG).ok()?).ok()?;
                let id = json.get(field)?;
                u32::try_from(id.as_u64().or_else(|| id.get(0)?.as_u64())?).ok()
            })
        };
        let bos = token("bos_token").or_else(|| id("bos_token_id"));
        let eos = token("eos_token").or_else(|| id("eos_token_id"));
        Ok(Tokenizer { path: file, inner, config, bos, eos })
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
        let encoding =
            self.inner.encode_fast(text, special).map_err(|error| self.failed("encode", &*error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, special ones left out. Ids beyond the vocabulary are left out too; bytes that are no UTF-8
    /// become `U+FFFD`.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn decode(&self, ids: &[u32]) -> crate::Result<String> {
        Ok(self.inner.decode(ids, true).map_err(|error| self.failed("decode", &*error))?)
    }

    fn failed(&self, action: &'static str, error: &(dyn std::error::Error + Send + Sync)) -> TokenizerError {
        TokenizerError::Failed { path: self.path.clone(), action, reason: error.to_string() }
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
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

    /// Writes `tokenizer.json` and `tokenizer_config.json`, for Hugging Face's libraries. To be called by one rank.
    ///
    /// # Errors
    /// The directory does not exist or is not writable.
    pub fn save(&self, dir: &Path) -> crate::Result<()> {
        let json = self.inner.to_string(true).map_err(|error| self.failed("save", &*error))?;
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

fn open_json(file: &Path) -> crate::Result<(tokenizers::Tokenizer, Map<String, Value>)> {
    let bytes = files::read(file, MAX_TOKENIZER)?;
    let tokenizer =
        guarded(file, || tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| error.to_string()))?;
    let path = file.with_file_name("tokenizer_config.json");
    let config = match files::read(&path, MAX_CONFIG) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|error| TokenizerError::Invalid { path, reason: error.to_string() })?,
        Err(error) if error.source.kind() == std::io::ErrorKind::NotFound => Map::new(),
        Err(error) => return Err(error.into()),
    };
    Ok((tokenizer, config))
}

/// The libraries that build tokenizers check their input, but not against all that a damaged file can hold.
fn guarded<T>(path: &Path, build: impl FnOnce() -> Result<T, String>) -> Result<T, TokenizerError> {
    let outcome = catch_unwind(AssertUnwindSafe(build));
    let outcome = outcome.unwrap_or_else(|_| Err("its parts contradict each other".to_owned()));
    outcome.map_err(|reason| TokenizerError::Invalid { path: path.to_path_buf(), reason })
}

/// Why a tokenizer cannot be had or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file holds none, or one that cannot be built.
    #[error("`{}` holds no usable tokenizer: {}", .path.display(), said(.reason))]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer refused its input.
    #[error("the tokenizer of `{}` failed to {action}: {}", .path.display(), said(.reason))]
    Failed {
        /// The file it came from.
        path: PathBuf,
        /// `encode`, `decode` or `save`.
        action: &'static str,
        /// Its own words.
        reason: String,
    },
}
