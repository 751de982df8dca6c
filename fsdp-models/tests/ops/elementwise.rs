use candle_core::{D, DType, Device, Result, Tensor};
use fsdp::GradSink;
use fsdp_models::ops::{rms_norm, rope, swiglu};

use crate::harness::{DTYPES, compare, distance, values, variable, views};

fn rms_norm_reference(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean = (x.sqr()?.sum_keepdim(D::Minus1)? / x.dim(D::Minus1)? as f64)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(weight)
}

fn swiglu_reference(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    (gate / (gate.neg()?.exp()? + 1.0)?)? * up
}

pub fn angles(t: usize, half: usize) -> (Tensor, Tensor) {
    let angles: Vec<f32> = (0..t * half)
        .map(|i| (i / half) as f32 * 10000f32.powf(-((i % half) as f32) / half as f32))
        .collect();
    let angles = Tensor::from_vec(angles, (t, half), &Device::Cpu).unwrap();
    (angles.cos().unwrap(), angles.sin().unwrap())
}

pub fn rope_reference(x: &Tensor, cos: &Tensor, sin: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, width) = x.dims3()?;
    let half = width / heads / 2;
    let (cos, sin) = (cos.to_dtype(x.dtype())?, sin.to_dtype(x.dtype())?);
    let cos = Tensor::cat(&[&cos, &cos], 1)?.reshape((1, t, 1, 2 * half))?;
    let sin = Tensor::cat(&[&sin, &sin], 1)?.reshape((1, t, 1, 2 * half))?;
    let x = x.reshape((b, t, heads, 2 * half))?;
    let rotated = Tensor::cat(&[&x.narrow(3, half, half)?.neg()?, &x.narrow(3, 0, half)?], 3)?;
    (x.broadcast_mul(&cos)? + rotated.broadcast_mul(&sin)?)?.reshape((b, t, width))
}

#[test]
fn rms_norm_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (rows, dim) in [(1, 2), (1, 8), (7, 33), (65, 64), (129, 257)] {
            let args = [values(1, &[rows, dim]), (values(2, &[dim]) + 1.5).unwrap()];
            compare(
                &format!("rms_norm {rows} x {dim}"),
                dtype,
                tolerance,
                &args,
                |a| rms_norm(&a[0], &a[1], 1e-5, &GradSink::closed()),
                |a| rms_norm_reference(&a[0], &a[1], 1e-5),
            );
        }
    }
}

#[test]
fn rms_norm_rounds_before_the_weight() {
    // The mean square is 9. 1/3 and 5/3 are not bf16 numbers, so rounding twice differs from rounding once.
    let x = Tensor::new(&[1f32, 1.0, 5.0], &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    let weight = Tensor::new(&[1.5f32, 1.25, 1.75], &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    let y = rms_norm(&x, &weight, 0.0, &GradSink::closed()).unwrap().to_dtype(DType::F32).unwrap();
    let expected: Vec<f32> = [(1f32, 1.5f32), (1.0, 1.25), (5.0, 1.75)]
        .iter()
        .map(|(x, w)| {
            let normal = half::bf16::from_f32(x / 3.0).to_f32();
            half::bf16::from_f32(normal * w).to_f32()
        })
        .collect();
    assert_eq!(y.to_vec1::<f32>().unwrap(), expected);
}

#[test]
fn a_row_is_normalised_alike_in_any_batch() {
    let x = values(3, &[65, 96]);
    let weight = values(4, &[96]);
    let all = rms_norm(&x, &weight, 1e-5, &GradSink::closed()).unwrap();
    for row in [0, 31, 64] {
        let one = rms_norm(&x.narrow(0, row, 1).unwrap(), &weight, 1e-5, &GradSink::closed()).unwrap();
        assert_eq!(distance(&one, &all.narrow(0, row, 1).unwrap()), 0.0);
    }
}

#[test]
fn swiglu_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for dims in [[1, 1], [7, 33], [65, 64], [3, 257]] {
            let args = [(values(5, &dims) * 6.0).unwrap(), values(6, &dims)];
            compare(
                &format!("swiglu {dims:?}"),
                dtype,
                tolerance,
                &args,
                |a| swiglu(&a[0], &a[1]),
                |a| swiglu_reference(&a[0], &a[1]),
            );
        }
    }
}

#[test]
fn swiglu_is_finite_far_from_zero() {
    let gate = variable(&Tensor::new(&[-1e4f32, -90.0, 0.0, 90.0, 1e4], &Device::Cpu).unwrap());
    let up = variable(&gate.ones_like().unwrap());
    let y = swiglu(&gate, &up).unwrap();
    let y_values = y.to_vec1::<f32>().unwrap();
    assert_eq!((y_values[0], y_values[2], y_values[3], y_values[4]), (0.0, 0.0, 90.0, 1e4));
    assert!(y_values[1].abs() < 1e-36);
    let grads = y.sum_all().unwrap().backward().unwrap();
    let dgate = grads.get(&gate).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!((dgate[0], dgate[2], dgate[3], dgate[4]), (0.0, 0.5, 1.0, 1.0));
}

#[test]
fn rope_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (b, t, heads, dim) in [(1, 1, 1, 2), (2, 7, 3, 8), (2, 65, 4, 32), (1, 129, 2, 64)] {
            let (cos, sin) = angles(t, dim / 2);
            compare(
                &format!("rope {b} {t} {heads} {dim}"),
                dtype,
                tolerance,
                &[values(7, &[b, t, heads * dim])],
                |a| rope(&a[0], &cos, &sin, heads),
                |a| rope_reference(&a[0], &cos, &sin, heads),
            );
        }
    }
}

#[test]
fn views_give_what_contiguous_tensors_give() {
    let (b, t, heads, dim) = (2, 7, 2, 8);
    let (cos, sin) = angles(t, dim / 2);
    let x = values(8, &[b, t, heads * dim]);
    let weight = values(9, &[heads * dim]);
    let sink = GradSink::closed();
    let expected = [
        rms_norm(&x, &weight, 1e-5, &sink).unwrap(),
        rope(&x, &cos, &sin, heads).unwrap(),
        swiglu(&x, &x).unwrap(),
    ];
    for view in views(&x) {
        assert_eq!(distance(&rms_norm(&view, &weight, 1e-5, &sink).unwrap(), &expected[0]), 0.0);
        assert_eq!(distance(&rope(&view, &cos, &sin, heads).unwrap(), &expected[1]), 0.0);
        assert_eq!(distance(&swiglu(&view, &x).unwrap(), &expected[2]), 0.0);
        assert_eq!(distance(&swiglu(&x, &view).unwrap(), &expected[2]), 0.0);
    }
    for view in views(&weight) {
        assert_eq!(distance(&rms_norm(&x, &view, 1e-5, &sink).unwrap(), &expected[0]), 0.0);
    }
    for (cos, sin) in views(&cos).iter().zip(views(&sin)) {
        assert_eq!(distance(&rope(&x, cos, &sin, heads).unwrap(), &expected[1]), 0.0);
    }
}

#[test]
fn the_gradient_of_one_argument_alone() {
    let (gate, up) = (values(10, &[3, 5]), values(11, &[3, 5]));
    for tracked in [0, 1] {
        let mut args = [gate.clone(), up.clone()];
        args[tracked] = variable(&args[tracked]);
        let y = swiglu(&args[0], &args[1]).unwrap();
        let grads = y.sum_all().unwrap().backward().unwrap();
        assert!(grads.get(&args[tracked]).is_some());
        assert!(grads.get(&args[1 - tracked]).is_none());
    }
    assert!(!swiglu(&gate, &up).unwrap().track_op());
}

#[test]
fn nothing_in_nothing_out() {
    let (cos, sin) = angles(4, 4);
    let x = variable(&Tensor::zeros((0, 4, 16), DType::F32, &Device::Cpu).unwrap());
    let weight = variable(&values(12, &[16]));
    let y = rms_norm(&x, &weight, 1e-5, &GradSink::closed()).unwrap();
    let y = swiglu(&rope(&y, &cos, &sin, 2).unwrap(), &y).unwrap();
    assert_eq!(y.dims(), [0, 4, 16]);
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(grads.get(&x).unwrap().dims(), [0, 4, 16]);
    assert_eq!(grads.get(&weight).unwrap().to_vec1::<f32>().unwrap(), [0.0; 16]);
}

#[test]
fn what_does_not_fit_is_named() {
    let x = values(13, &[2, 3, 8]);
    let sink = GradSink::closed();
    let error = rms_norm(&x, &values(14, &[7]), 1e-5, &sink).unwrap_err().to_string();
    assert!(error.contains("rms-norm: x [2, 3, 8] does not fit the weight [7]"), "{error}");
    let error = swiglu(&x, &values(14, &[2, 3, 7])).unwrap_err().to_string();
    assert!(error.contains("gate is [2, 3, 8], but up is [2, 3, 7]"), "{error}");
    let error = swiglu(&x, &x.to_dtype(DType::BF16).unwrap()).unwrap_err().to_string();
    assert!(error.contains("gate is f32, but up is bf16"), "{error}");
    let x_f64 = x.to_dtype(DType::F64).unwrap();
    let error = swiglu(&x_f64, &x_f64).unwrap_err().to_string();
    assert!(error.contains("expected f32, bf16 or f16, got f64"), "{error}");
    let (cos, sin) = angles(4, 2);
    let error = rope(&x, &cos, &sin, 2).unwrap_err().to_string();
    assert!(error.contains("cos [4, 2]") && error.contains("expected [3, 2]"), "{error}");
    let error = rope(&x, &cos, &sin, 3).unwrap_err().to_string();
    assert!(error.contains("is not 3 heads of even size"), "{error}");
}
