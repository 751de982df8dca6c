//! One rule for the causes of errors: an error says all in its message and has no `source()`, or it is transparent and is another
//! error, source included. So whoever prints an error alone reads why, and whoever prints the chain reads nothing twice.

use std::fs;
use std::path::Path;

use fsdp::Error;
use fsdp::files::TensorFile;
use fsdp_models::LlamaConfig;
use fsdp_models::pretrained::Pretrained;

use crate::module_graph::{code, rust_files};

/// The messages of a source file, each with the fields that follow.
fn messages(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("#[error(").skip(1).map(|rest| {
        let fields = rest.find(")]").map_or("", |end| &rest[end..]);
        (&rest[..rest.len() - fields.len()], fields.split("\n}").next().unwrap())
    })
}

#[test]
fn only_transparent_errors_have_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for name in [".", "fsdp-layout", "fsdp-comm", "fsdp-kernels", "fsdp-runtime", "fsdp-models", "fsdp-cli"] {
        rust_files(&root.join(name).join("src"), &mut files);
    }
    let (mut found, mut wrong) = (0, Vec::new());
    for file in files {
        let text = code(&file);
        for (message, fields) in messages(&text) {
            found += 1;
            let has_source = ["#[from]", "#[source]", " source:"].iter().any(|mark| fields.contains(mark));
            if has_source && message != "transparent" {
                wrong.push(format!("{}: {message}", file.display()));
            }
        }
    }
    assert!(found > 150, "{found} messages");
    assert!(wrong.is_empty(), "they say what their source says again: {wrong:#?}");
}

/// The chain of an error says `cause` once.
fn says_once(error: impl Into<anyhow::Error>, cause: &str) {
    let text = format!("{:#}", error.into());
    assert_eq!(text.matches(cause).count(), 1, "{text}");
}

#[test]
fn a_chain_of_errors_says_nothing_twice() {
    let missing = Path::new("/nowhere/config.json");
    let no_file = "No such file or directory";
    let opened = TensorFile::open(missing).map(drop).unwrap_err();
    says_once(opened, no_file);
    says_once(LlamaConfig::from_json_file(missing).unwrap_err(), no_file);
    says_once(fsdp_models::Error::from(LlamaConfig::from_json_file(missing).unwrap_err()), no_file);

    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    fs::write(&config, "{").unwrap();
    let eof = "EOF while parsing";
    says_once(LlamaConfig::from_json_file(&config).unwrap_err(), eof);
    // Weights without a tensor: a header of two bytes.
    fs::write(dir.path().join("model.safetensors"), [2, 0, 0, 0, 0, 0, 0, 0, b'{', b'}']).unwrap();
    says_once(Pretrained::open(dir.path()).map(drop).unwrap_err(), eof);

    let error = std::sync::Arc::new(candle_core::Error::Msg("unsupported dtype F4".into()));
    says_once(Error::Resharded { error, advice: "Call it in the forward".into() }, "unsupported dtype F4");
}
