//! Tables and JSON of the bytes that a run holds and moves.

use std::fmt;

use fsdp::Fsdp;
use fsdp::engine::UnitReport;
use serde_json::{Value, json};

use super::RunCheckpoints;
use super::quantity::{bytes, count};
use super::table::{Align::*, Table};
use super::train::TrainSummary;

/// What is said of a run that was stopped before its end.
pub fn stopped(summary: &TrainSummary, steps: usize, checkpoints: Option<&RunCheckpoints>) -> String {
    let done = summary.steps.last().map_or(0, |step| step.step);
    let state = match checkpoints {
        Some(checkpoints) => {
            format!("its state is in `{}`, from where --resume goes on", checkpoints.directory().display())
        }
        None => "nothing is saved of it, as it had no --checkpoints".to_owned(),
    };
    format!("stopped after step {done} of {steps}: {state}")
}

/// The units of a sharded model, their buckets and bytes; neighbours that differ only in their index share a
/// line. Local.
pub fn units<M>(model: &Fsdp<M>) -> impl fmt::Display + use<M> {
    let mut table = Table::new([
        ("unit", Left),
        ("units", Right),
        ("params", Right),
        ("elements", Right),
        ("buckets", Right),
        ("padding", Right),
        ("kept per rank", Right),
        ("gathered", Right),
    ]);
    let units = model.units();
    let row = |name: String, many: usize, units: &[UnitReport]| {
        let sum = |of: fn(&UnitReport) -> usize| units.iter().map(of).sum::<usize>() as u64;
        [
            name,
            count(many as u64),
            count(sum(|unit| unit.params)),
            count(sum(|unit| unit.numel)),
            count(sum(|unit| unit.buckets)),
            count(sum(|unit| unit.padding)),
            bytes(sum(|unit| unit.shard_bytes)),
            bytes(sum(|unit| unit.gathered_bytes)),
        ]
    };
    for alike in units.chunk_by(alike) {
        let name = match alike {
            [only] => only.unit.clone(),
            [first, .., last] => format!("{} .. {}", first.unit, last.unit.rsplit('.').next().unwrap_or("")),
            [] => continue,
        };
        table.row(row(name, alike.len(), alike));
    }
    table.rule().row(row("total".into(), units.len(), &units));
    table
}

/// Two units of one list whose lines would differ in nothing but the last part of their names.
fn alike(a: &UnitReport, b: &UnitReport) -> bool {
    let list = |unit: &UnitReport| unit.unit.rsplit_once('.').map(|(list, _)| list.to_owned());
    let sizes = |unit: &UnitReport| {
        (unit.params, unit.numel, unit.buckets, unit.padding, unit.shard_bytes, unit.gathered_bytes)
    };
    list(a).is_some() && list(a) == list(b) && sizes(a) == sizes(b)
}

/// Bytes by category, next to what the layout says: the most that any rank holds or held.
pub fn memory(ranks: &[TrainSummary]) -> impl fmt::Display + use<> {
    let mut table =
        Table::new([("per rank", Left), ("current", Right), ("peak", Right), ("formula", Right), ("", Left)]);
    let categories = ranks.first().map_or(0, |rank| rank.memory.len());
    for at in 0..categories {
        let of_ranks = || ranks.iter().map(|rank| &rank.memory[at]);
        let most = |of: fn(&fsdp::engine::MemoryReport) -> u64| of_ranks().map(of).max().unwrap_or(0);
        let (current, peak) =
            (most(|report| report.usage.current as u64), most(|report| report.usage.peak as u64));
        let formula = most(|report| report.formula);
        let category = ranks[0].memory[at].usage.category.name();
        // A snapshot need not have what is frozen.
        let bound = category.ends_with("_pool") || category == "snapshot";
        let verdict = match peak.cmp(&formula) {
            std::cmp::Ordering::Equal => "exact",
            std::cmp::Ordering::Less if bound => "within the bound",
            _ => "differs",
        };
        table.row([category, &bytes(current), &bytes(peak), &bytes(formula), verdict]);
    }
    table
}

/// The memory of each rank as JSON: one object a rank, with bytes by category.
pub fn memory_json(ranks: &[TrainSummary]) -> Value {
    let rank = |(rank, summary): (usize, &TrainSummary)| json!({"rank": rank, "bytes": summary.memory});
    ranks.iter().enumerate().map(rank).collect()
}

/// What each rank's collectives moved, and what was copied to pack or unpack messages.
///
/// The latter is zero for all-gather, by construction: what is sent is the shard in which weights are kept
/// between steps, and what is received is the buffer that the parameters' tensors are views of. There is no
/// code that copies, hence no counter.
pub fn traffic_json(ranks: &[TrainSummary]) -> Value {
    let rank = |(rank, summary): (usize, &TrainSummary)| json!({"rank": rank, "collectives": summary.traffic, "bytes_copied_for_packing": {"all_gather": 0}});
    ranks.iter().enumerate().map(rank).collect()
}
