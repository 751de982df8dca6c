use fsdp_kernels::{Dtype, SwigluArgs, SwigluBackwardArgs, swiglu, swiglu_backward};

use crate::device::{Buffer, Device, on_every_grid};
use crate::exp::sigmoid;
use crate::number::{LENGTHS, assert_close, rounded, values};

/// fsdp-models/src/ops/swiglu.rs.
fn forward(gate: f32, up: f32) -> f32 {
    gate * sigmoid(gate) * up
}

/// fsdp-models/src/ops/swiglu.rs.
fn gradients(gate: f32, up: f32, dy: f32) -> (f32, f32) {
    let s = sigmoid(gate);
    let silu = gate * s;
    (dy * up * (silu * (1.0 - s) + s), dy * silu)
}

/// Gates from where the sigmoid is 0 to where it is 1, with the ends.
fn gates(dtype: Dtype, len: usize) -> Vec<f32> {
    let special = [0.0, -0.0, 104.0, -104.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -88.0, 1e-40];
    let mut gates: Vec<f32> = values(dtype, len, 1).iter().map(|x| rounded(dtype, x * 20.0)).collect();
    for (at, &value) in special.iter().enumerate() {
        if let Some(gate) = gates.get_mut(at * 7 + 20) {
            *gate = rounded(dtype, value);
        }
    }
    gates
}

/// NaNs are one, with any payload.
#[track_caller]
fn assert_same(got: f32, expected: f32) {
    let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
    assert!(same, "{got:e} is not {expected:e}");
}

fn run(device: Device, dtype: Dtype, rows: usize, [gate, up]: [&[f32]; 2], offset: usize) -> Vec<f32> {
    let (gate, up) = (Buffer::real(dtype, gate, offset), Buffer::real(dtype, up, 0));
    let len = gate.reals(dtype).len();
    let y = Buffer::real(dtype, &vec![f32::NAN; len], 0);
    let width = (len / rows) as u64;
    let args = SwigluArgs {
        gate: gate.at(),
        up: up.at(),
        y: y.at(),
        rows: rows as u64,
        width,
        in_stride: width,
        out_stride: width,
    };
    device.launch(swiglu(dtype), &args);
    y.reals(dtype)
}

#[test]
fn gives_the_bits_of_the_cpu_op() {
    for dtype in Dtype::ALL {
        for len in LENGTHS {
            let (gate, up) = (gates(dtype, len), values(dtype, len, 2));
            for offset in [0, 1] {
                let y = run(Device::WIDE, dtype, 1, [&gate, &up], offset);
                for i in 0..len {
                    assert_same(y[i], rounded(dtype, forward(gate[i], up[i])));
                    if gate[i].abs() < 80.0 {
                        let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
                        let want = g / (1.0 + (-g).exp()) * u;
                        assert_close(y[i], want, dtype, 1.01, 12.0, want.abs() + 1e-38);
                    }
                }
            }
        }
    }
}

struct Gradients {
    dgate: Vec<f32>,
    dup: Vec<f32>,
}

fn run_backward(
    device: Device,
    dtype: Dtype,
    inputs: [&[f32]; 3],
    offset: usize,
    wanted: [bool; 2],
) -> Gradients {
    let [gate, up, dy] = inputs.map(|x| Buffer::real(dtype, x, offset));
    let [dgate, dup] = [7.0, 8.0].map(|x| Buffer::real(dtype, &vec![x; inputs[0].len()], 0));
    let width = inputs[0].len() as u64;
    let args = SwigluBackwardArgs {
        gate: gate.at(),
        up: up.at(),
        dy: dy.at(),
        dgate: if wanted[0] { dgate.at() } else { 0 },
        dup: if wanted[1] { dup.at() } else { 0 },
        rows: 1,
        width,
        in_stride: width,
        out_stride: width,
    };
    device.launch(swiglu_backward(dtype), &args);
    Gradients { dgate: dgate.reals(dtype), dup: dup.reals(dtype) }
}

#[test]
fn gradients_have_the_bits_of_the_cpu_op() {
    for dtype in Dtype::ALL {
        for len in LENGTHS {
            let (gate, up, dy) = (gates(dtype, len), values(dtype, len, 2), values(dtype, len, 3));
            for offset in [0, 3] {
                let got = run_backward(Device::WIDE, dtype, [&gate, &up, &dy], offset, [true, true]);
                for i in 0..len {
                    let (dgate, dup) = gradients(gate[i], up[i], dy[i]);
                    assert_same(got.dgate[i], rounded(dtype, dgate));
                    assert_same(got.dup[i], rounded(dtype, dup));
                    if gate[i].abs() < 80.0 {
                        let (g, u, d) = (f64::from(gate[i]), f64::from(up[i]), f64::from(dy[i]));
                        let s = 1.0 / (1.0 + (-g).exp());
                        let (want, factor) = (d * g * s, (g * s * (1.0 - s)).abs() + s);
                        assert_close(got.dup[i], want, dtype, 1.01, 12.0, want.abs() + 1e-38);
                        let want = d * u * (s * (1.0 + g * (1.0 - s)));
                        assert_close(got.dgate[i], want, dtype, 1.01, 20.0, d * u * factor + 1e-38);
                    }
                }
            }
            let one = run_backward(Device::WIDE, dtype, [&gate, &up, &dy], 0, [false, true]);
            assert!(one.dgate.iter().all(|&x| x == 7.0));
            let other = run_backward(Device::WIDE, dtype, [&gate, &up, &dy], 0, [true, false]);
            assert!(other.dup.iter().all(|&x| x == 8.0));
        }
    }
}

/// gate and up are the halves of each row of one matrix, and so are their gradients, in its place.
#[test]
fn halves_of_one_matrix_on_every_grid() {
    for dtype in Dtype::ALL {
        for width in [1, 5, 8, 300] {
            let rows = 7;
            let both = values(dtype, rows * 2 * width, 1);
            let dy = values(dtype, rows * width, 2);
            let (y, grads) = on_every_grid(|device| {
                let (matrix, y) = (Buffer::real(dtype, &both, 0), Buffer::real(dtype, &dy, 0));
                let up = matrix.at() + (width * dtype.size()) as u64;
                let (rows, width) = (rows as u64, width as u64);
                let args = SwigluArgs {
                    gate: matrix.at(),
                    up,
                    y: y.at(),
                    rows,
                    width,
                    in_stride: 2 * width,
                    out_stride: width,
                };
                device.launch(swiglu(dtype), &args);
                let dy = Buffer::real(dtype, &dy, 0);
                let args = SwigluBackwardArgs {
                    gate: matrix.at(),
                    up,
                    dy: dy.at(),
                    dgate: matrix.at(),
                    dup: up,
                    rows,
                    width,
                    in_stride: 2 * width,
                    out_stride: width,
                };
                device.launch(swiglu_backward(dtype), &args);
                (y.reals(dtype), matrix.reals(dtype))
            });
            for i in 0..rows * width {
                let at = i / width * 2 * width + i % width;
                let (gate, up) = (both[at], both[at + width]);
                assert_eq!(y[i], rounded(dtype, forward(gate, up)));
                let (dgate, dup) = gradients(gate, up, dy[i]);
                assert_eq!((grads[at], grads[at + width]), (rounded(dtype, dgate), rounded(dtype, dup)));
            }
        }
    }
}
