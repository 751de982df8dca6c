//! The metadata of a GGUF file: configuration of its model.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;

use crate::config::{LlamaConfig, RopeScaling};
use crate::error::PretrainedError;
use crate::settings::{Kind, Known, Plain, Setting, Table};

/// How the names begin that the format gives a meaning to.
const READ: [&str; 4] = ["general.", "llama.", "split.", "tokenizer."];

/// What a file may say of a Llama.
const MODEL: Table = Table {
    known: &[
        Known::Only("general.architecture", &[Plain::Text("llama")]),
        // An adapter, a projector or an importance matrix has no model's tensors.
        Known::Only("general.type", &[Plain::Text("model")]),
        // Its readers say what a number must be.
        Known::Read(
            Kind::Any,
            &[
                "general.alignment",
                "llama.attention.head_count",
                "llama.attention.head_count_kv",
                "llama.attention.key_length",
                "llama.attention.layer_norm_rms_epsilon",
                "llama.attention.value_length",
                "llama.block_count",
                "llama.context_length",
                "llama.embedding_length",
                "llama.feed_forward_length",
                "llama.rope.dimension_count",
                "llama.rope.freq_base",
                "llama.rope.scale_linear",
                "llama.rope.scaling.factor",
                "llama.vocab_size",
            ],
        ),
        Known::Only("llama.attention.causal", &[Plain::Bool(true)]),
        Known::Only("llama.expert_count", &[Plain::Number(0.0)]),
        Known::Only("llama.expert_used_count", &[Plain::Number(0.0)]),
        Known::Only("llama.rope.scaling.type", &[Plain::Text("none"), Plain::Text("linear")]),
        // One of several files, whose tensors are not those of a whole model.
        Known::Only("split.count", &[Plain::Number(0.0), Plain::Number(1.0)]),
        Known::Ignored(&["split.no", "split.tensors.count"]),
        // Of other kinds of scaling.
        Known::Ignored(&["llama.rope.scaling.finetuned", "llama.rope.scaling.original_context_length"]),
        // llama.cpp does not look at them in a Llama.
        Known::Ignored(&["llama.tensor_data_layout", "llama.use_parallel_residual"]),
        // Names, authors, licences, how the file was made.
        Known::Ignored(&["general.*"]),
        // The tokenizer's reader has a table of its own.
        Known::Ignored(&["tokenizer.*"]),
    ],
    off_is_unset: false,
};

/// The keys and values of a file.
pub(super) struct Metadata<'a> {
    pub path: &'a Path,
    pub values: &'a HashMap<String, Value>,
}

impl Metadata<'_> {
    /// The configuration of a Llama, whose vocabulary and ties are in its tensors.
    pub fn config(&self, vocab_size: usize, tied: bool) -> Result<LlamaConfig, PretrainedError> {
        self.supported()?;
        let count = |key: &str| self.required(key, self.number(key)?);
        let hidden_size = count("llama.embedding_length")?;
        let num_attention_heads = count("llama.attention.head_count")?;
        let head_dim = self.number("llama.attention.key_length")?;
        let width = head_dim.or_else(|| hidden_size.checked_div(num_attention_heads));
        for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
            if let (Some(found), Some(width)) = (self.number(key)?, width)
                && found != width
            {
                return Err(self.error(key, format!("is {found}: expected the width of a head, {width}")));
            }
        }
        let key = "llama.vocab_size";
        if let Some(found) = self.number(key)?
            && found != vocab_size
        {
            return Err(self.error(key, format!("is {found}: `token_embd.weight` has {vocab_size} rows")));
        }
        let eps = "llama.attention.layer_norm_rms_epsilon";
        let config = LlamaConfig {
            hidden_size,
            intermediate_size: count("llama.feed_forward_length")?,
            num_hidden_layers: count("llama.block_count")?,
            num_attention_heads,
            num_key_value_heads: self.number("llama.attention.head_count_kv")?.unwrap_or(num_attention_heads),
            vocab_size,
            rms_norm_eps: self.required(eps, self.float(eps)?)?,
            rope_theta: self.float("llama.rope.freq_base")?.unwrap_or(10_000.0),
            rope_scaling: self.linear_scaling()?,
            tie_word_embeddings: tied,
            max_position_embeddings: count("llama.context_length")?,
            initializer_range: 0.02,
            head_dim: head_dim.filter(|width| width.checked_mul(num_attention_heads) != Some(hidden_size)),
        };
        Ok(config)
    }

    /// The linear scaling of the rotary frequencies, if there is one. As in llama.cpp, a factor without a kind is that of a linear
    /// one, and counts before the setting that older files have.
    fn linear_scaling(&self) -> Result<Option<RopeScaling>, PretrainedError> {
        if self.values.get("llama.rope.scaling.type").is_some_and(|kind| kind.is(&Plain::Text("none"))) {
            return Ok(None);
        }
        let factor = self.float("llama.rope.scaling.factor")?;
        let factor =
            factor.map_or_else(|| self.float("llama.rope.scale_linear"), |factor| Ok(Some(factor)))?;
        // 0 says that there is none.
        Ok(factor
            .filter(|&factor| factor != 0.0 && factor != 1.0)
            .map(|factor| RopeScaling::Linear { factor }))
    }

    /// Refuses what would change the arithmetic of the model, and what is not known here. Another architecture first: all else
    /// that it says would be unknown.
    fn supported(&self) -> Result<(), PretrainedError> {
        let architecture = "general.architecture";
        if !self.values.contains_key(architecture) {
            return Err(self.error(architecture, "is missing".into()));
        }
        let only = |name: &String| name == architecture;
        MODEL.check(self.values.iter().filter(|(name, _)| only(name))).into_result(Some(self.path))?;
        // Other names are those of whoever made the file: no program computes by them.
        let read = |name: &String| READ.iter().any(|start| name.starts_with(start));
        Ok(MODEL.check(self.values.iter().filter(|(name, _)| read(name))).into_result(Some(self.path))?)
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, PretrainedError> {
        value.ok_or_else(|| self.error(key, "is missing".into()))
    }

    fn number(&self, key: &str) -> Result<Option<usize>, PretrainedError> {
        let Some(value) = self.values.get(key) else {
            return Ok(None);
        };
        let number = match *value {
            Value::I8(number) => usize::try_from(number).ok(),
            Value::I16(number) => usize::try_from(number).ok(),
            Value::I32(number) => usize::try_from(number).ok(),
            Value::I64(number) => usize::try_from(number).ok(),
            Value::U8(number) => Some(number.into()),
            Value::U16(number) => Some(number.into()),
            Value::U32(number) => usize::try_from(number).ok(),
            Value::U64(number) => usize::try_from(number).ok(),
            _ => None,
        };
        // Sizes are multiplied with each other: what is beyond any model is stopped here.
        match number.filter(|&number| number <= u32::MAX as usize) {
            Some(number) => Ok(Some(number)),
            None => Err(self.error(key, format!("is {}: expected a number below 2^32", value.shown()))),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, PretrainedError> {
        match self.values.get(key) {
            None => Ok(None),
            // The shortest decimal of an f32 is what was meant: 1e-5, not 9.99999974737875e-6.
            Some(Value::F32(value)) => Ok(value.to_string().parse().ok()),
            Some(Value::F64(value)) => Ok(Some(*value)),
            Some(value) => {
                Err(self.error(key, format!("is {}: expected a floating-point number", value.shown())))
            }
        }
    }

    fn error(&self, key: &str, reason: String) -> PretrainedError {
        PretrainedError::Metadata { path: self.path.to_path_buf(), key: key.to_owned(), reason }
    }
}
