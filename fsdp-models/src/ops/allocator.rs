//! Makes the system allocator keep freed memory.

/// Tells the system allocator to keep freed memory for reuse, where it can be told (glibc); returns whether
/// it listened.
///
/// A training step allocates and frees activations of some MiB by the hundred. glibc returns such blocks to
/// the system at once and the next step faults every page in again, which can cost as much as the
/// element-wise operations do themselves. A program that trains calls this first thing in `main`, before it
/// starts threads: it holds for the whole process, and the process then keeps its peak of heap memory.
pub fn retain_freed_memory() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use libc::{M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD, c_int, mallopt};
        /// The largest that glibc takes on 64-bit systems.
        const MMAP_THRESHOLD: c_int = 32 << 20;
        const TOP_PAD: c_int = 16 << 20;
        // SAFETY: the call only sets parameters of the allocator.
        unsafe {
            mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) == 1
                && mallopt(M_TRIM_THRESHOLD, c_int::MAX) == 1
                && mallopt(M_TOP_PAD, TOP_PAD) == 1
        }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    false
}
