//! Ops with weights: their values, and where the weights' gradients go.

use candle_core::{DType, Device, Result, Tensor};
use fsdp::GradSink;
use fsdp_models::ops::{
    SelfAttentionWeights, attention, embedding, gated_mlp, linear, rms_norm, rope, self_attention, swiglu,
};

use crate::attention::reference as attention_reference;
use crate::elementwise::{angles, rope_reference};
use crate::harness::{DTYPES, bits, compare, distance, ids, values, variable, views};

fn linear_reference(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    let width = dims.pop().unwrap();
    dims.push(weight.dims()[0]);
    x.reshape(((), width))?.matmul(&weight.t()?)?.reshape(dims)
}

fn mlp_reference(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor) -> Result<Tensor> {
    let gate = linear_reference(x, gate)?;
    let up = linear_reference(x, up)?;
    let inner = ((&gate / (gate.neg()?.exp()? + 1.0)?)? * up)?;
    linear_reference(&inner, down)
}

fn closed() -> GradSink {
    GradSink::closed()
}

#[test]
fn linear_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (dims, out) in [
            (vec![1], 1),
            (vec![7], 3),
            (vec![1, 8], 5),
            (vec![65, 33], 64),
            (vec![2, 7, 64], 257),
            (vec![129, 32], 1),
        ] {
            let width = *dims.last().unwrap();
            compare(
                &format!("linear {dims:?} to {out}"),
                dtype,
                tolerance,
                &[values(1, &dims), values(2, &[out, width])],
                |a| linear(&a[0], &a[1], &closed()),
                |a| linear_reference(&a[0], &a[1]),
            );
        }
    }
}

#[test]
fn embedding_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (tokens, vocab, dim) in [(1, 1, 1), (7, 257, 8), (65, 33, 64)] {
            let ids = ids(3, tokens, vocab as u32);
            compare(
                &format!("embedding {tokens} of {vocab} x {dim}"),
                dtype,
                tolerance,
                &[values(3, &[vocab, dim])],
                |a| embedding(&ids, &a[0], &closed()),
                |a| a[0].index_select(&ids, 0),
            );
        }
    }
    let ids = ids(3, 6, 9).reshape((2, 3)).unwrap();
    assert_eq!(embedding(&ids, &values(3, &[9, 4]), &closed()).unwrap().dims(), [2, 3, 4]);
}

#[test]
fn gated_mlp_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (dims, hidden, out) in [(vec![1, 8], 5, 8), (vec![2, 33, 16], 44, 16), (vec![65, 32], 88, 7)] {
            let width = *dims.last().unwrap();
            compare(
                &format!("gated mlp {dims:?} by {hidden} to {out}"),
                dtype,
                tolerance * 1.5,
                &[
                    values(4, &dims),
                    values(5, &[hidden, width]),
                    values(6, &[hidden, width]),
                    values(7, &[out, hidden]),
                ],
                |a| gated_mlp(&a[0], &a[1], &a[2], &a[3], [&closed(), &closed(), &closed()]),
                |a| mlp_reference(&a[0], &a[1], &a[2], &a[3]),
            );
        }
    }
}

fn attend(
    x: &Tensor,
    w: &[Tensor],
    s: &[GradSink],
    cos: &Tensor,
    sin: &Tensor,
    heads: [usize; 2],
) -> Result<Tensor> {
    let weights =
        SelfAttentionWeights { q: (&w[0], &s[0]), k: (&w[1], &s[1]), v: (&w[2], &s[2]), o: (&w[3], &s[3]) };
    self_attention(x, weights, cos, sin, heads[0], heads[1])
}

#[test]
fn self_attention_is_the_composed_one() {
    for (dtype, tolerance) in DTYPES {
        for (b, t, dim, heads, kv_heads, d, out) in [
            (1, 1, 8, 2, 1, 4, 8),
            (2, 7, 12, 3, 3, 8, 5),
            (2, 65, 32, 4, 2, 32, 32),
            (1, 129, 16, 2, 1, 64, 16),
        ] {
            let (cos, sin) = angles(t, d / 2);
            compare(
                &format!("self-attention b {b} t {t} dim {dim} heads {heads}/{kv_heads} d {d}"),
                dtype,
                tolerance * 2.0,
                &[
                    values(4, &[b, t, dim]),
                    values(5, &[heads * d, dim]),
                    values(6, &[kv_heads * d, dim]),
                    values(7, &[kv_heads * d, dim]),
                    values(8, &[out, heads * d]),
                ],
                |a| attend(&a[0], &a[1..], &[(); 4].map(|()| closed()), &cos, &sin, [heads, kv_heads]),
                |a| {
                    let q = rope_reference(&linear_reference(&a[0], &a[1])?, &cos, &sin, heads)?;
                    let k = rope_reference(&linear_reference(&a[0], &a[2])?, &cos, &sin, kv_heads)?;
                    let v = linear_reference(&a[0], &a[3])?;
                    linear_reference(&attention_reference(&q, &k, &v, heads, kv_heads)?, &a[4])
                },
            );
        }
    }
}

#[test]
fn fused_ops_have_the_bits_of_the_composed_ones() {
    for (dtype, _) in DTYPES {
        let cast = |x: Tensor| x.to_dtype(dtype).unwrap();
        let x = cast(values(1, &[2, 9, 16]));
        let w = [[16, 16], [8, 16], [8, 16], [16, 16]].map(|dims| cast(values(2, &dims)));
        let (cos, sin) = angles(9, 4);
        let fused = attend(&x, &w, &[(); 4].map(|()| closed()), &cos, &sin, [2, 1]).unwrap();
        let [q, k, v] = [0, 1, 2].map(|at| linear(&x, &w[at], &closed()).unwrap());
        let (q, k) = (rope(&q, &cos, &sin, 2).unwrap(), rope(&k, &cos, &sin, 1).unwrap());
        let composed = linear(&attention(&q, &k, &v, 2, 1).unwrap(), &w[3], &closed()).unwrap();
        assert_eq!(distance(&fused, &composed), 0.0);

        let fused =
            gated_mlp(&x, &w[1], &w[2], &w[1].t().unwrap(), [&closed(), &closed(), &closed()]).unwrap();
        let inner =
            swiglu(&linear(&x, &w[1], &closed()).unwrap(), &linear(&x, &w[2], &closed()).unwrap()).unwrap();
        let composed = linear(&inner, &w[1].t().unwrap(), &closed()).unwrap();
        assert_eq!(distance(&fused, &composed), 0.0);
    }
}

type Op = Box<dyn Fn(&Tensor, &[Tensor], &[GradSink]) -> Result<Tensor>>;

/// Each op with weights: an input, the weights, the op.
fn weighted_ops() -> Vec<(&'static str, Tensor, Vec<Tensor>, Op)> {
    let ids = ids(5, 17, 9);
    vec![
        (
            "linear",
            values(1, &[17, 12]),
            vec![values(2, &[9, 12])],
            Box::new(|x, w, s| linear(x, &w[0], &s[0])),
        ),
        (
            "rms_norm",
            values(1, &[17, 12]),
            vec![values(2, &[12])],
            Box::new(|x, w, s| rms_norm(x, &w[0], 1e-5, &s[0])),
        ),
        (
            "embedding",
            values(1, &[17, 12]),
            vec![values(2, &[9, 12])],
            // The input is added so that it takes part like the others'.
            Box::new(move |x, w, s| embedding(&ids, &w[0], &s[0])? + x),
        ),
        (
            "gated_mlp",
            values(1, &[17, 12]),
            vec![values(2, &[20, 12]), values(3, &[20, 12]), values(4, &[12, 20])],
            Box::new(|x, w, s| gated_mlp(x, &w[0], &w[1], &w[2], [&s[0], &s[1], &s[2]])),
        ),
        (
            "self_attention",
            values(1, &[17, 12]),
            vec![values(2, &[12, 12]), values(3, &[4, 12]), values(4, &[4, 12]), values(5, &[12, 12])],
            Box::new(|x, w, s| {
                let (cos, sin) = angles(17, 2);
                attend(&x.unsqueeze(0)?, w, s, &cos, &sin, [3, 1])?.squeeze(0)
            }),
        ),
    ]
}

fn backward(y: &Tensor) -> candle_core::backprop::GradStore {
    (y * values(99, y.dims()).to_dtype(y.dtype()).unwrap()).unwrap().sum_all().unwrap().backward().unwrap()
}

#[test]
fn an_open_sink_gets_the_bits_that_would_be_returned() {
    for (name, x, weights, op) in weighted_ops() {
        let x = variable(&x);
        let weights: Vec<Tensor> = weights.iter().map(variable).collect();
        let returned = backward(&op(&x, &weights, &vec![closed(); weights.len()]).unwrap());

        let (sinks, readers): (Vec<_>, Vec<_>) =
            weights.iter().map(|w| GradSink::open_for_test(w.elem_count())).unzip();
        let sunk = backward(&op(&x, &weights, &sinks).unwrap());
        for (weight, read) in weights.iter().zip(&readers) {
            assert!(sunk.get(weight).is_none(), "{name}: the gradient came twice");
            let expected = returned.get(weight).unwrap();
            let sunk: Vec<u32> = read().into_iter().map(f32::to_bits).collect();
            assert_eq!(sunk, bits(expected), "{name}");
        }
        assert_eq!(bits(sunk.get(&x).unwrap()), bits(returned.get(&x).unwrap()), "{name}");
    }
}

#[test]
fn a_weight_used_twice_adds_up_in_its_sink() {
    for (name, x, weights, op) in weighted_ops() {
        let x = variable(&x);
        let weights: Vec<Tensor> = weights.iter().map(variable).collect();
        let twice = |sinks: &[GradSink]| {
            let first = op(&x, &weights, sinks).unwrap();
            let second = op(&(&x * 0.5).unwrap(), &weights, sinks).unwrap();
            (first + second).unwrap()
        };
        let returned = backward(&twice(&vec![closed(); weights.len()]));
        let (sinks, readers): (Vec<_>, Vec<_>) =
            weights.iter().map(|w| GradSink::open_for_test(w.elem_count())).unzip();
        backward(&twice(&sinks));
        for (weight, read) in weights.iter().zip(&readers) {
            let sunk = Tensor::from_vec(read(), weight.shape(), &Device::Cpu).unwrap();
            assert!(distance(&sunk, returned.get(weight).unwrap()) < 1e-6, "{name}");
        }
    }
}

#[test]
fn a_computed_weight_gets_its_gradient_through_the_graph_even_with_an_open_sink() {
    for (name, x, weights, op) in weighted_ops() {
        let x = variable(&x);
        let bases: Vec<Tensor> = weights.iter().map(variable).collect();
        let computed: Vec<Tensor> = bases.iter().map(|b| (b * 2.0).unwrap()).collect();
        let (sinks, readers): (Vec<_>, Vec<_>) =
            weights.iter().map(|w| GradSink::open_for_test(w.elem_count())).unzip();
        let grads = backward(&op(&x, &computed, &sinks).unwrap());

        let leaves: Vec<Tensor> = computed.iter().map(variable).collect();
        let expected = backward(&op(&x, &leaves, &vec![closed(); leaves.len()]).unwrap());
        for ((base, leaf), read) in bases.iter().zip(&leaves).zip(&readers) {
            let expected = (expected.get(leaf).unwrap() * 2.0).unwrap();
            assert!(distance(grads.get(base).unwrap(), &expected) < 1e-7, "{name}");
            assert!(read().iter().all(|v| v.is_nan()), "{name}: the sink was written");
        }
    }
}

#[test]
fn frozen_weights_get_none_and_pass_the_gradient_on() {
    for (name, x, weights, op) in weighted_ops() {
        let x = variable(&x);
        let trained: Vec<Tensor> = weights.iter().map(variable).collect();
        let sinks = vec![closed(); weights.len()];
        let expected = backward(&op(&x, &trained, &sinks).unwrap());
        for frozen in 0..weights.len() {
            let mut mixed = trained.clone();
            mixed[frozen] = weights[frozen].clone();
            let grads = backward(&op(&x, &mixed, &sinks).unwrap());
            assert!(grads.get(&mixed[frozen]).is_none(), "{name}");
            assert_eq!(bits(grads.get(&x).unwrap()), bits(expected.get(&x).unwrap()), "{name}");
            for (at, weight) in mixed.iter().enumerate().filter(|(at, _)| *at != frozen) {
                assert_eq!(
                    bits(grads.get(weight).unwrap()),
                    bits(expected.get(&trained[at]).unwrap()),
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn an_untracked_input_gets_none_and_the_weights_theirs() {
    for (name, x, weights, op) in weighted_ops() {
        let weights: Vec<Tensor> = weights.iter().map(variable).collect();
        let sinks = vec![closed(); weights.len()];
        let expected = backward(&op(&variable(&x), &weights, &sinks).unwrap());
        let grads = backward(&op(&x, &weights, &sinks).unwrap());
        for weight in &weights {
            assert_eq!(bits(grads.get(weight).unwrap()), bits(expected.get(weight).unwrap()), "{name}");
        }
        if name != "embedding" {
            assert!(grads.get(&x).is_none(), "{name}");
        }
    }
}

#[test]
fn nothing_tracked_builds_no_graph() {
    for (name, x, weights, op) in weighted_ops() {
        let y = op(&x, &weights, &vec![closed(); weights.len()]).unwrap();
        assert!(!y.track_op(), "{name}");
    }
}

#[test]
fn sixteen_bit_weights_reach_the_sink_in_f32() {
    for (dtype, tolerance) in [(DType::BF16, 1e-2), (DType::F16, 2e-3)] {
        for (name, x, weights, op) in weighted_ops() {
            let x = x.to_dtype(dtype).unwrap();
            let weights: Vec<Tensor> =
                weights.iter().map(|w| variable(&w.to_dtype(dtype).unwrap())).collect();
            let (sinks, readers): (Vec<_>, Vec<_>) =
                weights.iter().map(|w| GradSink::open_for_test(w.elem_count())).unzip();
            backward(&op(&x, &weights, &sinks).unwrap());

            let x = x.to_dtype(DType::F32).unwrap();
            let wide: Vec<Tensor> =
                weights.iter().map(|w| variable(&w.to_dtype(DType::F32).unwrap())).collect();
            let y = op(&x, &wide, &vec![closed(); wide.len()]).unwrap();
            let cotangent = values(99, y.dims()).to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            let expected = (y * cotangent).unwrap().sum_all().unwrap().backward().unwrap();
            for (weight, read) in wide.iter().zip(&readers) {
                let sunk = Tensor::from_vec(read(), weight.shape(), &Device::Cpu).unwrap();
                let error = distance(&sunk, expected.get(weight).unwrap());
                assert!(error < tolerance, "{name} {dtype:?}: {error:e}");
                if name == "linear" || name == "embedding" {
                    assert!(error < 1e-6, "{name} {dtype:?}: {error:e}, rounded on the way to the sink");
                }
            }
        }
    }
}

#[test]
fn an_empty_batch_gives_zero_gradients() {
    let weights = [values(2, &[20, 12]), values(3, &[20, 12]), values(4, &[12, 20]), values(5, &[12])]
        .map(|w| variable(&w));
    let x = variable(&Tensor::zeros((0, 12), DType::F32, &Device::Cpu).unwrap());
    let (sink, read) = GradSink::open_for_test(240);
    let y = rms_norm(&x, &weights[3], 1e-5, &closed()).unwrap();
    let y = gated_mlp(&y, &weights[0], &weights[1], &weights[2], [&sink, &closed(), &closed()]).unwrap();
    let y = linear(&y, &weights[0], &closed()).unwrap();
    assert_eq!(y.dims(), [0, 20]);
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(read(), [0.0; 240]);
    assert_eq!(grads.get(&x).unwrap().dims(), [0, 12]);
    for weight in &weights {
        let grad = grads.get(weight).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(grad.iter().all(|g| *g == 0.0));
    }
    let none = Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap();
    let rows = embedding(&none, &weights[0], &closed()).unwrap();
    assert_eq!(rows.dims(), [2, 0, 12]);
    let grads = rows.sum_all().unwrap().backward().unwrap();
    assert!(bits(grads.get(&weights[0]).unwrap()).iter().all(|b| *b == 0));
}

#[test]
fn views_give_what_contiguous_tensors_give() {
    for (name, x, weights, op) in weighted_ops() {
        let sinks = vec![closed(); weights.len()];
        let expected = op(&x, &weights, &sinks).unwrap();
        for view in views(&x) {
            assert_eq!(bits(&op(&view, &weights, &sinks).unwrap()), bits(&expected), "{name}");
        }
        for at in 0..weights.len() {
            for view in views(&weights[at]) {
                let mut weights = weights.clone();
                weights[at] = view;
                assert_eq!(bits(&op(&x, &weights, &sinks).unwrap()), bits(&expected), "{name}");
            }
        }
    }
}

#[test]
fn a_gradient_that_is_a_view_is_read_right() {
    for (name, x, weights, op) in weighted_ops() {
        let (x, weights) = (variable(&x), weights.iter().map(variable).collect::<Vec<_>>());
        let y = op(&x, &weights, &vec![closed(); weights.len()]).unwrap();
        // The gradients that reach the op: ones, broadcast from a scalar and from a transpose.
        let a = y.t().unwrap().sum_all().unwrap().backward().unwrap();
        let b = (&y * y.ones_like().unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(bits(a.get(&x).unwrap()), bits(b.get(&x).unwrap()), "{name}");
        for weight in &weights {
            assert_eq!(bits(a.get(weight).unwrap()), bits(b.get(weight).unwrap()), "{name}");
        }
    }
}

#[test]
fn the_same_graph_can_be_walked_twice() {
    for (name, x, weights, op) in weighted_ops() {
        let (x, weights) = (variable(&x), weights.iter().map(variable).collect::<Vec<_>>());
        let y = op(&x, &weights, &vec![closed(); weights.len()]).unwrap();
        let (first, second) = (backward(&y), backward(&y));
        for tensor in weights.iter().chain([&x]) {
            assert_eq!(bits(first.get(tensor).unwrap()), bits(second.get(tensor).unwrap()), "{name}");
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let x = values(1, &[2, 3, 8]);
    let error = linear(&x, &values(2, &[4, 7]), &closed()).unwrap_err().to_string();
    assert!(error.contains("linear: x [2, 3, 8] does not fit the weight [4, 7]"), "{error}");
    let error =
        linear(&x, &values(2, &[4, 8]).to_dtype(DType::BF16).unwrap(), &closed()).unwrap_err().to_string();
    assert!(error.contains("x is f32, but the weight is bf16"), "{error}");
    let w = values(2, &[5, 8]);
    let error = gated_mlp(&x, &w, &values(3, &[6, 8]), &w, [&closed(), &closed(), &closed()])
        .unwrap_err()
        .to_string();
    assert!(error.contains("gate [5, 8], up [6, 8] and down [5, 8] do not fit"), "{error}");

    let (cos, sin) = angles(3, 2);
    let square = values(2, &[8, 8]);
    let sinks = [(); 4].map(|()| closed());
    let attend = |weights: [&Tensor; 4], heads| {
        attend(&x, &weights.map(Tensor::clone), &sinks, &cos, &sin, heads).unwrap_err().to_string()
    };
    let error = attend([&square, &square, &square, &square], [2, 1]);
    assert!(error.contains("k [8, 8] and v [8, 8] do not fit q [8, 8]: expected 4 rows"), "{error}");
    let error = attend([&square, &square, &square, &w], [1, 1]);
    assert!(error.contains("cos [3, 2] and sin [3, 2] do not fit 3 positions and heads of 8"), "{error}");
    let error = attend([&square, &square, &square, &values(2, &[8, 9])], [2, 2]);
    assert!(error.contains("o [8, 9] does not fit q [8, 8]: expected [out, 8]"), "{error}");

    let ids = Tensor::new(&[[0u32, 256], [300, 257]], &Device::Cpu).unwrap();
    let error = embedding(&ids, &values(3, &[257, 4]), &closed()).unwrap_err().to_string();
    assert!(error.contains("id 300 at position 2 is out of range for a vocabulary of 257"), "{error}");

    let weight = variable(&values(2, &[4, 8]));
    let (sink, _) = GradSink::open_for_test(31);
    let error = linear(&x, &weight, &sink).unwrap().sum_all().unwrap().backward().unwrap_err().to_string();
    assert!(error.contains("the sink of the weight [4, 8] holds 31 elements, expected 32"), "{error}");
}
