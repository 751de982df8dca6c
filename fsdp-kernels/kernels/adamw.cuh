// AdamW on flat shards, with the arithmetic of fsdp-runtime/src/optim/adamw.rs: the same bits.

namespace fsdp {

// A run of elements of the shard, and the scalars of its step, rounded once from f64 on the host.
struct AdamWSegment {
    u64 begin;
    u64 len;
    f32 decay;  // 1 - lr * weight_decay, or 1
    f32 beta1;
    f32 one_minus_beta1;
    f32 beta2;
    f32 one_minus_beta2;
    f32 step_size;    // lr / (1 - beta1^t)
    f32 correction2;  // sqrt(1 - beta2^t)
    f32 eps;
};

struct AdamWArgs {
    f32* main;          // main weights, or null: then the model's weights are read and written
    void* model;        // model weights of dtype W, written too, or null
    const void* grads;  // of dtype G
    f32* exp_avg;
    f32* exp_avg_sq;
    const AdamWSegment* segments;  // disjoint; in device memory, so that a captured graph sees each step's
    const f32* grad_scale;         // multiplied into each gradient first; null: `scale` is
    u64 len;                       // of the shard
    u32 segment_count;
    f32 scale;
};

template <class G, class W>
FSDP_DEVICE void adamw(const AdamWArgs& a) {
    const f32 grad_scale = a.grad_scale ? get(a.grad_scale, 0) : a.scale;
    for (u32 index = blockIdx.y; index < a.segment_count; index += gridDim.y) {
        const AdamWSegment s = get(a.segments, index);
        f32* main = a.main ? a.main + s.begin : nullptr;
        W* model = a.model ? static_cast<W*>(a.model) + s.begin : nullptr;
        const G* grads = static_cast<const G*>(a.grads) + s.begin;
        f32* exp_avg = a.exp_avg + s.begin;
        f32* exp_avg_sq = a.exp_avg_sq + s.begin;
        const bool packed = packs(main) && packs(model) && packs(grads) && packs(exp_avg) && packs(exp_avg_sq);
        for_each(s.len, packed, [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 w[N], g[N], m[N], v[N];
            if (main) {
                load<N>(main, at, w);
            } else {
                load<N>(model, at, w);
            }
            load<N>(grads, at, g);
            load<N>(exp_avg, at, m);
            load<N>(exp_avg_sq, at, v);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) {
                const f32 scaled = g[k] * grad_scale;
                m[k] = s.beta1 * m[k] + s.one_minus_beta1 * scaled;
                v[k] = s.beta2 * v[k] + s.one_minus_beta2 * scaled * scaled;
                const f32 denominator = sqrtf(v[k]) / s.correction2 + s.eps;
                w[k] = w[k] * s.decay - s.step_size * m[k] / denominator;
            }
            if (main) store<N>(main, at, w);
            if (model) store<N>(model, at, w);
            store<N>(exp_avg, at, m);
            store<N>(exp_avg_sq, at, v);
        });
    }
}

FSDP_KERNEL(fsdp_adamw_f32_f32, AdamWArgs, adamw<f32, f32>);
FSDP_KERNEL(fsdp_adamw_f32_bf16, AdamWArgs, adamw<f32, bf16>);
FSDP_KERNEL(fsdp_adamw_f32_f16, AdamWArgs, adamw<f32, f16>);
FSDP_KERNEL(fsdp_adamw_bf16_f32, AdamWArgs, adamw<bf16, f32>);
FSDP_KERNEL(fsdp_adamw_bf16_bf16, AdamWArgs, adamw<bf16, bf16>);
FSDP_KERNEL(fsdp_adamw_bf16_f16, AdamWArgs, adamw<bf16, f16>);
FSDP_KERNEL(fsdp_adamw_f16_f32, AdamWArgs, adamw<f16, f32>);
FSDP_KERNEL(fsdp_adamw_f16_bf16, AdamWArgs, adamw<f16, bf16>);
FSDP_KERNEL(fsdp_adamw_f16_f16, AdamWArgs, adamw<f16, f16>);

}  // namespace fsdp
