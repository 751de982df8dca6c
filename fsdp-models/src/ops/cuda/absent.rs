//! A program without the feature `cuda`: it makes no tensor on a CUDA device, and candle none for it.

use candle_core::{CudaStorage, Device, Layout, Result, Shape, Tensor, bail};

use super::table::{self, CudaBackward, CudaForward};

/// Ops compute on CUDA devices.
pub(in crate::ops) const BUILT: bool = false;

/// The ids on the device of the tensor that they go with.
pub(in crate::ops) fn ids_beside(_op: &str, _ids: &Tensor, _beside: &Tensor) -> Result<Option<Tensor>> {
    Ok(None)
}

/// Whether work on a device is captured as a graph now.
pub(in crate::ops) fn is_captured(_: &Device) -> bool {
    false
}

/// Whether work on the tensors of two candle devices at one place is in one order.
pub(in crate::ops) fn same_stream(_: &Device, _: &Device) -> bool {
    true
}

const ABSENT: &str = "this program was built without CUDA: build it with `--features cuda`";

macro_rules! absent {
    (forward $op:ty, $args:literal) => {
        impl CudaForward<$args> for $op {
            fn on_cuda(&self, _: [(&CudaStorage, &Layout); $args]) -> Result<(CudaStorage, Shape)> {
                bail!("{ABSENT}")
            }
        }
    };
    (backward $op:ty, $args:literal) => {
        absent!(forward $op, $args);

        impl CudaBackward<$args> for $op {
            fn bwd_on_cuda(&self, _: [&Tensor; $args], _: &Tensor) -> Result<[Option<Tensor>; $args]> {
                bail!("{ABSENT}")
            }
        }
    };
}

table::each!(absent);
