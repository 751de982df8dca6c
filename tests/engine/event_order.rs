//! The exact sequence of gathers, computations and reductions of a step, in the order in which a rank issues them.

use candle_core::{Result, Tensor};
use fsdp::prelude::*;
use fsdp::trace::Span;

use crate::fixtures::{config, full, gradients, named, on_ranks};

/// `x` times the first element of `w`.
#[derive(FsdpUnit)]
struct Scale {
    w: Param,
}

impl Forward for Scale {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.broadcast_mul(&self.w.tensor(scope)?.narrow(0, 0, 1)?)
    }
}

fn scale(size: usize) -> Unit<Scale> {
    Unit::new(Scale { w: Param::new(size).with_init(Init::Constant(2.0)) })
}

/// Layers and a gain of the root's own.
#[derive(FsdpUnit)]
struct Layers {
    gain: Param,
    l: Vec<Unit<Scale>>,
}

impl Layers {
    fn new(sizes: &[usize]) -> Layers {
        let gain = Param::new(1).with_init(Init::Ones);
        Layers { gain, l: sizes.iter().map(|&size| scale(size)).collect() }
    }
}

/// Which layers run, in which order, and which one runs besides for nothing.
#[derive(Clone, Debug)]
struct Way {
    order: Vec<usize>,
    in_vain: Option<usize>,
}

fn in_order(order: &[usize]) -> Way {
    Way { order: order.to_vec(), in_vain: None }
}

impl Forward<Way> for Layers {
    fn forward(&self, x: &Tensor, way: &Way, scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.broadcast_mul(&self.gain.tensor(scope)?)?;
        for &layer in &way.order {
            if way.in_vain == Some(layer) {
                self.l[layer].forward(&x, &(), scope)?;
            } else {
                x = self.l[layer].forward(&x, &(), scope)?;
            }
        }
        x.sum_all()
    }
}

/// The issued events: `unshard L`, `forward L`, `recompute L`, `backward L`, `reduce L`, where `L` is a unit's name
/// and nothing for the root. A computation stands where it ends, as what it causes is issued while it runs.
pub(crate) fn events(mut spans: Vec<Span>) -> Vec<String> {
    spans.sort_by_key(|span| if span.lane == "compute" { span.end } else { span.issued });
    let word = |span: &Span| match (span.lane, span.name) {
        ("all-gather", _) => "unshard",
        ("compute", name) => name,
        (_, "reduce-scatter") => "reduce",
        (_, name) => name,
    };
    spans
        .iter()
        .map(|span| format!("{} {}", word(span), span.unit.replace("l.", "L")).trim().to_string())
        .collect()
}

/// The events of the forward and of the backward of a step.
type Step = (Vec<String>, Vec<String>);

/// The events of steps of these ways; the gradients are checked too.
fn traced(sizes: &[usize], config: FsdpConfig, prefetch: (usize, usize), ways: &[Way]) -> Vec<Step> {
    let ranks = on_ranks(2, |world| {
        let config = FsdpConfig { trace: true, ..config.clone() };
        let mut model = Layers::new(sizes).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        model.set_prefetch(prefetch.0, prefetch.1)?;
        let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
        let mut steps = Vec::new();
        for way in ways {
            model.clear_trace();
            let loss: Tensor = model.forward_with(&full(1, 1.0), way)?;
            model.backward(&loss)?;
            // Reductions leave their spans when they are done.
            model.finish_grad_sync()?;
            let events = events(model.trace());
            check_gradients(&model, way)?;
            optimizer.step(&mut model)?;
            let turn = events.iter().position(|event| event == "model forward").unwrap();
            steps.push((events[..turn].to_vec(), events[turn + 1..].to_vec()));
        }
        Ok(steps)
    });
    assert_eq!(ranks[0], ranks[1], "ranks issue in different orders");
    ranks.into_iter().next().unwrap()
}

/// Each use of a layer doubles: its gradient is half of the output.
fn check_gradients(model: &Fsdp<Layers>, way: &Way) -> fsdp::Result<()> {
    let used: Vec<usize> = way.order.iter().copied().filter(|layer| way.in_vain != Some(*layer)).collect();
    let output = 2f32.powi(used.len() as i32);
    for (name, gradient) in gradients(model)? {
        let uses = used.iter().filter(|layer| name == format!("l.{layer}.w")).count();
        let expected = if name == "gain" { output } else { uses as f32 * output / 2.0 };
        assert_eq!(gradient[0], expected, "{name}");
        assert!(gradient[1..].iter().all(|&rest| rest == 0.0), "{name}");
    }
    Ok(())
}

pub(crate) fn lines(text: &str) -> Vec<String> {
    text.split(',').map(|event| event.trim().to_string()).filter(|event| !event.is_empty()).collect()
}

#[track_caller]
fn expect((forward, backward): &Step, expected_forward: &str, expected_backward: &str) {
    assert_eq!(*forward, lines(expected_forward));
    assert_eq!(*backward, lines(expected_backward));
}

/// Settings under which nothing is kept that need not be, as PyTorch's tests have it.
fn plain(strategy: Strategy) -> FsdpConfig {
    FsdpConfig { double_buffer: false, ..config(strategy) }
}

const THREE: [usize; 3] = [0, 1, 2];

#[test]
fn the_canonical_order_is_known_from_the_second_step_on() {
    let steps = traced(&[1; 3], plain(Strategy::default()), (1, 1), &vec![in_order(&THREE); 4]);
    // The first step learns the order.
    expect(
        &steps[0],
        "unshard, unshard L0, forward L0, unshard L1, forward L1, unshard L2, forward L2",
        "unshard L2, backward L2, reduce L2, unshard L1, backward L1, reduce L1, unshard L0, backward L0, reduce L0,
         model backward, reduce",
    );
    for step in &steps[1..] {
        expect(
            step,
            "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, forward L2",
            "unshard L2, unshard L1, backward L2, reduce L2, unshard L0, backward L1, reduce L1, backward L0, reduce L0,
             model backward, reduce",
        );
    }
}

#[test]
fn a_unit_that_is_not_resharded_is_not_unsharded_again() {
    let config =
        FsdpConfig { reshard_after_forward: ReshardAfterForward::Never, ..plain(Strategy::default()) };
    let steps = traced(&[1; 3], config, (1, 1), &vec![in_order(&THREE); 2]);
    expect(
        &steps[1],
        "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, forward L2",
        "backward L2, reduce L2, backward L1, reduce L1, backward L0, reduce L0, model backward, reduce",
    );
}

#[test]
fn the_pool_turns_round_without_gathering_what_it_holds() {
    let ways = vec![in_order(&[0, 1, 2, 3, 4]); 2];
    for (prefetch, forward, backward) in [
        (
            1,
            "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, unshard L3, forward L2, unshard L4,
             forward L3, forward L4",
            "backward L4, reduce L4, unshard L2, backward L3, reduce L3, unshard L1, backward L2, reduce L2, unshard L0,
             backward L1, reduce L1, backward L0, reduce L0, model backward, reduce",
        ),
        (
            2,
            "unshard, unshard L0, unshard L1, unshard L2, forward L0, unshard L3, forward L1, unshard L4, forward L2,
             forward L3, forward L4",
            "backward L4, reduce L4, unshard L1, backward L3, reduce L3, unshard L0, backward L2, reduce L2, backward L1,
             reduce L1, backward L0, reduce L0, model backward, reduce",
        ),
        (
            3,
            "unshard, unshard L0, unshard L1, unshard L2, unshard L3, forward L0, unshard L4, forward L1, forward L2,
             forward L3, forward L4",
            "backward L4, reduce L4, unshard L0, backward L3, reduce L3, backward L2, reduce L2, backward L1, reduce L1,
             backward L0, reduce L0, model backward, reduce",
        ),
    ] {
        // Units that are alike, and units of which no two are.
        for sizes in [[1; 5], [161, 1, 129, 65, 97]] {
            let steps = traced(&sizes, config(Strategy::default()), (prefetch, prefetch), &ways);
            expect(&steps[1], forward, backward);
        }
    }
}

#[test]
fn each_pass_looks_as_far_ahead_as_it_was_told() {
    let forwards = [
        "unshard, unshard L0, forward L0, unshard L1, forward L1, unshard L2, forward L2",
        "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, forward L2",
    ];
    let backwards = [
        "unshard L2, backward L2, reduce L2, unshard L1, backward L1, reduce L1, unshard L0, backward L0, reduce L0,
         model backward, reduce",
        "unshard L2, unshard L1, backward L2, reduce L2, unshard L0, backward L1, reduce L1, backward L0, reduce L0,
         model backward, reduce",
    ];
    for forward in [0, 1] {
        for backward in [0, 1] {
            let ways = vec![in_order(&THREE); 2];
            let steps = traced(&[1; 3], plain(Strategy::default()), (forward, backward), &ways);
            expect(&steps[1], forwards[forward], backwards[backward]);
        }
    }
}

#[test]
fn units_of_different_shapes_are_gathered_further_ahead() {
    for (depth, forward, backward) in [
        (
            2,
            "unshard, unshard L0, unshard L1, unshard L2, forward L0, unshard L3, forward L1, forward L2, forward L3",
            "unshard L3, unshard L2, unshard L1, backward L3, reduce L3, unshard L0, backward L2, reduce L2, backward L1,
             reduce L1, backward L0, reduce L0, model backward, reduce",
        ),
        (
            3,
            "unshard, unshard L0, unshard L1, unshard L2, unshard L3, forward L0, forward L1, forward L2, forward L3",
            "unshard L3, unshard L2, unshard L1, unshard L0, backward L3, reduce L3, backward L2, reduce L2, backward L1,
             reduce L1, backward L0, reduce L0, model backward, reduce",
        ),
    ] {
        let ways = vec![in_order(&[0, 1, 2, 3]); 2];
        let steps = traced(&[1, 33, 65, 97], plain(Strategy::default()), (depth, depth), &ways);
        expect(&steps[1], forward, backward);
    }
}

#[test]
fn a_budget_holds_prefetches_back() {
    // 32 elements a unit: room for one.
    let config = FsdpConfig { gather_budget: Some(32), ..plain(Strategy::default()) };
    let steps = traced(&[1; 3], config, (1, 1), &vec![in_order(&THREE); 2]);
    expect(
        &steps[1],
        "unshard, unshard L0, forward L0, unshard L1, forward L1, unshard L2, forward L2",
        "unshard L2, backward L2, reduce L2, unshard L1, backward L1, reduce L1, unshard L0, backward L0, reduce L0,
         model backward, reduce",
    );
}

#[test]
fn recomputation_runs_under_the_gather_of_the_backward() {
    let config = FsdpConfig { recompute: Recompute::Unit, ..plain(Strategy::default()) };
    let steps = traced(&[1; 3], config, (1, 1), &vec![in_order(&THREE); 2]);
    expect(
        &steps[1],
        "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, forward L2",
        "unshard L2, unshard L1, recompute L2, backward L2, reduce L2, unshard L0, recompute L1, backward L1, reduce L1,
         recompute L0, backward L0, reduce L0, model backward, reduce",
    );
}

#[test]
fn a_unit_that_runs_twice_is_reduced_once() {
    let steps = traced(&[1; 2], plain(Strategy::default()), (1, 1), &vec![in_order(&[0, 1, 0, 1]); 2]);
    expect(
        &steps[0],
        "unshard, unshard L0, forward L0, unshard L1, forward L1, unshard L0, forward L0, unshard L1, forward L1",
        "unshard L1, backward L1, unshard L0, backward L0, unshard L1, backward L1, reduce L1, unshard L0, backward L0,
         reduce L0, model backward, reduce",
    );
    expect(
        &steps[1],
        "unshard, unshard L0, unshard L1, forward L0, unshard L0, forward L1, unshard L1, forward L0, forward L1",
        "unshard L1, unshard L0, backward L1, unshard L1, backward L0, unshard L0, backward L1, reduce L1, backward L0,
         reduce L0, model backward, reduce",
    );
}

#[test]
fn another_order_costs_a_prefetch_and_is_learnt() {
    let ways = [&[0, 1, 2][..], &[0, 1, 2], &[0, 2], &[0, 2], &[2, 1, 0]].map(in_order);
    let steps = traced(&[1; 3], plain(Strategy::default()), (1, 1), &ways);
    // L1 is gathered for nothing, once: it stays for the backward, which expects it too.
    expect(
        &steps[2],
        "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L2",
        "unshard L2, backward L2, reduce L2, unshard L0, backward L0, reduce L0, model backward, reduce",
    );
    expect(
        &steps[3],
        "unshard, unshard L0, unshard L2, forward L0, forward L2",
        "unshard L2, unshard L0, backward L2, reduce L2, backward L0, reduce L0, model backward, reduce",
    );
    // The first unit is another one already: nothing more is foretold, and L0 is kept until it comes.
    expect(
        &steps[4],
        "unshard, unshard L0, unshard L2, forward L2, unshard L1, forward L1, forward L0",
        "unshard L0, backward L0, reduce L0, unshard L1, backward L1, reduce L1, unshard L2, backward L2, reduce L2,
         model backward, reduce",
    );
}

#[test]
fn a_unit_whose_output_is_not_used_has_no_backward() {
    let in_vain = Way { order: THREE.to_vec(), in_vain: Some(1) };
    let ways = [in_order(&THREE), in_vain.clone(), in_vain];
    let steps = traced(&[1; 3], plain(Strategy::default()), (1, 1), &ways);
    let forward = "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, forward L2";
    expect(
        &steps[1],
        forward,
        "unshard L2, unshard L1, backward L2, reduce L2, unshard L0, backward L0, reduce L0, model backward, reduce",
    );
    expect(
        &steps[2],
        forward,
        "unshard L2, unshard L0, backward L2, reduce L2, backward L0, reduce L0, model backward, reduce",
    );
}

#[test]
fn strategies_leave_out_what_they_do_not_need() {
    let all_reduced =
        "backward L2, all-reduce L2, backward L1, all-reduce L1, backward L0, all-reduce L0, model backward,
                       all-reduce";
    let scattered =
        "backward L2, reduce L2, backward L1, reduce L1, backward L0, reduce L0, model backward, reduce";
    let gathered = "unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L1, forward L2";
    for (strategy, forward, backward) in [
        (Strategy::NoShard, "forward L0, forward L1, forward L2", all_reduced),
        (Strategy::Optim, gathered, scattered),
        (Strategy::OptimGrads, gathered, scattered),
    ] {
        let steps = traced(&[1; 3], plain(strategy), (1, 1), &vec![in_order(&THREE); 2]);
        expect(&steps[1], forward, backward);
    }
}

/// A unit around two units.
#[derive(FsdpUnit)]
struct Outer {
    w: Param,
    a: Unit<Scale>,
    b: Unit<Scale>,
}

impl Forward for Outer {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let x = self.b.forward(&self.a.forward(x, &(), scope)?, &(), scope)?;
        x.broadcast_mul(&self.w.tensor(scope)?.narrow(0, 0, 1)?)
    }
}

#[derive(FsdpUnit)]
struct Nested {
    o: Unit<Outer>,
}

impl Forward for Nested {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        self.o.forward(x, &(), scope)?.sum_all()
    }
}

#[test]
fn units_inside_a_recomputed_unit_run_again_inside_it() {
    let run = |recompute: Recompute| {
        let ranks = on_ranks(2, |world| {
            let config = FsdpConfig { trace: true, ..plain(Strategy::default()) };
            // Of another shape than the units inside, so that it has buffers of its own.
            let w = Param::new(64).with_init(Init::Constant(2.0));
            let outer = Unit::new(Outer { w, a: scale(1), b: scale(1) }).recompute(recompute);
            let mut model = Nested { o: outer }.fully_shard_with(&world.data_parallel_mesh(), &config)?;
            let mut optimizer = model.optimizer(Sgd::default().lr(0.0))?;
            for _ in 0..2 {
                model.clear_trace();
                let loss: Tensor = model.forward(&full(1, 1.0))?;
                model.backward(&loss)?;
                model.finish_grad_sync()?;
                let mut of_w = [0.0; 64];
                of_w[0] = 4.0;
                let expected = named(&[("o.w", &of_w), ("o.a.w", &[4.0]), ("o.b.w", &[4.0])]);
                assert_eq!(gradients(&model)?, expected);
                optimizer.step(&mut model)?;
            }
            let mut events = events(model.trace());
            events.truncate(events.iter().position(|event| event == "model backward").unwrap());
            Ok(events)
        });
        assert_eq!(ranks[0], ranks[1]);
        ranks[0].clone()
    };
    let forward = "unshard o, unshard o.a, unshard o.b, forward o.a, forward o.b, forward o, model forward";
    let backward =
        "unshard o.b, unshard o.a, backward o.b, reduce o.b, backward o.a, reduce o.a, backward o, reduce o";
    assert_eq!(run(Recompute::None), lines(&format!("{forward}, unshard o, {backward}")));
    let again = "unshard o, unshard o.b, unshard o.a, forward o.a, forward o.b, recompute o";
    assert_eq!(run(Recompute::Unit), lines(&format!("{forward}, {again}, {backward}")));
}

#[test]
fn a_gather_asked_for_by_hand_comes_first_and_once() {
    on_ranks(2, |world| {
        let config = FsdpConfig { trace: true, prefetch: 0, ..plain(Strategy::default()) };
        let model = Layers::new(&[1; 3]).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let way = in_order(&THREE);
        let first = model.unshard("l.1")?;
        // Other traffic of the user's own in between.
        let mut sum = [1.0];
        let tag = fsdp::comm::Tag { unit: "user".into(), phase: fsdp::comm::Phase::Setup, step: 0 };
        world.communicator().host_reduce(tag, fsdp::comm::HostOp::Sum, &mut sum)?;
        assert_eq!(sum, [2.0]);
        first.wait()?;
        let loss: Tensor = model.forward_with(&full(1, 1.0), &way)?;
        model.backward(&loss)?;
        model.finish_grad_sync()?;
        let events = events(model.trace());
        let forward =
            "unshard L1, unshard, unshard L0, forward L0, forward L1, unshard L2, forward L2, model forward";
        assert_eq!(events[..8], lines(forward));
        check_gradients(&model, &way)
    });
}

#[test]
fn a_pass_that_has_left_the_learnt_order_gathers_no_more_ahead() {
    let ways = [&[0, 1, 2, 3][..], &[0, 1, 2, 3], &[0, 2, 1]].map(in_order);
    let steps = traced(&[1; 4], plain(Strategy::default()), (1, 1), &ways);
    // L2 comes where L1 was foretold: L3, which was to come third, is not gathered under it or under L1.
    assert_eq!(
        steps[2].0,
        lines("unshard, unshard L0, unshard L1, forward L0, unshard L2, forward L2, forward L1")
    );
}

#[test]
fn an_evaluation_gathers_again_what_the_one_before_gathered_in_vain() {
    on_ranks(2, |world| {
        let config = FsdpConfig { trace: true, ..plain(Strategy::OptimGradsParams) };
        let model = Layers::new(&[3; 3]).fully_shard_with(&world.data_parallel_mesh(), &config)?;
        for order in [&[0, 1, 2][..], &[0, 1, 2], &[0], &[0, 1, 2]] {
            model.clear_trace();
            let _: Tensor = model.evaluate_with(&full(1, 1.0), &in_order(order))?;
            let events = events(model.trace());
            for layer in order {
                let gathers = events.iter().filter(|event| **event == format!("unshard L{layer}")).count();
                assert_eq!(gathers, 1, "layer {layer} of {order:?}: {events:?}");
            }
        }
        Ok(())
    });
}
