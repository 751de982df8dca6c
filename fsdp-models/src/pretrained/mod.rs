//! Pretrained models: reads Hugging Face directories and GGUF files, writes Hugging Face directories.
//!
//! No rank ever holds a whole model. Each rank reads the ranges of elements that it keeps. To write a model, rank 0 gets one
//! bucket of the layout at a time.

mod identity;
mod index;
mod load;
mod save;
mod weights;
mod writer;

use std::path::{Path, PathBuf};

use fsdp::comm::DeviceMesh;
use fsdp::files::{Mismatch, TensorFileError};
use fsdp::mesh::Topology;
use fsdp::spec::ParamSpec;
use fsdp::warning::warn;
use fsdp::{Fsdp, FsdpConfig, FullyShard};
use serde_json::{Map, Value};

pub use crate::error::PretrainedError;
pub use crate::gguf::GgufFile;
pub use crate::run::Identity;
pub use index::ShardedTensorFiles;
pub use load::{LoadReport, Strictness};
pub(crate) use save::set_dtype;
pub use save::{SaveOptions, check_save_place, save_pretrained};
pub use weights::Weights;
pub use writer::{PretrainedWriter, StoredTensor};

use crate::config::LlamaConfig;
use crate::generation::read_generation_config;
use crate::llama::Llama;

/// A pretrained Llama: its configuration and its weights, still in their files.
///
/// ```no_run
/// use std::path::Path;
/// use fsdp::prelude::*;
/// use fsdp_models::pretrained::{Pretrained, Strictness};
///
/// let pretrained = Pretrained::open(Path::new("SmolLM2-135M-Instruct"))?;
/// fsdp::launch::local(2, |world| -> fsdp_models::Result<()> {
///     let mut model = pretrained.model()?.fully_shard(&world.data_parallel_mesh())?;
///     let report = pretrained.load(&mut model, Strictness::Strict)?;
///     println!("{report}");
///     Ok(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    config: LlamaConfig,
    /// `config.json`, or what it would say.
    json: Map<String, Value>,
    /// `generation_config.json`, which goes with the model where it is saved.
    generation: Option<Map<String, Value>>,
    weights: Weights,
    /// The configuration ties the head to the embedding, and the weights do not.
    untied: bool,
}

impl Pretrained {
    /// Opens a directory of Hugging Face's (`config.json`, and what [`Weights::open`] reads), a weights file beside its
    /// `config.json`, or a GGUF file. Reads only; no rank has to do it together with others, and threads may share it.
    ///
    /// A head that differs from the embedding stays apart from it, whatever the configuration says, as in `transformers` 5; of
    /// both all values are compared, a piece at a time.
    ///
    /// # Errors
    /// What is needed is not there or damaged, of a model that is not implemented, or has settings that are not known here, all
    /// of which are named.
    pub fn open(path: &Path) -> crate::Result<Self> {
        let weights = Weights::open(path)?;
        let (mut config, mut json, generation) = match &weights {
            Weights::Gguf(file) => (file.config().clone(), file.config().to_json(), None),
            Weights::Single(_) | Weights::Sharded(_) => {
                let path = weights.path().with_file_name("config.json");
                let (config, json) = LlamaConfig::read_json_file(&path)?;
                (config, json, read_generation_config(path.parent().unwrap_or(Path::new("")))?)
            }
        };
        let found = weights.found();
        let contradicts =
            |reason: String| PretrainedError::Contradiction { path: weights.path().to_path_buf(), reason };
        let (layers, tensors) = (config.num_hidden_layers, found.len());
        if layers > tensors {
            let reason = format!("num_hidden_layers is {layers}, and the file has {tensors} tensors");
            return Err(contradicts(reason).into());
        }
        drop(found);
        let [(embedding, head)] = TIED;
        let untied = config.tie_word_embeddings && weights.differ(embedding, head)?;
        if untied {
            config.tie_word_embeddings = false;
            json.insert("tie_word_embeddings".into(), Value::Bool(false));
        }
        Ok(Pretrained { path: path.to_path_buf(), config, json, generation, weights, untied })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model that the weights are of: the head is tied to the embedding only if the weights are.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The model, before it is sharded and its weights are loaded: until then they are zeros, where [`Llama::new`] would draw
    /// values that nobody sees.
    ///
    /// # Errors
    /// If there is no model of this configuration.
    pub fn model(&self) -> crate::Result<Llama> {
        Llama::new(&LlamaConfig { initializer_range: 0.0, ..self.config.clone() })
    }

    /// The weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// How the weights differ from those of the model that the configuration describes. Takes no memory for it.
    ///
    /// # Errors
    /// If there is no model of this configuration.
    pub fn check(&self) -> crate::Result<Mismatch> {
        Ok(self.weights.compare(&params_of(&self.config)?, ties(&self.config)))
    }

    /// Refuses weights that are not those of the model that the configuration describes, before any memory is taken for it.
    ///
    /// # Errors
    /// If [`Pretrained::check`] finds a difference; names all.
    pub fn refuse_misfit(&self) -> crate::Result<()> {
        self.weights.refuse_misfit(self.check()?)
    }

    /// Loads the weights: [`Weights::load`]. If the configuration ties the head to the embedding, a head in the file that says the
    /// same is passed over, or read if there is no embedding. Every rank must call it.
    ///
    /// # Errors
    /// As for [`Weights::load`].
    pub fn load<M>(&self, model: &mut Fsdp<M>, strictness: Strictness) -> crate::Result<LoadReport> {
        let mut report = self.weights.load_with(model, strictness, ties(&self.config))?;
        if self.untied {
            let [(embedding, head)] = TIED;
            report.notes.push(format!(
                "{head} is not {embedding}, though `tie_word_embeddings` is true: the model has both, not tied"
            ));
        }
        Ok(report)
    }
}

impl Weights {
    /// Refuses weights that are not those of a Llama of this configuration, before any memory is taken for it. If it ties the head
    /// to the embedding, a head that the weights have must be the same as the embedding, of which all values are compared.
    ///
    /// # Errors
    /// The configuration is not valid, tensors are missing, unexpected or of another shape or dtype, or the head is another one.
    pub fn check_llama(&self, config: &LlamaConfig) -> crate::Result<()> {
        self.refuse_misfit(self.compare(&params_of(config)?, ties(config)))?;
        for (read, other) in ties(config) {
            if self.differ(read, other)? {
                let [read, other] = [read, other].map(|name| (*name).to_owned());
                return Err(PretrainedError::Tied { path: self.path().to_path_buf(), read, other }.into());
            }
        }
        Ok(())
    }

    /// Loads the weights into a Llama of this configuration, which they must fit: see [`Weights::check_llama`]. Every rank must
    /// call it.
    ///
    /// # Errors
    /// As for [`Weights::load`].
    pub(crate) fn load_llama(
        &self,
        model: &mut Fsdp<Llama>,
        config: &LlamaConfig,
    ) -> crate::Result<LoadReport> {
        self.load_with(model, Strictness::Strict, ties(config))
    }

    fn refuse_misfit(&self, mismatch: Mismatch) -> crate::Result<()> {
        if mismatch.is_empty() {
            return Ok(());
        }
        Err(TensorFileError::Mismatch { path: self.path().to_path_buf(), mismatch: Box::new(mismatch) }
            .into())
    }
}

fn ties(config: &LlamaConfig) -> &'static [(&'static str, &'static str)] {
    if config.tie_word_embeddings { &TIED } else { &[] }
}

/// The parameters of a model, without taking memory for them.
pub(crate) fn params_of(config: &LlamaConfig) -> crate::Result<Vec<ParamSpec>> {
    let one = Topology::new(&[("dp_shard", 1)], 1).map_err(fsdp::Error::from)?;
    Ok(Llama::new(config)?.layout(&one, &FsdpConfig::default())?.params)
}

/// The embedding, and the head that may be tied to it.
const TIED: [(&str, &str); 1] = [("model.embed_tokens.weight", "lm_head.weight")];

impl Llama {
    /// Builds and shards the model of a directory of Hugging Face's or of a GGUF file, and loads its weights, of which each
    /// rank reads what it holds. Every rank of the mesh must call it.
    ///
    /// [`Pretrained`] does it in steps. What the load leaves out or makes otherwise than the files say, rank 0 tells on the
    /// standard error.
    ///
    /// # Errors
    /// Those of [`Pretrained::open`], of sharding and, with [`Strictness::Strict`], of [`Pretrained::load`]. A model that
    /// does not fit its files is refused before any memory is taken for it.
    pub fn from_pretrained(
        path: &Path,
        mesh: &DeviceMesh,
        config: &FsdpConfig,
    ) -> crate::Result<Fsdp<Llama>> {
        let pretrained = Pretrained::open(path)?;
        pretrained.refuse_misfit()?;
        let mut model = pretrained.model()?.fully_shard_with(mesh, config)?;
        let report = pretrained.load(&mut model, Strictness::Strict)?;
        if report.has_remarks() && model.rank() == 0 {
            warn(format_args!("`{}`: {report}", path.display()));
        }
        Ok(model)
    }
}
