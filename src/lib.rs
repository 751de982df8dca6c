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

// Lets the derive's absolute paths resolve inside this crate too.
extern crate self as fsdp;

pub use fsdp_derive::FsdpUnit;
pub use fsdp_runtime::comm::Accumulate;
pub use fsdp_runtime::{
    Ema, Error, Forward, Fsdp, FsdpConfig, FsdpUnit, FullyShard, GradSink, GradientScaling, Init,
    MixedPrecision, OwnerOptimizer, Param, Recompute, Result, Scope, ShardedOptimizer, Tensors, Unit,
};
pub use fsdp_runtime::{comm, engine, init, launch, layout, memory, mesh, optim, spec, trace};

/// What a training program needs: `use fsdp::prelude::*;`.
///
/// [`Result`] and `Tensor` are left to the program: a model's forward returns candle's `Result`, a training
/// loop this crate's or its own.
pub mod prelude {
    pub use crate::comm::DeviceMesh;
    pub use crate::launch;
    pub use crate::layout::ShardAlignment;
    pub use crate::optim::{AdamW, CosineSchedule, LossScaler, Muon, ParamGroup, Sgd};
    pub use crate::spec::{Dtype, Strategy};
    pub use crate::{
        Forward, Fsdp, FsdpConfig, FsdpUnit, FullyShard, GradientScaling, Init, MixedPrecision, Param,
        Recompute, Scope, ShardedOptimizer, Unit,
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
