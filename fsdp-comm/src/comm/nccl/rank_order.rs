//! Sums in rank order, each of which one rank takes.
//!
//! Every rank sends each of the others its share of what it brings, and sums the shares that it gets: as many bytes over
//! the links as NCCL's own reduce-scatter, and the bits of ranks that are threads.

use super::launch::Launch;
use super::scratch::Scratch;
use crate::comm::arguments::{Caller, share};
use crate::comm::{Accumulate, CommError, Reduce};
use crate::device::Slice;

/// A sum that this rank takes.
struct Sum {
    /// What this rank brings to all shares.
    send: Slice,
    /// Where its own share goes.
    recv: Slice,
    scale: f32,
    accumulate: Accumulate,
}

impl Launch<'_> {
    pub(super) fn reduce_scatter_in_order<'p>(
        &self,
        parts: impl Iterator<Item = &'p Reduce>,
        caller: Caller,
        scratch: &mut Scratch,
    ) -> Result<(), CommError> {
        let sum = |part: &Reduce| {
            let Reduce { send, recv, scale, accumulate } = part.clone();
            Sum { send, recv, scale, accumulate }
        };
        self.sum_in_order(&parts.map(sum).collect::<Vec<_>>(), caller, scratch)
    }

    pub(super) fn all_reduce_in_order<'p>(
        &self,
        parts: impl Iterator<Item = &'p (Slice, f32)>,
        caller: Caller,
        scratch: &mut Scratch,
    ) -> Result<(), CommError> {
        let Caller { index, size, .. } = caller;
        let sum = |(data, scale): &(Slice, f32)| {
            let recv = share(data, index, size);
            Sum { send: data.clone(), recv, scale: *scale, accumulate: Accumulate::Overwrite }
        };
        let sums: Vec<Sum> = parts.map(sum).collect();
        self.sum_in_order(&sums, caller, scratch)?;
        let slices: Vec<&Slice> = sums.iter().map(|sum| &sum.send).collect();
        self.group(&slices, |group| {
            for Sum { send: data, recv: own, .. } in &sums {
                for peer in (0..size).filter(|peer| *peer != index) {
                    let theirs = share(data, peer, size);
                    if !own.is_empty() {
                        group.send(own, peer)?;
                    }
                    if !theirs.is_empty() {
                        group.receive(&theirs, peer)?;
                    }
                }
            }
            Ok(())
        })
    }

    fn sum_in_order(&self, sums: &[Sum], caller: Caller, scratch: &mut Scratch) -> Result<(), CommError> {
        let Caller { index, size, .. } = caller;
        let sizes = sums.iter().map(|sum| (sum.send.dtype(), sum.recv.len() * (size - 1)));
        let buffers = scratch.take(self.stream, &sizes.collect::<Vec<_>>())?;
        // What each rank brings to this rank's share.
        let brought = |(sum, buffer): (&Sum, &Slice), rank: usize| {
            let len = sum.recv.len();
            let place = if rank < index { rank } else { rank.saturating_sub(1) };
            if rank == index {
                share(&sum.send, index, size)
            } else {
                buffer.range(place * len..(place + 1) * len)
            }
        };
        let slices: Vec<&Slice> = sums.iter().map(|sum| &sum.send).chain(&buffers).collect();
        self.group(&slices, |group| {
            for (sum, buffer) in sums.iter().zip(&buffers) {
                for peer in (0..size).filter(|peer| *peer != index) {
                    let theirs = share(&sum.send, peer, size);
                    if !theirs.is_empty() {
                        group.send(&theirs, peer)?;
                    }
                    if !sum.recv.is_empty() {
                        group.receive(&brought((sum, buffer), peer), peer)?;
                    }
                }
            }
            Ok(())
        })?;
        for (sum, buffer) in sums.iter().zip(&buffers).filter(|(sum, _)| !sum.recv.is_empty()) {
            let sources: Vec<Slice> = (0..size).map(|rank| brought((sum, buffer), rank)).collect();
            // After the exchange in the order of the stream. Where `recv` is in `send` it is this rank's share of it.
            self.stream.sum_ranks(&sources, &sum.recv, sum.scale, sum.accumulate)?;
        }
        Ok(())
    }
}
