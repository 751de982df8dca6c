//! What a module's type says about its parameters, as constants: the data that `#[derive(FsdpUnit)]` writes.
//!
//! A walk over a model and a constant fold over its type read the same [`Field`]s, so what is computed at
//! compile time and what is built at run time cannot drift apart.

use super::{Dtype, TpPlacement};
use crate::init::Init;

/// The parameters of a module, as far as its type tells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tree {
    /// A parameter. Its shape, if constant, is declared on the field that holds it.
    Param,
    /// A struct: its walked fields, in declaration order.
    Fields(&'static [Field]),
    /// A communication unit.
    Unit(&'static Tree),
    /// An array: so many elements, named by their index.
    Array(usize, &'static Tree),
    /// A tuple: its elements, named by their position.
    Tuple(&'static [&'static Tree]),
    /// The type does not tell; why not.
    Unknown(&'static str),
}

impl Tree {
    /// No parameters.
    pub const EMPTY: Tree = Tree::Fields(&[]);

    /// The tree of a struct with these fields. One without any is taken for a module whose walk was written by
    /// hand: a derived one says [`Tree::EMPTY`].
    pub const fn of(fields: &'static [Field]) -> Tree {
        if fields.is_empty() { Tree::Unknown("its walk was written by hand") } else { Tree::Fields(fields) }
    }

    /// An enum of alternative modules.
    pub const ENUM: Tree = Tree::Unknown("an enum may be any of its variants");
}

/// One field of a struct or of an enum's variant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Field {
    /// Last segment or segments of the fully qualified name, renamed if so declared. Empty if the field's
    /// content is named as if it were the enclosing module's own.
    pub name: &'static str,
    /// What its `#[fsdp(..)]` says.
    pub attrs: Attrs,
    /// What is in it.
    pub tree: &'static Tree,
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
    /// `init = ..`: overrides the parameter's own initial value.
    pub init: Option<Init>,
    /// `tie_with = "path"`: shares its storage with the parameter (or the parameters of the module) of that
    /// name, relative to the struct that declares the field, or absolute. Not inherited as such: what is
    /// inside is tied to what has the same name inside the target.
    pub tie_with: Option<&'static str>,
    /// `shape = [..]`: dims of the parameter, or of each parameter of the container. Not inherited.
    pub shape: Option<&'static [usize]>,
    /// `fused(..)`: the names that checkpoints have in place of the field's, of the parts that each parameter is
    /// the concatenation of. Not inherited as such: it holds for what is inside, by the names it has there.
    pub fused: Option<&'static [&'static str]>,
}

impl Attrs {
    /// Nothing said.
    pub const NONE: Attrs = Attrs {
        tp: None,
        expert: None,
        frozen: None,
        no_decay: None,
        dtype: None,
        init: None,
        tie_with: None,
        shape: None,
        fused: None,
    };

    /// `self` where it says something, else what is inherited from `outer`.
    pub const fn over(self, outer: Attrs) -> Attrs {
        macro_rules! inherited {
            ($name:ident) => {
                if self.$name.is_some() { self.$name } else { outer.$name }
            };
        }
        Attrs {
            tp: inherited!(tp),
            expert: inherited!(expert),
            frozen: inherited!(frozen),
            no_decay: inherited!(no_decay),
            dtype: inherited!(dtype),
            init: inherited!(init),
            tie_with: self.tie_with,
            shape: self.shape,
            fused: self.fused,
        }
    }
}
