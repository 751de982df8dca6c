//! Tells whether the CUDA libraries are there. With the feature `cuda-linked` they are, as another crate links them. Without it
//! they are loaded when first called.

#[cfg(feature = "cuda-linked")]
pub(super) fn has_driver() -> bool {
    true
}

#[cfg(not(feature = "cuda-linked"))]
pub(super) fn has_driver() -> bool {
    // SAFETY: it loads the library, whose initialisers are those of the CUDA driver.
    unsafe { cudarc::driver::sys::is_culib_present() }
}

#[cfg(feature = "cuda-linked")]
pub(super) fn has_nvrtc() -> bool {
    true
}

#[cfg(not(feature = "cuda-linked"))]
pub(super) fn has_nvrtc() -> bool {
    // SAFETY: it loads the library, whose initialisers are those of NVRTC.
    unsafe { cudarc::nvrtc::sys::is_culib_present() }
}

#[cfg(all(feature = "nccl", feature = "cuda-linked"))]
pub(crate) fn has_nccl() -> bool {
    true
}

#[cfg(all(feature = "nccl", not(feature = "cuda-linked")))]
pub(crate) fn has_nccl() -> bool {
    // SAFETY: it loads the library, whose initialisers are those of NCCL.
    unsafe { cudarc::nccl::sys::is_culib_present() }
}
