//! A folder with the driver under the names that programs look for.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or(std::io::ErrorKind::NotFound)?);
    for name in ["libcuda.so", "libnccl.so"] {
        let link = out.join(name);
        let _ = std::fs::remove_file(&link);
        // Where cargo puts the libraries of a profile; the driver is there before a test runs.
        symlink("../../../deps/libfake_cuda_driver.so", link)?;
    }
    Ok(())
}
