//! A model of fused parameters is the one that keeps them apart: the same initial values, losses and gradients.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;
use fsdp_test_support::assert_close;

use crate::fixtures::{config, on_ranks};
use crate::reference::TORCH;

const HIDDEN: usize = 6;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 3;
const INTERMEDIATE: usize = 5;

/// `x wᵀ + b`
#[derive(FsdpUnit)]
struct Linear {
    weight: Param,
    bias: Param,
}

impl Linear {
    fn new(inputs: usize, outputs: usize) -> Linear {
        let init = Init::Normal { mean: 0.0, std: 0.3 };
        Linear {
            weight: Param::new((outputs, inputs)).with_init(init),
            bias: Param::new(outputs).with_init(init),
        }
    }

    fn of_rows(inputs: usize, rows: &[usize]) -> Linear {
        let Linear { weight, bias } = Linear::new(inputs, rows.iter().sum());
        Linear { weight: weight.with_fused_rows(rows), bias: bias.with_fused_rows(rows) }
    }
}

impl Forward for Linear {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.matmul(&self.weight.tensor(scope)?.t()?)?.broadcast_add(&self.bias.tensor(scope)?)
    }
}

/// The projections of a layer's inputs.
trait Projections: FsdpUnit + Send + Sync + 'static {
    fn new() -> Self;

    /// Queries, keys and values.
    fn qkv(&self, x: &Tensor, scope: &Scope<'_>) -> Result<[Tensor; 3]>;

    fn gate_and_up(&self, x: &Tensor, scope: &Scope<'_>) -> Result<[Tensor; 2]>;
}

#[derive(FsdpUnit)]
struct Apart {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    gate: Linear,
    up: Linear,
}

impl Projections for Apart {
    fn new() -> Apart {
        Apart {
            q_proj: Linear::new(HIDDEN, HEADS * HEAD_DIM),
            k_proj: Linear::new(HIDDEN, KV_HEADS * HEAD_DIM),
            v_proj: Linear::new(HIDDEN, KV_HEADS * HEAD_DIM),
            gate: Linear::new(HIDDEN, INTERMEDIATE),
            up: Linear::new(HIDDEN, INTERMEDIATE),
        }
    }

    fn qkv(&self, x: &Tensor, scope: &Scope<'_>) -> Result<[Tensor; 3]> {
        let of = |linear: &Linear| linear.forward(x, &(), scope);
        Ok([of(&self.q_proj)?, of(&self.k_proj)?, of(&self.v_proj)?])
    }

    fn gate_and_up(&self, x: &Tensor, scope: &Scope<'_>) -> Result<[Tensor; 2]> {
        Ok([self.gate.forward(x, &(), scope)?, self.up.forward(x, &(), scope)?])
    }
}

#[derive(FsdpUnit)]
struct Fused {
    #[fsdp(fused("q_proj", "k_proj", "v_proj"))]
    qkv: Linear,
    #[fsdp(fused("gate", "up"))]
    gate_up: Linear,
}

impl Projections for Fused {
    fn new() -> Fused {
        Fused {
            qkv: Linear::of_rows(HIDDEN, &[HEADS, KV_HEADS, KV_HEADS].map(|heads| heads * HEAD_DIM)),
            gate_up: Linear::new(HIDDEN, 2 * INTERMEDIATE),
        }
    }

    fn qkv(&self, x: &Tensor, scope: &Scope<'_>) -> Result<[Tensor; 3]> {
        let qkv: Tensor = self.qkv.forward(x, &(), scope)?;
        let part = |head: usize, heads: usize| qkv.narrow(1, head * HEAD_DIM, heads * HEAD_DIM);
        Ok([part(0, HEADS)?, part(HEADS, KV_HEADS)?, part(HEADS + KV_HEADS, KV_HEADS)?])
    }

    fn gate_and_up(&self, x: &Tensor, scope: &Scope<'_>) -> Result<[Tensor; 2]> {
        let both: Tensor = self.gate_up.forward(x, &(), scope)?;
        Ok([both.narrow(1, 0, INTERMEDIATE)?, both.narrow(1, INTERMEDIATE, INTERMEDIATE)?])
    }
}

/// Attention of grouped heads and a gated layer, each added to its input, on `[positions, HIDDEN]`.
#[derive(FsdpUnit)]
struct Layer<P> {
    #[fsdp(rename = "inner")]
    projections: P,
    o_proj: Linear,
    down: Linear,
}

impl<P: Projections> Layer<P> {
    fn new() -> Layer<P> {
        Layer {
            projections: P::new(),
            o_proj: Linear::new(HEADS * HEAD_DIM, HIDDEN),
            down: Linear::new(INTERMEDIATE, HIDDEN),
        }
    }
}

impl<P: Projections> Forward for Layer<P> {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let positions = x.dim(0)?;
        let [q, k, v] = self.projections.qkv(x, scope)?;
        let grouped = |x: &Tensor, heads: usize| {
            let x = x.reshape((positions, KV_HEADS, heads / KV_HEADS, HEAD_DIM))?;
            x.permute((1, 2, 0, 3))?.contiguous()?.broadcast_as((
                KV_HEADS,
                HEADS / KV_HEADS,
                positions,
                HEAD_DIM,
            ))
        };
        let (q, k, v) = (grouped(&q, HEADS)?, grouped(&k, KV_HEADS)?, grouped(&v, KV_HEADS)?);
        let weights = q.matmul(&k.contiguous()?.t()?)?.tanh()?.exp()?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(3)?)?;
        let mixed = weights.matmul(&v.contiguous()?)?.permute((2, 0, 1, 3))?;
        let mixed = mixed.reshape((positions, HEADS * HEAD_DIM))?;
        let x = (x + self.o_proj.forward(&mixed, &(), scope)?)?;
        let [gate, up] = self.projections.gate_and_up(&x, scope)?;
        &x + self.down.forward(&(gate.silu()? * up)?, &(), scope)?
    }
}

#[derive(FsdpUnit)]
struct Model<P: FsdpUnit> {
    layers: Vec<Unit<Layer<P>>>,
    head: Linear,
}

impl<P: Projections> Model<P> {
    fn new() -> Model<P> {
        Model { layers: (0..2).map(|_| Unit::new(Layer::new())).collect(), head: Linear::new(HIDDEN, 2) }
    }
}

impl<P: Projections> Forward for Model<P> {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x, &(), scope)?;
        }
        self.head.forward(&x, &(), scope)?.sqr()?.mean_all()
    }
}

/// Values by the names that checkpoints know.
type Tensors = BTreeMap<String, Vec<f32>>;

/// Adds what `visit_weights` and `visit_gradients` show to `all`.
fn collect(all: &mut Tensors) -> impl FnMut(&fsdp::spec::ParamSpec, &[f32]) -> fsdp::Result<()> + '_ {
    |spec, values| {
        let parts = spec.tensors();
        all.extend(parts.into_iter().map(|part| (part.name.to_string(), values[part.elements].to_vec())));
        Ok(())
    }
}

/// What a training shows.
struct Run {
    start: Tensors,
    losses: Vec<f32>,
    /// Of the first step.
    gradients: Tensors,
    end: Tensors,
}

/// Trains from the initial values, or from `start`.
fn train<P: Projections>(ranks: usize, strategy: Strategy, start: Option<&Tensors>) -> Vec<Run> {
    on_ranks(ranks, |world| {
        let mesh = world.data_parallel_mesh();
        let mut model = Model::<P>::new().fully_shard_with(&mesh, &config(strategy))?;
        if let Some(start) = start {
            model.load_weights(|spec, elements, values| {
                for piece in spec.pieces(elements) {
                    values[piece.at].copy_from_slice(&start[piece.tensor.name][piece.elements]);
                }
                Ok(())
            })?;
        }
        let mut run =
            Run { start: Tensors::new(), losses: Vec::new(), gradients: Tensors::new(), end: Tensors::new() };
        model.visit_weights(collect(&mut run.start))?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.01).weight_decay(0.0))?;
        for step in 0..3 {
            let value = |i: usize| ((world.rank() * 7 + step * 5 + i * 3) % 11) as f32 / 8.0 - 0.5;
            let x = Tensor::from_vec((0..4 * HIDDEN).map(value).collect(), (4, HIDDEN), &Device::Cpu)?;
            let loss: Tensor = model.forward(&x)?;
            model.backward(&loss)?;
            if step == 0 {
                model.visit_gradients(collect(&mut run.gradients))?;
            }
            optimizer.step(&mut model)?;
            run.losses.push(loss.to_scalar()?);
        }
        model.visit_weights(collect(&mut run.end))?;
        Ok(run)
    })
}

#[test]
fn a_fused_model_starts_with_the_bits_of_the_unfused_one() {
    for strategy in Strategy::ALL {
        for ranks in [1, 2, 3] {
            let (fused, apart) =
                (train::<Fused>(ranks, strategy, None), train::<Apart>(ranks, strategy, None));
            for (fused, apart) in fused.iter().zip(&apart) {
                assert_eq!(fused.start, apart.start, "{strategy}, {ranks} ranks");
                assert_eq!(fused.start["layers.1.inner.k_proj.weight"].len(), KV_HEADS * HEAD_DIM * HIDDEN);
            }
        }
    }
}

#[test]
fn a_fused_model_trains_as_the_unfused_one_does() {
    let start = train::<Apart>(1, Strategy::NoShard, None).remove(0).end;
    for strategy in [Strategy::NoShard, Strategy::OptimGradsParams] {
        for ranks in [1, 2, 3] {
            let fused = train::<Fused>(ranks, strategy, Some(&start));
            let apart = train::<Apart>(ranks, strategy, Some(&start));
            for (rank, (fused, apart)) in fused.iter().zip(&apart).enumerate() {
                let what = |of: &str| format!("{of} of rank {rank} of {ranks}, {strategy}");
                assert_eq!(fused.start, start, "{}", what("loaded weights"));
                assert!(fused.losses.iter().all(|loss| loss.is_finite()), "{}", what("losses"));
                assert_close(&fused.losses, &apart.losses, TORCH, what("losses"));
                assert_close(&fused.gradients, &apart.gradients, TORCH, what("gradients"));
                assert_close(&fused.end, &apart.end, TORCH, what("weights"));
            }
        }
    }
}
