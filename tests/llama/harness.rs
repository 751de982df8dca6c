//! Runs the trainer on the reference model and data in `tests/data`.

use std::path::PathBuf;
use std::sync::Mutex;

use fsdp::files::{StoredDtype, TensorFile, TensorFileWriter};
use fsdp::launch::Launcher;
use fsdp::prelude::*;
use fsdp_models::data::{Batches, TokenFile};
use fsdp_models::pretrained::Weights;
use fsdp_models::trainer::{Outputs, TrainOptions, shard, train};
use fsdp_models::{Llama, LlamaConfig};

/// A file of the reference.
pub fn reference(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/fsdp2").join(name)
}

/// The reference's model and its 50 steps.
pub fn options(tied: bool) -> TrainOptions {
    let model = LlamaConfig {
        hidden_size: 128,
        intermediate_size: 352,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        vocab_size: 256,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: tied,
        max_position_embeddings: 64,
        initializer_range: 0.02,
        head_dim: None,
    };
    TrainOptions::new(model, 50)
}

/// What one run gave.
pub struct Run {
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    /// The first step's gradients.
    pub gradients: TensorFile,
    /// The weights after the last step.
    pub weights: TensorFile,
    _files: tempfile::TempDir,
}

/// Trains from the reference's initial weights on its tokens.
pub fn run_reference(ranks: usize, options: &TrainOptions) -> Run {
    let data = TokenFile::open(&reference("tokens.safetensors"), options.model.vocab_size).unwrap();
    let weights = Weights::open(&reference("init.safetensors")).unwrap();
    run(ranks, options, &data, Some(&weights))
}

/// Trains, and checks that all ranks report the same.
pub fn run(ranks: usize, options: &TrainOptions, data: &dyn Batches, initial: Option<&Weights>) -> Run {
    options.validate(ranks, data).unwrap();
    let parameters = Llama::new(&options.model).unwrap().parameters();
    let files = tempfile::tempdir().unwrap();
    let paths = ["gradients", "weights"].map(|name| files.path().join(name));
    let [gradients, weights] = paths.each_ref().map(|path| {
        let tensors = parameters.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
        Some(Mutex::new(TensorFileWriter::create(path, tensors, StoredDtype::F32).unwrap()))
    });
    let outputs = Outputs { gradients, weights, ..Outputs::default() };
    let summaries = Launcher::new()
        .ranks(ranks)
        .run(|world| {
            let mut model = shard(&world, options, initial)?;
            train(&world, &mut model, options, data, &outputs)
        })
        .unwrap();
    for file in [outputs.gradients, outputs.weights].into_iter().flatten() {
        file.into_inner().unwrap().finish().unwrap();
    }
    for summary in &summaries {
        assert_eq!(bits(&summary.losses()), bits(&summaries[0].losses()), "all ranks report one loss");
        assert_eq!(bits(&summary.grad_norms()), bits(&summaries[0].grad_norms()));
    }
    let [gradients, weights] = paths.map(|path| TensorFile::open(&path).unwrap());
    let (losses, grad_norms) = (summaries[0].losses(), summaries[0].grad_norms());
    Run { losses, grad_norms, gradients, weights, _files: files }
}

/// Whether `FSDP_FULL_CURVES=1` asks for every step of every way; see `tests/README.md`.
pub fn all_to_the_end() -> bool {
    std::env::var("FSDP_FULL_CURVES").is_ok_and(|value| value == "1")
}

/// For comparisons to the bit.
pub fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A way to train that must not change what is learnt.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    pub ranks: usize,
    pub strategy: Strategy,
    pub recompute: Recompute,
    pub microbatches: usize,
}

impl Way {
    /// Every strategy, with and without recomputation.
    pub fn all(ranks: usize, microbatches: usize) -> impl Iterator<Item = Way> {
        Strategy::ALL.into_iter().flat_map(move |strategy| {
            let way = move |recompute| Way { ranks, strategy, recompute, microbatches };
            [Recompute::None, Recompute::Unit].map(way)
        })
    }

    /// `options`, this way.
    pub fn of(self, options: TrainOptions) -> TrainOptions {
        let fsdp = FsdpConfig { strategy: self.strategy, recompute: self.recompute, ..options.fsdp };
        TrainOptions { fsdp, microbatches: self.microbatches, ..options }
    }
}
