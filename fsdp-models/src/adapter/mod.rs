//! What adapters a model has, and what their parameters are called.

mod targets;

pub(crate) use targets::module;
pub use targets::{HEAD, Targets};

use crate::error::{LoraError, MAX_RANK};

/// Where adapters go, and how large they are.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of `A` and columns of `B`.
    pub rank: usize,
    /// The adapter's part is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Which projections get one.
    pub targets: Targets,
    /// Probability with which an element of an adapter's input is dropped in training.
    pub dropout: f64,
}

impl Default for LoraConfig {
    /// Rank 8, alpha 16, on `q_proj` and `v_proj`, no dropout.
    fn default() -> Self {
        LoraConfig { rank: 8, alpha: 16.0, targets: Targets::default(), dropout: 0.0 }
    }
}

impl LoraConfig {
    /// `alpha / rank`.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    pub(crate) fn validate(&self) -> Result<(), LoraError> {
        if self.rank == 0 {
            return Err(LoraError::NoRank);
        }
        if self.rank > MAX_RANK {
            return Err(LoraError::Rank { rank: self.rank });
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(LoraError::Alpha { alpha: self.alpha });
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(LoraError::Dropout { dropout: self.dropout });
        }
        Ok(())
    }
}

/// The projection that an adapter's parameter belongs to, and which of the two it is: its name without the suffix.
pub(crate) fn adapter_of(name: &str) -> Option<(&str, Half)> {
    let half = |suffix, half| Some((name.strip_suffix(suffix)?, half));
    half(".lora_A.weight", Half::A).or_else(|| half(".lora_B.weight", Half::B))
}

/// One of an adapter's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    A = 0,
    B = 1,
}
