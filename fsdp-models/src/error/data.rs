//! Errors of training data.

use std::path::PathBuf;

use fsdp::files::{FileError, TensorFileError, brief, listed};
use fsdp::launch::MAX_RANKS;

use crate::product::TooMany;
use crate::run::DataCursor;

/// What can be wrong with training data or with the way it is asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or directory that cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// A token file that is no safetensors file.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// No file to read.
    #[error("no text files given")]
    NoFiles,
    /// The default corpus found nothing.
    #[error("no *.rs, *.md or *.toml file under `{}`", .directory.display())]
    EmptyCorpus {
        /// Where it looked.
        directory: PathBuf,
    },
    /// A run cannot go on with other data than it has begun with.
    #[error(
        "the run is {} samples into {before}; it is given {now}: it goes on with the same text, sequence length and \
         seed only",
        .before.samples
    )]
    OtherData {
        /// What a checkpoint says.
        before: DataCursor,
        /// What is given now.
        now: DataCursor,
    },
    /// Not even one training sequence.
    #[error("the text has {tokens} {unit}: one sequence of {seq} tokens and the token after it need {}", *.seq as u128 + 1)]
    TextTooShort {
        /// Tokens of all files together.
        tokens: usize,
        /// What a token is: `bytes`, `tokens`.
        unit: &'static str,
        /// Tokens of a sequence.
        seq: usize,
    },
    /// A batch or a sequence of size zero.
    #[error("{what} is 0: it must be at least 1")]
    Zero {
        /// Which size.
        what: &'static str,
    },
    /// A batch of more tokens than can be counted.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// A byte that the vocabulary has no id for.
    #[error("byte {byte} at offset {offset} of the text is outside the vocabulary of {vocab} ids")]
    ByteOutsideVocabulary {
        /// The first such byte.
        byte: u8,
        /// Its place in the concatenated text.
        offset: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// A tokenizer that is not the model's.
    #[error(
        "token id {id} at position {position} of the text is outside the model's vocabulary of {vocab} ids: is this the \
         model's tokenizer?"
    )]
    TokenOutsideVocabulary {
        /// The first such id.
        id: u32,
        /// Its place in the text, in tokens.
        position: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The batch cannot be cut into equal parts.
    #[error(
        "a global batch of {batch} rows cannot be divided among {world} ranks with {microbatches} microbatches \
         each: it must be a positive multiple of {}{}",
        .world.saturating_mul(*.microbatches), others(*.batch, *.microbatches)
    )]
    UnevenBatch {
        /// Rows of a global batch.
        batch: usize,
        /// Data-parallel ranks.
        world: usize,
        /// Microbatches of each.
        microbatches: usize,
    },
    /// A rank or microbatch that does not exist.
    #[error("no such part of a batch: rank {rank} of {world}, microbatch {microbatch} of {microbatches}")]
    NoSuchPart {
        /// Data-parallel rank.
        rank: usize,
        /// Data-parallel ranks.
        world: usize,
        /// Microbatch of the rank.
        microbatch: usize,
        /// Microbatches of each rank.
        microbatches: usize,
    },
    /// The token file lacks the tensor.
    #[error("`{}` has no tensor `tokens`; it has {}", .path.display(), listed(.present))]
    NoTokens {
        /// The file.
        path: PathBuf,
        /// The tensors it has.
        present: Vec<String>,
    },
    /// The tensor is not of the expected kind.
    #[error(
        "tensor `tokens` of `{}` is {dtype} {}: expected I32 [steps, rows, seq + 1], no dim zero and the \
         last at least 2",
        .path.display(), brief(&format!("{:?}", .shape))
    )]
    TokensShape {
        /// The file.
        path: PathBuf,
        /// Element type found.
        dtype: String,
        /// Shape found.
        shape: Vec<usize>,
    },
    /// An id outside the vocabulary.
    #[error(
        "token id {id} at step {step}, row {row}, position {position} of `{}` is outside the vocabulary of \
         {vocab} ids",
        .path.display()
    )]
    IdOutsideVocabulary {
        /// The file.
        path: PathBuf,
        /// The first such id.
        id: i32,
        /// Index in dim 0.
        step: usize,
        /// Index in dim 1.
        row: usize,
        /// Index in dim 2.
        position: usize,
        /// Size of the vocabulary.
        vocab: usize,
    },
    /// The token file ends before the training does.
    #[error("`{}` has tokens for {available} steps, {wanted} are wanted", .path.display())]
    NotEnoughSteps {
        /// The file.
        path: PathBuf,
        /// Steps it has.
        available: usize,
        /// Steps asked for.
        wanted: usize,
    },
}

/// The numbers of ranks that a batch can be divided among.
fn others(batch: usize, microbatches: usize) -> String {
    let each = if microbatches > 0 && batch.is_multiple_of(microbatches) { batch / microbatches } else { 0 };
    let ranks: Vec<String> = (1..=each.min(MAX_RANKS))
        .filter(|ranks| each.is_multiple_of(*ranks))
        .map(|ranks| ranks.to_string())
        .collect();
    match ranks.as_slice() {
        [] => String::new(),
        [only] => format!("; {batch} rows with as many microbatches would do on {only} rank"),
        [rest @ .., last] if ranks.len() <= 8 => {
            format!(
                "; {batch} rows with as many microbatches would do on {} or {last} ranks",
                rest.join(", ")
            )
        }
        _ => format!(
            "; {batch} rows with as many microbatches would do on {} numbers of ranks: {}",
            ranks.len(),
            listed(&ranks)
        ),
    }
}
