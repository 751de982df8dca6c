//! Where a parameter's gradient goes: straight into the unit's flat gradient bucket.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::comm::Accumulate;
use crate::device::Slice;

#[derive(Debug)]
struct Open {
    slice: Slice,
    written: bool,
}

/// A handle to a parameter's part of the gradient bucket, for ops that write weight gradients themselves.
///
/// While a backward runs, the engine opens the sink: an op may then write its weight gradient with
/// [`GradSink::accumulate_f32`] and return no gradient for the weight to candle, which saves the zero, the sum and the copy
/// that candle's gradient store would make. A closed sink (a frozen parameter, a tensor that is no parameter, a
/// bucket that is not f32) takes nothing, and the op returns its gradient as usual.
///
/// Tied parameters share one sink.
#[derive(Clone, Debug, Default)]
pub struct GradSink(Arc<Mutex<Option<Open>>>);

impl GradSink {
    /// A sink that takes nothing.
    pub fn closed() -> Self {
        Self::default()
    }

    /// A sink open over a new f32 buffer of `numel` elements, all NaN, and a reader of what it holds: for tests of
    /// ops.
    #[doc(hidden)]
    pub fn open_for_test(numel: usize) -> (Self, impl Fn() -> Vec<f32>) {
        let slice = Slice::zeros(crate::spec::Dtype::F32, numel, None);
        // SAFETY: the buffer was made above and is shared with no one yet.
        unsafe { slice.as_mut_slice::<f32>() }.fill(f32::NAN);
        let sink = Self::closed();
        sink.open(slice.clone(), false);
        let lock = sink.0.clone();
        // SAFETY: writers hold the lock.
        let read = move || {
            lock.lock().as_ref().map(|_| unsafe { slice.as_slice::<f32>() }.to_vec()).unwrap_or_default()
        };
        (sink, read)
    }

    /// True if a call of [`GradSink::accumulate_f32`] would write now.
    pub fn takes_f32(&self) -> bool {
        matches!(&*self.0.lock(), Some(open) if open.slice.dtype() == crate::spec::Dtype::F32)
    }

    /// Calls `write` with the parameter's whole gradient (row-major, `numel` elements of f32) and whether to overwrite it or to
    /// add to it. Returns `false`, without calling, if the sink is closed or its bucket is not f32.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn accumulate_f32<E>(
        &self,
        write: impl FnOnce(&mut [f32], Accumulate) -> Result<(), E>,
    ) -> Result<bool, E> {
        let mut guard = self.0.lock();
        let Some(open) = guard.as_mut().filter(|open| open.slice.dtype() == crate::spec::Dtype::F32) else {
            return Ok(false);
        };
        let mode = if open.written { Accumulate::Add } else { Accumulate::Overwrite };
        // SAFETY: the engine opens the sink over a part of a bucket that belongs to the compute stream (this thread) until
        // it closes the sink, before the bucket is handed to the reduce stream; the lock excludes a second writer.
        write(unsafe { open.slice.as_mut_slice::<f32>() }, mode)?;
        open.written = true;
        Ok(true)
    }

    /// Directs gradients into `slice`; `written` says that it holds a gradient already.
    pub(crate) fn open(&self, slice: Slice, written: bool) {
        *self.0.lock() = Some(Open { slice, written });
    }

    /// Takes the slice out; returns whether a gradient was written.
    pub(crate) fn close(&self) -> Option<(Slice, bool)> {
        self.0.lock().take().map(|open| (open.slice, open.written))
    }
}
