//! What tells whether a run goes on as it began: its place in the data, and the pretrained model.

use std::fmt;

use fsdp::files::brief;
use serde::{Deserialize, Serialize};

/// A place in the order of samples that a source serves: what a checkpoint keeps of the data.
///
/// It counts samples, not steps: training goes on at the very next sample on any number of ranks, with any number of
/// microbatches, and with another global batch too, whose first row is then that sample. What the samples are, and
/// their order, must be the same: [`Batches::resume`](crate::data::Batches::resume) compares the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataCursor {
    /// Samples served since the first step, over all epochs.
    pub samples: u64,
    /// Key of the order of samples.
    pub seed: u64,
    /// Predicted tokens of a sample.
    pub seq: usize,
    /// What the samples are cut from: kind, length and a hash of the content.
    pub source: String,
}

impl fmt::Display for DataCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in sequences of {} tokens, order {}", brief(&self.source), self.seq, self.seed)
    }
}

/// A pretrained model by its name and by what is in it. It is the same model if the fingerprints are the same, wherever it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The path it was opened by.
    pub name: String,
    /// CRC-32 of its configuration and of the names, dtypes, shapes and stored bytes of all its tensors, in hex. How they are laid
    /// out in files is no part of it.
    pub fingerprint: String,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (fingerprint {})", brief(&self.name), brief(&self.fingerprint))
    }
}
