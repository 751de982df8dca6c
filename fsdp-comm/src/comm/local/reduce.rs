//! The arithmetic of reductions: a sum over ranks, in rank order, in f32.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::Arch;

use crate::comm::Accumulate;
use crate::device::{Element, Slice};
use crate::spec::Dtype;

/// Elements summed at a time: the accumulator and one chunk of each source stay in the first-level cache.
const CHUNK: usize = 4096;

/// `dst (+)= scale * (sources[0] + sources[1] + ..)`, summed in this order in f32, rounded once to the dtype
/// of `dst`. `dst` may be one of the sources.
///
/// # Safety
/// All slices have the same length, the sources one dtype, and that of `dst` is the same or f32.
/// While the call runs no one writes the sources, and no one else reads or writes `dst`. `dst` is one of the
/// sources or overlaps none.
pub(in crate::comm) unsafe fn sum_into(sources: &[Slice], dst: &Slice, scale: f32, accumulate: Accumulate) {
    let Some(first) = sources.first() else { return };
    // SAFETY: the caller's promises are those of `sum_typed`; the types are matched to the dtypes here.
    unsafe {
        match (first.dtype(), dst.dtype()) {
            (Dtype::F32, _) => sum_typed::<f32, f32>(sources, dst, scale, accumulate),
            (Dtype::BF16, Dtype::F32) => sum_typed::<bf16, f32>(sources, dst, scale, accumulate),
            (Dtype::BF16, _) => sum_typed::<bf16, bf16>(sources, dst, scale, accumulate),
            (Dtype::F16, Dtype::F32) => sum_typed::<f16, f32>(sources, dst, scale, accumulate),
            (Dtype::F16, _) => sum_typed::<f16, f16>(sources, dst, scale, accumulate),
        }
    }
}

/// # Safety
/// As for [`sum_into`].
unsafe fn sum_typed<S: Real, D: Real>(sources: &[Slice], dst: &Slice, scale: f32, accumulate: Accumulate) {
    let arch = Arch::new();
    let mut sum = [0f32; CHUNK];
    for start in (0..dst.len()).step_by(CHUNK) {
        let len = CHUNK.min(dst.len() - start);
        let sum = &mut sum[..len];
        for (i, source) in sources.iter().enumerate() {
            // SAFETY: no writer by the caller's promise, and this call's own write to `dst` comes after the
            // reference is gone.
            let chunk = unsafe { source.part_as_slice::<S>(start..start + len) };
            match i {
                0 => S::widen(arch, chunk, sum),
                _ => S::add(arch, chunk, sum),
            }
        }
        // SAFETY: exclusive by the caller's promise, and no reference to the sources lives here.
        let out = unsafe { dst.part_as_mut_slice::<D>(start..start + len) };
        match accumulate {
            Accumulate::Overwrite => D::store(arch, sum, scale, out),
            Accumulate::Add => D::store_added(arch, sum, scale, out),
        }
    }
}

/// A dtype that sums are read from and stored to, through f32. Slices of one call have one length.
trait Real: Element {
    /// `sum = x`.
    fn widen(arch: Arch, x: &[Self], sum: &mut [f32]);
    /// `sum += x`.
    fn add(arch: Arch, x: &[Self], sum: &mut [f32]);
    /// `out = sum * scale`; destroys `sum`.
    fn store(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [Self]);
    /// `out += sum * scale`; destroys `sum`.
    fn store_added(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [Self]);
}

impl Real for f32 {
    fn widen(_: Arch, x: &[f32], sum: &mut [f32]) {
        sum.copy_from_slice(x);
    }

    fn add(arch: Arch, x: &[f32], sum: &mut [f32]) {
        arch.dispatch(|| {
            for (sum, x) in sum.iter_mut().zip(x) {
                *sum += *x;
            }
        });
    }

    fn store(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [f32]) {
        arch.dispatch(|| {
            for (out, sum) in out.iter_mut().zip(sum) {
                *out = *sum * scale;
            }
        });
    }

    fn store_added(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [f32]) {
        arch.dispatch(|| {
            for (out, sum) in out.iter_mut().zip(sum) {
                *out += *sum * scale;
            }
        });
    }
}

/// Exact: a bf16 is the upper half of an f32.
#[inline(always)]
fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Round to nearest, ties to even; a NaN stays one. Equal to `bf16::from_f32`, without its branches, so that
/// loops over it become vector code.
#[inline(always)]
fn to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded } as u16)
}

impl Real for bf16 {
    fn widen(arch: Arch, x: &[bf16], sum: &mut [f32]) {
        arch.dispatch(|| {
            for (sum, x) in sum.iter_mut().zip(x) {
                *sum = from_bf16(*x);
            }
        });
    }

    fn add(arch: Arch, x: &[bf16], sum: &mut [f32]) {
        arch.dispatch(|| {
            for (sum, x) in sum.iter_mut().zip(x) {
                *sum += from_bf16(*x);
            }
        });
    }

    fn store(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [bf16]) {
        arch.dispatch(|| {
            for (out, sum) in out.iter_mut().zip(sum) {
                *out = to_bf16(*sum * scale);
            }
        });
    }

    fn store_added(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [bf16]) {
        arch.dispatch(|| {
            for (out, sum) in out.iter_mut().zip(sum) {
                *out = to_bf16(from_bf16(*out) + *sum * scale);
            }
        });
    }
}

/// Conversions of f16 are those of `half`, which uses the processor's where it has them.
impl Real for f16 {
    fn widen(_: Arch, x: &[f16], sum: &mut [f32]) {
        x.convert_to_f32_slice(sum);
    }

    fn add(arch: Arch, x: &[f16], sum: &mut [f32]) {
        let mut wide = [0f32; CHUNK];
        let wide = &mut wide[..x.len()];
        x.convert_to_f32_slice(wide);
        f32::add(arch, wide, sum);
    }

    fn store(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [f16]) {
        arch.dispatch(|| {
            for sum in sum.iter_mut() {
                *sum *= scale;
            }
        });
        out.convert_from_f32_slice(sum);
    }

    fn store_added(arch: Arch, sum: &mut [f32], scale: f32, out: &mut [f16]) {
        let mut wide = [0f32; CHUNK];
        let wide = &mut wide[..out.len()];
        out.convert_to_f32_slice(wide);
        f32::store_added(arch, sum, scale, wide);
        out.convert_from_f32_slice(wide);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        let edges =
            [0f32, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-45];
        let signalling = [0x7f80_0001u32, 0xff80_0001, 0x7fff_ffff, 0x7f7f_8000, 0x3f80_8000, 0x3f81_8000];
        let spread = (0..100_000u32).map(|i| i.wrapping_mul(0x9e37_79b9));
        for x in edges.into_iter().chain(signalling.into_iter().chain(spread).map(f32::from_bits)) {
            assert_eq!(to_bf16(x).to_bits(), bf16::from_f32(x).to_bits(), "{:08x}", x.to_bits());
        }
    }

    fn slice<T: Element>(values: impl IntoIterator<Item = T>) -> Slice {
        let values: Vec<T> = values.into_iter().collect();
        // SAFETY: the tests use it in their own thread, once at a time.
        let slice = unsafe { Slice::zeros(T::DTYPE, values.len(), None) };
        // SAFETY: the buffer is new and known to this thread only.
        unsafe { slice.as_mut_slice::<T>() }.copy_from_slice(&values);
        slice
    }

    fn values<T: Element>(slice: &Slice) -> Vec<T> {
        // SAFETY: the buffer is known to this thread only.
        unsafe { slice.as_slice::<T>() }.to_vec()
    }

    /// A length beyond two chunks with a rest that fills no vector.
    const LEN: usize = 2 * CHUNK + 13;

    fn x(rank: usize, i: usize) -> f32 {
        ((i * 7 + rank * 13) % 101) as f32 / 7.0 - 5.0
    }

    #[test]
    fn sums_are_in_order_and_scaled_once() {
        let sources: Vec<Slice> = (0..3).map(|rank| slice((0..LEN).map(|i| x(rank, i)))).collect();
        let expected: Vec<f32> = (0..LEN).map(|i| (x(0, i) + x(1, i) + x(2, i)) * 0.3).collect();
        let dst = slice((0..LEN).map(|i| i as f32));
        // SAFETY: one length and dtype; this thread alone knows the buffers.
        unsafe { sum_into(&sources, &dst, 0.3, Accumulate::Overwrite) };
        assert_eq!(values::<f32>(&dst), expected);
        // SAFETY: as above.
        unsafe { sum_into(&sources, &dst, 0.3, Accumulate::Add) };
        let twice: Vec<f32> = expected.iter().map(|x| x + x).collect();
        assert_eq!(values::<f32>(&dst), twice);
        // SAFETY: as above; `dst` is one of the sources.
        unsafe { sum_into(&sources, &sources[1], 0.3, Accumulate::Overwrite) };
        assert_eq!(values::<f32>(&sources[1]), expected);
    }

    macro_rules! narrow {
        ($name:ident, $type:ty) => {
            #[test]
            fn $name() {
                let narrow = |x: f32| <$type>::from_f32(x);
                let wide = |rank, i| narrow(x(rank, i)).to_f32();
                let sources: Vec<Slice> =
                    (0..2).map(|rank| slice((0..LEN).map(|i| narrow(x(rank, i))))).collect();
                let sum = |i| (wide(0, i) + wide(1, i)) * 0.5;
                let (same, f32s) = (slice((0..LEN).map(|_| narrow(1.5))), slice((0..LEN).map(|_| 1.5f32)));
                for dst in [&same, &f32s] {
                    // SAFETY: one length; dtypes as promised; this thread alone knows the buffers.
                    unsafe { sum_into(&sources, dst, 0.5, Accumulate::Add) };
                }
                let expected: Vec<$type> = (0..LEN).map(|i| narrow(1.5 + sum(i))).collect();
                assert_eq!(values::<$type>(&same), expected);
                assert_eq!(values::<f32>(&f32s), (0..LEN).map(|i| 1.5 + sum(i)).collect::<Vec<_>>());
                for dst in [&same, &f32s] {
                    // SAFETY: as above.
                    unsafe { sum_into(&sources, dst, 0.5, Accumulate::Overwrite) };
                }
                assert_eq!(values::<$type>(&same), (0..LEN).map(|i| narrow(sum(i))).collect::<Vec<_>>());
                assert_eq!(values::<f32>(&f32s), (0..LEN).map(sum).collect::<Vec<_>>());
            }
        };
    }

    narrow!(bf16_sums_in_f32_and_rounds_once, bf16);
    narrow!(f16_sums_in_f32_and_rounds_once, f16);
}
