//! Programs that make no session get the machine's driver, or none.

use cudarc::driver::sys;

#[test]
fn a_program_without_a_session_does_not_get_the_fake() {
    // SAFETY: loading the real driver is what any program does that looks for one.
    if unsafe { sys::is_culib_present() } {
        // SAFETY: as above; the symbol is only looked up.
        let found = unsafe { sys::culib().get::<extern "C" fn()>(b"fake_cuda_reset") };
        assert!(found.is_err());
    }
}
