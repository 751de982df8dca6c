// The sum of a reduction among ranks that share one device, with the arithmetic of
// fsdp-runtime/src/comm/local/reduce.rs: the same bits.

namespace fsdp {

constexpr u32 MAX_RANKS = 64;

struct SumRanksArgs {
    const void* sources[MAX_RANKS];  // in rank order
    void* out;                       // one of the sources, or apart from all
    u64 len;
    u32 count;
    u32 add;  // 1: out += scale * sum; 0: out = scale * sum
    f32 scale;
};

// out (+)= scale * (sources[0] + sources[1] + ..), summed in this order in f32, rounded once.
template <class S, class D>
FSDP_DEVICE void sum_ranks(const SumRanksArgs& a) {
    D* out = static_cast<D*>(a.out);
    bool packed = packs(out);
    for (u32 rank = 0; rank < a.count; ++rank) packed = packed && packs(static_cast<const S*>(a.sources[rank]));
    for_each(a.len, packed, [&](auto n, u64 at) {
        constexpr int N = decltype(n)::value;
        f32 sum[N], value[N];
        load<N>(static_cast<const S*>(a.sources[0]), at, sum);
        for (u32 rank = 1; rank < a.count; ++rank) {
            load<N>(static_cast<const S*>(a.sources[rank]), at, value);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) sum[k] += value[k];
        }
        if (a.add) load<N>(out, at, value);
        FSDP_UNROLL
        for (int k = 0; k < N; ++k) sum[k] = a.add ? value[k] + sum[k] * a.scale : sum[k] * a.scale;
        store<N>(out, at, sum);
    });
}

FSDP_KERNEL(fsdp_sum_ranks_f32_f32, SumRanksArgs, sum_ranks<f32, f32>);
FSDP_KERNEL(fsdp_sum_ranks_bf16_f32, SumRanksArgs, sum_ranks<bf16, f32>);
FSDP_KERNEL(fsdp_sum_ranks_bf16_bf16, SumRanksArgs, sum_ranks<bf16, bf16>);
FSDP_KERNEL(fsdp_sum_ranks_f16_f32, SumRanksArgs, sum_ranks<f16, f32>);
FSDP_KERNEL(fsdp_sum_ranks_f16_f16, SumRanksArgs, sum_ranks<f16, f16>);

}  // namespace fsdp
