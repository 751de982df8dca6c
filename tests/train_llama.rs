//! `examples/train_llama.rs` as a user runs it: what it writes, and what it says when it is asked for what
//! cannot be.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use fsdp::files::{TensorFile, save_f32};
use serde_json::Value;
use tempfile::TempDir;

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| support::example("train_llama"))
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
        assert_eq!(step["step"], at);
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
    for (a, b) in losses("a").into_iter().zip(losses("b")) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
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
        assert!(steps.iter().enumerate().all(|(at, step)| step["step"] == at), "{steps:?}");
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
        for (ours, theirs) in losses(again).into_iter().zip(losses(whole)) {
            assert!((ours - theirs).abs() < if dtype == "f32" { 1e-5 } else { 2e-2 }, "{ours} {theirs}");
        }
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
        for (ours, theirs) in losses(name, options).into_iter().zip(&plain) {
            assert!((ours - theirs).abs() < tolerance, "{name}: {ours} {theirs}");
        }
    }
    let message = place.refusal(&["--ranks", "4", "--outer-ranks", "3"]);
    assert!(message.contains("4 ranks cannot be 3 replicas"), "{message}");
    let message = place.refusal(&["--reshard-after-forward", "sometimes"]);
    assert!(message.contains("expected always, never, or a number of ranks"), "{message}");
}

#[test]
fn an_unknown_strategy_is_answered_with_the_known_ones() {
    let message = Place::new().refusal(&["--strategy", "zero3"]);
    let expected = "unknown strategy `zero3`: expected no-shard, optim, optim-grads or optim-grads-params";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn a_batch_that_cannot_be_divided_is_refused_with_the_numbers() {
    let message = Place::new().refusal(&["--ranks", "2", "--microbatches", "3"]);
    assert!(message.contains("global batch of 8 rows"), "{message}");
    assert!(message.contains("a positive multiple of 6"), "{message}");
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
    assert!(message.contains("the loss of step 0 is NaN"), "{message}");
    let message = place.refusal(&[&outputs[..], &["--check-finite"]].concat());
    assert!(message.contains("unit `model.layers.1`, forward, step 0"), "{message}");
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
    assert!(message.contains("--save-pretrained and --text are the same file"), "{message}");
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
}

#[test]
fn the_last_steps_lanes_are_drawn() {
    let place = Place::new();
    assert!(place.train(&["--trace-plot", "lanes.svg"]).status.success());
    let svg = fs::read_to_string(place.path("lanes.svg")).unwrap();
    assert!(svg.contains("rank 1 all-gather") && svg.contains("backward model.layers.0"), "{svg}");
}
