//! Compares two checkpoints.

use std::collections::BTreeSet;
use std::fmt;

use fsdp::checkpoint::{Index, MODEL};
use serde_json::Value;

use super::elements::ValueDifference;
use super::facts::{dims, flatten, printable, shown, ties, variants};
use super::sides::Side;
use crate::trainer::quantity;
use crate::trainer::table::{Align, Table};

use Align::{Left, Right};

/// Elements compared at a time.
const CHUNK: usize = 1 << 22;

/// All differences between two sides, `a` and `b`. Tensors are named with their section: `model:lm_head.weight`.
#[derive(Clone, Debug, Default)]
pub struct Differences {
    /// Step, seed and values.
    pub facts: Vec<PairDifference>,
    /// Tensors that only `a` has.
    pub only_a: Vec<String>,
    /// Tensors that only `b` has.
    pub only_b: Vec<String>,
    /// Tensors of different shapes: their values are not compared.
    pub shapes: Vec<PairDifference>,
    /// Tensors of different dtypes.
    pub dtypes: Vec<PairDifference>,
    /// Tensors of different values: bits, or numbers where dtypes differ.
    pub values: Vec<ValueDifference>,
    /// Tensors of a dtype whose values cannot be read.
    pub unread: Vec<String>,
    /// Number of tensors that are the same.
    pub same: usize,
}

/// Something that is one thing here and another there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairDifference {
    /// What.
    pub name: String,
    /// In `a`.
    pub a: String,
    /// In `b`.
    pub b: String,
}

/// A tensor of both sides, in one shape.
struct Shared {
    section: String,
    name: String,
    shape: Vec<usize>,
    dtypes_differ: bool,
}

impl Shared {
    fn label(&self) -> String {
        label(&self.section, &self.name)
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

fn label(section: &str, name: &str) -> String {
    format!("{section}:{name}")
}

/// Compares two sides: all sections of them, and the steps, seeds and values, or one section. Who wrote a checkpoint and
/// how it is laid out is no difference. Calls `progress(elements done, elements in all)` as it goes.
///
/// Pretrained weights are compared with one section, `model` if none is named; with an average as it is exported, that is with
/// the weights and buffers that it has no average of.
///
/// # Errors
/// If there is no such section, a read fails, or something is damaged.
pub fn diff(
    a: &Side,
    b: &Side,
    section: Option<&str>,
    mut progress: impl FnMut(u64, u64),
) -> crate::Result<Differences> {
    let mut differences = Differences::default();
    let sections: BTreeSet<&str> = match (section, a, b) {
        (Some(section), _, _) => {
            for side in [a, b] {
                side.check_section(section)?;
            }
            [section].into()
        }
        (None, Side::Checkpoint(a), Side::Checkpoint(b)) => {
            differences.facts = facts(a.index(), b.index());
            a.index().tensors.keys().chain(b.index().tensors.keys()).map(String::as_str).collect()
        }
        (None, _, _) => [MODEL].into(),
    };
    let mut shared = Vec::new();
    for section in sections {
        differences.pair(a, b, section, &mut shared);
    }
    let total = shared.iter().map(|tensor| tensor.elements() as u64).sum();
    let mut done = 0;
    for tensor in shared {
        let mut found = ValueDifference::default();
        let elements = tensor.elements();
        for start in (0..elements).step_by(CHUNK) {
            let range = start..elements.min(start + CHUNK);
            done += range.len() as u64;
            let [a, b] = [a, b].map(|side| side.read(&tensor.section, &tensor.name, range.clone()));
            found.compare(start, &a?, &b?);
            progress(done, total);
        }
        if found.differing > 0 {
            let (name, shape) = (tensor.label(), tensor.shape);
            differences.values.push(ValueDifference { name, shape, ..found });
        } else if !tensor.dtypes_differ {
            differences.same += 1;
        }
    }
    Ok(differences)
}

fn facts(a: &Index, b: &Index) -> Vec<PairDifference> {
    // The first version of the format does not say what the model is.
    let described = a.model.is_some() && b.model.is_some();
    let all = |index: &Index| {
        let mut facts = flatten(&index.values);
        if let Some(model) = index.model.as_ref().filter(|_| described) {
            let variants =
                variants(model).into_iter().map(|(path, text)| (format!("variant of {path}"), text));
            let ties = ties(model).into_iter().map(|(name, text)| (format!("tie of {name}"), text));
            facts.extend(variants.chain(ties).map(|(name, text)| (name, text.into())));
        }
        facts.insert("step".into(), index.step.into());
        facts.insert("seed".into(), index.seed.into());
        facts
    };
    let (a, b) = (all(a), all(b));
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let differing = names.into_iter().filter(|name| a.get(*name) != b.get(*name));
    let text = |value: Option<&Value>| value.map_or_else(|| "(none)".to_owned(), shown);
    let pairs = differing.map(|name| {
        let (a, b) = (text(a.get(name)), text(b.get(name)));
        PairDifference { name: name.clone(), a, b }
    });
    pairs.collect()
}

impl Differences {
    /// Nothing differs, as far as can be read.
    pub fn is_empty(&self) -> bool {
        let Differences { facts, only_a, only_b, shapes, dtypes, values, unread, same: _ } = self;
        let pairs = [facts, shapes, dtypes].into_iter().all(Vec::is_empty);
        pairs && [only_a, only_b, unread].into_iter().all(Vec::is_empty) && values.is_empty()
    }

    /// Finds the tensors of a section that both have, and puts down what differs but their values.
    fn pair(&mut self, a: &Side, b: &Side, section: &str, shared: &mut Vec<Shared>) {
        let weights = [a, b].map(|side| matches!(side, Side::Weights(_)));
        let as_exported = weights.contains(&true) && !section.starts_with("optimizer.");
        let [in_a, mut in_b] = [a, b].map(|side| side.tensors(section, as_exported));
        for (name, a) in in_a {
            let Some(b) = in_b.remove(&name) else {
                self.only_a.push(label(&a.section, &name));
                continue;
            };
            // Pretrained weights have no sections of their own.
            let section = if weights[0] { b.section } else { a.section };
            let label = label(&section, &name);
            let pair = |a: String, b: String| PairDifference { name: label.clone(), a, b };
            if a.shape != b.shape {
                self.shapes.push(pair(dims(&a.shape), dims(&b.shape)));
                continue;
            }
            let dtypes_differ = a.dtype != b.dtype;
            if dtypes_differ {
                self.dtypes.push(pair(a.dtype, b.dtype));
            }
            if a.readable && b.readable {
                shared.push(Shared { section, name, shape: a.shape, dtypes_differ });
            } else {
                self.unread.push(label);
            }
        }
        self.only_b.extend(in_b.into_iter().map(|(name, b)| label(&b.section, &name)));
    }
}

impl fmt::Display for Differences {
    /// A table for each kind of difference, and a last line that counts tensors.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (title, pairs) in [("value", &self.facts), ("shape of", &self.shapes), ("dtype of", &self.dtypes)]
        {
            if !pairs.is_empty() {
                let mut table = Table::new([(title, Left), ("a", Left), ("b", Left)]);
                for PairDifference { name, a, b } in pairs {
                    table.row([name, a, b].map(|text| printable(text)));
                }
                writeln!(f, "{table}")?;
            }
        }
        for (title, names) in
            [("only in a", &self.only_a), ("only in b", &self.only_b), ("not compared", &self.unread)]
        {
            if !names.is_empty() {
                let mut table = Table::new([(title, Left)]);
                for name in names {
                    table.row([printable(name)]);
                }
                writeln!(f, "{table}")?;
            }
        }
        if !self.values.is_empty() {
            writeln!(f, "{}", self.values_table())?;
        }
        let same = quantity::count(self.same as u64);
        if self.is_empty() {
            return writeln!(f, "the same: {same} tensors");
        }
        writeln!(f, "different; {same} tensors are the same")
    }
}

impl Differences {
    fn values_table(&self) -> Table<7> {
        let mut table = Table::new([
            ("values of", Left),
            ("differ", Right),
            ("of", Right),
            ("first at", Left),
            ("max abs", Right),
            ("at", Left),
            ("max rel", Right),
        ]);
        for ValueDifference { name, shape, differing, first, absolute, relative } in &self.values {
            table.row([
                printable(name),
                quantity::count(*differing as u64),
                quantity::count(shape.iter().product::<usize>() as u64),
                dims(&place(*first, shape)),
                format!("{:.2e}", absolute.value),
                dims(&place(absolute.element, shape)),
                format!("{:.2e}", relative.value),
            ]);
        }
        table
    }
}

/// The place of a flattened element in its tensor.
fn place(element: usize, shape: &[usize]) -> Vec<usize> {
    let mut place = vec![0; shape.len()];
    let mut rest = element;
    for (place, dim) in place.iter_mut().zip(shape).rev() {
        *place = rest % dim.max(&1);
        rest /= dim.max(&1);
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flattened_element_has_a_place() {
        assert_eq!(place(0, &[]), [0; 0]);
        assert_eq!(place(11, &[2, 3, 4]), [0, 2, 3]);
        assert_eq!(place(12, &[2, 3, 4]), [1, 0, 0]);
    }
}
