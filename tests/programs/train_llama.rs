//! `examples/train_llama.rs` as a user runs it: what it writes, and what it says when it is asked for what
//! cannot be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use fsdp::files::{TensorFile, save_f32};
use fsdp_test_support::{absolute, assert_close};
use serde_json::Value;
use tempfile::TempDir;

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| crate::example::built("train_llama"))
}

/// A model that trains in no time, on a text of its own.
const SMALL: [&str; 16] = [
    "--dim",
    "32",
    "--layers",
    "2",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--ffn",
    "48",
    "--seq",
    "16",
    "--batch",
    "8",
    "--steps",
    "4",
];

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        fs::write(place.0.path().join("text"), include_bytes!("train_llama.rs")).unwrap();
        place
    }

    fn train(&self, options: &[&str]) -> Output {
        let mut command = Command::new(program());
        command.current_dir(&self.0).args(["--text", "text"]).args(SMALL).args(options);
        command.output().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The steps' lines of a metrics file, and the summary.
    fn metrics(&self, name: &str) -> (Vec<Value>, Value) {
        let text = fs::read_to_string(self.path(name)).unwrap();
        let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let summary = lines.pop().unwrap()["summary"].take();
        (lines, summary)
    }

    /// The message of a run that must fail, without the last steps' progress.
    fn refusal(&self, options: &[&str]) -> String {
        let output = self.train(options);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{error}");
        assert_eq!(error.matches("error: ").count(), 1, "{error}");
        error[error.find("error: ").unwrap()..].to_owned()
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_device_that_was_not_built_in_is_refused_in_one_line() {
    let message = Place::new().refusal(&["--device", "cuda"]);
    assert_eq!(message, "error: this program was built without CUDA: build it with `--features cuda`\n");
}

#[test]
fn everything_asked_for_is_written() {
    let place = Place::new();
    let output = place.train(&[
        "--metrics",
        "metrics",
        "--plot",
        "curves.svg",
        "--trace",
        "trace",
        "--save-weights",
        "weights",
        "--save-grads",
        "gradients",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(place.files(), ["curves.svg", "gradients", "metrics", "text", "trace", "weights"]);

    let tables = String::from_utf8(output.stdout).unwrap();
    assert!(tables.contains("model.layers.0 .. 1 "), "{tables}");
    assert!(tables.contains("optimizer_state"), "{tables}");

    let (steps, summary) = place.metrics("metrics");
    assert_eq!(steps.len(), 4);
    for (at, step) in steps.iter().enumerate() {
        assert_eq!(step["step"], at + 1);
        for number in ["loss", "grad_norm", "lr", "tokens_per_s", "step_ms"] {
            assert!(step[number].as_f64().unwrap() > 0.0, "{number}: {step}");
        }
    }
    assert_eq!((&summary["steps"], summary["memory"].as_array().unwrap().len()), (&4.into(), 2));
    for rank in summary["memory"].as_array().unwrap() {
        for category in rank["bytes"].as_array().unwrap() {
            assert_eq!(category["peak"], category["formula"], "{category}");
        }
    }
    for rank in summary["traffic"].as_array().unwrap() {
        assert_eq!(rank["bytes_copied_for_packing"]["all_gather"], 0);
        let gathers = &rank["collectives"][0];
        assert_eq!(gathers["operation"], "all-gather");
        assert!(gathers["bytes_from_peers"].as_u64().unwrap() > 0);
    }

    assert!(fs::read_to_string(place.path("curves.svg")).unwrap().contains("</svg>"));
    let trace: Value = serde_json::from_str(&fs::read_to_string(place.path("trace")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        for name in ["forward model.layers.1", "backward model.layers.0", "all-gather model.layers.1"] {
            assert!(events.iter().any(|event| event["pid"] == rank && event["name"] == name), "{name}");
        }
    }
    for name in ["weights", "gradients"] {
        let file = TensorFile::open(&place.path(name)).unwrap();
        assert_eq!(file.names().count(), 21);
        assert_eq!(file.shape("model.layers.1.mlp.down_proj.weight"), Some(&[32, 48][..]));
    }
}

#[test]
fn saved_weights_are_where_training_goes_on() {
    let place = Place::new();
    // The order of the data begins anew: a rate of zero makes the second run see only the weights.
    let still = ["--lr", "0", "--weight-decay", "0"];
    assert!(place.train(&[&still[..], &["--save-weights", "w", "--metrics", "a"]].concat()).status.success());
    assert!(
        place
            .train(&[&still[..], &["--weights", "w", "--metrics", "b", "--ranks", "4"]].concat())
            .status
            .success()
    );
    let losses = |name| -> Vec<f64> {
        place.metrics(name).0.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    assert_close(&losses("b"), &losses("a"), absolute(1e-6), "losses");
}

#[test]
fn a_run_goes_on_from_its_checkpoints_to_the_bit_and_on_other_ranks_nearly() {
    let place = Place::new();
    let train = |options: &[&str]| {
        let output = place.train(options);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let losses = |name: &str| -> Vec<f64> {
        let steps = place.metrics(name).0;
        assert!(steps.iter().enumerate().all(|(at, step)| step["step"] == at + 1), "{steps:?}");
        steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    for dtype in ["f32", "f16"] {
        let options = ["--param-dtype", dtype, "--batch", "12"];
        let names = ["whole", "run", "again"].map(|name| format!("{name}-{dtype}"));
        let [whole, run, again] = names.each_ref().map(String::as_str);
        train(&[&options[..], &["--steps", "12", "--metrics", whole]].concat());
        // A constant learning rate: it does not matter how many steps the first part was to have.
        let metrics = format!("{run}.jsonl");
        let saved = ["--checkpoints", run, "--save-every", "3", "--keep", "9", "--metrics", &metrics];
        let options = [&options[..], &saved].concat();
        train(&[&options[..], &["--steps", "7"]].concat());
        let kept = |run: &str| -> Vec<String> {
            let names = fs::read_dir(place.path(run)).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
            names.retain(|name| name.starts_with("step-"));
            names.sort();
            names
        };
        assert_eq!(kept(run), ["step-00000003", "step-00000006", "step-00000007"]);
        let said = train(&[&options[..], &["--steps", "12", "--resume"]].concat());
        assert!(said.contains("going on after step 7, from"), "{said}");
        assert_eq!(losses(&metrics), losses(whole));

        // From the middle again, with everything else another.
        for later in kept(run).iter().filter(|name| name.as_str() > "step-00000006") {
            fs::remove_dir_all(place.path(run).join(later)).unwrap();
        }
        fs::copy(place.path(&metrics), place.path(again)).unwrap();
        let other = ["--ranks", "3", "--microbatches", "2", "--strategy", "optim", "--alignment", "row"];
        let rest = ["--steps", "12", "--resume", "--metrics", again];
        let said = train(&[&options[..], &rest, &other].concat());
        assert!(said.contains("going on after step 6, from"), "{said}");
        let tolerance = if dtype == "f32" { 1e-5 } else { 2e-2 };
        assert_close(&losses(again), &losses(whole), absolute(tolerance), dtype);
    }
    let message = place.refusal(&["--checkpoints", "run-f32"]);
    assert!(message.contains("has checkpoints of a run already"), "{message}");
    let message = place.refusal(&["--save-every", "3"]);
    assert!(message.contains("--checkpoints"), "{message}");
}

#[test]
fn replicas_and_half_precision_train_to_about_the_same_losses() {
    let place = Place::new();
    let losses = |name: &str, options: &[&str]| -> Vec<f64> {
        let output = place.train(&[&["--metrics", name][..], options].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        place.metrics(name).0.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    let plain = losses("plain", &["--ranks", "4"]);
    let replicas = ["--ranks", "4", "--outer-ranks", "2", "--outer-strategy", "optim"];
    let half = ["--ranks", "4", "--outer-ranks", "2", "--param-dtype", "f16", "--reshard-after-forward", "2"];
    for (name, options, tolerance) in [("replicas", &replicas[..], 1e-5), ("half", &half[..], 0.05)] {
        assert_close(&losses(name, options), &plain, absolute(tolerance), name);
    }
    let message = place.refusal(&["--ranks", "4", "--outer-ranks", "3"]);
    assert!(message.contains("4 ranks cannot be 3 replicas"), "{message}");
    let message = place.refusal(&["--reshard-after-forward", "sometimes"]);
    assert!(message.contains("expected always, never, or a number of ranks"), "{message}");
}

#[test]
fn an_unknown_strategy_is_answered_with_the_known_ones() {
    let place = Place::new();
    let message = place.refusal(&["--strategy", "zero33"]);
    let names = "no-shard (zero0, ddp), optim (zero1), optim-grads (zero2, shard_grad_op) or optim-grads-params (zero3, \
                 full_shard, fsdp)";
    let expected = format!("unknown strategy `zero33`: did you mean `zero3`? expected {names}");
    assert!(message.contains(&expected), "{message}");
    let help = Command::new(program()).arg("--help").output().unwrap().stdout;
    let help = String::from_utf8(help).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains(&format!("What is sharded: {names}")), "{help}");
    let said = place.train(&["--strategy", "ZeRO-3", "--steps", "1"]).stdout;
    let said = String::from_utf8(said).unwrap();
    assert!(said.contains("2 ranks, strategy optim-grads-params"), "{said}");
}

#[test]
fn a_batch_that_cannot_be_divided_is_refused_with_the_numbers() {
    let place = Place::new();
    let message = place.refusal(&["--ranks", "2", "--microbatches", "3"]);
    assert!(message.contains("global batch of 8 rows"), "{message}");
    assert!(message.contains("a positive multiple of 6"), "{message}");
    // A run that is to go on says which ranks would do.
    let saved = ["--checkpoints", "run", "--steps", "1"];
    assert!(place.train(&saved).status.success());
    let message = place.refusal(&[&saved[..], &["--resume", "--ranks", "3"]].concat());
    assert!(
        message.ends_with("8 rows with as many microbatches would do on 1, 2, 4 or 8 ranks\n"),
        "{message}"
    );
}

#[test]
fn sizes_that_nothing_can_hold_are_refused_with_their_numbers() {
    let place = Place::new();
    for (options, expected) in [
        (
            &["--batch", "4611686018427387904"][..],
            "too many tokens in a batch: rows 4611686018427387904 x length 16",
        ),
        (
            &["--batch", "1099511627776", "--ranks", "1"],
            "too many tokens in a microbatch of a rank: sequences 1099511627776",
        ),
        (
            &["--seq", "18446744073709551615"],
            "too many tokens in a batch: rows 8 x length 18446744073709551615",
        ),
        (&["--seq", "20000000"], "one sequence of 20000000 tokens and the token after it need 20000001"),
        (
            &["--batch", "8388608", "--microbatches", "4194304", "--ranks", "1"],
            "too many microbatches: microbatches 4194304",
        ),
        (&["--ranks", "4294967296", "--batch", "4294967296"], "4294967296"),
        (&["--warmup", "5"], "warmup is 5 steps: it must be at most the 4 steps of the run"),
        (&["--lr", "1e308"], "lr is 1e308: it must be at most 1000"),
        (&["--weight-decay", "1e39"], "weight decay is 1e39: it must be at most 1000"),
    ] {
        let message = place.refusal(options);
        assert!(message.contains(expected), "{options:?}: {message}");
    }
    assert_eq!(place.files(), ["text"]);
}

#[test]
fn a_plot_is_an_svg_and_says_so() {
    let place = Place::new();
    for option in ["--plot", "--trace-plot"] {
        let message = place.refusal(&[option, "curves.png"]);
        let expected =
            "error: cannot draw into `curves.png`: it would be an SVG, so its name must end in .svg\n";
        assert_eq!(message, expected);
    }
    assert_eq!(place.files(), ["text"]);
    // Steps count from 1, as everywhere.
    assert!(place.train(&["--plot", "curves.svg", "--steps", "5"]).status.success());
    let svg = fs::read_to_string(place.path("curves.svg")).unwrap();
    assert!(svg.contains("\n1\n") && svg.contains("\n5\n") && !svg.contains("\n0\n"), "{svg}");
}

#[test]
fn what_is_no_file_is_neither_read_nor_written_and_never_waited_for() {
    let place = Place::new();
    assert!(Command::new("mkfifo").arg(place.path("pipe")).status().unwrap().success());
    for option in
        ["--weights", "--tokens", "--text", "--config", "--metrics", "--plot", "--save-weights", "--trace"]
    {
        for path in ["pipe", "/dev/zero", "/dev/full"] {
            let mut command = Command::new(program());
            command.current_dir(&place.0).args(["--steps", "1", option, path]);
            if !matches!(option, "--text" | "--tokens") {
                command.args(["--text", "text"]);
            }
            let error = String::from_utf8(command.output().unwrap().stderr).unwrap();
            let expected = format!("`{path}`: it is not a regular file\n");
            assert!(
                error.starts_with("error: cannot ") && error.ends_with(&expected),
                "{option} {path}: {error}"
            );
        }
    }
    assert_eq!(place.files(), ["pipe", "text"]);
}

#[test]
fn names_of_a_file_are_shortened_in_messages() {
    let place = Place::new();
    let names: Vec<String> = (0..20_000).map(|name| format!("{name:0>200}")).collect();
    let tensors: Vec<_> = names.iter().map(|name| (name.as_str(), &[0usize][..], &[][..])).collect();
    save_f32(&place.path("many"), &tensors).unwrap();
    for options in [&["--weights", "many"][..], &["--tokens", "many"]] {
        let mut command = Command::new(program());
        let output = command.current_dir(&place.0).args(options).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("(200 characters)") && error.chars().count() < 2000, "{error}");
    }
}

/// Starts a run that would take long, waits until it is in its midst, and sends it these signals.
#[cfg(unix)]
fn interrupted(place: &Place, options: &[&str], signals: &[&str]) -> (Output, usize) {
    use std::os::unix::process::CommandExt;

    let mut command = Command::new(program());
    // Tests that are started by `nohup` ignore hangups, and so would what they start.
    // SAFETY: between fork and exec the child makes one call, which may be made there (signal-safety(7)).
    unsafe {
        command.pre_exec(|| match libc::signal(libc::SIGHUP, libc::SIG_DFL) {
            libc::SIG_ERR => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    interrupted_as(command, place, options, signals)
}

#[cfg(unix)]
fn interrupted_as(
    mut command: Command,
    place: &Place,
    options: &[&str],
    signals: &[&str],
) -> (Output, usize) {
    // However many steps there are to be, nothing is prepared for all of them.
    let steps = ["--steps", "9223372036854775807", "--metrics", "metrics"];
    command.current_dir(&place.0).args(["--text", "text"]).args(SMALL).args(steps).args(options);
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = || fs::read_to_string(place.path("metrics")).map_or(0, |text| text.lines().count());
    // What is looked at is a file that grows.
    while lines() < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = run.id().to_string();
    for signal in signals {
        assert!(Command::new("kill").args([signal, &*pid]).status().unwrap().success());
    }
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    (output, lines())
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_after_a_step_whose_state_is_saved() {
    let place = Place::new();
    let outputs = ["--save-weights", "weights", "--plot", "curves.svg", "--save-pretrained", "model"];
    let (output, steps) = interrupted(&place, &outputs, &["-INT"]);
    let said = String::from_utf8(output.stdout).unwrap();
    let expected = format!(
        "stopped after step {steps} of 9223372036854775807: nothing is saved of it, as it had no --checkpoints\n"
    );
    assert!(said.ends_with(&expected), "{said}");
    // Not even what was being written.
    assert_eq!(place.files(), ["metrics", "model", "text"]);
    assert_eq!(fs::read_dir(place.path("model")).unwrap().count(), 0);

    let place = Place::new();
    let saved = ["--checkpoints", "run", "--save-every", "1000000"];
    let (output, steps) = interrupted(&place, &saved, &["-INT"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.ends_with(": its state is in `run`, from where --resume goes on\n"), "{said}");
    let left: Vec<_> =
        fs::read_dir(place.path("run")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let name = format!("step-{steps:08}");
    assert!(left.iter().all(|left| left == ".lock" || *left == *name.as_str()), "{left:?}");
    // It goes on as a run that was not stopped.
    let total = (steps + 2).to_string();
    let rest = ["--resume", "--steps", &total, "--metrics", "metrics"];
    let output = place.train(&[&saved[..], &rest].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(place.train(&["--steps", &total, "--metrics", "whole"]).status.success());
    let losses = |name| place.metrics(name).0.iter().map(|step| step["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("metrics"), losses("whole"));

    // Asked twice, it does not wait for the end of the step, and leaves nothing unfinished either.
    let place = Place::new();
    interrupted(&place, &["--save-weights", "weights"], &["-INT", "-INT"]);
    assert_eq!(place.files(), ["metrics", "text"]);
}

#[cfg(unix)]
#[test]
fn every_signal_that_asks_for_an_end_saves_the_state_first() {
    let saved = |name| ["--checkpoints", name, "--save-every", "1000000"];
    for signal in ["-TERM", "-HUP", "-USR1", "-USR2"] {
        let place = Place::new();
        let (output, steps) = interrupted(&place, &saved("run"), &[signal]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.ends_with(": its state is in `run`, from where --resume goes on\n"), "{signal}: {said}");
        assert!(place.path(&format!("run/step-{steps:08}")).is_dir(), "{signal}");
    }
    // What was started to outlive its terminal does: the hangup is not what stops it.
    let place = Place::new();
    let mut command = Command::new("nohup");
    command.arg(program());
    let (output, _) = interrupted_as(command, &place, &saved("run"), &["-HUP", "-HUP", "-INT"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.ends_with(": its state is in `run`, from where --resume goes on\n"), "{said}");
}

#[test]
fn a_text_shorter_than_a_sequence_is_refused() {
    let place = Place::new();
    fs::write(place.path("text"), "too short").unwrap();
    let message = place.refusal(&[]);
    assert!(message.contains("the text has 9 bytes: one sequence of 16 tokens"), "{message}");
}

#[test]
fn weights_of_other_shapes_are_refused_and_nothing_is_written() {
    let place = Place::new();
    let norm: &[usize] = &[31];
    save_f32(&place.path("weights"), &[("model.norm.weight", norm, &[1.0; 31])]).unwrap();
    let message = place.refusal(&["--weights", "weights", "--metrics", "metrics", "--save-weights", "new"]);
    assert!(message.contains("1 of another shape: model.norm.weight (model [32], file [31])"), "{message}");
    assert!(message.contains("20 missing: model.embed_tokens.weight,"), "{message}");
    assert_eq!(place.files(), ["text", "weights"]);
}

/// Adds the head to the weights of a tied model: the embedding itself, or one that differs in its last element.
fn write_with_head(place: &Place, from: &str, to: &str, differs: bool) {
    let file = TensorFile::open(&place.path(from)).unwrap();
    let mut tensors: Vec<(&str, &[usize], Vec<f32>)> = Vec::new();
    for name in file.names() {
        let shape = file.shape(name).unwrap();
        let mut values = vec![0.0; shape.iter().product()];
        file.read_range_f32(name, 0, &mut values).unwrap();
        if name == "model.embed_tokens.weight" {
            let mut head = values.clone();
            *head.last_mut().unwrap() += if differs { 1.0 } else { 0.0 };
            tensors.push(("lm_head.weight", shape, head));
        }
        tensors.push((name, shape, values));
    }
    let tensors: Vec<_> = tensors.iter().map(|(name, shape, values)| (*name, *shape, &values[..])).collect();
    save_f32(&place.path(to), &tensors).unwrap();
}

#[test]
fn a_tied_model_takes_weights_whose_head_is_the_embedding() {
    let place = Place::new();
    assert!(place.train(&["--tied", "--save-weights", "w", "--steps", "1"]).status.success());
    write_with_head(&place, "w", "same", false);
    write_with_head(&place, "w", "other", true);
    for (weights, metrics) in [("w", "a"), ("same", "b")] {
        let output = place.train(&["--tied", "--weights", weights, "--metrics", metrics]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let losses = |name| place.metrics(name).0.iter().map(|step| step["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("a"), losses("b"));
    let message = place.refusal(&["--tied", "--weights", "other", "--metrics", "c"]);
    let expected = "error: `other`: `lm_head.weight` differs from `model.embed_tokens.weight`, and the model ties them: it has one \
                    parameter for both; to train both, leave out --tied (or set `tie_word_embeddings` to false in the file of \
                    --config)\n";
    assert_eq!(message, expected);
    assert!(place.train(&["--weights", "other"]).status.success());
    let message = place.refusal(&["--weights", "w"]);
    assert!(message.contains("1 missing: lm_head.weight"), "{message}");
    assert_eq!(place.files(), ["a", "b", "other", "same", "text", "w"]);
}

#[test]
fn a_place_that_cannot_be_written_is_refused_before_the_first_step() {
    let place = Place::new();
    let message = place.refusal(&["--save-weights", "nowhere/weights", "--metrics", "metrics"]);
    assert!(message.starts_with("error: cannot write `nowhere/weights`: "), "{message}");
    assert_eq!(place.files(), ["text"]);
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_and_names_the_unit() {
    let place = Place::new();
    assert!(place.train(&["--save-weights", "good", "--steps", "1"]).status.success());
    let good = TensorFile::open(&place.path("good")).unwrap();
    let names: Vec<&str> = good.names().collect();
    let tensors: Vec<(&str, &[usize], Vec<f32>)> = names
        .iter()
        .map(|&name| {
            let shape = good.shape(name).unwrap();
            let mut values = vec![0.0; shape.iter().product()];
            good.read_range_f32(name, 0, &mut values).unwrap();
            if name == "model.layers.1.self_attn.v_proj.weight" {
                values[7] = f32::NAN;
            }
            (name, shape, values)
        })
        .collect();
    let tensors: Vec<_> =
        tensors.iter().map(|(name, shape, values)| (*name, *shape, values.as_slice())).collect();
    save_f32(&place.path("bad"), &tensors).unwrap();

    let outputs = ["--weights", "bad", "--save-weights", "new", "--plot", "curves.svg", "--trace", "trace"];
    let message = place.refusal(&outputs);
    assert!(message.contains("the loss of step 1 is NaN"), "{message}");
    let message = place.refusal(&[&outputs[..], &["--check-finite"]].concat());
    assert!(message.contains("unit `model.layers.1`, forward, step 1"), "{message}");
    assert_eq!(place.files(), ["bad", "good", "text"]);
}

#[test]
fn a_trained_model_is_saved_for_other_tools_with_a_tokenizer_of_bytes() {
    let place = Place::new();
    let saved = ["--save-pretrained", "model", "--save-weights", "weights"];
    assert!(place.train(&saved).status.success());
    let [ours, theirs] =
        ["model/model.safetensors", "weights"].map(|name| TensorFile::open(&place.path(name)).unwrap());
    assert_eq!(ours.names().collect::<Vec<_>>(), theirs.names().collect::<Vec<_>>());
    for name in ours.names() {
        let values = |file: &TensorFile| {
            let mut values = vec![0.0; file.shape(name).unwrap().iter().product()];
            file.read_range_f32(name, 0, &mut values).unwrap();
            values
        };
        assert_eq!(values(&ours), values(&theirs), "{name}");
    }
    let tokenizer = fsdp_models::Tokenizer::open(&place.path("model")).unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), [97, 98]);
    let message = place.refusal(&["--save-pretrained", "text"]);
    assert!(message.contains("cannot write --save-pretrained to `text`: it is not a directory"), "{message}");
}

#[test]
fn tokens_and_options_must_agree() {
    let tokens = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fsdp2/tokens.safetensors");
    let run = |options: &[&str]| {
        let output = Command::new(program()).arg("--tokens").arg(&tokens).args(options).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let message = run(&["--batch", "4"]);
    assert!(message.starts_with("error: --batch is 4, but `") && message.contains("has 8"), "{message}");
    let message = run(&["--steps", "51"]);
    assert!(message.contains("has tokens for 50 steps, 51 are wanted"), "{message}");
}

#[test]
fn an_output_never_overwrites_an_input_or_another_output() {
    let place = Place::new();
    let text = fs::read(place.path("text")).unwrap();
    for (output, path) in [("--metrics", "text"), ("--save-weights", "./text"), ("--plot", "text")] {
        let message = place.refusal(&[output, path]);
        assert!(message.contains(output) && message.contains("--text"), "{message}");
    }
    let message = place.refusal(&["--save-weights", "new", "--save-grads", "./new"]);
    assert!(message.contains("--save-weights") && message.contains("--save-grads"), "{message}");
    assert_eq!(fs::read(place.path("text")).unwrap(), text);
    assert_eq!(place.files(), ["text"]);
    // Nor a part of the checkpoint that it goes on from, by any name.
    assert!(place.train(&["--checkpoints", "run", "--steps", "3"]).status.success());
    let index = place.path("run/step-00000003/index.json");
    let sound = fs::read(&index).unwrap();
    fs::hard_link(&index, place.path("hard")).unwrap();
    let resume = ["--checkpoints", "run", "--resume"];
    for (option, path) in [
        ("--metrics", "run/step-00000003/index.json"),
        ("--plot", "run/step-00000003/curves.svg"),
        ("--save-pretrained", "run/step-00000003/model"),
        ("--save-pretrained", "run"),
        ("--trace", "run/step-00000004"),
        ("--metrics", "run/.lock"),
        ("--metrics", "hard"),
    ] {
        let message = place.refusal(&[&resume[..], &[option, path]].concat());
        let other = message.contains("`run") || message.contains("--checkpoints");
        assert!(message.contains(option) && other, "{option} {path}: {message}");
        assert_eq!(fs::read(&index).unwrap(), sound);
    }
    // Beside checkpoints there is room.
    assert!(place.train(&[&resume[..], &["--metrics", "run/metrics"]].concat()).status.success());
}

#[test]
fn the_last_steps_lanes_are_drawn() {
    let place = Place::new();
    assert!(place.train(&["--trace-plot", "lanes.svg"]).status.success());
    let svg = fs::read_to_string(place.path("lanes.svg")).unwrap();
    assert!(svg.contains("rank 1 all-gather") && svg.contains("backward model.layers.0"), "{svg}");
}
