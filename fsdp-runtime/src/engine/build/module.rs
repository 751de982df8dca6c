//! The trait behind `#[derive(FsdpUnit)]`: a walk over parameters, buffers and nested modules.
//!
//! A module does one thing for the runtime: it walks its fields in declaration order and names them. The
//! derive writes that walk; the runtime runs it with different [`Visitor`]s to shard, load, save or print a
//! model.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::Tensor;

use crate::engine::{Param, UnitCell};
use crate::spec::{Attrs, Field, TpPlacement, Tree};

/// A module that can be sharded: it can walk its parameters, and its type tells what is known of them.
///
/// Derive it; do not write it by hand. Implemented for [`Param`] (a leaf), [`Unit<T>`](crate::engine::Unit), and for
/// `Vec`, `Option`, `Box`, `Arc`, arrays, tuples and `BTreeMap` of modules.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module that can be sharded",
    label = "not a parameter, and not a module that derives `FsdpUnit`",
    note = "derive it: `#[derive(FsdpUnit)] struct ..`; or, if this field holds no parameters, mark it `#[fsdp(skip)]`",
    note = "a layer of another crate, as `candle_nn::Linear`, holds tensors, which cannot be sharded: hold its weights as \
            `Param`s, and build the layer from them in `forward`"
)]
pub trait FsdpUnit {
    /// The fields that the walk reports, in declaration order; those of all variants of an enum.
    const FIELDS: &'static [Field] = &[];

    /// What the type tells about the parameters; [`StaticLayout`](crate::layout::StaticLayout) is computed
    /// from it.
    const TREE: Tree = Tree::of(Self::FIELDS);

    /// Tells `walker` about every parameter, buffer and nested module, in declaration order.
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>);

    /// Walks `self` as the content of `field`.
    #[doc(hidden)]
    fn visit<'a>(&'a self, field: &'static Field, walker: &mut Walker<'_, 'a>) {
        walker.field(field, |walker| self.walk(walker));
    }
}

/// What one `shape` can be said of: a [`Param`], or a container of nothing but them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no shape to declare",
    label = "not a `Param`, and not a container of `Param`s",
    note = "`#[fsdp(shape = [..])]` belongs on the parameter inside the module"
)]
pub trait Shaped: FsdpUnit {
    /// That of [`FsdpUnit`].
    const TREE: Tree = <Self as FsdpUnit>::TREE;

    /// That of [`FsdpUnit`].
    #[doc(hidden)]
    fn visit<'a>(&'a self, field: &'static Field, walker: &mut Walker<'_, 'a>) {
        FsdpUnit::visit(self, field, walker);
    }
}

/// What a field marked `#[fsdp(buffer)]` may be: a candle `Tensor`, or an `Option`, `Vec` or array of them.
///
/// A buffer is a whole tensor on every rank, kept with the model and saved with it, but not trained. `fully_shard` gives
/// all ranks the values of rank 0; after that each rank has its own, and a checkpoint holds those of rank 0. A forward
/// updates one in place, as by [`Tensor::slice_set`]; so do `fully_shard` and restores. A forward that is recomputed finds
/// them as they were, and leaves them alone. Every handle of the tensor sees
/// that: ranks whose modules hold clones of one tensor share its values, and each rank must make its own.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a buffer",
    label = "not a candle `Tensor`, nor an `Option`, `Vec` or array of them",
    note = "a buffer is a tensor that is kept and saved but not trained; what is not a part of the model's state is marked `#[fsdp(skip)]`"
)]
pub trait Buffer {
    /// Tells `walker` about every tensor.
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>);

    /// Walks `self` as the content of `field`.
    #[doc(hidden)]
    fn visit<'a>(&'a self, field: &'static Field, walker: &mut Walker<'_, 'a>) {
        walker.field(field, |walker| self.walk(walker));
    }
}

/// A resolved `tie_with`: the two names the target may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Target relative to the declaring struct, made absolute.
    pub relative: String,
    /// Target as written, taken from the root.
    pub absolute: String,
}

/// A resolved `fused(..)`: the tensors that checkpoints know a parameter as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fused {
    /// Path of the field that was declared so.
    pub field: String,
    /// Fully qualified names of the parts, in order.
    pub parts: Vec<String>,
    /// Path of a field around that one that was declared to be fused too.
    pub outer: Option<String>,
}

/// Receives what a walk finds; what it does not look at it leaves out.
pub trait Visitor<'a> {
    /// A parameter; `attrs` has inheritance applied.
    fn param(
        &mut self,
        _name: &str,
        _attrs: &Attrs,
        _tie: Option<&Tie>,
        _fused: Option<&Fused>,
        _param: &'a Param,
    ) {
    }

    /// What follows until [`Visitor::leave_unit`] belongs to this unit.
    fn enter_unit(&mut self, _path: &str, _cell: &'a UnitCell) {}

    /// Back in the enclosing unit.
    fn leave_unit(&mut self) {}

    /// A tensor that is kept and saved, never reduced.
    fn buffer(&mut self, _name: &str, _tensor: &'a Tensor) {}

    /// The enum at `path` is this variant, as `Type::Variant`, or the option there is `Some` or `None`; its content follows.
    fn variant(&mut self, _path: &str, _name: &'static str) {}
}

struct OpenTie {
    relative: String,
    absolute: String,
    declared_at: usize,
}

struct OpenFused {
    /// Of the struct that declares the field.
    parent: String,
    names: &'static [&'static str],
    field: String,
    outer: Option<String>,
}

/// Carries the path and the inherited attributes down a walk.
pub struct Walker<'v, 'a> {
    visitor: &'v mut dyn Visitor<'a>,
    path: String,
    attrs: Attrs,
    /// The placement was declared on the very field that holds the parameter.
    own_tp: bool,
    tie: Option<OpenTie>,
    fused: Option<OpenFused>,
}

impl std::fmt::Debug for Walker<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Walker").finish_non_exhaustive()
    }
}

impl<'v, 'a> Walker<'v, 'a> {
    /// A walk from the root, whose path is empty.
    pub fn new(visitor: &'v mut dyn Visitor<'a>) -> Self {
        Walker { visitor, path: String::new(), attrs: Attrs::NONE, own_tp: false, tie: None, fused: None }
    }

    /// Descends into a field, whose content `body` reports.
    pub fn field(&mut self, field: &Field, body: impl FnOnce(&mut Self)) {
        let own_tp = std::mem::replace(&mut self.own_tp, field.attrs.tp.is_some());
        self.descend(&field.name, field.attrs, body);
        self.own_tp = own_tp;
    }

    /// Descends into an element of a container, named by its index or key. It is what its container was
    /// declared to be.
    pub fn element(&mut self, key: &dyn Display, body: impl FnOnce(&mut Self)) {
        self.descend(key, Attrs { shape: self.attrs.shape, ..Attrs::NONE }, body);
    }

    /// Descends into each element of a list.
    fn elements<T>(&mut self, elements: &'a [T], walk: impl Fn(&'a T, &mut Self)) {
        for (index, element) in elements.iter().enumerate() {
            self.element(&index, |walker| walk(element, walker));
        }
    }

    /// The enum at the present path is this variant, as `Type::Variant`.
    pub fn variant(&mut self, name: &'static str) {
        self.visitor.variant(&self.path, name);
    }

    /// Reports a parameter at the present path.
    pub fn param(&mut self, param: &'a Param) {
        let tie = self.tie.as_ref().map(|open| {
            let rest = self.path[open.declared_at..].trim_start_matches('.');
            Tie { relative: join(&open.relative, &rest), absolute: join(&open.absolute, &rest) }
        });
        let fused = self.fused.as_ref().map(|open| {
            let rest = self.path[open.field.len()..].trim_start_matches('.');
            let part = |name: &&str| join(&join(&open.parent, name), &rest);
            let parts = open.names.iter().map(part).collect();
            Fused { field: open.field.clone(), parts, outer: open.outer.clone() }
        });
        let placement = |tp: TpPlacement| if self.own_tp { tp } else { tp.inherited(param.dims().len()) };
        let attrs = Attrs { tp: self.attrs.tp.map(placement), ..self.attrs };
        self.visitor.param(&self.path, &attrs, tie.as_ref(), fused.as_ref(), param);
    }

    /// What `body` reports belongs to the unit of `cell`.
    pub fn unit(&mut self, cell: &'a UnitCell, body: impl FnOnce(&mut Self)) {
        self.visitor.enter_unit(&self.path, cell);
        body(self);
        self.visitor.leave_unit();
    }

    fn descend(&mut self, name: &dyn Display, attrs: Attrs, body: impl FnOnce(&mut Self)) {
        let parent_len = self.path.len();
        let outer_attrs = self.attrs;
        let tie = attrs.tie_with.map(|target| (join(&self.path, &target), target.to_string()));
        let fused = attrs.fused.map(|names| (self.path.clone(), names));
        self.path = join(&self.path, name);
        self.attrs = attrs.over(outer_attrs);
        let outer_tie = tie.map(|(relative, absolute)| {
            self.tie.replace(OpenTie { relative, absolute, declared_at: self.path.len() })
        });
        let outer_fused = fused.map(|(parent, names)| {
            let outer = self.fused.as_ref().map(|open| open.field.clone());
            self.fused.replace(OpenFused { parent, names, field: self.path.clone(), outer })
        });
        body(self);
        if let Some(outer) = outer_tie {
            self.tie = outer;
        }
        if let Some(outer) = outer_fused {
            self.fused = outer;
        }
        self.attrs = outer_attrs;
        self.path.truncate(parent_len);
    }
}

/// Either may be empty.
fn join(path: &str, name: &dyn Display) -> String {
    let name = name.to_string();
    let dot = if path.is_empty() || name.is_empty() { "" } else { "." };
    format!("{path}{dot}{name}")
}

impl FsdpUnit for Param {
    const TREE: Tree = Tree::Param;

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.param(self);
    }
}

impl<T: ?Sized> FsdpUnit for PhantomData<T> {
    const TREE: Tree = Tree::EMPTY;

    fn walk<'a>(&'a self, _walker: &mut Walker<'_, 'a>) {}
}

impl FsdpUnit for () {
    const TREE: Tree = Tree::EMPTY;

    fn walk<'a>(&'a self, _walker: &mut Walker<'_, 'a>) {}
}

impl<T: FsdpUnit + ?Sized> FsdpUnit for Box<T> {
    const TREE: Tree = T::TREE;

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        (**self).walk(walker);
    }
}

impl<T: FsdpUnit + ?Sized> FsdpUnit for Arc<T> {
    const TREE: Tree = T::TREE;

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        (**self).walk(walker);
    }
}

// A container of any length does not look at its elements' trees: those of a recursive module would never
// end.
impl<T: FsdpUnit> FsdpUnit for Option<T> {
    const TREE: Tree = Tree::Unknown("an `Option` may be empty");

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        // A module without parameters is told apart from none by this alone.
        walker.variant(if self.is_some() { "Some" } else { "None" });
        if let Some(module) = self {
            module.walk(walker);
        }
    }
}

impl<T: FsdpUnit> FsdpUnit for [T] {
    const TREE: Tree = Tree::Unknown("a slice has any number of elements");

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.elements(self, T::walk);
    }
}

impl<T: FsdpUnit> FsdpUnit for Vec<T> {
    const TREE: Tree = Tree::Unknown("a `Vec` has any number of elements: make it an array");

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        self.as_slice().walk(walker);
    }
}

impl<T: FsdpUnit, const N: usize> FsdpUnit for [T; N] {
    const TREE: Tree = Tree::Array(N, &T::TREE);

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        self.as_slice().walk(walker);
    }
}

impl<K: Display, T: FsdpUnit> FsdpUnit for BTreeMap<K, T> {
    const TREE: Tree = Tree::Unknown("a `BTreeMap` has any number of elements");

    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        for (key, module) in self {
            walker.element(key, |walker| module.walk(walker));
        }
    }
}

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))+) => {$(
        impl<$($name: FsdpUnit),+> FsdpUnit for ($($name,)+) {
            const TREE: Tree = Tree::Tuple(&[$(&$name::TREE),+]);

            fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
                $(walker.element(&$index, |walker| self.$index.walk(walker));)+
            }
        }
    )+};
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11)
}

impl Shaped for Param {}
impl<T: Shaped> Shaped for crate::engine::Unit<T> {}
impl<T: Shaped + ?Sized> Shaped for Box<T> {}
impl<T: Shaped + ?Sized> Shaped for Arc<T> {}
impl<T: Shaped> Shaped for Option<T> {}
impl<T: Shaped> Shaped for Vec<T> {}
impl<T: Shaped, const N: usize> Shaped for [T; N] {}
impl<K: Display, T: Shaped> Shaped for BTreeMap<K, T> {}

impl Buffer for Tensor {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.visitor.buffer(&walker.path, self);
    }
}

impl<T: Buffer> Buffer for Option<T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        self.iter().for_each(|buffer| buffer.walk(walker));
    }
}

impl<T: Buffer> Buffer for Vec<T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.elements(self, T::walk);
    }
}

impl<T: Buffer, const N: usize> Buffer for [T; N] {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.elements(self, T::walk);
    }
}
