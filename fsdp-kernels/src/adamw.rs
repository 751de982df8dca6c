//! AdamW on flat shards.

use crate::dtype::{by_dtypes, pick_two};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const ADAMW: &[&str] = by_dtypes!("adamw");

/// AdamW for gradients and model weights of these dtypes; takes [`AdamWArgs`].
pub fn adamw(grads: Dtype, model: Dtype) -> &'static str {
    pick_two(ADAMW, grads, model)
}

/// One step on the runs of a shard, each with its own scalars. Buffers have one element for each of the shard; those
/// outside of all runs stay as they are.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AdamWArgs {
    /// f32 main weights, updated in place; 0: the model weights are (widened, updated, rounded).
    pub main: DevicePtr,
    /// Model weights, written; 0: none (only with main weights).
    pub model: DevicePtr,
    /// Gradients.
    pub grads: DevicePtr,
    /// First moment, f32, updated in place.
    pub exp_avg: DevicePtr,
    /// Second moment, f32, updated in place.
    pub exp_avg_sq: DevicePtr,
    /// [`AdamWSegment`]s, which may not overlap. They are in device memory so that a captured graph reads those of
    /// its step.
    pub segments: DevicePtr,
    /// An f32 that gradients are multiplied with first, as [`ClipScaleArgs`](crate::ClipScaleArgs) writes it; 0:
    /// `scale` is used.
    pub grad_scale: DevicePtr,
    /// Elements of the shard: no segment reaches beyond.
    pub len: u64,
    /// Number of segments.
    pub segment_count: u32,
    /// What gradients are multiplied with first.
    pub scale: f32,
}

// SAFETY: repr(C), the fields of `AdamWArgs` in adamw.cuh.
unsafe impl Args for AdamWArgs {
    /// A row of blocks for each segment, as if one of them were the whole shard; for a grid that follows their lengths
    /// see [`AdamWArgs::launch_for`].
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        self.launch_for(self.len, max_blocks)
    }

    fn accesses(&self, [grads, model]: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::write(self.main, self.len, 4),
            Access::write(self.model, self.len, model.size()),
            Access::read(self.grads, self.len, grads.size()),
            Access::write(self.exp_avg, self.len, 4),
            Access::write(self.exp_avg_sq, self.len, 4),
            Access::read(self.segments, self.segment_count.into(), size_of::<AdamWSegment>()),
            Access::read(self.grad_scale, 1, 4),
        ]
    }
}

impl AdamWArgs {
    /// The grid when the longest segment has `longest` elements.
    pub fn launch_for(&self, longest: u64, max_blocks: u32) -> Option<Launch> {
        let y = self.segment_count.min(u32::from(u16::MAX));
        if y == 0 {
            return None;
        }
        let grid = Launch::elements(longest, max_blocks.div_ceil(y))?.grid;
        Some(Launch { grid: [grid[0], y], ..Launch::ONE })
    }
}

/// A run of elements with the scalars of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct AdamWSegment {
    /// First element, in the shard.
    pub begin: u64,
    /// Number of elements.
    pub len: u64,
    /// `1 - lr * weight_decay`.
    pub decay: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `lr / (1 - beta1^step)`.
    pub step_size: f32,
    /// `sqrt(1 - beta2^step)`.
    pub correction2: f32,
    /// Added to the denominator.
    pub eps: f32,
}

/// What the scalars of a segment are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay; 0 for what has none.
    pub weight_decay: f64,
    /// Number of the step, from 1.
    pub step: u64,
}

impl AdamWStep {
    /// The segment of `len` elements from `begin` on: scalars in f64, rounded once.
    pub fn segment(&self, begin: u64, len: u64) -> AdamWSegment {
        let AdamWStep { lr, beta1, beta2, eps, weight_decay, step } = *self;
        let t = step as f64;
        AdamWSegment {
            begin,
            len,
            decay: (1.0 - lr * weight_decay) as f32,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            step_size: (lr / (1.0 - beta1.powf(t))) as f32,
            correction2: (1.0 - beta2.powf(t)).sqrt() as f32,
            eps: eps as f32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_dealt_out_to_segments() {
        let args = AdamWArgs {
            main: 0,
            model: 0,
            grads: 0,
            exp_avg: 0,
            exp_avg_sq: 0,
            segments: 0,
            grad_scale: 0,
            len: 3000,
            segment_count: 5,
            scale: 1.0,
        };
        assert_eq!(args.launch(1000).unwrap().grid, [3, 5]);
        assert_eq!(args.launch_for(1024, 1000).unwrap().grid, [1, 5]);
        assert_eq!(AdamWArgs { len: 1 << 40, ..args }.launch(1000).unwrap().grid, [200, 5]);
        assert_eq!(args.launch_for(0, 1000), None);
        assert_eq!(AdamWArgs { segment_count: 0, ..args }.launch(1000), None);
        assert_eq!(AdamWArgs { segment_count: 100_000, ..args }.launch(1000).unwrap().grid, [1, 65_535]);
    }
}
