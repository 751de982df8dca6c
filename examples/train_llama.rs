//! Trains a Llama-architecture model, fully sharded over ranks: threads of this process, or processes (`fsdp launch -n 4 -- train_llama ..`).
//!
//! `cargo run --example train_llama` trains a small one on this repository's own sources and docs
//! for about two minutes; `--help` tells what else it can do.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use anyhow::{Result, anyhow, bail};
use clap::{Args, Parser, ValueEnum};
use fsdp::comm::tcp::Place;
use fsdp::files::{AtomicFile, StoredDtype, TensorFile, TensorFileWriter};
use fsdp::launch::{LaunchError, Launcher};
use fsdp::prelude::*;
use fsdp::trace::Span;
use fsdp_models::data::{Batches, TextDataset, TextOptions, TokenFile, corpus};
use fsdp_models::paths::Paths;
use fsdp_models::pretrained::{PretrainedError, SaveOptions, Weights, check_save_place, save_pretrained};
use fsdp_models::trainer::metrics::{MetricsWriter, StepMetrics};
use fsdp_models::trainer::progress::Progress;
use fsdp_models::trainer::{
    CheckpointOptions, INTERRUPTED, Outputs, RunCheckpoints, Stop, TrainDevice, TrainOptions, TrainSummary,
    lanes, plot, quantity, report, shard, train,
};
use fsdp_models::{Llama, LlamaConfig, Tokenizer, ops};

/// Sequences of a step, and tokens of each, where neither an option nor a token file says.
const DEFAULT_BATCH: usize = 16;
const DEFAULT_SEQ: usize = 128;

/// Trains a Llama-architecture model, fully sharded over ranks: threads of this process, or processes that `fsdp launch` starts.
///
/// Ctrl-C stops it at the end of a step, whose state is saved if there are --checkpoints.
#[derive(Parser)]
#[command(max_term_width = 110, args_override_self = true)]
struct Options {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    sharding: ShardingOptions,
    #[command(flatten)]
    training: TrainingOptions,
    #[command(flatten)]
    files: Files,
}

#[derive(Args)]
#[command(next_help_heading = "Model")]
struct ModelOptions {
    /// Width of the residual stream
    #[arg(long, default_value_t = 192)]
    dim: usize,
    /// Number of decoder blocks
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Query heads
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Key and value heads
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Width of the feed-forward layer
    #[arg(long, default_value_t = 512)]
    ffn: usize,
    /// Token ids; text is bytes and needs 256
    #[arg(long, default_value_t = 256)]
    vocab: usize,
    /// The output projection is the embedding
    #[arg(long)]
    tied: bool,
    /// Standard deviation of the initial weights
    #[arg(long, default_value_t = 0.02, allow_negative_numbers = true)]
    init_std: f64,
    /// Take the model's sizes from a Hugging Face `config.json`
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["dim", "layers", "heads", "kv_heads", "ffn", "vocab", "tied", "init_std"]
    )]
    config: Option<PathBuf>,
}

#[derive(Args)]
#[command(next_help_heading = "Sharding")]
struct ShardingOptions {
    /// Number of ranks, each a thread [default: 2]; where `fsdp launch` has started several, each a process, as many as those
    #[arg(long)]
    ranks: Option<usize>,
    /// What the ranks compute on: cpu, or cuda, in a program built with `--features cuda` (and nccl for several GPUs)
    #[arg(long, value_name = "cpu|cuda", default_value_t)]
    device: TrainDevice,
    #[arg(long, default_value_t, help = format!("What is sharded: {}", Strategy::names()))]
    strategy: Strategy,
    /// Replicas of the sharded model (hybrid sharding): the ranks of each share its shards
    #[arg(long, value_name = "REPLICAS", default_value_t = 1)]
    outer_ranks: usize,
    #[arg(long, default_value_t, help = format!("What the replicas share besides: {}; optim cuts the optimizer state further", OuterStrategy::names()))]
    outer_strategy: OuterStrategy,
    /// When a block's gathered weights are given up between forward and backward: always, never, or keep one
    /// part in so many on each rank
    #[arg(long, value_name = "always|never|RANKS", default_value = "always", value_parser = reshard)]
    reshard_after_forward: ReshardAfterForward,
    /// Where shard boundaries may fall
    #[arg(long, value_enum, default_value_t)]
    alignment: Alignment,
    /// Run the forward of each block again in the backward instead of keeping its activations
    #[arg(long)]
    recompute: bool,
    /// Allocate gathered weights and unreduced gradients as needed instead of keeping two buffers of each
    #[arg(long)]
    no_double_buffer: bool,
    /// Dtype of weights and activations: f32, bf16, or f16 with a scaled loss
    #[arg(long, default_value_t = Dtype::F32)]
    param_dtype: Dtype,
    /// Dtype in which gradients travel: f32, bf16 or f16
    #[arg(long, default_value_t = Dtype::F32)]
    reduce_dtype: Dtype,
    /// Threads of each rank's matrix products
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads_per_rank: u16,
}

#[derive(Args)]
#[command(next_help_heading = "Training")]
struct TrainingOptions {
    /// Optimizer steps
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Sequences of a step, all ranks and microbatches together; those of the file with --tokens
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens of a sequence; those of the file with --tokens
    #[arg(long)]
    seq: Option<usize>,
    /// Parts into which each rank cuts its sequences; their gradients are accumulated
    #[arg(long, default_value_t = 1)]
    microbatches: usize,
    /// Learning rate; with --warmup its highest value
    #[arg(long, default_value_t = 1e-3, allow_negative_numbers = true)]
    lr: f64,
    /// Steps of linear warm-up, after which the rate falls to a tenth along half a cosine; constant if not
    /// given
    #[arg(long, value_name = "STEPS")]
    warmup: Option<usize>,
    /// Decoupled weight decay, of every parameter
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true)]
    weight_decay: f64,
    /// Largest global gradient norm; 0 for no clipping
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    clip: f64,
    /// Seed of initial weights and order of data
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Look for NaNs and infinities in every unit's output, and name the first unit that has one
    #[arg(long)]
    check_finite: bool,
}

#[derive(Args)]
#[command(next_help_heading = "Files")]
struct Files {
    /// Text to train on [default: this repository's sources and docs]
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "tokens")]
    text: Vec<PathBuf>,
    /// Token ids to train on: a safetensors file with `tokens`, I32 [steps, batch, seq + 1]
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Initial weights: safetensors with Hugging Face's names. With --tied a head in it must be the same as the embedding
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Write the weights after the last step, as f32 safetensors
    #[arg(long, value_name = "FILE")]
    save_weights: Option<PathBuf>,
    /// Write the model after the last step as a directory of Hugging Face's: a model of text with a tokenizer of bytes
    #[arg(long, value_name = "DIR")]
    save_pretrained: Option<PathBuf>,
    /// Write the first step's gradients, reduced and not clipped, as f32 safetensors
    #[arg(long, value_name = "FILE")]
    save_grads: Option<PathBuf>,
    /// Write a JSON line a step and a summary
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Draw the curves of loss and gradient norm
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Write a trace of the last steps for Perfetto or chrome://tracing
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    /// Draw the trace of the last step
    #[arg(long, value_name = "FILE.svg")]
    trace_plot: Option<PathBuf>,
    #[command(flatten)]
    saving: Saving,
}

#[derive(Args)]
#[command(next_help_heading = "Checkpoints")]
struct Saving {
    /// Save the state of the run into this directory as it goes on, and at its end
    #[arg(long, value_name = "DIR")]
    checkpoints: Option<PathBuf>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "STEPS", default_value_t = 100, requires = "checkpoints")]
    save_every: usize,
    /// Checkpoints that are kept, the latest ones
    #[arg(long, value_name = "COUNT", default_value_t = 2, requires = "checkpoints")]
    keep: usize,
    /// Go on from the latest checkpoint: on any number of ranks, with any strategy
    #[arg(long, requires = "checkpoints")]
    resume: bool,
}

impl Saving {
    fn open(&self, data: &dyn Batches) -> Result<Option<RunCheckpoints>> {
        let open = |directory: &PathBuf| {
            let directory = directory.clone();
            let (every, keep, resume) = (self.save_every, self.keep, self.resume);
            let options = CheckpointOptions { directory, every, keep, resume, base: None };
            RunCheckpoints::open(&options, data)
        };
        Ok(self.checkpoints.as_ref().map(open).transpose()?)
    }
}

impl Files {
    /// The texts to train on, where there is no file of tokens.
    fn texts(&self) -> Result<Vec<PathBuf>> {
        Ok(match &self.text[..] {
            [] if self.tokens.is_some() => Vec::new(),
            [] => corpus::source_files(Path::new(env!("CARGO_MANIFEST_DIR")))?,
            given => given.to_vec(),
        })
    }

    /// Nothing that is read, and no other output, may be written over.
    fn check(&self, config: Option<&Path>, texts: &[PathBuf]) -> Result<()> {
        let mut paths = Paths::new();
        paths.read("--config", config).read("--text", texts.iter().map(PathBuf::as_path));
        paths.read("--tokens", self.tokens.as_deref()).read("--weights", self.weights.as_deref());
        paths.write_run("--checkpoints", self.saving.checkpoints.as_deref());
        paths.write_model("--save-pretrained", self.save_pretrained.as_deref());
        paths.write_file("--save-weights", self.save_weights.as_deref());
        paths.write_file("--save-grads", self.save_grads.as_deref());
        paths.write_file("--metrics", self.metrics.as_deref());
        paths.write_file("--plot", self.plot.as_deref());
        paths.write_file("--trace", self.trace.as_deref());
        paths.write_file("--trace-plot", self.trace_plot.as_deref());
        Ok(paths.check()?)
    }
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Alignment {
    /// Anywhere: the least padding
    #[default]
    Element,
    /// Between rows, so that each rank holds whole rows
    Row,
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

/// candle computes element-wise ops on one pool of spinning threads for the whole process, behind one lock.
/// Ranks that are threads would wait for each other there; without the pool each computes in its own thread,
/// which is twice as fast and more.
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
    let Options { model, sharding, training, files } = options;
    let texts = files.texts()?;
    files.check(model.config.as_deref(), &texts)?;
    let mut config = model_config(&model)?;
    let data = open_data(config.vocab_size, &training, files.tokens.as_deref(), &texts)?;
    if model.config.is_none() {
        config.max_position_embeddings = data.seq();
    }
    let place = Place::launched()?;
    let ranks = number_of_ranks(sharding.ranks, place.as_ref())?;
    // Of ranks that are processes the first one writes and prints; of threads, this process.
    let writes = place.is_none_or(|place| place.rank == 0);
    let options = TrainOptions {
        fsdp: fsdp_config(&sharding, &training, files.trace.is_some() || files.trace_plot.is_some()),
        device: sharding.device,
        microbatches: training.microbatches,
        outer_ranks: sharding.outer_ranks,
        lr: training.lr,
        warmup: training.warmup,
        weight_decay: training.weight_decay,
        clip: (training.clip != 0.0).then_some(training.clip),
        ..TrainOptions::new(config, training.steps)
    };
    options.validate(ranks, &*data)?;
    let parameters = Llama::new(&options.model)?.parameters();
    let tensors = || parameters.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
    let weights = files.weights.as_deref().map(|path| open_weights(path, &options.model)).transpose()?;

    // All inputs are good: whatever is to be written is opened now, so that no step is spent on what cannot
    // be kept.
    let tensor_file = |path: &PathBuf| TensorFileWriter::create(path, tensors(), StoredDtype::F32);
    let gradients = files.save_grads.as_ref().map(tensor_file).transpose()?;
    let final_weights = files.save_weights.as_ref().map(tensor_file).transpose()?;
    let written = |path: &'_ Option<PathBuf>| path.clone().filter(|_| writes);
    let plot_file = written(&files.plot).as_deref().map(plot::create).transpose()?;
    let trace_file = written(&files.trace).as_deref().map(AtomicFile::create).transpose()?;
    let trace_plot_file = written(&files.trace_plot).as_deref().map(plot::create).transpose()?;
    let checkpoints = files.saving.open(&*data)?;
    let first_step = checkpoints.as_ref().map_or(0, RunCheckpoints::first_step);
    let metrics = written(&files.metrics);
    let metrics = metrics.as_deref().map(|path| MetricsWriter::resume(path, first_step)).transpose()?;
    let (metrics, mut steps) = metrics.map_or_else(Default::default, |(file, steps)| (Some(file), steps));
    let beginning = checkpoints.as_ref().and_then(|checkpoints| checkpoints.beginning(options.steps));
    if let Some(line) = beginning.filter(|_| writes) {
        println!("{line}");
    }
    let outputs = Outputs {
        progress: writes.then(|| Mutex::new(Progress::new(options.steps))),
        metrics: metrics.map(Mutex::new),
        gradients: gradients.map(Mutex::new),
        weights: final_weights.map(Mutex::new),
        checkpoints,
        stop,
    };

    // Tokens of a file come from a tokenizer that is not known here.
    let bytes = files.tokens.is_none() && options.model.vocab_size >= 256;
    let tokenizer = bytes.then(Tokenizer::of_bytes).transpose()?;
    let pretrained = SaveOptions { tokenizer: tokenizer.as_ref(), ..SaveOptions::default() };

    ops::set_threads(usize::from(sharding.threads_per_rank));
    let summaries = Launcher::new().ranks(ranks).launch(|world| {
        let mut model = shard(&world, &options, weights.as_ref())?;
        if let Some(dir) = &files.save_pretrained {
            check_save_place(&model, dir)?;
        }
        if world.rank() == 0 {
            let (strategy, tokens) = (model.strategy(), data.rows() * data.seq());
            let mesh = match options.outer_ranks {
                1 => format!("{ranks} ranks"),
                outer => format!("{outer} replicas of {} ranks", ranks / outer),
            };
            println!("{mesh}, strategy {strategy}, {} tokens a step", quantity::count(tokens as u64));
            println!("{}", options.fsdp.precision);
            println!("\n{}", report::units(&model));
        }
        let summary = train(&world, &mut model, &options, &*data, &outputs)?;
        if let Some(dir) = files.save_pretrained.as_ref().filter(|_| !summary.stopped) {
            save_pretrained(&model, &options.model.to_json(), dir, &pretrained)?;
        }
        Ok::<_, fsdp_models::Error>(summary)
    });
    let summaries = summaries.map_err(root_cause)?;

    let Outputs { progress, metrics, gradients, weights, checkpoints, stop: _ } = outputs;
    drop(progress);
    if summaries[0].stopped {
        if writes {
            println!("{}", report::stopped(&summaries[0], options.steps, checkpoints.as_ref()));
        }
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if !writes {
        return Ok(ExitCode::SUCCESS);
    }
    for file in [gradients, weights].into_iter().flatten() {
        file.into_inner()?.finish()?;
    }
    if let Some(file) = metrics {
        let (memory, traffic) = (report::memory_json(&summaries), report::traffic_json(&summaries));
        file.into_inner()?.finish(&summaries[0].times.summary(memory, traffic))?;
    }
    if let Some(file) = plot_file {
        let title = format!("{ranks} ranks, {}", options.fsdp.strategy);
        steps.extend(&summaries[0].steps);
        plot::write_curves(file, &title, &steps)?;
    }
    let spans: Vec<_> = summaries.iter().map(|summary| summary.spans.clone()).collect();
    if let Some(file) = trace_file {
        write_trace(file, &spans)?;
    }
    if let Some(file) = trace_plot_file {
        lanes::write_lanes(file, &spans)?;
    }
    print_result(&summaries);
    Ok(ExitCode::SUCCESS)
}

/// As many as were started, each a process, or else as many threads as are asked for.
fn number_of_ranks(asked: Option<usize>, place: Option<&Place>) -> Result<usize> {
    const THREADS: usize = 2;
    let Some(Place { size, .. }) = place else { return Ok(asked.unwrap_or(THREADS)) };
    match asked {
        Some(asked) if asked != *size => {
            bail!("--ranks is {asked}, but {size} ranks were started, each a process")
        }
        _ => Ok(*size),
    }
}

fn model_config(model: &ModelOptions) -> Result<LlamaConfig> {
    if let Some(path) = &model.config {
        return Ok(LlamaConfig::from_json_file(path)?);
    }
    Ok(LlamaConfig {
        hidden_size: model.dim,
        intermediate_size: model.ffn,
        num_hidden_layers: model.layers,
        num_attention_heads: model.heads,
        num_key_value_heads: model.kv_heads,
        vocab_size: model.vocab,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: model.tied,
        max_position_embeddings: DEFAULT_SEQ,
        initializer_range: model.init_std,
        head_dim: None,
    })
}

/// The initial weights, if they are those of such a model.
fn open_weights(path: &Path, model: &LlamaConfig) -> Result<Weights> {
    let weights = Weights::Single(TensorFile::open(path)?);
    weights.check_llama(model).map_err(|error| match error {
        fsdp_models::Error::Pretrained(error @ PretrainedError::Tied { .. }) => anyhow!(
            "{error}; to train both, leave out --tied (or set `tie_word_embeddings` to false in the file of --config)"
        ),
        error => error.into(),
    })?;
    Ok(weights)
}

fn open_data(
    vocab: usize,
    training: &TrainingOptions,
    tokens: Option<&Path>,
    texts: &[PathBuf],
) -> Result<Box<dyn Batches>> {
    if let Some(path) = tokens {
        let tokens = TokenFile::open(path, vocab)?;
        for (option, asked, found) in
            [("--batch", training.batch, tokens.rows()), ("--seq", training.seq, tokens.seq())]
        {
            if let Some(asked) = asked.filter(|&asked| asked != found) {
                bail!("{option} is {asked}, but `{}` has {found}", path.display());
            }
        }
        return Ok(Box::new(tokens));
    }
    let (batch, seq) = (training.batch.unwrap_or(DEFAULT_BATCH), training.seq.unwrap_or(DEFAULT_SEQ));
    let options = TextOptions { seq, batch, vocab, seed: training.seed };
    Ok(Box::new(TextDataset::open(texts, options)?))
}

fn reshard(text: &str) -> std::result::Result<ReshardAfterForward, String> {
    match text {
        "always" => Ok(ReshardAfterForward::Always),
        "never" => Ok(ReshardAfterForward::Never),
        ranks => match ranks.parse() {
            Ok(ranks) if ranks > 0 => Ok(ReshardAfterForward::Ranks(ranks)),
            _ => Err("expected always, never, or a number of ranks".into()),
        },
    }
}

fn fsdp_config(sharding: &ShardingOptions, training: &TrainingOptions, trace: bool) -> FsdpConfig {
    FsdpConfig {
        strategy: sharding.strategy,
        outer: sharding.outer_strategy,
        reshard_after_forward: sharding.reshard_after_forward,
        alignment: match sharding.alignment {
            Alignment::Element => ShardAlignment::Element,
            Alignment::Row => ShardAlignment::Row,
        },
        precision: MixedPrecision {
            param: sharding.param_dtype,
            reduce: sharding.reduce_dtype,
            ..MixedPrecision::F32
        },
        recompute: if sharding.recompute { Recompute::Unit } else { Recompute::None },
        double_buffer: !sharding.no_double_buffer,
        seed: training.seed,
        check_finite: training.check_finite,
        trace,
        ..FsdpConfig::default()
    }
}

/// One message: that of the rank that failed first. What its peers then say of it adds nothing.
fn root_cause(error: LaunchError) -> anyhow::Error {
    match error {
        LaunchError::Ranks { first, .. } => anyhow::anyhow!("{first}"),
        other => other.into(),
    }
}

fn write_trace(mut file: AtomicFile, spans: &[Vec<Span>]) -> Result<()> {
    let trace = fsdp::trace::chrome_trace(spans);
    if let Err(error) = write!(file, "{trace}") {
        bail!("cannot write `{}`: {error}", file.target().display());
    }
    Ok(file.commit()?)
}

fn print_result(summaries: &[TrainSummary]) {
    println!("{}", report::memory(summaries));
    let steps = &summaries[0].steps;
    if let [StepMetrics { loss: first, .. }, .., StepMetrics { loss: last, .. }] = steps.as_slice() {
        println!("loss {first:.4} at the first step, {last:.4} at the last of {}", steps.len());
    }
    if let (Some(rate), Some(ms)) = (summaries[0].times.tokens_per_s(), summaries[0].times.median_ms()) {
        println!("{} tokens/s, {ms:.1} ms a step (median)", quantity::rate(rate));
    }
}
