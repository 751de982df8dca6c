//! The expansion raises no warning, rustc's or clippy's, under the strictest settings. Clippy sees this file
//! with the rest.

#![deny(warnings, missing_docs, clippy::all, clippy::pedantic, clippy::nursery)]
#![deny(unused_qualifications, unused_lifetimes, single_use_lifetimes, unreachable_pub, trivial_casts)]

use std::marker::PhantomData;

use fsdp::{FsdpUnit, Param};

/// Every attribute at once, and every kind of field.
#[derive(FsdpUnit)]
pub struct Model<'a, T, B = u8, const N: usize = 2> {
    /// All that can be said of a parameter.
    #[fsdp(frozen, no_decay, expert, tp = column, dtype = "bf16", tie_with = "inner", rename = "w")]
    pub weight: Param,
    /// A constant shape.
    #[fsdp(shape = [N, 2], init = normal(0.0, 0.02))]
    pub shaped: Param,
    /// A container of a type parameter.
    pub inner: Vec<[T; N]>,
    /// The type itself.
    pub next: Option<Box<Self>>,
    name: &'a str,
    label: String,
    window: Option<usize>,
    phantom: PhantomData<B>,
    /// Deprecated.
    #[deprecated]
    pub old: Param,
}

/// Arms that are alike, and one that is empty.
#[derive(FsdpUnit)]
pub enum Choice {
    /// One.
    One {
        /// A weight.
        weight: Param,
    },
    /// Another like it.
    Other {
        /// A weight.
        weight: Param,
    },
    /// Unnamed.
    Two(Param, u8),
    /// Deprecated.
    #[deprecated]
    Three,
}

/// Deprecated itself.
#[deprecated(note = "a reason")]
#[derive(FsdpUnit)]
pub struct Old {
    /// A weight.
    pub w: Param,
}

/// A deprecated enum.
#[deprecated]
#[derive(FsdpUnit)]
pub enum OldChoice {
    /// One.
    One(Param),
    /// Another.
    Other {
        /// A weight.
        w: Param,
    },
}

/// A deprecated generic struct, with checks in the walk.
#[deprecated]
#[derive(FsdpUnit)]
#[fsdp(tp_size = 2)]
pub struct OldGeneric<T, const N: usize> {
    #[fsdp(shape = [N, 2], tp = row)]
    weight: Param,
    inner: Vec<T>,
}

/// What the user has allowed.
#[allow(deprecated)]
#[derive(FsdpUnit)]
pub struct MayUseOld {
    old: Old,
    choice: Option<OldChoice>,
}

/// What the user has allowed for a field.
#[derive(FsdpUnit)]
pub struct FieldMayUseOld {
    #[allow(unused, deprecated)]
    old: Old,
}

/// The words that the model above has no room for.
#[derive(FsdpUnit)]
#[fsdp(rename_all = "camelCase", crate = "fsdp", bound = "T: FsdpUnit")]
pub struct Other<T>(
    /// Saved, not trained.
    #[fsdp(buffer)]
    pub Option<candle_core::Tensor>,
    /// Uniform.
    #[fsdp(init = uniform(-0.5, 0.5), tp = dim(1), shape = [N, 2 * N])]
    pub Vec<Param>,
    /// Not the model's.
    #[fsdp(skip)]
    pub fn(),
    pub(crate) T,
);

const N: usize = 2;

/// A check that is written beside the impl, and one that is written in the walk.
#[derive(FsdpUnit)]
#[fsdp(tp_size = 2, rename_all = "camelCase")]
pub struct Cut<'a> {
    #[fsdp(shape = [4], tp = column)]
    whole_weight: Param,
    name: &'a str,
}

/// The same of a generic struct.
#[derive(FsdpUnit)]
#[fsdp(tp_size = 2)]
pub struct CutGeneric<const N: usize> {
    #[fsdp(shape = [N, 2], tp = row)]
    weight: Param,
}

/// Nothing in it.
#[derive(FsdpUnit)]
pub struct Empty;

/// Nothing of it.
#[derive(FsdpUnit)]
pub enum Never {}

const fn fields<M: FsdpUnit + ?Sized>(_: &M) -> usize {
    M::FIELDS.len()
}

#[test]
#[allow(deprecated)]
fn strict_modules_are_usable() {
    let model: Model<'_, Empty> = Model {
        weight: Param::new(1),
        shaped: Param::new((2, 2)),
        inner: vec![[Empty, Empty]],
        next: None,
        name: "name",
        label: String::new(),
        window: None,
        phantom: PhantomData,
        old: Param::new(1),
    };
    let choices = [Choice::One { weight: Param::new(1) }, Choice::Two(Param::new(1), 1), Choice::Three];
    assert_eq!((fields(&model), fields(&choices)), (5, 0));
    let other = Other(None, vec![Param::new((2, 4))], || (), Empty);
    assert_eq!((fields(&other), fields(&other.3)), (3, 0));
    let old = || Old { w: Param::new(1) };
    let generic = OldGeneric::<Old, 3> { weight: Param::new((3, 2)), inner: vec![old()] };
    assert_eq!((fields(&old()), fields(&OldChoice::One(Param::new(1))), fields(&generic)), (1, 2, 2));
    assert_eq!((generic.weight.numel(), generic.inner.len()), (6, 1));
    let may = MayUseOld { old: old(), choice: Some(OldChoice::Other { w: Param::new(1) }) };
    let field = FieldMayUseOld { old: old() };
    assert_eq!((fields(&may), fields(&field), may.choice.is_some()), (2, 1, true));
    assert_eq!(may.old.w.numel() + field.old.w.numel(), 2);
    let cut = Cut { whole_weight: Param::new(4), name: "cut" };
    let generic = CutGeneric::<3> { weight: Param::new((3, 2)) };
    assert_eq!((fields(&cut), fields(&generic), cut.name), (1, 1, "cut"));
    assert_eq!((cut.whole_weight.numel(), generic.weight.numel()), (4, 6));
    assert_eq!((model.name, model.label.as_str(), model.window), ("name", "", None));
}
