//! What crosses a unit's boundary, and what does not: nested, unused, shared and ignored values, with the gradients
//! that plain candle would give.

use candle_core::{DType, Device, Result, Tensor};
use fsdp::prelude::*;

use crate::fixtures::{Two, config, full, gradients, named, on_ranks, weights};

/// All of what a boundary depends on.
fn every_way(check: impl Fn(&FsdpConfig) + Copy) {
    use ReshardAfterForward::{Always, Never, Ranks};
    for strategy in Strategy::ALL {
        for recompute in [Recompute::None, Recompute::Unit] {
            for reshard_after_forward in [Always, Never, Ranks(2)] {
                if reshard_after_forward == Always || strategy.shards_params() {
                    check(&FsdpConfig { recompute, reshard_after_forward, ..config(strategy) });
                }
            }
        }
    }
}

/// `(a w, b + w, w)`: three outputs.
#[derive(FsdpUnit)]
struct Three {
    w: Param,
}

impl Forward<(), (Tensor, Tensor), (Tensor, Tensor, Tensor)> for Three {
    fn forward(
        &self,
        (a, b): &(Tensor, Tensor),
        _: &(),
        scope: &Scope<'_>,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let w = self.w.tensor(scope)?;
        Ok(((a * &w)?, (b + &w)?, w.affine(1.0, 0.0)?))
    }
}

/// The root keeps activations in a list, of which it uses some.
#[derive(FsdpUnit)]
struct Net {
    gain: Param,
    three: Unit<Three>,
    last: Unit<Three>,
}

/// Which of the last unit's outputs count.
type Outputs = [bool; 3];

impl Forward<Outputs> for Net {
    fn forward(&self, x: &Tensor, used: &Outputs, scope: &Scope<'_>) -> Result<Tensor> {
        let x = (x * self.gain.tensor(scope)?)?;
        // `x` goes in twice, and around the unit.
        let (a, b, _) = self.three.forward(&(x.clone(), x.clone()), &(), scope)?;
        let outputs: (Tensor, Tensor, Tensor) = self.last.forward(&((a + &x)?, b), &(), scope)?;
        let outputs = [outputs.0, outputs.1, outputs.2];
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for (output, _) in outputs.iter().zip(used).filter(|(_, used)| **used) {
            loss = (loss + output.sum_all()?)?;
        }
        Ok(loss)
    }
}

#[test]
fn outputs_that_are_not_used_get_no_gradient_and_take_none() {
    every_way(|config| {
        on_ranks(2, |world| {
            let param = |value| Param::new(2).with_init(Init::Constant(value));
            let net = Net {
                gain: param(3.0),
                three: Unit::new(Three { w: param(5.0) }),
                last: Unit::new(Three { w: param(7.0) }),
            };
            let mut model = net.fully_shard_with(&world.data_parallel_mesh(), config)?;
            // With x = 1: u = gain, a = 5u, b = u + 5; outputs (a + u) * 7, b + 7, 7.
            let output_values = [(15.0 + 3.0) * 7.0, 8.0 + 7.0, 7.0];
            // Of each output: by gain, by the first w, by the second w.
            let slopes = [[(5.0 + 1.0) * 7.0, 3.0 * 7.0, 15.0 + 3.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]];
            for mask in 1..8usize {
                let used: Outputs = [0, 1, 2].map(|bit| mask >> bit & 1 == 1);
                let pick = |of: &dyn Fn(usize) -> f32| -> f32 { (0..3).filter(|&i| used[i]).map(of).sum() };
                let loss: Tensor = model.forward_with(&full(2, 1.0), &used)?;
                assert_eq!(
                    loss.to_scalar::<f32>()?,
                    2.0 * pick(&|i| output_values[i]),
                    "{used:?} {config:?}"
                );
                model.backward(&loss)?;
                let [gain, first, last] = [0, 1, 2].map(|of| [pick(&|i| slopes[i][of]); 2]);
                let expected = named(&[("gain", &gain), ("three.w", &first), ("last.w", &last)]);
                assert_eq!(gradients(&model)?, expected, "{used:?} {config:?}");
                model.reset_step()?;
            }
            Ok(())
        });
    });
}

/// Nothing to gather, nothing to reduce.
#[derive(FsdpUnit)]
struct Bare;

impl Forward for Bare {
    fn forward(&self, x: &Tensor, _: &(), _: &Scope<'_>) -> Result<Tensor> {
        x.sqr()
    }
}

#[derive(FsdpUnit)]
struct Holder {
    w: Param,
    bare: Unit<Bare>,
}

impl Forward for Holder {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.bare.forward(&(x * self.w.tensor(scope)?)?, &(), scope)?.sum_all()
    }
}

#[test]
fn a_unit_without_parameters_passes_gradients_on() {
    every_way(|config| {
        on_ranks(2, |world| {
            let holder = Holder { w: Param::new(3).with_init(Init::Constant(5.0)), bare: Unit::new(Bare) };
            let mut model = holder.fully_shard_with(&world.data_parallel_mesh(), config)?;
            model.unshard("bare")?.wait()?;
            for _ in 0..2 {
                let loss: Tensor = model.forward(&full(3, 2.0))?;
                assert_eq!(loss.to_scalar::<f32>()?, 300.0);
                model.backward(&loss)?;
                // d/dw (w x)² = 2 w x².
                assert_eq!(gradients(&model)?, named(&[("w", &[40.0; 3])]));
                model.reset_step()?;
            }
            Ok(())
        });
    });
}

/// `x * w`
#[derive(FsdpUnit)]
struct Scale {
    w: Param,
}

impl Forward for Scale {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct Nest {
    inner: Unit<Scale>,
    w: Param,
}

impl Forward for Nest {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.inner.forward(x, &(), scope)? * self.w.tensor(scope)?
    }
}

/// Nested units, and heads of which a forward uses one.
#[derive(FsdpUnit)]
struct Heads {
    body: Unit<Nest>,
    heads: Vec<Unit<Scale>>,
}

impl Forward<usize> for Heads {
    fn forward(&self, x: &Tensor, head: &usize, scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.body.forward(x, &(), scope)?;
        self.heads[*head].forward(&x, &(), scope)?.sum_all()
    }
}

fn heads() -> Heads {
    let two = || Param::new(2).with_init(Init::Constant(2.0));
    Heads {
        body: Unit::new(Nest { inner: Unit::new(Scale { w: two() }), w: two() }),
        heads: (0..3).map(|_| Unit::new(Scale { w: two() })).collect(),
    }
}

#[test]
fn two_forwards_through_nested_units_and_one_backward() {
    every_way(|config| {
        on_ranks(2, |world| {
            let mut model = heads().fully_shard_with(&world.data_parallel_mesh(), config)?;
            for _ in 0..2 {
                // As a preference loss does: the same model on two inputs, one backward.
                let chosen: Tensor = model.forward_with(&full(2, 3.0), &0)?;
                let rejected: Tensor = model.forward_with(&full(2, 1.0), &0)?;
                let loss = (chosen - rejected)?;
                assert_eq!(loss.to_scalar::<f32>()?, 2.0 * (24.0 - 8.0));
                model.backward(&loss)?;
                let eight = [8.0; 2];
                let expected = named(&[("body.w", &eight), ("body.inner.w", &eight), ("heads.0.w", &eight)]);
                assert_eq!(gradients(&model)?, expected, "{config:?}");
                model.reset_step()?;
            }
            Ok(())
        });
    });
}

#[test]
fn two_forwards_through_different_heads_and_one_backward() {
    every_way(|config| {
        on_ranks(2, |world| {
            let mut model = heads().fully_shard_with(&world.data_parallel_mesh(), config)?;
            let before = model.gathered_units();
            for _ in 0..2 {
                let first: Tensor = model.forward_with(&full(2, 3.0), &0)?;
                let second: Tensor = model.forward_with(&full(2, 1.0), &2)?;
                model.backward(&(first + second)?)?;
                // Head 1 was not used: it has no gradient at all.
                let expected = named(&[
                    ("body.w", &[16.0; 2]),
                    ("body.inner.w", &[16.0; 2]),
                    ("heads.0.w", &[12.0; 2]),
                    ("heads.2.w", &[4.0; 2]),
                ]);
                assert_eq!(gradients(&model)?, expected, "{config:?}");
                model.reset_step()?;
            }
            assert_eq!(model.gathered_units(), before);
            Ok(())
        });
    });
}

/// One forward through a unit's module by parts, as a loss that is computed in chunks does.
#[derive(FsdpUnit)]
struct Chunked {
    body: Unit<Scale>,
    head: Unit<Scale>,
}

impl Forward<usize> for Chunked {
    fn forward(&self, x: &Tensor, chunks: &usize, scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.body.forward(x, &(), scope)?;
        let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for chunk in x.chunk(*chunks, 0)? {
            loss = (loss + self.head.forward(&chunk.contiguous()?, &(), scope)?.sqr()?.sum_all()?)?;
        }
        Ok(loss)
    }
}

#[test]
fn a_loss_in_chunks_is_the_loss_of_the_whole_and_reduces_the_head_once() {
    every_way(|config| {
        on_ranks(2, |world| {
            let chunked = Chunked {
                body: Unit::new(Scale { w: Param::new((4, 3)).with_init(Init::Constant(2.0)) }),
                head: Unit::new(Scale { w: Param::new(()).with_init(Init::Constant(0.5)) }),
            };
            let mut model = chunked.fully_shard_with(&world.data_parallel_mesh(), config)?;
            let reductions = |model: &Fsdp<_>| -> u64 {
                let traffic = model.traffic();
                let of = traffic.iter().filter(|t| ["reduce-scatter", "all-reduce"].contains(&t.operation));
                of.map(|t| t.counter.calls).sum()
            };
            for chunks in [1, 2, 4] {
                let before = reductions(&model);
                let x = Tensor::ones((4, 3), DType::F32, &Device::Cpu)?;
                let loss: Tensor = model.forward_with(&x, &chunks)?;
                assert_eq!(loss.to_scalar::<f32>()?, 12.0);
                model.backward(&loss)?;
                // (w v)²: 2 w v² for the body's weight, 2 w² v for the head's, of 12 elements.
                let expected = named(&[("body.w", &[1.0; 12]), ("head.w", &[48.0])]);
                assert_eq!(gradients(&model)?, expected, "{chunks} {config:?}");
                assert_eq!(reductions(&model) - before, 2, "{chunks} {config:?}");
                model.reset_step()?;
            }
            Ok(())
        });
    });
}

/// Holds a table that is not the runtime's business.
#[derive(FsdpUnit)]
struct WithTable {
    w: Param,
    #[fsdp(skip)]
    table: Tensor,
    #[fsdp(buffer)]
    offset: Tensor,
}

impl Forward for WithTable {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        ((x * &self.table)? + &self.offset)? * self.w.tensor(scope)?
    }
}

#[derive(FsdpUnit)]
struct Tables {
    unit: Unit<WithTable>,
}

impl Forward for Tables {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(x, &(), scope)?.sum_all()
    }
}

#[test]
fn what_is_skipped_or_a_buffer_is_used_and_left_alone() {
    every_way(|config| {
        on_ranks(2, |world| {
            // Each rank has a table of its own, which nothing may average.
            let table = full(3, 1.0 + world.rank() as f32);
            let offset = full(3, 10.0);
            let w = Param::new(3).with_init(Init::Ones);
            let tables =
                Tables { unit: Unit::new(WithTable { w, table: table.clone(), offset: offset.clone() }) };
            let mut model = tables.fully_shard_with(&world.data_parallel_mesh(), config)?;
            let names: Vec<String> = model.layout().params.iter().map(|spec| spec.name.clone()).collect();
            assert_eq!(names, ["unit.w"]);
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            let loss: Tensor = model.forward(&full(3, 2.0))?;
            assert_eq!(loss.to_scalar::<f32>()?, 3.0 * (2.0 * (1.0 + world.rank() as f32) + 10.0));
            model.backward(&loss)?;
            assert_eq!(gradients(&model)?, named(&[("unit.w", &[13.0; 3])]));
            optimizer.step(&mut model)?;
            assert_eq!(weights(&model)?, named(&[("unit.w", &[-12.0; 3])]));
            assert_eq!(table.to_vec1::<f32>()?, [1.0 + world.rank() as f32; 3]);
            assert_eq!(offset.to_vec1::<f32>()?, [10.0; 3]);
            Ok(())
        });
    });
}

#[test]
fn a_dropped_model_is_gone_once_its_losses_are() {
    /// Tells whether it is still there.
    #[derive(FsdpUnit)]
    struct Alive {
        w: Param,
        #[fsdp(skip)]
        alive: std::sync::Arc<()>,
    }

    impl Forward for Alive {
        fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
            assert!(std::sync::Arc::strong_count(&self.alive) > 0);
            (x * self.w.tensor(scope)?)?.sum_all()
        }
    }

    #[derive(FsdpUnit)]
    struct Root {
        unit: Unit<Alive>,
    }

    impl Forward for Root {
        fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
            self.unit.forward(x, &(), scope)
        }
    }

    every_way(|config| {
        on_ranks(2, |world| {
            let alive = std::sync::Arc::new(());
            let watch = std::sync::Arc::downgrade(&alive);
            let root = Root { unit: Unit::new(Alive { w: Param::new(3), alive }) };
            let mut model = root.fully_shard_with(&world.data_parallel_mesh(), config)?;
            let mut optimizer = model.optimizer(AdamW::default())?;
            let loss: Tensor = model.forward(&full(3, 1.0))?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            let unfinished: Tensor = model.forward(&full(3, 1.0))?;
            drop((model, optimizer, loss));
            assert!(watch.upgrade().is_some(), "the graph of a loss holds what its backward needs");
            drop(unfinished);
            assert!(watch.upgrade().is_none(), "something holds the model: {config:?}");
            Ok(())
        });
    });
}

#[test]
fn a_loss_that_is_kept_without_a_backward_holds_nothing_up() {
    for strategy in Strategy::ALL {
        on_ranks(2, |world| {
            let mut model =
                Two::zeros(40).fully_shard_with(&world.data_parallel_mesh(), &config(strategy))?;
            let mut optimizer = model.optimizer(Sgd::default().lr(1.0))?;
            // One rank keeps what it has not trained on, for its log.
            let kept: Tensor = model.forward(&(true, true, full(40, 1.0)))?;
            let kept = (world.rank() == 0).then_some(kept);
            model.reset_step()?;
            for _ in 0..3 {
                let loss: Tensor = model.forward(&(true, true, full(40, 1.0)))?;
                model.backward(&loss)?;
                optimizer.step(&mut model)?;
            }
            assert_eq!(weights(&model)?, named(&[("a.w", &[-3.0; 40]), ("b.w", &[-3.0; 40])]));
            for report in model.memory(0) {
                assert!(report.usage.peak as u64 <= report.formula, "{report:?}");
            }
            drop(kept);
            Ok(())
        });
    }
}

/// The first rows of its weight, or all of them, as they are.
#[derive(FsdpUnit)]
struct Rows {
    w: Param,
}

impl Forward<usize> for Rows {
    fn forward(&self, _: &Tensor, rows: &usize, scope: &Scope<'_>) -> Result<Tensor> {
        let w = self.w.tensor(scope)?;
        if *rows == 0 { Ok(w) } else { w.narrow(0, 0, *rows) }
    }
}

#[derive(FsdpUnit)]
struct Positions {
    rows: Unit<Rows>,
}

impl Forward<usize> for Positions {
    fn forward(&self, x: &Tensor, rows: &usize, scope: &Scope<'_>) -> Result<Tensor> {
        self.rows.forward(x, rows, scope)?.sum_all()
    }
}

#[test]
fn a_weight_that_a_unit_returns_is_there_after_it_in_training_and_in_evaluation() {
    every_way(|config| {
        on_ranks(2, |world| {
            let w = Param::new((3, 2)).with_init(Init::Constant(5.0));
            let net = Positions { rows: Unit::new(Rows { w }) };
            let model = net.fully_shard_with(&world.data_parallel_mesh(), config)?;
            for (rows, sum) in [(0, 30.0), (2, 20.0)] {
                let evaluated: Tensor = model.evaluate_with(&full(1, 0.0), &rows)?;
                let trained: Tensor = model.forward_with(&full(1, 0.0), &rows)?;
                assert_eq!([evaluated.to_scalar::<f32>()?, trained.to_scalar()?], [sum; 2], "{config:?}");
            }
            Ok(())
        });
    });
}

/// Tells the strides of its input, as ops may compute by them.
#[derive(FsdpUnit)]
struct Strides {
    w: Param,
    #[fsdp(skip)]
    seen: std::sync::Mutex<Vec<bool>>,
}

impl Forward for Strides {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.seen.lock().unwrap().push(x.is_contiguous());
        x.broadcast_mul(&self.w.tensor(scope)?)
    }
}

#[derive(FsdpUnit)]
struct Strided {
    gain: Param,
    unit: Unit<Strides>,
}

impl Forward for Strided {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.unit.forward(&x.broadcast_mul(&self.gain.tensor(scope)?)?.t()?, &(), scope)?.sum_all()
    }
}

#[test]
fn a_unit_has_its_input_alike_in_every_run_with_and_without_recomputation() {
    for recompute in [Recompute::None, Recompute::Unit] {
        on_ranks(1, |world| {
            let one = || Param::new(1).with_init(Init::Ones);
            let unit = Unit::new(Strides { w: one(), seen: Default::default() });
            let config = FsdpConfig { recompute, ..FsdpConfig::default() };
            let model =
                Strided { gain: one(), unit }.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
            let loss: Tensor = model.forward(&x)?;
            model.backward(&loss)?;
            let seen = model.module().unit.seen.lock().unwrap().clone();
            let runs = if recompute == Recompute::Unit { 2 } else { 1 };
            assert_eq!(seen, vec![true; runs], "{recompute:?}");
            Ok(())
        });
    }
}
