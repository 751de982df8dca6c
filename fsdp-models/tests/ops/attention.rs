use candle_core::{D, DType, Device, Result, Tensor};
use fsdp_models::ops::attention;

use crate::harness::{DTYPES, compare, distance, values, variable, views};

/// All scores at once, masked, softmax, times the values.
pub fn reference(q: &Tensor, k: &Tensor, v: &Tensor, heads: usize, kv_heads: usize) -> Result<Tensor> {
    let (b, t, width) = q.dims3()?;
    let dim = width / heads;
    let group = heads / kv_heads;
    let q = q.reshape((b, t, heads, dim))?.transpose(1, 2)?.contiguous()?;
    let spread = |x: &Tensor| -> Result<Tensor> {
        x.reshape((b, t, kv_heads, 1, dim))?
            .broadcast_as((b, t, kv_heads, group, dim))?
            .reshape((b, t, heads, dim))?
            .transpose(1, 2)?
            .contiguous()
    };
    let (k, v) = (spread(k)?, spread(v)?);
    let scores = (q.matmul(&k.transpose(2, 3)?)? / (dim as f64).sqrt())?;
    let mask: Vec<f64> = (0..t * t).map(|i| if i % t > i / t { -1e30 } else { 0.0 }).collect();
    let mask = Tensor::from_vec(mask, (t, t), &Device::Cpu)?.to_dtype(q.dtype())?;
    let scores = scores.broadcast_add(&mask)?;
    let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    let weights = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&v)?.transpose(1, 2)?.reshape((b, t, width))
}

fn arguments(b: usize, t: usize, heads: usize, kv_heads: usize, dim: usize) -> [Tensor; 3] {
    [
        (values(1, &[b, t, heads * dim]) * 2.0).unwrap(),
        (values(2, &[b, t, kv_heads * dim]) * 2.0).unwrap(),
        values(3, &[b, t, kv_heads * dim]),
    ]
}

#[test]
fn attention_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for t in [1, 7, 65, 129] {
            for (b, heads, kv_heads, dim) in [(1, 1, 1, 8), (2, 4, 2, 32), (1, 3, 1, 64), (2, 2, 2, 8)] {
                compare(
                    &format!("attention b {b} t {t} heads {heads}/{kv_heads} d {dim}"),
                    dtype,
                    tolerance,
                    &arguments(b, t, heads, kv_heads, dim),
                    |a| attention(&a[0], &a[1], &a[2], heads, kv_heads),
                    |a| reference(&a[0], &a[1], &a[2], heads, kv_heads),
                );
            }
        }
    }
}

#[test]
fn extreme_scores_stay_finite() {
    let [q, k, v] = arguments(1, 33, 2, 1, 8).map(|a| variable(&(a * 200.0).unwrap()));
    let y = attention(&q, &k, &v, 2, 1).unwrap();
    let grads = y.sum_all().unwrap().backward().unwrap();
    for tensor in [&y, grads.get(&q).unwrap(), grads.get(&k).unwrap(), grads.get(&v).unwrap()] {
        let all = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(all.iter().all(|v| v.is_finite()));
    }
}

#[test]
fn a_later_token_changes_nothing_before_it() {
    let [q, k, v] = arguments(1, 70, 2, 1, 16);
    let y = attention(&q, &k, &v, 2, 1).unwrap();
    let change = |x: &Tensor| {
        Tensor::cat(&[&x.narrow(1, 0, 69).unwrap(), &values(9, &[1, 1, x.dims()[2]])], 1).unwrap()
    };
    let changed = attention(&change(&q), &change(&k), &change(&v), 2, 1).unwrap();
    assert_eq!(distance(&changed.narrow(1, 0, 69).unwrap(), &y.narrow(1, 0, 69).unwrap()), 0.0);
    assert!(distance(&changed.narrow(1, 69, 1).unwrap(), &y.narrow(1, 69, 1).unwrap()) > 0.1);
}

#[test]
fn a_sequence_is_alike_in_any_batch() {
    let args = arguments(3, 65, 4, 2, 16);
    let all = attention(&args[0], &args[1], &args[2], 4, 2).unwrap();
    for b in 0..3 {
        let [q, k, v] = args.each_ref().map(|a| a.narrow(0, b, 1).unwrap());
        let one = attention(&q, &k, &v, 4, 2).unwrap();
        assert_eq!(distance(&one, &all.narrow(0, b, 1).unwrap()), 0.0);
    }
}

#[test]
fn views_give_what_contiguous_tensors_give() {
    let args = arguments(2, 9, 2, 2, 8);
    let expected = attention(&args[0], &args[1], &args[2], 2, 2).unwrap();
    for index in 0..3 {
        for view in views(&args[index]) {
            let mut args = args.clone();
            args[index] = view;
            assert_eq!(distance(&attention(&args[0], &args[1], &args[2], 2, 2).unwrap(), &expected), 0.0);
        }
    }
}

#[test]
fn only_tracked_arguments_get_gradients() {
    let [q, k, v] = arguments(1, 5, 2, 1, 8);
    assert!(!attention(&q, &k, &v, 2, 1).unwrap().track_op());
    let k = variable(&k);
    let grads = attention(&q, &k, &v, 2, 1).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(grads.get(&k).is_some());
    assert!(grads.get(&q).is_none() && grads.get(&v).is_none());
}

#[test]
fn nothing_in_nothing_out() {
    for (b, t) in [(0, 4), (2, 0)] {
        let q = variable(&Tensor::zeros((b, t, 16), DType::F32, &Device::Cpu).unwrap());
        let y = attention(&q, &q, &q, 2, 2).unwrap();
        assert_eq!(y.dims(), [b, t, 16]);
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert_eq!(grads.get(&q).unwrap().dims(), [b, t, 16]);
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let [q, k, v] = arguments(1, 5, 4, 2, 8);
    let error = attention(&q, &k, &v, 4, 3).unwrap_err().to_string();
    assert!(error.contains("4 query heads are no multiple of 3 key heads"), "{error}");
    let error = attention(&q, &k, &v, 4, 4).unwrap_err().to_string();
    assert!(error.contains("k [1, 5, 16]") && error.contains("expected [1, 5, 32]"), "{error}");
    let error = attention(&q, &k, &v, 5, 5).unwrap_err().to_string();
    assert!(error.contains("queries of width 32 are not 5 heads"), "{error}");
    let error = attention(&q, &k.to_dtype(DType::BF16).unwrap(), &v, 4, 2).unwrap_err().to_string();
    assert!(error.contains("q is f32, but k is bf16"), "{error}");
}
