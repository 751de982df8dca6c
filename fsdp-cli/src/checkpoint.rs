//! `fsdp checkpoint`: looks into checkpoints, checks them, compares them, and hands them over to Hugging Face's libraries.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand};
use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints, INDEX_FILE, Index, MODEL};
use fsdp::spec::Dtype;
use fsdp_models::checkpoint::{
    ExportOptions, Side, WorkProgress, diff, export, find, list, summary, summary_json,
};
use fsdp_models::trainer::{Stop, quantity};
use serde_json::Value;

use crate::status::{Status, print};

/// Look into checkpoints, check them, compare them, and hand them over to Hugging Face's libraries
///
/// Where a checkpoint is asked for, a directory of checkpoints stands for the latest one in it.
#[derive(Args)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Inspect(Inspect),
    Verify(Verify),
    Export(Export),
    Diff(Diff),
}

/// Show who wrote a checkpoint, its values and its tensors; of a directory of checkpoints all of them, and the latest one
#[derive(Args)]
struct Inspect {
    /// A checkpoint, or a directory of them
    path: PathBuf,
    /// Show the tensors of this section; may be given several times [default: model]
    #[arg(long)]
    section: Vec<String>,
    /// Write JSON, with the tensors of all sections
    #[arg(long)]
    json: bool,
}

/// Read checkpoints whole and check every checksum; the exit status is 1 if anything is damaged, 2 if something is no
/// checkpoint
#[derive(Args)]
struct Verify {
    /// Checkpoints, or directories of them
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Of a directory of checkpoints verify all, not the latest one only
    #[arg(long)]
    all: bool,
}

/// Write the weights as a directory of Hugging Face's; those of a run with adapters are exported by finetune
#[derive(Args)]
struct Export {
    /// A checkpoint, or a directory of them
    path: PathBuf,
    /// Where to; weights that are there are replaced
    dir: PathBuf,
    /// The section: the weights, or the name of an average of them
    #[arg(long, default_value = MODEL)]
    section: String,
    /// Round weights to f32, bf16 or f16 [default: as they are stored]
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Most bytes of the tensors in one file
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = quantity::parse_bytes)]
    max_shard_size: u64,
    /// The model's `config.json`, which goes with the weights; they are checked against it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Show how two checkpoints differ; the exit status is 1 if they do, 2 if they cannot be compared
///
/// Each of them may also be a directory of Hugging Face's, a safetensors file or a GGUF file. Who wrote a checkpoint and how it
/// is laid out in files is no difference.
#[derive(Args)]
struct Diff {
    /// A checkpoint, a directory of them, or pretrained weights
    a: PathBuf,
    /// Another one
    b: PathBuf,
    /// Compare the tensors of this section only, and not the step and the values
    #[arg(long)]
    section: Option<String>,
}

/// Runs what was asked for.
pub fn run(options: &Options) -> Result<Status> {
    match &options.command {
        Command::Inspect(options) => inspect(options),
        Command::Verify(options) => verify(options),
        Command::Export(options) => export_weights(options),
        Command::Diff(options) => differences(options),
    }
}

fn is_checkpoint(path: &Path) -> bool {
    path.join(INDEX_FILE).exists()
}

fn inspect(Inspect { path, section, json }: &Inspect) -> Result<Status> {
    let listing = (!is_checkpoint(path)).then(|| list(&Checkpoints::new(path))).transpose()?;
    if let Some(listing) = listing.as_ref().filter(|listing| !json && !listing.is_empty()) {
        print(&format!("{listing}\n"))?;
    }
    let checkpoint = Checkpoint::open(find(path)?)?;
    if *json {
        let mut facts = summary_json(&checkpoint, section)?;
        facts.extend(listing.into_iter().flat_map(|listing| listing.json()));
        print(&format!("{:#}\n", Value::Object(facts)))?;
    } else {
        print(&summary(&checkpoint, section)?)?;
    }
    Ok(Status::Good)
}

fn verify(Verify { paths, all }: &Verify) -> Result<Status> {
    let mut status = Status::Good;
    for path in paths {
        let mut checkpoints = match find(path) {
            Ok(found) => vec![found],
            Err(error) => {
                eprintln!("error: {error}");
                status = Status::Failed;
                continue;
            }
        };
        if !is_checkpoint(path) {
            let store = Checkpoints::new(path);
            let entries = store.list()?;
            if *all && !entries.is_empty() {
                checkpoints = entries.into_iter().map(|entry| entry.path).collect();
            }
            for unfinished in store.unfinished()? {
                print(&format!("{}: not complete, and no checkpoint\n", unfinished.display()))?;
            }
        }
        for checkpoint in checkpoints {
            // A run that goes on removes what it does not keep.
            let may_go = checkpoint != *path;
            status = status.max(verify_one(&checkpoint, may_go)?);
        }
    }
    Ok(status)
}

fn verify_one(path: &Path, may_go: bool) -> Result<Status> {
    let gone = || {
        print(&format!("{}: removed meanwhile\n", path.display()))?;
        Ok(Status::Good)
    };
    let damaged = |wrong: &[CheckpointError]| {
        let mut text = format!("{}: damaged\n", path.display());
        wrong.iter().for_each(|error| writeln!(text, "  {error}").expect("a string grows"));
        print(&text)?;
        Ok(Status::Bad)
    };
    let index = match Index::read(path) {
        Err(_) if may_go && !path.exists() => return gone(),
        Err(error @ CheckpointError::Malformed { .. }) => return damaged(&[error]),
        Err(error) => {
            eprintln!("error: {error}");
            return Ok(Status::Failed);
        }
        Ok(index) => index,
    };
    let (progress, mut done) = (WorkProgress::new("verifying"), 0);
    let wrong = index.verify(path, |bytes| {
        done += bytes;
        progress.set(done, index.bytes());
    });
    drop(progress);
    if may_go && matches!(wrong[..], [CheckpointError::Removed { .. }]) {
        return gone();
    }
    if !wrong.is_empty() {
        return damaged(&wrong);
    }
    let tensors = index.tensors.values().map(|section| section.len() as u64).sum();
    let (tensors, files) = (quantity::count(tensors), index.files.len());
    let bytes = quantity::bytes(index.bytes());
    print(&format!("{}: sound, {tensors} tensors in {files} files of {bytes}\n", path.display()))?;
    Ok(Status::Good)
}

fn export_weights(options: &Export) -> Result<Status> {
    // There is no run to stop: Ctrl-C ends the program, without the files that are not finished.
    Stop::at_ctrl_c()?;
    let Export { path, dir, section, dtype, max_shard_size, config } = options;
    let checkpoint = Checkpoint::open(find(path)?)?;
    let options =
        ExportOptions { section, dtype: *dtype, max_shard_bytes: *max_shard_size, config: config.as_deref() };
    let progress = WorkProgress::new("exporting");
    let exported = export(&checkpoint, dir, &options, |done, total| progress.set(done, total))?;
    drop(progress);
    let (tensors, bytes) = (quantity::count(exported.tensors as u64), quantity::bytes(exported.bytes));
    let mut text = format!("{}: {tensors} tensors, {bytes}\n", dir.display());
    if exported.from_model > 0 {
        let count = quantity::count(exported.from_model as u64);
        writeln!(text, "{count} of them from section `{MODEL}`, as `{section}` has none of their names")?;
    }
    print(&text)?;
    Ok(Status::Good)
}

fn differences(Diff { a, b, section }: &Diff) -> Result<Status> {
    let (a, b) = (Side::open(a)?, Side::open(b)?);
    let progress = WorkProgress::new("comparing");
    let differences = diff(&a, &b, section.as_deref(), |done, total| progress.set(done, total))?;
    drop(progress);
    print(&format!("a: {a}\nb: {b}\n\n{differences}"))?;
    Ok(if differences.is_empty() { Status::Good } else { Status::Bad })
}
