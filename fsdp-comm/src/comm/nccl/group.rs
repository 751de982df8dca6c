//! Groups of NCCL calls, which start together.

use std::ffi::c_void;

use cudarc::nccl::sys::{self, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};
use half::{bf16, f16};

use super::library::{Failure, data_type, outcome};
use crate::comm::arguments::share;
use crate::comm::{Exchange, Gather};
use crate::device::Slice;
use crate::spec::Dtype;

/// Where calls go.
#[derive(Clone, Copy)]
pub(super) struct Group {
    comm: ncclComm_t,
    stream: cudaStream_t,
}

impl Group {
    /// Makes the calls of `calls` start together on `stream`.
    ///
    /// # Safety
    /// `comm` is alive and ready, and `stream` of its device. The slices of the calls are memory of this device that
    /// stays until the stream is done with them; their lengths and dtypes fit, and no two overlap but in place.
    pub(super) unsafe fn start(
        comm: ncclComm_t,
        stream: cudaStream_t,
        calls: impl FnOnce(&Group) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        // SAFETY: it begins a group of this thread, which is ended below.
        outcome("ncclGroupStart", comm, unsafe { sys::ncclGroupStart() })?;
        let called = calls(&Group { comm, stream });
        // SAFETY: the group was begun above.
        let ended = outcome("ncclGroupEnd", comm, unsafe { sys::ncclGroupEnd() });
        called.and(ended)
    }

    pub(super) fn all_gather(&self, part: &Gather) -> Result<(), Failure> {
        let (send, count, dtype) = of(&part.send);
        let recv = part.recv.as_ptr().cast();
        // SAFETY: what `start` asks for.
        let code = unsafe { sys::ncclAllGather(send, recv, count, dtype, self.comm, self.stream) };
        outcome("ncclAllGather", self.comm, code)
    }

    /// Reduces `send` to `recv`, which has its dtype.
    pub(super) fn reduce_scatter(&self, send: &Slice, recv: &Slice, op: ncclRedOp_t) -> Result<(), Failure> {
        let (recv, count, dtype) = of(recv);
        let send = send.as_ptr().cast();
        // SAFETY: what `start` asks for.
        let code = unsafe { sys::ncclReduceScatter(send, recv, count, dtype, op, self.comm, self.stream) };
        outcome("ncclReduceScatter", self.comm, code)
    }

    pub(super) fn all_reduce(&self, data: &Slice, op: ncclRedOp_t) -> Result<(), Failure> {
        let (data, count, dtype) = of(data);
        // SAFETY: what `start` asks for.
        let code = unsafe { sys::ncclAllReduce(data, data, count, dtype, op, self.comm, self.stream) };
        outcome("ncclAllReduce", self.comm, code)
    }

    pub(super) fn send(&self, data: &Slice, peer: usize) -> Result<(), Failure> {
        let (data, count, dtype) = of(data);
        // SAFETY: what `start` asks for.
        let code = unsafe { sys::ncclSend(data, count, dtype, peer as i32, self.comm, self.stream) };
        outcome("ncclSend", self.comm, code)
    }

    pub(super) fn receive(&self, data: &Slice, peer: usize) -> Result<(), Failure> {
        let (data, count, dtype) = of(data);
        // SAFETY: what `start` asks for.
        let code = unsafe { sys::ncclRecv(data, count, dtype, peer as i32, self.comm, self.stream) };
        outcome("ncclRecv", self.comm, code)
    }

    /// By messages, which every version of NCCL has.
    pub(super) fn all_to_all(&self, part: &Exchange, ranks: usize) -> Result<(), Failure> {
        (0..ranks).try_for_each(|peer| {
            self.send(&share(&part.send, peer, ranks), peer)?;
            self.receive(&share(&part.recv, peer, ranks), peer)
        })
    }

    pub(super) fn broadcast(&self, data: &Slice, root: usize) -> Result<(), Failure> {
        let (data, count, dtype) = of(data);
        // SAFETY: what `start` asks for.
        let code =
            unsafe { sys::ncclBroadcast(data, data, count, dtype, root as i32, self.comm, self.stream) };
        outcome("ncclBroadcast", self.comm, code)
    }
}

fn of(slice: &Slice) -> (*mut c_void, usize, ncclDataType_t) {
    (slice.as_ptr().cast(), slice.len(), data_type(slice.dtype()))
}

/// The reduction of NCCL that is a sum over `ranks`, scaled by `scale`; `None` if there is none.
///
/// A sum of values that were scaled by any factor (`ncclRedOpCreatePreMulSum`) is not used: its number is none of those
/// that cudarc's type for reductions may hold. Nor is an average whose factor NCCL would round to 16 bits.
pub(super) fn scaled_sum(dtype: Dtype, ranks: usize, scale: f32) -> Option<ncclRedOp_t> {
    if scale == 1.0 {
        return Some(ncclRedOp_t::ncclSum);
    }
    let exact = match dtype {
        Dtype::F32 => true,
        Dtype::BF16 => bf16::from_f32(scale).to_f32() == scale,
        Dtype::F16 => f16::from_f32(scale).to_f32() == scale,
    };
    (exact && scale == 1.0 / ranks as f32).then_some(ncclRedOp_t::ncclAvg)
}
