//! What ranks call: collectives, sends and receives.

#![allow(non_snake_case)]

use std::ffi::c_int;

use super::arithmetic::Type;
use super::comm::Life;
use super::redop::{RedOp, Reduction};
use super::{Answer, Code, call, group};
use crate::abi::Raw;
use crate::driver::find_stream;
use crate::race::Access;
use crate::state::Held;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    AllGather,
    AllReduce,
    ReduceScatter,
    Reduce { root: usize },
    Broadcast { root: usize },
    AllToAll,
    Send { to: usize },
    Receive { from: usize },
}

/// One rank's part of a call.
#[derive(Clone)]
pub struct Part {
    pub comm: usize,
    pub rank: usize,
    pub ranks: usize,
    pub verb: Verb,
    pub send: usize,
    pub receive: usize,
    /// Elements, as the call counts them.
    pub count: usize,
    pub dtype: Type,
    pub reduction: Reduction,
}

impl Part {
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.bytes()
    }

    /// Bytes that this rank hands in.
    pub fn sent_bytes(&self) -> usize {
        match self.verb {
            Verb::ReduceScatter | Verb::AllToAll => self.bytes() * self.ranks,
            Verb::Broadcast { root } if root != self.rank => 0,
            Verb::Receive { .. } => 0,
            _ => self.bytes(),
        }
    }

    /// Bytes that this rank gets.
    pub fn received_bytes(&self) -> usize {
        match self.verb {
            Verb::AllGather | Verb::AllToAll => self.bytes() * self.ranks,
            Verb::Reduce { root } if root != self.rank => 0,
            Verb::Send { .. } => 0,
            _ => self.bytes(),
        }
    }

    /// How many bytes into the larger buffer the smaller one starts when the call is in place.
    fn in_place_offset(&self) -> Option<(usize, usize)> {
        match self.verb {
            Verb::AllGather => Some((self.rank * self.bytes(), 0)),
            Verb::ReduceScatter => Some((0, self.rank * self.bytes())),
            Verb::AllReduce | Verb::Reduce { .. } | Verb::Broadcast { .. } => Some((0, 0)),
            Verb::AllToAll | Verb::Send { .. } | Verb::Receive { .. } => None,
        }
    }

    /// Whether what is handed in and what is got share bytes in a way that NCCL does not allow.
    fn overlaps(&self) -> bool {
        let (sent, received) = (self.sent_bytes(), self.received_bytes());
        let apart = self.send + sent <= self.receive || self.receive + received <= self.send;
        let in_place = self
            .in_place_offset()
            .is_some_and(|(into_receive, into_send)| self.send + into_send == self.receive + into_receive);
        sent > 0 && received > 0 && !apart && !in_place
    }

    pub fn accesses(&self) -> Vec<Access> {
        let mut accesses = vec![
            Access::read(self.send, self.sent_bytes()),
            Access::write(self.receive, self.received_bytes()),
        ];
        if let Reduction::Made(RedOp::ScaleAt(address, dtype)) = self.reduction {
            accesses.push(Access::read(address, dtype.bytes()));
        }
        accesses
    }

    pub fn name(&self) -> String {
        match self.verb {
            Verb::AllGather => "ncclAllGather".to_owned(),
            Verb::AllReduce => "ncclAllReduce".to_owned(),
            Verb::ReduceScatter => "ncclReduceScatter".to_owned(),
            Verb::Reduce { root } => format!("ncclReduce to rank {root}"),
            Verb::Broadcast { root } => format!("ncclBroadcast from rank {root}"),
            Verb::AllToAll => "ncclAlltoAll".to_owned(),
            Verb::Send { to } => format!("ncclSend to rank {to}"),
            Verb::Receive { from } => format!("ncclRecv from rank {from}"),
        }
    }

    /// What the ranks of a collective have to agree on.
    pub fn describe(&self) -> String {
        let reduction = match self.verb {
            Verb::AllReduce | Verb::ReduceScatter | Verb::Reduce { .. } => {
                format!(", {}", self.reduction.name())
            }
            _ => String::new(),
        };
        format!("{} of {} {:?}{reduction}", self.name(), self.count, self.dtype)
    }
}

/// The arguments that every call has.
struct Arguments {
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Raw,
    stream: Raw,
}

const SUM: c_int = 0;

fn issue(verb: impl FnOnce(usize) -> Answer<Verb>, arguments: Arguments) -> Code {
    call(|held| {
        let comm = held.find_comm(arguments.comm)?;
        let part = make_part(held, comm, verb, &arguments)?;
        group::check_settled(held, comm, &part.name())?;
        check_buffers(held, &part)?;
        let stream = find_stream(held, arguments.stream)?;
        group::issue(held, stream, part)
    })
}

fn make_part(
    held: &mut Held,
    comm: usize,
    verb: impl FnOnce(usize) -> Answer<Verb>,
    arguments: &Arguments,
) -> Answer<Part> {
    let (life, clique) = (held.nccl.comms[comm].life, held.nccl.comms[comm].clique);
    let name = held.nccl.comms[comm].name.clone();
    if life != Life::Ready {
        return held.nccl_misuse(Code::INVALID_USAGE, format!("a call on {name}, which is {life:?}"));
    }
    let ranks = held.nccl.cliques[clique].size;
    let verb = verb(ranks)?;
    let dtype = Type::find(arguments.dtype).ok_or(Code::INVALID_ARGUMENT)?;
    let reduction = Reduction::find(held, comm, arguments.op)?;
    let reduces = matches!(verb, Verb::AllReduce | Verb::ReduceScatter | Verb::Reduce { .. });
    if reduces && !dtype.is_reducible() {
        return held.nccl_misuse(Code::INVALID_ARGUMENT, format!("a reduction of {dtype:?} on {name}"));
    }
    let rank = held.nccl.comms[comm].rank;
    Ok(Part {
        comm,
        rank,
        ranks,
        verb,
        send: arguments.send,
        receive: arguments.receive,
        count: arguments.count,
        dtype,
        reduction,
    })
}

/// Refuses buffers that overlap, or that lie on another device than the communicator's.
fn check_buffers(held: &mut Held, part: &Part) -> Answer {
    let name = part.name();
    if part.overlaps() {
        let message = format!("{name} on {} with buffers that overlap", held.nccl.comms[part.comm].name);
        return held.nccl_misuse(Code::INVALID_ARGUMENT, message);
    }
    let device = held.nccl.comms[part.comm].device;
    for access in part.accesses().iter().filter(|access| !access.range.is_empty()) {
        let Some(block) = held.heap.holding(access.range.start) else { continue };
        if block.place.device() != Some(device) {
            let message = format!("{name} on device {device} with {}", block.describe());
            return held.nccl_misuse(Code::INVALID_ARGUMENT, message);
        }
    }
    Ok(())
}

fn rank_of(rank: c_int, ranks: usize) -> Answer<usize> {
    usize::try_from(rank).ok().filter(|rank| *rank < ranks).ok_or(Code::INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    issue(|_| Ok(Verb::AllGather), Arguments { send, receive, count, dtype, op: SUM, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    issue(|_| Ok(Verb::AllReduce), Arguments { send, receive, count, dtype, op, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    issue(|_| Ok(Verb::ReduceScatter), Arguments { send, receive, count, dtype, op, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    let verb = |ranks| Ok(Verb::Reduce { root: rank_of(root, ranks)? });
    issue(verb, Arguments { send, receive, count, dtype, op, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    let verb = |ranks| Ok(Verb::Broadcast { root: rank_of(root, ranks)? });
    issue(verb, Arguments { send, receive, count, dtype, op: SUM, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBcast(
    buffer: Raw,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAlltoAll(
    send: Raw,
    receive: Raw,
    count: usize,
    dtype: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    issue(|_| Ok(Verb::AllToAll), Arguments { send, receive, count, dtype, op: SUM, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    send: Raw,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    let verb = |ranks| Ok(Verb::Send { to: rank_of(peer, ranks)? });
    issue(verb, Arguments { send, receive: 0, count, dtype, op: SUM, comm, stream })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    receive: Raw,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Raw,
    stream: Raw,
) -> Code {
    let verb = |ranks| Ok(Verb::Receive { from: rank_of(peer, ranks)? });
    issue(verb, Arguments { send: 0, receive, count, dtype, op: SUM, comm, stream })
}
