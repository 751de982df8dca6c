//! The root's buckets where `bucket_size` makes several of them: gathered one by one, and reduced as soon as their
//! gradients are complete.

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;
use fsdp_models::ops::linear;
use fsdp_test_support::{assert_close, relative};

use crate::event_order::{events, lines};
use crate::fixtures::{config, gradients, on_ranks, weights};

#[derive(FsdpUnit)]
struct Layer {
    w: Param,
}

impl Forward for Layer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

/// A projection before the layers and one after them, by an op that writes into gradient sinks, and a gain by candle's
/// own.
#[derive(FsdpUnit)]
struct Net {
    first: Param,
    l: Vec<Unit<Layer>>,
    gain: Param,
    head: Param,
}

impl Net {
    fn new() -> Net {
        let layer = || Unit::new(Layer { w: Param::new(1).with_init(Init::Constant(2.0)) });
        let square = || Param::new((2, 2)).with_init(Init::Ones);
        Net {
            first: square(),
            l: vec![layer(), layer()],
            gain: Param::new(1).with_init(Init::Ones),
            head: square(),
        }
    }
}

/// Whether the head is used before the layers too.
impl Forward<bool> for Net {
    fn forward(&self, x: &Tensor, head_first: &bool, scope: &Scope<'_>) -> Result<Tensor> {
        let project = |x: &Tensor, weight: &Param| linear(x, &weight.tensor(scope)?, &weight.grad_sink());
        let mut x = project(x, &self.first)?;
        if *head_first {
            x = project(&x, &self.head)?;
        }
        for layer in &self.l {
            x = layer.forward(&x, &(), scope)?;
        }
        project(&x, &self.head)?.broadcast_mul(&self.gain.tensor(scope)?)?.sum_all()
    }
}

/// The backward's events and the gradients of one step.
type Step = (Vec<String>, Vec<(String, Vec<f32>)>);

/// Steps in which rank 0 uses the head first where `head_first` says so, and the others never.
fn steps(ranks: usize, config: FsdpConfig, head_first: &[bool]) -> Vec<Step> {
    let all = on_ranks(ranks, |world| {
        let config = FsdpConfig { trace: true, double_buffer: false, ..config.clone() };
        let mut model = Net::new().fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
        let mut steps = Vec::new();
        for &head_first in head_first {
            model.clear_trace();
            let x = Tensor::full(1.0 + world.rank() as f32, (1, 2), &Device::Cpu)?;
            let loss: Tensor = model.forward_with(&x, &(head_first && world.rank() == 0))?;
            model.backward(&loss)?;
            model.finish_grad_sync()?;
            let events = events(model.trace());
            let turn = events.iter().position(|event| event == "model forward").unwrap();
            assert_eq!(
                events[..3] == ["unshard"; 3].map(String::from),
                config.bucket_size.is_some(),
                "{events:?}"
            );
            steps.push((events[turn + 1..].to_vec(), gradients(&model)?));
            optimizer.step(&mut model)?;
        }
        Ok(steps)
    });
    assert!(all.iter().all(|steps| *steps == all[0]), "ranks differ");
    all.into_iter().next().unwrap()
}

const ONE_BY_ONE: Option<usize> = Some(1);

#[test]
fn what_is_complete_is_reduced_among_the_units() {
    for strategy in [Strategy::OptimGradsParams, Strategy::OptimGrads] {
        let steps = steps(2, FsdpConfig { bucket_size: ONE_BY_ONE, ..config(strategy) }, &[false; 3]);
        let reductions = |step: &Step| -> Vec<String> {
            step.0.iter().filter(|event| !event.starts_with("unshard")).cloned().collect()
        };
        // The first backward shows it; then the head is reduced once the first unit that follows it has been. What candle
        // collects comes at the end, and so does the projection before the layers.
        assert_eq!(
            reductions(&steps[0]),
            lines("backward L1, reduce L1, backward L0, reduce L0, model backward, reduce, reduce, reduce")
        );
        for step in &steps[1..] {
            assert_eq!(
                reductions(step),
                lines(
                    "backward L1, reduce L1, reduce, backward L0, reduce L0, model backward, reduce, reduce"
                )
            );
        }
    }
}

#[test]
fn a_gradient_that_comes_after_its_buckets_reduction_is_not_lost() {
    let ways = [false, false, true, false, false, true, true];
    let split = steps(2, FsdpConfig { bucket_size: ONE_BY_ONE, ..config(Strategy::default()) }, &ways);
    let whole = steps(2, config(Strategy::default()), &ways);
    for (index, (split, whole)) in split.iter().zip(&whole).enumerate() {
        assert_eq!(split.1, whole.1, "step {index}");
    }
    // By hand: ones times 1 + rank, twice two, 2 x 4 x (1 + 2) / 2 into each element of the head's gradient.
    assert_eq!(split[1].1.iter().find(|(name, _)| name == "head").unwrap().1, [12.0; 4]);
    let roots = |step: &Step| {
        let turn = step.0.iter().position(|event| event == "model backward").unwrap();
        let count = |events: &[String]| events.iter().filter(|event| *event == "reduce").count();
        (count(&step.0[..turn]), count(&step.0[turn..]))
    };
    // Once more at the end where it comes late, and only there in the backward after that.
    assert_eq!(
        split.iter().map(roots).collect::<Vec<_>>(),
        [(0, 3), (1, 2), (1, 3), (0, 3), (1, 2), (1, 3), (0, 3)]
    );
    assert!(whole.iter().all(|step| roots(step) == (0, 1)));
}

#[test]
fn bucket_sizes_strategies_and_microbatches_train_alike() {
    let run = |ranks: usize, outer: usize, config: FsdpConfig| {
        on_ranks(ranks, |world| {
            let mesh = world.mesh(&[("dp_outer", outer), ("dp_shard", ranks / outer)])?;
            let mut model = Net::new().fully_shard_with(&mesh, &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.125))?;
            for step in 0..4 {
                for microbatch in 0..2 {
                    model.set_is_last_microbatch(microbatch == 1);
                    let guard = (step == 2 && microbatch == 0).then(|| model.no_sync());
                    let x = Tensor::full((1 + world.rank()) as f32 / 1024.0, (1, 2), &Device::Cpu)?;
                    let loss: Tensor = model.forward_with(&x, &(step == 3 && world.rank() == 1))?;
                    model.backward(&loss)?;
                    drop(guard);
                }
                optimizer.step(&mut model)?;
            }
            for report in model.memory(0) {
                assert!(report.usage.peak as u64 <= report.formula, "{report:?}");
            }
            weights(&model)
        })
    };
    let expected = run(4, 1, config(Strategy::default())).remove(0);
    for strategy in [Strategy::OptimGrads, Strategy::OptimGradsParams] {
        for outer in [1, 2] {
            for bucket_size in [None, Some(1), Some(5)] {
                let got = run(4, outer, FsdpConfig { bucket_size, ..config(strategy) });
                for weights in got {
                    let what = format!("{strategy}, {outer}, {bucket_size:?}");
                    assert_close(&weights, &expected, relative(1e-6), what);
                }
            }
        }
    }
}
