use fsdp_kernels::{
    ColumnSumsArgs, Dtype, RmsNormArgs, RmsNormBackwardArgs, column_sums, rms_norm, rms_norm_backward,
};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{assert_close, rounded, values, wide};

const EPS: f32 = 1e-5;

/// Widths of one thread's, a warp's and a block's turn, with rests; some whose rows cannot all be aligned.
const WIDTHS: [usize; 14] = [1, 3, 4, 5, 31, 33, 128, 130, 1020, 1024, 1025, 1028, 2052, 12_292];

/// Rows below, at and above those of a warp's or block's turn.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    WIDTHS.into_iter().flat_map(|width| {
        let rows: &[usize] = if width > 2000 { &[2] } else { &[1, 9, 33] };
        rows.iter().map(move |&rows| (rows, width))
    })
}

struct Inputs {
    x: Vec<f32>,
    weight: Vec<f32>,
    dy: Vec<f32>,
}

fn inputs(dtype: Dtype, rows: usize, width: usize) -> Inputs {
    Inputs {
        x: values(dtype, rows * width, 1),
        weight: values(dtype, width, 2),
        dy: values(dtype, rows * width, 3),
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
fn scale(x: &[f64]) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(EPS)).sqrt()
}

fn forward(device: Device, dtype: Dtype, i: &Inputs, width: usize, offset: usize) -> (Vec<f32>, Vec<f32>) {
    let rows = i.x.len() / width;
    let (x, weight) = (Buffer::real(dtype, &i.x, offset), Buffer::real(dtype, &i.weight, 0));
    let (y, scales) = (Buffer::real(dtype, &i.x, 2 * offset), Buffer::of(&vec![0f32; rows], 0));
    let args = RmsNormArgs {
        x: x.at(),
        weight: weight.at(),
        y: y.at(),
        scales: scales.at(),
        rows: rows as u64,
        width: width as u64,
        eps: EPS,
    };
    device.launch(rms_norm(dtype), &args);
    (y.reals(dtype), scales.read())
}

#[test]
fn rows_are_normalised() {
    for dtype in Dtype::ALL {
        for (rows, width) in shapes() {
            let i = inputs(dtype, rows, width);
            for offset in [0, 1] {
                let (y, scales) = forward(Device::WIDE, dtype, &i, width, offset);
                for row in 0..rows {
                    let x = wide(&i.x[row * width..][..width]);
                    let scale = scale(&x);
                    // A sum of squares is off by no more than its depth in units.
                    let units = 12.0 + (width as f64 / 32.0).min(64.0);
                    assert_close(scales[row], scale, Dtype::F32, 1.0, units, scale);
                    for k in 0..width {
                        let want = x[k] * scale * f64::from(i.weight[k]);
                        // What is below the normal numbers of f16 has fewer bits when it is multiplied.
                        if dtype != Dtype::F16 || (x[k] * scale).abs() > 6.2e-5 {
                            assert_close(y[row * width + k], want, dtype, 2.01, units, want);
                        }
                    }
                    // The normalised value is rounded before it is multiplied, as in the CPU op.
                    for k in 0..width {
                        let normal = rounded(dtype, i.x[row * width + k] * scales[row]);
                        assert_eq!(y[row * width + k], rounded(dtype, i.weight[k] * normal));
                    }
                }
            }
        }
    }
}

#[test]
fn normalisation_in_place_on_every_grid() {
    for width in [100, 1100] {
        let i = inputs(Dtype::BF16, 40, width);
        let in_place = on_every_grid(|device| {
            let (x, weight) = (Buffer::real(Dtype::BF16, &i.x, 0), Buffer::real(Dtype::BF16, &i.weight, 0));
            let scales = Buffer::of(&[0f32; 40], 0);
            let args = RmsNormArgs {
                x: x.at(),
                weight: weight.at(),
                y: x.at(),
                scales: scales.at(),
                rows: 40,
                width: width as u64,
                eps: EPS,
            };
            device.launch(rms_norm(Dtype::BF16), &args);
            (x.reals(Dtype::BF16), scales.read::<f32>())
        });
        assert!(in_place == forward(Device::WIDE, Dtype::BF16, &i, width, 0));
    }
}

/// The gradients of x and, as partial sums, of the weight.
fn backward(
    device: Device,
    dtype: Dtype,
    i: &Inputs,
    scales: &[f32],
    offset: usize,
    [dx_wanted, partials_wanted]: [bool; 2],
) -> (Vec<f32>, Vec<f32>) {
    let (rows, width) = (scales.len(), i.weight.len());
    let (x, weight) = (Buffer::real(dtype, &i.x, offset), Buffer::real(dtype, &i.weight, 0));
    let (dy, scales) = (Buffer::real(dtype, &i.dy, offset), Buffer::of(scales, 0));
    let dx = Buffer::real(dtype, &i.dy, 0);
    let partial_rows = RmsNormBackwardArgs::partial_rows(rows as u64) as usize;
    let partials = Buffer::of(&vec![0f32; partial_rows * width], 0);
    let args = RmsNormBackwardArgs::new(
        [x.at(), weight.at(), dy.at(), scales.at()],
        if dx_wanted { dx.at() } else { 0 },
        if partials_wanted { partials.at() } else { 0 },
        rows as u64,
        width as u64,
    );
    device.launch(rms_norm_backward(dtype), &args);
    (dx.reals(dtype), partials.read())
}

#[test]
fn gradients_follow_the_formula_in_f64() {
    for dtype in Dtype::ALL {
        for (rows, width) in shapes() {
            let i = inputs(dtype, rows, width);
            let scales: Vec<f32> = i.x.chunks(width).map(|x| scale(&wide(x)) as f32).collect();
            let (dx, partials) = backward(Device::WIDE, dtype, &i, &scales, 0, [true, true]);
            let mut dweight = vec![0f64; width];
            let mut terms = vec![0f64; width];
            for row in 0..rows {
                let (x, dy) = (&i.x[row * width..][..width], &i.dy[row * width..][..width]);
                let (x, dy, w, scale) = (wide(x), wide(dy), wide(&i.weight), f64::from(scales[row]));
                let dot: f64 = (0..width).map(|k| dy[k] * w[k] * x[k] * scale).sum();
                let size: f64 = (0..width).map(|k| (dy[k] * w[k] * x[k] * scale).abs()).sum();
                for k in 0..width {
                    let normal = x[k] * scale;
                    let want = scale * (dy[k] * w[k] - normal * dot / width as f64);
                    let magnitude =
                        scale * (dy[k] * w[k]).abs() + scale * (normal * size / width as f64).abs();
                    assert_close(dx[row * width + k], want, dtype, 1.01, 40.0, magnitude);
                    let normal = f64::from(rounded(dtype, i.x[row * width + k] * scales[row]));
                    dweight[k] += dy[k] * normal;
                    terms[k] += (dy[k] * normal).abs();
                }
            }
            for k in 0..width {
                let sum: f32 = partials.chunks(width).map(|partial| partial[k]).sum();
                assert_close(sum, dweight[k], Dtype::F32, 1.0, 36.0, terms[k]);
            }
        }
    }
}

#[test]
fn gradients_do_not_depend_on_grid_alignment_or_what_is_wanted() {
    for width in [12, 1025, 12_292] {
        for dtype in [Dtype::F32, Dtype::BF16] {
            let rows = if width > 2000 { 35 } else { 70 };
            let i = inputs(dtype, rows, width);
            let scales: Vec<f32> = i.x.chunks(width).map(|x| scale(&wide(x)) as f32).collect();
            let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            let (dx, partials) = on_every_grid(|device| {
                let (dx, partials) = backward(device, dtype, &i, &scales, 0, [true, true]);
                (bits(dx), bits(partials))
            });
            let only = backward(Device::WIDE, dtype, &i, &scales, 0, [true, false]);
            assert_eq!((bits(only.0), bits(only.1)), (dx.clone(), vec![0; partials.len()]));
            let only = backward(Device::WIDE, dtype, &i, &scales, 0, [false, true]);
            assert_eq!((bits(only.0), bits(only.1)), (bits(i.dy.clone()), partials));
        }
    }
}

#[test]
fn misaligned_gradients_are_as_good() {
    for width in [4, 128, 1028] {
        let i = inputs(Dtype::F32, 9, width);
        let scales: Vec<f32> = i.x.chunks(width).map(|x| scale(&wide(x)) as f32).collect();
        let (dx, partials) = backward(Device::WIDE, Dtype::F32, &i, &scales, 0, [true, true]);
        let (other_dx, other_partials) = backward(Device::WIDE, Dtype::F32, &i, &scales, 1, [true, true]);
        // The weight's gradient adds up rows, in their order: the same bits.
        assert_eq!(partials, other_partials);
        for (a, b) in dx.iter().zip(other_dx) {
            assert_close(b, (*a).into(), Dtype::F32, 0.0, 40.0, f64::from(a.abs().max(1.0)));
        }
    }
}

#[test]
fn columns_are_summed() {
    for out in Dtype::ALL {
        for width in [1, 3, 31, 32, 33, 70] {
            for rows in [0, 1, 7, 8, 9, 100] {
                for add in [0, 1] {
                    let (input, old) = (values(Dtype::F32, rows * width, 1), values(out, width, 2));
                    let result = on_every_grid(|device| {
                        let (source, target) = (Buffer::of(&input, 0), Buffer::real(out, &old, 1));
                        let args = ColumnSumsArgs {
                            values: source.at(),
                            out: target.at(),
                            rows: rows as u64,
                            width: width as u64,
                            add,
                        };
                        device.launch(column_sums(out), &args);
                        target.reals(out)
                    });
                    for column in 0..width {
                        let terms = (0..rows).map(|row| f64::from(input[row * width + column]));
                        let kept = f64::from(old[column]) * f64::from(add);
                        let want = kept + terms.clone().sum::<f64>();
                        let size = kept.abs() + terms.map(f64::abs).sum::<f64>();
                        assert_close(result[column], want, out, 1.01, 20.0, size);
                    }
                }
            }
        }
    }
}
