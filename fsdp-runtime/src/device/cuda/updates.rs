//! AdamW and norms by kernels.

use std::collections::HashMap;
use std::sync::Arc;

use fsdp_comm::device::cuda::{CudaStream, kernel_dtype};
use fsdp_kernels::{AdamWArgs, AdamWSegment, Args, SquaredNormArgs, SumArgs};
use parking_lot::Mutex;

use crate::comm::CommError;
use crate::device::{Event, Slice, Stream};
use crate::optim::{AdamWRun, AdamWScalars, Kernels};
use crate::spec::Dtype;

/// The kernels of one device, in the order of its compute stream.
pub(super) struct CudaKernels {
    stream: Arc<CudaStream>,
    /// The tables of scalars that steps have been taken with, by the address of the weights.
    tables: Mutex<HashMap<u64, Table>>,
    steps: Mutex<Steps>,
    /// Page-locked memory of a total on its way to the host; made when first needed.
    total: Mutex<Option<Slice>>,
}

/// Scalars of a step, in page-locked memory and on the device: the factor of the gradients, then the runs.
///
/// The host writes the first and the device copies it to the second, so that a step that was captured in a graph takes
/// the scalars that the host has written before its launch.
struct Table {
    host: Slice,
    device: Slice,
    /// The copy of the last step.
    copied: Option<Arc<dyn Event>>,
    /// The host has written scalars that are not copied yet.
    fresh: bool,
}

/// Bytes before the first run: the factor, at an alignment of 8.
const HEAD: usize = 8;

impl Table {
    fn new(stream: &CudaStream, runs: usize) -> Result<Table, CommError> {
        let elements = (HEAD + runs * size_of::<AdamWSegment>()) / 4;
        // SAFETY: the host writes it when the last copy from it is done (`write`).
        let host = unsafe { Slice::zeros_in(&stream.device().pinned(), Dtype::F32, elements, None) }?;
        // SAFETY: copies write it and kernels read it, all on the compute stream.
        let device = unsafe { Slice::zeros_in(&stream.device().memory(), Dtype::F32, elements, None) }?;
        Ok(Table { host, device, copied: None, fresh: false })
    }

    fn write(&mut self, runs: &[AdamWRun], grad_scale: f32) -> Result<(), CommError> {
        if let Some(copied) = self.copied.take() {
            copied.synchronize()?;
        }
        self.fresh = true;
        // SAFETY: the last copy is done, and the table is borrowed mutably.
        let bytes = unsafe { self.host.as_mut_bytes() };
        bytes[..4].copy_from_slice(&grad_scale.to_ne_bytes());
        for (run, bytes) in runs.iter().zip(bytes[HEAD..].chunks_exact_mut(size_of::<AdamWSegment>())) {
            let AdamWScalars {
                decay,
                beta1,
                one_minus_beta1,
                beta2,
                one_minus_beta2,
                step_size,
                correction2,
                eps,
            } = run.step;
            let (begin, len) = (run.elements.start as u64, run.elements.len() as u64);
            let scalars =
                [decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, correction2, eps];
            bytes[..8].copy_from_slice(&begin.to_ne_bytes());
            bytes[8..16].copy_from_slice(&len.to_ne_bytes());
            bytes[16..].copy_from_slice(bytemuck::cast_slice(&scalars));
        }
        Ok(())
    }
}

impl Table {
    fn copy(&mut self, stream: &CudaStream) -> Result<(), CommError> {
        if std::mem::take(&mut self.fresh) {
            stream.copy(&self.host, &self.device)?;
            self.copied = Some(stream.record());
        }
        Ok(())
    }
}

/// What a call of [`Kernels::adamw`] does beside writing the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Steps {
    /// Copies the table to the device and launches the kernel.
    #[default]
    Taken,
    /// Launches the kernel, to be captured.
    Captured,
    /// Nothing: the kernel is in a graph.
    Replayed,
}

impl CudaKernels {
    pub(super) fn new(stream: Arc<CudaStream>) -> CudaKernels {
        CudaKernels { stream, tables: Mutex::default(), steps: Mutex::default(), total: Mutex::default() }
    }

    /// Sets what calls of [`Kernels::adamw`] do. Before a capture the device has done all that it was given.
    pub(super) fn set_steps(&self, steps: Steps) {
        if steps == Steps::Captured {
            self.tables.lock().values_mut().for_each(|table| table.copied = None);
        }
        *self.steps.lock() = steps;
    }

    /// Copies the tables that were written and not copied.
    pub(super) fn copy_tables(&self) -> Result<(), CommError> {
        self.tables.lock().values_mut().try_for_each(|table| table.copy(&self.stream))
    }

    /// The f64 in two elements of f32 of the device. Blocks until it is there.
    fn read(&self, value: &Slice) -> Result<f64, CommError> {
        let mut held = self.total.lock();
        let to = match &*held {
            Some(to) => to.clone(),
            None => {
                // SAFETY: it is used under the lock only, and each copy to it is waited for there.
                let to = unsafe { Slice::zeros_in(&self.stream.device().pinned(), Dtype::F32, 2, None) }?;
                held.insert(to).clone()
            }
        };
        self.stream.copy(value, &to)?;
        self.stream.record().synchronize()?;
        let mut total = [0; 8];
        // SAFETY: the copy to it is done, as the event says, and the lock is held.
        total.copy_from_slice(unsafe { to.as_bytes() });
        Ok(f64::from_ne_bytes(total))
    }
}

const _: () = assert!(size_of::<AdamWSegment>() == 48, "two u64 and eight f32, as a table is written");

// SAFETY: `adamw` checks that its slices are as long and its runs inside of them; `squared_norm` reads whole slices. What
// else they write is of their own.
unsafe impl Kernels for CudaKernels {
    fn adamw(
        &self,
        runs: &[AdamWRun],
        grad_scale: f32,
        weights: &Slice,
        grads: &Slice,
        moments: [&Slice; 2],
    ) -> Result<(), CommError> {
        let Some(longest) = runs.iter().map(|run| run.elements.len()).max() else { return Ok(()) };
        let stream = &*self.stream;
        fits(runs, weights, grads, moments)
            .map_err(|message| CommError::Stream { stream: stream.name().to_owned(), message })?;
        stream.reaches(&[weights, grads, moments[0], moments[1]])?;
        let mut tables = self.tables.lock();
        let table = match tables.entry(address(weights)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Table::new(stream, runs.len())?),
        };
        if table.host.bytes() < HEAD + std::mem::size_of_val(runs) {
            *table = Table::new(stream, runs.len())?;
        }
        table.write(runs, grad_scale)?;
        match *self.steps.lock() {
            Steps::Taken => table.copy(stream)?,
            Steps::Captured => {}
            Steps::Replayed => return Ok(()),
        }
        let head = address(&table.device);
        let wide = weights.dtype() == Dtype::F32;
        let args = AdamWArgs {
            main: if wide { address(weights) } else { 0 },
            model: if wide { 0 } else { address(weights) },
            grads: address(grads),
            exp_avg: address(moments[0]),
            exp_avg_sq: address(moments[1]),
            segments: head + HEAD as u64,
            grad_scale: head,
            len: weights.len() as u64,
            segment_count: runs.len() as u32,
            scale: 1.0,
        };
        let name = fsdp_kernels::adamw(dtype(grads), dtype(weights));
        let launch = args.launch_for(longest as u64, stream.max_blocks());
        let slices = [weights, grads, moments[0], moments[1], &table.device];
        // SAFETY: the arguments are of this kernel for these dtypes; the slices are of the device, as long as the weights,
        // and the runs inside of them, as checked above. The table has room for the runs.
        unsafe { stream.launch(name, &args, launch, &slices) }
    }

    fn squared_norm(&self, slices: &[Slice]) -> Result<f64, CommError> {
        let stream = &*self.stream;
        let partials = |slice: &Slice| SquaredNormArgs::partials_for(slice.len() as u64) as usize;
        let count: usize = slices.iter().map(partials).sum();
        // f64 values, in memory that is counted in f32: the total, then the partial sums.
        // SAFETY: it stays in this call, whose kernels and copy use it on the compute stream.
        let sums = unsafe { Slice::zeros_in(&stream.device().memory(), Dtype::F32, 2 * (1 + count), None) }?;
        let blocks = stream.max_blocks();
        stream.reaches(&slices.iter().collect::<Vec<_>>())?;
        let values = address(&sums) + 8;
        let mut next = values;
        for slice in slices {
            let args = SquaredNormArgs { values: address(slice), partials: next, len: slice.len() as u64 };
            next += 8 * partials(slice) as u64;
            let name = fsdp_kernels::squared_norm(dtype(slice));
            // SAFETY: the arguments are of this kernel; `sums` has room for the total and as many partial sums as were
            // counted, by the same function.
            unsafe { stream.launch(name, &args, args.launch(blocks), &[slice, &sums])? };
        }
        let args = SumArgs { values, total: address(&sums), rounded: 0, len: count as u64, divisor: 1.0 };
        // SAFETY: the arguments are of this kernel; it reads what was written before in stream order.
        unsafe { stream.launch(fsdp_kernels::sum_f64(), &args, args.launch(blocks), &[&sums])? };
        self.read(&sums.range(0..2))
    }
}

/// Says what does not fit of the arguments of a step.
fn fits(runs: &[AdamWRun], weights: &Slice, grads: &Slice, moments: [&Slice; 2]) -> Result<(), String> {
    let len = weights.len();
    if let Some(other) =
        [grads, moments[0], moments[1]].iter().map(|slice| slice.len()).find(|other| *other != len)
    {
        return Err(format!(
            "a step of AdamW on {len} weights with gradients or moments of {other} elements"
        ));
    }
    if moments.iter().any(|moment| moment.dtype() != Dtype::F32) {
        return Err(format!("a step of AdamW with moments of {}, expected f32", moments[0].dtype()));
    }
    let outside = runs.iter().map(|run| &run.elements).find(|run| run.start > run.end || run.end > len);
    outside.map_or(Ok(()), |run| Err(format!("a step of AdamW on the elements {run:?} of {len}")))
}

/// The driver's pointer to a slice.
fn address(slice: &Slice) -> u64 {
    slice.as_ptr().addr() as u64
}

fn dtype(slice: &Slice) -> fsdp_kernels::Dtype {
    kernel_dtype(slice.dtype())
}
