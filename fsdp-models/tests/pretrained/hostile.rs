//! Damaged and hostile files: errors, no panics, no memory on their word, nothing outside their directory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use fsdp::prelude::*;
use fsdp_models::pretrained::{Pretrained, Strictness};
use fsdp_models::{Llama, Tokenizer};
use safetensors::Dtype;

use super::fixtures::{config, gguf_metadata, quantise, tensors, write_gguf, write_indexed, write_single};

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

/// The system's, which remembers each thread's largest allocation.
struct Watched;

fn note(bytes: usize) {
    LARGEST.set(LARGEST.get().max(bytes));
}

// SAFETY: all work is the system allocator's; the note beside it neither allocates nor unwinds.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

struct Random(u64);

impl Random {
    /// Below `limit`. SplitMix64.
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Damages bytes, those of the first `header` ones above all.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>, header: usize) {
    for _ in 0..random.pick(&[1, 1, 1, 2, 4]) {
        let range = if random.below(8) > 0 { header.min(bytes.len()) } else { bytes.len() };
        let at = random.below(range);
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => {
                bytes.splice(at..at, (0..random.below(9)).map(|byte| byte as u8));
            }
            2 => {
                let end = (at + random.below(9)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
            3 => {
                let number: u64 = random.pick(&[
                    u64::MAX,
                    1 << 63,
                    i64::MAX as u64,
                    1 << 40,
                    1 << 31,
                    u64::from(u32::MAX),
                    0,
                    1 << 61,
                ]);
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            4 => {
                let digits =
                    random.pick(&["9999999999", "-1", "1e300", "null", "[]", "\"\"", "0", "4294967296"]);
                bytes.splice(at..at, digits.bytes());
            }
            5 if at < bytes.len() => bytes[at] = random.pick(b"0123456789\"{}[],:/.\\\0\xff"),
            _ if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
}

/// Opens and loads `open` with `file` damaged in many ways.
fn survives(seed: u64, cases: usize, open: &Path, file: &Path, header: usize) {
    let model = Llama::new(&config(true)).unwrap().fully_shard(&DeviceMesh::single()).unwrap();
    let sound = fs::read(file).unwrap();
    // Candle's errors carry backtraces where those are on, for which the symbols of the program are read.
    let backtraces = std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0");
    let limit = 64 * sound.len() + (1 << 20) + if backtraces { 64 << 20 } else { 0 };
    let mut random = Random(seed);
    let mut opened = 0;
    for case in 0..cases {
        let mut bytes = sound.clone();
        mutate(&mut random, &mut bytes, header);
        fs::write(file, &bytes).unwrap();
        LARGEST.set(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| -> fsdp_models::Result<()> {
            let _ = Tokenizer::open(open).map(|tokenizer| tokenizer.encode("a b"));
            let pretrained = Pretrained::open(open)?;
            opened += 1;
            pretrained.check()?;
            pretrained.load(&model, Strictness::Strict)?;
            pretrained.load(&model, Strictness::Lenient)?;
            Ok(())
        }));
        let largest = LARGEST.get();
        let outcome = outcome.unwrap_or_else(|_| panic!("case {case} of seed {seed} panics"));
        assert!(
            largest <= limit,
            "case {case} of seed {seed} takes {largest} bytes of a file of {}",
            sound.len()
        );
        if let Err(error) = outcome {
            let message = error.to_string();
            assert!(!message.is_empty(), "case {case} of seed {seed}");
        }
    }
    assert!(opened > 0 && opened < cases, "{opened} of {cases} were opened");
    fs::write(file, &sound).unwrap();
    Pretrained::open(open).unwrap().load(&model, Strictness::Strict).unwrap();
}

#[test]
fn damaged_gguf_files() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut metadata = gguf_metadata(&config);
    let texts =
        |texts: &[&str]| Value::Array(texts.iter().map(|text| Value::String((*text).into())).collect());
    metadata.extend([
        ("general.alignment", Value::U32(32)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(&["a", "b", "Ġ", "Ġb", "<s>"])),
        ("tokenizer.ggml.merges", texts(&["Ġ b"])),
        ("tokenizer.ggml.eos_token_id", Value::U32(4)),
        ("tokenizer.ggml.add_bos_token", Value::Bool(false)),
    ]);
    write_gguf(&path, &metadata, &quantise(&config, &tensors(&config), GgmlDType::Q4_1));
    survives(1, 600, &path, &path, 2400);
}

#[test]
fn damaged_safetensors_files() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_single(dir.path(), &config, &tensors(&config), Dtype::BF16);
    survives(2, 400, dir.path(), &dir.path().join("model.safetensors"), 1800);
}

#[test]
fn damaged_indices_and_configurations() {
    let config = config(true);
    let dir = tempfile::tempdir().unwrap();
    write_indexed(dir.path(), &config, &tensors(&config), Dtype::BF16, 3);
    survives(3, 400, dir.path(), &dir.path().join("model.safetensors.index.json"), usize::MAX);
    survives(4, 400, dir.path(), &dir.path().join("config.json"), usize::MAX);
}
