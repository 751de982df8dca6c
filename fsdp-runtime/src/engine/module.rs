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

use super::param::Param;
use super::unit::UnitCell;
use crate::spec::{Dtype, TpPlacement};

/// A module that can be sharded: it can walk its parameters.
///
/// Derive it; do not write it by hand. Implemented for [`Param`] (a leaf), [`Unit<T>`](super::Unit), and for
/// `Vec`, `Option`, `Box`, `Arc`, arrays, tuples and `BTreeMap` of modules.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module that can be sharded",
    label = "not a parameter, and not a module that derives `FsdpUnit`",
    note = "derive it: `#[derive(FsdpUnit)] struct ..`; or, if this field holds no parameters, mark it `#[fsdp(skip)]`"
)]
pub trait FsdpUnit {
    /// Tells `walker` about every parameter, buffer and nested module, in declaration order.
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>);
}

/// What `#[fsdp(..)]` says about a field. `None` means unsaid: inherited from the enclosing field.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attrs {
    /// `tp = column | row | replicate | dim(N)`.
    pub tp: Option<TpPlacement>,
    /// `expert`.
    pub expert: Option<bool>,
    /// `frozen`: no gradient, no optimizer state.
    pub frozen: Option<bool>,
    /// `no_decay`: weight decay is not applied.
    pub no_decay: Option<bool>,
    /// `dtype = ".."`: overrides the policy's parameter dtype.
    pub dtype: Option<Dtype>,
    /// `tie_with = "path"`: shares its storage with the parameter (or the parameters of the module) of that
    /// name, relative to the struct that declares the field, or absolute.
    pub tie_with: Option<&'static str>,
}

impl Attrs {
    /// Nothing said.
    pub const NONE: Attrs =
        Attrs { tp: None, expert: None, frozen: None, no_decay: None, dtype: None, tie_with: None };

    /// `self` where it says something, else `outer`. Ties are not inherited this way: see [`Tie`].
    fn over(self, outer: Attrs) -> Attrs {
        Attrs {
            tp: self.tp.or(outer.tp),
            expert: self.expert.or(outer.expert),
            frozen: self.frozen.or(outer.frozen),
            no_decay: self.no_decay.or(outer.no_decay),
            dtype: self.dtype.or(outer.dtype),
            tie_with: self.tie_with,
        }
    }
}

/// One field of a struct: its name (renamed if so declared; may contain dots) and its attributes.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Last segment(s) of the fully qualified name.
    pub name: &'static str,
    /// What the field's `#[fsdp(..)]` says.
    pub attrs: Attrs,
}

/// A resolved `tie_with`: the two names the target may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Target relative to the declaring struct, made absolute.
    pub relative: String,
    /// Target as written, taken from the root.
    pub absolute: String,
}

/// Receives what a walk finds.
pub trait Visitor<'a> {
    /// A parameter; `attrs` has inheritance applied.
    fn param(&mut self, name: &str, attrs: &Attrs, tie: Option<&Tie>, param: &'a Param);

    /// What follows until [`Visitor::leave_unit`] belongs to this unit.
    fn enter_unit(&mut self, path: &str, cell: &'a UnitCell);

    /// Back in the enclosing unit.
    fn leave_unit(&mut self);

    /// A tensor that is kept and saved, never reduced.
    fn buffer(&mut self, _name: &str, _tensor: &'a Tensor) {}
}

struct OpenTie {
    relative: String,
    absolute: String,
    declared_at: usize,
}

/// Carries the path and the inherited attributes down a walk.
pub struct Walker<'v, 'a> {
    visitor: &'v mut dyn Visitor<'a>,
    path: String,
    attrs: Attrs,
    tie: Option<OpenTie>,
}

impl<'v, 'a> Walker<'v, 'a> {
    /// A walk from the root, whose path is empty.
    pub fn new(visitor: &'v mut dyn Visitor<'a>) -> Self {
        Walker { visitor, path: String::new(), attrs: Attrs::NONE, tie: None }
    }

    /// Descends into a field.
    pub fn field<T: FsdpUnit + ?Sized>(&mut self, field: &Field, value: &'a T) {
        self.descend(&field.name, field.attrs, |walker| value.walk(walker));
    }

    /// Descends into an element of a container, named by its index or key.
    pub fn element<T: FsdpUnit + ?Sized>(&mut self, key: &dyn Display, value: &'a T) {
        self.descend(key, Attrs::NONE, |walker| value.walk(walker));
    }

    /// Reports a field that is a buffer.
    pub fn buffer(&mut self, field: &Field, tensor: &'a Tensor) {
        let name = join(&self.path, &field.name);
        self.visitor.buffer(&name, tensor);
    }

    /// Reports a parameter at the present path.
    pub fn param(&mut self, param: &'a Param) {
        let tie = self.tie.as_ref().map(|open| {
            let rest = &self.path[open.declared_at..];
            Tie { relative: format!("{}{rest}", open.relative), absolute: format!("{}{rest}", open.absolute) }
        });
        self.visitor.param(&self.path, &self.attrs, tie.as_ref(), param);
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
        self.path = join(&self.path, name);
        self.attrs = attrs.over(outer_attrs);
        let outer_tie = match tie {
            Some((relative, absolute)) => {
                let open = OpenTie { relative, absolute, declared_at: self.path.len() };
                Some(self.tie.replace(open))
            }
            None => None,
        };
        body(self);
        if let Some(outer) = outer_tie {
            self.tie = outer;
        }
        self.attrs = outer_attrs;
        self.path.truncate(parent_len);
    }
}

fn join(path: &str, name: &dyn Display) -> String {
    if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
}

impl FsdpUnit for Param {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        walker.param(self);
    }
}

impl<T: ?Sized> FsdpUnit for PhantomData<T> {
    fn walk<'a>(&'a self, _walker: &mut Walker<'_, 'a>) {}
}

impl FsdpUnit for () {
    fn walk<'a>(&'a self, _walker: &mut Walker<'_, 'a>) {}
}

impl<T: FsdpUnit + ?Sized> FsdpUnit for Box<T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        (**self).walk(walker);
    }
}

impl<T: FsdpUnit + ?Sized> FsdpUnit for Arc<T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        (**self).walk(walker);
    }
}

impl<T: FsdpUnit> FsdpUnit for Option<T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        if let Some(module) = self {
            module.walk(walker);
        }
    }
}

impl<T: FsdpUnit> FsdpUnit for [T] {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        for (index, module) in self.iter().enumerate() {
            walker.element(&index, module);
        }
    }
}

impl<T: FsdpUnit> FsdpUnit for Vec<T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        self.as_slice().walk(walker);
    }
}

impl<T: FsdpUnit, const N: usize> FsdpUnit for [T; N] {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        self.as_slice().walk(walker);
    }
}

impl<K: Display, T: FsdpUnit> FsdpUnit for BTreeMap<K, T> {
    fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
        for (key, module) in self {
            walker.element(key, module);
        }
    }
}

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))+) => {$(
        impl<$($name: FsdpUnit),+> FsdpUnit for ($($name,)+) {
            fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
                $(walker.element(&$index, &self.$index);)+
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
}
