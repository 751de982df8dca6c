//! Adapters alone, as the files of Hugging Face's PEFT: `adapter_config.json` and `adapter_model.safetensors`.

use std::fs;
use std::io::Write;
use std::path::Path;

use fsdp::Fsdp;
use fsdp::engine::Access;
use fsdp::files::{self, AtomicFile, FileError, TensorFile, save_f32};
use fsdp::spec::ParamSpec;
use serde::{Deserialize, Serialize};

use super::{LoraConfig, LoraError, Targets, adapter_of};
use crate::config::MAX_CONFIG;
use crate::llama::Llama;
use crate::paths::check_model_dir;

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
/// # Errors
/// A model without adapters; a file that cannot be read or whose tensors are others, naming all of them.
pub fn load_adapters(model: &Fsdp<Llama>, dir: &Path) -> Result<(), LoraError> {
    model.module().lora().ok_or(LoraError::NotAdapted)?;
    let file = TensorFile::open(&dir.join(TENSORS))?;
    let adapters = model.layout().params.iter().filter(|spec| adapter_of(&spec.name).is_some());
    let named: Vec<(String, &ParamSpec)> =
        adapters.map(|spec| (format!("{PREFIX}{}", spec.name), spec)).collect();
    file.check(named.iter().map(|(name, spec)| (name.as_str(), spec.shape.as_slice())))?;
    for unit in &model.layout().units {
        model.with_full_params(&unit.path, Access::Write, |params| {
            for param in params.iter_mut().filter(|param| adapter_of(&param.spec.name).is_some()) {
                let read = file.read_range_f32(&format!("{PREFIX}{}", param.spec.name), 0, &mut param.values);
                read.map_err(|error| fsdp::Error::Param {
                    param: param.spec.name.clone(),
                    message: error.to_string(),
                })?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

impl LoraConfig {
    /// The configuration of the adapters in a directory of PEFT's.
    ///
    /// # Errors
    /// The directory has no `adapter_config.json`, or it tells of adapters of a kind that is not implemented: other
    /// than plain LoRA, with biases, with other modules saved whole, or with ranks of their own.
    pub fn from_peft(dir: &Path) -> Result<LoraConfig, LoraError> {
        let path = dir.join(CONFIG);
        let text = files::read_to_string(&path, MAX_CONFIG)?;
        let refused = |reason: String| LoraError::Peft { path: path.clone(), reason };
        let read: Read = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
        if let Some((field, value, expected)) = read.unsupported() {
            return Err(refused(format!("{field} is {value}: only {expected} is supported")));
        }
        let targets = match read.target_modules {
            Modules::List(names) => Targets::Named(names),
            Modules::Pattern(name) if name == "all-linear" => Targets::AllLinear,
            Modules::Pattern(pattern) => {
                return Err(refused(format!(
                    "target_modules is the pattern `{pattern}`: only a list of names is supported"
                )));
            }
        };
        let config = LoraConfig { rank: read.r, alpha: read.lora_alpha, targets, dropout: read.lora_dropout };
        config.validate()?;
        Ok(config)
    }
}

/// `adapter_config.json` as it is written.
#[derive(Serialize)]
struct Saved<'a> {
    peft_type: &'static str,
    task_type: &'static str,
    base_model_name_or_path: Option<&'a str>,
    r: usize,
    lora_alpha: f64,
    lora_dropout: f64,
    target_modules: Vec<&'a str>,
    bias: &'static str,
    fan_in_fan_out: bool,
    inference_mode: bool,
    init_lora_weights: bool,
    modules_to_save: Option<()>,
    use_dora: bool,
    use_rslora: bool,
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
            target_modules: lora.targets.names(),
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

/// `adapter_config.json` as it is read: what matters to the arithmetic.
#[derive(Deserialize)]
struct Read {
    peft_type: String,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    target_modules: Modules,
    bias: Option<String>,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    use_rslora: bool,
    modules_to_save: Option<Vec<String>>,
    layers_to_transform: Option<serde_json::Value>,
    rank_pattern: Option<serde_json::Map<String, serde_json::Value>>,
    alpha_pattern: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Modules {
    List(Vec<String>),
    Pattern(String),
}

impl Read {
    /// The first setting that is not implemented: its name, its value, what is.
    fn unsupported(&self) -> Option<(&'static str, String, &'static str)> {
        let filled = |map: &Option<serde_json::Map<_, _>>| map.as_ref().is_some_and(|map| !map.is_empty());
        let bias = self.bias.as_deref().unwrap_or("none");
        let checks = [
            ("peft_type", format!("`{}`", self.peft_type), "`LORA`", self.peft_type != "LORA"),
            ("bias", format!("`{bias}`"), "`none`", bias != "none"),
            ("fan_in_fan_out", "true".into(), "false", self.fan_in_fan_out),
            ("use_dora", "true".into(), "false", self.use_dora),
            ("use_rslora", "true".into(), "false", self.use_rslora),
            ("modules_to_save", "a list".into(), "null", self.modules_to_save.is_some()),
            ("layers_to_transform", "given".into(), "null", self.layers_to_transform.is_some()),
            ("rank_pattern", "given".into(), "none", filled(&self.rank_pattern)),
            ("alpha_pattern", "given".into(), "none", filled(&self.alpha_pattern)),
        ];
        let found = checks.into_iter().find(|(.., refused)| *refused);
        found.map(|(field, value, expected, _)| (field, value, expected))
    }
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
                "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights": true, "layers_pattern": null,
                "layers_to_transform": null, "loftq_config": {}, "lora_alpha": 32, "lora_dropout": 0.05,
                "modules_to_save": null, "peft_type": "LORA", "r": 16, "rank_pattern": {}, "revision": null,
                "target_modules": ["gate_proj", "v_proj"], "task_type": "CAUSAL_LM", "use_dora": false,
                "use_rslora": false}"#,
        )
        .unwrap();
        let targets = Targets::Named(vec!["gate_proj".into(), "v_proj".into()]);
        assert_eq!(config, LoraConfig { rank: 16, alpha: 32.0, targets, dropout: 0.05 });
    }

    #[test]
    fn what_is_written_is_read() {
        for targets in [Targets::default(), Targets::Named(vec!["lm_head".into()])] {
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
            (r#", "modules_to_save": ["lm_head"]"#, "modules_to_save is a list: only null is supported"),
            (r#", "rank_pattern": {"q_proj": 2}"#, "rank_pattern is given: only none is supported"),
        ] {
            let message = message(changed);
            assert!(message.ends_with(expected), "{message}");
        }
        let pattern = read(r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ".*_proj"}"#);
        assert!(pattern.unwrap_err().to_string().contains("only a list of names"));
        let message = LoraConfig::from_peft(Path::new("no/such")).unwrap_err().to_string();
        assert!(message.starts_with("cannot read `no/such/adapter_config.json`: "), "{message}");
    }
}
