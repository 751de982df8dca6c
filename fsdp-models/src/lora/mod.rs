//! Low-rank adapters (LoRA; Hu et al., 2021): the pretrained weights are frozen, and beside a projection `W` a product
//! `B A` of two thin matrices is trained: `y = W x + (alpha / rank) B A drop(x)`.
//!
//! Names, initial values and files are those of Hugging Face's PEFT: `lora_A.weight` `[rank, in]` is Kaiming-uniform
//! (uniform within `1 / sqrt(in)`), `lora_B.weight` `[out, rank]` is zero, so that training starts from the very model
//! that was pretrained. What is frozen has no gradient, no main weight and no optimizer state.
//!
//! ```
//! use fsdp::prelude::*;
//! use fsdp_models::{Llama, LlamaConfig, lora::LoraConfig};
//!
//! let config: LlamaConfig = serde_json::from_str(
//!     r#"{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}"#,
//! )?;
//! let mut model = Llama::new(&config)?;
//! model.add_adapters(&LoraConfig { rank: 4, ..LoraConfig::default() })?;
//! let model = model.fully_shard(&fsdp::comm::DeviceMesh::single())?;
//! let trained = model.layout().params.iter().filter(|spec| spec.key.requires_grad);
//! assert_eq!(trained.count(), 2 * 2 * 2); // A and B of q_proj and v_proj in two blocks
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod merge;
mod peft;
mod targets;

use std::path::PathBuf;

use fsdp::files::{FileError, TensorFileError, brief, brief_to, listed, said};
use fsdp::{FullyShard, Init, Param};

pub use merge::visit_merged_weights;
pub use peft::{load_adapters, save_adapters};
pub use targets::{HEAD, PROJECTIONS, Targets};

use crate::layers::Linear;
use crate::llama::Llama;
use crate::paths::PathError;
use crate::settings::SettingsError;

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

/// Largest rank, with which products of sizes can still be counted.
const MAX_RANK: usize = 1 << 24;

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

    fn validate(&self) -> Result<(), LoraError> {
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

impl Llama {
    /// Freezes the model and puts adapters beside the projections that `config` names. To be called on every rank
    /// before the model is sharded, with the same configuration.
    ///
    /// # Errors
    /// A rank of 0, an alpha or a dropout out of range, a name or a pattern that no projection of this model has, or a model
    /// that has adapters already or is sharded.
    pub fn add_adapters(&mut self, config: &LoraConfig) -> Result<(), LoraError> {
        config.validate()?;
        if self.lora().is_some() {
            return Err(LoraError::Adapted);
        }
        let (blocks, head) = self.layers_mut();
        let mut modules = Vec::new();
        for (at, block) in blocks.iter_mut().enumerate() {
            let block = block.module_mut().ok_or(LoraError::Sharded)?;
            modules.extend(block.projections_mut().map(|(name, _)| targets::module(at, name)));
        }
        modules.extend(head.map(|_| HEAD.to_owned()));
        let adapted = config.targets.among(&modules)?;
        self.set_requires_grad(false)?;
        let (blocks, head) = self.layers_mut();
        let blocks = blocks.iter_mut().filter_map(|block| block.module_mut());
        let projections = blocks.flat_map(|block| block.projections_mut().map(|(_, projection)| projection));
        for (projection, adapted) in projections.chain(head).zip(adapted) {
            if adapted {
                projection.adapt(config);
            }
        }
        self.set_lora(config.clone());
        Ok(())
    }
}

impl Linear {
    fn adapt(&mut self, config: &LoraConfig) {
        let Linear::Plain { weight } = self else { return };
        let &[outputs, inputs] = weight.dims() else { return };
        let bound = (1.0 / (inputs as f64).sqrt()) as f32;
        let kaiming = Init::Uniform { low: -bound, high: bound };
        *self = Linear::Adapted {
            weight: weight.clone(),
            a: Param::new((config.rank, inputs)).with_init(kaiming),
            b: Param::new((outputs, config.rank)).with_init(Init::Zeros),
            scale: config.scale(),
            dropout: config.dropout,
        };
    }
}

/// Why there are no adapters, or none can be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// A rank of 0.
    #[error("the rank of the adapters is 0: it must be at least 1")]
    NoRank,
    /// A rank beyond that of any matrix, which could not be counted with.
    #[error("the rank of the adapters is {rank}: it must be at most {MAX_RANK}")]
    Rank {
        /// The value.
        rank: usize,
    },
    /// A scale that means nothing.
    #[error("alpha is {alpha}: it must be finite and positive")]
    Alpha {
        /// The value.
        alpha: f64,
    },
    /// A probability out of range.
    #[error("the dropout of the adapters is {dropout}: it must be at least 0 and below 1")]
    Dropout {
        /// The value.
        dropout: f64,
    },
    /// Nothing to adapt.
    #[error("no projection is named: expected {}, or all-linear", PROJECTIONS.join(", "))]
    NoTargets,
    /// Names that are no projections.
    #[error(
        "{} no projection of the model: expected some of {}{}, or all-linear",
        are(.unknown), PROJECTIONS.join(", "), if *.head { ", lm_head" } else { "" }
    )]
    UnknownTargets {
        /// The names.
        unknown: Vec<String>,
        /// The model has a head that is not the embedding.
        head: bool,
    },
    /// A pattern that is none, or that no projection has.
    #[error("the pattern `{}` of the adapted modules {}", brief_to(.pattern, 200), said(.reason))]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Adapters are added once.
    #[error("the model has adapters already")]
    Adapted,
    /// Too late.
    #[error("the model is sharded already: adapters must be added before `fully_shard`")]
    Sharded,
    /// Nothing to save.
    #[error("the model has no adapters")]
    NotAdapted,
    /// A directory that is no adapter of PEFT, or one of a kind that is not implemented.
    #[error("`{}`: {}", .path.display(), said(.reason))]
    Peft {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A place to write to.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Settings of an adapter of another kind.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The adapters' tensors.
    #[error(transparent)]
    Tensors(#[from] TensorFileError),
    /// The sharded model.
    #[error(transparent)]
    Fsdp(#[from] fsdp::Error),
}

fn are(names: &[String]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{}`", brief(name))).collect();
    format!("{} {}", listed(&quoted), if names.len() == 1 { "is" } else { "are" })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn model(tied: bool) -> Llama {
        let config = format!(
            r#"{{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 16, "tie_word_embeddings": {tied}}}"#
        );
        Llama::new(&serde_json::from_str(&config).unwrap()).unwrap()
    }

    fn named(names: &[&str]) -> LoraConfig {
        let targets = Targets::Named(names.iter().map(|&name| name.to_owned()).collect());
        LoraConfig { targets, ..LoraConfig::default() }
    }

    #[test]
    fn adapters_are_named_and_shaped_as_in_peft() {
        let mut model = model(true);
        model.add_adapters(&LoraConfig { rank: 3, ..named(&["k_proj", "down_proj"]) }).unwrap();
        let parameters = model.parameters();
        let adapters: Vec<_> = parameters.iter().filter(|(name, _)| adapter_of(name).is_some()).collect();
        assert_eq!(adapters.len(), 8);
        for (name, shape) in [
            ("model.layers.0.self_attn.k_proj.lora_A.weight", [3, 8]),
            ("model.layers.0.self_attn.k_proj.lora_B.weight", [4, 3]),
            ("model.layers.1.mlp.down_proj.lora_A.weight", [3, 12]),
            ("model.layers.1.mlp.down_proj.lora_B.weight", [8, 3]),
            ("model.layers.1.mlp.down_proj.weight", [8, 12]),
        ] {
            assert!(parameters.contains(&(name.to_owned(), shape.to_vec())), "{name} {parameters:?}");
        }
    }

    #[test]
    fn all_linear_is_every_projection_but_the_head() {
        let count = |targets: &str, tied| {
            let mut model = model(tied);
            let targets = targets.parse().unwrap();
            model.add_adapters(&LoraConfig { targets, ..LoraConfig::default() }).unwrap();
            model.parameters().iter().filter(|(name, _)| adapter_of(name).is_some()).count()
        };
        assert_eq!(count("all-linear", false), 2 * 2 * 7);
        assert_eq!(count("lm_head", false), 2);
        assert_eq!(count("q_proj, lm_head", false), 2 * 2 + 2);
        assert_eq!(count("q_proj", true), 2 * 2);
    }

    #[test]
    fn unknown_projections_are_answered_with_the_known_ones() {
        let message = |names: &[&str], tied| model(tied).add_adapters(&named(names)).unwrap_err().to_string();
        let known = "expected some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
        assert_eq!(
            message(&["query", "q_proj", "key"], false),
            format!("`query`, `key` are no projection of the model: {known}, lm_head, or all-linear")
        );
        // The head is the embedding: there is no such projection.
        assert_eq!(
            message(&["lm_head"], true),
            format!("`lm_head` is no projection of the model: {known}, or all-linear")
        );
        assert!(message(&[], true).starts_with("no projection is named: expected q_proj, "));
        assert!("q_proj,".parse::<Targets>().unwrap_err().to_string().starts_with("`` is no projection"));
    }

    /// Modules as PEFT's `check_target_module_exists` finds them: by the whole name or what follows a dot, or by a pattern that
    /// matches the whole name.
    #[test]
    fn modules_are_found_by_whole_names_by_their_ends_and_by_patterns() {
        let adapted = |targets: Targets| -> Vec<String> {
            let mut model = model(false);
            model.add_adapters(&LoraConfig { targets, ..LoraConfig::default() }).unwrap();
            let parameters = model.parameters();
            let halves = parameters.iter().filter_map(|(name, _)| adapter_of(name));
            halves.filter(|(_, half)| *half == Half::A).map(|(module, _)| module.to_owned()).collect()
        };
        let named = |names: &[&str]| named(names).targets;
        let pattern = |pattern: &str| Targets::Pattern(pattern.to_owned());
        let of = |layers: &[usize], module: &str| -> Vec<String> {
            layers.iter().map(|layer| format!("model.layers.{layer}.{module}")).collect()
        };
        for (targets, expected) in [
            (named(&["model.layers.1.self_attn.q_proj"]), of(&[1], "self_attn.q_proj")),
            (named(&["self_attn.q_proj"]), of(&[0, 1], "self_attn.q_proj")),
            (
                named(&["0.mlp.down_proj", "lm_head"]),
                [of(&[0], "mlp.down_proj"), vec!["lm_head".into()]].concat(),
            ),
            (named(&["layers.0.mlp.up_proj", "up_proj"]), of(&[0, 1], "mlp.up_proj")),
            (pattern(r".*\.0\.self_attn\.k_proj"), of(&[0], "self_attn.k_proj")),
            (
                pattern("model.layers.1.mlp.gate_proj|lm_head"),
                [of(&[1], "mlp.gate_proj"), vec!["lm_head".into()]].concat(),
            ),
            (pattern(r"^(?!.*lm_head).*layers\.1.*\.(?P<kind>v)_proj$"), of(&[1], "self_attn.v_proj")),
        ] {
            assert_eq!(adapted(targets.clone()), expected, "{targets:?}");
        }
    }

    #[test]
    fn names_and_patterns_that_no_module_has_are_refused() {
        let message = |targets| {
            let config = LoraConfig { targets, ..LoraConfig::default() };
            model(false).add_adapters(&config).unwrap_err().to_string()
        };
        let named = |names: &[&str]| named(names).targets;
        for name in
            ["attn.q_proj", "_proj", "layers.2.self_attn.q_proj", "mlp.q_proj", "q_proj.weight", "head"]
        {
            let message = message(named(&["v_proj", name]));
            assert!(message.starts_with(&format!("`{name}` is no projection of the model: ")), "{message}");
        }
        for (pattern, reason) in [
            ("q_proj", "matches no projection of the model"),
            (".*q_pro", "matches no projection of the model"),
            ("(q_proj", "is no regular expression: "),
            (".*)|(q_proj", "is no regular expression: "),
        ] {
            let message = message(Targets::Pattern(pattern.to_owned()));
            assert!(
                message.starts_with(&format!("the pattern `{pattern}` of the adapted modules {reason}")),
                "{message}"
            );
        }
        let long = message(Targets::Named((0..5000).map(|at| format!("{at}{}", "x".repeat(900))).collect()));
        assert!(long.len() < 2000 && long.contains(" more are no projection"), "{long}");
    }

    #[test]
    fn settings_out_of_range_are_refused_with_their_numbers() {
        let message = |config| model(true).add_adapters(&config).unwrap_err().to_string();
        let config = LoraConfig::default;
        assert_eq!(
            message(LoraConfig { rank: 0, ..config() }),
            "the rank of the adapters is 0: it must be at least 1"
        );
        assert_eq!(
            message(LoraConfig { rank: 1 << 40, ..config() }),
            "the rank of the adapters is 1099511627776: it must be at most 16777216"
        );
        assert_eq!(
            message(LoraConfig { alpha: f64::NAN, ..config() }),
            "alpha is NaN: it must be finite and positive"
        );
        assert_eq!(
            message(LoraConfig { dropout: 1.0, ..config() }),
            "the dropout of the adapters is 1: it must be at least 0 and below 1"
        );
        let mut adapted = model(true);
        adapted.add_adapters(&config()).unwrap();
        assert_eq!(
            adapted.add_adapters(&config()).unwrap_err().to_string(),
            "the model has adapters already"
        );
    }
}
