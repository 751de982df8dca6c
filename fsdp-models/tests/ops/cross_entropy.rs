use candle_core::{D, DType, Device, Result, Tensor};
use fsdp_models::ops::{CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_with};

use crate::harness::{DTYPES, bits, compare, distance, ids, values, variable, views};

fn reference(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&max)?;
    let lse = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (lse - shifted.gather(&targets.unsqueeze(1)?, 1)?)?.mean_all()
}

#[test]
fn cross_entropy_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (rows, vocab) in [(1, 1), (1, 257), (7, 64), (65, 257), (129, 33)] {
            let targets = ids(3, rows, vocab as u32);
            let logits = (values(1, &[rows, vocab]) * 8.0).unwrap();
            compare(
                &format!("cross-entropy {rows} x {vocab}"),
                dtype,
                tolerance,
                &[logits],
                // The gradient is returned in the dtype of the logits, the loss in f32.
                |a| (cross_entropy(&a[0], &targets)? * rows as f64)?.to_dtype(dtype),
                |a| reference(&a[0], &targets)? * rows as f64,
            );
        }
    }
}

#[test]
fn the_loss_is_f32_for_any_logits() {
    for (dtype, _) in DTYPES {
        let loss = cross_entropy(&values(1, &[4, 9]).to_dtype(dtype).unwrap(), &ids(1, 4, 9)).unwrap();
        assert_eq!((loss.dtype(), loss.dims().len()), (DType::F32, 0));
    }
}

#[test]
fn uniform_logits_cost_the_logarithm_of_the_vocabulary() {
    let logits = Tensor::zeros((1024, 256), DType::F32, &Device::Cpu).unwrap();
    let loss = cross_entropy(&logits, &ids(1, 1024, 256)).unwrap().to_scalar::<f32>().unwrap();
    assert_eq!(loss, 256f64.ln() as f32);
}

#[test]
fn ignored_rows_count_for_nothing() {
    let logits = values(2, &[5, 11]);
    let targets = Tensor::new(&[3u32, 4_294_967_295, 0, 4_294_967_295, 10], &Device::Cpu).unwrap();
    let kept = Tensor::new(&[0u32, 2, 4], &Device::Cpu).unwrap();
    let options = CrossEntropyOptions { ignore_index: Some(u32::MAX), ..Default::default() };

    let all = variable(&logits);
    let (loss, valid) = cross_entropy_with(&all, &targets, options).unwrap();
    assert_eq!(valid, 3);
    let some = variable(&logits.index_select(&kept, 0).unwrap());
    let expected = cross_entropy(&some, &targets.index_select(&kept, 0).unwrap()).unwrap();
    assert_eq!(bits(&loss), bits(&expected));

    let grad = loss.backward().unwrap().get(&all).unwrap().clone();
    let expected = expected.backward().unwrap().get(&some).unwrap().clone();
    assert_eq!(bits(&grad.index_select(&kept, 0).unwrap()), bits(&expected));
    assert_eq!(grad.get(1).unwrap().to_vec1::<f32>().unwrap(), [0.0; 11]);
    assert_eq!(grad.get(3).unwrap().to_vec1::<f32>().unwrap(), [0.0; 11]);
}

#[test]
fn no_valid_row_is_no_loss_and_no_gradient() {
    let options = CrossEntropyOptions { ignore_index: Some(7), ..Default::default() };
    for rows in [0, 4] {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            let logits = variable(&values(3, &[rows, 9]));
            let targets = Tensor::full(7u32, rows, &Device::Cpu).unwrap();
            let options = CrossEntropyOptions { reduction, ..options };
            let (loss, valid) = cross_entropy_with(&logits, &targets, options).unwrap();
            assert_eq!((loss.to_scalar::<f32>().unwrap(), valid), (0.0, 0));
            let grads = loss.backward().unwrap();
            let grad = grads.get(&logits).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(grad.iter().all(|g| *g == 0.0));
        }
    }
}

#[test]
fn the_sum_is_the_mean_times_the_valid_rows() {
    let logits = variable(&values(4, &[6, 13]));
    let targets = ids(1, 6, 13);
    let mean = cross_entropy(&logits, &targets).unwrap();
    let options = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
    let (sum, valid) = cross_entropy_with(&logits, &targets, options).unwrap();
    assert_eq!(valid, 6);
    assert!(distance(&sum, &(&mean * 6.0).unwrap()) < 1e-7);
    let mean_grad = mean.backward().unwrap().get(&logits).unwrap().clone();
    let sum_grad = (sum / 6.0).unwrap().backward().unwrap().get(&logits).unwrap().clone();
    assert!(distance(&sum_grad, &mean_grad) < 1e-7);
}

#[test]
fn extreme_logits_stay_finite_and_nan_is_seen() {
    let rows = vec![vec![f32::NEG_INFINITY, 0.0, 1e4], vec![-1e30, -1e30, -1e30], vec![3e38, 0.0, 3e38]];
    let logits = variable(&Tensor::new(rows, &Device::Cpu).unwrap());
    let targets = Tensor::new(&[2u32, 0, 0], &Device::Cpu).unwrap();
    let loss = cross_entropy(&logits, &targets).unwrap();
    let expected = (3f64.ln() + 2f64.ln()) / 3.0;
    assert!((f64::from(loss.to_scalar::<f32>().unwrap()) - expected).abs() < 1e-6);
    let grad =
        loss.backward().unwrap().get(&logits).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(grad.iter().all(|g| g.is_finite()));

    let logits = Tensor::new(&[[0f32, f32::NAN, 1.0]], &Device::Cpu).unwrap();
    let loss = cross_entropy(&logits, &Tensor::new(&[0u32], &Device::Cpu).unwrap()).unwrap();
    assert!(loss.to_scalar::<f32>().unwrap().is_nan());
}

#[test]
fn views_give_what_contiguous_tensors_give() {
    let (logits, targets) = (values(5, &[6, 9]), ids(2, 6, 9));
    let expected = cross_entropy(&logits, &targets).unwrap();
    for view in views(&logits) {
        assert_eq!(bits(&cross_entropy(&view, &targets).unwrap()), bits(&expected));
    }
    for view in views(&targets) {
        assert_eq!(bits(&cross_entropy(&logits, &view).unwrap()), bits(&expected));
    }
}

#[test]
fn a_target_out_of_range_is_named() {
    let logits = values(6, &[3, 257]);
    let targets = Tensor::new(&[256u32, 300, 999], &Device::Cpu).unwrap();
    let error = cross_entropy(&logits, &targets).unwrap_err().to_string();
    assert!(error.contains("target 300 at position 1 is out of range for a vocabulary of 257"), "{error}");
    let error = cross_entropy(&logits, &ids(1, 4, 9)).unwrap_err().to_string();
    assert!(error.contains("logits [3, 257] do not fit targets [4]"), "{error}");
    let error = cross_entropy(&logits, &targets.to_dtype(DType::I64).unwrap()).unwrap_err().to_string();
    assert!(error.contains("expected ids of dtype u32, got i64"), "{error}");
}
