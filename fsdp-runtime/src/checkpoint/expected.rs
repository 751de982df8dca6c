//! What a model expects of a checkpoint, and the differences that are found.

use std::collections::{HashMap, HashSet};

use candle_core::Tensor;

use super::held::saved_dtype;
use super::index::{Section, StoredDtype, StoredTensor};
use crate::engine::Engine;
use crate::files::{DtypeMismatch, Mismatch, ShapeMismatch};
use crate::memory::tensor_bytes::stored_dtype;

/// A tensor that a model has.
pub(super) struct Expected {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: StoredDtype,
    /// No other dtype will do, however wide.
    pub exact: bool,
}

fn is_float(dtype: &str) -> bool {
    matches!(dtype, "F32" | "BF16" | "F16" | "F64")
}

/// How what is stored differs from what is expected; `saved_as` has the names of what is saved under another one.
pub(super) fn mismatch(
    expected: &[Expected],
    stored: &Section,
    saved_as: &HashMap<String, String>,
) -> Mismatch {
    let saved = |name| saved_as.get(name).unwrap_or(name);
    let mut mismatch = Mismatch::default();
    for Expected { name, shape, dtype, exact } in expected {
        let Some(StoredTensor { shape: found, dtype: found_dtype, .. }) = stored.get(saved(name)) else {
            mismatch.missing.push(name.clone());
            continue;
        };
        if found != shape {
            let (expected, found) = (shape.clone(), found.clone());
            mismatch.shapes.push(ShapeMismatch { name: name.clone(), expected, found });
            continue;
        }
        let widens = !exact
            && *dtype == StoredDtype::F32
            && matches!(found_dtype, StoredDtype::BF16 | StoredDtype::F16);
        if found_dtype != dtype && !widens {
            let (expected, found) = (dtype.to_string(), found_dtype.to_string());
            mismatch.dtypes.push(DtypeMismatch { name: name.clone(), expected, found });
        }
    }
    let known: HashSet<&str> = expected.iter().map(|expected| saved(&expected.name).as_str()).collect();
    mismatch.unexpected = stored.keys().filter(|name| !known.contains(name.as_str())).cloned().collect();
    mismatch
}

/// Weights and buffers of a model.
pub(super) fn model_tensors(engine: &Engine, buffers: &[(String, &Tensor)]) -> Vec<Expected> {
    let weights = engine.ctx.params.ids().flat_map(|param| {
        let dtype = StoredDtype::from(saved_dtype(&engine.ctx, param));
        engine.ctx.spec(param).tensors().into_iter().map(move |tensor| Expected {
            name: tensor.name.to_owned(),
            shape: tensor.shape,
            dtype,
            exact: false,
        })
    });
    let buffers = buffers.iter().map(|(name, tensor)| Expected {
        name: name.clone(),
        shape: tensor.dims().to_vec(),
        // One of another dtype cannot be in a checkpoint.
        dtype: stored_dtype(tensor).unwrap_or(StoredDtype::U8),
        exact: true,
    });
    weights.chain(buffers).collect()
}

/// The names of the weights that are not trained.
pub(super) fn frozen_tensors(engine: &Engine) -> HashSet<&str> {
    let frozen = engine.ctx.layout.params.iter().filter(|spec| !spec.key.requires_grad);
    frozen.flat_map(|spec| spec.tensors().into_iter().map(|tensor| tensor.name)).collect()
}

/// The names of what is not loaded, because it is missing or cannot be converted.
pub(super) struct LeftOut<'a> {
    neither: HashSet<&'a str>,
    /// Of another dtype.
    other_dtype: HashSet<&'a str>,
}

pub(super) fn left_out(wrong: Option<&Mismatch>) -> LeftOut<'_> {
    let mut out = LeftOut { neither: HashSet::new(), other_dtype: HashSet::new() };
    if let Some(wrong) = wrong {
        out.neither.extend(wrong.missing.iter().map(String::as_str));
        out.neither.extend(wrong.shapes.iter().map(|wrong| wrong.name.as_str()));
        let integers = wrong.dtypes.iter().filter(|wrong| !is_float(&wrong.found));
        out.neither.extend(integers.map(|wrong| wrong.name.as_str()));
        out.other_dtype.extend(wrong.dtypes.iter().map(|wrong| wrong.name.as_str()));
    }
    out
}

impl LeftOut<'_> {
    /// Floats of another dtype are converted.
    pub fn weight(&self, name: &str) -> bool {
        self.neither.contains(name)
    }

    pub fn buffer(&self, name: &str) -> bool {
        self.neither.contains(name) || self.other_dtype.contains(name)
    }
}
