//! `fsdp checkpoint` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use fsdp::checkpoint::{Checkpoint, Checkpoints, Contents, Index};
use fsdp::files::TensorFile;
use fsdp::prelude::*;
use fsdp_models::lora::LoraConfig;
use fsdp_models::pretrained::{Pretrained, Weights};
use fsdp_models::{Llama, LlamaConfig};
use serde_json::Value;
use tempfile::TempDir;

/// The program with these options after the name of its subcommand.
fn program(options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fsdp"));
    command.arg("checkpoint").args(options);
    command
}

struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Place(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Standard output of a run that must end with this status, and say nothing else.
    fn run(&self, status: i32, options: &[&str]) -> String {
        let output = program(options).current_dir(&self.0).output().unwrap();
        let (text, error) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!(output.status.code(), Some(status), "{text}{error}");
        assert_eq!(error, "");
        text
    }

    /// The message of a run that must fail.
    fn refusal(&self, options: &[&str]) -> String {
        let output = program(options).current_dir(&self.0).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert_eq!(error.matches("error: ").count(), 1, "{error}");
        error
    }
}

/// `sum(weight * x)`: every gradient is `x`.
#[derive(FsdpUnit)]
struct Net {
    weight: Param,
    #[fsdp(frozen)]
    scale: Param,
    #[fsdp(buffer)]
    counts: Tensor,
}

impl Net {
    fn new() -> Net {
        Net {
            weight: Param::new((5, 8)).with_init(Init::Ones),
            scale: Param::new(2).with_init(Init::Constant(0.25)),
            counts: Tensor::new(&[1u32, 2, 3], &Device::Cpu).unwrap(),
        }
    }
}

impl Forward for Net {
    fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
        (x * self.weight.tensor(scope)?)?.sum_all()
    }
}

/// Trains `Net` and saves after each step.
fn train(dir: &Path, ranks: usize, steps: u64) {
    launch::local(ranks, |world| -> fsdp::Result<()> {
        let mut model = Net::new().fully_shard(&world.data_parallel_mesh())?;
        let mut optimizer = model.optimizer(AdamW::default().lr(0.5).weight_decay(0.0))?;
        let mut ema = model.ema(0.5)?;
        for step in 1..=steps {
            let loss: Tensor = model.forward(&Tensor::ones((5, 8), DType::F32, &Device::Cpu)?)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
            ema.update(&model)?;
            let contents = Contents::of(&model).optimizer(&optimizer).average("ema", &ema);
            Checkpoints::new(dir).save(contents.value("samples", &(8 * step)))?;
        }
        Ok(())
    })
    .unwrap();
}

/// The file of a tensor's part, and where the part begins in it.
fn place_of(checkpoint: &Path, section: &str, name: &str, part: usize) -> (PathBuf, u64) {
    let index = Index::read(checkpoint).unwrap();
    let part = &index.tensors[section][name].parts[part];
    (checkpoint.join(&index.files[part.file].name), part.offset)
}

fn flip(path: &Path, offset: u64) {
    let mut bytes = fs::read(path).unwrap();
    bytes[offset as usize] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn inspect_shows_the_checkpoints_of_a_directory_and_what_is_in_the_latest() {
    let place = Place::new();
    train(&place.path("run"), 2, 2);
    fs::create_dir(place.path("run/.unfinished-step-00000003")).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let expected = format!(
        "\
checkpoint     step  ranks     bytes
-------------  ----  -----  --------
step-00000001     1      2  1.38 KiB
step-00000002     2      2  1.38 KiB
.unfinished-step-00000003: not complete: being saved or removed, or left by a program that was killed

run/step-00000002
step        2
seed        0
written by  2 ranks, dp_shard=2, strategy optim-grads-params
precision   {precision}
alignment   element
library     fsdp {version}, format 2
files       2, 1.38 KiB, 432 B to 980 B each

value.member
-----------------------  {rule}
ema                      2
optimizer.learning_rate  0.5
optimizer.rule           adamw
optimizer.settings       optimizer adamw, learning rate 0.5, betas 0.9 and 0.999, eps 0.00000001,.. (87 characters)
optimizer.steps          2
samples                  16

section               tensors  elements  bytes
--------------------  -------  --------  -----
ema                         1        40  160 B
model                       3        45  180 B
optimizer.exp_avg           1        40  160 B
optimizer.exp_avg_sq        1        40  160 B
--------------------  -------  --------  -----
total                       6       165  660 B

tensor of model  dtype  shape   elements  bytes  parts  ranks
---------------  -----  ------  --------  -----  -----  -----
counts           U32    [3]            3   12 B      1  0
scale            F32    [2]            2    8 B      1  0
weight           F32    [5, 8]        40  160 B      2  0-1
",
        precision = MixedPrecision::F32,
        rule = "-".repeat(90),
    );
    assert_eq!(place.run(0, &["inspect", "run"]), expected);

    let tensors = place.run(0, &["inspect", "run/step-00000001", "--section", "ema"]);
    assert!(tensors.starts_with("run/step-00000001\nstep        1\n"), "{tensors}");
    let table = &tensors[tensors.find("tensor of").unwrap()..];
    let expected = "\
tensor of ema  dtype  shape   elements  bytes  parts  ranks
-------------  -----  ------  --------  -----  -----  -----
weight         F32    [5, 8]        40  160 B      2  0-1
";
    assert_eq!(table, expected);
    let message = place.refusal(&["inspect", "nowhere"]);
    assert!(message.starts_with("error: cannot open `nowhere`: "), "{message}");
    let message = place.refusal(&["inspect", "run", "--section", "emma", "--json"]);
    let expected = "error: checkpoint `run/step-00000002` has no section `emma`: it has ema, model, \
                    optimizer.exp_avg, optimizer.exp_avg_sq\n";
    assert_eq!(message, expected);
}

#[test]
fn inspect_writes_json_for_programs() {
    let place = Place::new();
    train(&place.path("run"), 2, 2);
    let json: Value = serde_json::from_str(&place.run(0, &["inspect", "run", "--json"])).unwrap();
    assert_eq!((&json["step"], &json["written_by"]["ranks"]), (&2.into(), &2.into()));
    assert_eq!(json["values"]["optimizer"]["steps"], 2);
    assert_eq!(json["checkpoints"][0]["name"], "step-00000001");
    assert_eq!(json["sections"].as_array().unwrap().len(), 4);
    let tensors = json["tensors"].as_array().unwrap();
    let weight = tensors.iter().find(|tensor| tensor["section"] == "ema").unwrap();
    let expected = serde_json::json!({
        "section": "ema", "name": "weight", "dtype": "F32", "shape": [5, 8], "elements": 40, "bytes": 160, "parts": 2,
        "files": ["rank-00000.safetensors", "rank-00001.safetensors"],
    });
    assert_eq!((tensors.len(), weight), (6, &expected));
    // Of a checkpoint by itself, and of a section of it.
    let json = place.run(0, &["inspect", "run/step-00000001", "--json", "--section", "model"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert!(json.get("checkpoints").is_none());
    assert_eq!(json["tensors"].as_array().unwrap().len(), 3);
}

#[test]
fn inspect_shows_what_a_model_is_beyond_its_tensors() {
    #[derive(FsdpUnit)]
    enum Act {
        Relu,
        Scaled(Param),
    }
    #[derive(FsdpUnit)]
    struct Tied {
        first: Act,
        second: Act,
        bias: Option<Param>,
        embed: Param,
        #[fsdp(tie_with = "embed")]
        head: Param,
    }
    let place = Place::new();
    let new = || Tied {
        first: Act::Relu,
        second: Act::Scaled(Param::new(2)),
        bias: Some(Param::new(2)),
        embed: Param::new(3),
        head: Param::new(3),
    };
    launch::local(2, |world| -> fsdp::Result<()> {
        let model = new().fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(place.path("run")).save(Contents::of(&model)).map(drop)
    })
    .unwrap();
    let text = place.run(0, &["inspect", "run"]);
    let expected = "
variant of
----------  -----------
first       Act::Relu
second      Act::Scaled

tie of
------  -----
head    embed

section ";
    assert!(text.contains(expected), "{text}");
    let json: Value = serde_json::from_str(&place.run(0, &["inspect", "run", "--json"])).unwrap();
    let model = serde_json::json!({
        "variants": {"bias": "Some", "first": "Act::Relu", "second": "Act::Scaled"}, "ties": {"head": "embed"}, "buffers": [],
    });
    assert_eq!(json["model"], model);
}

#[test]
fn verify_lists_all_that_is_damaged() {
    let place = Place::new();
    // Two blocks and a bit on each rank.
    launch::local(2, |world| -> fsdp::Result<()> {
        let model = Param::new(1_200_000).fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(place.path("run")).save(Contents::of(&model)).map(drop)
    })
    .unwrap();
    let checkpoint = place.path("run/step-00000000");
    let sound = place.run(0, &["verify", "run"]);
    assert_eq!(sound, "run/step-00000000: sound, 1 tensors in 2 files of 4.58 MiB\n");

    let name = Index::read(&checkpoint).unwrap().tensors["model"].keys().next().unwrap().clone();
    let [(first, start), (second, _)] = [0, 1].map(|part| place_of(&checkpoint, "model", &name, part));
    flip(&first, start + 5);
    flip(&first, start + (2 << 20));
    flip(&second, 20);
    let found = place.run(1, &["verify", "run"]);
    let lines: Vec<&str> = found.lines().collect();
    assert_eq!((lines.len(), lines[0]), (4, "run/step-00000000: damaged"), "{found}");
    let block = 1 << 20;
    for (line, file, offset, end, tensor) in [
        (lines[1], "rank-00000", start, start + block, format!("model:{name}")),
        (lines[2], "rank-00000", start + 2 * block, start + 2_400_000, format!("model:{name}")),
        (lines[3], "rank-00001", 0, start, "header".to_owned()),
    ] {
        let place = format!(
            "  `run/step-00000000/{file}.safetensors` is corrupted: bytes {offset}..{end} have the checksum "
        );
        assert!(
            line.starts_with(&place) && line.ends_with(&format!("was written (in tensor `{tensor}`)")),
            "{line}"
        );
    }

    // What is left of a file is still looked at.
    fs::File::options().write(true).open(&first).unwrap().set_len(start + block + 7).unwrap();
    fs::remove_file(&second).unwrap();
    let found = place.run(1, &["verify", "run"]);
    let lines: Vec<&str> = found.lines().collect();
    assert_eq!(lines.len(), 4, "{found}");
    let length = format!("has {} bytes, {} were written", start + block + 7, start + 2_400_000);
    assert!(lines[1].ends_with(&format!("rank-00000.safetensors` is not valid: it {length}")), "{found}");
    assert!(lines[2].contains(&format!("bytes {start}..{} have", start + block)), "{found}");
    assert!(lines[3].starts_with("  cannot open `run/step-00000000/rank-00001.safetensors`: "), "{found}");
}

#[test]
fn verify_goes_through_checkpoints_and_directories_of_them() {
    let place = Place::new();
    train(&place.path("run"), 2, 3);
    fs::create_dir(place.path("run/.unfinished-step-00000004")).unwrap();
    let (file, offset) = place_of(&place.path("run/step-00000001"), "model", "weight", 0);
    flip(&file, offset);
    fs::write(place.path("run/step-00000002/index.json"), "{}").unwrap();
    let unfinished = "run/.unfinished-step-00000004: not complete, and no checkpoint\n";
    let sound = "run/step-00000003: sound, 6 tensors in 2 files of 1.38 KiB\n";
    assert_eq!(place.run(0, &["verify", "run"]), format!("{unfinished}{sound}"));
    let all = place.run(1, &["verify", "--all", "run"]);
    let lines: Vec<&str> = all.lines().collect();
    assert_eq!(
        (lines.len(), lines[1], lines[3]),
        (6, "run/step-00000001: damaged", "run/step-00000002: damaged")
    );
    assert!(lines[4].starts_with("  `run/step-00000002/index.json` is not valid: missing field"), "{all}");
    assert_eq!(format!("{}\n", lines[5]), sound);
    assert_eq!(place.run(0, &["verify", "run/step-00000003"]), sound);
    // One that has lost its index is not passed over, the latest one neither.
    let lost = "run/step-00000003: damaged\n  `run/step-00000003/index.json` is not valid: it is not there, ";
    let index = fs::read(place.path("run/step-00000003/index.json")).unwrap();
    fs::remove_file(place.path("run/step-00000003/index.json")).unwrap();
    for options in [&["verify", "run"][..], &["verify", "--all", "run"]] {
        assert!(place.run(1, options).contains(lost));
    }
    fs::write(place.path("run/step-00000003/index.json"), index).unwrap();
    fs::create_dir(place.path("empty")).unwrap();
    let message = place.refusal(&["verify", "nowhere", "run/step-00000003"]);
    assert!(message.starts_with("error: cannot open `nowhere`: "), "{message}");
    let message = place.refusal(&["verify", "empty", "run/step-00000003"]);
    assert_eq!(message, "error: `empty` is not a checkpoint: it has no `index.json`\n");
    // The listing has what can be read of the others.
    let listing = place.run(0, &["inspect", "run"]);
    assert!(
        listing
            .contains("\nstep-00000002     -      -         -  `run/step-00000002/index.json` is not valid")
    );
}

#[test]
fn diff_tells_what_differs_and_not_how_it_is_laid_out() {
    let place = Place::new();
    train(&place.path("run"), 2, 2);
    train(&place.path("other"), 3, 2);
    let expected = "\
a: run/step-00000002, step 2, written by 2 ranks
b: other/step-00000002, step 2, written by 3 ranks

the same: 6 tensors
";
    assert_eq!(place.run(0, &["diff", "run", "other"]), expected);
    let expected = "\
a: run/step-00000001, step 1, written by 2 ranks
b: run/step-00000002, step 2, written by 2 ranks

value            a  b
---------------  -  --
ema              1  2
optimizer.steps  1  2
samples          8  16
step             1  2

values of                    differ  of  first at  max abs  at      max rel
---------------------------  ------  --  --------  -------  ------  -------
ema:weight                       40  40  [0, 0]    3.75e-1  [0, 0]  5.00e-1
model:weight                     40  40  [0, 0]    5.00e-1  [0, 0]   1.00e0
optimizer.exp_avg:weight         40  40  [0, 0]    9.00e-2  [0, 0]  4.74e-1
optimizer.exp_avg_sq:weight      40  40  [0, 0]    9.99e-4  [0, 0]  5.00e-1

different; 2 tensors are the same
";
    assert_eq!(place.run(1, &["diff", "run/step-00000001", "run"]), expected);
    let model = place.run(1, &["diff", "run/step-00000001", "run", "--section", "model"]);
    assert!(
        model.ends_with("different; 2 tensors are the same\n") && !model.contains("optimizer"),
        "{model}"
    );
    let message = place.refusal(&["diff", "run", "other", "--section", "emma"]);
    assert!(message.contains("has no section `emma`"), "{message}");
    assert!(place.refusal(&["diff", "run", "nowhere"]).contains("nowhere"));
    let (file, offset) = place_of(&place.path("other/step-00000002"), "model", "weight", 0);
    flip(&file, offset);
    let message = place.refusal(&["diff", "run", "other"]);
    assert!(message.contains("is corrupted: bytes") && message.contains("`model:weight`"), "{message}");
}

#[test]
fn diff_lists_tensors_that_only_one_has_and_other_shapes() {
    #[derive(FsdpUnit)]
    struct Pair {
        kept: Param,
        changed: Param,
        #[fsdp(rename = "only.in.first")]
        extra: Option<Param>,
        second: Option<Param>,
    }
    let place = Place::new();
    for (name, changed, first) in [("a", 3, true), ("b", 4, false)] {
        launch::local(2, |world| -> fsdp::Result<()> {
            let model = Pair {
                kept: Param::new(7),
                changed: Param::new(changed),
                extra: first.then(|| Param::new(2)),
                second: (!first).then(|| Param::new(2)),
            };
            let model = model.fully_shard(&world.data_parallel_mesh())?;
            Checkpoints::new(place.path(name)).save(Contents::of(&model)).map(drop)
        })
        .unwrap();
    }
    let expected = "
shape of       a    b
-------------  ---  ---
model:changed  [3]  [4]

only in a
-------------------
model:only.in.first

only in b
------------
model:second

different; 1 tensors are the same
";
    let text = place.run(1, &["diff", "a", "b"]);
    assert_eq!(&text[text.find("\n\n").unwrap() + 1..], expected);
}

#[test]
fn an_export_has_the_tensors_bit_for_bit() {
    let place = Place::new();
    train(&place.path("run"), 2, 2);
    assert_eq!(place.run(0, &["export", "run", "hf"]), "hf: 3 tensors, 180 B\n");
    assert!(place.run(0, &["diff", "run", "hf"]).ends_with("the same: 3 tensors\n"));
    let file = TensorFile::open(&place.path("hf/model.safetensors")).unwrap();
    assert_eq!(file.read_range_bytes("counts", 0, 3).unwrap(), [1u32, 2, 3].map(u32::to_le_bytes).concat());
    assert_eq!(fs::read_dir(place.path("hf")).unwrap().count(), 1);

    // An average with what it is no average of, narrowed, in several files.
    let options = ["export", "run", "ema", "--section", "ema", "--dtype", "bf16", "--max-shard-size", "50 B"];
    let expected = "ema: 3 tensors, 96 B\n2 of them from section `model`, as `ema` has none of their names\n";
    assert_eq!(place.run(0, &options), expected);
    place.run(0, &["export", "run", "whole", "--section", "ema"]);
    for pair in [["run", "whole"], ["whole", "run"]] {
        let text = place.run(0, &["diff", pair[0], pair[1], "--section", "ema"]);
        assert!(text.ends_with("\nthe same: 3 tensors\n"), "{text}");
    }
    let text = place.run(1, &["diff", "hf", "run", "--section", "ema"]);
    assert!(text.contains("\nema:weight ") && text.ends_with("2 tensors are the same\n"), "{text}");
    let text = place.run(1, &["diff", "ema", "run"]);
    let expected = "
dtype of      a     b
------------  ----  ---
model:scale   BF16  F32
model:weight  BF16  F32

values of     differ  of  first at  max abs  at      max rel
------------  ------  --  --------  -------  ------  -------
model:weight      40  40  [0, 0]    3.75e-1  [0, 0]   1.00e0

different; 1 tensors are the same
";
    assert_eq!(&text[text.find("\n\n").unwrap() + 1..], expected);
    let weights = Weights::open(&place.path("ema")).unwrap();
    let mut values = [0.0; 40];
    weights.read_range_f32("weight", 0, &mut values).unwrap();
    assert!(values.iter().all(|value| (value - 0.375).abs() < 1e-6), "{values:?}");
}

const CONFIG: &str = r#"{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 20, "tie_word_embeddings": true, "bos_token_id": 1, "torch_dtype": "float16"}"#;

fn save_llama(dir: &Path) {
    let config: LlamaConfig = serde_json::from_str(CONFIG).unwrap();
    launch::local(3, |world| -> fsdp_models::Result<()> {
        let model = Llama::new(&config)?.fully_shard(&world.data_parallel_mesh())?;
        Ok(Checkpoints::new(dir).save(Contents::of(&model)).map(drop)?)
    })
    .unwrap();
}

#[test]
fn an_exported_llama_is_a_pretrained_one() {
    let place = Place::new();
    save_llama(&place.path("run"));
    fs::write(place.path("config.json"), CONFIG).unwrap();
    let generation = serde_json::json!({"eos_token_id": [18, 19]});
    fs::write(place.path("generation_config.json"), generation.to_string()).unwrap();
    let options = ["--config", "config.json", "--max-shard-size", "2KB"];
    place.run(0, &[&["export", "run", "hf"][..], &options].concat());
    assert!(place.run(0, &["diff", "run", "hf"]).ends_with("the same: 20 tensors\n"));
    let config: Value = serde_json::from_slice(&fs::read(place.path("hf/config.json")).unwrap()).unwrap();
    assert_eq!((&config["bos_token_id"], &config["torch_dtype"]), (&1.into(), &"float32".into()));
    let saved = fs::read(place.path("hf/generation_config.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&saved).unwrap(), generation);

    let saved = Checkpoint::open(place.path("run/step-00000000")).unwrap();
    launch::local(2, |world| -> fsdp_models::Result<()> {
        let mesh = world.data_parallel_mesh();
        let model = Llama::from_pretrained(&place.path("hf"), &mesh, &FsdpConfig::default())?;
        model.visit_weights(|spec, values| {
            let mut expected = vec![0.0; values.len()];
            saved.read_f32("model", &spec.name, 0, &mut expected)?;
            assert_eq!(values, expected);
            Ok(())
        })?;
        Ok(())
    })
    .unwrap();
    assert!(Pretrained::open(&place.path("hf")).unwrap().check().unwrap().is_empty());
}

#[test]
fn adapters_are_not_exported_as_weights() {
    let place = Place::new();
    fs::write(place.path("config.json"), CONFIG).unwrap();
    launch::local(2, |world| -> fsdp_models::Result<()> {
        let mut model = Llama::new(&serde_json::from_str(CONFIG).unwrap())?;
        model.add_adapters(&LoraConfig::default())?;
        let model = model.fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(place.path("whole")).save(Contents::of(&model))?;
        Checkpoints::new(place.path("alone")).save(Contents::of(&model).without_frozen())?;
        Ok(())
    })
    .unwrap();
    for run in ["whole", "alone"] {
        for options in [&[][..], &["--config", "config.json"]] {
            let message = place.refusal(&[&["export", run, "hf"][..], options].concat());
            let expected = format!(
                "error: checkpoint `{run}/step-00000000` is of low-rank adapters, 8 tensors of which \
                 `model.layers.0.self_attn.q_proj.lora_A.weight` is the first: `finetune --resume --export DIR` writes \
                 the model with them merged, `--export-adapters DIR` writes them alone\n"
            );
            assert_eq!(message, expected);
            assert!(!place.path("hf").exists());
        }
    }
}

#[test]
fn an_export_that_fails_leaves_nothing() {
    let place = Place::new();
    save_llama(&place.path("run"));
    let nothing = || assert!(!place.path("hf").exists());

    let other = CONFIG.replace("\"vocab_size\": 20", "\"vocab_size\": 21").replace("true", "false");
    fs::write(place.path("config.json"), other).unwrap();
    let message = place.refusal(&["export", "run", "hf", "--config", "config.json"]);
    let expected = "error: `run/step-00000000` does not fit the model:\n  1 missing: lm_head.weight\n  1 of another shape: \
                    model.embed_tokens.weight (model [21, 16], file [20, 16])\n";
    assert_eq!(message, expected);
    nothing();
    assert!(
        place.refusal(&["export", "run", "hf", "--config", "none.json"]).contains("cannot read `none.json`")
    );
    assert!(
        place.refusal(&["export", "run", "hf", "--section", "optimizer.exp_avg"]).contains("only weights")
    );
    assert!(place.refusal(&["export", "run", "hf", "--section", "ema"]).contains("has no section `ema`"));
    let message = place.refusal(&["export", "run", "run/step-00000000"]);
    assert_eq!(message, "error: `run/step-00000000` is a checkpoint: export to another directory\n");
    // Nor into what a checkpoint is removed with, or where others come and go.
    for dir in ["run", "run/step-00000000/hf", "run/step-00000007", "run/step-00000000/a/../b"] {
        let message = place.refusal(&["export", "run", dir]);
        assert!(
            message.contains(&format!("`{dir}`")) && message.ends_with(": give another place\n"),
            "{message}"
        );
    }
    let files = fs::read_dir(place.path("run")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(files.into_iter().all(|name| name == ".lock" || name == "step-00000000"));
    fs::create_dir(place.path("kept")).unwrap();
    fs::write(place.path("kept/config.json"), CONFIG).unwrap();
    let message = place.refusal(&["export", "run", "kept", "--config", "kept/config.json"]);
    assert!(message.contains("--config is `kept/config.json`, which is in `kept`"), "{message}");
    assert_eq!(fs::read_to_string(place.path("kept/config.json")).unwrap(), CONFIG);
    let message = place.refusal(&["export", "run", "hf", "--max-shard-size", "much"]);
    assert!(message.contains("expected one as 5GB, 500 MiB or 4096"), "{message}");
    let message = place.refusal(&["export", "run", "hf", "--max-shard-size", "0"]);
    assert!(message.contains("`0` is no byte at all: expected at least 1"), "{message}");
    nothing();

    let (file, offset) = place_of(&place.path("run/step-00000000"), "model", "model.norm.weight", 0);
    flip(&file, offset);
    let message = place.refusal(&["export", "run", "hf"]);
    assert!(message.contains("is corrupted") && message.contains("`model:model.norm.weight`"), "{message}");
    nothing();
    // What is there stays.
    fs::create_dir(place.path("hf")).unwrap();
    fs::write(place.path("hf/model.safetensors"), "old").unwrap();
    place.refusal(&["export", "run", "hf", "--max-shard-size", "2KB"]);
    assert_eq!(fs::read_dir(place.path("hf")).unwrap().count(), 1);
    assert_eq!(fs::read(place.path("hf/model.safetensors")).unwrap(), b"old");
}

#[test]
fn a_value_that_a_dtype_cannot_hold_is_named() {
    let place = Place::new();
    launch::local(1, |world| -> fsdp::Result<()> {
        let model = Param::new(3).with_init(Init::Constant(1e6)).fully_shard(&world.data_parallel_mesh())?;
        Checkpoints::new(place.path("run")).save(Contents::of(&model)).map(drop)
    })
    .unwrap();
    let message = place.refusal(&["export", "run", "hf", "--dtype", "f16"]);
    assert!(message.contains("is 1000000: it becomes infinite in F16"), "{message}");
    assert!(!place.path("hf").exists());
}
