//! What an op keeps of its forward for its backward.

use std::any::Any;
use std::sync::OnceLock;

use candle_core::{Result, bail};

/// Set by the forward, of a type that is the device's: vectors on the CPU, memory of a device elsewhere.
#[derive(Default)]
pub(super) struct Kept(OnceLock<Box<dyn Any + Send + Sync>>);

impl Kept {
    /// Keeps `value`, unless a forward has kept one already.
    pub fn set<T: Send + Sync + 'static>(&self, value: T) {
        let _ = self.0.set(Box::new(value));
    }

    /// What the forward has kept.
    pub fn get<T: 'static>(&self, op: &str) -> Result<&T> {
        match self.0.get().and_then(|kept| kept.downcast_ref()) {
            Some(kept) => Ok(kept),
            None => bail!("{op}: backward before forward"),
        }
    }
}
