//! A small Llama, its weights, and directories and GGUF files of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use fsdp::Fsdp;
use fsdp_models::{Llama, LlamaConfig};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Tensors by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub fn config(tied: bool) -> LlamaConfig {
    LlamaConfig {
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        vocab_size: 40,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: tied,
        max_position_embeddings: 32,
        initializer_range: 0.02,
        head_dim: None,
    }
}

/// Values that are the same in every float type, other ones for each tensor and element.
pub fn values(name: &str, elements: usize) -> Vec<f32> {
    let start = name.bytes().fold(7u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619));
    (0..elements as u32)
        .map(|at| {
            let mixed = (start ^ at.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
            ((mixed >> 24) as f32 - 127.0) / 512.0
        })
        .collect()
}

/// All weights of a model.
pub fn tensors(config: &LlamaConfig) -> Tensors {
    let parameters = Llama::new(config).unwrap().parameters();
    let of = |(name, shape): (String, Vec<usize>)| {
        let values = values(&name, shape.iter().product());
        (name, (shape, values))
    };
    parameters.into_iter().map(of).collect()
}

fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let each = values.iter();
    match dtype {
        Dtype::F32 => each.flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::F64 => each.flat_map(|&value| f64::from(value).to_le_bytes()).collect(),
        Dtype::BF16 => each.flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        Dtype::F16 => each.flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::I64 => each.flat_map(|&value| (value as i64).to_le_bytes()).collect(),
        other => panic!("no test stores {other}"),
    }
}

/// Writes a safetensors file, each tensor in its dtype.
pub fn write_tensors(path: &Path, tensors: &Tensors, dtype: impl Fn(&str) -> Dtype) {
    let encoded: Vec<_> = tensors
        .iter()
        .map(|(name, (shape, values))| (name, shape, dtype(name), encode(values, dtype(name))))
        .collect();
    let views = encoded.iter().map(|(name, shape, dtype, bytes)| {
        (name.as_str(), TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

pub fn write_config(dir: &Path, config: &LlamaConfig) {
    fs::write(dir.join("config.json"), serde_json::to_string(&config.to_json()).unwrap()).unwrap();
}

/// Writes a directory of Hugging Face's with one file.
pub fn write_single(dir: &Path, config: &LlamaConfig, tensors: &Tensors, dtype: Dtype) {
    write_config(dir, config);
    write_tensors(&dir.join("model.safetensors"), tensors, |_| dtype);
}

/// Writes one with `files` files, among which tensors go round.
pub fn write_indexed(dir: &Path, config: &LlamaConfig, tensors: &Tensors, dtype: Dtype, files: usize) {
    write_config(dir, config);
    let mut parts = vec![Tensors::new(); files];
    let mut map = serde_json::Map::new();
    let name = |part: usize| format!("model-{:05}-of-{files:05}.safetensors", part + 1);
    for (at, (tensor, content)) in tensors.iter().enumerate() {
        parts[at % files].insert(tensor.clone(), content.clone());
        map.insert(tensor.clone(), name(at % files).into());
    }
    for (at, part) in parts.iter().enumerate() {
        write_tensors(&dir.join(name(at)), part, |_| dtype);
    }
    let index = serde_json::json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// The whole weights of a sharded model, of which there must be the same on every rank.
pub fn gathered<M>(model: &Fsdp<M>) -> Tensors {
    let mut all = Tensors::new();
    model
        .visit_weights(|spec, values| {
            for tensor in spec.tensors() {
                let values = values[tensor.elements].to_vec();
                all.insert(tensor.name.to_owned(), (tensor.shape, values));
            }
            Ok(())
        })
        .unwrap();
    all
}

/// To the bit.
pub fn assert_same(ours: &Tensors, theirs: &Tensors) {
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (name, (shape, values)) in ours {
        let (their_shape, their_values) = &theirs[name];
        assert_eq!(shape, their_shape, "{name}");
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(values) == bits(their_values), "{name} differs");
    }
}

/// Hugging Face's names in llama.cpp's words.
pub fn gguf_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => "token_embd.weight".into(),
        "model.norm.weight" => "output_norm.weight".into(),
        "lm_head.weight" => "output.weight".into(),
        _ => {
            let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
            let rest = match rest.strip_suffix(".weight").unwrap() {
                "input_layernorm" => "attn_norm",
                "post_attention_layernorm" => "ffn_norm",
                "self_attn.q_proj" => "attn_q",
                "self_attn.k_proj" => "attn_k",
                "self_attn.v_proj" => "attn_v",
                "self_attn.o_proj" => "attn_output",
                "mlp.gate_proj" => "ffn_gate",
                "mlp.up_proj" => "ffn_up",
                "mlp.down_proj" => "ffn_down",
                other => panic!("unknown tensor {other}"),
            };
            format!("blk.{layer}.{rest}.weight")
        }
    }
}

/// What llama.cpp's converter does to the rows of a query or key projection: its `permute`.
pub fn rotate(tensor: &Tensor, heads: usize) -> Tensor {
    let (rows, columns) = tensor.dims2().unwrap();
    let halves = tensor.reshape((heads, 2, rows / heads / 2, columns)).unwrap();
    halves.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, columns)).unwrap()
}

/// Metadata of a GGUF file of this model.
pub fn gguf_metadata(config: &LlamaConfig) -> Vec<(&'static str, Value)> {
    let number = |size: usize| Value::U32(size as u32);
    vec![
        ("general.architecture", Value::String("llama".into())),
        ("llama.embedding_length", number(config.hidden_size)),
        ("llama.feed_forward_length", number(config.intermediate_size)),
        ("llama.block_count", number(config.num_hidden_layers)),
        ("llama.attention.head_count", number(config.num_attention_heads)),
        ("llama.attention.head_count_kv", number(config.num_key_value_heads)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps as f32)),
        ("llama.rope.freq_base", Value::F32(config.rope_theta as f32)),
        ("llama.rope.dimension_count", number(config.head_dim())),
        ("llama.context_length", number(config.max_position_embeddings)),
    ]
}

/// Quantises the tensors as a converter does: matrices in `dtype`, vectors in F32. Returns them under their own names.
pub fn quantise(config: &LlamaConfig, tensors: &Tensors, dtype: GgmlDType) -> Vec<(String, QTensor)> {
    let quantise = |(name, (shape, values)): (&String, &(Vec<usize>, Vec<f32>))| {
        let mut tensor = Tensor::from_vec(values.clone(), shape.as_slice(), &Device::Cpu).unwrap();
        if name.contains("q_proj") {
            tensor = rotate(&tensor, config.num_attention_heads);
        } else if name.contains("k_proj") {
            tensor = rotate(&tensor, config.num_key_value_heads);
        }
        let dtype = if shape.len() == 1 { GgmlDType::F32 } else { dtype };
        (gguf_name(name), QTensor::quantize(&tensor, dtype).unwrap())
    };
    tensors.iter().map(quantise).collect()
}

pub fn write_gguf(path: &Path, metadata: &[(&str, Value)], tensors: &[(String, QTensor)]) {
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut fs::File::create(path).unwrap(), &metadata, &tensors).unwrap();
}
