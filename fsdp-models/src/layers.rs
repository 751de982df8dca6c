//! The layers of a Llama-architecture model, on the ops of [`ops`].
//!
//! Fields have the names of Hugging Face's checkpoints. Activations have the dtype of the parameters. Every layer takes and
//! returns contiguous tensors.

use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Tensor, bail};
use fsdp::{Forward, FsdpUnit, Init, Param, Scope, Unit};

use crate::config::LlamaConfig;
use crate::ops;

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

/// Tables of the rotary position embedding: the angles' cosines and sines, f32 `[positions, head_dim / 2]`.
/// No parameters.
#[derive(Clone, Debug)]
pub struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    /// Position `p` turns pair `j` of a head by `p * theta^(-2j / head_dim)`.
    ///
    /// # Errors
    /// If `head_dim` is odd.
    pub fn new(head_dim: usize, positions: usize, theta: f64) -> Result<Self> {
        check_head_dim(head_dim)?;
        let half = head_dim / 2;
        // Frequencies and angles are rounded to f32 as in Hugging Face's Llama.
        let frequency = |pair: usize| theta.powf(-2.0 * pair as f64 / head_dim as f64) as f32;
        let angles = (0..positions).flat_map(|at| (0..half).map(move |pair| at as f32 * frequency(pair)));
        let angles: Vec<f64> = angles.map(f64::from).collect();
        let table = |function: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|&angle| function(angle) as f32).collect();
            Tensor::from_vec(values, (positions, half), &Device::Cpu)
        };
        Ok(Rope { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }

    /// Positions that the tables cover.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The tables of the first `positions` positions: views.
    ///
    /// # Errors
    /// If there are fewer.
    pub fn first(&self, positions: usize) -> Result<Self> {
        if positions > self.positions() {
            bail!("a sequence of {positions} tokens: the tables have {} positions", self.positions());
        }
        Ok(Rope { cos: self.cos.narrow(0, 0, positions)?, sin: self.sin.narrow(0, 0, positions)? })
    }

    /// The tables on `device`.
    ///
    /// # Errors
    /// Those of the device.
    pub fn on(&self, device: &Device) -> Result<Self> {
        Ok(Rope { cos: self.cos.to_device(device)?, sin: self.sin.to_device(device)? })
    }
}

fn check_head_dim(head_dim: usize) -> Result<()> {
    if !head_dim.is_multiple_of(2) {
        bail!("rotary tables need an even head dim, not {head_dim}");
    }
    Ok(())
}

/// The rotary tables of a model: as long as the longest sequence so far, on the device where they were last asked for. How
/// many positions a model may have is no reason to make tables for them.
#[derive(Debug)]
pub struct RopeTables {
    head_dim: usize,
    positions: usize,
    theta: f64,
    made: Mutex<Option<Rope>>,
}

impl RopeTables {
    /// Of a model of at most `positions` positions; nothing is computed yet.
    ///
    /// # Errors
    /// If `head_dim` is odd.
    pub fn new(head_dim: usize, positions: usize, theta: f64) -> Result<Self> {
        check_head_dim(head_dim)?;
        Ok(RopeTables { head_dim, positions, theta, made: Mutex::new(None) })
    }

    /// Most positions of a sequence.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The tables of the first `positions` positions on `device`. They are made there when a sequence is longer than all before:
    /// a sequence that grows by one token at a time makes them anew each time that it has doubled.
    ///
    /// # Errors
    /// If the model has fewer, and those of the device.
    pub fn first(&self, positions: usize, device: &Device) -> Result<Rope> {
        if positions > self.positions {
            bail!("a sequence of {positions} tokens: the model has {} positions", self.positions);
        }
        // What a thread that panicked left behind is whole.
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        let before = made.as_ref().map_or(0, Rope::positions);
        let there = made.as_ref().is_some_and(|rope| rope.cos.device().same_device(device));
        let rope = match made.take().filter(|_| there && positions <= before) {
            Some(rope) => rope,
            None => {
                let length =
                    if positions <= before { before } else { positions.max(before.saturating_mul(2)) };
                Rope::new(self.head_dim, length.min(self.positions), self.theta)?.on(device)?
            }
        };
        made.insert(rope).first(positions)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotary_angles_are_position_times_frequency() {
        let rope = Rope::new(4, 3, 10_000.0).unwrap();
        let cos: Vec<Vec<f32>> = rope.cos.to_vec2().unwrap();
        let sin: Vec<Vec<f32>> = rope.sin.to_vec2().unwrap();
        for (at, (cos, sin)) in cos.iter().zip(&sin).enumerate() {
            for (pair, frequency) in [1.0f32, 0.01].into_iter().enumerate() {
                let angle = f64::from(at as f32 * frequency);
                assert_eq!((cos[pair], sin[pair]), (angle.cos() as f32, angle.sin() as f32));
            }
        }
        assert_eq!(rope.first(2).unwrap().positions(), 2);
    }

    #[test]
    fn tables_are_as_long_as_the_longest_sequence_and_no_longer() {
        let positions = usize::MAX;
        let tables = RopeTables::new(4, positions, 10_000.0).unwrap();
        let made = || tables.made.lock().unwrap().as_ref().map_or(0, Rope::positions);
        assert_eq!((tables.positions(), made()), (positions, 0));
        for (asked, expected) in [(3, 3), (2, 3), (4, 6), (6, 6), (7, 12), (40, 40)] {
            let rope = tables.first(asked, &Device::Cpu).unwrap();
            assert_eq!((rope.positions(), made()), (asked, expected));
            // The same, however long the tables are.
            let alone = Rope::new(4, asked, 10_000.0).unwrap();
            for (ours, theirs) in [(rope.cos, alone.cos), (rope.sin, alone.sin)] {
                assert_eq!(ours.to_vec2::<f32>().unwrap(), theirs.to_vec2::<f32>().unwrap());
            }
        }
        let short = RopeTables::new(4, 5, 10_000.0).unwrap();
        for asked in [4, 5] {
            assert_eq!(short.first(asked, &Device::Cpu).unwrap().positions(), asked);
        }
        assert!(short.first(6, &Device::Cpu).is_err());
    }

    #[test]
    fn too_long_a_sequence_and_an_odd_head_are_refused() {
        let message = RopeTables::new(4, 3, 1e4).unwrap().first(4, &Device::Cpu).unwrap_err().to_string();
        assert!(message.starts_with("a sequence of 4 tokens: the model has 3 positions"), "{message}");
        assert!(Rope::new(5, 3, 1e4).is_err() && RopeTables::new(5, 3, 1e4).is_err());
    }
}
