//! The exponential of fsdp-models/src/ops/exp.rs, which the kernels must give bit by bit.

pub fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    let last = if x < -104.0 { 0.0 } else { 1.0 };
    let x = if x < -104.0 { 0.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));

    let q = 1.381_459_7e-3;
    let q = r.mul_add(q, 8.368_717e-3);
    let q = r.mul_add(q, 4.166_839e-2);
    let q = r.mul_add(q, 1.666_652e-1);
    let q = r.mul_add(q, 4.999_999_3e-1);
    let e = (r * r).mul_add(q, r) + 1.0;

    let n = shifted.to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
    let half = n >> 1;
    e * power_of_two(half) * power_of_two(n.wrapping_sub(half)) * last
}

fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
