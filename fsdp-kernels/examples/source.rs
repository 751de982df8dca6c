//! Prints the program that NVRTC is given, or with `--options` how it is to be compiled, one option a line.

use fsdp_kernels::{OPTIONS, SOURCE};

fn main() {
    if std::env::args().any(|arg| arg == "--options") {
        OPTIONS.iter().for_each(|option| println!("{option}"));
    } else {
        print!("{SOURCE}");
    }
}
