//! The tensors that checkpoints know: a parameter is one of them, or the concatenation of several.

use std::ops::Range;

use serde::Serialize;

use super::ParamSpec;

/// A tensor of a checkpoint that is some rows of a fused parameter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FusedPart {
    /// Fully qualified name.
    pub name: String,
    /// Its size along dim 0, of what a tensor-parallel rank holds of it; the other dims are the parameter's.
    pub rows: usize,
    /// Its other names where the parameter is tied to others that are fused, in declaration order.
    pub aliases: Vec<String>,
}

/// A tensor as checkpoints know it: a parameter, or a part of a fused one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalTensor<'a> {
    /// Fully qualified name.
    pub name: &'a str,
    /// Its other names, if it is tied, in declaration order.
    pub aliases: &'a [String],
    /// Dims, outermost first.
    pub shape: Vec<usize>,
    /// Its elements in the flattened parameter.
    pub elements: Range<usize>,
}

/// Neighbouring elements of a logical tensor; never none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPiece<'a> {
    /// The tensor.
    pub tensor: LogicalTensor<'a>,
    /// Which of its elements, flattened.
    pub elements: Range<usize>,
    /// Where they are in what was asked for.
    pub at: Range<usize>,
}

impl ParamSpec {
    /// What a checkpoint knows it as: one tensor of its name, or the parts of a fused one in order. They tile the
    /// flattened parameter.
    pub fn tensors(&self) -> Vec<LogicalTensor<'_>> {
        if self.fused.is_empty() {
            let (shape, elements) = (self.shape.clone(), 0..self.numel());
            return vec![LogicalTensor { name: &self.name, aliases: &self.aliases, shape, elements }];
        }
        let row: usize = self.shape.iter().skip(1).product();
        let mut start = 0;
        let mut tensors = Vec::with_capacity(self.fused.len());
        for FusedPart { name, rows, aliases } in &self.fused {
            let shape = std::iter::once(*rows).chain(self.shape[1..].iter().copied()).collect();
            tensors.push(LogicalTensor { name, aliases, shape, elements: start..start + rows * row });
            start += rows * row;
        }
        tensors
    }

    /// The tensors that the `elements` of the flattened parameter belong to, in order.
    ///
    /// ```
    /// use fsdp_layout::spec::{Dtype, FusedPart, GroupKey, ParamSpec};
    ///
    /// let part = |name: &str| FusedPart { name: name.to_owned(), rows: 2, aliases: Vec::new() };
    /// let key_and_value = ParamSpec {
    ///     name: "attention.kv".to_owned(),
    ///     shape: vec![4, 10],
    ///     key: GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit: 0 },
    ///     no_decay: false,
    ///     tp: None,
    ///     tp_parts: 1,
    ///     shared: false,
    ///     aliases: Vec::new(),
    ///     fused: vec![part("attention.k"), part("attention.v")],
    /// };
    /// let pieces = key_and_value.pieces(15..28);
    /// assert_eq!((pieces[0].elements.clone(), pieces[0].at.clone()), (15..20, 0..5)); // of the keys
    /// assert_eq!((pieces[1].elements.clone(), pieces[1].at.clone()), (0..8, 5..13)); // of the values
    /// ```
    pub fn pieces(&self, elements: Range<usize>) -> Vec<TensorPiece<'_>> {
        let mut pieces = Vec::new();
        for tensor in self.tensors() {
            let start = tensor.elements.start.max(elements.start);
            let end = tensor.elements.end.min(elements.end);
            if start < end {
                pieces.push(TensorPiece {
                    elements: start - tensor.elements.start..end - tensor.elements.start,
                    at: start - elements.start..end - elements.start,
                    tensor,
                });
            }
        }
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Dtype, GroupKey};

    fn spec(shape: &[usize], fused: &[(&str, usize)]) -> ParamSpec {
        let part = |&(name, rows): &(&str, usize)| FusedPart { name: name.into(), rows, aliases: Vec::new() };
        ParamSpec {
            name: "qkv".into(),
            shape: shape.to_vec(),
            key: GroupKey { dtype: Dtype::F32, expert: false, requires_grad: true, unit: 0 },
            no_decay: false,
            tp: None,
            tp_parts: 1,
            shared: false,
            aliases: vec!["other".into()],
            fused: fused.iter().map(part).collect(),
        }
    }

    fn pieces(spec: &ParamSpec, elements: Range<usize>) -> Vec<(&str, Range<usize>, Range<usize>)> {
        let pieces = spec.pieces(elements).into_iter();
        pieces.map(|piece| (piece.tensor.name, piece.elements, piece.at)).collect()
    }

    #[test]
    fn a_parameter_is_one_tensor_of_its_name() {
        let spec = spec(&[4, 10], &[]);
        let tensor =
            LogicalTensor { name: "qkv", aliases: &spec.aliases, shape: vec![4, 10], elements: 0..40 };
        assert_eq!(spec.tensors(), [tensor]);
        assert_eq!(pieces(&spec, 3..7), [("qkv", 3..7, 0..4)]);
        assert_eq!(pieces(&spec, 7..7), []);
    }

    #[test]
    fn parts_tile_a_fused_parameter() {
        let spec = spec(&[4, 5, 2], &[("q", 2), ("none", 0), ("k", 1), ("v", 1)]);
        let tensors: Vec<_> =
            spec.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape, tensor.elements)).collect();
        assert_eq!(
            tensors,
            [
                ("q", vec![2, 5, 2], 0..20),
                ("none", vec![0, 5, 2], 20..20),
                ("k", vec![1, 5, 2], 20..30),
                ("v", vec![1, 5, 2], 30..40)
            ]
        );
        assert_eq!(pieces(&spec, 0..40), [("q", 0..20, 0..20), ("k", 0..10, 20..30), ("v", 0..10, 30..40)]);
        assert_eq!(pieces(&spec, 15..28), [("q", 15..20, 0..5), ("k", 0..8, 5..13)]);
        assert_eq!(pieces(&spec, 20..30), [("k", 0..10, 0..10)]);
    }

    #[test]
    fn vectors_are_fused_too() {
        let spec = spec(&[6], &[("a", 4), ("b", 2)]);
        assert_eq!(pieces(&spec, 3..6), [("a", 3..4, 0..1), ("b", 0..2, 1..3)]);
    }
}
