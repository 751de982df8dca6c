//! Enqueues a collective on its stream.

use std::slice::from_ref;

use cudarc::nccl::sys::{ncclComm_t, ncclRedOp_t};

use super::flight::Comm;
use super::group::{Group, scaled_sum};
use super::library::Failure;
use super::scratch::Scratch;
use crate::comm::{Accumulate, CommError, Reduce};
use crate::device::cuda::CudaStream;
use crate::device::{Slice, scale};
use crate::spec::Dtype;

/// One collective's place.
pub(super) struct Launch<'a> {
    pub(super) comm: &'a Comm,
    pub(super) stream: &'a CudaStream,
    pub(super) number: u64,
}

impl Launch<'_> {
    /// Enqueues calls of NCCL that start together, with `slices`.
    pub(super) fn group(
        &self,
        slices: &[&Slice],
        calls: impl FnOnce(&Group) -> Result<(), Failure>,
    ) -> Result<(), CommError> {
        self.stream.try_enqueue(slices, |stream| {
            let start = |comm: ncclComm_t| {
                // SAFETY: the communicator is alive under its lock and is ready, as each call is waited for below. The
                // slices are memory of the device, kept by their use that is noted; they were checked, and all ranks'
                // agree.
                unsafe { Group::start(comm, stream.cu_stream().cast(), calls) }
            };
            match self.comm.handle.with(start) {
                Some(Err(failure)) => Err(self.comm.ledger.give_up(Some(self.number), failure.trouble())),
                // Where it is gone this says why.
                Some(Ok(())) | None => self.comm.settle(Some(self.number)),
            }
        })
    }

    pub(super) fn reduce_scatter<'p>(
        &self,
        parts: impl Iterator<Item = &'p Reduce>,
        ranks: usize,
        scratch: &mut Scratch,
    ) -> Result<(), CommError> {
        let parts: Vec<&Reduce> = parts.collect();
        let apart =
            |part: &Reduce| part.accumulate == Accumulate::Add || part.recv.dtype() != part.send.dtype();
        let sizes = parts.iter().filter(|part| apart(part)).map(|part| (part.send.dtype(), part.recv.len()));
        let mut buffers = scratch.take(self.stream, &sizes.collect::<Vec<_>>())?.into_iter();
        // What NCCL sums into, and the factor that is left for afterwards.
        let sums: Vec<(&Reduce, Slice, Sum)> = parts
            .into_iter()
            .map(|part| match apart(part).then(|| buffers.next()).flatten() {
                Some(buffer) => (part, buffer, Sum { op: ncclRedOp_t::ncclSum, factor: Some(part.scale) }),
                None => (part, part.recv.clone(), Sum::scaled(part.recv.dtype(), ranks, part.scale)),
            })
            .collect();
        let slices: Vec<&Slice> = sums.iter().flat_map(|(part, sum, _)| [&part.send, sum]).collect();
        self.group(&slices, |group| {
            sums.iter().try_for_each(|(part, to, sum)| group.reduce_scatter(&part.send, to, sum.op))
        })?;
        for (part, from, sum) in &sums {
            let Some(factor) = sum.factor else { continue };
            self.stream.sum_ranks(from_ref(from), &part.recv, factor, part.accumulate)?;
        }
        Ok(())
    }

    pub(super) fn all_reduce<'p>(
        &self,
        parts: impl Iterator<Item = &'p (Slice, f32)>,
        ranks: usize,
    ) -> Result<(), CommError> {
        let sums: Vec<(&Slice, Sum)> =
            parts.map(|(data, scale)| (data, Sum::scaled(data.dtype(), ranks, *scale))).collect();
        let slices: Vec<&Slice> = sums.iter().map(|(data, _)| *data).collect();
        self.group(&slices, |group| sums.iter().try_for_each(|(data, sum)| group.all_reduce(data, sum.op)))?;
        for (data, sum) in &sums {
            let Some(factor) = sum.factor else { continue };
            scale(self.stream, data, factor)?;
        }
        Ok(())
    }
}

/// A reduction of NCCL, and a factor of its result if one is left.
struct Sum {
    op: ncclRedOp_t,
    factor: Option<f32>,
}

impl Sum {
    fn scaled(dtype: Dtype, ranks: usize, scale: f32) -> Sum {
        match scaled_sum(dtype, ranks, scale) {
            Some(op) => Sum { op, factor: None },
            None => Sum { op: ncclRedOp_t::ncclSum, factor: Some(scale) },
        }
    }
}
