//! Memory for sums that are added to their destination, or widened, afterwards.

use std::sync::Arc;

use cudarc::driver as cuda;

use crate::comm::{Allocate, CommError};
use crate::device::cuda::CudaStream;
use crate::device::{ALIGN, Event, Slice, Stream};
use crate::spec::Dtype;

/// A communicator's scratch memory. It grows to what the largest launch needs and stays: to allocate it for each launch
/// would order the launch after what is computed at the time.
#[derive(Default)]
pub(super) struct Scratch {
    /// One a dtype.
    buffers: Vec<Slice>,
    /// What makes them; `None` for the device's own memory.
    allocate: Option<Allocate>,
    /// A graph was captured with it, and has the addresses of its buffers.
    captured: bool,
    /// Buffers that were too small, and that graphs may write to.
    kept: Vec<Slice>,
    /// The stream of its last use, and where that ends.
    used: Option<(Arc<cuda::CudaStream>, Arc<dyn Event>)>,
}

impl Scratch {
    /// None yet; `allocate` makes it.
    pub(super) fn new(allocate: Option<Allocate>) -> Scratch {
        Scratch { allocate, ..Scratch::default() }
    }

    /// What makes the buffers from now on.
    pub(super) fn allocate_by(&mut self, allocate: Allocate) {
        self.allocate = Some(allocate);
    }

    pub(super) fn allocator(&self) -> Option<Allocate> {
        self.allocate.clone()
    }

    /// Slices of these lengths, for the next work on `stream`.
    pub(super) fn take(
        &mut self,
        stream: &CudaStream,
        sizes: &[(Dtype, usize)],
    ) -> Result<Vec<Slice>, CommError> {
        let elsewhere = |(of, _): &&(Arc<cuda::CudaStream>, _)| !Arc::ptr_eq(of, stream.cuda_stream());
        if let Some((_, used)) = self.used.as_ref().filter(elsewhere).filter(|_| !sizes.is_empty()) {
            stream.wait(used)?;
        }
        let mut places = Vec::with_capacity(sizes.len());
        let mut ends: Vec<(Dtype, usize)> = Vec::new();
        for (dtype, len) in sizes {
            let at = ends.iter().position(|(other, _)| other == dtype).unwrap_or_else(|| {
                ends.push((*dtype, 0));
                ends.len() - 1
            });
            places.push(ends[at].1..ends[at].1 + len);
            ends[at].1 += len.next_multiple_of(ALIGN / dtype.size());
        }
        for (dtype, len) in ends {
            self.reserve(stream, dtype, len)?;
        }
        let slice = |((dtype, _), place): (&(Dtype, usize), std::ops::Range<usize>)| {
            let buffer = self.buffers.iter().find(|buffer| buffer.dtype() == *dtype);
            buffer.map(|buffer| buffer.range(place))
        };
        Ok(sizes.iter().zip(places).filter_map(slice).collect())
    }

    fn reserve(&mut self, stream: &CudaStream, dtype: Dtype, len: usize) -> Result<(), CommError> {
        if self.buffers.iter().any(|buffer| buffer.dtype() == dtype && buffer.len() >= len) {
            return Ok(());
        }
        // The smaller one goes first: its memory may be what there is.
        let small = self.buffers.iter().position(|buffer| buffer.dtype() == dtype);
        if let Some(small) = small {
            let small = self.buffers.swap_remove(small);
            if self.captured {
                self.kept.push(small);
            } else {
                // SAFETY: the stream has waited for the last use of scratch memory on another one (`take`).
                unsafe { stream.retire(&[small]) };
            }
        }
        let device = stream.device();
        let buffer = match &self.allocate {
            // SAFETY: the communicator's turn is locked while a launch takes scratch memory and enqueues its work; `take`
            // makes a stream wait for the last use on another one, and ranges of one launch are apart.
            Some(allocate) => unsafe { allocate.allocate(dtype, len) }?,
            // SAFETY: as above.
            None => unsafe { Slice::zeros_in(&device.memory(), dtype, len, None) }?,
        };
        stream.reaches(&[&buffer])?;
        if (buffer.dtype(), buffer.len()) != (dtype, len) {
            let (found, elements) = (buffer.dtype(), buffer.len());
            let message = format!("{elements} elements of {found} were made for {len} of {dtype}");
            return Err(CommError::Memory { device: device.name().to_owned(), message });
        }
        self.buffers.push(buffer);
        stream.wait(&device.compute(stream.name()).record())
    }

    /// It is used by what is captured now.
    pub(super) fn captured(&mut self) {
        self.captured = true;
    }

    /// The work on `stream` is over at `end`.
    pub(super) fn used_until(&mut self, stream: &CudaStream, end: &Arc<dyn Event>) {
        self.used = Some((stream.cuda_stream().clone(), end.clone()));
    }
}
