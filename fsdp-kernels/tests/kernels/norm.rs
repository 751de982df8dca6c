use fsdp_kernels::{ClipScaleArgs, Dtype, SquaredNormArgs, SumArgs, clip_scale, squared_norm, sum_f64};
use fsdp_test_support::{assert_close, relative};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{LENGTHS, values, wide};

#[track_caller]
fn close(got: f64, want: f64) {
    assert_close(&got, &want, relative(1e-13), "a sum");
}

fn partials(device: Device, dtype: Dtype, input: &[f32], offset: usize) -> Vec<f64> {
    let count = SquaredNormArgs::partials_for(input.len() as u64) as usize;
    let (source, partials) = (Buffer::real(dtype, input, offset), Buffer::of(&vec![f64::NAN; count], 0));
    let args = SquaredNormArgs { values: source.at(), partials: partials.at(), len: input.len() as u64 };
    device.launch(squared_norm(dtype), &args);
    partials.read()
}

#[test]
fn squares_are_summed_in_f64_whatever_the_alignment() {
    for dtype in Dtype::ALL {
        for len in LENGTHS.into_iter().chain([8191, 8192, 8193, 20_000]) {
            let input = values(dtype, len, 1);
            let sums = partials(Device::WIDE, dtype, &input, 0);
            for (sum, chunk) in sums.iter().zip(input.chunks(8192)) {
                close(*sum, wide(chunk).into_iter().map(|x| x * x).sum());
            }
            for offset in 1..4 {
                assert_eq!(partials(Device::WIDE, dtype, &input, offset), sums, "{dtype:?} {len} {offset}");
            }
        }
    }
}

#[test]
fn squares_neither_overflow_nor_vanish() {
    let input = [f32::MAX, -f32::MAX, f32::MIN_POSITIVE, 1e-45];
    let sums = partials(Device::WIDE, Dtype::F32, &input, 0);
    close(sums[0], 2.0 * f64::from(f32::MAX).powi(2));
    let sums = partials(Device::WIDE, Dtype::F32, &input[3..], 0);
    close(sums[0], f64::from(input[3]).powi(2));
}

#[test]
fn partial_sums_do_not_depend_on_the_grid() {
    let input = values(Dtype::BF16, 50_001, 1);
    on_every_grid(|device| {
        partials(device, Dtype::BF16, &input, 1).into_iter().map(f64::to_bits).collect::<Vec<_>>()
    });
}

fn sum(device: Device, input: &[f64], divisor: f64, wanted: [bool; 2]) -> (f64, f32) {
    let (source, total, rounded) = (Buffer::of(input, 0), Buffer::of(&[-1f64], 0), Buffer::of(&[-1f32], 0));
    let args = SumArgs {
        values: source.at(),
        total: if wanted[0] { total.at() } else { 0 },
        rounded: if wanted[1] { rounded.at() } else { 0 },
        len: input.len() as u64,
        divisor,
    };
    device.launch(sum_f64(), &args);
    (total.read::<f64>()[0], rounded.read::<f32>()[0])
}

#[test]
fn sums_of_any_length() {
    for len in LENGTHS {
        let input = wide(&values(Dtype::F32, len, 1)).into_iter().map(f64::abs).collect::<Vec<_>>();
        let want = input.iter().sum::<f64>() / 3.0;
        let (total, rounded) = on_every_grid(|device| sum(device, &input, 3.0, [true, true]));
        close(total, want);
        assert_eq!(rounded, total as f32);
    }
    assert_eq!(sum(Device::WIDE, &[1.5, 2.0], 1.0, [true, false]), (3.5, -1.0));
    assert_eq!(sum(Device::WIDE, &[1.5, 2.0], 1.0, [false, true]), (-1.0, 3.5));
}

fn clip(squared: f64, max_norm: f64) -> (f64, f32) {
    let (input, norm, scale) = (Buffer::of(&[squared], 0), Buffer::of(&[0f64], 0), Buffer::of(&[0f32], 0));
    let args = ClipScaleArgs { squared_norm: input.at(), norm: norm.at(), scale: scale.at(), max_norm };
    Device::WIDE.launch(clip_scale(), &args);
    (norm.read::<f64>()[0], scale.read::<f32>()[0])
}

#[test]
fn coefficients_clip_and_never_enlarge() {
    assert_eq!(clip(4.0, 1.0), (2.0, (1.0 / (2.0 + 1e-6)) as f32));
    assert_eq!(clip(0.25, 1.0), (0.5, 1.0));
    assert_eq!(clip(0.0, 1.0), (0.0, 1.0));
    assert_eq!(clip(f64::INFINITY, 1.0), (f64::INFINITY, 0.0));
    let (norm, scale) = clip(f64::NAN, 1.0);
    assert!(norm.is_nan() && scale.is_nan());
}
