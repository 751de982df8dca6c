//! Matrix products on strided views, by the `gemm` crate.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use fsdp::Accumulate;

use super::simd::filled_by;

static THREADS: AtomicUsize = AtomicUsize::new(1);

/// Sets how many threads one matrix product may use, for every thread of this process (1 at start). Zero
/// counts as 1.
///
/// With 1 a product runs in the calling thread: right where the ranks of a job are threads that fill the
/// machine. With more, large products are split over rayon's global pool.
pub fn set_threads(n: usize) {
    THREADS.store(n.max(1), Ordering::Relaxed);
}

/// How many threads one matrix product may use.
pub fn threads() -> usize {
    THREADS.load(Ordering::Relaxed)
}

/// A matrix for reading: element (i, j) at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Mat<'a> {
    /// A dense row-major matrix.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A matrix with rows of adjacent elements, `row_stride` apart.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix out of its data");
        Mat { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose: the same data.
    pub fn t(self) -> Self {
        Mat {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// A matrix for writing, with rows of adjacent elements, `row_stride` apart.
pub(super) struct MatMut<'a> {
    data: *mut f32,
    initialised: bool,
    rows: usize,
    cols: usize,
    row_stride: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

impl<'a> MatMut<'a> {
    /// A dense row-major matrix.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// A matrix with rows `row_stride` apart.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self::checked(data.as_mut_ptr(), data.len(), true, rows, cols, row_stride)
    }

    /// A matrix over memory that holds no values yet: it can only be overwritten.
    pub fn uninit(data: &'a mut [MaybeUninit<f32>], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self::checked(data.as_mut_ptr().cast(), data.len(), false, rows, cols, row_stride)
    }

    fn checked(
        data: *mut f32,
        len: usize,
        initialised: bool,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Self {
        assert!(fits(len, rows, cols, row_stride), "matrix out of its data");
        assert!(rows <= 1 || cols <= row_stride, "rows overlap");
        MatMut { data, initialised, rows, cols, row_stride, lifetime: PhantomData }
    }
}

/// Whether a matrix with rows of `cols` adjacent elements has all its indices below `len`.
fn fits(len: usize, rows: usize, cols: usize, row_stride: usize) -> bool {
    let end = |rows: usize| (rows - 1).checked_mul(row_stride)?.checked_add(cols);
    rows == 0 || cols == 0 || end(rows).is_some_and(|end| end <= len)
}

/// `dst = scale a b`, or `dst += scale a b`. Without inner elements the product is zero.
pub(super) fn matmul(dst: MatMut<'_>, mode: Accumulate, scale: f32, a: Mat<'_>, b: Mat<'_>) {
    assert!(dst.rows == a.rows && dst.cols == b.cols && a.cols == b.rows, "matrix shapes do not match");
    let add = mode == Accumulate::Add;
    assert!(dst.initialised || !add, "a sum into uninitialised memory");
    let parallelism = match threads() {
        1 => gemm::Parallelism::None,
        n => gemm::Parallelism::Rayon(n),
    };
    // SAFETY: every index of the three matrices is inside its slice (checked where the views are made; a
    // transpose reaches the same indices), `dst` is exclusively borrowed and its elements are distinct; it is
    // read only if `add`, and then it is initialised. Strides fit `isize` because the slices they index do.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            a.cols,
            dst.data,
            1,
            dst.row_stride as isize,
            add,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The product `a b` as a new dense row-major matrix.
pub(super) fn product(a: Mat<'_>, b: Mat<'_>) -> Vec<f32> {
    let (rows, cols) = (a.rows, b.cols);
    // SAFETY: an overwriting product writes all elements of `dst`, which is the whole vector: the view is of rows * cols
    // elements without gaps, and is refused if that is more than can be counted.
    unsafe {
        filled_by(rows * cols, |out| {
            matmul(MatMut::uninit(out, rows, cols, cols), Accumulate::Overwrite, 1.0, a, b)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 29) % 23) as f32 - 11.0).collect()
    }

    #[test]
    fn strided_and_transposed_views_in_both_modes() {
        for (m, n, k) in
            [(0, 3, 2), (3, 0, 2), (3, 4, 0), (1, 1, 1), (1, 7, 5), (7, 1, 5), (5, 6, 2), (33, 17, 40)]
        {
            let (stride_a, stride_b, stride_dst) = (k + 3, k + 1, n + 2);
            let (a, b) = (values(m * stride_a), values(n * stride_b));
            let start = values(m * stride_dst);
            for mode in [Accumulate::Overwrite, Accumulate::Add] {
                let mut dst = start.clone();
                matmul(
                    MatMut::strided(&mut dst, m, n, stride_dst),
                    mode,
                    0.5,
                    Mat::strided(&a, m, k, stride_a),
                    Mat::strided(&b, n, k, stride_b).t(),
                );
                for (index, &got) in dst.iter().enumerate() {
                    let (i, j) = (index / stride_dst, index % stride_dst);
                    let base = if mode == Accumulate::Add { start[index] } else { 0.0 };
                    let expected = if j < n {
                        let sum: f32 = (0..k).map(|l| a[i * stride_a + l] * b[j * stride_b + l]).sum();
                        base + 0.5 * sum
                    } else {
                        start[index]
                    };
                    assert_eq!(got, expected, "{m} {n} {k} {mode:?} at ({i}, {j})");
                }
            }
        }
    }
}
