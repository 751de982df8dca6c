//! What loading a pretrained model takes beside what the ranks hold afterwards.
//!
//! Alone in its process, as it counts all memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use fsdp::prelude::*;
use fsdp_models::pretrained::{Pretrained, SaveOptions, Strictness, save_pretrained};
use fsdp_models::{Llama, LlamaConfig};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's, which counts.
struct Counted;

fn add(bytes: usize) {
    let live = LIVE.fetch_add(bytes, SeqCst) + bytes;
    PEAK.fetch_max(live, SeqCst);
}

// SAFETY: all work is the system allocator's; the counting beside it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there while one is copied into the other.
        add(size);
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// For headers, buffers of reads and the streams of a rank.
const ALLOWANCE: usize = 1 << 20;

fn config() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 4,
        vocab_size: 8192,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: true,
        max_position_embeddings: 64,
        initializer_range: 0.02,
        head_dim: None,
    }
}

fn write_gguf(path: &Path, config: &LlamaConfig) {
    let number = |size: usize| Value::U32(size as u32);
    let metadata = [
        ("general.architecture", Value::String("llama".into())),
        ("llama.embedding_length", number(config.hidden_size)),
        ("llama.feed_forward_length", number(config.intermediate_size)),
        ("llama.block_count", number(config.num_hidden_layers)),
        ("llama.attention.head_count", number(config.num_attention_heads)),
        ("llama.attention.head_count_kv", number(config.num_key_value_heads)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps as f32)),
        ("llama.context_length", number(config.max_position_embeddings)),
    ];
    let stored = |rows: usize, columns: usize| {
        let values = Tensor::full(0.25f32, (rows, columns), &Device::Cpu).unwrap();
        QTensor::quantize(&values, GgmlDType::Q8_0).unwrap()
    };
    let (hidden, inner, kv) = (config.hidden_size, config.intermediate_size, config.hidden_size / 2);
    let norm = || {
        QTensor::quantize(&Tensor::ones(hidden, DType::F32, &Device::Cpu).unwrap(), GgmlDType::F32).unwrap()
    };
    let mut tensors = vec![
        ("token_embd.weight".to_owned(), stored(config.vocab_size, hidden)),
        ("output_norm.weight".to_owned(), norm()),
    ];
    for layer in 0..config.num_hidden_layers {
        let name = |name: &str| format!("blk.{layer}.{name}.weight");
        tensors.extend([
            (name("attn_norm"), norm()),
            (name("ffn_norm"), norm()),
            (name("attn_q"), stored(hidden, hidden)),
            (name("attn_k"), stored(kv, hidden)),
            (name("attn_v"), stored(kv, hidden)),
            (name("attn_output"), stored(hidden, hidden)),
            (name("ffn_gate"), stored(inner, hidden)),
            (name("ffn_up"), stored(inner, hidden)),
            (name("ffn_down"), stored(hidden, inner)),
        ]);
    }
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    gguf_file::write(&mut File::create(path).unwrap(), &metadata, &tensors).unwrap();
}

#[test]
fn loading_and_saving_take_a_tensor_and_a_bucket_beside_the_shards() {
    let config = config();
    let sizes: Vec<usize> = Llama::new(&config)
        .unwrap()
        .parameters()
        .iter()
        .map(|(_, shape)| 4 * shape.iter().product::<usize>())
        .collect();
    let (weights, largest) = (sizes.iter().sum::<usize>(), *sizes.iter().max().unwrap());
    assert!(largest > 7 * ALLOWANCE && weights > largest + 8 * ALLOWANCE);
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("model.gguf");
    write_gguf(&gguf, &config);
    let single = Llama::new(&config).unwrap().fully_shard(&DeviceMesh::single()).unwrap();
    let options = SaveOptions { max_shard_bytes: 4 << 20, ..SaveOptions::default() };
    save_pretrained(&single, &config.to_json(), dir.path(), &options).unwrap();
    drop(single);
    for path in [dir.path(), gguf.as_path()] {
        for ranks in [1, 2, 4] {
            let before = LIVE.load(SeqCst);
            PEAK.store(before, SeqCst);
            let peaks = launch::local(ranks, |world| -> fsdp_models::Result<[usize; 3]> {
                let pretrained = Pretrained::open(path)?;
                let mut model = Llama::new(pretrained.config())?.fully_shard(&world.data_parallel_mesh())?;
                // Between barriers, rank 0 looks at what all ranks have taken.
                let measure = |model: &Fsdp<Llama>, start: bool| -> fsdp_models::Result<usize> {
                    model.agree_on::<_, fsdp_models::Error>("all are here", Ok(()))?;
                    let taken = PEAK.load(SeqCst) - before;
                    model.agree_on::<_, fsdp_models::Error>("all have looked", Ok(()))?;
                    if start && world.rank() == 0 {
                        PEAK.store(LIVE.load(SeqCst), SeqCst);
                    }
                    model.agree_on::<_, fsdp_models::Error>("it has begun", Ok(()))?;
                    Ok(taken)
                };
                measure(&model, true)?;
                let held = LIVE.load(SeqCst) - before;
                measure(&model, false)?;
                pretrained.load(&mut model, Strictness::Strict)?;
                let loading = measure(&model, true)?;
                let target = dir.path().join("again");
                save_pretrained(&model, &config.to_json(), &target, &options)?;
                let saving = measure(&model, false)?;
                Ok([held, loading, saving])
            })
            .unwrap();
            let [held, loading, saving] = peaks[0];
            let allowance = ranks * ALLOWANCE;
            // Weights and their gradients.
            assert!(held <= 2 * weights + allowance, "{ranks} ranks hold {held} bytes of {weights}");
            let bound = held + largest + allowance;
            assert!(loading <= bound, "{}: {ranks} ranks load with {loading}, not {bound}", path.display());
            // Every rank sees each bucket whole.
            let bound = held + ranks * largest + 2 * allowance;
            assert!(saving <= bound, "{}: {ranks} ranks save with {saving}, not {bound}", path.display());
        }
    }
}
