//! What a GGUF file says of its model.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;

use super::super::error::PretrainedError;
use crate::LlamaConfig;

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
            tie_word_embeddings: tied,
            max_position_embeddings: count("llama.context_length")?,
            initializer_range: 0.02,
            head_dim: head_dim.filter(|width| width.checked_mul(num_attention_heads) != Some(hidden_size)),
        };
        Ok(config)
    }

    /// Refuses what would change the arithmetic of the model.
    fn supported(&self) -> Result<(), PretrainedError> {
        for (key, supported) in [("general.architecture", "llama"), ("llama.rope.scaling.type", "none")] {
            match self.values.get(key) {
                Some(Value::String(value)) if value == supported => {}
                Some(value) => {
                    return Err(
                        self.error(key, format!("is {}: only `{supported}` is supported", shown(value)))
                    );
                }
                None if key == "general.architecture" => return Err(self.error(key, "is missing".into())),
                None => {}
            }
        }
        match self.number("llama.expert_count")? {
            Some(experts) if experts > 0 => Err(self.error(
                "llama.expert_count",
                format!("is {experts}: only models without experts are supported"),
            )),
            _ => Ok(()),
        }
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
            None => Err(self.error(key, format!("is {}: expected a number below 2^32", shown(value)))),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, PretrainedError> {
        match self.values.get(key) {
            None => Ok(None),
            // The shortest decimal of an f32 is what was meant: 1e-5, not 9.99999974737875e-6.
            Some(Value::F32(value)) => Ok(value.to_string().parse().ok()),
            Some(Value::F64(value)) => Ok(Some(*value)),
            Some(value) => {
                Err(self.error(key, format!("is {}: expected a floating-point number", shown(value))))
            }
        }
    }

    fn error(&self, key: &str, reason: String) -> PretrainedError {
        PretrainedError::Metadata { path: self.path.to_path_buf(), key: key.to_owned(), reason }
    }
}

/// A value in a message, which an array or a long text would fill.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(values) => format!("an array of {} values", values.len()),
        Value::String(text) if text.len() > 40 => format!("a text of {} bytes", text.len()),
        Value::String(text) => format!("`{text}`"),
        other => format!("{other:?}"),
    }
}
