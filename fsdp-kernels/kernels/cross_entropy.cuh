// Cross-entropy of logits against target ids. A row belongs to a block.

namespace fsdp {

struct CrossEntropyArgs {
    const void* logits;  // [rows, vocab]
    const u32* targets;  // [rows]
    f64* losses;         // -log softmax(logits)[target] of each row, for sum_f64
    f32* maxima;         // of each row, for backward
    f32* sums;           // of each row: of exp(logit - max)
    u64 rows;
    u64 vocab;
    i64 ignored;  // rows with this target count for nothing; -1: none
};

// A target that is neither ignored nor below vocab makes the row's loss NaN.
template <class T>
FSDP_DEVICE void cross_entropy(const CrossEntropyArgs& a) {
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const T* logits = static_cast<const T*>(a.logits) + row * a.vocab;
        Softmax mine = NO_LOGITS;
        for_each_by(threadIdx.x, THREADS, a.vocab, packs(logits), [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 logit[N];
            load<N>(logits, at, logit);
            mine = with_logits(mine, logit);
        });
        const Softmax all = team_softmax<THREADS>(mine);
        if (threadIdx.x != 0) continue;
        const u32 target = get(a.targets, row);
        f64 loss = 0.0;
        if (static_cast<i64>(target) != a.ignored) {
            const f32 logit = target < a.vocab ? widen(get(logits, target)) : f32_from_bits(0x7fc00000);
            loss = log(static_cast<f64>(all.sum)) + (static_cast<f64>(all.max) - static_cast<f64>(logit));
        }
        put(a.losses, row, loss);
        put(a.maxima, row, all.max);
        put(a.sums, row, all.sum);
    }
}

struct CrossEntropyBackwardArgs {
    const void* logits;
    const u32* targets;
    const f32* maxima;
    const f32* sums;
    void* dlogits;     // may be logits
    const f32* dloss;  // of the sum of the losses over the divisor; null: 1
    u64 rows;
    u64 vocab;
    i64 ignored;
    f64 divisor;
};

// dlogits = (softmax - one_hot(target)) * dloss / divisor.
template <class T>
FSDP_DEVICE void cross_entropy_backward(const CrossEntropyBackwardArgs& a) {
    const f32 dloss = a.dloss ? get(a.dloss, 0) : 1.0f;
    const f32 scale = static_cast<f32>(static_cast<f64>(dloss) / a.divisor);
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const T* logits = static_cast<const T*>(a.logits) + row * a.vocab;
        T* dlogits = static_cast<T*>(a.dlogits) + row * a.vocab;
        const u32 target = get(a.targets, row);
        const bool ignored = static_cast<i64>(target) == a.ignored;
        const f32 max = get(a.maxima, row), sum = get(a.sums, row);
        const f32 factor = target < a.vocab ? scale / sum : f32_from_bits(0x7fc00000);
        for_each_by(threadIdx.x, THREADS, a.vocab, packs(logits) && packs(dlogits), [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 value[N];
            load<N>(logits, at, value);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) {
                const f32 weight = exp_f32(value[k] - max);
                // At the target 1 is taken away before scaling.
                value[k] = at + k == target ? (weight / sum - 1.0f) * scale : weight * factor;
                if (ignored) value[k] = 0.0f;
            }
            store<N>(dlogits, at, value);
        });
    }
}

FSDP_KERNEL(fsdp_cross_entropy_f32, CrossEntropyArgs, cross_entropy<f32>);
FSDP_KERNEL(fsdp_cross_entropy_bf16, CrossEntropyArgs, cross_entropy<bf16>);
FSDP_KERNEL(fsdp_cross_entropy_f16, CrossEntropyArgs, cross_entropy<f16>);
FSDP_KERNEL(fsdp_cross_entropy_backward_f32, CrossEntropyBackwardArgs, cross_entropy_backward<f32>);
FSDP_KERNEL(fsdp_cross_entropy_backward_bf16, CrossEntropyBackwardArgs, cross_entropy_backward<bf16>);
FSDP_KERNEL(fsdp_cross_entropy_backward_f16, CrossEntropyBackwardArgs, cross_entropy_backward<f16>);

}  // namespace fsdp
