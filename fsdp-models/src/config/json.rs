//! Reads `config.json` files of other programs.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{ConfigError, LlamaConfig, rope};
use crate::settings::{Kind, Known, Plain, Setting, Table};

/// What is read of a file, with the defaults of the format.
#[derive(Deserialize)]
struct Read {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    vocab_size: usize,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<usize>,
    initializer_range: Option<f64>,
    head_dim: Option<usize>,
}

/// Reads a configuration. `path` is that of the file, where there is one.
pub(super) fn read(json: &Map<String, Value>, path: Option<&Path>) -> Result<LlamaConfig, ConfigError> {
    check_kind(json, path)?;
    let mut refusals = CONFIG.check(json.iter());
    let rotary = rope::read(json, &mut refusals);
    refusals.into_result(path)?;
    let malformed = |cause| ConfigError::Malformed { path: path.map(Path::to_path_buf), cause };
    // What is null is missing.
    let set = json.iter().filter(|(_, value)| !value.is_null());
    let set: Map<String, Value> = set.map(|(name, value)| (name.clone(), value.clone())).collect();
    let read: Read = serde_json::from_value(Value::Object(set)).map_err(malformed)?;
    Ok(LlamaConfig {
        hidden_size: read.hidden_size,
        intermediate_size: read.intermediate_size,
        num_hidden_layers: read.num_hidden_layers,
        num_attention_heads: read.num_attention_heads,
        num_key_value_heads: read.num_key_value_heads.unwrap_or(read.num_attention_heads),
        vocab_size: read.vocab_size,
        rms_norm_eps: read.rms_norm_eps.unwrap_or(1e-6),
        rope_theta: rotary.theta.or(read.rope_theta).unwrap_or(10_000.0),
        rope_scaling: rotary.scaling,
        tie_word_embeddings: read.tie_word_embeddings.unwrap_or(false),
        max_position_embeddings: read.max_position_embeddings.unwrap_or(2048),
        initializer_range: read.initializer_range.unwrap_or(0.02),
        head_dim: read.head_dim,
    })
}

/// Refuses a model of another architecture by its name, rather than by the first field that it lacks.
fn check_kind(json: &Map<String, Value>, path: Option<&Path>) -> Result<(), ConfigError> {
    let set = |name: &str| json.get(name).filter(|value| !value.is_unset());
    let other = match (set("model_type"), set("architectures")) {
        (Some(value), _) => (value.as_str() != Some("llama")).then_some(("model_type", value)),
        (None, Some(architectures)) => {
            let first = architectures.get(0).unwrap_or(architectures);
            let name = first.as_str().unwrap_or_default().to_ascii_lowercase();
            (!name.starts_with("llama")).then_some(("architectures", first))
        }
        (None, None) => None,
    };
    match other {
        Some((field, value)) => {
            Err(ConfigError::OtherKind { path: path.map(Path::to_path_buf), field, value: value.shown() })
        }
        None => Ok(()),
    }
}

/// Every setting that a Llama's `config.json` may have. A switch that is off counts as set: there are models whose default is on.
const CONFIG: Table = Table {
    known: &[
        // Looked at before the others.
        Known::Read(Kind::Any, &["architectures", "model_type", "rope_parameters", "rope_scaling"]),
        Known::Read(
            Kind::Size,
            &[
                "head_dim",
                "hidden_size",
                "intermediate_size",
                "max_position_embeddings",
                "num_attention_heads",
                "num_hidden_layers",
                "num_key_value_heads",
                "vocab_size",
            ],
        ),
        Known::Read(Kind::Number, &["initializer_range", "rms_norm_eps", "rope_theta"]),
        Known::Read(Kind::Bool, &["tie_word_embeddings"]),
        // By the tokenizer.
        Known::Read(Kind::Ids, &["bos_token_id", "eos_token_id"]),
        Known::Only("add_cross_attention", &[Plain::Bool(false)]),
        Known::Only("attention_bias", &[Plain::Bool(false)]),
        Known::Only("attention_dropout", &[Plain::Number(0.0)]),
        Known::Only("bias", &[Plain::Bool(false)]),
        // Two names of one function.
        Known::Only("hidden_act", &[Plain::Text("silu"), Plain::Text("swish")]),
        Known::Only("is_causal", &[Plain::Bool(true)]),
        Known::Only("is_encoder_decoder", &[Plain::Bool(false)]),
        Known::Only("mlp_bias", &[Plain::Bool(false)]),
        Known::Only("partial_rotary_factor", &[Plain::Number(1.0)]),
        Known::Only("quantization_config", &[Plain::Unset]),
        Known::Only("rope_interleaved", &[Plain::Bool(false)]),
        Known::Only("sliding_window", &[Plain::Unset]),
        Known::Only("use_sliding_window", &[Plain::Bool(false)]),
        // Special tokens: the tokenizer's.
        Known::Ignored(&["decoder_start_token_id", "pad_token_id", "sep_token_id", "tokenizer_class"]),
        // Where the file comes from, and the code of others that would read it.
        Known::Ignored(&[
            "_commit_hash",
            "_name_or_path",
            "auto_map",
            "is_llama_config",
            "license",
            "transformers.js_config",
            "transformers_version",
            "unsloth_fixed",
            "unsloth_version",
        ]),
        // How the same numbers are computed elsewhere; the dtype of the weights is in their own file.
        Known::Ignored(&[
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_attn_implementation_internal",
            "_experts_implementation",
            "_flash_attn_2_enabled",
            "attn_implementation",
            "chunk_size_feed_forward",
            "dtype",
            "gradient_checkpointing",
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "pretraining_tp",
            "return_dict",
            "return_dict_in_generate",
            "tf_legacy_loss",
            "torch_dtype",
            "torchscript",
            "use_bfloat16",
            "use_cache",
        ]),
        // Llama does not look at them in `transformers` either: they are there for other heads and other architectures. The first
        // Llamas had `max_sequence_length` beside the setting that counts.
        Known::Ignored(&[
            "cross_attention_hidden_size",
            "finetuning_task",
            "id2label",
            "is_decoder",
            "label2id",
            "max_sequence_length",
            "model_max_length",
            "num_labels",
            "prefix",
            "problem_type",
            "task_specific_params",
            "tie_encoder_decoder",
        ]),
        // How `transformers` 4 completes a text, unless it is told: here it is always told.
        Known::Ignored(&[
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "remove_invalid_values",
            "repetition_penalty",
            "suppress_tokens",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        ]),
    ],
    off_is_unset: false,
};

#[cfg(test)]
mod tests {
    use super::super::RopeScaling;
    use super::super::tests::{MINIMAL, read};

    fn message(fields: &str) -> String {
        let message = read(&format!("{{{MINIMAL}, {fields}}}")).unwrap_err().to_string();
        let (path, rest) = message.split_once("`: ").unwrap();
        assert!(path.ends_with("config.json"), "{message}");
        rest.to_owned()
    }

    fn theta(fields: &str) -> f64 {
        read(&format!("{{{MINIMAL}, {fields}}}")).unwrap().rope_theta
    }

    #[test]
    fn variants_that_compute_something_else_are_refused() {
        for (field, expected) in [
            (r#""hidden_act": "gelu""#, "hidden_act is `gelu`: only `silu`, `swish` are supported"),
            (r#""partial_rotary_factor": 0.5"#, "partial_rotary_factor is 0.5: only 1 is supported"),
            (r#""mlp_bias": true"#, "mlp_bias is true: only false is supported"),
            (r#""attention_dropout": 0.1"#, "attention_dropout is 0.1: only 0 is supported"),
            (r#""sliding_window": 4096"#, "sliding_window is 4096: only null is supported"),
            (
                r#""quantization_config": {"bits": 4}"#,
                "quantization_config is a map of 1: only null is supported",
            ),
            (
                r#""mlp_bias": true, "attention_bias": true"#,
                "attention_bias is true: only false is supported; mlp_bias is true: only false is supported",
            ),
        ] {
            assert_eq!(message(field), expected);
        }
    }

    #[test]
    fn what_is_set_and_unknown_is_refused_by_name() {
        assert_eq!(
            message(
                r#""embedding_multiplier": 12.0, "use_rope": false, "hidden_act": "relu", "nothing": null"#
            ),
            "hidden_act is `relu`: only `silu`, `swish` are supported; unknown settings `embedding_multiplier` (12.0), `use_rope` \
             (false): they may change what the file means; if they do not, remove them"
        );
        // A Mistral that does not say that it is one.
        assert!(
            message(r#""sliding_window": 4096, "rope_theta": 1e6"#).starts_with("sliding_window is 4096")
        );
        // So does a configuration in a text.
        let text = format!("{{{MINIMAL}, \"clip_qkv\": 8}}");
        let error = serde_json::from_str::<super::LlamaConfig>(&text).unwrap_err().to_string();
        assert!(error.starts_with("unknown setting `clip_qkv` (8): "), "{error}");
    }

    #[test]
    fn a_value_of_another_kind_is_refused_by_its_name() {
        assert_eq!(
            message(
                r#""rope_theta": "1e4", "num_key_value_heads": 2.5, "tie_word_embeddings": "no", "head_dim": []"#
            ),
            "head_dim is a list of 0: expected a whole number from 0 on; num_key_value_heads is 2.5: expected a whole number from 0 \
             on; rope_theta is `1e4`: expected a number; tie_word_embeddings is `no`: expected true or false"
        );
        assert_eq!(
            message(r#""eos_token_id": ["a"], "rope_scaling": {"rope_type": "default", "rope_theta": true}"#),
            "eos_token_id holds `a`: expected the id of a token or a list of ids; rope_scaling.rope_theta is true: expected a number"
        );
        let unset = read(r#"{"hidden_size": null}"#).unwrap_err().to_string();
        assert!(unset.contains("missing field `hidden_size`"), "{unset}");
    }

    #[test]
    fn another_kind_of_model_is_refused_by_its_name() {
        let refused = |json: &str| {
            let message = read(json).unwrap_err().to_string();
            message.split_once("`: ").unwrap().1.to_owned()
        };
        assert_eq!(
            refused(r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "vocab_size": 50257}"#),
            "model_type is `gpt2`: Llama models are read (model_type `llama`)"
        );
        assert_eq!(
            refused(&format!("{{{MINIMAL}, \"model_type\": \"mistral\", \"sliding_window\": 4096}}")),
            "model_type is `mistral`: Llama models are read (model_type `llama`)"
        );
        assert_eq!(
            refused(&format!("{{{MINIMAL}, \"architectures\": [\"Qwen2ForCausalLM\"]}}")),
            "architectures is `Qwen2ForCausalLM`: Llama models are read (model_type `llama`)"
        );
        assert!(
            refused(r#"{"n_embd": 768, "n_layer": 12}"#)
                .starts_with("unknown settings `n_embd` (768), `n_layer` (12): ")
        );
        read(&format!("{{{MINIMAL}, \"architectures\": [\"LLaMAForCausalLM\"]}}")).unwrap();
    }

    /// What `transformers` 5.24 makes of the same files.
    #[test]
    fn the_rotary_base_is_the_one_that_counts_for_transformers() {
        for (fields, expected) in [
            (
                r#""rope_theta": 10000, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}"#,
                500_000.0,
            ),
            (r#""rope_scaling": {"rope_type": "default", "rope_theta": 500000}"#, 500_000.0),
            (r#""rope_theta": 7000, "rope_scaling": {"type": "default"}"#, 7000.0),
            (
                r#""rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}"#,
                10_000.0,
            ),
            (r#""rope_scaling": null, "rope_theta": 7000, "rope_parameters": {"rope_theta": 9000}"#, 9000.0),
            (r#""rope_scaling": {}, "rope_theta": 7000"#, 7000.0),
            (
                r#""rope_parameters": {"rope_theta": null, "rope_type": "default"}, "rope_theta": 7000"#,
                7000.0,
            ),
        ] {
            assert_eq!(theta(fields), expected, "{fields}");
        }
    }

    #[test]
    fn a_kind_of_rotary_scaling_may_be_said_twice() {
        assert_eq!(
            theta(r#""rope_scaling": {"type": "default", "rope_type": "default", "factor": 1}"#),
            10_000.0
        );
        assert_eq!(theta(r#""rope_scaling": {"type": "llama3", "rope_type": "default"}"#), 10_000.0);
        assert_eq!(
            message(r#""rope_parameters": {"rope_type": "longrope", "factor": 4.0}"#),
            "rope_parameters is `longrope`: only `default`, `linear`, `dynamic`, `llama3`, `yarn` are supported"
        );
        assert_eq!(
            message(r#""rope_scaling": {"rope_type": "default", "factor": 8.0, "mrope_section": [1]}"#),
            "rope_scaling.factor is 8.0: only 1 is supported; unknown setting `rope_scaling.mrope_section` (a list of 1): it may \
             change what the file means; if it does not, remove it"
        );
        assert_eq!(
            message(r#""rope_scaling": "linear""#),
            "rope_scaling is `linear`: only null is supported"
        );
    }

    #[test]
    fn kinds_of_rotary_scaling_are_read_and_written() {
        let (original, factor) = (Some(4096), 4.0);
        let yarn = RopeScaling::Yarn {
            factor,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            original_max_position_embeddings: original,
        };
        let weighed = RopeScaling::Yarn {
            factor,
            beta_fast: 24.0,
            beta_slow: 2.0,
            truncate: false,
            // (0.05 ln 4 + 1) / (0.1 ln 4 + 1)
            attention_factor: Some(0.939_124_428_143),
            original_max_position_embeddings: None,
        };
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        for (map, expected) in [
            (r#"{"type": "linear", "factor": 4}"#, RopeScaling::Linear { factor }),
            (r#"{"rope_type": "dynamic", "factor": 4.0}"#, RopeScaling::Dynamic { factor }),
            (
                r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192, "rope_theta": 5e5}"#,
                llama3,
            ),
            (
                r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "finetuned": true}"#,
                yarn,
            ),
            (
                r#"{"rope_type": "yarn", "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 1.0, "beta_fast": 24, "beta_slow": 2,
                    "truncate": false}"#,
                weighed,
            ),
        ] {
            let config = read(&format!("{{{MINIMAL}, \"rope_scaling\": {map}}}")).unwrap();
            let found = config.rope_scaling.clone().unwrap();
            match (&found, &expected) {
                (
                    RopeScaling::Yarn { attention_factor: Some(found), .. },
                    RopeScaling::Yarn { attention_factor: Some(expected), .. },
                ) => assert!((found - expected).abs() < 1e-9, "{found} {expected}"),
                _ => assert_eq!(found, expected),
            }
            let json = serde_json::Value::Object(config.to_json()).to_string();
            assert_eq!(read(&json).unwrap().rope_scaling, Some(found), "{json}");
        }
        // Longer sequences are what dynamic scaling is for.
        let dynamic =
            read(&format!("{{{MINIMAL}, \"rope_scaling\": {{\"type\": \"dynamic\", \"factor\": 1.5}}}}"))
                .unwrap();
        assert_eq!((dynamic.max_position_embeddings, dynamic.positions()), (2048, 3072));
    }

    #[test]
    fn a_rotary_scaling_that_lacks_something_or_has_something_else_is_refused() {
        let scaling = |map: &str| {
            let error = read(&format!("{{{MINIMAL}, \"rope_scaling\": {map}}}")).unwrap_err().to_string();
            error.split_once("`: ").map_or(error.clone(), |(_, rest)| rest.to_owned())
        };
        assert_eq!(
            scaling(r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": null}"#),
            "rope_scaling.low_freq_factor is missing; rope_scaling.high_freq_factor is missing; \
             rope_scaling.original_max_position_embeddings is missing"
        );
        assert!(
            scaling(r#"{"type": "linear", "factor": 2.0, "beta_fast": 32}"#)
                .starts_with("unknown setting `rope_scaling.beta_fast` (32)")
        );
        assert_eq!(
            scaling(r#"{"type": "yarn", "factor": "4", "truncate": 1}"#),
            "rope_scaling.factor is `4`: expected a number; rope_scaling.truncate is 1: expected true or false"
        );
        for (map, expected) in [
            (r#"{"type": "linear", "factor": 0.5}"#, "factor is 0.5: expected a number from 1 on"),
            (
                r#"{"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 8}"#,
                "high_freq_factor is 4: expected a number above low_freq_factor",
            ),
            (
                r#"{"type": "yarn", "factor": 8, "beta_fast": 0.5}"#,
                "beta_fast is 0.5: expected a number that is not below beta_slow",
            ),
            (
                r#"{"type": "yarn", "factor": 8, "original_max_position_embeddings": 0}"#,
                "original_max_position_embeddings is 0: expected at least 1",
            ),
        ] {
            assert_eq!(scaling(map), format!("rope_scaling: {expected}"));
        }
    }

    /// What `transformers` 4.31 to 5.24 and other programs wrote into files of Llamas on the hub.
    #[test]
    fn files_of_the_hub_are_read() {
        for fields in [
            r#""_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
               "eos_token_id": [128001, 128009], "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096,
               "model_type": "llama", "num_key_value_heads": 4, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
               "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": true"#,
            r#""attention_bias": false, "attention_dropout": 0.0, "mlp_bias": false, "head_dim": 32, "is_llama_config": true,
               "rope_interleaved": false, "pad_token_id": null, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
               "unsloth_fixed": true, "_attn_implementation_autoset": true, "quantization_config": null"#,
            r#""return_dict": true, "output_hidden_states": false, "dtype": "bfloat16", "chunk_size_feed_forward": 0,
               "is_encoder_decoder": false, "problem_type": null, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
               "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "pretraining_tp": 2"#,
            r#""max_length": 20, "min_length": 0, "do_sample": false, "early_stopping": false, "num_beams": 1, "temperature": 1.0,
               "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "pruned_heads": {}, "is_decoder": false,
               "tie_encoder_decoder": false, "cross_attention_hidden_size": null, "max_sequence_length": 2048"#,
        ] {
            read(&format!("{{{MINIMAL}, {fields}}}")).unwrap();
        }
    }
}
