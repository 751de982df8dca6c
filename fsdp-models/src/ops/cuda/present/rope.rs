//! Rotary position embedding on a CUDA device.

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};
use fsdp_kernels::{DevicePtr, Dtype, RopeArgs, rope};

use crate::ops::cuda::present::{self as cuda, Buffer, View};
use crate::ops::cuda::table::{CudaBackward, CudaForward};
use crate::ops::rope::{OP, Rope, Turn};

/// Where heads are turned: rows of `heads` heads, at the positions that the angles are for.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
    pub heads: usize,
}

/// Turns the rows of heads where they are.
pub fn rotate_in_place(op: &str, x: &mut Buffer, heads: Heads<'_>, turn: Turn) -> Result<()> {
    let at = x.out().at();
    turned(op, x.view(), at, heads, turn)
}

fn turned(op: &str, x: View<'_>, out: DevicePtr, heads: Heads<'_>, turn: Turn) -> Result<()> {
    let (positions, half) = heads.cos.dims2()?;
    let (cos, sin) = (View::of(op, heads.cos)?, View::of(op, heads.sin)?);
    if (cos.dtype(), sin.dtype()) != (Dtype::F32, Dtype::F32) {
        bail!("{op}: expected angles in f32");
    }
    let width = heads.heads * 2 * half;
    let rows = x.len().checked_div(width).unwrap_or(0);
    let number = |what: &str, value: usize| match u32::try_from(value) {
        Ok(number) => Ok(number),
        Err(_) => bail!("{op}: {value} {what} are too many"),
    };
    let args = RopeArgs {
        x: x.at(),
        out,
        cos: cos.at(),
        sin: sin.at(),
        rows: rows as u64,
        x_stride: width as u64,
        out_stride: width as u64,
        positions: number("positions", positions)?,
        heads: number("heads", heads.heads)?,
        half: number("pairs", half)?,
        sign: turn.sign(),
    };
    // SAFETY: the arguments of this kernel: rows of `width` elements, and where they go, which is as large; angles of all
    // positions.
    unsafe { cuda::launch(x.device(), rope(x.dtype()), &args) }
}

impl Rope {
    fn turned_on_cuda(&self, x: View<'_>, turn: Turn) -> Result<Buffer> {
        let mut y = Buffer::new(x.device(), x.dtype(), x.len())?;
        let heads = Heads { cos: &self.cos, sin: &self.sin, heads: self.heads };
        turned(OP, x, y.out().at(), heads, turn)?;
        Ok(y)
    }
}

impl CudaForward<1> for Rope {
    fn on_cuda(&self, [(x, layout)]: [(&CudaStorage, &Layout); 1]) -> Result<(CudaStorage, Shape)> {
        let y = self.turned_on_cuda(View::new(OP, x, layout)?, Turn::Forward)?;
        Ok((y.into_storage(), layout.shape().clone()))
    }
}

impl CudaBackward<1> for Rope {
    fn bwd_on_cuda(&self, [x]: [&Tensor; 1], dy: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let dx = self.turned_on_cuda(View::of(OP, dy)?, Turn::Back)?;
        Ok([Some(dx.into_tensor(x.shape()))])
    }
}
