//! Describes a model beyond names, shapes and dtypes of its tensors. Two models may agree in those and still differ.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crate::engine::{Engine, Fsdp, FsdpUnit, buffer_list, live_variants};
use crate::files::{Difference, Mismatch, NOT_TIED};

/// What a checkpoint knows of its model beyond the tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDescription {
    /// The live variant of each enum by the path of the field that holds it, as `Act::Relu`; `Some` for each option that
    /// has something. What is directly inside of another one is in its brackets: `Some(Act::Relu)`.
    pub variants: BTreeMap<String, String>,
    /// Each name of a tied parameter, or of a part of it, but the first, and the first, which it is saved under.
    pub ties: BTreeMap<String, String>,
    /// The tensors that are buffers: kept, not trained.
    pub buffers: BTreeSet<String>,
}

impl ModelDescription {
    /// That of a sharded model.
    pub(super) fn of<M: FsdpUnit>(model: &Fsdp<M>) -> Self {
        let module = model.module();
        ModelDescription {
            variants: live_variants(module),
            ties: ties(model.engine()),
            buffers: buffer_list(module).into_iter().map(|(name, _)| name).collect(),
        }
    }

    /// The names of the file's tensors for those tensors of the model whose name is not the file's: they are tied, and were
    /// saved under another of their names. With `untie` the model need not tie them.
    pub(super) fn saved_as<'a>(
        &'a self,
        file: &'a ModelDescription,
        tensors: impl Iterator<Item = &'a str>,
        untie: bool,
    ) -> HashMap<String, String> {
        let renamed = tensors.filter_map(|name| {
            let saved = file.ties.get(name).filter(|saved| untie || self.is_tied(name, saved))?;
            Some((name.to_owned(), saved.clone()))
        });
        renamed.collect()
    }

    /// Adds to `mismatch`, which has the differences of tensors, how this model is not that of the file.
    pub(super) fn compare(&self, file: &ModelDescription, untie: bool, mismatch: &mut Mismatch) {
        let paths: BTreeSet<&String> = self.variants.keys().chain(file.variants.keys()).collect();
        for path in paths {
            let (expected, found) = (self.variants.get(path), file.variants.get(path));
            // What is not there at all is told by its tensors, if it has any.
            let is_told = match (expected, found) {
                (Some(_), None) => mismatch.missing.iter().any(|name| is_inside(name, path)),
                (None, Some(_)) => mismatch.unexpected.iter().any(|name| is_inside(name, path)),
                _ => expected == found,
            };
            if !is_told {
                let words = |variant: Option<&String>| variant.map_or("nothing".to_owned(), String::clone);
                mismatch.variants.push(Difference {
                    name: if path.is_empty() { "(root)".into() } else { path.clone() },
                    expected: words(expected),
                    found: words(found),
                });
            }
        }
        for name in self.buffers.symmetric_difference(&file.buffers) {
            if !mismatch.missing.contains(name) && !mismatch.unexpected.contains(name) {
                let kind = |description: &ModelDescription| {
                    let is_buffer = description.buffers.contains(name);
                    if is_buffer { "buffer".to_owned() } else { "parameter".to_owned() }
                };
                let (expected, found) = (kind(self), kind(file));
                mismatch.kinds.push(Difference { name: name.clone(), expected, found });
            }
        }
        let names: BTreeSet<&String> = self.ties.keys().chain(file.ties.keys()).collect();
        for name in names {
            let (expected, found) = (self.ties.get(name), file.ties.get(name));
            let is_alike = match (expected, found) {
                (Some(target), None) => file.is_tied(name, target),
                (None, Some(target)) => untie || self.is_tied(name, target),
                (Some(ours), Some(theirs)) => self.is_tied(name, theirs) && file.is_tied(name, ours),
                (None, None) => true,
            };
            if !is_alike {
                let words = |target: Option<&String>| {
                    target.map_or(NOT_TIED.to_owned(), |target| format!("tied to `{target}`"))
                };
                let (expected, found) = (words(expected), words(found));
                mismatch.ties.push(Difference { name: name.clone(), expected, found });
            }
        }
    }

    /// Whether the tensors of two names are one.
    fn is_tied(&self, one: &str, other: &str) -> bool {
        let saved = |name| self.ties.get(name).map_or(name, String::as_str);
        saved(one) == saved(other)
    }
}

fn is_inside(name: &str, path: &str) -> bool {
    path.is_empty() || name.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Of parameters and of the parts of fused ones: what is tied to a fused parameter need not be fused itself.
fn ties(engine: &Engine) -> BTreeMap<String, String> {
    let mut ties = BTreeMap::new();
    for spec in &engine.ctx.layout.params {
        ties.extend(spec.aliases.iter().map(|alias| (alias.clone(), spec.name.clone())));
        for part in &spec.fused {
            ties.extend(part.aliases.iter().map(|alias| (alias.clone(), part.name.clone())));
        }
    }
    ties
}
