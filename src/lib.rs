//! Fully sharded data parallel training for [candle](https://docs.rs/candle-core), made by the compiler.
//!
//! Annotate a model with `#[derive(FsdpUnit)]`, wrap what is gathered together in [`Unit`], and call
//! [`fully_shard`](FullyShard::fully_shard): each rank then owns 1/N of the parameters, of the gradients and
//! of the optimizer state, and the whole of a unit exists only while the unit runs.
//!
//! ```
//! use candle_core::{Device, Result, Tensor};
//! use fsdp::prelude::*;
//!
//! #[derive(FsdpUnit)]
//! struct Linear {
//!     weight: Param,
//! }
//!
//! impl Forward for Linear {
//!     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
//!         x.matmul(&self.weight.tensor(scope)?.t()?)
//!     }
//! }
//!
//! #[derive(FsdpUnit)]
//! struct Net {
//!     layers: Vec<Unit<Linear>>,
//! }
//!
//! impl Forward for Net {
//!     fn forward(&self, x: &Tensor, context: &(), scope: &Scope<'_>) -> Result<Tensor> {
//!         let mut x = x.clone();
//!         for layer in &self.layers {
//!             x = layer.forward(&x, context, scope)?.tanh()?;
//!         }
//!         x.sqr()?.mean_all()
//!     }
//! }
//!
//! // Two ranks, as threads of this process.
//! let losses = fsdp::launch::local(2, |world| -> fsdp::Result<f32> {
//!     let layer = || Unit::new(Linear { weight: Param::new((8, 8)) });
//!     let net = Net { layers: (0..3).map(|_| layer()).collect() };
//!     let mut model = net.fully_shard(&world.data_parallel_mesh())?;
//!     let mut optimizer = model.optimizer(AdamW::default())?;
//!     let x = Tensor::ones((4, 8), candle_core::DType::F32, &Device::Cpu)?;
//!     let mut last = f32::NAN;
//!     for _ in 0..3 {
//!         let loss: Tensor = model.forward(&x)?;
//!         model.backward(&loss)?;
//!         optimizer.step(&mut model)?;
//!         last = loss.to_scalar()?;
//!     }
//!     Ok(last)
//! })?;
//! assert_eq!(losses[0], losses[1]);
//! # Ok::<(), fsdp::launch::LaunchError>(())
//! ```
//!
//! # More than the plain step
//!
//! Parameter groups change a rule's settings for some parameters ([`Fsdp::optimizer_with`]). Rules that need a
//! parameter whole, like [`Muon`](optim::Muon), run on the rank that owns it ([`Fsdp::owner_optimizer`]).
//! [`LossScaler`](optim::LossScaler) keeps small f16 gradients alive and skips a step on all ranks where one
//! overflows on any. [`Fsdp::ema`] averages the weights for evaluation. All of them together:
//!
//! ```
//! use candle_core::{Device, Result, Tensor};
//! use fsdp::prelude::*;
//! # #[derive(FsdpUnit)]
//! # struct Linear {
//! #     weight: Param,
//! #     bias: Param,
//! # }
//! # impl Forward for Linear {
//! #     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
//! #         x.matmul(&self.weight.tensor(scope)?.t()?)?.broadcast_add(&self.bias.tensor(scope)?)
//! #     }
//! # }
//! # #[derive(FsdpUnit)]
//! # struct Net {
//! #     layers: Vec<Unit<Linear>>,
//! # }
//! # impl Net {
//! #     fn new() -> Net {
//! #         let layer = || Unit::new(Linear { weight: Param::new((8, 8)), bias: Param::new(8) });
//! #         Net { layers: (0..3).map(|_| layer()).collect() }
//! #     }
//! # }
//! # impl Forward for Net {
//! #     fn forward(&self, x: &Tensor, context: &(), scope: &Scope<'_>) -> Result<Tensor> {
//! #         let mut x = x.to_dtype(candle_core::DType::F16)?;
//! #         for layer in &self.layers {
//! #             x = layer.forward(&x, context, scope)?.tanh()?;
//! #         }
//! #         x.to_dtype(candle_core::DType::F32)?.sqr()?.mean_all()
//! #     }
//! # }
//!
//! fsdp::launch::local(2, |world| -> fsdp::Result<()> {
//!     let config = FsdpConfig { precision: MixedPrecision::F16, ..FsdpConfig::default() };
//!     let mut model = Net::new().fully_shard_with(&world.data_parallel_mesh(), &config)?;
//!     // Matrices by Muon, vectors by AdamW without decay, the last layer by AdamW too.
//!     let mut optimizer = model.owner_optimizer_with(Muon::default(), AdamW::default(), |spec| {
//!         match spec.name.as_str() {
//!             "layers.2.weight" => ParamGroup::new("output").element_wise(),
//!             name if name.ends_with("bias") => ParamGroup::new("biases").weight_decay(0.0),
//!             _ => ParamGroup::default(),
//!         }
//!     })?;
//!     let mut scaler = LossScaler::default();
//!     let mut ema = model.ema(0.999)?.warmup();
//!     let x = Tensor::ones((4, 8), candle_core::DType::F32, &Device::Cpu)?;
//!     for _ in 0..3 {
//!         let loss: Tensor = model.forward(&x)?;
//!         model.backward(&scaler.scale(&loss)?)?;
//!         scaler.unscale(&model)?;
//!         model.clip_grad_norm(1.0)?;
//!         if scaler.step(&mut optimizer, &mut model)? {
//!             ema.update(&model)?;
//!         }
//!     }
//!     let averaged: Tensor = model.with_ema(&mut ema, |model| model.evaluate(&x))?;
//!     assert!(averaged.to_scalar::<f32>()?.is_finite());
//!     Ok(())
//! })?;
//! # Ok::<(), fsdp::launch::LaunchError>(())
//! ```
//!
//! Where gradients are neither clipped nor accumulated, [`FsdpConfig::step_in_backward`] and
//! [`ShardedOptimizer::backward_and_step`] hold main gradients for one unit at a time only:
//!
//! ```
//! # use candle_core::{Device, Result, Tensor};
//! # use fsdp::prelude::*;
//! # #[derive(FsdpUnit)]
//! # struct Scale {
//! #     weight: Param,
//! # }
//! # impl Forward for Scale {
//! #     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
//! #         (x * self.weight.tensor(scope)?)?.sum_all()
//! #     }
//! # }
//! fsdp::launch::local(2, |world| -> fsdp::Result<()> {
//!     let config = FsdpConfig { step_in_backward: true, ..FsdpConfig::default() };
//!     let scale = Scale { weight: Param::new(8) };
//!     let mut model = scale.fully_shard_with(&world.data_parallel_mesh(), &config)?;
//!     let mut optimizer = model.optimizer(AdamW::default())?;
//!     let x = Tensor::ones(8, candle_core::DType::F32, &Device::Cpu)?;
//!     for _ in 0..3 {
//!         let loss: Tensor = model.forward(&x)?;
//!         optimizer.backward_and_step(&mut model, &loss)?;
//!     }
//!     assert_eq!(optimizer.steps(), 3);
//!     Ok(())
//! })?;
//! # Ok::<(), fsdp::launch::LaunchError>(())
//! ```

//!
//! # Features
//! By default ranks compute on the CPU and nothing has to be installed.
//! - `cuda`: models on NVIDIA GPUs, with candle's CUDA tensors: [`OnDevice::on`] a device that
//!   `fsdp::cuda::device` makes. Needs a CUDA toolkit to build, as candle does; ranks that are threads may share a GPU.
//! - `nccl`: ranks with a GPU each.

#![warn(missing_debug_implementations)]
#![cfg_attr(docsrs, feature(doc_cfg))]

// Lets the derive's absolute paths resolve inside this crate too.
extern crate self as fsdp;

mod assert_fits;

pub use fsdp_derive::FsdpUnit;
pub use fsdp_runtime::comm::Accumulate;
pub use fsdp_runtime::device::Slice;
pub use fsdp_runtime::{
    Ema, Error, Forward, Fsdp, FsdpConfig, FsdpUnit, FullyShard, GradSink, GradientScaling, Init,
    MixedPrecision, NonFinite, OnDevice, OwnerOptimizer, Param, Recompute, Result, Scope, ShardedOptimizer,
    Tensors, Unit,
};
pub use fsdp_runtime::{
    checkpoint, comm, engine, files, init, launch, layout, memory, mesh, optim, random, spec, trace, warning,
};

/// CUDA devices (feature `cuda`): candle's devices for ranks, and kernels on candle's tensors.
pub use fsdp_runtime::device::cuda;

/// What a training program needs: `use fsdp::prelude::*;`.
///
/// [`Result`] and `Tensor` are left to the program: a model's forward returns candle's `Result`, a training
/// loop this crate's or its own.
pub mod prelude {
    pub use crate::comm::DeviceMesh;
    pub use crate::launch;
    pub use crate::layout::ShardAlignment;
    pub use crate::optim::{AdamW, CosineSchedule, LossScaler, Muon, ParamGroup, Sgd};
    pub use crate::spec::{Dtype, OuterStrategy, ReshardAfterForward, Strategy};
    pub use crate::{
        Forward, Fsdp, FsdpConfig, FsdpUnit, FullyShard, GradientScaling, Init, MixedPrecision, NonFinite,
        OnDevice, Param, Recompute, Scope, ShardedOptimizer, Unit,
    };
}

#[doc(hidden)]
pub use fsdp_runtime::__private;

/// The README's example, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The examples of the derive's page, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../fsdp-derive/attributes.md")]
struct DeriveAttributes;
