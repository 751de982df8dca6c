use fsdp_kernels::{DropoutArgs, Dtype, dropout};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{rounded, values};

const SCALE: f32 = 1.0 / 0.7;
const THRESHOLD: u32 = (0.3 * u32::MAX as f64) as u32;

fn splitmix64(seed: u64) -> [u64; 2] {
    [1u64, 2].map(|step| {
        let mut z = seed.wrapping_add(step.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// The loop of fsdp-models/src/ops/dropout.rs, with the words of `RandomStream`.
fn expected(dtype: Dtype, x: &[f32], width: usize, key: u64, first_sample: u64) -> Vec<f32> {
    let samples = x.chunks(width.max(1)).zip(first_sample..);
    let dropped = samples.flat_map(|(sample, number)| {
        let mut seed = [0; 32];
        let [a, b] = splitmix64(key);
        let [c, d] = splitmix64(number);
        for (bytes, word) in seed.chunks_exact_mut(8).zip([a, b, c, d]) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let mut words = ChaCha8Rng::from_seed(seed);
        let masked =
            move |x: &f32| if words.next_u32() < THRESHOLD { 0.0 } else { rounded(dtype, x * SCALE) };
        sample.iter().map(masked).collect::<Vec<_>>()
    });
    dropped.collect()
}

fn run(
    device: Device,
    dtype: Dtype,
    x: &[f32],
    width: usize,
    [key, first_sample]: [u64; 2],
    place: Option<usize>,
) -> Vec<f32> {
    let from = Buffer::real(dtype, x, place.unwrap_or(0));
    let elsewhere = Buffer::real(dtype, &vec![7.0; x.len()], place.unwrap_or(0));
    let to = if place.is_some() { &elsewhere } else { &from };
    let args = DropoutArgs {
        x: from.at(),
        y: to.at(),
        samples: (x.len() / width) as u64,
        width: width as u64,
        key,
        first_sample,
        threshold: THRESHOLD,
        scale: SCALE,
    };
    device.launch(dropout(dtype), &args);
    to.reals(dtype)
}

#[test]
fn masks_are_those_of_the_cpu_op() {
    for dtype in Dtype::ALL {
        for (samples, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (3, 64), (2, 1000), (1, 5003)] {
            let x = values(dtype, samples * width, 1);
            for numbers in [[0, 0], [u64::MAX - 3, 1 << 40]] {
                let want = expected(dtype, &x, width, numbers[0], numbers[1]);
                // In place, elsewhere, and where no pack can be.
                for place in [None, Some(0), Some(1)] {
                    assert!(run(Device::WIDE, dtype, &x, width, numbers, place) == want, "{dtype:?} {width}");
                }
            }
        }
    }
}

#[test]
fn does_not_depend_on_the_grid() {
    let x = values(Dtype::BF16, 7 * 3000, 1);
    on_every_grid(|device| run(device, Dtype::BF16, &x, 3000, [3, 4], None));
}
