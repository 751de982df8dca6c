// Rotary position embedding: element i of a head is turned with element i + half.

namespace fsdp {

struct RopeArgs {
    const void* x;   // rows of `heads` heads of 2 * half elements
    void* out;       // may be x, at the same stride
    const f32* cos;  // [positions, half]
    const f32* sin;
    u64 rows;       // row r is at position r % positions
    u64 x_stride;   // elements from row to row
    u64 out_stride;
    u32 positions;
    u32 heads;
    u32 half;
    f32 sign;  // 1 forward, -1 back
};

template <int N, class T>
FSDP_DEVICE void turn(const RopeArgs& a, const T* x, T* out, const f32* cos, const f32* sin, u32 pair) {
    const u32 head = pair / a.half, i = pair % a.half;
    const u64 at = static_cast<u64>(head) * 2 * a.half + i;
    f32 low[N], high[N], c[N], s[N];
    load<N>(x, at, low);
    load<N>(x, at + a.half, high);
    load<N>(cos, i, c);
    load<N>(sin, i, s);
    FSDP_UNROLL
    for (int k = 0; k < N; ++k) {
        const f32 turned = a.sign * s[k];
        const f32 old = low[k];
        low[k] = old * c[k] - high[k] * turned;
        high[k] = high[k] * c[k] + old * turned;
    }
    store<N>(out, at, low);
    store<N>(out, at + a.half, high);
}

// Forward, or backward with the sign of the inverse, which is the transpose.
template <class T>
FSDP_DEVICE void rope(const RopeArgs& a) {
    const u32 pairs = a.heads * a.half;
    for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const u64 position = row % a.positions;
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        T* out = static_cast<T*>(a.out) + row * a.out_stride;
        const f32* cos = a.cos + position * a.half;
        const f32* sin = a.sin + position * a.half;
        if (a.half % PACK == 0 && packs(x) && packs(out) && packs(cos) && packs(sin)) {
            for (u32 pair = threadIdx.x * PACK; pair < pairs; pair += THREADS * PACK) {
                turn<PACK>(a, x, out, cos, sin, pair);
            }
        } else {
            for (u32 pair = threadIdx.x; pair < pairs; pair += THREADS) turn<1>(a, x, out, cos, sin, pair);
        }
    }
}

FSDP_KERNEL(fsdp_rope_f32, RopeArgs, rope<f32>);
FSDP_KERNEL(fsdp_rope_bf16, RopeArgs, rope<bf16>);
FSDP_KERNEL(fsdp_rope_f16, RopeArgs, rope<f16>);

}  // namespace fsdp
