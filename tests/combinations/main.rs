//! Every combination of mesh, strategy, resharding, precision, recomputation, microbatches and awkward parameters
//! trains as plain candle does in one process, with exactly the collectives that the formulas say.
//!
//! The combinations are enumerated and every so manieth is run, spread over all of them.

mod case;
mod net;
mod plain;

use std::collections::BTreeMap;

use candle_core::Tensor;
use fsdp::engine::TrafficReport;
use fsdp::launch::Launcher;
use fsdp::prelude::*;
use fsdp_test_support::assert_distance;

use case::{Case, STEPS};
use net::Net;

/// What a run on all ranks leaves: weights before and after, by name, and the collectives of each step.
struct Run {
    before: Weights,
    after: Weights,
    collectives: Vec<[u64; 3]>,
}

type Weights = Vec<(String, Vec<f32>)>;

const OPERATIONS: [&str; 3] = ["all-gather", "reduce-scatter", "all-reduce"];

fn collectives(traffic: &[TrafficReport]) -> [u64; 3] {
    OPERATIONS.map(|name| traffic.iter().find(|report| report.operation == name).unwrap().counter.calls)
}

fn weights(model: &Fsdp<Net>) -> fsdp::Result<Weights> {
    let mut all = Vec::new();
    model.visit_weights(|spec, values| {
        all.push((spec.name.clone(), values.to_vec()));
        Ok(())
    })?;
    // Shards of whole rows are packed in another order.
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(all)
}

fn run(case: &Case) -> Run {
    let rows = Launcher::new().ranks(case.ranks()).run(|world| -> fsdp::Result<Run> {
        let mesh = world.mesh(&case.mesh())?;
        let mut model = Net::new(case).fully_shard_with(&mesh, &case.config())?;
        let mut optimizer = model.optimizer(case.optimizer())?;
        let before = weights(&model)?;
        let mut counts = Vec::new();
        for step in 0..STEPS {
            let traffic = collectives(&model.traffic());
            for microbatch in 0..case.microbatches {
                model.set_is_last_microbatch(microbatch + 1 == case.microbatches);
                let loss: Tensor = model.forward(&case.input(step, microbatch, world.rank())?)?;
                model.backward(&loss)?;
            }
            optimizer.step(&mut model)?;
            let now = collectives(&model.traffic());
            counts.push([0, 1, 2].map(|op| now[op] - traffic[op]));
            for report in model.memory(1) {
                let (usage, formula) = (report.usage, report.formula as usize);
                assert!(usage.peak <= formula, "{case:?}: {usage:?}, at most {formula}");
                if !usage.category.name().ends_with("pool") {
                    assert_eq!((usage.current, usage.peak), (formula, formula), "{case:?}: {usage:?}");
                }
            }
        }
        Ok(Run { before, after: weights(&model)?, collectives: counts })
    });
    let mut rows = rows.unwrap_or_else(|error| panic!("{case:?}: {error}"));
    let first = rows.remove(0);
    for row in rows {
        assert_eq!(row.after, first.after, "{case:?}: ranks end with different weights");
        assert_eq!(row.collectives, first.collectives, "{case:?}");
    }
    first
}

/// So many of all combinations are run, by `FSDP_COMBINATIONS`; see `tests/README.md`.
fn wanted() -> usize {
    std::env::var("FSDP_COMBINATIONS")
        .map_or(150, |wanted| wanted.parse().expect("FSDP_COMBINATIONS is a number"))
}

#[test]
fn combinations_train_as_plain_candle_and_communicate_as_the_formulas_say() {
    train_as_plain_candle(false);
}

#[test]
fn combinations_in_sixteen_bits_do_too() {
    train_as_plain_candle(true);
}

fn train_as_plain_candle(half: bool) {
    let cases = Case::all();
    // A stride without common factors visits all values of every setting.
    let chosen: Vec<&Case> = cases.iter().step_by((cases.len() / wanted()) | 1).collect();
    assert!(4 * chosen.len() >= 3 * wanted(), "{} of {}", chosen.len(), cases.len());
    // What must be equal to the bit: the reference of what the key says.
    let mut same_bits: BTreeMap<String, (Case, Weights)> = BTreeMap::new();
    for case in chosen.into_iter().filter(|case| case.half == half) {
        let Run { before, after, collectives } = run(case);
        let expected = plain::train(case, &before).unwrap_or_else(|error| panic!("{case:?}: {error}"));
        assert!(after.iter().map(|(name, _)| name).eq(expected.iter().map(|(name, _)| name)), "{case:?}");
        let [found, expected] =
            [&after, &expected].map(|all| all.iter().flat_map(|(_, w)| w.clone()).collect::<Vec<f32>>());
        assert_distance(&found, &expected, case.tolerance(), format!("{case:?}"));
        for (step, counted) in collectives.iter().enumerate() {
            assert_eq!(*counted, case.collectives(step), "{case:?}, step {step}: {OPERATIONS:?}");
        }
        let (other, bits) = same_bits.entry(case.same_bits()).or_insert_with(|| (*case, after.clone()));
        assert_eq!(bits.len(), after.len(), "{case:?} and {other:?}");
        let differing =
            bits.iter().zip(&after).find(|(ours, theirs)| ours != theirs).map(|(ours, _)| &ours.0);
        assert_eq!(differing, None, "{case:?} and {other:?} differ in bits");
    }
}
