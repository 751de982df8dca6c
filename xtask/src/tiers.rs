//! What is checked, by CI and beyond it, with the minutes that each takes.

use crate::command::run;
use crate::tier::Tier;
use crate::times;

/// From cold, on 2 cores.
pub const CI_MINUTES: f64 = 45.0;

/// What CI runs, in this order.
pub fn ci() -> Vec<Tier> {
    let mut tiers = vec![
        Tier {
            name: "format",
            what: "rustfmt; the places and the tests of the planted faults",
            minutes: 0.1,
            run: format,
        },
        Tier { name: "tests", what: "the README's test command", minutes: 14.0, run: tests },
        Tier { name: "lints", what: "clippy, warnings being errors", minutes: 2.5, run: lints },
        Tier { name: "docs", what: "rustdoc, warnings being errors", minutes: 1.0, run: docs },
        Tier {
            name: "packages",
            what: "manifests, Rust version and contents of the crates that are published",
            minutes: 0.3,
            run: || run("python3 .ci/packages.py", &[]),
        },
        Tier {
            name: "api",
            what: "the public API of the libraries against docs/public-api",
            minutes: 1.5,
            run: || public_api(&[]),
        },
        Tier {
            name: "kernels",
            what: "the CUDA kernels by nvcc and NVRTC",
            minutes: 2.0,
            run: || run(".ci/kernels", &[]),
        },
        Tier {
            name: "cuda",
            what: "the features cuda and nccl on the fake driver",
            minutes: 12.0,
            run: || run(".ci/cuda", &[]),
        },
        Tier {
            name: "programs",
            what: "the README's main command, fine-tuning and the quick start",
            minutes: 2.0,
            run: || run(".ci/programs", &[]),
        },
    ];
    tiers.extend(deep().into_iter().filter(|tier| IN_CI.contains(&tier.name)));
    tiers
}

/// The deep tiers that CI runs too.
const IN_CI: &[&str] = &["messages", "curves", "combinations", "wholes", "schedules"];

/// What takes too long for every change.
pub fn deep() -> Vec<Tier> {
    vec![
        Tier {
            name: "curves",
            what: "a Llama against every step of the reference, in every way of training",
            minutes: 5.0,
            run: || times::test_in(&["--workspace", "--test", "llama"], &[("FSDP_FULL_CURVES", "1")]),
        },
        Tier {
            name: "combinations",
            what: "three times as many combinations of settings",
            minutes: 1.0,
            run: || {
                times::test_in(&["--workspace", "--test", "combinations"], &[("FSDP_COMBINATIONS", "450")])
            },
        },
        Tier {
            name: "messages",
            what: "all programs that must not compile, of which the short suite has a fourth",
            minutes: 1.5,
            run: || times::test_in(&["--workspace", "--test", "ui"], &[("FSDP_ALL_PROGRAMS", "1")]),
        },
        Tier {
            name: "wholes",
            what: "damaged checkpoints and schedules of the fake driver, of which the short suite runs a part",
            minutes: 2.5,
            run: wholes,
        },
        Tier {
            name: "schedules",
            what: "the rendezvous, the streams and the pipelines in 16 times as many schedules",
            minutes: 1.0,
            run: || model("16"),
        },
        Tier { name: "model", what: "in 80 times as many schedules", minutes: 20.0, run: || model("80") },
        Tier {
            name: "hostile",
            what: "10,500 damaged files of all formats, and three times as many damaged checkpoints",
            minutes: 10.0,
            run: hostile,
        },
        Tier {
            name: "processes",
            what: "60 kills and 12 stops of ranks in processes; the engine on ranks that exchange as processes do",
            minutes: 6.0,
            run: processes,
        },
        Tier {
            name: "address",
            what: "the tests under AddressSanitizer",
            minutes: 25.0,
            run: || run(".ci/sanitizers address", &[]),
        },
        Tier {
            name: "thread",
            what: "what needs no tensors under ThreadSanitizer",
            minutes: 15.0,
            run: || run(".ci/sanitizers thread", &[]),
        },
        Tier {
            name: "mutants",
            what: "faults planted in the runtime, each to be found by two tests",
            minutes: 20.0,
            run: || run("python3 tests/mutants/run.py", &[]),
        },
        Tier {
            name: "cuda-mutants",
            what: "waits and events taken out of what runs on CUDA streams, each to be found by a test",
            minutes: 60.0,
            run: || run("python3 tests/fake-cuda/mutants.py", &[]),
        },
    ]
}

fn processes() -> Result<(), String> {
    let hits = ["--workspace", "--test", "tcp_communicator", "a_process_that_is_"];
    times::test_in(&hits, &[("FSDP_KILLS", "60"), ("FSDP_STOPS", "12")])?;
    times::test_in(&["--workspace", "--test", "engine"], &[("FSDP_JOINED", "1")])
}

fn format() -> Result<(), String> {
    run("cargo fmt --all --check", &[])?;
    run("python3 tests/mutants/run.py --check", &[])
}

fn tests() -> Result<(), String> {
    times::test(&["--workspace"])
}

fn lints() -> Result<(), String> {
    run("cargo clippy --workspace --all-targets -- -D warnings", &[])
}

fn docs() -> Result<(), String> {
    run("cargo doc --workspace --no-deps", &[("RUSTDOCFLAGS", "-D warnings")])
}

/// Compares the public API with its lists. The program has a workspace of its own, so that the tests need not build it.
pub fn public_api(arguments: &[&str]) -> Result<(), String> {
    let program =
        "cargo run --quiet --manifest-path .ci/public-api/Cargo.toml --target-dir target/public-api --";
    run(&format!("{program} {}", arguments.join(" ")), &[])
}

fn model(factor: &str) -> Result<(), String> {
    times::test_in(&["--workspace", "--test", "schedules"], &[("FSDP_MODEL_FACTOR", factor)])
}

fn wholes() -> Result<(), String> {
    let arguments =
        ["--workspace", "--test", "hostile_checkpoints", "--test", "pipelines", "--test", "communicator"];
    times::test_in(&arguments, &[("FSDP_HOSTILE_FACTOR", "1"), ("FSDP_MODEL_FACTOR", "1")])
}

fn hostile() -> Result<(), String> {
    let arguments = ["--workspace", "--test", "pretrained", "--test", "hostile_checkpoints"];
    times::test_in(&arguments, &[("FSDP_HOSTILE_FACTOR", "3")])
}
