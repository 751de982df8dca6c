use fsdp_kernels::{Dtype, SwapDimsArgs, swap_dims};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::values;

fn swapped(
    device: Device,
    dtype: Dtype,
    x: &[f32],
    [batch, first, second, width]: [usize; 4],
    offset: usize,
) -> Vec<f32> {
    let (from, to) =
        (Buffer::real(dtype, x, offset), Buffer::real(dtype, &vec![7.0; batch * first * second * width], 0));
    let args = SwapDimsArgs {
        from: from.at(),
        to: to.at(),
        batch: batch as u64,
        first: first as u64,
        second: second as u64,
        width: width as u64,
    };
    device.launch(swap_dims(dtype), &args);
    to.reals(dtype)
}

#[test]
fn rows_change_places() {
    for dtype in Dtype::ALL {
        for shape in [[1, 1, 1, 1], [2, 3, 5, 4], [3, 7, 2, 5], [1, 65, 9, 64], [2, 0, 3, 4]] {
            let [batch, first, second, width] = shape;
            let x = values(dtype, batch * first * second * width, 1);
            for offset in [0, 1] {
                let got = on_every_grid(|device| swapped(device, dtype, &x, shape, offset));
                for (row, got) in got.chunks_exact(width).enumerate() {
                    let (b, j, i) = (row / (first * second), row / first % second, row % first);
                    assert_eq!(got, &x[((b * first + i) * second + j) * width..][..width], "{shape:?}");
                }
                let back = swapped(Device::WIDE, dtype, &got, [batch, second, first, width], 0);
                assert_eq!(back, x);
            }
        }
    }
}
