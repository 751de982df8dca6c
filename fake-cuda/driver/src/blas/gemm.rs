//! `C = alpha * op(A) * op(B) + beta * C`, column-major, for a batch at equal distances.

use std::sync::Arc;

use half::{bf16, f16};

use super::{Answer, BlasStatus};
use crate::queue::{StreamId, Work};
use crate::race::Access;
use crate::scheduler;
use crate::state::Held;

/// The types of elements that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F64,
    F16,
    BF16,
}

impl Dtype {
    /// By its number as a `cudaDataType`.
    pub fn find(number: i32) -> Answer<Dtype> {
        match number {
            0 => Ok(Dtype::F32),
            1 => Ok(Dtype::F64),
            2 => Ok(Dtype::F16),
            14 => Ok(Dtype::BF16),
            _ => Err(BlasStatus::NOT_SUPPORTED),
        }
    }

    fn bytes(self) -> usize {
        match self {
            Dtype::F64 => 8,
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
        }
    }
}

/// A matrix of each member of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    pub start: usize,
    pub dtype: Dtype,
    /// Elements from a column to the next.
    pub leading: usize,
    /// Elements from a member of the batch to the next.
    pub stride: i64,
    /// Of A and B: taken transposed.
    pub transposed: bool,
}

impl Matrix {
    /// Bytes from the first element of a matrix of `rows` by `columns`, as it lies in memory, to behind the last one of
    /// the batch.
    fn bytes(&self, (rows, columns): (usize, usize), batch: usize) -> usize {
        if rows * columns * batch == 0 {
            return 0;
        }
        let one = (columns - 1) * self.leading + rows;
        ((batch - 1) * self.stride as usize + one) * self.dtype.bytes()
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: f64,
    pub beta: f64,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub batch: usize,
}

impl Gemm {
    /// Rows and columns of A, B and C as they lie in memory.
    fn shapes(&self) -> [(usize, usize); 3] {
        let (m, n, k) = (self.m, self.n, self.k);
        let a = if self.a.transposed { (k, m) } else { (m, k) };
        let b = if self.b.transposed { (n, k) } else { (k, n) };
        [a, b, (m, n)]
    }

    pub fn submit(self, held: &mut Held, stream: StreamId, call: &str) -> Answer {
        let matrices = [self.a, self.b, self.c];
        let fits = |(matrix, (rows, _)): (&Matrix, (usize, usize))| {
            matrix.leading >= rows.max(1) && matrix.stride >= 0
        };
        if !matrices.iter().zip(self.shapes()).all(fits) {
            return Err(BlasStatus::INVALID_VALUE);
        }
        if self.m * self.n * self.batch == 0 {
            return Ok(());
        }
        let [a, b, c] =
            [0, 1, 2].map(|i| (matrices[i].start, matrices[i].bytes(self.shapes()[i], self.batch)));
        let mut accesses = vec![Access::write(c.0, c.1)];
        if self.alpha != 0.0 && self.k > 0 {
            accesses.extend([Access::read(a.0, a.1), Access::read(b.0, b.1)]);
        }
        if self.beta != 0.0 {
            accesses.push(Access::read(c.0, c.1));
        }
        let double = matrices.iter().any(|matrix| matrix.dtype == Dtype::F64);
        let run = Arc::new(move || if double { self.run::<f64>() } else { self.run::<f32>() });
        held.submit(stream, call, &accesses, Work::Memory(run))?;
        scheduler::after_submission(held);
        Ok(())
    }

    /// Sums in `R`, in the order of `k`, and rounds once.
    fn run<R: Real>(&self) {
        let (m, n) = (self.m, self.n);
        let k = if self.alpha == 0.0 { 0 } else { self.k };
        let (alpha, beta) = (R::of(self.alpha), R::of(self.beta));
        for member in 0..self.batch {
            let at = |matrix: &Matrix| matrix.start + member * matrix.stride as usize * matrix.dtype.bytes();
            let a = pack::<R>(&self.a, at(&self.a), (m, k));
            let b = pack::<R>(&self.b, at(&self.b), (k, n));
            let c = at(&self.c);
            let mut column = vec![R::of(0.0); m];
            for j in 0..n {
                column.fill(R::of(0.0));
                for (p, values) in a.chunks_exact(m).enumerate() {
                    let factor = b[j * k + p];
                    column.iter_mut().zip(values).for_each(|(sum, value)| *sum = *sum + *value * factor);
                }
                for (i, sum) in column.iter().enumerate() {
                    let place = c + (j * self.c.leading + i) * self.c.dtype.bytes();
                    // SAFETY: the product has named the elements of C, read ones and written ones; see `submit`.
                    unsafe {
                        let old =
                            if self.beta == 0.0 { R::of(0.0) } else { beta * load(place, self.c.dtype) };
                        store(place, self.c.dtype, alpha * *sum + old);
                    }
                }
            }
        }
    }
}

/// The matrix `op(A)` of `rows` by `columns` in columns without gaps.
fn pack<R: Real>(matrix: &Matrix, start: usize, (rows, columns): (usize, usize)) -> Vec<R> {
    let mut packed = Vec::with_capacity(rows * columns);
    for j in 0..columns {
        for i in 0..rows {
            let index = if matrix.transposed { i * matrix.leading + j } else { j * matrix.leading + i };
            // SAFETY: the product has named the elements of the matrix as read; see `Gemm::submit`.
            packed.push(unsafe { load(start + index * matrix.dtype.bytes(), matrix.dtype) });
        }
    }
    packed
}

/// What is summed in.
trait Real: Copy + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> {
    fn of(value: f64) -> Self;
    fn wide(self) -> f64;
}

impl Real for f32 {
    fn of(value: f64) -> Self {
        value as f32
    }

    fn wide(self) -> f64 {
        f64::from(self)
    }
}

impl Real for f64 {
    fn of(value: f64) -> Self {
        value
    }

    fn wide(self) -> f64 {
        self
    }
}

/// # Safety
/// An element of that type lies at `at`.
unsafe fn load<R: Real>(at: usize, dtype: Dtype) -> R {
    // SAFETY: as the caller promises; the address may be unaligned.
    unsafe {
        match dtype {
            Dtype::F32 => R::of(f64::from((at as *const f32).read_unaligned())),
            Dtype::F64 => R::of((at as *const f64).read_unaligned()),
            Dtype::F16 => R::of((at as *const f16).read_unaligned().to_f64()),
            Dtype::BF16 => R::of((at as *const bf16).read_unaligned().to_f64()),
        }
    }
}

/// # Safety
/// There is room for an element of that type at `at`.
unsafe fn store<R: Real>(at: usize, dtype: Dtype, value: R) {
    let value = value.wide();
    // SAFETY: as the caller promises; the address may be unaligned.
    unsafe {
        match dtype {
            Dtype::F32 => (at as *mut f32).write_unaligned(value as f32),
            Dtype::F64 => (at as *mut f64).write_unaligned(value),
            Dtype::F16 => (at as *mut f16).write_unaligned(f16::from_f64(value)),
            Dtype::BF16 => (at as *mut bf16).write_unaligned(bf16::from_f64(value)),
        }
    }
}
