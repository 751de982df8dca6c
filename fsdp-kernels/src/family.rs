//! All kernels.

use std::mem::size_of;

use crate::kernel::{AccessesOf, accesses_of};
use crate::*;

/// Kernels that do the same for different dtypes.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Their names, as in [`SOURCE`].
    pub kernels: &'static [&'static str],
    /// Name of the struct that they take.
    pub args: &'static str,
    /// Its size in bytes.
    pub args_size: usize,
    pub(crate) accesses: AccessesOf,
}

macro_rules! families {
    ($($kernels:expr => $args:ident),* $(,)?) => {
        /// All kernels, by what they do.
        pub const FAMILIES: &[Family] = &[
            $(Family {
                kernels: $kernels,
                args: stringify!($args),
                args_size: size_of::<$args>(),
                accesses: accesses_of::<$args>,
            }),*
        ];
    };
}

families! {
    crate::adamw::ADAMW => AdamWArgs,
    crate::flat::ACCUMULATE => AccumulateArgs,
    crate::flat::CAST => CastArgs,
    crate::flat::FILL => FillArgs,
    crate::flat::SUM_RANKS => SumRanksArgs,
    crate::norm::SQUARED_NORM => SquaredNormArgs,
    &[crate::norm::SUM_F64] => SumArgs,
    &[crate::norm::CLIP_SCALE] => ClipScaleArgs,
    crate::rms_norm::RMS_NORM => RmsNormArgs,
    crate::rms_norm::RMS_NORM_BACKWARD => RmsNormBackwardArgs,
    crate::rms_norm::COLUMN_SUMS => ColumnSumsArgs,
    crate::rope::ROPE => RopeArgs,
    crate::swiglu::SWIGLU => SwigluArgs,
    crate::swiglu::SWIGLU_BACKWARD => SwigluBackwardArgs,
    crate::cross_entropy::CROSS_ENTROPY => CrossEntropyArgs,
    crate::cross_entropy::CROSS_ENTROPY_BACKWARD => CrossEntropyBackwardArgs,
    crate::softmax::CAUSAL_SOFTMAX => CausalSoftmaxArgs,
    crate::softmax::CAUSAL_SOFTMAX_BACKWARD => CausalSoftmaxBackwardArgs,
    crate::dropout::DROPOUT => DropoutArgs,
    crate::swap_dims::SWAP_DIMS => SwapDimsArgs,
    crate::embedding::EMBEDDING => EmbeddingArgs,
    &[crate::embedding::EMBEDDING_SPANS] => EmbeddingSpansArgs,
    crate::embedding::EMBEDDING_BACKWARD => EmbeddingBackwardArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the text declares, as (kernel, struct).
    fn declared() -> Vec<(&'static str, &'static str)> {
        let mut declared: Vec<_> = SOURCE
            .lines()
            .filter_map(|line| {
                let mut parts = line.strip_prefix("FSDP_KERNEL(")?.split(", ");
                Some((parts.next()?, parts.next()?))
            })
            .collect();
        declared.sort();
        declared
    }

    #[test]
    fn the_list_is_what_the_source_declares() {
        let mut listed: Vec<_> =
            FAMILIES.iter().flat_map(|f| f.kernels.iter().map(|&kernel| (kernel, f.args))).collect();
        listed.sort();
        assert_eq!(listed, declared());
    }

    #[test]
    fn names_follow_the_dtypes() {
        for (a, a_name) in Dtype::ALL.into_iter().zip(["f32", "bf16", "f16"]) {
            assert_eq!(rope(a), format!("fsdp_rope_{a_name}"));
            for (b, b_name) in Dtype::ALL.into_iter().zip(["f32", "bf16", "f16"]) {
                assert_eq!(adamw(a, b), format!("fsdp_adamw_{a_name}_{b_name}"));
                let sum = sum_ranks(a, b);
                assert_eq!(sum.is_some(), a == b || b == Dtype::F32);
                assert!(sum.is_none_or(|name| name == format!("fsdp_sum_ranks_{a_name}_{b_name}")));
            }
        }
    }
}
