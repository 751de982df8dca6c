use fsdp_kernels::{
    CausalSoftmaxArgs, CausalSoftmaxBackwardArgs, Dtype, causal_softmax, causal_softmax_backward,
};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{assert_close, values, wide};

const SHAPES: [(usize, usize); 8] =
    [(1, 1), (6, 3), (5, 8), (33, 11), (64, 32), (10, 301), (512, 512), (514, 514)];

fn scores(rows: usize, positions: usize) -> Vec<f32> {
    values(Dtype::F32, rows * positions, 1)
        .iter()
        .enumerate()
        // What no query sees would be loud.
        .map(|(at, &score)| if at % positions > at / positions % positions { f32::NAN } else { score })
        .collect()
}

/// The weights of a row in f64, and the logarithm of the sum.
fn softmax(scores: &[f32], row: usize, positions: usize) -> (Vec<f64>, f64) {
    let seen = wide(&scores[row * positions..][..row % positions + 1]);
    let max = seen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = seen.iter().map(|x| (x - max).exp()).sum();
    (seen.iter().map(|x| (x - max).exp() / sum).collect(), max + sum.ln())
}

fn forward(device: Device, dtype: Dtype, scores: &[f32], positions: usize, offset: usize) -> [Vec<f32>; 2] {
    let rows = scores.len() / positions;
    let from = Buffer::of(scores, offset);
    let weights = Buffer::real(dtype, &vec![7.0; scores.len()], offset);
    let lse = Buffer::of(&vec![7f32; rows], 0);
    let args = CausalSoftmaxArgs {
        scores: from.at(),
        weights: weights.at(),
        lse: lse.at(),
        rows: rows as u64,
        positions: positions as u64,
    };
    device.launch(causal_softmax(dtype), &args);
    [weights.reals(dtype), lse.read()]
}

/// The weights, and the gradient of the scores.
fn backward(
    device: Device,
    dtype: Dtype,
    [scores, lse, dweights]: [&[f32]; 3],
    positions: usize,
    scale: f32,
    offset: usize,
) -> [Vec<f32>; 2] {
    let [scores, lse, dweights] = [scores, lse, dweights].map(|values| Buffer::of(values, offset));
    let len = scores.read::<f32>().len();
    let [weights, dscores] = [(); 2].map(|()| Buffer::real(dtype, &vec![7.0; len], offset));
    let args = CausalSoftmaxBackwardArgs {
        scores: scores.at(),
        lse: lse.at(),
        dweights: dweights.at(),
        weights: weights.at(),
        dscores: dscores.at(),
        rows: (len / positions) as u64,
        positions: positions as u64,
        scale,
    };
    device.launch(causal_softmax_backward(dtype), &args);
    [weights.reals(dtype), dscores.reals(dtype)]
}

#[test]
fn weights_follow_the_formula_in_f64() {
    for dtype in Dtype::ALL {
        for (rows, positions) in SHAPES {
            let scores = scores(rows, positions);
            for offset in [0, 1] {
                let [weights, lse] = forward(Device::WIDE, dtype, &scores, positions, offset);
                for row in 0..rows {
                    let (want, want_lse) = softmax(&scores, row, positions);
                    let got = &weights[row * positions..][..positions];
                    let (seen, unseen) = got.split_at(want.len());
                    assert!(unseen.iter().all(|&weight| weight == 0.0));
                    for (&got, want) in seen.iter().zip(want) {
                        assert_close(got, want, dtype, 1.01, 100.0, want);
                    }
                    assert_close(lse[row], want_lse, Dtype::F32, 1.0, 100.0, 1.0 + want_lse.abs());
                }
            }
        }
    }
}

#[test]
fn gradients_follow_the_formula_in_f64() {
    for dtype in Dtype::ALL {
        for (rows, positions) in SHAPES {
            let (scores, dweights) = (scores(rows, positions), values(Dtype::F32, rows * positions, 2));
            let [_, lse] = forward(Device::WIDE, dtype, &scores, positions, 0);
            for offset in [0, 1] {
                let inputs = [&scores[..], &lse, &dweights];
                let [weights, dscores] = backward(Device::WIDE, dtype, inputs, positions, 0.3, offset);
                for row in 0..rows {
                    let (want, _) = softmax(&scores, row, positions);
                    let part = row * positions..(row + 1) * positions;
                    let grads = wide(&dweights[part.clone()]);
                    let delta: f64 = want.iter().zip(&grads).map(|(w, g)| w * g).sum();
                    let largest = grads.iter().fold(0.0, |a: f64, g| a.max(g.abs()));
                    for (k, at) in part.enumerate() {
                        let Some(&weight) = want.get(k) else {
                            assert_eq!((weights[at], dscores[at]), (0.0, 0.0));
                            continue;
                        };
                        assert_close(weights[at], weight, dtype, 1.01, 100.0, weight);
                        let gradient = weight * (grads[k] - delta) * f64::from(0.3f32);
                        let magnitude = weight * largest;
                        assert_close(dscores[at], gradient, dtype, 1.01, 200.0, magnitude);
                    }
                }
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_grid() {
    for (rows, positions) in [(30, 10), (5, 700)] {
        let (scores, dweights) = (scores(rows, positions), values(Dtype::F32, rows * positions, 2));
        on_every_grid(|device| {
            let [weights, lse] = forward(device, Dtype::BF16, &scores, positions, 0);
            let grads = backward(device, Dtype::BF16, [&scores, &lse, &dweights], positions, 0.5, 0);
            (weights, lse, grads)
        });
    }
}

#[test]
fn extreme_scores() {
    let scores = [-1e30, 0.0, 0.0, f32::MAX, -f32::MAX, 0.0, f32::NEG_INFINITY, 1.0, 1.0];
    let [weights, lse] = forward(Device::WIDE, Dtype::F32, &scores, 3, 0);
    assert_eq!(weights, [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.5]);
    assert_eq!((lse[0], lse[1]), (-1e30, f32::MAX));
    let [weights, _] = backward(Device::WIDE, Dtype::F32, [&scores, &lse, &[1.0; 9]], 3, 1.0, 0);
    assert_eq!(weights[..6], [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    let [weights, lse] = forward(Device::WIDE, Dtype::F32, &[0.0, 0.0, f32::NAN, 1.0], 2, 0);
    assert!(weights[2].is_nan() && lse[1].is_nan());
}
