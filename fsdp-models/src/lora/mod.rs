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

use fsdp::{FullyShard, Init, Param};

pub use merge::visit_merged_weights;
pub use peft::{load_adapters, save_adapters};

use crate::adapter;
pub use crate::adapter::{HEAD, LoraConfig, Targets};
pub use crate::error::{LoraError, PROJECTIONS};
use crate::layers::Linear;
use crate::llama::Llama;

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
            modules.extend(block.projections_mut().map(|(name, _)| adapter::module(at, name)));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Half, adapter_of};

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
