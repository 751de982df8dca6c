//! Muon: momentum, orthogonalized by Newton-Schulz iterations.

use super::{OptimError, Overrides, OwnerRule, Range, WholeParam, squared_norm};
use crate::spec::ParamSpec;

/// Coefficients of the quintic iteration, chosen for the steepest slope at 0 (Jordan et al., 2024).
const COEFFICIENTS: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Added to the norm that a matrix is divided by.
const EPS: f64 = 1e-7;

/// Muon (Jordan et al., 2024) for the matrices of a model.
///
/// With gradient `G` of a parameter of `rows` x `cols` (dims after the first are flattened):
/// `B = momentum * B + (1 - momentum) * G; U = (1 - momentum) * G + momentum * B` (Nesterov; else `U = B`);
/// `O =` five Newton-Schulz iterations `X = a X + (b XXᵀ + c (XXᵀ)²) X` from `U / ||U||`;
/// `W = (1 - lr * decay) * W - lr * sqrt(max(1, rows / cols)) * O`. All in f32.
///
/// It wants the parameters of two or more dims. Leave embeddings and the output layer to the element-wise rule
/// with [`ParamGroup::element_wise`](super::ParamGroup::element_wise). The momentum lives whole on the
/// parameter's owner.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Muon {
    lr: f64,
    momentum: f64,
    nesterov: bool,
    iterations: usize,
    weight_decay: f64,
}

impl Default for Muon {
    /// Learning rate 0.02, momentum 0.95, Nesterov, five iterations, no weight decay.
    fn default() -> Self {
        Muon { lr: 0.02, momentum: 0.95, nesterov: true, iterations: 5, weight_decay: 0.0 }
    }
}

impl Muon {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// Sets the share of the previous momentum that is kept.
    pub fn momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// Takes the gradient at the point where momentum leads.
    pub fn nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
        self
    }

    /// Sets the number of Newton-Schulz iterations.
    pub fn iterations(mut self, iterations: usize) -> Self {
        self.iterations = iterations;
        self
    }

    /// Sets the decoupled weight decay of parameters that are not marked `no_decay`.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }
}

impl OwnerRule for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["momentum_buffer"]
    }

    fn wants(&self, spec: &ParamSpec) -> bool {
        spec.shape.len() >= 2
    }

    /// Multiplications of an iteration, but for a factor: `rows * cols * min(rows, cols)`.
    fn cost(&self, spec: &ParamSpec) -> u64 {
        let (numel, rows) = (spec.numel() as u64, spec.shape.first().copied().unwrap_or(1) as u64);
        numel.saturating_mul(rows.min(numel / rows.max(1)))
    }

    fn update(&mut self, _: u64, param: &mut WholeParam<'_>) -> Result<(), OptimError> {
        let (rows, cols) = param.rows_and_cols();
        let [buffer] = param.states.as_mut_slice() else {
            panic!("muon has 1 state buffer, got {}", param.states.len());
        };
        let momentum = self.momentum as f32;
        let mut update = Vec::with_capacity(param.grads.len());
        for (b, &g) in buffer.iter_mut().zip(param.grads) {
            *b = momentum * *b + (1.0 - momentum) * g;
            update.push(if self.nesterov { (1.0 - momentum) * g + momentum * *b } else { *b });
        }
        orthogonalize(&mut update, rows, cols, self.iterations);
        let weight_decay = param.overrides.weight_decay.unwrap_or(self.weight_decay);
        let decay = if param.spec.no_decay { 1.0 } else { (1.0 - param.lr * weight_decay) as f32 };
        let rate = (param.lr * (rows as f64 / cols as f64).max(1.0).sqrt()) as f32;
        for (w, o) in param.weights.iter_mut().zip(update) {
            *w = *w * decay - rate * o;
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn validate(&self) -> Result<(), OptimError> {
        let range = Range { optimizer: self.name() };
        range.at_least_zero("lr", self.lr)?;
        range.below_one("momentum", self.momentum)?;
        range.at_least_zero("weight decay", self.weight_decay)
    }

    fn check_overrides(&self, overrides: &Overrides) -> Result<(), OptimError> {
        if overrides.betas.is_some() {
            return Err(OptimError::Unsupported { optimizer: self.name(), setting: "betas" });
        }
        overrides.validate(self.name())
    }
}

/// Brings the singular values of the row-major matrix `x` near 1, where they are not near 0.
///
/// # Panics
/// If `x` does not have `rows * cols` elements.
fn orthogonalize(x: &mut Vec<f32>, rows: usize, cols: usize, iterations: usize) {
    assert_eq!(x.len(), rows * cols, "a {rows} x {cols} matrix");
    let scale = (1.0 / (squared_norm(x).sqrt() + EPS)) as f32;
    x.iter_mut().for_each(|x| *x *= scale);
    // The Gram matrix is that of the shorter side: X Xᵀ from the left, or Xᵀ X from the right.
    let tall = rows > cols;
    let m = rows.min(cols);
    let [a, b, c] = COEFFICIENTS;
    let (mut gram, mut poly, mut next) = (vec![0.0; m * m], vec![0.0; m * m], vec![0.0; rows * cols]);
    for _ in 0..iterations {
        let matrix = Matrix::new(x, rows, cols);
        let (left, right) = if tall { (matrix.t(), matrix) } else { (matrix, matrix.t()) };
        matmul(&mut gram, 0.0, 1.0, left, right);
        poly.copy_from_slice(&gram);
        matmul(&mut poly, b, c, Matrix::new(&gram, m, m), Matrix::new(&gram, m, m));
        next.copy_from_slice(x);
        let poly = Matrix::new(&poly, m, m);
        let (left, right) = if tall { (matrix, poly) } else { (poly, matrix) };
        matmul(&mut next, a, 1.0, left, right);
        std::mem::swap(x, &mut next);
    }
}

/// A matrix by its elements and strides.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols);
        Matrix { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    fn t(self) -> Self {
        let Matrix { data, rows, cols, row_stride, col_stride } = self;
        Matrix { data, rows: cols, cols: rows, row_stride: col_stride, col_stride: row_stride }
    }
}

/// `out = alpha * out + beta * left * right`, row-major, in this thread. With `alpha` 0 it does not matter what
/// `out` holds.
fn matmul(out: &mut [f32], alpha: f32, beta: f32, left: Matrix<'_>, right: Matrix<'_>) {
    let (m, k, n) = (left.rows, left.cols, right.cols);
    assert!(right.rows == k && out.len() == m * n, "shapes do not match");
    // SAFETY: the three buffers hold rows * cols elements each at strides that stay inside (`Matrix::new` and the
    // assertion above), and `out`, borrowed mutably, overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            alpha != 0.0,
            left.data.as_ptr(),
            left.col_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.col_stride as isize,
            right.row_stride as isize,
            alpha,
            beta,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i) as f32 * 0.37).sin()).collect()
    }

    fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
        (0..cols).flat_map(|col| (0..rows).map(move |row| x[row * cols + col])).collect()
    }

    #[test]
    fn products_of_matrices_by_hand() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 2.0, 0.0, 1.0, 3.0]);
        let mut out = vec![1.0; 4];
        matmul(&mut out, 2.0, 1.0, Matrix::new(&a, 2, 3), Matrix::new(&b, 2, 3).t());
        assert_eq!(out, [9.0, 13.0, 18.0, 25.0]);
        let mut out = vec![f32::NAN; 4];
        matmul(&mut out, 0.0, 2.0, Matrix::new(&a, 2, 3), Matrix::new(&b, 2, 3).t());
        assert_eq!(out, [14.0, 22.0, 32.0, 46.0]);
    }

    #[test]
    fn singular_values_come_near_one() {
        for (rows, cols) in [(6, 10), (10, 6), (8, 8)] {
            let mut x = values(rows * cols);
            orthogonalize(&mut x, rows, cols, 5);
            let squares = squared_norm(&x);
            let rank = rows.min(cols) as f64;
            assert!((0.5..1.5).contains(&(squares / rank)), "{rows} x {cols}: {squares}");
        }
    }

    #[test]
    fn a_matrix_and_its_transpose_are_the_same() {
        let mut x = values(35);
        let mut y = transpose(&x, 5, 7);
        orthogonalize(&mut x, 5, 7, 5);
        orthogonalize(&mut y, 7, 5, 5);
        let difference = transpose(&x, 5, 7).iter().zip(&y).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference < 1e-5, "{difference}");
    }

    #[test]
    fn zeros_stay_zeros() {
        let mut x = vec![0.0; 12];
        orthogonalize(&mut x, 3, 4, 5);
        assert_eq!(x, [0.0; 12]);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let error = Muon::default().momentum(1.0).validate().unwrap_err().to_string();
        assert_eq!(error, "muon: momentum must be at least 0 and below 1, got 1");
        let error =
            Muon::default().check_overrides(&Overrides { betas: Some((0.0, 0.0)), ..Default::default() });
        assert!(error.unwrap_err().to_string().contains("betas"));
    }
}
