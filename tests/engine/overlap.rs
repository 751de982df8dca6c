//! Communication runs beside compute, seen in the order and intervals of the trace.

use candle_core::{Device, Result, Tensor};
use fsdp::prelude::*;
use fsdp::trace::Span;

use crate::fixtures::{Dot, config, full, on_ranks};

const UNITS: usize = 5;

#[derive(FsdpUnit)]
struct Wide {
    w: Param,
}

impl Forward for Wide {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        x.matmul(&self.w.tensor(scope)?)?.tanh()
    }
}

#[derive(FsdpUnit)]
struct Deep {
    units: Vec<Unit<Wide>>,
}

impl Forward for Deep {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = x.clone();
        for unit in &self.units {
            x = unit.forward(&x, &(), scope)?;
        }
        x.sqr()?.mean_all()
    }
}

/// The spans of one step, after the order was learnt.
fn traced_step(recompute: Recompute) -> Vec<Vec<Span>> {
    on_ranks(2, |world| {
        let config = FsdpConfig { trace: true, recompute, ..config(Strategy::default()) };
        let wide = || Unit::new(Wide { w: Param::new((64, 64)) });
        let model = Deep { units: (0..UNITS).map(|_| wide()).collect() };
        let mut model = model.fully_shard_with(&world.data_parallel_mesh(), &config)?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        let x = Tensor::ones((8, 64), candle_core::DType::F32, &Device::Cpu)?;
        for _ in 0..2 {
            model.clear_trace();
            let loss: Tensor = model.forward(&x)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
        }
        Ok(model.trace())
    })
}

fn span<'a>(spans: &'a [Span], lane: &str, name: &str, unit: usize) -> Option<&'a Span> {
    let unit = format!("units.{unit}");
    spans.iter().find(|span| span.lane == lane && span.name == name && *span.unit == *unit)
}

#[test]
fn the_next_units_gather_is_issued_before_the_present_ones_compute_ends() {
    for spans in traced_step(Recompute::None) {
        for unit in 0..UNITS - 1 {
            let gather = span(&spans, "all-gather", "all-gather", unit + 1).unwrap();
            let compute = span(&spans, "compute", "forward", unit).unwrap();
            assert!(gather.issued < compute.end, "unit {unit}: {gather:?} {compute:?}");
        }
    }
}

#[test]
fn a_reduction_is_issued_before_the_backward_of_the_unit_before_ends() {
    for recompute in [Recompute::None, Recompute::Unit] {
        for spans in traced_step(recompute) {
            for unit in 1..UNITS {
                let reduce = span(&spans, "reduce", "reduce-scatter", unit).unwrap();
                let before = span(&spans, "compute", "backward", unit - 1).unwrap();
                assert!(reduce.issued < before.end, "unit {unit}: {reduce:?} {before:?}");
            }
        }
    }
}

#[test]
fn backward_gathers_are_ahead_too_and_the_last_units_are_not_gathered_again() {
    for spans in traced_step(Recompute::None) {
        let gathers = |unit: usize| {
            let name = format!("units.{unit}");
            let of_unit = spans.iter().filter(|s| s.lane == "all-gather" && *s.unit == *name);
            of_unit.collect::<Vec<_>>()
        };
        // The two slots still hold the last two units when the backward begins.
        assert_eq!(gathers(UNITS - 1).len(), 1);
        assert_eq!(gathers(UNITS - 2).len(), 1);
        for unit in 0..UNITS - 2 {
            let again = gathers(unit)[1];
            let backward = span(&spans, "compute", "backward", unit + 1).unwrap();
            assert!(again.issued < backward.end, "unit {unit}");
        }
    }
}

#[test]
fn one_gather_serves_recomputation_and_backward() {
    for spans in traced_step(Recompute::Unit) {
        let gathers = spans.iter().filter(|s| s.lane == "all-gather" && s.unit.starts_with("units"));
        assert_eq!(gathers.count(), 2 * UNITS - 2);
        assert_eq!(spans.iter().filter(|s| s.name == "recompute").count(), UNITS);
    }
}

#[test]
fn at_most_two_units_are_gathered_or_in_flight() {
    for spans in traced_step(Recompute::None) {
        // A unit occupies a slot from the start of its gather to the end of the last compute before the next
        // gather of it.
        let mut occupied: Vec<(u64, u64)> = Vec::new();
        for unit in 0..UNITS {
            let name = format!("units.{unit}");
            let mut starts: Vec<u64> = spans
                .iter()
                .filter(|s| s.lane == "all-gather" && *s.unit == *name)
                .map(|s| s.start)
                .collect();
            starts.push(u64::MAX);
            for pair in starts.windows(2) {
                let uses = spans.iter().filter(|s| s.lane == "compute" && *s.unit == *name);
                let end = uses.filter(|s| s.start > pair[0] && s.start < pair[1]).map(|s| s.end).max();
                occupied.push((pair[0], end.expect("what is gathered is used")));
            }
        }
        for &(start, _) in &occupied {
            let at_once = occupied.iter().filter(|(from, to)| *from <= start && start < *to).count();
            assert!(at_once <= 2, "{at_once} units at once");
        }
    }
}

#[test]
fn every_rank_and_every_run_issues_the_same_collectives_in_the_same_order() {
    let issued = |spans: Vec<Span>| -> Vec<(String, String)> {
        let mut spans: Vec<Span> = spans.into_iter().filter(|span| span.lane != "compute").collect();
        spans.sort_by_key(|span| span.issued);
        spans.into_iter().map(|span| (span.name.to_string(), span.unit.to_string())).collect()
    };
    let mut runs = (0..4).flat_map(|_| traced_step(Recompute::None)).map(issued);
    let first = runs.next().unwrap();
    assert!(!first.is_empty());
    assert!(runs.all(|run| run == first));
}

#[test]
fn the_trace_is_valid_chrome_json() {
    let trace = fsdp::trace::chrome_trace(&traced_step(Recompute::None));
    let events = trace["traceEvents"].as_array().unwrap();
    assert!(events.iter().any(|event| event["ph"] == "X" && event["name"] == "all-gather units.2"));
    assert!(events.iter().any(|event| event["args"]["name"] == "rank 1"));
}

/// Units of which a pass runs those that are named, in that order.
#[derive(FsdpUnit)]
struct Chosen {
    units: Vec<Unit<Dot>>,
}

impl Forward<Vec<usize>> for Chosen {
    fn forward(&self, x: &Tensor, which: &Vec<usize>, scope: &Scope<'_>) -> Result<Tensor> {
        let losses = which.iter().map(|&unit| self.units[unit].forward(x, &(), scope));
        let losses: Vec<Tensor> = losses.collect::<Result<_>>()?;
        Tensor::stack(&losses, 0)?.sum_all()
    }
}

/// Units gathered in an evaluation of these of five, all of which ran in order before.
fn gathered(which: &[usize]) -> u64 {
    let counts = on_ranks(2, |world| {
        let model = Chosen { units: (0..5).map(|_| Dot::zeros(8)).collect() };
        let model =
            model.fully_shard_with(&world.data_parallel_mesh(), &config(Strategy::OptimGradsParams))?;
        let calls = || {
            let traffic = model.traffic();
            traffic.iter().find(|report| report.operation == "all-gather").unwrap().counter.calls
        };
        for _ in 0..2 {
            let _: Tensor = model.evaluate_with(&full(8, 1.0), &(0..5).collect())?;
        }
        let before = calls();
        let _: Tensor = model.evaluate_with(&full(8, 1.0), &which.to_vec())?;
        Ok(calls() - before)
    });
    assert_eq!(counts[0], counts[1]);
    counts[0]
}

#[test]
fn a_pass_that_leaves_the_learnt_order_gathers_one_unit_in_vain_at_most() {
    assert_eq!(gathered(&[0, 1, 2, 3, 4]), 5);
    // Unit 1 was on its way when 3 came.
    assert_eq!(gathered(&[0, 3]), 3);
    // It is used later, and nothing is foretold by then.
    assert_eq!(gathered(&[0, 2, 1]), 3);
}

#[test]
fn a_pass_that_begins_with_another_unit_gathers_the_first_alone_in_vain() {
    // The first unit of the learnt order was on its way when the pass began.
    assert_eq!(gathered(&[2]), 2);
    assert_eq!(gathered(&[3, 4]), 3);
}
