//! A crate that does not depend on fsdp: it reaches it through what another one re-exports.

#[cfg(test)]
mod tests {
    use fsdp_test_renamed::sharding::{FsdpUnit, Param};
    use fsdp_test_renamed::{Linear, make_module};

    make_module!(FromMacro);

    #[derive(FsdpUnit)]
    #[fsdp(crate = "fsdp_test_renamed::sharding")]
    struct ByHand {
        inner: FromMacro,
    }

    #[test]
    fn what_derives_is_a_module() {
        let linear = Linear { weight: Param::new((2, 2)) };
        let module = ByHand { inner: FromMacro { inner: linear, scale: Param::new(1) } };
        assert_eq!(module.inner.scale.numel() + module.inner.inner.weight.numel(), 5);
        assert_eq!((ByHand::FIELDS.len(), FromMacro::FIELDS.len()), (1, 2));
    }
}
