//! A crate whose manifest calls fsdp `sharding`: the derive finds it by itself.

pub use sharding;

use sharding::{FsdpUnit, Param};

/// No `crate` attribute.
#[derive(FsdpUnit)]
pub struct Linear {
    /// A parameter.
    #[fsdp(init = zeros, shape = [2, 2])]
    pub weight: Param,
}

/// A module for crates that need not depend on fsdp themselves.
#[macro_export]
macro_rules! make_module {
    ($name:ident) => {
        #[derive($crate::sharding::FsdpUnit)]
        #[fsdp(crate = $crate::sharding)]
        struct $name {
            inner: $crate::Linear,
            scale: $crate::sharding::Param,
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(FsdpUnit)]
    enum Either {
        One(Linear),
        Other(#[fsdp(skip)] u8),
    }

    #[test]
    fn what_derives_is_a_module() {
        assert_eq!((Linear::FIELDS.len(), Either::FIELDS.len()), (1, 1));
        let weight = || Linear { weight: Param::new((2, 2)) };
        assert!(matches!([Either::One(weight()), Either::Other(0)], [Either::One(_), Either::Other(0)]));
    }
}
