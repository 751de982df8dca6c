//! cuBLAS: handles, and matrix products as operations of their stream.

#![allow(non_snake_case)]

mod calls;
mod gemm;

use std::ffi::c_int;

use crate::abi::{Null, Out, Raw, Status};
use crate::driver::{current_context, find_stream};
use crate::report::Kind;
use crate::state::{Held, State, Tag, lock};

/// `cublasStatus_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlasStatus(c_int);

impl BlasStatus {
    const SUCCESS: BlasStatus = BlasStatus(0);
    const NOT_INITIALIZED: BlasStatus = BlasStatus(1);
    const INVALID_VALUE: BlasStatus = BlasStatus(7);
    const EXECUTION_FAILED: BlasStatus = BlasStatus(13);
    const NOT_SUPPORTED: BlasStatus = BlasStatus(15);
}

impl From<Status> for BlasStatus {
    fn from(_: Status) -> Self {
        BlasStatus::EXECUTION_FAILED
    }
}

impl From<Null> for BlasStatus {
    fn from(_: Null) -> Self {
        BlasStatus::INVALID_VALUE
    }
}

type Answer<T = ()> = Result<T, BlasStatus>;

/// A handle of cuBLAS.
pub struct Blas {
    pub context: usize,
    stream: Raw,
    math_mode: c_int,
    pub destroyed: bool,
}

fn call(body: impl FnOnce(&mut Held) -> Answer) -> BlasStatus {
    body(&mut lock()).err().unwrap_or(BlasStatus::SUCCESS)
}

fn find(held: &mut State, raw: Raw) -> Answer<usize> {
    let index =
        Tag::Blas.index(raw).filter(|index| held.blas.get(*index).is_some_and(|blas| !blas.destroyed));
    index.ok_or_else(|| {
        held.reports.add(Kind::Misuse, format!("{raw:#x} is used as a cuBLAS handle, and is none"));
        BlasStatus::NOT_INITIALIZED
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasCreate_v2(handle: Out<Raw>) -> BlasStatus {
    call(|held| {
        let context = current_context(held).map_err(|_| BlasStatus::NOT_INITIALIZED)?;
        held.blas.push(Blas { context, stream: 0, math_mode: 0, destroyed: false });
        Ok(handle.set(Tag::Blas.handle(held.blas.len() - 1))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasDestroy_v2(handle: Raw) -> BlasStatus {
    call(|held| {
        let index = find(held, handle)?;
        held.blas[index].destroyed = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasSetStream_v2(handle: Raw, stream: Raw) -> BlasStatus {
    call(|held| {
        let index = find(held, handle)?;
        find_stream(held, stream)?;
        held.blas[index].stream = stream;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasGetStream_v2(handle: Raw, stream: Out<Raw>) -> BlasStatus {
    call(|held| {
        let index = find(held, handle)?;
        Ok(stream.set(held.blas[index].stream)?)
    })
}

/// The workspace is not used, so nothing is said to touch it.
#[unsafe(no_mangle)]
pub extern "C" fn cublasSetWorkspace_v2(handle: Raw, _workspace: Raw, _bytes: usize) -> BlasStatus {
    call(|held| find(held, handle).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasSetMathMode(handle: Raw, mode: c_int) -> BlasStatus {
    call(|held| {
        let index = find(held, handle)?;
        held.blas[index].math_mode = mode;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasGetMathMode(handle: Raw, mode: Out<c_int>) -> BlasStatus {
    call(|held| {
        let index = find(held, handle)?;
        Ok(mode.set(held.blas[index].math_mode)?)
    })
}

/// Scalars in device memory (mode 1) are refused.
#[unsafe(no_mangle)]
pub extern "C" fn cublasSetPointerMode_v2(handle: Raw, mode: c_int) -> BlasStatus {
    call(|held| {
        find(held, handle)?;
        if mode != 0 {
            held.reports
                .add(Kind::Unsupported, "cuBLAS's scalars in device memory are not implemented".to_owned());
            return Err(BlasStatus::NOT_SUPPORTED);
        }
        Ok(())
    })
}
