//! What can be asked of a module's type in constant expressions.

use crate::engine::FsdpUnit;
use crate::layout::{self, FitOptions};

/// Checks the declared shapes of a module against the number of tensor-parallel ranks; the derive calls it for
/// `#[fsdp(tp_size = N)]`.
///
/// # Panics
/// At the first parameter that `ranks` ranks cannot share evenly, naming it. Parameters without a declared
/// shape, and what is in containers of any length or in enums, are left to run time; so are the module's own fields,
/// which [`check_tp_field`] checks.
#[doc(hidden)]
#[track_caller]
pub const fn check_tp_size<M: FsdpUnit>(ranks: usize) {
    layout::check_tp_size(const { &M::TREE }, ranks);
}

/// The same for one of the module's fields, which has a declared shape and a placement of its own, in whatever
/// container its parameters are.
///
/// # Panics
/// If `ranks` ranks cannot share it evenly.
#[doc(hidden)]
#[track_caller]
pub const fn check_tp_field<M: FsdpUnit>(field: usize, ranks: usize) {
    layout::check_tp_field(&M::FIELDS[field], ranks);
}

/// What `fsdp::assert_fits!` calls, `name` being the type as it was written.
///
/// # Panics
/// If a model of type `M` needs more than the budget, or as [`StaticLayout::of`](crate::layout::StaticLayout::of) does.
#[doc(hidden)]
#[track_caller]
pub const fn assert_fits<M: FsdpUnit>(name: &str, options: &FitOptions) {
    layout::require_fit(const { &M::TREE }, name, options);
}
