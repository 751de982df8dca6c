use fsdp_kernels::{
    AccumulateArgs, CastArgs, Dtype, FillArgs, MAX_RANKS, SumRanksArgs, accumulate, cast, fill, sum_ranks,
};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{LENGTHS, assert_close, rounded, values, widened};

fn pairs() -> impl Iterator<Item = (Dtype, Dtype)> {
    Dtype::ALL.into_iter().flat_map(|a| Dtype::ALL.map(|b| (a, b)))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn casts_of_any_length_and_offset() {
    for (from, to) in pairs() {
        for len in LENGTHS {
            for offsets in [(0, 0), (1, 0), (0, 2), (4, 4)] {
                let input = values(from, len, 1);
                let (source, target) = (
                    Buffer::real(from, &input, offsets.0),
                    Buffer::real(to, &vec![f32::NAN; len], offsets.1),
                );
                let args = CastArgs { from: source.at(), to: target.at(), len: len as u64 };
                Device::WIDE.launch(cast(from, to), &args);
                let expected: Vec<f32> = input.iter().map(|&x| rounded(to, x)).collect();
                assert_eq!(target.bits(to), bits(&expected), "{from:?} {to:?} {len} {offsets:?}");
                assert_eq!(source.bits(from), bits(&input));
            }
        }
    }
}

#[test]
fn casts_in_place() {
    for (from, to) in pairs().filter(|(from, to)| from.size() == to.size()) {
        let input = values(from, 1025, 1);
        let result = on_every_grid(|device| {
            let buffer = Buffer::real(from, &input, 0);
            device.launch(cast(from, to), &CastArgs { from: buffer.at(), to: buffer.at(), len: 1025 });
            buffer.bits(to)
        });
        let expected: Vec<f32> = input.iter().map(|&x| rounded(to, x)).collect();
        assert_eq!(result, bits(&expected), "{from:?} {to:?}");
    }
}

#[test]
fn every_narrow_value_is_widened_exactly() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for from in [Dtype::BF16, Dtype::F16] {
        let (source, target) = (Buffer::of(&all, 0), Buffer::of(&vec![0f32; all.len()], 0));
        let args = CastArgs { from: source.at(), to: target.at(), len: all.len() as u64 };
        Device::WIDE.launch(cast(from, Dtype::F32), &args);
        for (&bits, got) in all.iter().zip(target.read::<f32>()) {
            let expected = widened(from, bits);
            // A NaN is one, with any payload.
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{bits:04x}");
        }
    }
}

/// Every rounding case: numbers, ties and their neighbours, subnormals, overflows, infinities, NaNs.
#[test]
fn values_are_narrowed_as_by_half() {
    let mut inputs: Vec<f32> = Vec::new();
    for high in
        (0..=0xffff_u32).step_by(7).chain(0x7f00..=0x7fff).chain(0x3300..=0x3900).chain(0x4770..=0x4790)
    {
        for low in
            [0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xffff]
        {
            inputs.push(f32::from_bits(high << 16 | low));
        }
    }
    for to in [Dtype::BF16, Dtype::F16] {
        let (source, target) = (Buffer::of(&inputs, 0), Buffer::of(&vec![0u16; inputs.len()], 0));
        let args = CastArgs { from: source.at(), to: target.at(), len: inputs.len() as u64 };
        Device::WIDE.launch(cast(Dtype::F32, to), &args);
        for (&input, got) in inputs.iter().zip(target.reals(to)) {
            let expected = rounded(to, input);
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{to:?} of {:08x}: {got} is not {expected}", input.to_bits());
        }
    }
}

#[test]
fn fills() {
    for dtype in Dtype::ALL {
        for len in LENGTHS {
            for (offset, value) in [(0, 0.3), (1, -0.0), (3, f32::NAN), (0, f32::INFINITY)] {
                let buffer = Buffer::real(dtype, &values(dtype, len, 1), offset);
                let args = FillArgs { to: buffer.at(), len: len as u64, value };
                Device::WIDE.launch(fill(dtype), &args);
                let expected = rounded(dtype, value);
                let filled = |got: f32| got.to_bits() == expected.to_bits() || got.is_nan() && value.is_nan();
                assert!(buffer.reals(dtype).into_iter().all(filled), "{dtype:?} {len} {offset} {value}");
            }
        }
    }
}

#[test]
fn accumulations_of_any_length_offset_and_factors() {
    for (from, to) in pairs() {
        for len in LENGTHS {
            for (offsets, (beta, scale)) in [
                ((0, 0), (1.0, 1.0)),
                ((1, 0), (0.9, 0.25)),
                ((0, 3), (0.0, 1.0 / 3.0)),
                ((2, 1), (0.5, 0.0)),
                ((0, 0), (0.0, 0.0)),
            ] {
                let (old, new) = (values(to, len, 1), values(from, len, 2));
                // What is not to be read is poison.
                let held = if beta == 0.0 { vec![f32::NAN; len] } else { old.clone() };
                let acc = Buffer::real(to, &held, offsets.0);
                let added = Buffer::real(from, &new, offsets.1);
                let args = AccumulateArgs {
                    acc: acc.at(),
                    values: if scale == 0.0 { 0 } else { added.at() },
                    len: len as u64,
                    beta,
                    scale,
                };
                Device::WIDE.launch(accumulate(from, to), &args);
                for ((old, new), got) in old.iter().zip(&new).zip(acc.reals(to)) {
                    let (kept, added) = (beta * old, scale * new);
                    let want = f64::from(beta) * f64::from(*old) + f64::from(scale) * f64::from(*new);
                    assert_close(got, want, to, 1.001, 3.0, f64::from(kept.abs() + added.abs()));
                    // The arithmetic that is promised: each product and the sum rounded to f32.
                    assert_eq!(got, rounded(to, kept + added));
                }
            }
        }
    }
}

/// `out (+)= scale * sum` as fsdp-runtime/src/comm/local/reduce.rs has it.
fn expected_sum(sources: &[Vec<f32>], old: &[f32], scale: f32, add: bool, to: Dtype) -> Vec<f32> {
    (0..old.len())
        .map(|i| {
            let sum = sources[1..].iter().fold(sources[0][i], |sum, source| sum + source[i]);
            rounded(to, if add { old[i] + sum * scale } else { sum * scale })
        })
        .collect()
}

#[test]
fn sums_of_ranks_give_the_bits_of_the_cpu_reduction() {
    for (from, to) in pairs() {
        let Some(kernel) = sum_ranks(from, to) else { continue };
        for ranks in [1, 2, 3, 8, MAX_RANKS] {
            let lengths: &[usize] = if ranks == 3 { &LENGTHS } else { &[1027] };
            for &len in lengths {
                for (offset, add) in [(0, false), (0, true), (1, false), (2, true)] {
                    let inputs: Vec<_> = (0..ranks).map(|rank| values(from, len, rank as u32)).collect();
                    let old = values(to, len, 1000);
                    // Only the last one is elsewhere: packs must suit all of them.
                    let buffers: Vec<_> = inputs
                        .iter()
                        .enumerate()
                        .map(|(rank, x)| Buffer::real(from, x, if rank + 1 == ranks { offset } else { 0 }))
                        .collect();
                    let sources: Vec<_> = buffers.iter().map(Buffer::at).collect();
                    let out = Buffer::real(to, &old, 0);
                    let args = SumRanksArgs::new(&sources, out.at(), len as u64, 0.3, add);
                    Device::WIDE.launch(kernel, &args);
                    let expected = expected_sum(&inputs, &old, 0.3, add, to);
                    assert_eq!(out.bits(to), bits(&expected), "{from:?} {to:?} {ranks} {len} {offset} {add}");
                }
            }
        }
    }
}

#[test]
fn sums_of_ranks_in_place_of_one() {
    for dtype in Dtype::ALL {
        let inputs: Vec<_> = (0..4).map(|rank| values(dtype, 1029, rank)).collect();
        let result = on_every_grid(|device| {
            let buffers: Vec<_> = inputs.iter().map(|x| Buffer::real(dtype, x, 0)).collect();
            let sources: Vec<_> = buffers.iter().map(Buffer::at).collect();
            let args = SumRanksArgs::new(&sources, sources[2], 1029, 0.25, false);
            device.launch(sum_ranks(dtype, dtype).expect("there is one for equal dtypes"), &args);
            buffers[2].bits(dtype)
        });
        assert_eq!(result, bits(&expected_sum(&inputs, &inputs[2], 0.25, false, dtype)));
    }
}
