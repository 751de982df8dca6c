//! Reads and writes adapters as Hugging Face's PEFT does: `adapter_config.json` and `adapter_model.safetensors`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use fsdp::Fsdp;
use fsdp::files::{AtomicFile, FileError, TensorFile, save_f32};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{LoraConfig, LoraError, PROJECTIONS, Targets};
use crate::adapter::adapter_of;
use crate::config::MAX_CONFIG;
use crate::llama::Llama;
use crate::paths::check_model_dir;
use crate::pretrained::LoadReport;
use crate::settings::{Kind, Known, Plain, Setting, Table, read_object};

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// What PEFT puts before the names of the model that it wraps.
const PREFIX: &str = "base_model.model.";

/// Writes the adapters into a directory, which is made if there is none, as PEFT's `save_pretrained` does: f32 tensors
/// named `base_model.model.<projection>.lora_A.weight` and `.lora_B.weight`. `base` is the name or the path that PEFT
/// finds the pretrained model by.
///
/// Every rank must call it; rank 0 writes. Each file appears whole or not at all, the configuration last.
///
/// # Errors
/// A model without adapters, a place that cannot be written, and those of the gathers.
pub fn save_adapters(model: &Fsdp<Llama>, dir: &Path, base: Option<&str>) -> Result<(), LoraError> {
    let lora = model.module().lora().ok_or(LoraError::NotAdapted)?;
    let mut adapters: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    model.visit_weights(|spec, values| {
        if model.rank() == 0 && adapter_of(&spec.name).is_some() {
            adapters.push((format!("{PREFIX}{}", spec.name), spec.shape.clone(), values.to_vec()));
        }
        Ok(())
    })?;
    if model.rank() != 0 {
        return Ok(());
    }
    check_model_dir(dir)?;
    fs::create_dir_all(dir).map_err(FileError::on("create", dir))?;
    let tensors: Vec<_> = adapters
        .iter()
        .map(|(name, shape, values)| (name.as_str(), shape.as_slice(), values.as_slice()))
        .collect();
    save_f32(&dir.join(TENSORS), &tensors)?;
    let path = dir.join(CONFIG);
    let json = serde_json::to_string_pretty(&Saved::of(lora, base));
    let json = json.map_err(|error| LoraError::Peft { path: path.clone(), reason: error.to_string() })?;
    let mut file = AtomicFile::create(&path)?;
    file.write_all(json.as_bytes()).map_err(FileError::on("write", &path))?;
    Ok(file.commit()?)
}

/// Sets the adapters of a sharded model to those of a directory of PEFT's. The model must have adapters of the same
/// shapes on the same projections: add them by [`LoraConfig::from_peft`]. Every rank must call it.
///
/// PEFT saves an embedding or a head whole beside its adapters, for instance where the head is adapted. The weights of the model
/// are set to such ones too, as by PEFT, and the report names them.
///
/// # Errors
/// A model without adapters; a file that cannot be read or whose tensors are others, naming all of them.
pub fn load_adapters(model: &mut Fsdp<Llama>, dir: &Path) -> Result<LoadReport, LoraError> {
    model.module().lora().ok_or(LoraError::NotAdapted)?;
    let file = TensorFile::open(&dir.join(TENSORS))?;
    let mut sources: BTreeMap<&str, String> = BTreeMap::new();
    let mut expected: Vec<(&str, &[usize])> = Vec::new();
    let mut report = LoadReport::default();
    let params = model.layout().params.clone();
    for spec in &params {
        let name = format!("{PREFIX}{}", spec.name);
        let wrapped =
            spec.name.strip_suffix(".weight").map(|module| format!("{PREFIX}{module}.base_layer.weight"));
        let source = if adapter_of(&spec.name).is_some() {
            name
        } else {
            let whole = wrapped.into_iter().chain([name]).find(|name| file.contains(name));
            let Some(whole) = whole else { continue };
            report.notes.push(format!("{} was set as well: the file has it whole", spec.name));
            whole
        };
        sources.insert(&spec.name, source);
    }
    for spec in &params {
        if let Some(source) = sources.get(spec.name.as_str()) {
            expected.push((source, &spec.shape));
        }
    }
    file.check(expected.iter().copied())?;
    report.loaded = expected.len();
    let units: Vec<_> = model.layout().units.iter().map(|unit| unit.path.clone()).collect();
    for unit in units {
        model.with_full_params(&unit, |params| {
            for param in params.iter_mut() {
                let Some(source) = sources.get(param.spec.name.as_str()) else { continue };
                let read = file.read_range_f32(source, 0, &mut param.values);
                read.map_err(|error| fsdp::Error::Param {
                    param: param.spec.name.clone(),
                    message: error.to_string(),
                })?;
            }
            Ok(())
        })?;
    }
    Ok(report)
}

impl LoraConfig {
    /// The configuration of the adapters in a directory of PEFT's.
    ///
    /// # Errors
    /// The directory has no `adapter_config.json`, or one of adapters of a kind that is not implemented (other than plain LoRA,
    /// with biases, with other modules saved whole, with ranks of their own), or with settings that are not known here: all of them
    /// are named.
    pub fn from_peft(dir: &Path) -> Result<LoraConfig, LoraError> {
        let path = dir.join(CONFIG);
        let refused = |reason: String| LoraError::Peft { path: path.clone(), reason };
        let json = read_object(&path, MAX_CONFIG)?.map_err(|error| refused(error.to_string()))?;
        // Another kind has other settings.
        TABLE.check(json.iter().filter(|(name, _)| *name == "peft_type")).into_result(Some(&path))?;
        TABLE.check(json.iter()).into_result(Some(&path))?;
        let targets = match json.get("target_modules") {
            Some(Value::String(text)) if text.eq_ignore_ascii_case("all-linear") => Targets::AllLinear,
            Some(Value::String(pattern)) => Targets::Pattern(pattern.clone()),
            Some(Value::Array(names)) if names.iter().all(Value::is_string) => {
                Targets::Named(names.iter().filter_map(Value::as_str).map(str::to_owned).collect())
            }
            other => {
                let found = other.map_or("missing".to_owned(), Setting::shown);
                return Err(refused(format!(
                    "target_modules is {found}: expected a list of names or a pattern"
                )));
            }
        };
        // What is null is missing.
        let set = json.into_iter().filter(|(_, value)| !value.is_null()).collect();
        let read: Read =
            serde_json::from_value(Value::Object(set)).map_err(|error| refused(error.to_string()))?;
        let config = LoraConfig { rank: read.r, alpha: read.lora_alpha, targets, dropout: read.lora_dropout };
        config.validate()?;
        Ok(config)
    }
}

/// What an `adapter_config.json` may say. PEFT writes every setting that it has, most of them as null, false or empty.
const TABLE: Table = Table {
    known: &[
        Known::Only("peft_type", &[Plain::Text("LORA")]),
        Known::Read(Kind::Size, &["r"]),
        Known::Read(Kind::Number, &["lora_alpha", "lora_dropout"]),
        // Of several kinds.
        Known::Read(Kind::Any, &["target_modules"]),
        Known::Only("alora_invocation_tokens", &[Plain::Unset]),
        Known::Only("alpha_pattern", &[Plain::Unset]),
        Known::Only("bias", &[Plain::Text("none")]),
        Known::Only("exclude_modules", &[Plain::Unset]),
        Known::Only("fan_in_fan_out", &[Plain::Bool(false)]),
        // The other ways to begin change the weights of the model, which the adapters are then no part beside.
        Known::Only(
            "init_lora_weights",
            &[Plain::Bool(true), Plain::Bool(false), Plain::Text("gaussian"), Plain::Text("orthogonal")],
        ),
        Known::Only("layer_replication", &[Plain::Unset]),
        Known::Only("layers_to_transform", &[Plain::Unset]),
        Known::Only("lora_bias", &[Plain::Bool(false)]),
        Known::Only("modules_to_save", &[Plain::Unset]),
        Known::Only("rank_pattern", &[Plain::Unset]),
        Known::Only("target_parameters", &[Plain::Unset]),
        Known::Only("trainable_token_indices", &[Plain::Unset]),
        Known::Only("use_dora", &[Plain::Bool(false)]),
        Known::Only("use_qalora", &[Plain::Bool(false)]),
        Known::Only("use_rslora", &[Plain::Bool(false)]),
        // Where the file and its model come from, and what it is for.
        Known::Ignored(&[
            "auto_mapping",
            "base_model_name_or_path",
            "inference_mode",
            "peft_version",
            "revision",
            "task_type",
        ]),
        // Of settings that are not set: layers that are picked, QALoRA, Megatron's configuration.
        Known::Ignored(&["layers_pattern", "megatron_core", "qalora_group_size"]),
    ],
    off_is_unset: true,
};

/// `adapter_config.json` as it is written.
#[derive(Serialize)]
struct Saved<'a> {
    peft_type: &'static str,
    task_type: &'static str,
    base_model_name_or_path: Option<&'a str>,
    r: usize,
    lora_alpha: f64,
    lora_dropout: f64,
    target_modules: Modules<'a>,
    bias: &'static str,
    fan_in_fan_out: bool,
    inference_mode: bool,
    init_lora_weights: bool,
    modules_to_save: Option<()>,
    use_dora: bool,
    use_rslora: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Modules<'a> {
    List(Vec<&'a str>),
    Pattern(&'a str),
}

impl<'a> Saved<'a> {
    fn of(lora: &'a LoraConfig, base: Option<&'a str>) -> Self {
        Saved {
            peft_type: "LORA",
            task_type: "CAUSAL_LM",
            base_model_name_or_path: base,
            r: lora.rank,
            lora_alpha: lora.alpha,
            lora_dropout: lora.dropout,
            target_modules: match &lora.targets {
                Targets::AllLinear => Modules::List(PROJECTIONS.to_vec()),
                Targets::Named(names) => Modules::List(names.iter().map(String::as_str).collect()),
                Targets::Pattern(pattern) => Modules::Pattern(pattern),
            },
            bias: "none",
            fan_in_fan_out: false,
            inference_mode: true,
            init_lora_weights: true,
            modules_to_save: None,
            use_dora: false,
            use_rslora: false,
        }
    }
}

/// `adapter_config.json` as it is read, but for the modules.
#[derive(Deserialize)]
struct Read {
    #[serde(rename = "peft_type")]
    _kind: String,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<LoraConfig, LoraError> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONFIG), json).unwrap();
        LoraConfig::from_peft(dir.path())
    }

    #[test]
    fn what_peft_writes_is_read() {
        let config = read(
            r#"{"alpha_pattern": {}, "auto_mapping": null, "base_model_name_or_path": "x", "bias": "none",
                "alora_invocation_tokens": null, "arrow_config": null, "corda_config": null, "ensure_weight_tying": false,
                "eva_config": null, "exclude_modules": null, "lora_bias": false, "lora_ga_config": null, "megatron_config": null,
                "megatron_core": "megatron.core", "monteclora_config": null, "peft_version": "0.21.0", "qalora_group_size": 16,
                "target_parameters": null, "trainable_token_indices": null, "use_bdlora": null, "use_qalora": false,
                "velora_config": null, "layer_replication": null,
                "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "layers_pattern": null,
                "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 32, "lora_dropout": 0.05,
                "modules_to_save": [], "peft_type": "LORA", "r": 16, "rank_pattern": {}, "revision": null,
                "target_modules": ["gate_proj", "v_proj"], "task_type": "CAUSAL_LM", "use_dora": false,
                "use_rslora": false}"#,
        )
        .unwrap();
        let targets = Targets::Named(vec!["gate_proj".into(), "v_proj".into()]);
        assert_eq!(config, LoraConfig { rank: 16, alpha: 32.0, targets, dropout: 0.05 });
    }

    #[test]
    fn what_is_written_is_read() {
        let [named, pattern] = ["lm_head", r".*\.0\..*_proj"].map(str::to_owned);
        for targets in [Targets::default(), Targets::Named(vec![named]), Targets::Pattern(pattern)] {
            let config = LoraConfig { rank: 4, alpha: 8.5, targets, dropout: 0.25 };
            let json = serde_json::to_string(&Saved::of(&config, Some("base"))).unwrap();
            assert_eq!(read(&json).unwrap(), config);
        }
    }

    #[test]
    fn other_kinds_of_adapters_are_refused_by_the_setting() {
        let message = |changed: &str| {
            let json = format!(
                r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]{changed}}}"#
            );
            let json = json.replacen("\"LORA\"", if changed == "!" { "\"IA3\"" } else { "\"LORA\"" }, 1);
            read(&json.replace('!', "")).unwrap_err().to_string()
        };
        assert!(message("!").ends_with("adapter_config.json`: peft_type is `IA3`: only `LORA` is supported"));
        for (changed, expected) in [
            (r#", "bias": "all""#, "bias is `all`: only `none` is supported"),
            (r#", "use_dora": true"#, "use_dora is true: only false is supported"),
            (r#", "modules_to_save": ["lm_head"]"#, "modules_to_save is a list of 1: only null is supported"),
            (r#", "rank_pattern": {"q_proj": 2}"#, "rank_pattern is a map of 1: only null is supported"),
            (
                r#", "alora_invocation_tokens": [4, 5]"#,
                "alora_invocation_tokens is a list of 2: only null is supported",
            ),
            // The last of two counts.
            (r#", "r": "4""#, "r is `4`: expected a whole number from 0 on"),
            (r#", "lora_dropout": "none""#, "lora_dropout is `none`: expected a number"),
            (r#", "r": null"#, "missing field `r`"),
            (r#", "layers_to_transform": 1"#, "layers_to_transform is 1: only null is supported"),
            (
                r#", "init_lora_weights": "pissa_niter_4""#,
                "init_lora_weights is `pissa_niter_4`: only true, false, `gaussian`, `orthogonal` are supported",
            ),
            (
                r#", "loftq_config": {"bits": 4}, "new_in_peft_1": true, "newer": false, "newest": null"#,
                "unknown settings `loftq_config` (a map of 1), `new_in_peft_1` (true): they may change what the file means; if they do \
                 not, remove them",
            ),
        ] {
            let message = message(changed);
            assert!(message.ends_with(expected), "{message}");
        }
        let modules = |modules: &str| {
            read(&format!(r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": {modules}}}"#))
        };
        assert_eq!(modules("\".*_proj\"").unwrap().targets, Targets::Pattern(".*_proj".into()));
        assert_eq!(modules("\"All-Linear\"").unwrap().targets, Targets::AllLinear);
        for wrong in ["null", "[\"q_proj\", 3]", "{\"q_proj\": 1}"] {
            let message = modules(wrong).unwrap_err().to_string();
            assert!(message.ends_with(": expected a list of names or a pattern"), "{message}");
        }
        let message = LoraConfig::from_peft(Path::new("no/such")).unwrap_err().to_string();
        assert!(message.starts_with("cannot read `no/such/adapter_config.json`: "), "{message}");
    }
}
