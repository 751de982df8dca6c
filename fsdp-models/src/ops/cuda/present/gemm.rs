//! Matrix products by cuBLAS, through candle's handle.

use std::ffi::c_int;
use std::ptr::from_ref;

use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{Error, Result};
use fsdp::Accumulate;
use fsdp_kernels::{AccumulateArgs, Dtype, FillArgs, accumulate, fill};

use super::memory::{Buffer, Out, View};

/// Dense row-major matrices for reading, one after the other: one product is taken of each.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: View<'a>,
    batch: usize,
    rows: usize,
    cols: usize,
    /// Read as the transpose.
    transposed: bool,
}

impl<'a> View<'a> {
    /// As one matrix.
    pub fn matrix(self, rows: usize, cols: usize) -> Matrix<'a> {
        self.matrices(1, rows, cols)
    }

    /// As `batch` matrices.
    ///
    /// # Panics
    /// If it has not as many elements.
    pub fn matrices(self, batch: usize, rows: usize, cols: usize) -> Matrix<'a> {
        assert_eq!(batch * rows * cols, self.len(), "{batch} matrices of {rows} rows and {cols} columns");
        Matrix { data: self, batch, rows, cols, transposed: false }
    }
}

impl Matrix<'_> {
    /// The transpose of each: the same data.
    pub fn t(self) -> Self {
        Matrix { rows: self.cols, cols: self.rows, transposed: !self.transposed, ..self }
    }

    /// What cuBLAS, whose matrices are columns one after the other, is to do to read the transpose of this one.
    fn operation(&self) -> sys::cublasOperation_t {
        if self.transposed {
            sys::cublasOperation_t::CUBLAS_OP_T
        } else {
            sys::cublasOperation_t::CUBLAS_OP_N
        }
    }

    /// Elements from row to row in memory.
    fn stride(&self) -> usize {
        if self.transposed { self.rows } else { self.cols }
    }
}

/// `out = scale a b`, or `out += scale a b`, for each matrix of the batch, in f32, rounded once to the dtype of `out`.
/// Without inner elements the product is zero.
///
/// # Errors
/// Those of cuBLAS and of the device, and dims that cuBLAS has no numbers for.
///
/// # Panics
/// If shapes or dtypes of `a` and `b` do not fit.
pub fn matmul(out: Out<'_>, mode: Accumulate, scale: f32, a: Matrix<'_>, b: Matrix<'_>) -> Result<()> {
    let (batch, m, n, k) = (a.batch, a.rows, b.cols, a.cols);
    let fit = b.batch == batch && b.rows == k && out.len() == batch * m * n;
    assert!(fit && a.data.dtype() == b.data.dtype(), "matrices do not match");
    if out.len() == 0 {
        return Ok(());
    }
    if k == 0 {
        return if mode == Accumulate::Overwrite { zero(&out) } else { Ok(()) };
    }
    let (from, to) = (a.data.dtype(), out.dtype());
    if to != from && to != Dtype::F32 {
        let mut sums = Buffer::new(out.device(), Dtype::F32, out.len())?;
        matmul(sums.out(), Accumulate::Overwrite, scale, a, b)?;
        return add(out, mode, sums.view());
    }
    let number = |what: &str, value: usize| {
        let fits = c_int::try_from(value);
        fits.map_err(|_| Error::msg(format!("a product of {value} {what}: cuBLAS takes up to 2147483647")))
    };
    let (rows, columns, inner) = (number("rows", m)?, number("columns", n)?, number("inner elements", k)?);
    let strides = [number("columns", a.stride())?, number("columns", b.stride())?];
    let count = number("matrices", batch)?;
    let compute = match from {
        Dtype::F32 if gemm_reduced_precision_f32() => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let beta: f32 = if mode == Accumulate::Add { 1.0 } else { 0.0 };
    let blas = out.device().cublas_handle();
    out.device().cuda_stream().context().bind_to_thread().map_err(Error::wrap)?;
    // SAFETY: a row-major matrix is the transpose of a column-major one, so this asks for outᵀ = bᵀ aᵀ. The matrices have
    // the sizes and strides given (checked where the views are made), are alive, and `out`, which with a beta of 0 is not
    // read, is exclusively borrowed. The scalars are f32, as computations in f32 take them, on the host.
    let product = unsafe {
        result::gemm_strided_batched_ex(
            *blas.handle(),
            b.operation(),
            a.operation(),
            columns,
            rows,
            inner,
            from_ref(&scale).cast(),
            b.data.at() as *const _,
            data_type(from),
            strides[1],
            (k * n) as i64,
            a.data.at() as *const _,
            data_type(from),
            strides[0],
            (m * k) as i64,
            from_ref(&beta).cast(),
            out.at() as *mut _,
            data_type(to),
            columns,
            (m * n) as i64,
            count,
            compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    };
    product.map_err(|error| {
        Error::msg(format!("cuBLAS: a product of {batch} times [{m}, {k}] and [{k}, {n}]: {error:?}"))
    })
}

/// The product `a b` as new matrices, of their dtype.
pub fn product(a: Matrix<'_>, b: Matrix<'_>) -> Result<Buffer> {
    let mut out = Buffer::new(a.data.device(), a.data.dtype(), a.batch * a.rows * b.cols)?;
    matmul(out.out(), Accumulate::Overwrite, 1.0, a, b)?;
    Ok(out)
}

/// `out = values`, or `out += values`, rounded once to the dtype of `out`.
///
/// # Panics
/// If they are not as many.
pub fn add(out: Out<'_>, mode: Accumulate, values: View<'_>) -> Result<()> {
    assert_eq!(values.len(), out.len(), "as many values as there is room for");
    let beta = if mode == Accumulate::Add { 1.0 } else { 0.0 };
    let args = AccumulateArgs { acc: out.at(), values: values.at(), len: out.len() as u64, beta, scale: 1.0 };
    // SAFETY: the arguments of this kernel: two vectors of the same length.
    unsafe { super::launch(out.device(), accumulate(values.dtype(), out.dtype()), &args) }
}

/// `out = 0`.
pub fn zero(out: &Out<'_>) -> Result<()> {
    let args = FillArgs { to: out.at(), len: out.len() as u64, value: 0.0 };
    // SAFETY: the arguments of this kernel.
    unsafe { super::launch(out.device(), fill(out.dtype()), &args) }
}

fn data_type(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Dtype::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        Dtype::F16 => sys::cudaDataType_t::CUDA_R_16F,
    }
}
