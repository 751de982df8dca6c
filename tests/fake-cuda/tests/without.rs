//! Programs that make no session get the machine's driver, or none.

use cudarc::driver::sys;
use fsdp_runtime::comm::nccl;

#[test]
fn a_program_without_a_session_does_not_get_the_fake() {
    // SAFETY: loading the real driver is what any program does that looks for one.
    if unsafe { sys::is_culib_present() } {
        // SAFETY: as above; the symbol is only looked up.
        let found = unsafe { sys::culib().get::<extern "C" fn()>(b"fake_cuda_reset") };
        assert!(found.is_err());
    }
}

#[test]
fn a_library_that_is_missing_is_named_in_one_line() {
    // SAFETY: loading the real NCCL is what any program does that looks for it.
    if !unsafe { cudarc::nccl::sys::is_culib_present() } {
        let error = nccl::available().expect_err("it is not there").to_string();
        assert!(
            error.starts_with("NCCL 2.22 or newer (libnccl.so) is not there: install the package"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
}
