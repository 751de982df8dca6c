//! Compares a checkpoint with the state that is to be restored.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::contents::{MODEL, OPTIMIZER};
use super::expected::{Expected, frozen_tensors, mismatch, model_tensors};
use super::held;
use super::index::{INDEX_FILE, Index, MAX_STEPS, Section, StoredDtype};
use super::read::Checkpoint;
use super::restore::Restore;
use super::state::{ModelRef, Unfit};
use crate::engine::ParamId;
use crate::error::{CheckpointError, Error, Result};
use crate::files::Mismatch;
use crate::spec::LogicalTensor;

/// By section.
type Mismatches = Vec<(String, Mismatch)>;

/// How a checkpoint fits what is to be restored.
pub(super) struct Fit {
    /// Counters and settings of the optimizer, if it is restored.
    pub optimizer: Option<serde_json::Value>,
    /// Of each average that is restored.
    pub updates: Vec<Option<u64>>,
    pub skipped: Mismatches,
    pub unused: Vec<String>,
    /// Names in the file of the tensors that have another one there.
    pub saved_as: HashMap<String, String>,
}

impl Fit {
    /// The name in the file of a tensor of the model.
    pub fn saved<'a>(&'a self, name: &'a str) -> &'a str {
        self.saved_as.get(name).map_or(name, String::as_str)
    }
}

impl Restore<'_> {
    /// What it is to restore, in words: all that ranks could have asked for differently.
    pub(super) fn parts(&self) -> BTreeMap<String, String> {
        let frozen = if self.frozen { "the frozen weights too" } else { "no frozen weights" };
        let strict = if self.strict { "all of the state" } else { "what fits of the state" };
        let verified =
            if self.verified { "what was checked before" } else { "what is checked as it is read" };
        let untie = if self.untie { "what was tied into each" } else { "what was tied into what is" };
        let parts = [("frozen", frozen), ("strict", strict), ("untie", untie), ("verified", verified)];
        let mut parts: BTreeMap<String, String> =
            parts.into_iter().map(|(name, words)| (name.to_owned(), words.to_owned())).collect();
        if let Some(optimizer) = &self.optimizer {
            parts.insert("optimizer".into(), format!("an optimizer, {}", optimizer.rules()));
        }
        parts.extend(self.averages.iter().map(|(name, _)| {
            let name = format!("average `{name}`");
            (name.clone(), name)
        }));
        parts
    }

    /// Compares the checkpoint with what is to be restored.
    pub(super) fn compare(&self, checkpoint: &Checkpoint) -> Result<Fit> {
        if let Some(optimizer) = &self.optimizer {
            optimizer.check_model(ModelRef(&self.engine))?;
        }
        let value = self.optimizer_value(checkpoint);
        let takes_optimizer = self.strict || matches!(value, Ok((Some(_), _)));
        let saved_as = self.saved_as(checkpoint);
        let (mut skipped, unused) = self.compare_sections(checkpoint, takes_optimizer, &saved_as)?;
        if self.strict && !skipped.is_empty() {
            let path = checkpoint.path().to_path_buf();
            return Err(CheckpointError::Mismatch { path, sections: skipped }.into());
        }
        let (optimizer, other) = value?;
        skipped.extend(other.map(|other| (OPTIMIZER.to_owned(), other)));
        let updates =
            self.averages.iter().map(|(name, _)| self.updates(checkpoint, name)).collect::<Result<_>>()?;
        Ok(Fit { optimizer, updates, skipped, unused, saved_as })
    }

    /// The names in the file of the tensors that have another one there.
    fn saved_as(&self, checkpoint: &Checkpoint) -> HashMap<String, String> {
        let Index { model: Some(file), tensors, .. } = checkpoint.index() else { return HashMap::new() };
        let ours = self.engine.ctx.layout.params.iter().flat_map(|spec| spec.tensors());
        let mut saved_as = self.model.saved_as(file, ours.map(|tensor| tensor.name), self.untie);
        saved_as.retain(|_, saved| tensors.get(MODEL).is_some_and(|tensors| tensors.contains_key(saved)));
        saved_as
    }

    /// What is wrong with each section that is to be restored, and which sections are not.
    fn compare_sections(
        &self,
        checkpoint: &Checkpoint,
        optimizer: bool,
        saved_as: &HashMap<String, String>,
    ) -> Result<(Mismatches, Vec<String>)> {
        let engine = &*self.engine;
        let left = if self.frozen { HashSet::new() } else { frozen_tensors(engine) };
        let mut model = model_tensors(engine, &self.buffers);
        model.retain(|tensor| !left.contains(tensor.name.as_str()));
        let mut expected: Vec<(String, Vec<Expected>)> = vec![(MODEL.into(), model)];
        let mut add = |section: String, params: &[ParamId]| -> Result<()> {
            if expected.iter().any(|(known, _)| *known == section) {
                return Err(Error::Usage(format!("section `{section}` is to be restored into two places")));
            }
            let tensors = params.iter().flat_map(|&param| engine.ctx.spec(param).tensors());
            let f32 = |tensor: LogicalTensor<'_>| Expected {
                name: tensor.name.to_owned(),
                shape: tensor.shape,
                dtype: StoredDtype::F32,
                exact: false,
            };
            expected.push((section, tensors.map(f32).collect()));
            Ok(())
        };
        if let Some(optimizer) = self.optimizer.as_ref().filter(|_| optimizer) {
            for state in optimizer.states(ModelRef(engine)) {
                add(format!("{OPTIMIZER}.{}", state.name), &state.params)?;
            }
        }
        for (name, average) in &self.averages {
            average.check(&engine.ctx)?;
            add(name.clone(), &held::average(average, &engine.ctx).params)?;
        }
        let stored = &checkpoint.index().tensors;
        let none = Section::new();
        let mut wrong = Vec::new();
        for (section, expected) in &expected {
            let is_average = self.averages.iter().any(|(name, _)| name == section);
            let is_taken = !is_average || self.takes_average(checkpoint, section);
            let stored = stored.get(section).filter(|_| is_taken).unwrap_or(&none);
            let mut mismatch = mismatch(expected, stored, saved_as);
            if section == MODEL {
                mismatch.unexpected.retain(|name| !left.contains(name.as_str()));
                if let Some(file) = &checkpoint.index().model {
                    self.model.compare(file, self.untie, &mut mismatch);
                }
            }
            if !mismatch.is_empty() {
                wrong.push((section.clone(), mismatch));
            }
        }
        let unused = stored.keys().filter(|section| !expected.iter().any(|(known, _)| known == *section));
        Ok((wrong, unused.cloned().collect()))
    }

    /// The value of the optimizer, if there is one and the checkpoint has its like; what it has else, if that will do.
    fn optimizer_value(
        &self,
        checkpoint: &Checkpoint,
    ) -> Result<(Option<serde_json::Value>, Option<Mismatch>)> {
        let Some(optimizer) = &self.optimizer else { return Ok((None, None)) };
        let expected = optimizer.rules();
        let left = |found: Option<String>| {
            let mismatch = Mismatch { missing: vec![expected.clone()], ..Mismatch::default() };
            (None, Some(Mismatch { unexpected: found.into_iter().collect(), ..mismatch }))
        };
        if !self.strict && !checkpoint.index().values.contains_key(OPTIMIZER) {
            return Ok(left(None));
        }
        let value: serde_json::Value = checkpoint.value(OPTIMIZER)?;
        match optimizer.check_value(&value) {
            Ok(()) => Ok((Some(value), None)),
            Err(Unfit::OtherRules(found)) if !self.strict => Ok(left(Some(found))),
            Err(Unfit::OtherRules(found)) => {
                let path = checkpoint.path().to_path_buf();
                Err(CheckpointError::OtherOptimizer { path, found, expected }.into())
            }
            Err(Unfit::Malformed(reason)) => Err(malformed(checkpoint, reason).into()),
        }
    }

    /// Whether an average is restored.
    fn takes_average(&self, checkpoint: &Checkpoint, name: &str) -> bool {
        let Index { values, tensors, .. } = checkpoint.index();
        self.strict || (values.contains_key(name) && tensors.contains_key(name))
    }

    /// The count of updates of an average, if that is restored.
    fn updates(&self, checkpoint: &Checkpoint, name: &str) -> Result<Option<u64>> {
        if !self.takes_average(checkpoint, name) {
            return Ok(None);
        }
        let updates = checkpoint.value::<u64>(name)?;
        if updates > MAX_STEPS {
            let reason = format!("its average `{name}` has {updates} updates, more than {MAX_STEPS}");
            return Err(malformed(checkpoint, reason).into());
        }
        Ok(Some(updates))
    }
}

fn malformed(checkpoint: &Checkpoint, reason: String) -> CheckpointError {
    CheckpointError::Malformed { path: checkpoint.path().join(INDEX_FILE), reason }
}
