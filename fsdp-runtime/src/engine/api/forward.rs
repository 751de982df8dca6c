//! What a module computes, and the tensors that cross a unit's boundary.

use candle_core::{Result, Shape, Tensor};

use crate::engine::Scope;

/// A module's computation on `input`, with a `context` of values that carry no gradient (rotary tables,
/// masks, token ids).
///
/// `scope` proves that the module's unit is unsharded; hand it to [`Param::tensor`](crate::engine::Param::tensor) and
/// to nested modules.
///
/// ```
/// use candle_core::{Result, Tensor};
/// use fsdp_runtime::{Forward, Param, Scope};
///
/// struct Linear {
///     weight: Param,
/// }
///
/// impl Forward for Linear {
///     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
///         x.matmul(&self.weight.tensor(scope)?.t()?)
///     }
/// }
/// ```
pub trait Forward<C = (), I = Tensor, O = Tensor> {
    /// Runs the module.
    ///
    /// # Errors
    /// Those of the tensor library, and of reading a parameter outside its unit.
    fn forward(&self, input: &I, context: &C, scope: &Scope<'_>) -> Result<O>;
}

/// One tensor or a tuple of tensors that crosses a unit's boundary. Those of a tuple must have one dtype:
/// they are packed into one flat tensor at the boundary and unpacked by views.
pub trait Tensors: Sized {
    /// As one tensor, and the shapes to take it apart again.
    ///
    /// # Errors
    /// If the tensors of a tuple differ in dtype.
    fn pack(&self) -> Result<(Tensor, Vec<Shape>)>;

    /// The inverse of [`Tensors::pack`].
    ///
    /// # Errors
    /// If the shapes do not fit `packed`.
    fn unpack(packed: &Tensor, shapes: &[Shape]) -> Result<Self>;
}

impl Tensors for Tensor {
    fn pack(&self) -> Result<(Tensor, Vec<Shape>)> {
        Ok((self.clone(), vec![self.shape().clone()]))
    }

    fn unpack(packed: &Tensor, _shapes: &[Shape]) -> Result<Self> {
        Ok(packed.clone())
    }
}

fn pack_all(tensors: &[&Tensor]) -> Result<(Tensor, Vec<Shape>)> {
    let dtype = tensors[0].dtype();
    if let Some((index, other)) = tensors.iter().enumerate().find(|(_, tensor)| tensor.dtype() != dtype) {
        candle_core::bail!(
            "tensors of a unit's tuple must have one dtype: element 0 is {dtype:?}, element {index} is {:?}. What carries no \
             gradient (ids, masks) goes in the context, which may be of any type; floats are cast with `to_dtype`",
            other.dtype()
        );
    }
    let flat: Vec<Tensor> = tensors.iter().map(|tensor| tensor.flatten_all()).collect::<Result<_>>()?;
    Ok((Tensor::cat(&flat, 0)?, tensors.iter().map(|tensor| tensor.shape().clone()).collect()))
}

fn unpack_all<const N: usize>(packed: &Tensor, shapes: &[Shape]) -> Result<[Tensor; N]> {
    let mut start = 0;
    let mut tensors = Vec::with_capacity(N);
    for shape in shapes {
        let len = shape.elem_count();
        tensors.push(packed.narrow(0, start, len)?.reshape(shape)?);
        start += len;
    }
    let found = tensors.len();
    tensors
        .try_into()
        .or_else(|_| candle_core::bail!("expected {N} tensors at a unit's boundary, found {found}"))
}

impl Tensors for (Tensor, Tensor) {
    fn pack(&self) -> Result<(Tensor, Vec<Shape>)> {
        pack_all(&[&self.0, &self.1])
    }

    fn unpack(packed: &Tensor, shapes: &[Shape]) -> Result<Self> {
        let [a, b] = unpack_all(packed, shapes)?;
        Ok((a, b))
    }
}

impl Tensors for (Tensor, Tensor, Tensor) {
    fn pack(&self) -> Result<(Tensor, Vec<Shape>)> {
        pack_all(&[&self.0, &self.1, &self.2])
    }

    fn unpack(packed: &Tensor, shapes: &[Shape]) -> Result<Self> {
        let [a, b, c] = unpack_all(packed, shapes)?;
        Ok((a, b, c))
    }
}
