//! GGUF files of Llamas.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use fsdp::prelude::*;
use fsdp_models::config::RopeScaling;
use fsdp_models::pretrained::{GgufFile, Pretrained, Strictness};
use fsdp_models::{Llama, LlamaConfig, Tokenizer};
use safetensors::Dtype;

use super::fixtures::{
    Tensors, assert_same, config, gathered, gguf_metadata, gguf_name, quantise, tensors, write_gguf,
    write_single,
};

/// The types with blocks of 32 elements or fewer.
const SMALL_BLOCKS: [GgmlDType; 8] = [
    GgmlDType::F32,
    GgmlDType::F16,
    GgmlDType::BF16,
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
];

/// Those with blocks of 256.
const LARGE_BLOCKS: [GgmlDType; 5] =
    [GgmlDType::Q2K, GgmlDType::Q3K, GgmlDType::Q4K, GgmlDType::Q5K, GgmlDType::Q6K];

/// Undoes `rotate` element by element, by its definition in llama.cpp.
fn unrotate(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    let head = rows / heads;
    let mut out = vec![0.0; values.len()];
    for row in 0..rows {
        // reshape(heads, 2, head / 2, columns).swapaxes(1, 2): row (s, i) of a head goes to 2i + s.
        let (of, half, pair) = (row / head, row % head / (head / 2), row % (head / 2));
        let stored = of * head + 2 * pair + half;
        out[row * columns..][..columns].copy_from_slice(&values[stored * columns..][..columns]);
    }
    out
}

/// Writes a file in `dtype`, and returns what it holds, in Hugging Face's order.
fn written(dir: &Path, config: &LlamaConfig, dtype: GgmlDType) -> (PathBuf, Tensors) {
    let path = dir.join("model.gguf");
    let mut expected = tensors(config);
    let stored = quantise(config, &expected, dtype);
    write_gguf(&path, &gguf_metadata(config), &stored);
    for (name, (shape, values)) in &mut expected {
        let (_, tensor) = stored.iter().find(|(stored, _)| *stored == gguf_name(name)).unwrap();
        let whole = tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        *values = match name.rsplit('.').nth(1).unwrap() {
            "q_proj" => unrotate(&whole, config.num_attention_heads, shape[1]),
            "k_proj" => unrotate(&whole, config.num_key_value_heads, shape[1]),
            _ => whole,
        };
    }
    (path, expected)
}

#[test]
fn ranges_are_those_of_the_whole_tensor_dequantised() {
    let wide = LlamaConfig { hidden_size: 256, intermediate_size: 256, ..config(false) };
    let small = SMALL_BLOCKS.iter().map(|dtype| (*dtype, config(false)));
    for (dtype, config) in small.chain(LARGE_BLOCKS.iter().map(|dtype| (*dtype, wide.clone()))) {
        let dir = tempfile::tempdir().unwrap();
        let (path, expected) = written(dir.path(), &config, dtype);
        let file = GgufFile::open(&path).unwrap();
        assert_eq!(*file.config(), config);
        for (name, (shape, values)) in &expected {
            assert_eq!(file.shape(name), Some(shape.as_slice()));
            let len = values.len();
            for (start, end) in
                [(0, len), (1, len - 1), (len / 3, len / 2), (33, 34), (len, len), (len - 7, len)]
            {
                let mut out = vec![f32::NAN; end - start];
                file.read_range_f32(name, start, &mut out).unwrap();
                assert_eq!(out, values[start..end], "{dtype:?} {name} {start}..{end}");
            }
        }
    }
}

#[test]
fn a_model_loads_from_it_at_any_number_of_ranks() {
    for (tied, dtype) in [(true, GgmlDType::Q4_1), (false, GgmlDType::Q8_0)] {
        let dir = tempfile::tempdir().unwrap();
        let (path, expected) = written(dir.path(), &config(tied), dtype);
        for ranks in [1, 2, 3] {
            launch::local(ranks, |world| -> fsdp_models::Result<()> {
                let model =
                    Llama::from_pretrained(&path, &world.data_parallel_mesh(), &FsdpConfig::default())?;
                assert_same(&gathered(&model), &expected);
                Ok(())
            })
            .unwrap();
        }
    }
}

#[test]
fn it_computes_what_the_same_weights_in_safetensors_do() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let (path, expected) = written(dir.path(), &config, GgmlDType::F32);
    assert_same(&expected, &tensors(&config));
    write_single(dir.path(), &config, &expected, Dtype::F32);
    let logits = |path: &Path| -> Vec<f32> {
        let model = Llama::from_pretrained(path, &DeviceMesh::single(), &FsdpConfig::default()).unwrap();
        let ids = Tensor::new(&[[1u32, 7, 3, 9, 2]], &Device::Cpu).unwrap();
        let logits: Tensor = model.evaluate(&ids).unwrap();
        logits.flatten_all().unwrap().to_vec1().unwrap()
    };
    assert_eq!(logits(&path), logits(dir.path()));
}

#[test]
fn what_would_compute_something_else_is_refused() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let stored = quantise(&config, &tensors(&config), GgmlDType::F32);
    let message = |key: &'static str, value: Option<Value>| {
        let mut metadata = gguf_metadata(&config);
        metadata.retain(|(known, _)| *known != key);
        metadata.extend(value.map(|value| (key, value)));
        write_gguf(&path, &metadata, &stored);
        let message = GgufFile::open(&path).unwrap_err().to_string();
        message.strip_prefix(&format!("`{}`: ", path.display())).unwrap_or(&message).to_owned()
    };
    let text = |text: &str| Some(Value::String(text.into()));
    for (key, value, expected) in [
        ("general.architecture", text("qwen2"), "general.architecture is `qwen2`: only `llama` is supported"),
        ("general.architecture", None, "`general.architecture` is missing"),
        (
            "llama.rope.scaling.type",
            text("yarn"),
            "llama.rope.scaling.type is `yarn`: only `none`, `linear` are supported",
        ),
        ("llama.expert_count", Some(Value::U32(8)), "llama.expert_count is 8: only 0 is supported"),
        ("llama.block_count", None, "`llama.block_count` is missing"),
        (
            "llama.block_count",
            Some(Value::I32(-1)),
            "`llama.block_count` is -1: expected a number below 2^32",
        ),
        (
            "llama.attention.head_count_kv",
            Some(Value::Array(vec![Value::U32(2); 2])),
            "`llama.attention.head_count_kv` is a list of 2: expected a number below 2^32",
        ),
        (
            "llama.rope.dimension_count",
            Some(Value::U32(8)),
            "`llama.rope.dimension_count` is 8: expected the width of a head, 16",
        ),
        (
            "llama.rope.freq_base",
            Some(Value::U32(10_000)),
            "`llama.rope.freq_base` is 10000: expected a floating-point number",
        ),
        (
            "llama.attention.causal",
            Some(Value::Bool(false)),
            "llama.attention.causal is false: only true is supported",
        ),
        ("general.type", text("adapter"), "general.type is `adapter`: only `model` is supported"),
        ("split.count", Some(Value::U16(3)), "split.count is 3: only 0, 1 are supported"),
        (
            "llama.vocab_size",
            Some(Value::U32(41)),
            "`llama.vocab_size` is 41: `token_embd.weight` has 40 rows",
        ),
        (
            "llama.attention.sliding_window",
            Some(Value::U32(4096)),
            "unknown setting `llama.attention.sliding_window` (4096): it may change what the file means; if it does not, remove it",
        ),
        (
            "llama.logit_scale",
            Some(Value::F32(0.25)),
            "unknown setting `llama.logit_scale` (0.25): it may change what the file means; if it does not, remove it",
        ),
        (
            "llama.embedding_length",
            Some(Value::U32(66)),
            "`general.architecture` is `llama`, but hidden_size 66 is not divisible by num_attention_heads 4 (remainder 2) and \
             no head_dim is given",
        ),
    ] {
        assert_eq!(message(key, value), expected);
    }
}

/// Names of those who make files, and what says nothing of the arithmetic.
#[test]
fn what_says_nothing_of_the_model_is_passed_over() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let text = |text: &str| Value::String(text.into());
    let mut metadata = gguf_metadata(&config);
    metadata.extend([
        ("general.name", text("a name")),
        ("general.type", text("model")),
        ("general.file_type", Value::U32(7)),
        ("general.quantization_version", Value::U32(2)),
        ("general.tags", Value::Array(vec![text("a"), text("b")])),
        ("llama.vocab_size", Value::U32(40)),
        ("llama.expert_count", Value::U32(0)),
        ("llama.attention.causal", Value::Bool(true)),
        ("llama.rope.scaling.type", text("none")),
        ("tokenizer.ggml.model", text("llama")),
        ("quantize.imatrix.file", text("imatrix.dat")),
        ("somebody.quantised.it", Value::Bool(true)),
    ]);
    write_gguf(&path, &metadata, &quantise(&config, &tensors(&config), GgmlDType::F32));
    assert_eq!(GgufFile::open(&path).unwrap().config(), &config);
}

#[test]
fn biases_are_unexpected() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let vector = || {
        candle_core::quantized::QTensor::quantize(
            &Tensor::zeros(8, candle_core::DType::F32, &Device::Cpu).unwrap(),
            GgmlDType::F32,
        )
        .unwrap()
    };
    let mut all = quantise(&config, &tensors(&config), GgmlDType::F32);
    all.push(("blk.0.attn_q.bias".into(), vector()));
    write_gguf(&path, &gguf_metadata(&config), &all);
    let pretrained = Pretrained::open(&path).unwrap();
    assert_eq!(pretrained.check().unwrap().unexpected, ["blk.0.attn_q.bias"]);
    let mut model = Llama::new(&config).unwrap().fully_shard(&DeviceMesh::single()).unwrap();
    let message = pretrained.load(&mut model, Strictness::Strict).unwrap_err().to_string();
    assert!(message.ends_with("1 unexpected: blk.0.attn_q.bias"), "{message}");
}

/// llama.cpp divides the frequencies of Llama 3 by a tensor, and those of linear scaling by a setting.
#[test]
fn scaled_frequencies_are_those_of_the_directory() {
    let plain = config(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let open = |metadata: Vec<(&'static str, Value)>, divisors: Option<&[f32]>| {
        let mut all = quantise(&plain, &tensors(&plain), GgmlDType::F32);
        if let Some(divisors) = divisors {
            let divisors = Tensor::new(divisors, &Device::Cpu).unwrap();
            all.push(("rope_freqs.weight".into(), QTensor::quantize(&divisors, GgmlDType::F32).unwrap()));
        }
        write_gguf(&path, &[gguf_metadata(&plain), metadata].concat(), &all);
        Pretrained::open(&path)
    };
    let linear = |kind: &str| {
        vec![
            ("llama.rope.scaling.type", Value::String(kind.into())),
            ("llama.rope.scaling.factor", Value::F32(4.0)),
        ]
    };
    let scaling = |opened: fsdp_models::Result<Pretrained>| {
        let opened = opened.unwrap();
        assert!(opened.check().unwrap().is_empty());
        opened.config().rope_scaling.clone()
    };
    assert_eq!(scaling(open(linear("linear"), None)), Some(RopeScaling::Linear { factor: 4.0 }));
    assert_eq!(scaling(open(linear("none"), None)), None);
    assert_eq!(scaling(open(vec![("llama.rope.scale_linear", Value::F32(0.0))], None)), None);

    // Within 8192 positions pair 5 of 8 turns round 4.12 times, pair 6 1.30 times, pair 7 0.41 times: the divisor of pair 6 is
    // 1 / ((1 - s) / 8 + s) with s = (1.3038 - 1) / 3.
    let llama3 = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 4.681_483, 8.0];
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(scaling(open(vec![], Some(&llama3))), Some(expected));
    assert_eq!(scaling(open(vec![], Some(&[1.0; 8]))), None);

    let refused = |opened: fsdp_models::Result<Pretrained>, expected: &str| {
        let message = opened.unwrap_err().to_string();
        assert!(message.contains(&format!("`rope_freqs.weight` {expected}")), "{message}");
    };
    let mut other = llama3;
    other[6] = 4.0;
    refused(open(vec![], Some(&other)), "divides frequency 6 by 4: expected 4.681");
    refused(open(vec![], Some(&[f32::NAN; 8])), "divides frequency 0 by NaN: expected 1");
    refused(open(vec![], Some(&[2.0; 4])), "is F32 of shape [4]: expected F32 of shape [8]");
    refused(open(linear("linear"), Some(&llama3)), "is there beside `llama.rope.scaling.type`");
}

#[test]
fn a_file_that_is_cut_names_the_first_tensor_that_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = written(dir.path(), &config(true), GgmlDType::Q8_0);
    let whole = fs::read(&path).unwrap();
    let first = {
        let content = Content::read(&mut Cursor::new(&whole)).unwrap();
        let infos = content.tensor_infos.into_iter();
        infos.min_by_key(|(_, info)| info.offset).map(|(name, _)| name).unwrap()
    };
    // A map of other keys goes through its tensors in another order each time.
    for _ in 0..8 {
        fs::write(&path, &whole[..whole.len() - tensor_bytes(&whole)]).unwrap();
        let message = GgufFile::open(&path).unwrap_err().to_string();
        assert!(message.contains(&format!("tensor `{first}` of ")), "{first}: {message}");
    }
}

/// Bytes of the tensors of a GGUF file.
fn tensor_bytes(file: &[u8]) -> usize {
    let content = Content::read(&mut Cursor::new(file)).unwrap();
    file.len() - content.tensor_data_offset as usize
}

#[test]
fn a_file_by_the_name_of_one_is_not_taken_for_something_else() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = written(dir.path(), &config(true), GgmlDType::F32);
    let mut bytes = fs::read(&path).unwrap();
    bytes[0] = b'g';
    fs::write(&path, bytes).unwrap();
    let expected =
        format!("`{}` is not a valid GGUF file: at byte 0: it does not begin with `GGUF`", path.display());
    assert_eq!(Pretrained::open(&path).unwrap_err().to_string(), expected);
    assert_eq!(Tokenizer::open(&path).unwrap_err().to_string(), expected);
}
