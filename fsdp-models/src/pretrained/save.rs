//! Saves a sharded model as a Hugging Face directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use fsdp::Fsdp;
use fsdp::files::{AtomicFile, FileError, StoredDtype};
use fsdp::spec::{Dtype, ParamSpec};
use serde_json::{Map, Value, json};

use super::writer::{PretrainedWriter, StoredTensor};
use super::{Pretrained, params_of};
use crate::adapter::adapter_of;
use crate::config::LlamaConfig;
use crate::error::PretrainedError;
use crate::generation::write_generation_config;
use crate::paths::check_model_dir;
use crate::tokenizer::Tokenizer;

/// How a model is saved.
#[derive(Clone, Copy, Debug)]
pub struct SaveOptions<'a> {
    /// What values are rounded to; `None` leaves each tensor the dtype of the model's weights.
    pub dtype: Option<Dtype>,
    /// Most bytes of the tensors in one file; a larger tensor has a file of its own.
    pub max_shard_bytes: u64,
    /// Saved beside the weights. Without it the directory is a model that takes and gives token ids: whoever uses it needs to be
    /// told of a tokenizer, as [`Tokenizer::open`] finds none there.
    pub tokenizer: Option<&'a Tokenizer>,
}

impl Default for SaveOptions<'_> {
    /// The model's dtypes, files of 5 GB as `transformers` makes them, no tokenizer.
    fn default() -> Self {
        SaveOptions { dtype: None, max_shard_bytes: 5_000_000_000, tokenizer: None }
    }
}

/// Saves a model as a directory that `transformers` loads: `model.safetensors`, or several files and their index, and
/// `config` as `config.json`, with the dtype added. Every rank must call it, with the same arguments; rank 0 writes.
///
/// Weights are gathered one bucket of the layout at a time, main weights where there are any, and pass rank 0 on their way to
/// the file. A fused parameter is saved as its parts, a tied one once, under its first name. Buffers are not saved.
///
/// ```
/// use fsdp::prelude::*;
/// use fsdp_models::pretrained::{SaveOptions, save_pretrained};
/// use fsdp_models::{Llama, LlamaConfig};
///
/// let config: LlamaConfig = serde_json::from_str(
///     r#"{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}"#,
/// )?;
/// let dir = tempfile::tempdir()?;
/// fsdp::launch::local(2, |world| -> fsdp_models::Result<()> {
///     let mesh = world.data_parallel_mesh();
///     let model = Llama::new(&config)?.fully_shard(&mesh)?;
///     save_pretrained(&model, &config.to_json(), dir.path(), &SaveOptions::default())?;
///     let again = Llama::from_pretrained(dir.path(), &mesh, &FsdpConfig::default())?;
///     assert_eq!(again.layout().params, model.layout().params);
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The place is not writable, which is found before anything is gathered; a finite value that the dtype cannot hold; a model
/// that tensor parallelism cuts; one with [adapters](crate::lora), which [`Pretrained::save_merged`] saves; a `config` of a Llama
/// that has other tensors; a failed write. All ranks get the same error, and files that were there stay as they are, except
/// where writing fails at the very end.
pub fn save_pretrained<M>(
    model: &Fsdp<M>,
    config: &Map<String, Value>,
    dir: &Path,
    options: &SaveOptions<'_>,
) -> crate::Result<()> {
    let params = plain(&model.layout().params)?;
    let described = Described { config, generation: None };
    save_shown(model, &params, &described, dir, options, |visit| model.visit_weights(visit))
}

/// The parameters of a model that has no adapters.
fn plain(params: &[ParamSpec]) -> Result<Vec<&ParamSpec>, PretrainedError> {
    let adapters = params.iter().filter(|spec| adapter_of(&spec.name).is_some());
    match adapters.clone().next() {
        Some(spec) => Err(PretrainedError::Adapted { name: spec.name.clone(), count: adapters.count() }),
        None => Ok(params.iter().collect()),
    }
}

/// What is said of a model beside its weights.
struct Described<'a> {
    /// `config.json`.
    config: &'a Map<String, Value>,
    /// `generation_config.json`, if there is one.
    generation: Option<&'a Map<String, Value>>,
}

/// Takes one parameter, whole.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(&ParamSpec, &[f32]) -> fsdp::Result<()>;

/// Saves `params`, which `visit_all` shows whole on every rank, as [`save_pretrained`] does.
fn save_shown<M>(
    model: &Fsdp<M>,
    params: &[&ParamSpec],
    described: &Described<'_>,
    dir: &Path,
    options: &SaveOptions<'_>,
    visit_all: impl FnOnce(Visit<'_>) -> fsdp::Result<()>,
) -> crate::Result<()> {
    let writer = stored(params, options.dtype).and_then(|tensors| {
        check_config(described.config, &tensors, dir)?;
        (model.rank() == 0)
            .then(|| PretrainedWriter::create(dir, &tensors, options.max_shard_bytes))
            .transpose()
    });
    let mut writer = model.agree_on("save_pretrained", writer)?;
    let mut failed = None;
    visit_all(&mut |spec, values| {
        // The other ranks go on with their gathers: a failure is told when all are through.
        if let Some(writer) = writer.as_mut().filter(|_| failed.is_none()) {
            failed = write(writer, spec, values).err();
        }
        Ok(())
    })?;
    let finish = |writer: PretrainedWriter| -> crate::Result<()> {
        if let Some(tokenizer) = options.tokenizer {
            tokenizer.save(dir)?;
        }
        if let Some(generation) = described.generation {
            write_generation_config(dir, generation)?;
        }
        let dtype = options.dtype.unwrap_or_else(|| params.first().map_or(Dtype::F32, |spec| spec.key.dtype));
        let mut config = described.config.clone();
        set_dtype(&mut config, dtype.into());
        writer.finish(Some(&config))
    };
    let outcome = match failed {
        Some(error) => Err(error),
        None => writer.map_or(Ok(()), finish),
    };
    model.agree_on("save_pretrained", outcome)
}

/// Makes the directory if there is none, and makes sure that [`save_pretrained`] can write into it: a program that saves at
/// its end asks at its start. Every rank must call it; rank 0 looks.
///
/// # Errors
/// The place is not writable; the same on all ranks.
pub fn check_save_place<M>(model: &Fsdp<M>, dir: &Path) -> crate::Result<()> {
    let outcome = if model.rank() == 0 { writable(dir) } else { Ok(()) };
    model.agree_on("save_pretrained", outcome)
}

fn writable(dir: &Path) -> crate::Result<()> {
    check_model_dir(dir)?;
    fs::create_dir_all(dir).map_err(FileError::on("write", dir))?;
    Ok(AtomicFile::create(&dir.join("config.json")).map(drop)?)
}

/// What is stored of these parameters.
fn stored(params: &[&ParamSpec], dtype: Option<Dtype>) -> crate::Result<Vec<StoredTensor>> {
    if let Some(spec) = params.iter().find(|spec| spec.tp_parts > 1) {
        return Err(PretrainedError::Cut { name: spec.name.clone(), parts: spec.tp_parts }.into());
    }
    let tensors = params.iter().flat_map(|spec| {
        let dtype = StoredDtype::from(dtype.unwrap_or(spec.key.dtype));
        let tensors = spec.tensors().into_iter();
        tensors.map(move |tensor| StoredTensor { name: tensor.name.to_owned(), shape: tensor.shape, dtype })
    });
    Ok(tensors.collect())
}

/// Makes sure that a Llama's configuration describes the tensors that are saved. Others are not known here.
fn check_config(config: &Map<String, Value>, tensors: &[StoredTensor], dir: &Path) -> crate::Result<()> {
    if config.get("model_type").and_then(Value::as_str) != Some("llama") {
        return Ok(());
    }
    let contradicts = |reason| PretrainedError::Contradiction { path: dir.to_path_buf(), reason };
    let described: LlamaConfig = serde_json::from_value(Value::Object(config.clone()))
        .map_err(|error| contradicts(format!("it is none of a Llama: {error}")))?;
    let params = params_of(&described)?;
    let described: BTreeMap<&str, Vec<usize>> =
        params.iter().flat_map(ParamSpec::tensors).map(|tensor| (tensor.name, tensor.shape)).collect();
    for StoredTensor { name, shape, .. } in tensors {
        match described.get(name.as_str()) {
            Some(described) if described == shape => {}
            Some(described) => {
                let reason = format!("`{name}` is {shape:?}, by the configuration {described:?}");
                return Err(contradicts(reason).into());
            }
            None => {
                return Err(contradicts(format!("the configuration has no `{name}`")).into());
            }
        }
    }
    let saved: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    match described.keys().find(|name| !saved.contains(*name)) {
        Some(name) => Err(contradicts(format!("it has no `{name}`, which the configuration has")).into()),
        None => Ok(()),
    }
}

fn write(writer: &mut PretrainedWriter, spec: &ParamSpec, values: &[f32]) -> crate::Result<()> {
    let mut tensors = spec.tensors().into_iter();
    tensors.try_for_each(|tensor| writer.write_range_f32(tensor.name, 0, &values[tensor.elements]))
}

/// Says in a `config.json` what most weights are stored in.
pub(crate) fn set_dtype(config: &mut Map<String, Value>, dtype: StoredDtype) {
    let name = match dtype {
        StoredDtype::BF16 => "bfloat16",
        StoredDtype::F16 => "float16",
        StoredDtype::F64 => "float64",
        _ => "float32",
    };
    config.remove("dtype");
    config.insert("torch_dtype".into(), json!(name));
}

impl LlamaConfig {
    /// `config.json`, as `transformers` reads it.
    pub fn to_json(&self) -> Map<String, Value> {
        let Ok(Value::Object(mut json)) = serde_json::to_value(self) else {
            unreachable!("a configuration is plain data");
        };
        json.insert("architectures".into(), json!(["LlamaForCausalLM"]));
        json.insert("model_type".into(), json!("llama"));
        json.insert("hidden_act".into(), json!("silu"));
        json.insert("attention_bias".into(), json!(false));
        json.insert("mlp_bias".into(), json!(false));
        json.insert("attention_dropout".into(), json!(0.0));
        json.insert("head_dim".into(), json!(self.head_dim()));
        json
    }
}

impl Pretrained {
    /// Saves a model as [`save_pretrained`] does, with the `config.json` and `generation_config.json` of this pretrained model, or
    /// with those that follow from its GGUF file. Every rank must call it.
    ///
    /// # Errors
    /// As for [`save_pretrained`].
    pub fn save<M>(&self, model: &Fsdp<M>, dir: &Path, options: &SaveOptions<'_>) -> crate::Result<()> {
        let params = plain(&model.layout().params)?;
        self.save_plain(model, &params, dir, options, |visit| model.visit_weights(visit))
    }

    /// The `config.json` of a model that is saved so.
    fn saved_config(&self, options: &SaveOptions<'_>) -> Map<String, Value> {
        let mut config = self.json.clone();
        if let Some(tokenizer) = options.tokenizer {
            let mut say = |field: &str, ids: Option<Value>| {
                if let (Some(ids), false) = (ids, config.contains_key(field)) {
                    config.insert(field.into(), ids);
                }
            };
            say("bos_token_id", tokenizer.bos().map(Value::from));
            say(
                "eos_token_id",
                match tokenizer.ends() {
                    [] => None,
                    [end] => Some(json!(end)),
                    ends => Some(json!(ends)),
                },
            );
        }
        config
    }

    /// Saves `params`, which `visit_all` shows whole on every rank, as the plain model that this one is.
    pub(crate) fn save_plain<M>(
        &self,
        model: &Fsdp<M>,
        params: &[&ParamSpec],
        dir: &Path,
        options: &SaveOptions<'_>,
        visit_all: impl FnOnce(Visit<'_>) -> fsdp::Result<()>,
    ) -> crate::Result<()> {
        let config = self.saved_config(options);
        let described = Described { config: &config, generation: self.generation.as_ref() };
        save_shown(model, params, &described, dir, options, visit_all)
    }
}
