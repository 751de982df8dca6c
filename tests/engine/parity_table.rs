//! The tables of faults and of PyTorch's tests name tests that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// All Rust files below `folder`.
fn rust_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

#[test]
fn every_test_it_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    rust_files(&root.join("tests"), &mut files);
    for part in ["fake-cuda", "fsdp-layout", "fsdp-comm", "fsdp-runtime", "fsdp-models"] {
        for folder in ["src", "tests"].map(|folder| root.join(part).join(folder)) {
            if folder.exists() {
                rust_files(&folder, &mut files);
            }
        }
    }
    let table = |name: &str| fs::read_to_string(root.join("tests").join(name)).unwrap();
    let tables = table("faults.md") + &table("parity.md");
    let quoted = tables.split('`').skip(1).step_by(2);
    let named: BTreeSet<(&str, &str)> = quoted.filter_map(|text| text.rsplit_once("::")).collect();
    assert!(named.len() > 150, "{} tests are named", named.len());
    let missing: Vec<String> = named
        .into_iter()
        .filter(|&(_, function)| function != "function")
        .filter(|(file, function)| {
            let folder = if file.contains('/') { "" } else { "engine/" };
            let file = file.replace("::", "/");
            let inside = [format!("{folder}{file}.rs"), format!("tests/{file}.rs"), format!("src/{file}.rs")];
            let declaration = format!("fn {function}(");
            // Or a file of tests that is named as a whole.
            let whole = format!("{folder}{file}/{function}.rs");
            !files.iter().any(|path| {
                let declares = || fs::read_to_string(path).unwrap().contains(&declaration);
                path.ends_with(&whole) || (inside.iter().any(|end| path.ends_with(end)) && declares())
            })
        })
        .map(|(file, function)| format!("{file}::{function}"))
        .collect();
    assert!(missing.is_empty(), "not there: {missing:#?}");
}
