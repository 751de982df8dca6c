//! Differences between the tensors of files and those of a model.

use std::collections::BTreeMap;
use std::fmt;

use super::{brief, brief_to, listed, listed_as};

/// A tie of a name that is the only one of its tensor.
pub(crate) const NOT_TIED: &str = "not tied";

/// Longest shape that a message shows whole, in characters.
const SHAPE: usize = 60;

/// How the tensors of a file differ from those of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// In the model, not in the file, in the model's order.
    pub missing: Vec<String>,
    /// In the file, not in the model, sorted.
    pub unexpected: Vec<String>,
    /// In both, with different shapes, in the model's order.
    pub shapes: Vec<ShapeMismatch>,
    /// In both, in an element type that the model's cannot hold without loss, in the model's order.
    pub dtypes: Vec<DtypeMismatch>,
    /// Enums and options that are other variants, by path, sorted; `nothing` where there is none. Only checkpoints know
    /// them.
    pub variants: Vec<Difference>,
    /// Names of tensors that are tied in one of the two, or to another tensor, sorted. Only checkpoints know them.
    pub ties: Vec<Difference>,
    /// Tensors that are a parameter in one of the two, a buffer in the other, sorted. Only checkpoints know them.
    pub kinds: Vec<Difference>,
}

/// What the model says of one of its parts, and what the file does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The part.
    pub name: String,
    /// What it is in the model.
    pub expected: String,
    /// What it is in the file.
    pub found: String,
}

/// A tensor whose shape in the file is not the model's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeMismatch {
    /// The tensor.
    pub name: String,
    /// Shape in the model.
    pub expected: Vec<usize>,
    /// Shape in the file.
    pub found: Vec<usize>,
}

/// A tensor whose element type in the file is not what the model can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DtypeMismatch {
    /// The tensor.
    pub name: String,
    /// Element type in the model.
    pub expected: String,
    /// Element type in the file.
    pub found: String,
}

/// A tensor of a file, to be held against a model's.
#[derive(Clone, Debug)]
pub struct FoundTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dims, outermost first.
    pub shape: &'a [usize],
    /// Its element type, if that cannot be read.
    pub unreadable: Option<String>,
}

impl Mismatch {
    /// How the tensors that were found differ from a model's list of names and shapes.
    pub fn between<'a, 'b>(
        expected: impl IntoIterator<Item = (&'a str, &'a [usize])>,
        found: impl IntoIterator<Item = FoundTensor<'b>>,
    ) -> Mismatch {
        let mut mismatch = Mismatch::default();
        let mut found: BTreeMap<&str, FoundTensor<'b>> =
            found.into_iter().map(|tensor| (tensor.name, tensor)).collect();
        for (name, shape) in expected {
            let Some(tensor) = found.remove(name) else {
                mismatch.missing.push(name.to_owned());
                continue;
            };
            if tensor.shape != shape {
                let (expected, found) = (shape.to_vec(), tensor.shape.to_vec());
                mismatch.shapes.push(ShapeMismatch { name: name.to_owned(), expected, found });
            }
            if let Some(found) = tensor.unreadable {
                mismatch.dtypes.push(DtypeMismatch {
                    name: name.to_owned(),
                    expected: "a float".into(),
                    found,
                });
            }
        }
        mismatch.unexpected = found.into_keys().map(str::to_owned).collect();
        mismatch
    }

    /// Nothing differs.
    pub fn is_empty(&self) -> bool {
        let Mismatch { missing, unexpected, shapes, dtypes, variants, ties, kinds } = self;
        let names = missing.is_empty() && unexpected.is_empty();
        let tensors = names && shapes.is_empty() && dtypes.is_empty();
        tensors && [variants, ties, kinds].into_iter().all(Vec::is_empty)
    }
}

impl Mismatch {
    /// One line a kind, each beginning with a line break; what is compared with the model is from `source`, in one word.
    pub(crate) fn lines(&self, source: &str) -> String {
        let Mismatch { missing, unexpected, shapes, dtypes, variants, ties, kinds } = self;
        let shape = |ShapeMismatch { name, expected, found }: &ShapeMismatch| {
            let [expected, found] = [expected, found].map(|shape| brief_to(&format!("{shape:?}"), SHAPE));
            format!("{} (model {expected}, {source} {found})", brief(name))
        };
        let dtype = |DtypeMismatch { name, expected, found }: &DtypeMismatch| {
            format!("{} (model {expected}, {source} {found})", brief(name))
        };
        let difference = |Difference { name, expected, found }: &Difference| {
            format!("{} (model {}, {source} {})", brief(name), brief(expected), brief(found))
        };
        // What a model is explains what it has.
        let lists = [
            ("of another variant", variants.len(), listed_as(variants, difference)),
            ("tied otherwise", ties.len(), listed_as(ties, difference)),
            ("of another kind", kinds.len(), listed_as(kinds, difference)),
            ("missing", missing.len(), listed(missing)),
            ("unexpected", unexpected.len(), listed(unexpected)),
            ("of another shape", shapes.len(), listed_as(shapes, shape)),
            ("of another dtype", dtypes.len(), listed_as(dtypes, dtype)),
        ];
        let differ = lists.into_iter().filter(|&(_, count, _)| count > 0);
        differ.map(|(kind, count, listed)| format!("\n  {count} {kind}: {listed}")).collect()
    }
}

impl fmt::Display for Mismatch {
    /// One line a kind, each beginning with a line break.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines("file"))
    }
}
