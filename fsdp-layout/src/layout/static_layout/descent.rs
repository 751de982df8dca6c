//! What a constant walk over a [`Tree`] carries down, as `Walker` does at run time: the path and the
//! inherited attributes.

use super::message::Message;
use crate::layout::row::MAX_ELEMENTS;
use crate::spec::{Attrs, Dtype, Field, TpPlacement, Tree};

/// One step of a path.
#[derive(Clone, Copy)]
pub(super) enum Segment {
    Name(&'static str),
    Index(usize),
}

/// Where a walk is.
#[derive(Clone, Copy)]
pub(super) struct Path<'a> {
    pub(super) parent: Option<&'a Path<'a>>,
    pub(super) segment: Segment,
    /// Number of segments.
    pub(super) depth: usize,
}

impl Path<'_> {
    pub(super) const ROOT: Path<'static> = Path { parent: None, segment: Segment::Name(""), depth: 0 };
}

impl<'a> Path<'a> {
    pub(super) const fn field(&'a self, name: &'static str) -> Path<'a> {
        Path { parent: Some(self), segment: Segment::Name(name), depth: self.depth + 1 }
    }

    pub(super) const fn element(&'a self, index: usize) -> Path<'a> {
        Path { parent: Some(self), segment: Segment::Index(index), depth: self.depth + 1 }
    }
}

/// What the fields on the way down say of what is inside. An element is what its container was declared to
/// be.
#[derive(Clone, Copy)]
pub(super) struct Inherited {
    attrs: Attrs,
    /// The placement was declared on the very field that holds the parameter.
    own_tp: bool,
}

/// A parameter: its shape and what it was declared to be.
#[derive(Clone, Copy)]
pub(super) struct Leaf {
    pub(super) shape: &'static [usize],
    pub(super) tp: Option<TpPlacement>,
    /// `None` for that of the policy.
    pub(super) dtype: Option<Dtype>,
    pub(super) expert: bool,
    pub(super) requires_grad: bool,
}

impl Inherited {
    pub(super) const NONE: Inherited = Inherited { attrs: Attrs::NONE, own_tp: false };

    pub(super) const fn field(&self, field: &Field) -> Inherited {
        Inherited { attrs: field.attrs.over(self.attrs), own_tp: field.attrs.tp.is_some() }
    }

    /// The parameter here; `None` if its shape was not declared.
    pub(super) const fn leaf(&self) -> Option<Leaf> {
        let Some(shape) = self.attrs.shape else { return None };
        let tp = match self.attrs.tp {
            Some(tp) if !self.own_tp => Some(tp.inherited(shape.len())),
            tp => tp,
        };
        Some(Leaf {
            shape,
            tp,
            dtype: self.attrs.dtype,
            expert: matches!(self.attrs.expert, Some(true)),
            requires_grad: !matches!(self.attrs.frozen, Some(true)),
        })
    }
}

impl Leaf {
    /// The dim that tensor parallelism cuts, if any.
    pub(super) const fn cut(&self) -> Option<usize> {
        match self.tp {
            Some(tp) => tp.dim(),
            None => None,
        }
    }

    /// Fails if `ranks` tensor-parallel ranks cannot share the parameter evenly.
    #[track_caller]
    pub(super) const fn check_tp(&self, ranks: usize, path: &Path<'_>) {
        let (Some(tp), Some(dim)) = (self.tp, self.cut()) else { return };
        if dim < self.shape.len() && self.shape[dim].is_multiple_of(ranks) {
            return;
        }
        let mut message = Message::new();
        message.text("parameter `").path(path).text("`: `tp = ").placement(tp).text("` cuts dim ");
        message.number(dim as u64);
        if dim >= self.shape.len() {
            message.text(", which its shape ").shape(self.shape).text(" does not have").fail();
        }
        message.text(" of its shape ").shape(self.shape).text(", but ").number(self.shape[dim] as u64);
        message.text(" cannot be shared evenly by ").number(ranks as u64).text(" tensor-parallel ranks");
        message.fail()
    }

    /// Elements of a row of that part, which has `numel` in all: a slice along dim 0, or one element.
    pub(super) const fn row(&self, tp: usize, numel: usize) -> usize {
        if numel == 0 || self.shape.len() < 2 {
            return 1;
        }
        match self.cut() {
            Some(0) => numel / (self.shape[0] / tp),
            _ => numel / self.shape[0],
        }
    }

    /// Elements of the part that one of `tp` tensor-parallel ranks holds.
    #[track_caller]
    pub(super) const fn numel(&self, tp: usize, path: &Path<'_>) -> usize {
        self.check_tp(tp, path);
        let cut = self.cut();
        let mut numel = Some(1usize);
        let mut dim = 0;
        while dim < self.shape.len() {
            let size = match cut {
                Some(cut) if cut == dim => self.shape[dim] / tp,
                _ => self.shape[dim],
            };
            // Dims of an empty parameter may overflow before the 0 comes.
            if size == 0 {
                return 0;
            }
            numel = match numel {
                Some(numel) => numel.checked_mul(size),
                None => None,
            };
            dim += 1;
        }
        match numel {
            Some(numel) if numel <= MAX_ELEMENTS => numel,
            _ => too_large(self.shape, path),
        }
    }
}

#[track_caller]
pub(super) const fn too_large(shape: &[usize], path: &Path<'_>) -> ! {
    let mut message = Message::new();
    message.text("parameter `").path(path).text("` of shape ").shape(shape);
    message.text(" makes a bucket of more than 2^63 bytes").fail()
}

/// Fails where the type does not tell all about the parameters.
#[track_caller]
pub(super) const fn require_known(tree: &Tree, path: &Path<'_>, has_shape: bool) {
    match *tree {
        Tree::Param if has_shape => {}
        Tree::Param => {
            let mut message = Message::new();
            message
                .text("parameter `")
                .path(path)
                .text("` has no declared shape: write `#[fsdp(shape = [..])]`");
            message.fail()
        }
        Tree::Fields(fields) => {
            let mut i = 0;
            while i < fields.len() {
                let shape = fields[i].attrs.shape;
                require_known(fields[i].tree, &path.field(fields[i].name), shape.is_some());
                i += 1;
            }
        }
        Tree::Unit(content) => require_known(content, path, has_shape),
        Tree::Array(0, _) => {}
        Tree::Array(_, element) => require_known(element, &path.element(0), has_shape),
        Tree::Tuple(elements) => {
            let mut i = 0;
            while i < elements.len() {
                require_known(elements[i], &path.element(i), has_shape);
                i += 1;
            }
        }
        Tree::Unknown(why) => {
            let mut message = Message::new();
            let mut name = Message::new();
            if name.path(path).as_bytes().is_empty() {
                message.text("the model");
            } else {
                message.text("`").text(name.as_str()).text("`");
            }
            message.text(" has no layout at compile time: ").text(why).fail()
        }
    }
}

/// Number of parameters, tied ones included.
pub(super) const fn count(tree: &Tree) -> usize {
    let mut sum = 0;
    match *tree {
        Tree::Param => sum = 1,
        Tree::Fields(fields) => {
            let mut i = 0;
            while i < fields.len() {
                sum += count(fields[i].tree);
                i += 1;
            }
        }
        Tree::Unit(content) => sum = count(content),
        Tree::Array(len, element) => sum = len * count(element),
        Tree::Tuple(elements) => {
            let mut i = 0;
            while i < elements.len() {
                sum += count(elements[i]);
                i += 1;
            }
        }
        Tree::Unknown(_) => {}
    }
    sum
}

/// Fails at the first parameter that `ranks` tensor-parallel ranks cannot share evenly. What the type does
/// not tell is left to run time.
#[track_caller]
pub(super) const fn check_tp_size(tree: &Tree, path: &Path<'_>, inherited: &Inherited, ranks: usize) {
    match *tree {
        Tree::Param => {
            if let Some(leaf) = inherited.leaf() {
                leaf.check_tp(ranks, path);
            }
        }
        Tree::Fields(fields) => {
            let mut i = 0;
            while i < fields.len() {
                let field = &fields[i];
                i += 1;
                // Those of the module itself are checked one by one.
                if path.depth == 0 && field.attrs.tp.is_some() && field.attrs.shape.is_some() {
                    continue;
                }
                check_tp_size(field.tree, &path.field(field.name), &inherited.field(field), ranks);
            }
        }
        Tree::Unit(content) => check_tp_size(content, path, inherited, ranks),
        Tree::Array(0, _) => {}
        Tree::Array(_, element) => check_tp_size(element, &path.element(0), inherited, ranks),
        Tree::Tuple(elements) => {
            let mut i = 0;
            while i < elements.len() {
                check_tp_size(elements[i], &path.element(i), inherited, ranks);
                i += 1;
            }
        }
        Tree::Unknown(_) => {}
    }
}
