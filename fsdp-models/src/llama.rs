//! Llama: decoder-only transformer with rotary positions, grouped-query attention and a gated feed-forward
//! layer (Touvron et al., 2023), with the parameter names of Hugging Face's checkpoints.

use candle_core::{Result, Tensor};
use fsdp::engine::{Fused, Tie, UnitCell, Visitor, Walker};
use fsdp::spec::Attrs;
use fsdp::{Forward, FsdpUnit, Param, Scope, Unit};

use crate::adapter::LoraConfig;
use crate::config::LlamaConfig;
use crate::layers::{Block, Embedding, Linear, RmsNorm, RopeTables};
use crate::ops;

/// The model. Each block is a communication unit; embedding, last norm and head belong to the root.
///
/// On token ids (u32 `[b, t]`) its forward returns the logits `[b, t, vocab]`, on `(inputs, targets)`, both
/// u32 `[b, t]`, the mean cross-entropy over all tokens as an f32 scalar. Ids may be on the CPU whatever device the
/// parameters are on: no device is then waited for to check them.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fsdp::prelude::*;
/// use fsdp_models::{Llama, LlamaConfig};
///
/// let config: LlamaConfig = serde_json::from_str(
///     r#"{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}"#,
/// )?;
/// fsdp::launch::local(2, |world| -> fsdp_models::Result<()> {
///     let mut model = Llama::new(&config)?.fully_shard(&world.data_parallel_mesh())?;
///     let mut optimizer = model.optimizer(AdamW::default())?;
///     let inputs = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
///     let targets = Tensor::new(&[[2u32, 3, 4]], &Device::Cpu)?;
///     let loss: Tensor = model.forward(&(inputs.clone(), targets))?;
///     model.backward(&loss)?;
///     optimizer.step(&mut model)?;
///     let logits: Tensor = model.evaluate(&inputs)?;
///     assert_eq!(logits.dims(), [1, 3, 10]);
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, FsdpUnit)]
pub struct Llama {
    #[fsdp(rename = "model.embed_tokens")]
    embed: Embedding,
    #[fsdp(rename = "model.layers")]
    layers: Vec<Unit<Block>>,
    #[fsdp(rename = "model.norm")]
    norm: RmsNorm,
    /// None if the head is the embedding.
    lm_head: Option<Linear>,
    #[fsdp(skip)]
    rope: RopeTables,
    #[fsdp(skip)]
    lora: Option<LoraConfig>,
}

impl Llama {
    /// The model of a configuration. Nothing is allocated: parameters come to be when
    /// it is sharded, weights from `N(0, initializer_range)`, those of norms as ones.
    ///
    /// # Errors
    /// If the configuration is not valid.
    pub fn new(config: &LlamaConfig) -> crate::Result<Self> {
        config.validate()?;
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        Ok(Llama {
            embed: Embedding::new(vocab, hidden, config.init()),
            layers: (0..config.num_hidden_layers).map(|_| Block::unit(config)).collect(),
            norm: RmsNorm::new(hidden, config.rms_norm_eps),
            lm_head: (!config.tie_word_embeddings).then(|| Linear::new(hidden, vocab, config.init())),
            rope: RopeTables::of(config)?,
            lora: None,
        })
    }

    /// Longest sequence.
    pub fn positions(&self) -> usize {
        self.rope.positions()
    }

    /// The adapters it has; see [`Llama::add_adapters`].
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    pub(crate) fn set_lora(&mut self, config: LoraConfig) {
        self.lora = Some(config);
    }

    /// The blocks, and the head where it is not the embedding.
    pub(crate) fn layers_mut(&mut self) -> (&mut [Unit<Block>], Option<&mut Linear>) {
        (&mut self.layers, self.lm_head.as_mut())
    }

    /// Name and shape of every parameter, in declaration order: the tensors of a checkpoint.
    pub fn parameters(&self) -> Vec<(String, Vec<usize>)> {
        let mut listing = Listing::default();
        self.walk(&mut Walker::new(&mut listing));
        listing.parameters
    }
}

impl Forward for Llama {
    fn forward(&self, ids: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let (_, positions) = ids.dims2()?;
        let mut x = self.embed.forward(ids, &(), scope)?;
        let rope = self.rope.first(positions, x.device())?;
        for layer in &self.layers {
            x = layer.forward(&x, &rope, scope)?;
        }
        let x = self.norm.forward(&x, &(), scope)?;
        match &self.lm_head {
            Some(head) => head.forward(&x, &(), scope),
            None => self.embed.as_linear(&x, scope),
        }
    }
}

impl Forward<(), (Tensor, Tensor)> for Llama {
    fn forward(&self, (inputs, targets): &(Tensor, Tensor), _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let logits: Tensor = self.forward(inputs, &(), scope)?;
        ops::cross_entropy(&logits.flatten_to(1)?, &targets.flatten_all()?)
    }
}

#[derive(Default)]
struct Listing {
    parameters: Vec<(String, Vec<usize>)>,
}

impl<'a> Visitor<'a> for Listing {
    fn param(&mut self, name: &str, _: &Attrs, _: Option<&Tie>, _: Option<&Fused>, param: &'a Param) {
        self.parameters.push((name.to_owned(), param.dims().to_vec()));
    }

    fn enter_unit(&mut self, _: &str, _: &'a UnitCell) {}

    fn leave_unit(&mut self) {}

    fn buffer(&mut self, _: &str, _: &'a Tensor) {}
}
