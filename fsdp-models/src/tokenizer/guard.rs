//! Calls into libraries that may panic.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;
use std::thread;

thread_local! {
    /// The present thread is in a call whose panics become errors.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work`, of which a panic is an error. The libraries that build and run tokenizers check their input, but not against all
/// that a damaged file can hold.
///
/// The panic hook, which prints, is not run for such a panic: not while the present thread is in here, for no other thread. It is
/// wrapped once for that, when this is first called; a hook that is set later prints again.
pub(super) fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static WRAPPED: Once = Once::new();
    // The hook cannot be changed in a panic.
    if !thread::panicking() {
        WRAPPED.call_once(|| {
            let hook = take_hook();
            set_hook(Box::new(move |panic| {
                if !GUARDED.try_with(Cell::get).unwrap_or(false) {
                    hook(panic);
                }
            }));
        });
    }
    let before = GUARDED.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(before);
    outcome.unwrap_or_else(|_| Err("its parts contradict each other".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_panics_that_become_errors_are_silent() {
        const CHILD: &str = "FSDP_TEST_GUARDED";
        if std::env::var_os(CHILD).is_some() {
            let refused = guarded::<()>(|| {
                thread::scope(|scope| scope.spawn(|| panic!("another thread")).join().unwrap_err());
                panic!("inside")
            });
            assert_eq!(refused, Err("its parts contradict each other".to_owned()));
            assert_eq!(guarded(|| Ok(7)), Ok(7));
            catch_unwind(|| panic!("afterwards")).unwrap_err();
            return;
        }
        // A process of its own: its standard error is looked at.
        let test = "tokenizer::guard::tests::only_panics_that_become_errors_are_silent";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8(child.stderr).unwrap();
        assert!(child.status.success(), "{said}");
        let printed = ["another thread", "inside", "afterwards"].map(|panic| said.contains(panic));
        assert_eq!(printed, [true, false, true], "{said}");
    }
}
