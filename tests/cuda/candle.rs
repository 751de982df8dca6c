//! A model of plain candle tensors, forward and backward, in whatever order the streams run.

use std::thread;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use fake_cuda::Schedule;
use fsdp_test_fake_cuda::session;

use crate::compare::{Values, assert_close, compare, named, tolerance, values};

fn softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)
}

/// Two layers, attention of a kind between them, a loss over gathered logarithms.
fn mlp(dtype: DType, device: &Device) -> Result<Values> {
    let (batch, tokens, width, hidden, classes) = (2, 5, 8, 12, 7);
    let var = |shape: &[usize], seed| Var::from_tensor(&values(shape, seed, dtype, device)?);
    let table = var(&[11, width], 1)?;
    let up = var(&[hidden, width], 2)?;
    let bias = var(&[hidden], 3)?;
    let down = var(&[hidden, classes], 4)?;
    let ids = Tensor::from_vec(vec![0u32, 3, 10, 3, 5, 7, 1, 3, 2, 9], batch * tokens, device)?;
    let targets = Tensor::from_vec(vec![1u32, 0, 6, 2, 3, 4, 5, 0, 1, 6], (batch * tokens, 1), device)?;
    let mask = Tensor::from_vec(
        (0..tokens * tokens).map(|i| u8::from(i % tokens > i / tokens)).collect(),
        (tokens, tokens),
        device,
    )?;

    let x = table.index_select(&ids, 0)?.reshape((batch, tokens, width))?;
    let scores = (x.matmul(&x.transpose(1, 2)?.contiguous()?)? * 0.5)?;
    let hidden_scores = Tensor::full(-1e4f32, scores.dims(), device)?.to_dtype(dtype)?;
    let scores = mask.broadcast_as(scores.dims())?.where_cond(&hidden_scores, &scores)?;
    let mixed = softmax(&scores)?.matmul(&x)?;
    let x = Tensor::cat(&[x.narrow(2, 0, width / 2)?, mixed.narrow(2, width / 2, width / 2)?], 2)?;
    let x = x.reshape((batch * tokens, width))?;
    let h = x.matmul(&up.t()?)?.broadcast_add(&bias)?.silu()?;
    let logits = h.matmul(&down)?;
    let probabilities = softmax(&logits.to_dtype(DType::F32)?)?;
    let loss = probabilities.log()?.gather(&targets, 1)?.neg()?.mean_all()?;
    let grads = loss.backward()?;
    let mut out = vec![named("loss", &loss)?, named("logits", &logits)?];
    for (name, var) in [("table", &table), ("up", &up), ("bias", &bias), ("down", &down)] {
        let grad =
            grads.get(var).ok_or_else(|| candle_core::Error::Msg(format!("{name} has no gradient")))?;
        out.push(named(name, grad)?);
    }
    Ok(out)
}

#[test]
fn a_model_trains_as_on_the_cpu() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        // The loss is computed in f32.
        compare(3, tolerance(dtype).max(1e-6), |device| mlp(dtype, device))?;
    }
    Ok(())
}

#[test]
fn ranks_train_side_by_side() -> Result<()> {
    let expected = mlp(DType::F32, &Device::Cpu)?;
    for schedule in Schedule::all(3) {
        let session = session(schedule);
        thread::scope(|scope| {
            for ordinal in 0..4 {
                let expected = &expected;
                scope.spawn(move || {
                    let got =
                        Device::new_cuda_with_stream(ordinal).and_then(|device| mlp(DType::F32, &device));
                    assert_close(expected, &got.expect("the rank trains"), 1e-6);
                });
            }
        });
        drop(session);
    }
    Ok(())
}
