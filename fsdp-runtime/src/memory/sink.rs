//! Where a parameter's gradient goes: straight into the unit's flat gradient bucket.

use std::cell::{RefCell, RefMut};
use std::sync::Arc;

use candle_core::{DType, Storage, Tensor};
use half::{bf16, f16};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};

use crate::comm::Accumulate;
use crate::device::{Backend, Slice, cuda};
use crate::spec::Dtype;

#[derive(Debug)]
struct Open {
    slice: Slice,
    /// It held nothing when it was opened; else a gradient of an earlier microbatch.
    fresh: bool,
    /// Gradients that came since it was opened.
    writes: u64,
}

impl Open {
    /// Holds a gradient that the next one is added to.
    fn is_written(&self) -> bool {
        !self.fresh || self.writes > 0
    }

    fn is_host_f32(&self) -> bool {
        self.slice.dtype() == Dtype::F32 && self.slice.is_host()
    }
}

/// A handle to a parameter's part of the gradient bucket, for ops that write weight gradients themselves.
///
/// While a backward runs, the engine opens the sink: an op may then write its weight gradient with
/// [`GradSink::accumulate_f32`] and return no gradient for the weight to candle, which saves the zero, the
/// sum and the copy that candle's gradient store would make. A closed sink (a frozen parameter, a tensor that
/// is no parameter, a bucket that is not f32) takes nothing, and the op returns its gradient as usual.
///
/// While an op writes into it, the sink takes nothing else from the op's thread, and other threads wait: what the op calls
/// meanwhile finds it closed.
///
/// Tied parameters share one sink.
#[derive(Clone, Debug, Default)]
pub struct GradSink(Arc<Lock>);

/// A thread that holds the lock gets it again, and then finds the cell borrowed.
type Lock = ReentrantMutex<RefCell<Option<Open>>>;

/// What the lock protects, borrowed by the op that writes; `None` if that is an outer call on this thread.
fn borrow<'a>(guard: &'a ReentrantMutexGuard<'_, RefCell<Option<Open>>>) -> Option<RefMut<'a, Option<Open>>> {
    guard.try_borrow_mut().ok()
}

impl GradSink {
    /// A sink that takes nothing.
    pub fn closed() -> Self {
        Self::default()
    }

    /// A sink open over a new f32 buffer of `numel` elements, all NaN, and a reader of what it holds: for
    /// tests of ops.
    #[doc(hidden)]
    pub fn open_for_test(numel: usize) -> (Self, impl Fn() -> Vec<f32>) {
        // SAFETY: it is written here first, and then only by writers that hold the sink's lock, as the reader below does.
        let slice = unsafe { Slice::zeros(Dtype::F32, numel, None) };
        // SAFETY: the buffer was made above and is shared with no one yet.
        unsafe { slice.as_mut_slice::<f32>() }.fill(f32::NAN);
        let sink = Self::closed();
        sink.open(slice.clone(), true);
        let lock = sink.0.clone();
        let read = move || {
            let _writers_wait = lock.lock();
            // SAFETY: writers hold the lock.
            unsafe { slice.as_slice::<f32>() }.to_vec()
        };
        (sink, read)
    }
    /// A sink open over `numel` new elements of `dtype` of a backend, all NaN, and a reader of what it holds: for tests of
    /// ops.
    ///
    /// # Errors
    /// Those of the device.
    #[doc(hidden)]
    pub fn open_on_device_for_test(
        backend: Arc<dyn Backend>,
        dtype: Dtype,
        numel: usize,
    ) -> candle_core::Result<(Self, impl Fn() -> candle_core::Result<Vec<f32>>)> {
        // SAFETY: all work on it is on the compute stream, which is that of candle's tensors: the copies here, and what
        // writers enqueue by the contract of `accumulate_slice`.
        let slice = unsafe { Slice::zeros_in(&*backend.memory(), dtype, numel, None) };
        let slice = slice.map_err(candle_core::Error::wrap)?;
        // All ones is a NaN of each dtype.
        backend.upload(&vec![0xff; slice.bytes()], &slice).map_err(candle_core::Error::wrap)?;
        let sink = Self::closed();
        sink.open(slice.clone(), true);
        let read = move || {
            let mut bytes = vec![0; slice.bytes()];
            backend.download(&slice, &mut bytes).map_err(candle_core::Error::wrap)?;
            let pairs = || bytes.chunks_exact(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]]));
            Ok(match slice.dtype() {
                Dtype::F32 => bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
                Dtype::BF16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
                Dtype::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
            })
        };
        Ok((sink, read))
    }

    /// True if a call of [`GradSink::accumulate_f32`] would write now.
    pub fn takes_f32(&self) -> bool {
        let guard = self.0.lock();
        borrow(&guard).is_some_and(|open| open.as_ref().is_some_and(Open::is_host_f32))
    }

    /// Calls `write` with the parameter's whole gradient (row-major, `numel` elements of f32) and whether to
    /// overwrite it or to add to it. Returns `false`, without calling, if the sink is closed, its bucket is
    /// not f32 in host memory, or this is called inside the `write` of another call.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn accumulate_f32<E>(
        &self,
        write: impl FnOnce(&mut [f32], Accumulate) -> Result<(), E>,
    ) -> Result<bool, E> {
        let guard = self.0.lock();
        let Some(mut open) = borrow(&guard) else { return Ok(false) };
        let Some(open) = open.as_mut().filter(|open| open.is_host_f32()) else {
            return Ok(false);
        };
        let mode = if open.is_written() { Accumulate::Add } else { Accumulate::Overwrite };
        // SAFETY: the engine opens the sink over a part of a bucket that only writers of this sink use until it has closed
        // it, which is before the bucket is given to the reduce stream. Other threads wait for the lock, and for this one
        // the cell is borrowed: neither writes a second time nor closes the sink while the reference lives.
        write(unsafe { open.slice.as_mut_slice::<f32>() }, mode)?;
        open.writes += 1;
        Ok(true)
    }

    /// As [`GradSink::accumulate_f32`], with the gradient wherever it is, on a device too, and in whatever dtype the bucket
    /// has. Returns `false`, without calling, if the sink is closed or being written.
    ///
    /// # Errors
    /// Those of `write`.
    ///
    /// # Safety
    /// `write` uses the slice in the order of the stream of candle's tensors only, in work that it has enqueued when it
    /// returns, and keeps no clone of it.
    pub unsafe fn accumulate_slice<E>(
        &self,
        write: impl FnOnce(&Slice, Accumulate) -> Result<(), E>,
    ) -> Result<bool, E> {
        let guard = self.0.lock();
        let Some(mut open) = borrow(&guard) else { return Ok(false) };
        let Some(open) = open.as_mut() else { return Ok(false) };
        let mode = if open.is_written() { Accumulate::Add } else { Accumulate::Overwrite };
        write(&open.slice, mode)?;
        open.writes += 1;
        Ok(true)
    }

    /// Writes or adds a gradient that candle computed, in whatever float dtype.
    ///
    /// # Errors
    /// If the element counts differ, or candle cannot convert the gradient.
    pub(crate) fn accumulate_tensor(&self, grad: &Tensor) -> candle_core::Result<()> {
        let guard = self.0.lock();
        let Some(mut open) = borrow(&guard) else {
            candle_core::bail!("a backward was run by an op that writes a gradient of the same backward")
        };
        let Some(open) = open.as_mut() else { return Ok(()) };
        if grad.elem_count() != open.slice.len() {
            candle_core::bail!(
                "a gradient of {:?} for a parameter of {} elements",
                grad.shape(),
                open.slice.len()
            );
        }
        let grad = if open.slice.is_host() { grad.to_dtype(DType::F32)? } else { grad.clone() };
        let grad = grad.contiguous()?;
        let (storage, layout) = grad.storage_and_layout();
        let storage = match &*storage {
            Storage::Cpu(storage) if open.slice.is_host() => storage,
            Storage::Cuda(storage) if !open.slice.is_host() => {
                // SAFETY: as in `accumulate_f32`, in the order of candle's stream, which is the compute stream.
                unsafe {
                    cuda::accumulate(storage, layout.start_offset(), &open.slice, open.is_written())?;
                }
                open.writes += 1;
                return Ok(());
            }
            _ => candle_core::bail!("a gradient on another device than its parameter"),
        };
        let start = layout.start_offset();
        let values = &storage.as_slice::<f32>()?[start..start + open.slice.len()];
        let add = open.is_written();
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
        open.writes += 1;
        Ok(())
    }

    /// Gradients that came since it was opened; 0 if it is closed.
    pub(crate) fn writes(&self) -> u64 {
        let guard = self.0.lock();
        borrow(&guard).and_then(|open| open.as_ref().map(|open| open.writes)).unwrap_or(0)
    }

    /// True while a backward may write into it.
    pub(crate) fn is_open(&self) -> bool {
        let guard = self.0.lock();
        borrow(&guard).is_none_or(|open| open.is_some())
    }

    /// A gradient came since it was opened.
    pub(crate) fn is_touched(&self) -> bool {
        self.0.lock().borrow().as_ref().is_some_and(|open| open.writes > 0)
    }

    /// Directs gradients into `slice`, which is `fresh` unless it holds a gradient already.
    ///
    /// # Panics
    /// If it is called by an op that writes into the sink.
    pub(crate) fn open(&self, slice: Slice, fresh: bool) {
        *self.0.lock().borrow_mut() = Some(Open { slice, fresh, writes: 0 });
    }

    /// Stops taking gradients. A slice that holds none is returned, to be zeroed.
    ///
    /// # Panics
    /// If it is called by an op that writes into the sink.
    pub(crate) fn close(&self) -> Closed {
        match self.0.lock().take() {
            Some(open) => {
                Closed { touched: open.writes > 0, unwritten: (!open.is_written()).then_some(open.slice) }
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradient of an op that asks the sink again while it writes.
    fn nested(ask: impl Fn(&GradSink) -> bool) -> (bool, Vec<f32>) {
        let (sink, read) = GradSink::open_for_test(2);
        let mut answer = true;
        let write = |grad: &mut [f32], _| -> Result<(), ()> {
            answer = ask(&sink);
            grad.fill(3.0);
            Ok(())
        };
        assert_eq!(sink.accumulate_f32(write), Ok(true));
        assert!(sink.takes_f32());
        (answer, read())
    }

    #[test]
    fn a_sink_that_is_being_written_takes_nothing_else_on_that_thread() {
        let expected = (false, vec![3.0, 3.0]);
        assert_eq!(nested(GradSink::takes_f32), expected);
        assert_eq!(nested(|sink| sink.accumulate_f32(|_, _| Err(())) == Ok(true)), expected);
        // SAFETY: the closure is not called.
        assert_eq!(nested(|sink| unsafe { sink.accumulate_slice(|_, _| Err(())) } == Ok(true)), expected);
        let tensor = Tensor::new(&[1f32, 1.0], &candle_core::Device::Cpu).unwrap();
        assert_eq!(nested(|sink| sink.accumulate_tensor(&tensor).is_ok()), expected);
        assert_eq!(nested(|sink| !sink.is_open()), expected);
    }

    #[test]
    fn threads_write_a_sink_one_after_the_other() {
        let (sink, read) = GradSink::open_for_test(1);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let write = |grad: &mut [f32], mode| -> Result<(), ()> {
                        grad[0] = if mode == Accumulate::Overwrite { 1.0 } else { grad[0] + 1.0 };
                        Ok(())
                    };
                    assert_eq!(sink.accumulate_f32(write), Ok(true));
                });
            }
        });
        assert_eq!(read(), [4.0]);
    }
}
