//! Describes a call of a collective: for the comparison between ranks, and for messages.

use std::fmt;
use std::sync::Arc;

use crate::comm::{Accumulate, Exchange, Gather, HostOp, Reduce, Tag, step_words};
use crate::device::Slice;

/// Kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Op {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast { root: usize },
    AllToAll,
    HostBarrier,
    HostReduce(HostOp),
    HostGather,
}

impl Op {
    /// Names of the kinds, in the order of [`Op::index`].
    pub(super) const NAMES: [&str; 8] = [
        "all-gather",
        "reduce-scatter",
        "all-reduce",
        "broadcast",
        "all-to-all",
        "host-barrier",
        "host-reduce",
        "host-gather",
    ];

    pub(super) fn index(self) -> usize {
        match self {
            Op::AllGather => 0,
            Op::ReduceScatter => 1,
            Op::AllReduce => 2,
            Op::Broadcast { .. } => 3,
            Op::AllToAll => 4,
            Op::HostBarrier => 5,
            Op::HostReduce(_) => 6,
            Op::HostGather => 7,
        }
    }

    /// Rendezvous after the arrival: the departure, and one between the halves of an all-reduce.
    pub(super) fn rendezvous(self) -> usize {
        if self == Op::AllReduce { 2 } else { 1 }
    }

    fn is_host(self) -> bool {
        matches!(self, Op::HostBarrier | Op::HostReduce(_) | Op::HostGather)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Op::NAMES[self.index()])?;
        match self {
            Op::Broadcast { root } => write!(f, " from rank {root}"),
            Op::HostReduce(HostOp::Sum) => f.write_str(" (sum)"),
            Op::HostReduce(HostOp::Max) => f.write_str(" (max)"),
            Op::HostReduce(HostOp::Min) => f.write_str(" (min)"),
            _ => Ok(()),
        }
    }
}

/// Elements and dtype of one side of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Side {
    pub(super) elements: usize,
    pub(super) dtype: &'static str,
}

impl Side {
    fn of(slice: &Slice) -> Side {
        Side { elements: slice.len(), dtype: slice.dtype().name() }
    }
}

/// One buffer of a grouped launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) send: Side,
    pub(super) recv: Side,
    pub(super) reduction: Option<(f32, Accumulate)>,
}

impl PartialEq for Part {
    fn eq(&self, other: &Part) -> bool {
        // Scales by their bits: a NaN on every rank is agreement.
        let bits = |part: &Part| part.reduction.map(|(scale, accumulate)| (scale.to_bits(), accumulate));
        self.send == other.send && self.recv == other.recv && bits(self) == bits(other)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.send.elements, self.send.dtype)?;
        if self.recv != self.send {
            write!(f, " into {} x {}", self.recv.elements, self.recv.dtype)?;
        }
        match self.reduction {
            Some((scale, Accumulate::Overwrite)) => write!(f, ", scale {scale}, overwriting"),
            Some((scale, Accumulate::Add)) => write!(f, ", scale {scale}, adding"),
            None => Ok(()),
        }
    }
}

/// What one rank does in a collective.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) op: Op,
    pub(super) tag: Tag,
    /// Bytes of the whole buffers, for messages.
    pub(super) bytes: usize,
    /// What the rank has noted of itself, see [`Communicator::note`](crate::comm::Communicator::note).
    pub(super) notes: Notes,
    /// The device that it is done on, if not the host.
    pub(super) device: Option<Arc<str>>,
    /// Peers are waited for however long they take.
    pub(super) patient: bool,
    pub(super) parts: Vec<Part>,
}

/// Notes on a communicator and on those that it was made of, the first one first; only those that say something.
pub(super) type Notes = Vec<Arc<str>>;

impl Call {
    pub(super) fn all_gather(tag: Tag, parts: &[Gather]) -> Call {
        Call {
            op: Op::AllGather,
            tag,
            bytes: parts.iter().map(|part| part.recv.bytes()).sum(),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: parts
                .iter()
                .map(|part| Part { send: Side::of(&part.send), recv: Side::of(&part.recv), reduction: None })
                .collect(),
        }
    }

    pub(super) fn reduce_scatter(tag: Tag, parts: &[Reduce]) -> Call {
        Call {
            op: Op::ReduceScatter,
            tag,
            bytes: parts.iter().map(|part| part.send.bytes()).sum(),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: parts
                .iter()
                .map(|part| Part {
                    send: Side::of(&part.send),
                    recv: Side::of(&part.recv),
                    reduction: Some((part.scale, part.accumulate)),
                })
                .collect(),
        }
    }

    pub(super) fn all_reduce(tag: Tag, parts: &[(Slice, f32)]) -> Call {
        Call {
            op: Op::AllReduce,
            tag,
            bytes: parts.iter().map(|(data, _)| data.bytes()).sum(),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: parts
                .iter()
                .map(|(data, scale)| Part {
                    send: Side::of(data),
                    recv: Side::of(data),
                    reduction: Some((*scale, Accumulate::Overwrite)),
                })
                .collect(),
        }
    }

    pub(super) fn broadcast(tag: Tag, data: &Slice, root: usize) -> Call {
        let side = Side::of(data);
        Call {
            op: Op::Broadcast { root },
            tag,
            bytes: data.bytes(),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: vec![Part { send: side, recv: side, reduction: None }],
        }
    }

    pub(super) fn all_to_all(tag: Tag, parts: &[Exchange]) -> Call {
        Call {
            op: Op::AllToAll,
            tag,
            bytes: parts.iter().map(|part| part.send.bytes()).sum(),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: parts
                .iter()
                .map(|part| Part { send: Side::of(&part.send), recv: Side::of(&part.recv), reduction: None })
                .collect(),
        }
    }

    pub(super) fn host_barrier(tag: Tag) -> Call {
        Call {
            op: Op::HostBarrier,
            tag,
            bytes: 0,
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: Vec::new(),
        }
    }

    pub(super) fn host_reduce(tag: Tag, op: HostOp, values: &[f64]) -> Call {
        let side = Side { elements: values.len(), dtype: "f64" };
        Call {
            op: Op::HostReduce(op),
            tag,
            bytes: size_of_val(values),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: vec![Part { send: side, recv: side, reduction: None }],
        }
    }

    pub(super) fn host_gather(tag: Tag, bytes: &[u8]) -> Call {
        Call {
            op: Op::HostGather,
            tag,
            bytes: bytes.len(),
            notes: Notes::new(),
            device: None,
            patient: false,
            parts: Vec::new(),
        }
    }

    /// The same without a time-out.
    pub(super) fn patient(self) -> Call {
        Call { patient: true, ..self }
    }

    /// `all-gather of unit `layers.1` (forward, step 3, 4096 B)`.
    pub(super) fn describe(op: Op, tag: &Tag, bytes: usize) -> String {
        let what = if op.is_host() { "" } else { "unit " };
        let unit = if tag.unit.is_empty() { "(root)" } else { &tag.unit };
        format!("{op} of {what}`{unit}` ({}, {}, {bytes} B)", tag.phase, step_words(tag.step))
    }

    /// Whether two ranks do the same, in the same optimizer step: a rank that has skipped one has other weights.
    pub(super) fn agrees_with(&self, other: &Call) -> bool {
        self.same_name(other)
            && self.device == other.device
            && self.parts == other.parts
            && self.notes == other.notes
    }

    /// Whether both are the same operation for the same thing.
    pub(super) fn same_name(&self, other: &Call) -> bool {
        self.op == other.op && self.tag == other.tag
    }

    /// Words for a disagreement of two ranks, the lower one first.
    pub(super) fn differing(&self, rank: usize, other: &Call, other_rank: usize) -> String {
        if rank < other_rank {
            self.difference(rank, other, other_rank)
        } else {
            other.difference(other_rank, self, rank)
        }
    }

    /// `rank 0 is in .., rank 1 in ..`.
    fn difference(&self, rank: usize, other: &Call, other_rank: usize) -> String {
        let mut text = format!("rank {rank} is in {self}, rank {other_rank} in {other}");
        if self.same_name(other) {
            if self.device != other.device {
                let place = |call: &Call| call.device.as_deref().unwrap_or("the host").to_owned();
                let (ours, theirs) = (place(self), place(other));
                return format!("{text}: rank {rank} on {ours}, rank {other_rank} on {theirs}");
            }
            if self.parts == other.parts {
                let say = |call: &Call| match call.notes.as_slice() {
                    [] => "in no state that it has noted".to_owned(),
                    notes => notes.join("; "),
                };
                let (ours, theirs) = (say(self), say(other));
                return format!("{text}: rank {rank} is {ours}; rank {other_rank} is {theirs}");
            }
            let differing = self.parts.iter().zip(&other.parts).enumerate().find(|(_, (a, b))| a != b);
            text += &match differing {
                Some((i, (a, b))) => format!(": part {i} is {a} on rank {rank}, {b} on rank {other_rank}"),
                None => format!(
                    ": {} parts on rank {rank}, {} on rank {other_rank}",
                    self.parts.len(),
                    other.parts.len()
                ),
            };
        }
        text
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Call::describe(self.op, &self.tag, self.bytes))
    }
}
