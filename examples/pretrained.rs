//! A pretrained Llama over ranks that are threads of this process: loads it, measures its loss on a text, trains it on that
//! text for some steps and saves it for Hugging Face's libraries.
//!
//! `cargo run --release --example pretrained -- MODEL --text FILE --steps 10 --export DIR`

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use clap::Parser;
use fsdp::files::{self, AtomicFile, FileError, save_f32};
use fsdp::prelude::*;
use fsdp_models::paths::Paths;
use fsdp_models::pretrained::{Pretrained, SaveOptions, Strictness, check_save_place};
use fsdp_models::{Llama, Tokenizer};
use serde_json::json;

/// A pretrained Llama over ranks that are threads of this process.
#[derive(Parser)]
#[command(max_term_width = 110)]
struct Options {
    /// A directory of Hugging Face's, or a GGUF file
    model: PathBuf,
    /// The text
    #[arg(long)]
    text: PathBuf,
    /// Number of ranks
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Tokens of a sequence; a step has as many sequences as the text
    #[arg(long, default_value_t = 128)]
    seq: usize,
    /// Training steps
    #[arg(long, default_value_t = 0)]
    steps: usize,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 2e-5)]
    lr: f64,
    /// Save the model here at the end
    #[arg(long)]
    export: Option<PathBuf>,
    /// Bytes of a saved file
    #[arg(long, default_value_t = 5_000_000_000)]
    max_shard_bytes: u64,
    /// Save the logits of the first sequence here, as f32 in safetensors: `before` and `after` training
    #[arg(long)]
    logits: Option<PathBuf>,
    /// Write what was measured here, as JSON
    #[arg(long)]
    report: Option<PathBuf>,
}

/// What a rank measured.
#[derive(Default)]
struct Measured {
    losses: Vec<f32>,
    logits: [Vec<f32>; 2],
    load_seconds: f64,
    save_seconds: f64,
    /// Of the whole process, in bytes, after the weights were loaded.
    peak: Option<u64>,
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The message has its causes in it: shown as a chain of them, it would say them twice.
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Options) -> Result<()> {
    let mut paths = Paths::new();
    paths.read_model("MODEL", [options.model.as_path()]).read("--text", [options.text.as_path()]);
    paths.write_model("--export", options.export.as_deref());
    paths.write_file("--logits", options.logits.as_deref());
    paths.write_file("--report", options.report.as_deref());
    paths.check()?;
    let pretrained = Pretrained::open(&options.model)?;
    pretrained.refuse_misfit()?;
    let tokenizer = Tokenizer::open(&options.model)?;
    let text = files::read_to_string(&options.text, u64::MAX)?;
    let ids = tokenizer.encode(&text)?;
    ensure!(
        options.seq > 0 && options.ranks > 0,
        "a sequence has at least one token, and there is at least one rank"
    );
    let sequences = ids.len().saturating_sub(1) / options.seq / options.ranks * options.ranks;
    let need = options.ranks as u128 * options.seq as u128 + 1;
    ensure!(sequences > 0, "the text has {} tokens: {need} make a sequence for each rank", ids.len());
    let all = launch::local(options.ranks, |world| {
        run(options, &pretrained, &tokenizer, &ids, sequences, &world.data_parallel_mesh())
    })?;

    let losses: Vec<f64> = (0..=options.steps)
        .map(|step| all.iter().map(|rank| f64::from(rank.losses[step])).sum::<f64>() / all.len() as f64)
        .collect();
    for (step, loss) in losses.iter().enumerate() {
        println!("after {step:2} steps: loss {loss:.6}");
    }
    let first = &all[0];
    let vocab = pretrained.config().vocab_size;
    if let Some(path) = &options.logits {
        let shape = [options.seq, vocab];
        save_f32(path, &[("before", &shape, &first.logits[0]), ("after", &shape, &first.logits[1])])?;
    }
    let report = json!({
        "ids": ids[..sequences * options.seq + 1], "seq": options.seq, "losses": losses,
        "load_seconds": first.load_seconds, "save_seconds": first.save_seconds, "peak_bytes_after_load": first.peak,
    });
    println!("loaded in {:.2} s, saved in {:.2} s", first.load_seconds, first.save_seconds);
    if let Some(path) = &options.report {
        let mut file = AtomicFile::create(path)?;
        file.write_all(report.to_string().as_bytes()).map_err(FileError::on("write", path))?;
        file.commit()?;
    }
    Ok(())
}

fn run(
    options: &Options,
    pretrained: &Pretrained,
    tokenizer: &Tokenizer,
    ids: &[u32],
    sequences: usize,
    mesh: &DeviceMesh,
) -> fsdp_models::Result<Measured> {
    let mut measured = Measured::default();
    let start = Instant::now();
    let mut model = pretrained.model()?.fully_shard(mesh)?;
    let report = pretrained.load(&mut model, Strictness::Strict)?;
    if report.has_remarks() && mesh.rank() == 0 {
        println!("{report}");
    }
    measured.load_seconds = start.elapsed().as_secs_f64();
    measured.peak = peak_resident_bytes();
    if let Some(dir) = &options.export {
        check_save_place(&model, dir)?;
    }

    // Sequences go round among the ranks.
    let mine: Vec<&[u32]> = (mesh.rank()..sequences)
        .step_by(mesh.world_size())
        .map(|sequence| &ids[sequence * options.seq..][..options.seq + 1])
        .collect();
    let tensor = |from: usize| -> fsdp_models::Result<Tensor> {
        let tokens: Vec<u32> = mine.iter().flat_map(|row| &row[from..from + options.seq]).copied().collect();
        Ok(Tensor::from_vec(tokens, (mine.len(), options.seq), &Device::Cpu)?)
    };
    let batch = (tensor(0)?, tensor(1)?);
    let first = Tensor::from_slice(&ids[..options.seq], (1, options.seq), &Device::Cpu)?;
    let logits = |model: &Fsdp<Llama>| -> fsdp_models::Result<Vec<f32>> {
        let logits: Tensor = model.evaluate(&first)?;
        Ok(logits.flatten_all()?.to_vec1()?)
    };
    let wanted = options.logits.is_some();
    if wanted {
        measured.logits[0] = logits(&model)?;
    }
    let mut optimizer = model.optimizer(AdamW::default().lr(options.lr))?;
    for _ in 0..options.steps {
        let loss: Tensor = model.forward(&batch)?;
        model.backward(&loss)?;
        optimizer.step(&mut model)?;
        measured.losses.push(loss.to_scalar()?);
    }
    let loss: Tensor = model.evaluate(&batch)?;
    measured.losses.push(loss.to_scalar()?);
    if wanted {
        measured.logits[1] = logits(&model)?;
    }
    if let Some(dir) = &options.export {
        let start = Instant::now();
        let save = SaveOptions {
            max_shard_bytes: options.max_shard_bytes,
            tokenizer: Some(tokenizer),
            ..SaveOptions::default()
        };
        pretrained.save(&model, dir, &save)?;
        measured.save_seconds = start.elapsed().as_secs_f64();
    }
    Ok(measured)
}

/// The most memory that this process had so far, where the system tells.
fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}
