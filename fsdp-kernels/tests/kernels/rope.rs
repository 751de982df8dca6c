use fsdp_kernels::{Dtype, RopeArgs, rope};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{assert_close, rounded, values};

#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    positions: usize,
    heads: usize,
    half: usize,
}

impl Shape {
    fn width(self) -> usize {
        2 * self.heads * self.half
    }
}

const SHAPES: [Shape; 7] = [
    Shape { rows: 1, positions: 1, heads: 1, half: 1 },
    Shape { rows: 6, positions: 3, heads: 2, half: 3 },
    Shape { rows: 5, positions: 8, heads: 3, half: 4 },
    Shape { rows: 10, positions: 5, heads: 9, half: 32 },
    Shape { rows: 2, positions: 2, heads: 8, half: 32 },
    Shape { rows: 3, positions: 2, heads: 17, half: 64 },
    Shape { rows: 3, positions: 3, heads: 5, half: 66 },
];

fn angles(shape: Shape) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / shape.half) as f32 * 0.7 / (1 + i % shape.half) as f32 + 0.1;
    let all = 0..shape.positions * shape.half;
    (all.clone().map(|i| angle(i).cos()).collect(), all.map(|i| angle(i).sin()).collect())
}

/// Turns `x`, rows of which start `stride` elements apart; what is between them comes back as it is in `out`.
fn turn(
    device: Device,
    dtype: Dtype,
    shape: Shape,
    x: &[f32],
    [x_stride, out_stride]: [usize; 2],
    sign: f32,
    offset: usize,
) -> Vec<f32> {
    let (cos, sin) = angles(shape);
    let (cos, sin) = (Buffer::of(&cos, 0), Buffer::of(&sin, 0));
    let x = Buffer::real(dtype, x, offset);
    let length = (shape.rows - 1) * out_stride + shape.width();
    let out = Buffer::real(dtype, &vec![7.0; length], 0);
    let args = RopeArgs {
        x: x.at(),
        out: out.at(),
        cos: cos.at(),
        sin: sin.at(),
        rows: shape.rows as u64,
        x_stride: x_stride as u64,
        out_stride: out_stride as u64,
        positions: shape.positions as u32,
        heads: shape.heads as u32,
        half: shape.half as u32,
        sign,
    };
    device.launch(rope(dtype), &args);
    out.reals(dtype)
}

#[test]
fn heads_are_turned_by_their_positions() {
    for dtype in Dtype::ALL {
        for shape in SHAPES {
            let (cos, sin) = angles(shape);
            let width = shape.width();
            for (gaps, offset) in [([0, 0], 0), ([4, 8], 0), ([3, 0], 0), ([0, 0], 1)] {
                for sign in [1.0, -1.0] {
                    let strides = gaps.map(|gap| width + gap);
                    let x = values(dtype, shape.rows * strides[0], 1);
                    let out = turn(Device::WIDE, dtype, shape, &x, strides, sign, offset);
                    for (at, &got) in out.iter().enumerate() {
                        let (row, column) = (at / strides[1], at % strides[1]);
                        if column >= width {
                            assert_eq!(got, 7.0, "between rows");
                            continue;
                        }
                        let (head, i) = (column / (2 * shape.half), column % (2 * shape.half));
                        let pair = i % shape.half;
                        let low = x[row * strides[0] + head * 2 * shape.half + pair];
                        let high = x[row * strides[0] + head * 2 * shape.half + pair + shape.half];
                        let angle = row % shape.positions * shape.half + pair;
                        let (c, s) = (cos[angle], sign * sin[angle]);
                        let (own, other) = if i < shape.half { (low, -high) } else { (high, low) };
                        let want = f64::from(own) * f64::from(c) + f64::from(other) * f64::from(s);
                        let magnitude = f64::from((own * c).abs() + (other * s).abs());
                        assert_close(got, want, dtype, 1.01, 2.0, magnitude);
                        // The arithmetic of the CPU op.
                        assert_eq!(got, rounded(dtype, own * c + other * s));
                    }
                }
            }
        }
    }
}

#[test]
fn turning_back_is_the_inverse() {
    let shape = SHAPES[3];
    let strides = [shape.width(); 2];
    let x = values(Dtype::F32, shape.rows * shape.width(), 1);
    let turned = turn(Device::WIDE, Dtype::F32, shape, &x, strides, 1.0, 0);
    let back = turn(Device::WIDE, Dtype::F32, shape, &turned, strides, -1.0, 0);
    for (x, back) in x.iter().zip(back) {
        assert_close(back, (*x).into(), Dtype::F32, 1.0, 8.0, 5.0);
    }
}

#[test]
fn in_place_on_every_grid() {
    for (dtype, shape) in [(Dtype::F32, SHAPES[1]), (Dtype::BF16, SHAPES[5])] {
        let x = values(dtype, shape.rows * shape.width(), 1);
        let (cos, sin) = angles(shape);
        let result = on_every_grid(|device| {
            let (cos, sin) = (Buffer::of(&cos, 0), Buffer::of(&sin, 0));
            let buffer = Buffer::real(dtype, &x, 0);
            let args = RopeArgs {
                x: buffer.at(),
                out: buffer.at(),
                cos: cos.at(),
                sin: sin.at(),
                rows: shape.rows as u64,
                x_stride: shape.width() as u64,
                out_stride: shape.width() as u64,
                positions: shape.positions as u32,
                heads: shape.heads as u32,
                half: shape.half as u32,
                sign: 1.0,
            };
            device.launch(rope(dtype), &args);
            buffer.reals(dtype)
        });
        assert_eq!(result, turn(Device::WIDE, dtype, shape, &x, [shape.width(); 2], 1.0, 0));
    }
}
