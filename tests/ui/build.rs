//! Writes the generated items: `generated_0.rs`, ..

use std::path::PathBuf;
use std::{env, fs};

#[path = "../../fsdp-derive/src/tests/generate/mod.rs"]
mod generate;

/// Files, and items in each.
const FILES: u64 = 3;
const ITEMS: u64 = 400;

fn main() {
    println!("cargo::rerun-if-changed=../../fsdp-derive/src/tests/generate");
    println!("cargo::rerun-if-changed=build.rs");
    let directory = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    for file in 0..FILES {
        // Other seeds than those of the derive's own tests.
        let modules: String = (0..ITEMS)
            .map(|index| generate::valid((1 << 32) + file * ITEMS + index, true).module(&format!("m{index}")))
            .collect();
        let items = format!("pub mod prelude {{\n{}}}\n{modules}", generate::PRELUDE);
        let path = directory.join(format!("generated_{file}.rs"));
        fs::write(&path, items).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}
