//! Model configurations, with the names of Hugging Face's `config.json`.

mod json;
mod rope;

use std::path::Path;

use fsdp::Init;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use crate::error::ConfigError;
pub use rope::RopeScaling;

use crate::product::product;
use crate::settings::read_object;

/// Sizes and constants of a Llama-architecture model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Number of decoder blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads, each shared by `num_attention_heads / num_key_value_heads` query heads.
    pub num_key_value_heads: usize,
    /// Token ids.
    pub vocab_size: usize,
    /// Added to the mean square under the root.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the rotary frequencies are scaled for sequences longer than those of pretraining.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// The output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence; see [`LlamaConfig::positions`].
    pub max_position_embeddings: usize,
    /// Standard deviation of the initial weights; they may be all zeros.
    pub initializer_range: f64,
    /// Width of a head where it is not `hidden_size / num_attention_heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
}

/// Largest file of settings, in bytes.
pub(crate) const MAX_CONFIG: u64 = 1 << 24;

/// Most weights of one kind: what an optimizer keeps of several of them can still be counted in bytes.
const MAX_WEIGHTS: usize = 1 << 44;

/// Largest width of a layer, with which products of sizes can still be counted.
const MAX_WIDTH: usize = 1 << 24;

impl LlamaConfig {
    /// Reads and validates a `config.json`.
    ///
    /// # Errors
    /// The file cannot be read, is not such a configuration, has settings that are not known here or not implemented, all of
    /// which are named, or describes an impossible model.
    pub fn from_json_file(path: &Path) -> Result<Self, ConfigError> {
        Ok(Self::read_json_file(path)?.0)
    }

    /// Reads a configuration, and returns the whole JSON object beside it.
    pub(crate) fn read_json_file(path: &Path) -> Result<(Self, Map<String, Value>), ConfigError> {
        let json = read_object(path, MAX_CONFIG)?;
        let json = json.map_err(|cause| ConfigError::Malformed { path: Some(path.to_path_buf()), cause })?;
        let config = json::read(&json, Some(path))?;
        config.validate()?;
        Ok((config, json))
    }

    /// Width of an attention head. The configuration must be valid.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or_else(|| self.hidden_size.checked_div(self.num_attention_heads).unwrap_or(0))
    }

    /// Longest sequence, with what dynamic scaling of the rotary frequencies adds.
    pub fn positions(&self) -> usize {
        match self.rope_scaling {
            // Saturates: what is beyond any sequence is beyond it still.
            Some(RopeScaling::Dynamic { factor }) => (self.max_position_embeddings as f64 * factor) as usize,
            _ => self.max_position_embeddings,
        }
    }

    /// How weight matrices start.
    pub fn init(&self) -> Init {
        match self.initializer_range as f32 {
            // The same, without the draws.
            0.0 => Init::Zeros,
            std => Init::Normal { mean: 0.0, std },
        }
    }

    /// Checks that such a model can be built.
    ///
    /// # Errors
    /// The first rule that is broken, with its numbers.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let (hidden, heads, kv_heads) =
            (self.hidden_size, self.num_attention_heads, self.num_key_value_heads);
        for (field, size) in [
            ("hidden_size", hidden),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("head_dim", self.head_dim.unwrap_or(1)),
        ] {
            if size == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        for (field, size, limit) in [
            ("hidden_size", hidden, MAX_WIDTH),
            ("intermediate_size", self.intermediate_size, MAX_WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 16),
            ("num_attention_heads", heads, MAX_WIDTH),
            ("vocab_size", self.vocab_size, 1 << 28),
            ("max_position_embeddings", self.max_position_embeddings, u32::MAX as usize),
            ("head_dim", self.head_dim.unwrap_or(1), MAX_WIDTH / heads.min(MAX_WIDTH)),
        ] {
            if size > limit {
                return Err(ConfigError::TooLarge { field, size, limit });
            }
        }
        let widest = hidden.max(self.intermediate_size).max(heads * self.head_dim());
        let block = [
            ("num_hidden_layers", self.num_hidden_layers),
            ("hidden_size", hidden),
            ("widest layer", widest),
        ];
        product("weights of blocks", &block, MAX_WEIGHTS)?;
        product(
            "weights of the embedding",
            &[("vocab_size", self.vocab_size), ("hidden_size", hidden)],
            MAX_WEIGHTS,
        )?;
        if self.head_dim.is_none() && !hidden.is_multiple_of(heads) {
            return Err(ConfigError::HiddenNotDivisible { hidden, heads });
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(ConfigError::HeadsNotDivisible { heads, kv_heads });
        }
        if !self.head_dim().is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim { head_dim: self.head_dim() });
        }
        for (field, value) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(ConfigError::NotPositive { field, value });
            }
        }
        if let Some(scaling) = &self.rope_scaling {
            scaling.validate(self.rope_theta, self.head_dim())?;
        }
        let value = self.initializer_range;
        // Weights are drawn in f32.
        if !((value as f32).is_finite() && value >= 0.0) {
            return Err(ConfigError::Negative { field: "initializer_range", value });
        }
        Ok(())
    }
}

impl TryFrom<Map<String, Value>> for LlamaConfig {
    type Error = ConfigError;

    /// What a `config.json` says, not yet validated.
    fn try_from(json: Map<String, Value>) -> Result<Self, ConfigError> {
        json::read(&json, None)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tiny() -> LlamaConfig {
        LlamaConfig {
            hidden_size: 128,
            intermediate_size: 352,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            vocab_size: 256,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            tie_word_embeddings: false,
            max_position_embeddings: 64,
            initializer_range: 0.02,
            head_dim: None,
        }
    }

    pub(super) fn read(json: &str) -> Result<LlamaConfig, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs::write(&path, json).unwrap();
        LlamaConfig::from_json_file(&path)
    }

    pub(super) const MINIMAL: &str = r#""hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 256"#;

    #[test]
    fn a_full_file_is_read() {
        let config = read(
            r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
                "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
                "rms_norm_eps": 1e-05, "rope_theta": 100000, "tie_word_embeddings": true, "hidden_act": "silu",
                "max_position_embeddings": 8192, "rope_scaling": null, "attention_bias": false, "bos_token_id": 1}"#,
        )
        .unwrap();
        let expected = LlamaConfig {
            hidden_size: 576,
            intermediate_size: 1536,
            num_hidden_layers: 30,
            num_attention_heads: 9,
            num_key_value_heads: 3,
            vocab_size: 49152,
            rms_norm_eps: 1e-5,
            rope_theta: 100_000.0,
            rope_scaling: None,
            tie_word_embeddings: true,
            max_position_embeddings: 8192,
            initializer_range: 0.02,
            head_dim: None,
        };
        assert_eq!(config, expected);
        assert_eq!(config.head_dim(), 64);
    }

    #[test]
    fn what_is_left_out_has_the_formats_default() {
        let config = read(&format!("{{{MINIMAL}}}")).unwrap();
        assert_eq!((config.num_key_value_heads, config.head_dim()), (4, 32));
        assert_eq!((config.rms_norm_eps, config.rope_theta), (1e-6, 10_000.0));
        assert_eq!((config.tie_word_embeddings, config.max_position_embeddings), (false, 2048));
        let explicit = read(&format!("{{{MINIMAL}, \"head_dim\": 48}}")).unwrap();
        assert_eq!(explicit.head_dim(), 48);
    }

    #[test]
    fn a_configuration_survives_a_round_trip() {
        let config = tiny();
        assert_eq!(read(&serde_json::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn impossible_models_are_refused_with_their_numbers() {
        let message = |change: fn(&mut LlamaConfig)| {
            let mut config = tiny();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        tiny().validate().unwrap();
        assert_eq!(message(|c| c.vocab_size = 0), "vocab_size is 0: it must be at least 1");
        assert_eq!(message(|c| c.num_key_value_heads = 0), "num_key_value_heads is 0: it must be at least 1");
        assert_eq!(
            message(|c| c.hidden_size = 130),
            "hidden_size 130 is not divisible by num_attention_heads 4 (remainder 2) and no head_dim is given"
        );
        assert_eq!(
            message(|c| c.num_key_value_heads = 3),
            "num_attention_heads 4 is not divisible by num_key_value_heads 3 (remainder 1)"
        );
        assert_eq!(
            message(|c| c.hidden_size = 132),
            "the head dim 33 is odd: rotary embedding needs an even one"
        );
        assert_eq!(
            message(|c| (c.hidden_size, c.num_hidden_layers) = (1 << 22, 1 << 16)),
            "too many weights of blocks: num_hidden_layers 65536 x hidden_size 4194304 x widest layer 4194304, expected at most \
             17592186044416"
        );
        assert!(
            message(|c| (c.hidden_size, c.vocab_size) = (1 << 20, 1 << 28))
                .starts_with("too many weights of the embedding")
        );
        assert!(message(|c| c.initializer_range = 1e39).starts_with("initializer_range is 1"));
        assert_eq!(message(|c| c.rope_theta = 0.0), "rope_theta is 0: it must be finite and positive");
        assert_eq!(
            message(|c| c.initializer_range = -0.02),
            "initializer_range is -0.02: it must be finite and not negative"
        );
        assert_eq!(
            message(|c| c.intermediate_size = 1 << 30),
            "intermediate_size is 1073741824: it must be at most 16777216"
        );
        assert_eq!(
            message(|c| c.rms_norm_eps = f64::NAN),
            "rms_norm_eps is NaN: it must be finite and positive"
        );
    }

    #[test]
    fn what_is_no_configuration_is_refused_by_its_path() {
        let message = read("{\"hidden_size\": 128}").unwrap_err().to_string();
        assert!(message.contains("config.json` is not a Llama configuration: missing field"), "{message}");
        let error = LlamaConfig::from_json_file(Path::new("no/such/config.json")).unwrap_err();
        assert!(error.to_string().starts_with("cannot read `no/such/config.json`: "), "{error}");
    }
}
