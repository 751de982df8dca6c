// Root-mean-square normalisation. A row belongs to a team: a warp up to TEAM_WIDTH elements, else a block.

namespace fsdp {

constexpr u64 TEAM_WIDTH = 1024;

// Rows whose weight gradients are summed by one team, one after the other. Part of the result's definition.
constexpr u64 NORM_ROWS = 32;

struct RmsNormArgs {
    const void* x;       // [rows, width]
    const void* weight;  // [width]
    void* y;
    f32* scales;  // 1 / sqrt(mean(x^2) + eps) of each row, for backward
    u64 rows;
    u64 width;
    f32 eps;
};

template <class T, u32 TEAM>
FSDP_DEVICE void rms_norm_by(const RmsNormArgs& a) {
    constexpr u64 TEAMS = THREADS / TEAM;
    const u32 team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    const T* weight = static_cast<const T*>(a.weight);
    const bool aligned = a.width % PACK == 0 && packs(weight);
    // The count of turns is the block's, so that its threads meet in every sum.
    for (u64 turn = blockIdx.x * TEAMS; turn < a.rows; turn += gridDim.x * TEAMS) {
        const u64 row = turn + team;
        const u64 width = row < a.rows ? a.width : 0;
        const T* x = static_cast<const T*>(a.x) + row * a.width;
        T* y = static_cast<T*>(a.y) + row * a.width;
        const bool packed = aligned && packs(x) && packs(y);
        f32 squares = 0.0f;
        for_each_by(member, TEAM, width, packed, [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 value[N];
            load<N>(x, at, value);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) squares += value[k] * value[k];
        });
        squares = team_sum<TEAM>(squares);
        const f32 scale = 1.0f / sqrtf(squares / static_cast<f32>(a.width) + a.eps);
        for_each_by(member, TEAM, width, packed, [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 value[N], w[N];
            load<N>(x, at, value);
            load<N>(weight, at, w);
            FSDP_UNROLL
            for (int k = 0; k < N; ++k) value[k] = w[k] * rounded<T>(value[k] * scale);
            store<N>(y, at, value);
        });
        if (width != 0 && member == 0) put(a.scales, row, scale);
    }
}

// y = weight * round(x * scale): the normalised value is rounded to T before it is multiplied, as in the CPU op.
template <class T>
FSDP_DEVICE void rms_norm(const RmsNormArgs& a) {
    if (a.width <= TEAM_WIDTH) {
        rms_norm_by<T, WARP>(a);
    } else {
        rms_norm_by<T, THREADS>(a);
    }
}

struct RmsNormBackwardArgs {
    const void* x;
    const void* weight;
    const void* dy;
    const f32* scales;
    void* dx;       // may be dy, or null
    f32* partials;  // [ceil(rows / NORM_ROWS), width], for column_sums, or null
    u64 rows;
    u64 width;
    u32 in_shared;  // 1: the block has shared memory for width f32s a team
};

template <class T, u32 TEAM>
FSDP_DEVICE void rms_norm_backward_by(const RmsNormBackwardArgs& a) {
    FSDP_DYNAMIC_SHARED(f32, sums);
    constexpr u64 TEAMS = THREADS / TEAM;
    const u32 team = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    const T* weight = static_cast<const T*>(a.weight);
    const bool aligned = a.width % PACK == 0 && packs(weight);
    const u64 chunks = (a.rows + NORM_ROWS - 1) / NORM_ROWS;
    for (u64 turn = blockIdx.x * TEAMS; turn < chunks; turn += gridDim.x * TEAMS) {
        const u64 chunk = turn + team;
        f32* partial = a.partials + chunk * a.width;
        for (u64 row = chunk * NORM_ROWS; row < (chunk + 1) * NORM_ROWS; ++row) {
            const u64 width = row < a.rows ? a.width : 0;
            const bool first = row == chunk * NORM_ROWS, last = row + 1 == (chunk + 1) * NORM_ROWS || row + 1 == a.rows;
            const T* x = static_cast<const T*>(a.x) + row * a.width;
            const T* dy = static_cast<const T*>(a.dy) + row * a.width;
            T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.width : nullptr;
            const bool packed = aligned && packs(x) && packs(dy) && packs(dx) && packs(a.partials);
            f32 product = 0.0f;
            for_each_by(member, TEAM, width, packed, [&](auto n, u64 at) {
                constexpr int N = decltype(n)::value;
                f32 value[N], grad[N], w[N];
                load<N>(x, at, value);
                load<N>(dy, at, grad);
                load<N>(weight, at, w);
                FSDP_UNROLL
                for (int k = 0; k < N; ++k) product += grad[k] * w[k] * value[k];
            });
            // With n = x scale: dx = scale (dn - n mean(dn n)), dn = dy weight.
            const f32 scale = width != 0 ? get(a.scales, row) : 0.0f;
            const f32 mean = team_sum<TEAM>(product) * scale / static_cast<f32>(a.width);
            for_each_by(member, TEAM, width, packed, [&](auto n, u64 at) {
                constexpr int N = decltype(n)::value;
                f32 value[N], grad[N], w[N];
                load<N>(x, at, value);
                load<N>(dy, at, grad);
                load<N>(weight, at, w);
                if (a.partials) {
                    // A column of the team belongs to one thread, in every row.
                    const u64 slot = team * a.width + at;
                    f32 sum[N] = {};
                    if (!first && !a.in_shared) load<N>(partial, at, sum);
                    FSDP_UNROLL
                    for (int k = 0; k < N; ++k) {
                        if (!first && a.in_shared) sum[k] = sums[slot + k];
                        sum[k] += grad[k] * rounded<T>(value[k] * scale);
                        if (!last && a.in_shared) sums[slot + k] = sum[k];
                    }
                    if (last || !a.in_shared) store<N>(partial, at, sum);
                }
                if (dx) {
                    FSDP_UNROLL
                    for (int k = 0; k < N; ++k) {
                        const f32 normal = value[k] * scale;
                        grad[k] = scale * (grad[k] * w[k] - normal * mean);
                    }
                    store<N>(dx, at, grad);
                }
            });
        }
    }
}

// dx, and for each NORM_ROWS rows the sum of dy * round(x * scale), in row order.
template <class T>
FSDP_DEVICE void rms_norm_backward(const RmsNormBackwardArgs& a) {
    if (a.width <= TEAM_WIDTH) {
        rms_norm_backward_by<T, WARP>(a);
    } else {
        rms_norm_backward_by<T, THREADS>(a);
    }
}

struct ColumnSumsArgs {
    const f32* values;  // [rows, width]
    void* out;          // [width]
    u64 rows;
    u64 width;
    u32 add;  // 1: out += sum; 0: out = sum
};

// The sum of each column, in f32: row group g of COLUMN_GROUPS adds up rows g, g + COLUMN_GROUPS, .., then the groups
// are added in their order.
constexpr u32 COLUMN_GROUPS = THREADS / WARP;

template <class T>
FSDP_DEVICE void column_sums(const ColumnSumsArgs& a) {
    FSDP_SHARED(f32, sums, THREADS);
    T* out = static_cast<T*>(a.out);
    const u32 lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    for (u64 begin = static_cast<u64>(blockIdx.x) * WARP; begin < a.width; begin += gridDim.x * u64{WARP}) {
        const u64 column = begin + lane;
        f32 sum = 0.0f;
        if (column < a.width) {
            for (u64 row = group; row < a.rows; row += COLUMN_GROUPS) sum += get(a.values, row * a.width + column);
        }
        __syncthreads();  // the last turn's readers are done
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (group == 0 && column < a.width) {
            for (u32 other = 1; other < COLUMN_GROUPS; ++other) sum += sums[other * WARP + lane];
            put(out, column, narrow<T>(a.add ? widen(get(out, column)) + sum : sum));
        }
    }
}

FSDP_KERNEL(fsdp_rms_norm_f32, RmsNormArgs, rms_norm<f32>);
FSDP_KERNEL(fsdp_rms_norm_bf16, RmsNormArgs, rms_norm<bf16>);
FSDP_KERNEL(fsdp_rms_norm_f16, RmsNormArgs, rms_norm<f16>);
FSDP_KERNEL(fsdp_rms_norm_backward_f32, RmsNormBackwardArgs, rms_norm_backward<f32>);
FSDP_KERNEL(fsdp_rms_norm_backward_bf16, RmsNormBackwardArgs, rms_norm_backward<bf16>);
FSDP_KERNEL(fsdp_rms_norm_backward_f16, RmsNormBackwardArgs, rms_norm_backward<f16>);
FSDP_KERNEL(fsdp_column_sums_f32, ColumnSumsArgs, column_sums<f32>);
FSDP_KERNEL(fsdp_column_sums_bf16, ColumnSumsArgs, column_sums<bf16>);
FSDP_KERNEL(fsdp_column_sums_f16, ColumnSumsArgs, column_sums<f16>);

}  // namespace fsdp
