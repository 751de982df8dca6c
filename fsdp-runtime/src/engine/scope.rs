//! The token that proves a unit is unsharded.

use std::marker::PhantomData;

use candle_core::Tensor;

use super::param::Param;

/// Proof that one unit's parameters are whole. Only the runtime makes one, for the duration of the unit's forward (and of its
/// recomputation); it cannot leave that call and cannot cross threads.
pub struct Scope<'a> {
    _borrow: PhantomData<&'a ()>,
    _not_send: PhantomData<*const ()>,
}

impl Scope<'_> {
    pub(crate) fn read(&self, param: &Param) -> candle_core::Result<Tensor> {
        match param.bound() {
            Some(bound) => Ok(bound.variable.clone()),
            None => candle_core::bail!("parameter is not sharded yet"),
        }
    }
}
