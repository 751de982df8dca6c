//! Checks the arguments of collectives, for all communicators.

use super::call::Call;
use super::{CommError, Exchange, Gather, Reduce};
use crate::device::Slice;
use crate::spec::Dtype;

/// A rank, as its calls are checked.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    /// In the world: it is named in errors.
    pub(super) rank: usize,
    /// In the group.
    pub(super) index: usize,
    /// Ranks of the group.
    pub(super) size: usize,
}

impl Caller {
    pub(super) fn invalid(&self, call: &Call, message: String) -> CommError {
        CommError::Invalid { rank: self.rank, message: format!("{call}: {message}") }
    }

    /// Checks an all-gather; gives the bytes that come from other ranks.
    pub(super) fn all_gather(&self, call: &Call, parts: &[Gather]) -> Result<usize, CommError> {
        for (i, part) in parts.iter().enumerate() {
            if part.send.dtype() != part.recv.dtype() {
                let (send, recv) = (part.send.dtype(), part.recv.dtype());
                return Err(self.invalid(call, format!("part {i}: send is {send}, but recv is {recv}")));
            }
            self.share(call, i, (&part.recv, "recv"), (&part.send, "send"))?;
        }
        self.apart(call, parts.iter().map(|part| (&part.recv, Some(&part.send))))?;
        Ok(parts.iter().map(|part| part.send.bytes()).sum::<usize>() * (self.size - 1))
    }

    /// The same for a reduce-scatter.
    pub(super) fn reduce_scatter(&self, call: &Call, parts: &[Reduce]) -> Result<usize, CommError> {
        for (i, part) in parts.iter().enumerate() {
            let (send, recv) = (part.send.dtype(), part.recv.dtype());
            if recv != send && recv != Dtype::F32 {
                let or_wider = if send == Dtype::F32 { "only" } else { "or f32" };
                let message = format!(
                    "part {i}: a sum of {send} can be stored as {send} {or_wider}, but recv is {recv}"
                );
                return Err(self.invalid(call, message));
            }
            self.share(call, i, (&part.send, "send"), (&part.recv, "recv"))?;
        }
        self.apart(call, parts.iter().map(|part| (&part.recv, Some(&part.send))))?;
        Ok(parts.iter().map(|part| part.send.bytes() / self.size).sum::<usize>() * (self.size - 1))
    }

    /// Checks an all-reduce; gives the bytes that come from other ranks: this rank's share of each part from every peer for
    /// the sum, and the peers' shares of the result.
    pub(super) fn all_reduce(&self, call: &Call, parts: &[(Slice, f32)]) -> Result<usize, CommError> {
        self.apart(call, parts.iter().map(|(data, _)| (data, None)))?;
        let from_peers = |(data, _): &(Slice, f32)| {
            let own = share(data, self.index, self.size).bytes();
            own * (self.size - 1) + data.bytes() - own
        };
        Ok(parts.iter().map(from_peers).sum())
    }

    /// The same for a broadcast, which is checked.
    pub(super) fn broadcast(&self, call: &Call, data: &Slice, root: usize) -> Result<usize, CommError> {
        if root >= self.size {
            return Err(self.invalid(call, format!("there is no rank {root} among {} ranks", self.size)));
        }
        Ok(if self.index == root { 0 } else { data.bytes() })
    }

    /// The same for an all-to-all, which is checked.
    pub(super) fn all_to_all(&self, call: &Call, parts: &[Exchange]) -> Result<usize, CommError> {
        let Caller { index, size, .. } = *self;
        for (i, Exchange { send, recv }) in parts.iter().enumerate() {
            let wrong = if send.dtype() != recv.dtype() {
                format!("send is {}, but recv is {}", send.dtype(), recv.dtype())
            } else if send.len() != recv.len() {
                format!("recv has {} elements, expected {}, as many as send", recv.len(), send.len())
            } else if !send.len().is_multiple_of(size) {
                format!("{} elements cannot be cut into {size} equal chunks, one a rank", send.len())
            } else if send.overlaps(recv) {
                "send and recv overlap, expected memory apart".to_owned()
            } else {
                continue;
            };
            return Err(self.invalid(call, format!("part {i}: {wrong}")));
        }
        self.apart(call, parts.iter().map(|part| (&part.recv, Some(&part.send))))?;
        let from_peers = |part: &Exchange| part.recv.bytes() - share(&part.recv, index, size).bytes();
        Ok(parts.iter().map(from_peers).sum())
    }

    /// Checks the ranks of a group that is to be made of this one.
    pub(super) fn split(&self, name: &str, ranks: &[usize]) -> Result<(), CommError> {
        let Caller { rank, index, size } = self;
        let wrong = if !ranks.contains(index) {
            format!("it lacks rank {index}, which asks for it")
        } else if let Some(unknown) = ranks.iter().find(|rank| *rank >= size) {
            format!("there is no rank {unknown} among {size} ranks")
        } else if let Some((_, twice)) = ranks.iter().enumerate().find(|(i, rank)| ranks[..*i].contains(rank))
        {
            format!("it names rank {twice} twice")
        } else {
            return Ok(());
        };
        let message = format!("`{name}` cannot be a group of the ranks {ranks:?}: {wrong}");
        Err(CommError::Invalid { rank: *rank, message })
    }

    /// Checks that what a part writes, the first of its slices, is apart from the slices of all other parts.
    fn apart<'a>(
        &self,
        call: &Call,
        parts: impl Iterator<Item = (&'a Slice, Option<&'a Slice>)> + Clone,
    ) -> Result<(), CommError> {
        for (i, (written, _)) in parts.clone().enumerate() {
            let others = parts.clone().enumerate().filter(|(other, _)| *other != i);
            for (other, (first, second)) in others {
                if [Some(first), second].into_iter().flatten().any(|slice| slice.overlaps(written)) {
                    let message = format!("part {i} writes memory that part {other} uses too");
                    return Err(self.invalid(call, message));
                }
            }
        }
        Ok(())
    }

    /// Checks that `part`, the rank's share of `whole`, is `1 / size` of it and lies nowhere in it but in its
    /// place.
    fn share(
        &self,
        call: &Call,
        i: usize,
        (whole, whole_name): (&Slice, &str),
        (part, part_name): (&Slice, &str),
    ) -> Result<(), CommError> {
        let Caller { index, size, .. } = *self;
        if size.checked_mul(part.len()) != Some(whole.len()) {
            let message = format!(
                "part {i}: {whole_name} has {} elements, expected {size} ranks x {} of {part_name}",
                whole.len(),
                part.len()
            );
            return Err(self.invalid(call, message));
        }
        if whole.overlaps(part) && !same_place(&share(whole, index, size), part) {
            let message = format!(
                "part {i}: {part_name} overlaps {whole_name} without being its part of rank {index}, elements {:?}",
                index * part.len()..(index + 1) * part.len()
            );
            return Err(self.invalid(call, message));
        }
        Ok(())
    }
}

/// The part of `whole` that belongs to `rank`: all have the same length, or differ by one element.
pub(super) fn share(whole: &Slice, rank: usize, size: usize) -> Slice {
    whole.range(rank * whole.len() / size..(rank + 1) * whole.len() / size)
}

pub(super) fn same_place(a: &Slice, b: &Slice) -> bool {
    a.same_place(b)
}
