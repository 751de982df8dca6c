// Norms of gradients in two stages, and the coefficient that clips them, without the host.

namespace fsdp {

// Elements behind one partial sum. Part of the result's definition: the order of additions depends on it.
constexpr u64 NORM_CHUNK = 8192;

struct SquaredNormArgs {
    const void* values;
    f64* partials;  // ceil(len / NORM_CHUNK) of them
    u64 len;
};

// partials[c] = the sum of the squares of chunk c, in f64. Within a chunk thread t adds up elements 4t..4t+4,
// 4(t+256).., in this order whatever the alignment; then the threads' sums are added.
template <class T>
FSDP_DEVICE void squared_norm(const SquaredNormArgs& a) {
    const T* values = static_cast<const T*>(a.values);
    const bool packed = packs(values);
    const u64 chunks = (a.len + NORM_CHUNK - 1) / NORM_CHUNK;
    for (u64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const u64 begin = chunk * NORM_CHUNK;
        const u64 end = begin + NORM_CHUNK < a.len ? begin + NORM_CHUNK : a.len;
        f64 sum = 0.0;
        for (u64 at = begin + threadIdx.x * PACK; at < end; at += THREADS * PACK) {
            f32 pack[PACK] = {};
            load_up_to(values + at, end - at, packed && at + PACK <= end, pack);
            FSDP_UNROLL
            for (int k = 0; k < PACK; ++k) sum += static_cast<f64>(pack[k]) * static_cast<f64>(pack[k]);
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) put(a.partials, chunk, sum);
    }
}

struct SumArgs {
    const f64* values;
    f64* total;    // the sum over the divisor, or null
    f32* rounded;  // the same as f32, or null
    u64 len;
    f64 divisor;
};

// The sum of `len` values, by one block: thread t adds up values t, t + 256, ..; then the threads' sums are added.
FSDP_DEVICE void sum_f64(const SumArgs& a) {
    if (blockIdx.x != 0) return;
    f64 sum = 0.0;
    for (u64 at = threadIdx.x; at < a.len; at += THREADS) sum += get(a.values, at);
    sum = block_sum(sum) / a.divisor;
    if (threadIdx.x != 0) return;
    if (a.total) put(a.total, 0, sum);
    if (a.rounded) put(a.rounded, 0, static_cast<f32>(sum));
}

struct ClipScaleArgs {
    const f64* squared_norm;  // of the whole model
    f64* norm;
    f32* scale;
    f64 max_norm;
};

// norm = sqrt(squared_norm); scale = min(1, max_norm / (norm + 1e-6)), NaN if the norm is.
FSDP_DEVICE void clip_scale(const ClipScaleArgs& a) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const f64 norm = sqrt(get(a.squared_norm, 0));
    const f64 scale = a.max_norm / (norm + 1e-6);
    put(a.norm, 0, norm);
    put(a.scale, 0, scale > 1.0 ? 1.0f : static_cast<f32>(scale));
}

FSDP_KERNEL(fsdp_squared_norm_f32, SquaredNormArgs, squared_norm<f32>);
FSDP_KERNEL(fsdp_squared_norm_bf16, SquaredNormArgs, squared_norm<bf16>);
FSDP_KERNEL(fsdp_squared_norm_f16, SquaredNormArgs, squared_norm<f16>);
FSDP_KERNEL(fsdp_sum_f64, SumArgs, sum_f64);
FSDP_KERNEL(fsdp_clip_scale, ClipScaleArgs, clip_scale);

}  // namespace fsdp
