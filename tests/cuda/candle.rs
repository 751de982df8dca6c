//! candle's CUDA tensors against its CPU tensors: the libraries and kernels that stand for the real ones compute what
//! candle expects of them, in whatever order the streams run.

use candle_core::{D, DType, Device, Result, Tensor, Var};
use fake_cuda::{Schedule, Session};

/// What a computation gave, by name.
type Values = Vec<(String, Vec<f64>)>;

/// Values between -1 and 1 that look like none in particular.
fn values(shape: &[usize], seed: usize, device: &Device) -> Result<Tensor> {
    let len = shape.iter().product::<usize>();
    let value = |i| ((i * 7919 + seed * 104_729 + 13) % 2003) as f32 / 1001.5 - 1.0;
    Tensor::from_vec((0..len).map(value).collect::<Vec<f32>>(), shape, device)
}

fn read(name: &str, tensor: &Tensor) -> Result<(String, Vec<f64>)> {
    let flat = tensor.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    Ok((name.to_owned(), flat.to_vec1()?))
}

/// Compares in every schedule, the devices being gone when the session ends.
fn compare(tolerance: f64, compute: impl Fn(&Device) -> Result<Values>) -> Result<()> {
    let expected = compute(&Device::Cpu)?;
    for schedule in Schedule::all(3) {
        let session = Session::with_all_kernels(schedule);
        let got = compute(&Device::new_cuda_with_stream(0)?)?;
        for ((name, expected), (_, got)) in expected.iter().zip(&got) {
            assert_eq!(expected.len(), got.len(), "{name}");
            for (i, (expected, got)) in expected.iter().zip(got).enumerate() {
                let error = (expected - got).abs() / expected.abs().max(1.0);
                assert!(error <= tolerance, "{name}[{i}] in {schedule:?}: {got}, on the CPU {expected}");
            }
        }
        drop(session);
    }
    Ok(())
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)
}

/// Two layers, attention of a kind between them, a loss over gathered logarithms.
fn mlp(dtype: DType, device: &Device) -> Result<Values> {
    let (batch, tokens, width, hidden, classes) = (2, 5, 8, 12, 7);
    let var = |shape: &[usize], seed| Var::from_tensor(&values(shape, seed, device)?.to_dtype(dtype)?);
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
    let mut out = vec![read("loss", &loss)?, read("logits", &logits)?];
    for (name, var) in [("table", &table), ("up", &up), ("bias", &bias), ("down", &down)] {
        let grad =
            grads.get(var).ok_or_else(|| candle_core::Error::Msg(format!("{name} has no gradient")))?;
        out.push(read(name, grad)?);
    }
    Ok(out)
}

#[test]
fn a_model_trains_as_on_the_cpu() -> Result<()> {
    compare(1e-6, |device| mlp(DType::F32, device))
}

#[test]
fn a_model_trains_in_f64_as_on_the_cpu() -> Result<()> {
    compare(1e-6, |device| mlp(DType::F64, device))
}

#[test]
fn a_model_trains_in_bf16_as_on_the_cpu() -> Result<()> {
    compare(3e-2, |device| mlp(DType::BF16, device))
}
