//! What is configured out is not there for the derive: fields, positions, variants, attributes.

use fsdp::{FsdpUnit, Param};

#[derive(FsdpUnit)]
pub struct Named {
    #[cfg(any())]
    pub absent: Missing,
    #[cfg(all())]
    pub present: Param,
    #[cfg_attr(all(), fsdp(skip))]
    pub skipped: std::rc::Rc<u8>,
    #[cfg_attr(any(), fsdp(nonsense))]
    pub plain: Param,
}

#[derive(FsdpUnit)]
pub struct Tuple(#[cfg(any())] Missing, Param, #[cfg(any())] Missing, #[fsdp(skip)] fn());

#[derive(FsdpUnit)]
pub enum Either {
    #[cfg(any())]
    Absent(Missing),
    Present(#[cfg(any())] Missing, #[cfg(all())] Param),
    Named {
        #[cfg(any())]
        absent: Missing,
        weight: Param,
    },
}

#[cfg_attr(all(), derive(FsdpUnit))]
#[cfg_attr(all(), fsdp(rename_all = "camelCase"))]
pub struct Derived<#[cfg(any())] T, const N: usize> {
    weights: [Param; N],
}

pub(crate) fn main() {
    fn assert_module<T: FsdpUnit>(_: &T) {}
    let param = || Param::new(1);
    assert_module(&Named { present: param(), skipped: 1.into(), plain: param() });
    assert_module(&Tuple(param(), || ()));
    assert_module(&[Either::Present(param()), Either::Named { weight: param() }]);
    assert_module(&Derived { weights: [param()] });
}
