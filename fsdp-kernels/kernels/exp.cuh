// The exponential of the CPU ops (fsdp-models/src/ops/exp.rs), operation by operation: the same bits.

namespace fsdp {

// 2^n for n in -126..=127.
FSDP_DEVICE f32 power_of_two(int n) { return f32_from_bits((static_cast<u32>(n) + 127) << 23); }

// e^x to within 2 units in the last place, subnormal results included: 0 from -104 down, infinity from 89 up, NaN for
// NaN. Cody-Waite reduction x = n ln 2 + r, a minimax polynomial for e^r, and 2^n in two factors.
FSDP_DEVICE f32 exp_f32(f32 x) {
    // Added and taken away again, it rounds to an integer, which is left in the low bits meanwhile.
    const f32 SHIFT = 12582912.0f;
    // The high part of ln 2 has 9 trailing zeros: its product with any n here is exact.
    const f32 LN2_HIGH = 355.0f / 512.0f;
    const f32 LN2_LOW = -2.1219444e-4f;

    const f32 last = x < -104.0f ? 0.0f : 1.0f;
    x = x < -104.0f ? 0.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const f32 shifted = fmaf(x, 1.44269504f, SHIFT);
    const f32 n = shifted - SHIFT;
    const f32 r = fmaf(n, -LN2_LOW, fmaf(n, -LN2_HIGH, x));

    f32 q = 1.3814597e-3f;
    q = fmaf(r, q, 8.368717e-3f);
    q = fmaf(r, q, 4.166839e-2f);
    q = fmaf(r, q, 1.666652e-1f);
    q = fmaf(r, q, 4.9999993e-1f);
    const f32 e = fmaf(r * r, q, r) + 1.0f;

    const int power = static_cast<int>(bits_of(shifted) - bits_of(SHIFT));
    const int half = power >> 1;
    return e * power_of_two(half) * power_of_two(power - half) * last;
}

FSDP_DEVICE f32 sigmoid(f32 x) { return 1.0f / (1.0f + exp_f32(-x)); }

}  // namespace fsdp
