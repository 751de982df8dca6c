// Softmax, and the causal one of attention. A row of attention belongs to a team: a warp up to SOFTMAX_WIDTH keys, else a
// block.

namespace fsdp {

// Of some logits: the largest, and the sum of exp(logit - largest).
struct Softmax {
    f32 max;
    f32 sum;
};

// Where the search for the maximum starts: finite, so that a logit of -infinity has weight 0.
constexpr Softmax NO_LOGITS = {-3.40282347e38f, 0.0f};

FSDP_DEVICE Softmax merged(Softmax a, Softmax b) {
    const f32 max = b.max > a.max ? b.max : a.max;
    return Softmax{max, a.sum * exp_f32(a.max - max) + b.sum * exp_f32(b.max - max)};
}

template <int N>
FSDP_DEVICE Softmax with_logits(Softmax some, const f32 (&logit)[N]) {
    f32 max = some.max;
    FSDP_UNROLL
    for (int k = 0; k < N; ++k) max = logit[k] > max ? logit[k] : max;
    f32 sum = some.max == max ? some.sum : some.sum * exp_f32(some.max - max);
    FSDP_UNROLL
    for (int k = 0; k < N; ++k) sum += exp_f32(logit[k] - max);
    return Softmax{max, sum};
}

FSDP_DEVICE Softmax warp_softmax(Softmax value) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        Softmax other;
        other.max = __shfl_xor_sync(ALL_LANES, value.max, distance);
        other.sum = __shfl_xor_sync(ALL_LANES, value.sum, distance);
        value = merged(value, other);
    }
    return value;
}

// Over the team, in the order of the lanes' butterfly and then of the warps: every thread gets the same bits. TEAM is
// WARP or THREADS; all threads of the block must call it.
template <u32 TEAM>
FSDP_DEVICE Softmax team_softmax(Softmax value) {
    value = warp_softmax(value);
    if constexpr (TEAM == THREADS) {
        FSDP_SHARED(f32, maxima, WARPS);
        FSDP_SHARED(f32, sums, WARPS);
        __syncthreads();  // the last row's readers are done
        if (threadIdx.x % WARP == 0) {
            maxima[threadIdx.x / WARP] = value.max;
            sums[threadIdx.x / WARP] = value.sum;
        }
        __syncthreads();
        value = Softmax{maxima[0], sums[0]};
        for (u32 warp = 1; warp < WARPS; ++warp) value = merged(value, Softmax{maxima[warp], sums[warp]});
    }
    return value;
}

constexpr u64 SOFTMAX_WIDTH = 512;

struct CausalSoftmaxArgs {
    const f32* scores;  // [rows, positions]; row r is of query r % positions, which sees keys up to itself
    void* weights;      // [rows, positions], 0 where nothing is seen
    f32* lse;           // the logarithm of the sum of exp(score) of each row, for backward
    u64 rows;
    u64 positions;
};

template <class T, u32 TEAM>
FSDP_DEVICE void causal_softmax_by(const CausalSoftmaxArgs& a) {
    constexpr u64 TEAMS = THREADS / TEAM;
    const u32 team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    // The count of turns is the block's, so that its threads meet in every sum.
    for (u64 turn = blockIdx.x * TEAMS; turn < a.rows; turn += gridDim.x * TEAMS) {
        const u64 row = turn + team;
        const u64 keys = row < a.rows ? a.positions : 0;
        const u64 seen = row < a.rows ? row % a.positions + 1 : 0;
        const f32* scores = a.scores + row * a.positions;
        T* weights = static_cast<T*>(a.weights) + row * a.positions;
        Softmax mine = NO_LOGITS;
        for_each_by(member, TEAM, seen, packs(scores), [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 score[N];
            load<N>(scores, at, score);
            mine = with_logits(mine, score);
        });
        const Softmax all = team_softmax<TEAM>(mine);
        const f32 inverse = 1.0f / all.sum;
        for_each_by(member, TEAM, keys, packs(scores) && packs(weights), [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 value[N] = {};
            if (at < seen) load<N>(scores, at, value);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) value[k] = at + k < seen ? exp_f32(value[k] - all.max) * inverse : 0.0f;
            store<N>(weights, at, value);
        });
        if (keys != 0 && member == 0) put(a.lse, row, all.max + logf(all.sum));
    }
}

// weights = softmax(scores) over the keys that each query sees.
template <class T>
FSDP_DEVICE void causal_softmax(const CausalSoftmaxArgs& a) {
    if (a.positions <= SOFTMAX_WIDTH) {
        causal_softmax_by<T, WARP>(a);
    } else {
        causal_softmax_by<T, THREADS>(a);
    }
}

struct CausalSoftmaxBackwardArgs {
    const f32* scores;    // as in forward
    const f32* lse;       // of forward
    const f32* dweights;  // [rows, positions]
    void* weights;        // [rows, positions]: those of forward again
    void* dscores;        // [rows, positions], 0 where nothing is seen
    u64 rows;
    u64 positions;
    f32 scale;  // of the scores that went into the softmax, in those that dscores is the gradient of
};

template <class T, u32 TEAM>
FSDP_DEVICE void causal_softmax_backward_by(const CausalSoftmaxBackwardArgs& a) {
    constexpr u64 TEAMS = THREADS / TEAM;
    const u32 team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    for (u64 turn = blockIdx.x * TEAMS; turn < a.rows; turn += gridDim.x * TEAMS) {
        const u64 row = turn + team;
        const u64 keys = row < a.rows ? a.positions : 0;
        const u64 seen = row < a.rows ? row % a.positions + 1 : 0;
        const f32* scores = a.scores + row * a.positions;
        const f32* dweights = a.dweights + row * a.positions;
        T* weights = static_cast<T*>(a.weights) + row * a.positions;
        T* dscores = static_cast<T*>(a.dscores) + row * a.positions;
        const bool loads = packs(scores) && packs(dweights);
        const f32 lse = keys != 0 ? get(a.lse, row) : 0.0f;
        f32 product = 0.0f;
        for_each_by(member, TEAM, seen, loads, [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 weight[N], grad[N];
            load<N>(scores, at, weight);
            load<N>(dweights, at, grad);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) product += exp_f32(weight[k] - lse) * grad[k];
        });
        const f32 delta = team_sum<TEAM>(product);
        for_each_by(member, TEAM, keys, loads && packs(weights) && packs(dscores), [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 weight[N] = {}, grad[N] = {};
            if (at < seen) {
                load<N>(scores, at, weight);
                load<N>(dweights, at, grad);
            }
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) {
                weight[k] = at + k < seen ? exp_f32(weight[k] - lse) : 0.0f;
                grad[k] = at + k < seen ? weight[k] * (grad[k] - delta) * a.scale : 0.0f;
            }
            store<N>(weights, at, weight);
            store<N>(dscores, at, grad);
        });
    }
}

// The weights again, and dscores = weights * (dweights - sum(weights * dweights)) * scale.
template <class T>
FSDP_DEVICE void causal_softmax_backward(const CausalSoftmaxBackwardArgs& a) {
    if (a.positions <= SOFTMAX_WIDTH) {
        causal_softmax_backward_by<T, WARP>(a);
    } else {
        causal_softmax_backward_by<T, THREADS>(a);
    }
}

FSDP_KERNEL(fsdp_causal_softmax_f32, CausalSoftmaxArgs, causal_softmax<f32>);
FSDP_KERNEL(fsdp_causal_softmax_bf16, CausalSoftmaxArgs, causal_softmax<bf16>);
FSDP_KERNEL(fsdp_causal_softmax_f16, CausalSoftmaxArgs, causal_softmax<f16>);
FSDP_KERNEL(fsdp_causal_softmax_backward_f32, CausalSoftmaxBackwardArgs, causal_softmax_backward<f32>);
FSDP_KERNEL(fsdp_causal_softmax_backward_bf16, CausalSoftmaxBackwardArgs, causal_softmax_backward<bf16>);
FSDP_KERNEL(fsdp_causal_softmax_backward_f16, CausalSoftmaxBackwardArgs, causal_softmax_backward<f16>);

}  // namespace fsdp
