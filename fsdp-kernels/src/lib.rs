//! CUDA kernels for what candle lacks in training, as source text.
//!
//! [`SOURCE`] is one CUDA C++ program for sm_80 and later that includes no header. The runtime compiles it with NVRTC
//! on the device it finds, with [`OPTIONS`]: so a build needs no CUDA toolkit, the code is that of the exact
//! architecture, and one text serves all of them. candle's `cuda` feature loads NVRTC in any case. It takes some five
//! seconds: the result is worth caching. `nvcc` compiles the same text (`kernels/kernels.cu`). CI does both for sm_80,
//! sm_90 and sm_100 (`.ci/kernels`).
//!
//! A kernel is found by the name that functions like [`adamw`] give for its dtypes, and takes one struct by value,
//! such as [`AdamWArgs`]: pass its address as the only kernel parameter. [`Args::launch`] says with which grid.
//! [`FAMILIES`] lists all of them.
//!
//! ```
//! use fsdp_kernels::{Args, CastArgs, Dtype, cast};
//!
//! let args = CastArgs { from: 0x1000, to: 0x2000, len: 5000 };
//! let launch = args.launch(132 * 8).expect("there are elements");
//! assert_eq!(cast(Dtype::F32, Dtype::BF16), "fsdp_cast_f32_bf16");
//! assert_eq!((launch.grid, launch.threads), ([5, 1], 256));
//! ```
//!
//! # What all kernels keep
//! - Results do not depend on the number of blocks or on timing: every sum has one order. On alignment only sums along
//!   the rows of RMSNorm and of logits depend, within rounding.
//! - Arithmetic is f32 (norms of gradients and losses: f64), rounded to nearest even when stored as bf16 or f16. AdamW,
//!   reductions, rotary embedding, SwiGLU, dropout and the embedding's gradient give the bits of the CPU implementations.
//! - Any length and offset is right; packs of four elements are used where addresses allow.
//! - Indices are 64 bits wide.
//!
//! # Checks without a GPU
//! With the feature `host` the same text is compiled as C++ behind an emulation of CUDA's threads, and
//! `host::launch` runs a kernel there, with bounds and races checked. It needs a C++ compiler, which nothing else
//! does. [`Kernel`] tells a driver that runs launches on the host what each of them reads and writes.

#![warn(missing_debug_implementations)]

mod access;
mod adamw;
mod cross_entropy;
mod dropout;
mod dtype;
mod embedding;
mod family;
mod flat;
#[cfg(feature = "host")]
pub mod host;
mod kernel;
mod launch;
mod norm;
mod rms_norm;
mod rope;
mod softmax;
mod source;
mod swap_dims;
mod swiglu;

pub use access::Access;
pub use adamw::{AdamWArgs, AdamWSegment, AdamWStep, adamw};
pub use cross_entropy::{
    CrossEntropyArgs, CrossEntropyBackwardArgs, NO_IGNORED_TARGET, cross_entropy, cross_entropy_backward,
};
pub use dropout::{DropoutArgs, dropout};
pub use dtype::Dtype;
pub use embedding::{
    EmbeddingArgs, EmbeddingBackwardArgs, EmbeddingSpansArgs, embedding, embedding_backward, embedding_spans,
};
pub use family::{FAMILIES, Family};
pub use flat::{
    AccumulateArgs, CastArgs, FillArgs, MAX_RANKS, SumRanksArgs, accumulate, cast, fill, sum_ranks,
};
pub use kernel::Kernel;
pub use launch::{Args, DevicePtr, Launch, THREADS};
pub use norm::{ClipScaleArgs, SquaredNormArgs, SumArgs, clip_scale, squared_norm, sum_f64};
pub use rms_norm::{
    ColumnSumsArgs, RmsNormArgs, RmsNormBackwardArgs, column_sums, rms_norm, rms_norm_backward,
};
pub use rope::{RopeArgs, rope};
pub use softmax::{CausalSoftmaxArgs, CausalSoftmaxBackwardArgs, causal_softmax, causal_softmax_backward};
pub use source::{OPTIONS, SOURCE};
pub use swap_dims::{SwapDimsArgs, swap_dims};
pub use swiglu::{SwigluArgs, SwigluBackwardArgs, swiglu, swiglu_backward};
