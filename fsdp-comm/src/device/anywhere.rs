//! Gives code of the host access to elements of flat buffers on any device.

use super::{Backend, Slice, read_f32, update_f32};
use crate::error::CommError;
use crate::spec::Dtype;

/// Reads elements as f32, as [`read_f32`] does, from memory anywhere. Elements on a device are copied to the host first, in the order
/// of the compute stream.
///
/// # Errors
/// Those of [`Backend::download`].
///
/// # Safety
/// As for [`Slice::as_slice`], for the length of the call.
pub unsafe fn read_anywhere<R>(
    backend: &dyn Backend,
    slice: &Slice,
    read: impl FnOnce(&[f32]) -> R,
) -> Result<R, CommError> {
    if slice.is_host() {
        // SAFETY: the caller's promise, which is that of `read_f32`.
        return Ok(unsafe { read_f32(slice, read) });
    }
    // SAFETY: the copy stays in this call, which waits for the backend's copies.
    unsafe {
        let copy = Slice::zeros(slice.dtype(), slice.len(), None);
        backend.download(slice, copy.as_mut_bytes())?;
        Ok(read_f32(&copy, read))
    }
}

/// Updates elements as f32, as [`update_f32`] does, in memory anywhere. Elements on a device are copied to the host and back, in the
/// order of the compute stream.
///
/// # Errors
/// Those of [`Backend::download`] and [`Backend::upload`].
///
/// # Safety
/// As for [`Slice::as_mut_slice`], for the length of the call.
pub unsafe fn update_anywhere<R>(
    backend: &dyn Backend,
    slice: &Slice,
    update: impl FnOnce(&mut [f32]) -> R,
) -> Result<R, CommError> {
    if slice.is_host() {
        // SAFETY: the caller's promise.
        return Ok(unsafe { update_f32(slice, update) });
    }
    // SAFETY: the copy stays in this call, which waits for the backend's copies.
    unsafe {
        let copy = Slice::zeros(slice.dtype(), slice.len(), None);
        backend.download(slice, copy.as_mut_bytes())?;
        let result = update_f32(&copy, update);
        backend.upload(copy.as_bytes(), slice)?;
        Ok(result)
    }
}

/// [`update_anywhere`] of several slices of f32.
///
/// # Errors
/// As for [`update_anywhere`].
///
/// # Safety
/// As for [`update_anywhere`], for each of them: no two overlap.
pub unsafe fn update_all_anywhere<R>(
    backend: &dyn Backend,
    slices: &[Slice],
    update: impl FnOnce(Vec<&mut [f32]>) -> R,
) -> Result<R, CommError> {
    let copies: Vec<Slice> = slices
        .iter()
        .map(|slice| {
            if slice.is_host() {
                return slice.clone();
            }
            // SAFETY: the copy stays in this call, which waits for the backend's copies.
            unsafe { Slice::zeros(Dtype::F32, slice.len(), None) }
        })
        .collect();
    let away = || slices.iter().zip(&copies).filter(|(slice, _)| !slice.is_host());
    for (slice, copy) in away() {
        // SAFETY: the copy was made above, for this slice, and no reference to it is kept.
        backend.download(slice, unsafe { copy.as_mut_bytes() })?;
    }
    // SAFETY: each copy is known to this call only and borrowed once; for slices of the host it is the caller's promise, made
    // for each of them, so that no two overlap.
    let result = update(copies.iter().map(|slice| unsafe { slice.as_mut_slice::<f32>() }).collect());
    for (slice, copy) in away() {
        // SAFETY: nobody writes the copy any more.
        backend.upload(unsafe { copy.as_bytes() }, slice)?;
    }
    Ok(result)
}
