//! Exports a checkpoint as a Hugging Face directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use fsdp::checkpoint::{Checkpoint, CheckpointError, INDEX_FILE, MODEL, StoredDtype};
use fsdp::files::{FoundTensor, Mismatch, TensorFileError};
use fsdp::spec::Dtype;
use serde_json::{Map, Value};

use crate::adapter::adapter_of;
use crate::config::LlamaConfig;
use crate::generation::{read_generation_config, write_generation_config};
use crate::paths::Paths;
use crate::pretrained::{PretrainedWriter, StoredTensor, params_of, set_dtype};

/// Elements copied at a time.
const CHUNK: usize = 1 << 22;

/// What of a checkpoint is exported, and how.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions<'a> {
    /// The section: the weights, or an average of them.
    pub section: &'a str,
    /// What weights are rounded to; `None` leaves each tensor as it is stored. Doubles and integers, which only buffers
    /// are, always stay as they are.
    pub dtype: Option<Dtype>,
    /// Most bytes of the tensors in one file; a larger tensor has a file of its own.
    pub max_shard_bytes: u64,
    /// A Llama's `config.json`, which goes with the weights, and with it a `generation_config.json` that is beside it. Without it,
    /// they are not checked against a model.
    pub config: Option<&'a Path>,
}

impl Default for ExportOptions<'_> {
    /// The weights as they are stored, in files of 5 GB as `transformers` makes them, without a configuration.
    fn default() -> Self {
        ExportOptions { section: MODEL, dtype: None, max_shard_bytes: 5_000_000_000, config: None }
    }
}

/// What was exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How many of them are those of the weights, as an average has none of what is not trained.
    pub from_model: usize,
}

/// Writes a section of a checkpoint into `dir` as `transformers` reads it: `model.safetensors`, or several files and their
/// index. Tensors are copied piecewise and checked on the way; none of them is whole in memory. Files appear when all of them
/// are complete. Calls `progress(bytes done, bytes in all)` as it goes.
///
/// An average is exported with the weights and buffers that it has no average of.
///
/// # Errors
/// If there is no such section, or it is state of the optimizer; if it has [adapters](crate::lora), which are no weights of a
/// plain model; if the tensors are not those of the model that the
/// configuration describes, all differences at once; if something is damaged; if a value becomes infinite in the dtype; if
/// something cannot be written. `dir` is as it was, except where writing fails at the very end.
pub fn export(
    checkpoint: &Checkpoint,
    dir: &Path,
    options: &ExportOptions<'_>,
    progress: impl FnMut(u64, u64),
) -> crate::Result<Exported> {
    let sources = sources(checkpoint, dir, options)?;
    let existed = dir.exists();
    let exported = write(checkpoint, dir, options, &sources, progress);
    if exported.is_err() && !existed {
        // Only if it is empty: what else there may be is not ours.
        let _ = fs::remove_dir(dir);
    }
    exported
}

/// Names of tensors, and the sections that they are taken from.
type Sources<'a> = BTreeMap<&'a str, &'a str>;

fn sources<'a>(
    checkpoint: &'a Checkpoint,
    dir: &Path,
    options: &ExportOptions<'a>,
) -> crate::Result<Sources<'a>> {
    let refused = |message: String| Err(CheckpointError::Usage(message).into());
    let section = options.section;
    if section.starts_with("optimizer.") {
        return refused(format!(
            "section `{section}` is state of the optimizer: only weights can be exported"
        ));
    }
    if dir.join(INDEX_FILE).exists() {
        return refused(format!("`{}` is a checkpoint: export to another directory", dir.display()));
    }
    let mut paths = Paths::new();
    paths.read("the checkpoint", [checkpoint.path()]).read("--config", options.config);
    paths.write_model("the export", [dir]).check()?;
    let sources = with_weights(checkpoint, section)?;
    let adapters = sources.keys().filter(|name| adapter_of(name).is_some());
    if let Some(first) = adapters.clone().next() {
        return refused(format!(
            "checkpoint `{}` is of low-rank adapters, {} tensors of which `{first}` is the first: `finetune --resume --export DIR` \
             writes the model with them merged, `--export-adapters DIR` writes them alone",
            checkpoint.path().display(),
            adapters.count()
        ));
    }
    Ok(sources)
}

/// The tensors of a section, and those of the weights that it has none of.
fn with_weights<'a>(checkpoint: &'a Checkpoint, section: &'a str) -> crate::Result<Sources<'a>> {
    let mut sources: Sources<'_> = BTreeMap::new();
    let model = checkpoint.index().tensors.get(MODEL).into_iter().flatten();
    sources.extend(model.map(|(name, _)| (name.as_str(), MODEL)));
    sources.extend(checkpoint.section(section)?.keys().map(|name| (name.as_str(), section)));
    Ok(sources)
}

fn write(
    checkpoint: &Checkpoint,
    dir: &Path,
    options: &ExportOptions<'_>,
    sources: &Sources<'_>,
    mut progress: impl FnMut(u64, u64),
) -> crate::Result<Exported> {
    let mut tensors = Vec::with_capacity(sources.len());
    for (&name, &section) in sources {
        let stored = checkpoint.tensor(section, name)?;
        let rounded = options.dtype.filter(|_| stored.dtype.is_float() && stored.dtype != StoredDtype::F64);
        let dtype = rounded.map_or(stored.dtype, StoredDtype::from);
        tensors.push(StoredTensor { name: name.to_owned(), shape: stored.shape.clone(), dtype });
    }
    let config = options.config.map(|path| config(path, checkpoint, &tensors)).transpose()?;
    let generation = match options.config.and_then(Path::parent) {
        Some(beside) => read_generation_config(beside)?,
        None => None,
    };
    let total: u64 = tensors.iter().map(StoredTensor::bytes).sum();
    let mut writer = PretrainedWriter::create(dir, &tensors, options.max_shard_bytes)?;
    let mut done = 0;
    for StoredTensor { name, shape, dtype } in &tensors {
        let section = sources[name.as_str()];
        let elements: usize = shape.iter().product();
        let as_stored = checkpoint.tensor(section, name)?.dtype == *dtype;
        for start in (0..elements).step_by(CHUNK) {
            let range = start..elements.min(start + CHUNK);
            done += (range.len() * dtype.size()) as u64;
            if as_stored {
                writer.write_range_bytes(name, start, &checkpoint.read_bytes(section, name, range)?)?;
            } else {
                let mut values = vec![0.0; range.len()];
                checkpoint.read_f32(section, name, start, &mut values)?;
                writer.write_range_f32(name, start, &values)?;
            }
            progress(done, total);
        }
    }
    if let Some(generation) = &generation {
        write_generation_config(dir, generation)?;
    }
    writer.finish(config.as_ref())?;
    let from_model = sources.values().filter(|&&section| section != options.section).count();
    Ok(Exported { tensors: tensors.len(), bytes: total, from_model })
}

/// Reads a configuration and checks that the tensors are those of its model.
fn config(
    path: &Path,
    checkpoint: &Checkpoint,
    tensors: &[StoredTensor],
) -> crate::Result<Map<String, Value>> {
    let (config, mut json) = LlamaConfig::read_json_file(path)?;
    let params = params_of(&config)?;
    let expected: Vec<_> = params.iter().flat_map(|spec| spec.tensors()).collect();
    let expected = expected.iter().map(|tensor| (tensor.name, tensor.shape.as_slice()));
    let found = tensors.iter().map(|tensor| FoundTensor {
        name: &tensor.name,
        shape: &tensor.shape,
        unreadable: (!tensor.dtype.is_float()).then(|| tensor.dtype.to_string()),
    });
    let mismatch = Mismatch::between(expected, found);
    if !mismatch.is_empty() {
        let path = checkpoint.path().to_path_buf();
        return Err(TensorFileError::Mismatch { path, mismatch: Box::new(mismatch) }.into());
    }
    if let Some(first) = tensors.first() {
        set_dtype(&mut json, first.dtype);
    }
    Ok(json)
}
