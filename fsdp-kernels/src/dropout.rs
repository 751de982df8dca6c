//! Dropout.

use crate::dtype::{by_dtype, pick};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const DROPOUT: &[&str] = by_dtype!("dropout");

/// Words of a block of ChaCha: one thread draws them, for as many elements.
const WORDS: u64 = 16;

/// Dropout of this dtype; takes [`DropoutArgs`].
pub fn dropout(dtype: Dtype) -> &'static str {
    pick(DROPOUT, dtype)
}

/// `y = x * scale`, or 0 where the element's random word is below `threshold`.
///
/// Sample `s` has the words of ChaCha with 8 rounds, from block 0 on, whose key is the first two outputs of SplitMix64
/// of `key` and then those of `first_sample + s`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DropoutArgs {
    /// `[samples, width]`.
    pub x: DevicePtr,
    /// `[samples, width]`, written; may be `x`.
    pub y: DevicePtr,
    /// Samples.
    pub samples: u64,
    /// Elements of a sample.
    pub width: u64,
    /// Names the stream.
    pub key: u64,
    /// Number of the first sample, in all of the batch.
    pub first_sample: u64,
    /// Words below it drop their element.
    pub threshold: u32,
    /// Factor of the others.
    pub scale: f32,
}

// SAFETY: repr(C), the fields of `DropoutArgs` in dropout.cuh.
unsafe impl Args for DropoutArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        let turns = self.samples.saturating_mul(self.width.div_ceil(WORDS));
        Launch::over(turns.div_ceil(crate::THREADS.into()), max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let len = self.samples.saturating_mul(self.width);
        vec![Access::read(self.x, len, dtype.size()), Access::write(self.y, len, dtype.size())]
    }
}
