//! Where a parameter's gradient goes: straight into the unit's flat gradient bucket.

use std::sync::Arc;

use candle_core::{DType, Storage, Tensor};
use half::{bf16, f16};
use parking_lot::Mutex;

use crate::comm::Accumulate;
use crate::device::Slice;
#[cfg(feature = "cuda")]
use crate::device::cuda;
use crate::spec::Dtype;

#[derive(Debug)]
struct Open {
    slice: Slice,
    /// Holds a gradient that the next one is added to.
    written: bool,
    /// A gradient came since it was opened.
    touched: bool,
}

impl Open {
    fn is_host_f32(&self) -> bool {
        self.slice.dtype() == Dtype::F32 && self.slice.block().is_host()
    }
}

/// A handle to a parameter's part of the gradient bucket, for ops that write weight gradients themselves.
///
/// While a backward runs, the engine opens the sink: an op may then write its weight gradient with
/// [`GradSink::accumulate_f32`] and return no gradient for the weight to candle, which saves the zero, the
/// sum and the copy that candle's gradient store would make. A closed sink (a frozen parameter, a tensor that
/// is no parameter, a bucket that is not f32) takes nothing, and the op returns its gradient as usual.
///
/// Tied parameters share one sink.
#[derive(Clone, Debug, Default)]
pub struct GradSink(Arc<Mutex<Option<Open>>>);

impl GradSink {
    /// A sink that takes nothing.
    pub fn closed() -> Self {
        Self::default()
    }

    /// A sink open over a new f32 buffer of `numel` elements, all NaN, and a reader of what it holds: for
    /// tests of ops.
    #[doc(hidden)]
    pub fn open_for_test(numel: usize) -> (Self, impl Fn() -> Vec<f32>) {
        let slice = Slice::zeros(Dtype::F32, numel, None);
        // SAFETY: the buffer was made above and is shared with no one yet.
        unsafe { slice.as_mut_slice::<f32>() }.fill(f32::NAN);
        let sink = Self::closed();
        sink.open(slice.clone(), false);
        let lock = sink.0.clone();
        let read = move || {
            let _writers_wait = lock.lock();
            // SAFETY: writers hold the lock.
            unsafe { slice.as_slice::<f32>() }.to_vec()
        };
        (sink, read)
    }

    /// True if a call of [`GradSink::accumulate_f32`] would write now.
    pub fn takes_f32(&self) -> bool {
        self.0.lock().as_ref().is_some_and(Open::is_host_f32)
    }

    /// Calls `write` with the parameter's whole gradient (row-major, `numel` elements of f32) and whether to
    /// overwrite it or to add to it. Returns `false`, without calling, if the sink is closed or its bucket is
    /// not f32 in host memory.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn accumulate_f32<E>(
        &self,
        write: impl FnOnce(&mut [f32], Accumulate) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut guard = self.0.lock();
        let Some(open) = guard.as_mut().filter(|open| open.is_host_f32()) else {
            return Ok(false);
        };
        let mode = if open.written { Accumulate::Add } else { Accumulate::Overwrite };
        // SAFETY: the engine opens the sink over a part of a bucket that belongs to the compute stream (this
        // thread) until it closes the sink, before the bucket is handed to the reduce stream; the lock
        // excludes a second writer.
        write(unsafe { open.slice.as_mut_slice::<f32>() }, mode)?;
        (open.written, open.touched) = (true, true);
        Ok(true)
    }

    /// The same with the gradient wherever it is, on a device too, and in whatever dtype the bucket has: `write` enqueues
    /// the work on the stream of candle's tensors. Returns `false`, without calling, if the sink is closed.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn accumulate_slice<E>(
        &self,
        write: impl FnOnce(&Slice, Accumulate) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut guard = self.0.lock();
        let Some(open) = guard.as_mut() else { return Ok(false) };
        let mode = if open.written { Accumulate::Add } else { Accumulate::Overwrite };
        write(&open.slice, mode)?;
        (open.written, open.touched) = (true, true);
        Ok(true)
    }

    /// Writes or adds a gradient that candle computed, in whatever float dtype.
    ///
    /// # Errors
    /// If the element counts differ, or candle cannot convert the gradient.
    pub(crate) fn accumulate_tensor(&self, grad: &Tensor) -> candle_core::Result<()> {
        let mut guard = self.0.lock();
        let Some(open) = guard.as_mut() else {
            return Ok(());
        };
        if grad.elem_count() != open.slice.len() {
            candle_core::bail!(
                "a gradient of {:?} for a parameter of {} elements",
                grad.shape(),
                open.slice.len()
            );
        }
        let grad = if open.slice.block().is_host() { grad.to_dtype(DType::F32)? } else { grad.clone() };
        let grad = grad.contiguous()?;
        let (storage, layout) = grad.storage_and_layout();
        let storage = match &*storage {
            Storage::Cpu(storage) if open.slice.block().is_host() => storage,
            #[cfg(feature = "cuda")]
            Storage::Cuda(storage) if !open.slice.block().is_host() => {
                // SAFETY: as in `accumulate_f32`, in the order of candle's stream, which is the compute stream.
                unsafe {
                    cuda::accumulate(storage, layout.start_offset(), &open.slice, open.written)?;
                }
                (open.written, open.touched) = (true, true);
                return Ok(());
            }
            _ => candle_core::bail!("a gradient on another device than its parameter"),
        };
        let start = layout.start_offset();
        let values = &storage.as_slice::<f32>()?[start..start + open.slice.len()];
        let add = open.written;
        match open.slice.dtype() {
            // SAFETY: as in `accumulate_f32`.
            Dtype::F32 => store(unsafe { open.slice.as_mut_slice::<f32>() }, values, add, |x| x, |x| x),
            Dtype::BF16 => {
                // SAFETY: as above.
                store(unsafe { open.slice.as_mut_slice() }, values, add, bf16::to_f32, bf16::from_f32)
            }
            Dtype::F16 => {
                // SAFETY: as above.
                store(unsafe { open.slice.as_mut_slice() }, values, add, f16::to_f32, f16::from_f32)
            }
        }
        (open.written, open.touched) = (true, true);
        Ok(())
    }

    /// True while a backward may write into it.
    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Directs gradients into `slice`; `written` says that it holds a gradient already.
    pub(crate) fn open(&self, slice: Slice, written: bool) {
        *self.0.lock() = Some(Open { slice, written, touched: false });
    }

    /// Stops taking gradients. A slice that holds none is returned, to be zeroed.
    pub(crate) fn close(&self) -> Closed {
        match self.0.lock().take() {
            Some(open) => Closed { touched: open.touched, unwritten: (!open.written).then_some(open.slice) },
            None => Closed { touched: false, unwritten: None },
        }
    }
}

/// What a sink holds when it is closed.
pub(crate) struct Closed {
    /// A gradient came while it was open.
    pub touched: bool,
    /// Its slice, if no gradient ever came.
    pub unwritten: Option<Slice>,
}

fn store<T: Copy>(
    to: &mut [T],
    values: &[f32],
    add: bool,
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    for (to, &value) in to.iter_mut().zip(values) {
        *to = narrow(if add { widen(*to) + value } else { value });
    }
}
