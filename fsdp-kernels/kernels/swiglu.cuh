// The gated activation of Llama's MLP, with the arithmetic of fsdp-models/src/ops/swiglu.rs: the same bits.

namespace fsdp {

struct SwigluArgs {
    const void* gate;  // [rows, width]
    const void* up;
    void* y;
    u64 rows;
    u64 width;
    u64 in_stride;   // elements from row to row of gate and up: more than width where they are one matrix
    u64 out_stride;  // of y
};

// y = silu(gate) * up.
template <class T>
FSDP_DEVICE void swiglu(const SwigluArgs& a) {
    const T* gate = static_cast<const T*>(a.gate);
    const T* up = static_cast<const T*>(a.up);
    T* y = static_cast<T*>(a.y);
    const bool packed = packs(gate) && packs(up) && packs(y);
    for_each_in_rows(a.rows, a.width, a.in_stride, a.out_stride, packed, [&](auto n, u64 in, u64 out) {
        constexpr int N = decltype(n)::value;
        f32 g[N], u[N];
        load<N>(gate, in, g);
        load<N>(up, in, u);
        FSDP_UNROLL
        for (int k = 0; k < N; ++k) g[k] = g[k] * sigmoid(g[k]) * u[k];
        store<N>(y, out, g);
    });
}

struct SwigluBackwardArgs {
    const void* gate;
    const void* up;
    const void* dy;
    void* dgate;  // may be gate, or null
    void* dup;    // may be up, or null
    u64 rows;
    u64 width;
    u64 in_stride;   // of gate, up, dgate and dup
    u64 out_stride;  // of dy
};

template <class T>
FSDP_DEVICE void swiglu_backward(const SwigluBackwardArgs& a) {
    const T* gate = static_cast<const T*>(a.gate);
    const T* up = static_cast<const T*>(a.up);
    const T* dy = static_cast<const T*>(a.dy);
    T* dgate = static_cast<T*>(a.dgate);
    T* dup = static_cast<T*>(a.dup);
    const bool packed = packs(gate) && packs(up) && packs(dy) && packs(dgate) && packs(dup);
    for_each_in_rows(a.rows, a.width, a.in_stride, a.out_stride, packed, [&](auto n, u64 in, u64 out) {
        constexpr int N = decltype(n)::value;
        f32 g[N], u[N], d[N];
        load<N>(gate, in, g);
        load<N>(up, in, u);
        load<N>(dy, out, d);
        FSDP_UNROLL
        for (int k = 0; k < N; ++k) {
            const f32 s = sigmoid(g[k]);
            const f32 silu = g[k] * s;
            // The derivative of silu: s (1 + gate (1 - s)).
            g[k] = d[k] * u[k] * (silu * (1.0f - s) + s);
            u[k] = d[k] * silu;
        }
        if (dgate) store<N>(dgate, in, g);
        if (dup) store<N>(dup, in, u);
    });
}

FSDP_KERNEL(fsdp_swiglu_f32, SwigluArgs, swiglu<f32>);
FSDP_KERNEL(fsdp_swiglu_bf16, SwigluArgs, swiglu<bf16>);
FSDP_KERNEL(fsdp_swiglu_f16, SwigluArgs, swiglu<f16>);
FSDP_KERNEL(fsdp_swiglu_backward_f32, SwigluBackwardArgs, swiglu_backward<f32>);
FSDP_KERNEL(fsdp_swiglu_backward_bf16, SwigluBackwardArgs, swiglu_backward<bf16>);
FSDP_KERNEL(fsdp_swiglu_backward_f16, SwigluBackwardArgs, swiglu_backward<f16>);

}  // namespace fsdp
