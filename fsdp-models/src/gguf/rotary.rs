//! The scaling of rotary frequencies in a GGUF file: llama.cpp keeps that of Llama 3 as a tensor of divisors.

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::TensorInfo;
use fsdp::files::PositionedFile;

use crate::config::{LlamaConfig, RopeScaling};
use crate::error::PretrainedError;
use crate::rope;

/// The tensor of what each frequency is divided by.
pub(super) const DIVISORS: &str = "rope_freqs.weight";

/// How far a divisor may be from the one that follows from the constants: both are rounded to f32.
const CLOSE: f64 = 1e-5;

/// The scaling of which the divisors at `start` of the file are; `None` if they are ones. The constants of Llama 3 are in no
/// metadata: all files that have this tensor are converted from models that share all of them but the factor.
///
/// # Errors
/// A failed read, divisors of another dtype or number than the model needs, and others than those of Llama 3.
pub(super) fn scaling(
    file: &PositionedFile,
    info: &TensorInfo,
    start: u64,
    config: &LlamaConfig,
) -> Result<Option<RopeScaling>, PretrainedError> {
    let refused =
        |reason| PretrainedError::Metadata { path: file.path().to_path_buf(), key: DIVISORS.into(), reason };
    let pairs = config.head_dim() / 2;
    if info.ggml_dtype != GgmlDType::F32 || info.shape.dims() != [pairs] {
        let (dtype, shape) = (info.ggml_dtype, info.shape.dims());
        return Err(refused(format!("is {dtype:?} of shape {shape:?}: expected F32 of shape [{pairs}]")));
    }
    let mut bytes = vec![0; 4 * pairs];
    if start.checked_add(bytes.len() as u64).is_none_or(|end| end > file.len()) {
        return Err(refused(format!("goes past the end of the file at {}", file.len())));
    }
    file.read_at(start, &mut bytes)?;
    let found = bytes.as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes)));
    let found: Vec<f64> = found.collect();
    if found.iter().all(|&divisor| divisor == 1.0) {
        return Ok(None);
    }
    if config.rope_scaling.is_some() {
        return Err(refused(
            "is there beside `llama.rope.scaling.type`: which of them counts is not known".into(),
        ));
    }
    // The slowest frequency is divided by the whole factor.
    let factor = found.iter().copied().fold(1.0, f64::max);
    let scaling = RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let expected = rope::divisors(&LlamaConfig { rope_scaling: Some(scaling.clone()), ..config.clone() });
    // A NaN is close to nothing.
    let close = |found: f64, expected: f64| (found - expected).abs() <= CLOSE * expected;
    match found.iter().zip(&expected).position(|(&found, &expected)| !close(found, expected)) {
        None => Ok(Some(scaling)),
        Some(pair) => Err(refused(format!(
            "divides frequency {pair} by {}: expected {} as in Llama 3 with a factor of {factor}",
            found[pair], expected[pair]
        ))),
    }
}
