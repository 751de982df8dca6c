//! What the ranks of a collective hand in and get.

use super::Code;
use super::arithmetic::Value;
use super::calls::{Part, Verb};
use crate::abi::In;
use crate::report::Kind;
use crate::state::Held;

/// What each part of one collective or message gets, all of which have arrived: nothing if they disagree.
pub fn exchange(held: &mut Held, parts: &[Part]) -> Vec<Option<Vec<u8>>> {
    if let Some(message) = disagreement(parts) {
        held.reports.add(Kind::Mismatch, message);
        for part in parts {
            held.nccl.comms[part.comm].error = Code::INVALID_USAGE;
        }
        return vec![None; parts.len()];
    }
    let sent = parts.iter().map(|part| read(held, part)).collect::<Option<Vec<_>>>();
    let Some(sent) = sent else { return vec![None; parts.len()] };
    (0..parts.len()).map(|index| Some(received(parts, &sent, index))).collect()
}

/// How the calls of the ranks differ, if they do.
fn disagreement(parts: &[Part]) -> Option<String> {
    let first = &parts[0];
    let agrees = |part: &Part| match (first.verb, part.verb) {
        (Verb::Send { .. }, Verb::Receive { .. }) => first.bytes() == part.bytes(),
        _ => first.describe() == part.describe(),
    };
    (!parts.iter().all(agrees)).then(|| {
        let calls = parts.iter().map(|part| format!("rank {} calls {}", part.rank, part.describe()));
        calls.collect::<Vec<_>>().join(", ")
    })
}

/// The bytes that the rank at `index` gets.
fn received(parts: &[Part], sent: &[Vec<u8>], index: usize) -> Vec<u8> {
    let part = &parts[index];
    let bytes = part.bytes();
    match part.verb {
        Verb::AllGather => sent.concat(),
        Verb::AllToAll => sent.iter().flat_map(|s| &s[index * bytes..(index + 1) * bytes]).copied().collect(),
        Verb::Broadcast { root } => sent[root].clone(),
        Verb::Receive { .. } => sent[0].clone(),
        Verb::Send { .. } => Vec::new(),
        Verb::AllReduce => reduced(parts, sent, 0),
        Verb::Reduce { root } if root == index => reduced(parts, sent, 0),
        Verb::Reduce { .. } => Vec::new(),
        Verb::ReduceScatter => reduced(parts, sent, index * bytes),
    }
}

/// The reduction of `count` values of each rank, from `offset` bytes on.
fn reduced(parts: &[Part], sent: &[Vec<u8>], offset: usize) -> Vec<u8> {
    let Part { dtype, count, reduction, .. } = parts[0].clone();
    let scales = parts.iter().map(|part| part.reduction.scale()).collect::<Vec<_>>();
    let value = |rank: &Vec<u8>, i: usize| {
        let at = &rank[offset + i * dtype.bytes()..][..dtype.bytes()];
        dtype.read(&In::of(at)).unwrap_or(Value::Integer(0))
    };
    let element = |i| {
        let values = sent.iter().map(|rank| value(rank, i)).collect::<Vec<_>>();
        dtype.to_bytes(dtype.reduce(&values, &scales, reduction))
    };
    (0..count).flat_map(element).collect()
}

/// What a part hands in.
fn read(held: &mut Held, part: &Part) -> Option<Vec<u8>> {
    let (start, bytes) = (part.send, part.sent_bytes());
    check_mapped(held, part)?;
    let mut values = vec![0; bytes];
    if bytes > 0 {
        // SAFETY: all that a part hands in is mapped.
        unsafe { std::ptr::copy_nonoverlapping(start as *const u8, values.as_mut_ptr(), bytes) };
    }
    Some(values)
}

/// Sets what a part gets.
pub fn write(held: &mut Held, part: &Part, values: &[u8]) {
    if !values.is_empty() && check_mapped(held, part).is_some() {
        // SAFETY: all that a part gets is mapped.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), part.receive as *mut u8, values.len()) };
    }
}

/// Reports a part whose memory was given back.
fn check_mapped(held: &mut Held, part: &Part) -> Option<()> {
    let mapped = part.accesses().iter().all(|access| held.heap.is_mapped(&access.range));
    if !mapped {
        held.reports.add(Kind::UseAfterFree, format!("{} ran after its memory was given back", part.name()));
    }
    mapped.then_some(())
}
