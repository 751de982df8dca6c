//! Each op on a CUDA device against the same op on the CPU: results, and gradients with sinks closed and open.

use candle_core::{DType, Device, Result, Tensor, Var};
use fsdp::comm::DeviceMesh;
use fsdp::spec::Dtype;
use fsdp::{GradSink, OnDevice};
use fsdp_models::ops;
use fsdp_test_support::assert_distance_with_least;

use crate::support::in_schedules;

/// The dtypes with the distance to expect of each.
const DTYPES: [(DType, f64); 3] = [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 3e-3)];

/// What an op is given: tensors of a test, all trainable, and a sink for each.
type Op<'a> = &'a dyn Fn(&[Tensor], &[GradSink], &Device) -> Result<Tensor>;

/// Reads what a sink holds.
type Reader<'a> = Box<dyn Fn() -> Result<Vec<f32>> + 'a>;

/// Values between -1 and 1 that look like none in particular.
fn values(seed: usize, shape: &[usize]) -> Tensor {
    let len = shape.iter().product::<usize>();
    let value = |i: usize| ((i * 7919 + seed * 104_729 + 13) % 2003) as f32 / 1001.5 - 1.0;
    Tensor::from_vec((0..len).map(value).collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Result and gradients, after one backward and after two.
struct Outcome {
    y: Vec<f64>,
    grads: Vec<Vec<f64>>,
    twice: Vec<Vec<f64>>,
}

/// Runs an op on variables; gradients come from candle, or, of those arguments for which there is one, from sinks of
/// `bucket`.
fn run(
    device: &Device,
    dtype: DType,
    args: &[Tensor],
    weights: &[usize],
    bucket: Option<Dtype>,
    op: Op<'_>,
) -> Result<Outcome> {
    let mut sinks = vec![GradSink::closed(); args.len()];
    let mut readers: Vec<Option<Reader<'_>>> = args.iter().map(|_| None).collect();
    if let Some(bucket) = bucket {
        for &index in weights {
            let numel = args[index].elem_count();
            if device.is_cpu() {
                let (sink, read) = GradSink::open_for_test(numel);
                sinks[index] = sink;
                readers[index] = Some(Box::new(move || Ok(read())));
            } else {
                let backend = DeviceMesh::single().on(device)?.backend().clone();
                let (sink, read) = GradSink::open_on_device_for_test(backend, bucket, numel)?;
                sinks[index] = sink;
                readers[index] = Some(Box::new(read));
            }
        }
    }
    let args: Vec<Tensor> = args
        .iter()
        .map(|arg| Ok(Var::from_tensor(&arg.to_dtype(dtype)?.to_device(device)?)?.into_inner()))
        .collect::<Result<_>>()?;
    let backward = || -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
        let y = op(&args, &sinks, device)?;
        let cotangent = values(99, y.dims()).to_dtype(y.dtype())?.to_device(device)?;
        let store = (&y * cotangent)?.sum_all()?.backward()?;
        let grads = args.iter().zip(&readers).map(|(arg, reader)| match (reader, store.get(arg)) {
            (None, Some(grad)) => {
                assert_eq!((grad.dtype(), grad.dims()), (arg.dtype(), arg.dims()));
                Ok(flat(grad))
            }
            (Some(read), None) => Ok(read()?.into_iter().map(f64::from).collect()),
            (None, None) => candle_core::bail!("no gradient of {:?}", arg.dims()),
            (Some(_), Some(_)) => candle_core::bail!("a gradient that the sink should have taken"),
        });
        let grads = grads.collect::<Result<_>>()?;
        Ok((flat(&y), grads))
    };
    let (y, grads) = backward()?;
    let (_, twice) = backward()?;
    Ok(Outcome { y, grads, twice })
}

fn assert_near(what: &str, tolerance: f64, got: &[f64], expected: &[f64]) {
    assert_distance_with_least(got, expected, 1.0, tolerance, what);
}

/// Compares on both devices, in all dtypes; `weights` are the arguments that have a sink.
fn compare(what: &str, args: &[Tensor], weights: &[usize], op: Op<'_>) {
    for (dtype, tolerance) in DTYPES {
        let cpu = run(&Device::Cpu, dtype, args, weights, Some(Dtype::F32), op).unwrap();
        in_schedules(0, |schedule| {
            for bucket in [None, Some(Dtype::F32), Some(Dtype::BF16)] {
                let device = fsdp::cuda::device(0).unwrap();
                let cuda = run(&device, dtype, args, weights, bucket, op).unwrap();
                let what = format!("{what} in {dtype:?}, bucket {bucket:?}, {schedule}");
                assert_near(&format!("{what}: result"), tolerance, &cuda.y, &cpu.y);
                for index in 0..args.len() {
                    let sunk = weights.contains(&index);
                    let tolerance =
                        if sunk && bucket == Some(Dtype::BF16) { tolerance.max(1e-2) } else { tolerance };
                    let what = format!("{what}: gradient {index}");
                    assert_near(&what, tolerance, &cuda.grads[index], &cpu.grads[index]);
                    // candle's store begins anew each time, a sink adds up.
                    let twice = if sunk && bucket.is_none() { &cpu.grads } else { &cpu.twice };
                    assert_near(&format!("{what}, twice"), tolerance, &cuda.twice[index], &twice[index]);
                }
            }
        });
    }
}

fn angles(t: usize, half: usize, device: &Device) -> Result<[Tensor; 2]> {
    let angle = |i: usize| (i / half) as f32 * 0.7 / (1 + i % half) as f32;
    let table = |f: fn(f32) -> f32| {
        let values: Vec<f32> = (0..t * half).map(|i| f(angle(i))).collect();
        Tensor::from_vec(values, (t, half), device)
    };
    Ok([table(f32::cos)?, table(f32::sin)?])
}

#[test]
fn linear() {
    for (rows, inputs, outputs) in [(1, 1, 1), (6, 5, 7), (33, 64, 3)] {
        let args = [values(1, &[rows, 2, inputs]), values(2, &[outputs, inputs])];
        compare("linear", &args, &[1], &|a, sinks, _| ops::linear(&a[0], &a[1], &sinks[1]));
    }
}

#[test]
fn rms_norm() {
    for (rows, width) in [(1, 1), (35, 33), (3, 1100)] {
        let args = [values(1, &[rows, width]), values(2, &[width])];
        compare("rms-norm", &args, &[1], &|a, sinks, _| ops::rms_norm(&a[0], &a[1], 1e-5, &sinks[1]));
    }
}

#[test]
fn swiglu() {
    let args = [values(1, &[3, 37]), values(2, &[3, 37])];
    compare("swiglu", &args, &[], &|a, _, _| ops::swiglu(&(&a[0] * 4.0)?, &a[1]));
}

#[test]
fn rope() {
    compare("rope", &[values(1, &[2, 5, 18])], &[], &|a, _, device| {
        let [cos, sin] = angles(5, 3, device)?;
        ops::rope(&a[0], &cos, &sin, 3)
    });
}

#[test]
fn attention() {
    for (b, t, heads, kv_heads, dim) in [(1, 1, 1, 1, 2), (2, 7, 4, 2, 5), (1, 33, 3, 1, 8), (2, 6, 2, 2, 4)]
    {
        let args = [
            values(1, &[b, t, heads * dim]),
            values(2, &[b, t, kv_heads * dim]),
            values(3, &[b, t, kv_heads * dim]),
        ];
        compare(&format!("attention of {t}"), &args, &[], &|a, _, _| {
            ops::attention(&(&a[0] * 3.0)?, &a[1], &a[2], heads, kv_heads)
        });
    }
}

#[test]
fn self_attention() {
    let (b, t, dim, heads, kv_heads, head_dim) = (2, 5, 7, 4, 2, 6);
    let weight = |seed, rows, columns| (values(seed, &[rows, columns]) * 0.5).unwrap();
    let args = [
        values(1, &[b, t, dim]),
        weight(2, heads * head_dim, dim),
        weight(3, kv_heads * head_dim, dim),
        weight(4, kv_heads * head_dim, dim),
        weight(5, 9, heads * head_dim),
    ];
    compare("self-attention", &args, &[1, 2, 3, 4], &|a, sinks, device| {
        let [cos, sin] = angles(t, head_dim / 2, device)?;
        let weights = ops::SelfAttentionWeights {
            q: (&a[1], &sinks[1]),
            k: (&a[2], &sinks[2]),
            v: (&a[3], &sinks[3]),
            o: (&a[4], &sinks[4]),
        };
        ops::self_attention(&a[0], weights, &cos, &sin, heads, kv_heads)
    });
}

#[test]
fn gated_mlp() {
    let args = [
        values(1, &[2, 3, 5]),
        values(2, &[11, 5]),
        values(3, &[11, 5]),
        (values(4, &[6, 11]) * 0.5).unwrap(),
    ];
    compare("gated-mlp", &args, &[1, 2, 3], &|a, sinks, _| {
        ops::gated_mlp(&a[0], &a[1], &a[2], &a[3], [&sinks[1], &sinks[2], &sinks[3]])
    });
}

#[test]
fn cross_entropy() {
    for ignore_index in [None, Some(3)] {
        for reduction in [ops::Reduction::Mean, ops::Reduction::Sum] {
            let options = ops::CrossEntropyOptions { ignore_index, reduction };
            compare("cross-entropy", &[values(1, &[5, 11])], &[], &|a, _, device| {
                let targets = Tensor::new(&[3u32, 10, 0, 3, 7], device)?;
                let (loss, valid) = ops::cross_entropy_with(&(&a[0] * 5.0)?, &targets, options)?;
                assert_eq!(valid, if ignore_index.is_some() { 3 } else { 5 });
                Ok(loss)
            });
        }
    }
}

#[test]
fn embedding() {
    for on_cpu in [false, true] {
        compare("embedding", &[values(1, &[9, 5])], &[0], &|a, sinks, device| {
            let ids = Tensor::new(&[[8u32, 0, 3], [3, 3, 5]], if on_cpu { &Device::Cpu } else { device })?;
            ops::embedding(&ids, &a[0], &sinks[0])
        });
    }
}

/// Views of the same values that are not contiguous, or begin inside their storage.
#[test]
fn views() {
    let args = [values(1, &[5, 6]), values(2, &[14, 5])];
    compare("linear of views", &args, &[], &|a, sinks, _| {
        ops::linear(&a[0].t()?, &a[1].narrow(0, 7, 7)?, &sinks[1])
    });
}

#[track_caller]
fn assert_refused<T>(result: Result<T>, expected: &str) {
    let message = result.err().expect("it was not refused").to_string();
    assert!(message.starts_with(expected), "{message}\nexpected: {expected}");
}

#[test]
fn arguments_are_checked_as_on_the_cpu() {
    in_schedules(0, |_| refused().unwrap());
}

fn refused() -> Result<()> {
    let device = fsdp::cuda::device(0).map_err(candle_core::Error::wrap)?;
    let other = fsdp::cuda::device(0).map_err(candle_core::Error::wrap)?;
    let closed = GradSink::closed();
    let x = values(1, &[2, 3]).to_device(&device)?;
    let weight = values(2, &[4, 3]).to_device(&device)?;
    let elsewhere = weight.to_device(&Device::Cpu)?;
    assert_refused(
        ops::linear(&x, &elsewhere, &closed),
        "linear: x is on CUDA device 0, but the weight is on the CPU",
    );
    assert_refused(
        ops::linear(&x, &values(2, &[4, 3]).to_device(&other)?, &closed),
        "linear: x and the weight are on CUDA device 0, but of two candle devices",
    );
    let half = weight.to_dtype(DType::BF16)?;
    assert_refused(ops::linear(&x, &half, &closed), "linear: x is f32, but the weight is bf16");
    assert_refused(ops::linear(&x, &weight.t()?, &closed), "linear: x [2, 3] does not fit the weight [3, 4]");
    for at in [&device, &Device::Cpu] {
        let ids = Tensor::new(&[1u32, 4], at)?;
        assert_refused(
            ops::embedding(&ids, &weight, &closed),
            "embedding: id 4 at position 1 is out of range for a vocabulary of 4",
        );
        let targets = Tensor::new(&[1u32, 3], at)?;
        assert_refused(
            ops::cross_entropy(&x, &targets),
            "cross-entropy: target 3 at position 1 is out of range for a vocabulary of 3",
        );
    }
    let (sink, _) = GradSink::open_for_test(12);
    let variable = Var::from_tensor(&weight)?.into_inner();
    let y = ops::linear(&x, &variable, &sink)?;
    assert_refused(
        y.sum_all()?.backward(),
        "linear: the sink of the weight [4, 3] is on the CPU, the weight is not",
    );
    Ok(())
}

#[test]
fn nothing_to_compute() {
    in_schedules(0, |_| {
        let device = fsdp::cuda::device(0).unwrap();
        let weight = values(2, &[4, 3]).to_device(&device).unwrap();
        let none = weight.narrow(0, 0, 0).unwrap();
        let y = ops::linear(&none, &weight, &GradSink::closed()).unwrap();
        assert_eq!(y.dims(), [0, 4]);
        assert_eq!(ops::swiglu(&y, &y).unwrap().dims(), [0, 4]);
        let closed = GradSink::closed();
        let empty = weight.reshape((1, 4, 3)).unwrap().narrow(1, 0, 0).unwrap();
        let [cos, sin] = angles(1, 1, &device).unwrap().map(|table| table.narrow(0, 0, 0).unwrap());
        let square = weight.t().unwrap().matmul(&weight).unwrap().narrow(0, 0, 2).unwrap();
        let out = square.t().unwrap();
        let weights = ops::SelfAttentionWeights {
            q: (&square, &closed),
            k: (&square, &closed),
            v: (&square, &closed),
            o: (&out, &closed),
        };
        let y = ops::self_attention(&empty, weights, &cos, &sin, 1, 1).unwrap();
        assert_eq!(y.dims(), [1, 0, 3]);
    });
}
