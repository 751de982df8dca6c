//! `generation_config.json`: settings of completions, by the author of a model. Only the tokens that end a text are read.

use std::io::Write;
use std::path::Path;

use fsdp::files::{AtomicFile, FileError};
use serde_json::{Map, Value};

use crate::config::MAX_CONFIG;
use crate::error::PretrainedError;
use crate::settings::{Kind, Known, Refusals, Table, read_object};

const GENERATION_CONFIG: &str = "generation_config.json";

/// The tokens that begin and end a text, in this file and in `config.json`.
const TOKENS: [&str; 2] = ["bos_token_id", "eos_token_id"];

/// What it may say. Completions here are made by settings that are given with them, so most of it is not looked at, as long as it
/// is known what it is.
const TABLE: Table = Table {
    known: &[
        Known::Read(Kind::Ids, &TOKENS),
        // Where the file comes from.
        Known::Ignored(&["_from_model_config", "transformers_version"]),
        // Other tokens.
        Known::Ignored(&["decoder_start_token_id", "pad_token_id"]),
        // How the next token is chosen.
        Known::Ignored(&[
            "bad_words_ids",
            "begin_suppress_tokens",
            "constraints",
            "diversity_penalty",
            "do_sample",
            "dola_layers",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "encoder_repetition_penalty",
            "epsilon_cutoff",
            "eta_cutoff",
            "exponential_decay_length_penalty",
            "force_words_ids",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "guidance_scale",
            "length_penalty",
            "max_length",
            "max_new_tokens",
            "max_time",
            "min_length",
            "min_new_tokens",
            "min_p",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "penalty_alpha",
            "remove_invalid_values",
            "renormalize_logits",
            "repetition_penalty",
            "sequence_bias",
            "stop_strings",
            "suppress_tokens",
            "temperature",
            "token_healing",
            "top_h",
            "top_k",
            "top_p",
            "typical_p",
            "watermarking_config",
        ]),
        // How the same tokens are computed faster, and what is returned beside them.
        Known::Ignored(&[
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_ensemble_weight",
            "assistant_lookbehind",
            "cache_config",
            "cache_implementation",
            "compile_config",
            "continuous_batching_config",
            "disable_compile",
            "is_assistant",
            "low_memory",
            "max_cache_len",
            "max_matching_ngram_size",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "output_attentions",
            "output_hidden_states",
            "output_logits",
            "output_scores",
            "prefill_chunk_size",
            "prompt_lookup_num_tokens",
            "return_dict_in_generate",
            "return_legacy_cache",
            "speculation_type",
            "target_lookbehind",
            "use_cache",
            "use_mtp",
        ]),
    ],
    off_is_unset: true,
};

/// Reads the file of a directory, if it has one.
pub(crate) fn read_generation_config(dir: &Path) -> Result<Option<Map<String, Value>>, PretrainedError> {
    let path = dir.join(GENERATION_CONFIG);
    let json = match read_object(&path, MAX_CONFIG) {
        Err(error) if error.cause.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        json => json?.map_err(|cause| PretrainedError::Json { path: path.clone(), cause })?,
    };
    TABLE.check(json.iter()).into_result(Some(&path))?;
    Ok(Some(json))
}

pub(crate) fn write_json(file: &mut AtomicFile, value: &Value) -> Result<(), FileError> {
    let mut text = serde_json::to_vec_pretty(value).expect("a JSON value is JSON");
    text.push(b'\n');
    let path = file.target().to_path_buf();
    file.write_all(&text).map_err(FileError::on("write", &path))
}

/// Writes the file into a directory.
pub(crate) fn write_generation_config(dir: &Path, json: &Map<String, Value>) -> Result<(), FileError> {
    let mut file = AtomicFile::create(&dir.join(GENERATION_CONFIG))?;
    write_json(&mut file, &Value::Object(json.clone()))?;
    file.commit()
}

/// Refuses tokens of a `config.json` that are no ids. What else it says belongs to its model.
pub(crate) fn check_tokens(json: &Map<String, Value>) -> Refusals {
    let table = Table { known: &[Known::Read(Kind::Ids, &TOKENS)], off_is_unset: true };
    table.check(json.iter().filter(|(name, _)| TOKENS.contains(&name.as_str())))
}

/// The ids that a setting names: one, or a list of them. The file has been checked.
pub(crate) fn token_ids(json: &Map<String, Value>, field: &str) -> Vec<u32> {
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    match json.get(field) {
        Some(Value::Array(values)) => values.iter().filter_map(id).collect(),
        Some(value) => id(value).into_iter().collect(),
        None => Vec::new(),
    }
}
