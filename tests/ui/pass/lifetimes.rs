//! Lifetimes, those included that the expansion would have chosen for itself.

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Named<'a, 'walk: 'a, T: 'a>
where
    'a: 'a,
{
    name: &'a str,
    other: &'walk str,
    #[fsdp(skip)]
    table: &'a [f32],
    #[fsdp(skip)]
    call: for<'b> fn(&'b T) -> &'b T,
    weight: Param,
}

fn assert_module<M: FsdpUnit>(_: &M) {}

pub(crate) fn main() {
    let named =
        Named { name: "n", other: "o", table: &[1.0], call: |x: &u8| x, weight: Param::new(1) };
    assert_module(&named);
    let _ = ( named.name, named.other, named.table, named.call, &named.weight);
}
