//! The layers of a Llama-architecture model, on the ops of [`ops`].
//!
//! Fields have the names of Hugging Face's checkpoints. Activations have the dtype of the parameters. Every layer takes and
//! returns contiguous tensors.

use candle_core::{Result, Tensor};
use fsdp::{Forward, FsdpUnit, Init, Param, Scope, Unit};

use crate::config::LlamaConfig;
use crate::ops;
pub use crate::rope::{Rope, RopeTables};

/// `x wᵀ` with a weight `[out, in]` and no bias, or the same with a low-rank adapter beside it.
#[derive(Debug, FsdpUnit)]
pub enum Linear {
    /// `x wᵀ`.
    Plain {
        /// `[out, in]`.
        weight: Param,
    },
    /// `x wᵀ + scale (drop(x) aᵀ) bᵀ`; see [`lora`](crate::lora).
    Adapted {
        /// `[out, in]`, frozen.
        weight: Param,
        /// `[rank, in]`.
        #[fsdp(rename = "lora_A.weight")]
        a: Param,
        /// `[out, rank]`, zeros at first.
        #[fsdp(rename = "lora_B.weight")]
        b: Param,
        /// Factor of the adapter's part.
        scale: f64,
        /// Probability with which an element of the adapter's input is dropped in training.
        dropout: f64,
    },
}

impl Linear {
    /// From `inputs` features to `outputs`, without an adapter.
    pub fn new(inputs: usize, outputs: usize, init: Init) -> Self {
        Linear::Plain { weight: Param::new((outputs, inputs)).with_init(init) }
    }

    /// The weight that fused ops may take: `None` if there is an adapter.
    fn plain(&self) -> Option<&Param> {
        match self {
            Linear::Plain { weight } => Some(weight),
            Linear::Adapted { .. } => None,
        }
    }
}

impl Forward for Linear {
    /// `[.., in]` to `[.., out]`; with dropout, the first dim is that of samples.
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let linear = |x: &Tensor, weight: &Param| ops::linear(x, &weight.tensor(scope)?, &weight.grad_sink());
        match self {
            Linear::Plain { weight } => linear(x, weight),
            Linear::Adapted { weight, a, b, scale, dropout } => {
                let low = (linear(&ops::dropout(x, *dropout, scope)?, a)? * *scale)?;
                linear(x, weight)? + linear(&low, b)?
            }
        }
    }
}

/// A table of one row a token id.
#[derive(Debug, FsdpUnit)]
pub struct Embedding {
    weight: Param,
}

impl Embedding {
    /// A table `[vocab, dim]`.
    pub fn new(vocab: usize, dim: usize, init: Init) -> Self {
        Embedding { weight: Param::new((vocab, dim)).with_init(init) }
    }

    /// The table as the output projection of a model whose head is tied to it: `[.., dim]` to `[.., vocab]`.
    ///
    /// # Errors
    /// Those of [`ops::linear`](crate::ops::linear()).
    pub fn as_linear(&self, x: &Tensor, scope: &Scope<'_>) -> Result<Tensor> {
        ops::linear(x, &self.weight.tensor(scope)?, &self.weight.grad_sink())
    }
}

impl Forward for Embedding {
    /// Ids (u32, any shape) to their rows `[ids' shape.., dim]`.
    fn forward(&self, ids: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        ops::embedding(ids, &self.weight.tensor(scope)?, &self.weight.grad_sink())
    }
}

/// Root-mean-square normalisation over the last dim.
#[derive(Debug, FsdpUnit)]
pub struct RmsNorm {
    weight: Param,
    eps: f64,
}

impl RmsNorm {
    /// Over `dim` elements; the weight starts as ones.
    pub fn new(dim: usize, eps: f64) -> Self {
        RmsNorm { weight: Param::new(dim).with_init(Init::Ones), eps }
    }
}

impl Forward for RmsNorm {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        ops::rms_norm(x, &self.weight.tensor(scope)?, self.eps, &self.weight.grad_sink())
    }
}

/// Causal self-attention with grouped keys and values.
#[derive(Debug, FsdpUnit)]
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
}

impl Attention {
    /// With the sizes of a valid configuration.
    pub fn new(config: &LlamaConfig) -> Self {
        let (hidden, init) = (config.hidden_size, config.init());
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let (width, kv_width) = (heads * config.head_dim(), kv_heads * config.head_dim());
        Attention {
            q_proj: Linear::new(hidden, width, init),
            k_proj: Linear::new(hidden, kv_width, init),
            v_proj: Linear::new(hidden, kv_width, init),
            o_proj: Linear::new(width, hidden, init),
            heads,
            kv_heads,
        }
    }
}

impl Forward<Rope> for Attention {
    /// `[b, t, hidden]` to the same: one fused op, or its steps one by one where a projection has an adapter.
    fn forward(&self, x: &Tensor, rope: &Rope, scope: &Scope<'_>) -> Result<Tensor> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj];
        let [Some(q), Some(k), Some(v), Some(o)] = projections.map(Linear::plain) else {
            let turned = |projection: &Linear, heads| {
                ops::rope(&projection.forward(x, &(), scope)?, &rope.cos, &rope.sin, heads)
            };
            let (q, k) = (turned(&self.q_proj, self.heads)?, turned(&self.k_proj, self.kv_heads)?);
            let v = self.v_proj.forward(x, &(), scope)?;
            return self.o_proj.forward(&ops::attention(&q, &k, &v, self.heads, self.kv_heads)?, &(), scope);
        };
        let sinks = [q.grad_sink(), k.grad_sink(), v.grad_sink(), o.grad_sink()];
        let [q, k, v, o] = [q.tensor(scope)?, k.tensor(scope)?, v.tensor(scope)?, o.tensor(scope)?];
        let weights = ops::SelfAttentionWeights {
            q: (&q, &sinks[0]),
            k: (&k, &sinks[1]),
            v: (&v, &sinks[2]),
            o: (&o, &sinks[3]),
        };
        ops::self_attention(x, weights, &rope.cos, &rope.sin, self.heads, self.kv_heads)
    }
}

/// The gated feed-forward layer `down(silu(gate(x)) * up(x))`.
#[derive(Debug, FsdpUnit)]
pub struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    /// With the sizes of a valid configuration.
    pub fn new(config: &LlamaConfig) -> Self {
        let (hidden, inner, init) = (config.hidden_size, config.intermediate_size, config.init());
        Mlp {
            gate_proj: Linear::new(hidden, inner, init),
            up_proj: Linear::new(hidden, inner, init),
            down_proj: Linear::new(inner, hidden, init),
        }
    }
}

impl Forward for Mlp {
    /// `[.., hidden]` to the same: one fused op, or its steps one by one where a projection has an adapter.
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let projections = [&self.gate_proj, &self.up_proj, &self.down_proj];
        let [Some(gate), Some(up), Some(down)] = projections.map(Linear::plain) else {
            let (gate, up) = (self.gate_proj.forward(x, &(), scope)?, self.up_proj.forward(x, &(), scope)?);
            return self.down_proj.forward(&ops::swiglu(&gate, &up)?, &(), scope);
        };
        let sinks = [gate.grad_sink(), up.grad_sink(), down.grad_sink()];
        let (gate, up, down) = (gate.tensor(scope)?, up.tensor(scope)?, down.tensor(scope)?);
        ops::gated_mlp(x, &gate, &up, &down, sinks.each_ref())
    }
}

/// A decoder block: attention and feed-forward, each on a normalised input and added to the residual stream.
#[derive(Debug, FsdpUnit)]
pub struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    /// With the sizes of a valid configuration.
    pub fn new(config: &LlamaConfig) -> Self {
        let norm = || RmsNorm::new(config.hidden_size, config.rms_norm_eps);
        Block {
            input_layernorm: norm(),
            self_attn: Attention::new(config),
            post_attention_layernorm: norm(),
            mlp: Mlp::new(config),
        }
    }

    /// A block that is one communication unit.
    pub fn unit(config: &LlamaConfig) -> Unit<Self> {
        Unit::new(Block::new(config))
    }

    /// The projections, by the last part of their names.
    pub(crate) fn projections_mut(&mut self) -> [(&'static str, &mut Linear); 7] {
        let (attention, mlp) = (&mut self.self_attn, &mut self.mlp);
        [
            ("q_proj", &mut attention.q_proj),
            ("k_proj", &mut attention.k_proj),
            ("v_proj", &mut attention.v_proj),
            ("o_proj", &mut attention.o_proj),
            ("gate_proj", &mut mlp.gate_proj),
            ("up_proj", &mut mlp.up_proj),
            ("down_proj", &mut mlp.down_proj),
        ]
    }
}

impl Forward<Rope> for Block {
    /// `[b, t, hidden]` to the same.
    fn forward(&self, x: &Tensor, rope: &Rope, scope: &Scope<'_>) -> Result<Tensor> {
        let x = (x + self.self_attn.forward(&self.input_layernorm.forward(x, &(), scope)?, rope, scope)?)?;
        &x + self.mlp.forward(&self.post_attention_layernorm.forward(&x, &(), scope)?, &(), scope)?
    }
}
