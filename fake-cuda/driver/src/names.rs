//! How `dlopen("libcuda.so")` and `dlopen("libnccl.so")`, by whomever, come to give this library.

use libloading::Library;
use libloading::os::unix::Library as Program;

/// Takes the names for the rest of the process, and says whether it could.
///
/// Whoever loads this library has put it into a folder under both names. The loader looks there first when the library
/// itself asks (RPATH), sees that the file is one it has loaded, and remembers the name. What is loaded is never
/// looked for again.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_take_names() -> bool {
    is_what_is_linked()
        && ["libcuda.so", "libnccl.so"].into_iter().all(|name| {
            // SAFETY: loading runs no initialiser but this library's own, which has run.
            let Ok(library) = (unsafe { Library::new(name) }) else { return false };
            // SAFETY: the type is that of the function.
            let mine = unsafe { library.get::<extern "C" fn() -> bool>(b"fake_cuda_take_names") };
            let mine = mine.is_ok_and(|found| *found as usize == fake_cuda_take_names as *const () as usize);
            // Kept open: the name lasts as long as the library is loaded.
            std::mem::forget(library);
            mine
        })
}

/// Whether a program that is linked with a driver is linked with this one.
fn is_what_is_linked() -> bool {
    let program = Program::this();
    // SAFETY: the symbol is only looked up.
    let driver = unsafe { program.get::<extern "C" fn()>(b"cuInit") };
    // SAFETY: the type is that of the function.
    let mine = unsafe { program.get::<extern "C" fn() -> bool>(b"fake_cuda_take_names") };
    driver.is_err() || mine.is_ok_and(|found| *found as usize == fake_cuda_take_names as *const () as usize)
}
