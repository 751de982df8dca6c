//! Loads pretrained weights into the shards of a model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use fsdp::Fsdp;
use fsdp::files::{Mismatch, TensorFileError, brief};
use fsdp::spec::ParamSpec;

use super::weights::Weights;
use crate::adapter::adapter_of;
use crate::error::PretrainedError;

/// How tensors that do not fit are treated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// They are an error, all of them at once, and nothing is loaded.
    #[default]
    Strict,
    /// They are passed over: those of the model keep their values.
    Lenient,
}

/// What a load did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensors of the model that were read.
    pub loaded: usize,
    /// What was passed over; empty after a strict load.
    pub skipped: Mismatch,
    /// Tensors of the file that say again what others say, and those that have no values of their own: other names of a
    /// tied parameter, the rotary frequencies that old checkpoints hold.
    pub ignored: Vec<String>,
    /// What else was done otherwise than the files say.
    pub notes: Vec<String>,
}

/// Names of passed-over tensors that a report lists: the rest is counted.
const LISTED: usize = 3;

impl LoadReport {
    /// Whether something was left out or made otherwise than the files say.
    pub fn has_remarks(&self) -> bool {
        !(self.skipped.is_empty() && self.ignored.is_empty() && self.notes.is_empty())
    }
}

impl std::fmt::Display for LoadReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tensors were loaded", self.loaded)?;
        if !self.ignored.is_empty() {
            let listed: Vec<String> = self.ignored.iter().take(LISTED).map(|name| brief(name)).collect();
            write!(f, "; passed over, as they say nothing new: {}", listed.join(", "))?;
            if self.ignored.len() > LISTED {
                write!(f, " and {} more", self.ignored.len() - LISTED)?;
            }
        }
        for note in &self.notes {
            write!(f, "; {note}")?;
        }
        if !self.skipped.is_empty() {
            write!(f, ", skipped:{}", self.skipped)?;
        }
        Ok(())
    }
}

/// A part of a parameter, and the tensor of the file that it is read from.
struct Part<'a> {
    elements: Range<usize>,
    source: &'a str,
}

/// Which tensor of the file goes where.
struct Plan<'a> {
    /// By parameter.
    parts: BTreeMap<&'a str, Vec<Part<'a>>>,
    /// Tensors that are read, and others of the file that the model ties to them.
    tied: Vec<(&'a str, &'a str)>,
    report: LoadReport,
}

impl Weights {
    /// Loads the weights into a model: each rank reads what it holds of each parameter, and nothing else. Every rank must
    /// call it.
    ///
    /// A parameter is known by its name, a fused one by those of its parts, a tied one by any of its names: if the file has
    /// several of them, they must be the same, and the first in declaration order is read. Buffers are not weights and stay as they
    /// are, and so do [adapters](crate::lora), which pretrained models do not have.
    ///
    /// # Errors
    /// If [`Strictness::Strict`]: tensors that are missing, unexpected, of another shape, or no floats, all of them in one
    /// error and nothing loaded. With either: tensors that differ and that the model ties, nothing loaded; a failed read, after
    /// which the weights are partly changed. All ranks get the same error.
    pub fn load<M>(&self, model: &mut Fsdp<M>, strictness: Strictness) -> crate::Result<LoadReport> {
        self.load_with(model, strictness, &[])
    }

    /// Loads as [`Weights::load`] does. `ties` are pairs of a parameter's name and another name that the file may have for it.
    pub(super) fn load_with<M>(
        &self,
        model: &mut Fsdp<M>,
        strictness: Strictness,
        ties: &[(&str, &str)],
    ) -> crate::Result<LoadReport> {
        let params = model.layout().params.clone();
        let plan = self.plan(&params, ties);
        let fits = strictness == Strictness::Lenient || plan.report.skipped.is_empty();
        let outcome = if fits {
            // Once is enough: all values of both are read for it.
            if model.rank() == 0 { self.check_tied(&plan.tied) } else { Ok(()) }
        } else {
            let (path, mismatch) = (self.path().to_path_buf(), Box::new(plan.report.skipped.clone()));
            Err(TensorFileError::Mismatch { path, mismatch }.into())
        };
        model.agree_on::<_, crate::Error>("pretrained weights", outcome)?;
        let mut failed = None;
        let outcome = model.load_weights(|spec, range, out| {
            let parts = plan.parts.get(spec.name.as_str()).map_or(&[][..], Vec::as_slice);
            parts.iter().try_for_each(|part| self.read_part(part, &range, out)).map_err(|error| {
                let message = error.to_string();
                failed = Some(error);
                fsdp::Error::Param { param: spec.name.clone(), message }
            })
        });
        let outcome = outcome.map_err(|error| failed.unwrap_or(error.into()));
        model.agree_on("pretrained weights", outcome)?;
        Ok(plan.report)
    }

    fn check_tied(&self, tied: &[(&str, &str)]) -> crate::Result<()> {
        for (read, other) in tied {
            if self.differ(read, other)? {
                let [read, other] = [read, other].map(|name| (*name).to_owned());
                return Err(PretrainedError::Tied { path: self.path().to_path_buf(), read, other }.into());
            }
        }
        Ok(())
    }

    /// How the tensors differ from those of these parameters.
    pub(super) fn compare(&self, params: &[ParamSpec], ties: &[(&str, &str)]) -> Mismatch {
        self.plan(params, ties).report.skipped
    }

    fn plan<'a>(&'a self, params: &'a [ParamSpec], ties: &[(&'a str, &'a str)]) -> Plan<'a> {
        let found = self.found();
        let known: BTreeSet<&str> = found.iter().map(|tensor| tensor.name).collect();
        let mut expected = Vec::new();
        let mut wanted = Vec::new();
        let mut spare = BTreeSet::new();
        let mut tied = Vec::new();
        for spec in params.iter().filter(|spec| adapter_of(&spec.name).is_none()) {
            let mut names: Vec<&str> = spec.aliases.iter().map(String::as_str).collect();
            names.extend(ties.iter().filter(|(name, _)| *name == spec.name).map(|(_, other)| *other));
            for tensor in spec.tensors() {
                // The parts of a fused parameter have no other names.
                let others = if spec.fused.is_empty() { &names[..] } else { &[] };
                let mut present = std::iter::once(tensor.name)
                    .chain(others.iter().copied())
                    .filter(|name| known.contains(name));
                let source = present.next().unwrap_or(tensor.name);
                spare.extend(present);
                // Those of `ties` are compared where a file is opened.
                let others = if spec.fused.is_empty() { spec.aliases.as_slice() } else { &[] };
                let others = others.iter().map(String::as_str);
                tied.extend(
                    others.filter(|name| known.contains(name) && *name != source).map(|name| (source, name)),
                );
                expected.push((source, tensor.shape));
                wanted.push((spec.name.as_str(), Part { elements: tensor.elements, source }));
            }
        }
        let sources: BTreeSet<&str> = wanted.iter().map(|(_, part)| part.source).collect();
        spare.extend(known.iter().filter(|name| name.ends_with(".rotary_emb.inv_freq")));
        spare.retain(|name| !sources.contains(name));
        let compared = found.into_iter().filter(|tensor| !spare.contains(tensor.name));
        let skipped =
            Mismatch::between(expected.iter().map(|(name, shape)| (*name, shape.as_slice())), compared);
        let unusable: BTreeSet<&str> = skipped
            .missing
            .iter()
            .chain(skipped.shapes.iter().map(|tensor| &tensor.name))
            .chain(skipped.dtypes.iter().map(|tensor| &tensor.name))
            .map(String::as_str)
            .collect();
        let mut parts: BTreeMap<&str, Vec<Part<'_>>> = BTreeMap::new();
        let mut loaded = 0;
        for (param, part) in wanted {
            if !unusable.contains(part.source) {
                parts.entry(param).or_default().push(part);
                loaded += 1;
            }
        }
        let ignored = spare.into_iter().map(str::to_owned).collect();
        drop(unusable);
        Plan { parts, tied, report: LoadReport { loaded, skipped, ignored, notes: Vec::new() } }
    }

    /// Reads what a part and `range`, elements of the same parameter, have in common into its place in `out`.
    fn read_part(&self, part: &Part<'_>, range: &Range<usize>, out: &mut [f32]) -> crate::Result<()> {
        let (start, end) = (part.elements.start.max(range.start), part.elements.end.min(range.end));
        if start >= end {
            return Ok(());
        }
        let out = &mut out[start - range.start..end - range.start];
        self.read_range_f32(part.source, start - part.elements.start, out)
    }
}
