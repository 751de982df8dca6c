//! Programs that make no session get the machine's driver, or none.

use fsdp_runtime::comm::nccl;
use libloading::Library;

#[test]
fn a_program_without_a_session_does_not_get_the_fake() {
    for name in ["libcuda.so", "libcuda.so.1"] {
        // SAFETY: loading the real driver is what any program does that looks for one.
        let Ok(driver) = (unsafe { Library::new(name) }) else { continue };
        // SAFETY: as above; the symbol is only looked up.
        assert!(unsafe { driver.get::<extern "C" fn()>(b"fake_cuda_reset") }.is_err());
    }
}

#[test]
fn a_library_that_is_missing_is_named_in_one_line() {
    // SAFETY: loading the real NCCL is what any program does that looks for it.
    if unsafe { Library::new("libnccl.so") }.is_err() {
        let error = nccl::available().expect_err("it is not there").to_string();
        assert!(
            error.starts_with("NCCL 2.22 or newer (libnccl.so) is not there: install the package"),
            "{error}"
        );
        assert!(!error.contains('\n'), "{error}");
    }
}
