//! The exported products. Scalars are in host memory, of the type that is computed in.

use std::ffi::{c_int, c_longlong};

use half::f16;

use super::gemm::{Dtype, Gemm, Matrix};
use super::{Answer, BlasStatus, call, find};
use crate::abi::{In, Raw};
use crate::driver::find_stream;

/// A number of elements that must not be negative.
fn count(number: c_int) -> Answer<usize> {
    usize::try_from(number).map_err(|_| BlasStatus::INVALID_VALUE)
}

/// `cublasOperation_t`; for real numbers the conjugate transpose is the transpose.
fn is_transposed(operation: c_int) -> Answer<bool> {
    match operation {
        0 => Ok(false),
        1 | 2 => Ok(true),
        _ => Err(BlasStatus::INVALID_VALUE),
    }
}

/// The scalar at a pointer, of the type that a `cublasComputeType_t` has for scalars.
fn scalar(at: In<u8>, compute: c_int) -> Answer<f64> {
    Ok(match compute {
        64 | 65 => at.cast::<f16>().get(0)?.to_f64(),
        68 | 69 | 74..=79 => f64::from(at.cast::<f32>().get(0)?),
        70 | 71 => at.cast::<f64>().get(0)?,
        _ => return Err(BlasStatus::NOT_SUPPORTED),
    })
}

/// A matrix as it is passed: address, `cudaDataType`, leading dimension, stride.
type Given = (Raw, c_int, c_int, c_longlong);

#[expect(clippy::too_many_arguments, reason = "those of the calls")]
fn product(
    name: &str,
    handle: Raw,
    (operation_a, operation_b): (c_int, c_int),
    [m, n, k]: [c_int; 3],
    (alpha, beta): (In<u8>, In<u8>),
    [a, b, c]: [Given; 3],
    batch: c_int,
    compute: c_int,
) -> BlasStatus {
    call(|held| {
        let index = find(held, handle)?;
        let stream = held.blas[index].stream;
        let stream = find_stream(held, stream)?;
        let matrix = |(start, dtype, leading, stride): Given, transposed| {
            let (dtype, leading) = (Dtype::find(dtype)?, count(leading)?);
            Ok::<_, BlasStatus>(Matrix { start, dtype, leading, stride, transposed })
        };
        let gemm = Gemm {
            m: count(m)?,
            n: count(n)?,
            k: count(k)?,
            alpha: scalar(alpha, compute)?,
            beta: scalar(beta, compute)?,
            a: matrix(a, is_transposed(operation_a)?)?,
            b: matrix(b, is_transposed(operation_b)?)?,
            c: matrix(c, false)?,
            batch: count(batch)?,
        };
        gemm.submit(held, stream, name)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasGemmEx(
    handle: Raw,
    operation_a: c_int,
    operation_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: In<u8>,
    a: Raw,
    a_type: c_int,
    lda: c_int,
    b: Raw,
    b_type: c_int,
    ldb: c_int,
    beta: In<u8>,
    c: Raw,
    c_type: c_int,
    ldc: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> BlasStatus {
    let matrices = [(a, a_type, lda, 0), (b, b_type, ldb, 0), (c, c_type, ldc, 0)];
    product(
        "cublasGemmEx",
        handle,
        (operation_a, operation_b),
        [m, n, k],
        (alpha, beta),
        matrices,
        1,
        compute,
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasGemmStridedBatchedEx(
    handle: Raw,
    operation_a: c_int,
    operation_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: In<u8>,
    a: Raw,
    a_type: c_int,
    lda: c_int,
    stride_a: c_longlong,
    b: Raw,
    b_type: c_int,
    ldb: c_int,
    stride_b: c_longlong,
    beta: In<u8>,
    c: Raw,
    c_type: c_int,
    ldc: c_int,
    stride_c: c_longlong,
    batch: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> BlasStatus {
    let matrices = [(a, a_type, lda, stride_a), (b, b_type, ldb, stride_b), (c, c_type, ldc, stride_c)];
    let operations = (operation_a, operation_b);
    let name = "cublasGemmStridedBatchedEx";
    product(name, handle, operations, [m, n, k], (alpha, beta), matrices, batch, compute)
}

/// The products of one type, whose scalars are of that type too.
macro_rules! typed {
    ($($plain:ident $batched:ident $dtype:literal $compute:literal,)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $plain(
            handle: Raw,
            operation_a: c_int,
            operation_b: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            alpha: In<u8>,
            a: Raw,
            lda: c_int,
            b: Raw,
            ldb: c_int,
            beta: In<u8>,
            c: Raw,
            ldc: c_int,
        ) -> BlasStatus {
            let matrices = [(a, $dtype, lda, 0), (b, $dtype, ldb, 0), (c, $dtype, ldc, 0)];
            let operations = (operation_a, operation_b);
            product(stringify!($plain), handle, operations, [m, n, k], (alpha, beta), matrices, 1, $compute)
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $batched(
            handle: Raw,
            operation_a: c_int,
            operation_b: c_int,
            m: c_int,
            n: c_int,
            k: c_int,
            alpha: In<u8>,
            a: Raw,
            lda: c_int,
            stride_a: c_longlong,
            b: Raw,
            ldb: c_int,
            stride_b: c_longlong,
            beta: In<u8>,
            c: Raw,
            ldc: c_int,
            stride_c: c_longlong,
            batch: c_int,
        ) -> BlasStatus {
            let matrices = [(a, $dtype, lda, stride_a), (b, $dtype, ldb, stride_b), (c, $dtype, ldc, stride_c)];
            let operations = (operation_a, operation_b);
            product(stringify!($batched), handle, operations, [m, n, k], (alpha, beta), matrices, batch, $compute)
        }
    )*};
}

typed! {
    cublasSgemm_v2 cublasSgemmStridedBatched 0 68,
    cublasDgemm_v2 cublasDgemmStridedBatched 1 70,
    cublasHgemm cublasHgemmStridedBatched 2 64,
}
