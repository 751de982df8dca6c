//! Lets the library be found under the names of those it stands for, by itself: see `src/names.rs`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // An RPATH, not a RUNPATH: that would come after LD_LIBRARY_PATH, where the real libraries may be.
    println!("cargo::rustc-cdylib-link-arg=-Wl,--disable-new-dtags,-rpath,$ORIGIN");
}
