//! Fused operations with backward for training a Llama, on plain candle tensors: on the CPU, and with the feature `cuda`
//! on CUDA devices.
//!
//! Each takes f32, bf16 or f16 tensors (all floating arguments of one call of one dtype), contiguous or not,
//! and computes in f32: 16-bit arguments are widened to f32, the result is rounded once. Matrix products
//! accumulate in f32, reductions run in a fixed order, so the same call gives the same bits every time.
//!
//! # Weight gradients
//! An op with a weight takes its [`GradSink`](fsdp::GradSink). In backward, a sink that is open gets the
//! weight gradient written in place, in f32, and candle's gradient store gets none for this weight. With a
//! closed sink, or for a weight that is computed from other tensors (tracked, but not a variable), the
//! gradient is returned to candle as usual, in the weight's dtype. Pass
//! [`GradSink::closed`](fsdp::GradSink::closed) for a plain variable. Inputs that are not tracked cost no
//! gradient; if nothing is tracked no graph is built.
//!
//! # Devices
//! All tensors of a call are on one device; ids and targets may be on the CPU whatever device the others are on. They are
//! checked on the CPU: those on a device are copied first, which waits for its stream. While a step is captured as a graph
//! (`ShardedOptimizer::capture`, feature `cuda`) they have to be on the device and are not looked at: an id out of range
//! then makes NaNs of its row, or of the loss. Dropout cannot be captured.
//!
//! On a CUDA device all work goes to candle's stream. Matrix products are cuBLAS's: of the arguments' dtype, summed in f32
//! (f32 as candle's `gemm_reduced_precision_f32` says), and a weight gradient goes straight into the bucket of an open
//! sink, whatever its dtype. What is kept for backward, and what one step of a fused op hands to the next, is rounded to
//! the arguments' dtype. Attention keeps no scores, but makes a matrix of those of some heads at a time: 512 MiB, and as
//! much or half of it again for the softmax; in backward twice that.
//!
//! # Threads
//! On the CPU an op runs in the calling thread; its matrix products may use more, see [`set_threads`]. candle's own
//! element-wise operations, those of its gradient store included, split anything from 65,536 elements on over
//! one pool of spinning threads, with one lock for the process, unless the environment variable
//! `CANDLE_NUM_THREADS` is 1 before the first of them: set it where ranks are threads.

mod allocator;
mod attention;
mod cross_entropy;
mod cuda;
mod dropout;
mod element;
mod embedding;
mod exp;
mod gated_mlp;
mod kept;
mod linear;
mod matmul;
mod rms_norm;
mod rope;
mod self_attention;
mod simd;
mod storage;
mod swiglu;
mod weight_grad;

pub use allocator::retain_freed_memory;
pub use attention::attention;
pub use cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_with};
pub use dropout::dropout;
pub use embedding::embedding;
pub use gated_mlp::gated_mlp;
pub use linear::linear;
pub use matmul::{set_threads, threads};
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use self_attention::{SelfAttentionWeights, self_attention};
pub use swiglu::swiglu;
