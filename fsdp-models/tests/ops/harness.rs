//! Deterministic values, and the comparison of an op with its reference.

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp_test_support::distance_with_least;

/// Values of a fixed sequence, uniform in -1..1, in f32.
pub fn values(seed: u64, dims: &[usize]) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let numel = dims.iter().product();
    let values: Vec<f32> = (0..numel)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

/// Ids of a fixed sequence, below `vocab`.
pub fn ids(seed: u32, len: usize, vocab: u32) -> Tensor {
    let ids: Vec<u32> =
        (0..len as u32).map(|i| (i.wrapping_mul(7919).wrapping_add(seed * 31)) % vocab).collect();
    Tensor::from_vec(ids, len, &Device::Cpu).unwrap()
}

/// All elements in f64.
pub fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The bits of an f32 tensor.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// `|a - b| / |b|` in the Euclidean norm. A norm below 1 counts as 1: all values here are of order 1, and
/// what cancels among them (the gradient of the only score of a row) is exact only to their rounding.
pub fn distance(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    distance_with_least(&flat(a), &flat(b), 1.0)
}

/// A variable with these values.
pub fn variable(values: &Tensor) -> Tensor {
    Var::from_tensor(values).unwrap().into_inner()
}

/// The result of `f` on variables of these values, and the gradient of each for a fixed gradient of the
/// result.
pub fn with_gradients(
    args: &[Tensor],
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let args: Vec<Tensor> = args.iter().map(variable).collect();
    let y = f(&args)?;
    let cotangent = values(99, y.dims()).to_dtype(y.dtype())?;
    let grads = (&y * cotangent)?.sum_all()?.backward()?;
    let grads = args.iter().map(|a| grads.get(a).cloned().map_or_else(|| a.zeros_like(), Ok));
    Ok((y.detach(), grads.collect::<Result<_>>()?))
}

/// Compares `op` in `dtype` with `reference` in f64, on the same values, rounded to `dtype`.
pub fn compare(
    what: &str,
    dtype: DType,
    tolerance: f64,
    args: &[Tensor],
    op: impl Fn(&[Tensor]) -> Result<Tensor>,
    reference: impl Fn(&[Tensor]) -> Result<Tensor>,
) {
    let args: Vec<Tensor> = args.iter().map(|a| a.to_dtype(dtype).unwrap()).collect();
    let exact: Vec<Tensor> = args.iter().map(|a| a.to_dtype(DType::F64).unwrap()).collect();
    let (y, grads) = with_gradients(&args, op).unwrap();
    let (exact_y, exact_grads) = with_gradients(&exact, reference).unwrap();
    let error = distance(&y, &exact_y);
    assert!(error <= tolerance, "{what} {dtype:?}: result off by {error:e}");
    assert_eq!(grads.len(), exact_grads.len(), "{what}");
    for (index, (grad, exact)) in grads.iter().zip(&exact_grads).enumerate() {
        assert_eq!(grad.dtype(), dtype, "{what}: gradient {index}");
        let error = distance(grad, exact);
        assert!(error <= tolerance, "{what} {dtype:?}: gradient {index} off by {error:e}");
    }
}

/// The dtypes with the relative error to expect of each.
pub const DTYPES: [(DType, f64); 3] = [(DType::F32, 1e-6), (DType::BF16, 1e-2), (DType::F16, 1.5e-3)];

/// Views of the same values that are not contiguous, or do not start at the beginning of their storage.
pub fn views(tensor: &Tensor) -> Vec<Tensor> {
    let last = tensor.rank() - 1;
    let padded = Tensor::cat(&[tensor, tensor], 0).unwrap();
    let wide = Tensor::cat(&[tensor, tensor], last).unwrap();
    let mut views = vec![
        padded.narrow(0, tensor.dims()[0], tensor.dims()[0]).unwrap(),
        wide.narrow(last, tensor.dims()[last], tensor.dims()[last]).unwrap(),
    ];
    if tensor.rank() >= 2 {
        views.push(tensor.transpose(0, last).unwrap().contiguous().unwrap().transpose(0, last).unwrap());
    }
    views
}
