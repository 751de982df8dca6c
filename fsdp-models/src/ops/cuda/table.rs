//! The table of the ops that run on CUDA devices. A new one is entered here and gets a file in `present`.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor};

/// An op of `ARGS` tensors that runs on CUDA devices.
pub(in crate::ops) trait CudaForward<const ARGS: usize> {
    fn on_cuda(&self, args: [(&CudaStorage, &Layout); ARGS]) -> Result<(CudaStorage, Shape)>;
}

/// One whose backward does, too.
pub(in crate::ops) trait CudaBackward<const ARGS: usize>: CudaForward<ARGS> {
    /// The gradients of the arguments, from that of the output, which is contiguous.
    fn bwd_on_cuda(&self, args: [&Tensor; ARGS], grad: &Tensor) -> Result<[Option<Tensor>; ARGS]>;
}

/// Calls a macro with each op of the table: whether its backward is its own or made of other ops, and the number of tensors
/// that it takes.
macro_rules! each {
    ($then:path) => {
        $then!(backward crate::ops::attention::Attention, 3);
        $then!(backward crate::ops::cross_entropy::CrossEntropy, 1);
        $then!(forward crate::ops::dropout::Dropout, 1);
        $then!(backward crate::ops::embedding::Embedding, 1);
        $then!(backward crate::ops::gated_mlp::GatedMlp, 2);
        $then!(backward crate::ops::linear::Linear, 2);
        $then!(backward crate::ops::rms_norm::RmsNorm, 2);
        $then!(backward crate::ops::rope::Rope, 1);
        $then!(backward crate::ops::self_attention::SelfAttention, 3);
        $then!(backward crate::ops::swiglu::Swiglu, 2);
        $then!(forward crate::ops::weight_grad::Node, 1);
        $then!(forward crate::ops::weight_grad::Node, 2);
        $then!(forward crate::ops::weight_grad::Node, 3);
    };
}
pub(super) use each;

/// Does not compile for an op without an implementation.
#[cfg(feature = "cuda")]
macro_rules! implemented {
    (forward $op:ty, $args:literal) => {
        const _: fn(&$op) -> &dyn $crate::ops::cuda::table::CudaForward<$args> = |op| op;
    };
    (backward $op:ty, $args:literal) => {
        const _: fn(&$op) -> &dyn $crate::ops::cuda::table::CudaBackward<$args> = |op| op;
    };
}
#[cfg(feature = "cuda")]
pub(super) use implemented;
