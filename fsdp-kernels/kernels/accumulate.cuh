// Scaled sums into a gradient buffer, and scalings.

namespace fsdp {

struct AccumulateArgs {
    void* acc;
    const void* values;
    u64 len;
    f32 beta;
    f32 scale;
};

// acc = acc * beta + scale * values, in f32, rounded to the dtype of acc. What has factor 0 is not read.
template <class S, class A>
FSDP_DEVICE void accumulate(const AccumulateArgs& a) {
    A* acc = static_cast<A*>(a.acc);
    const S* values = static_cast<const S*>(a.values);
    for_each(a.len, packs(acc) && packs(values), [&](auto n, u64 at) {
        constexpr int N = decltype(n)::value;
        f32 sum[N] = {}, value[N] = {};
        if (a.beta != 0.0f) load<N>(acc, at, sum);
        if (a.scale != 0.0f) load<N>(values, at, value);
        FSDP_UNROLL
        for (int k = 0; k < N; ++k) {
            if (a.beta == 0.0f) {
                sum[k] = a.scale * value[k];
            } else if (a.scale == 0.0f) {
                sum[k] *= a.beta;
            } else {
                sum[k] = sum[k] * a.beta + a.scale * value[k];
            }
        }
        store<N>(acc, at, sum);
    });
}

FSDP_KERNEL(fsdp_accumulate_f32_f32, AccumulateArgs, accumulate<f32, f32>);
FSDP_KERNEL(fsdp_accumulate_f32_bf16, AccumulateArgs, accumulate<f32, bf16>);
FSDP_KERNEL(fsdp_accumulate_f32_f16, AccumulateArgs, accumulate<f32, f16>);
FSDP_KERNEL(fsdp_accumulate_bf16_f32, AccumulateArgs, accumulate<bf16, f32>);
FSDP_KERNEL(fsdp_accumulate_bf16_bf16, AccumulateArgs, accumulate<bf16, bf16>);
FSDP_KERNEL(fsdp_accumulate_bf16_f16, AccumulateArgs, accumulate<bf16, f16>);
FSDP_KERNEL(fsdp_accumulate_f16_f32, AccumulateArgs, accumulate<f16, f32>);
FSDP_KERNEL(fsdp_accumulate_f16_bf16, AccumulateArgs, accumulate<f16, bf16>);
FSDP_KERNEL(fsdp_accumulate_f16_f16, AccumulateArgs, accumulate<f16, f16>);

}  // namespace fsdp
