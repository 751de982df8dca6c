// Casts and fills.

namespace fsdp {

struct CastArgs {
    const void* from;
    void* to;
    u64 len;
};

// to = from, rounded to nearest even.
template <class S, class D>
FSDP_DEVICE void cast(const CastArgs& a) {
    const S* from = static_cast<const S*>(a.from);
    D* to = static_cast<D*>(a.to);
    for_each(a.len, packs(from) && packs(to), [&](auto n, u64 at) {
        constexpr int N = decltype(n)::value;
        f32 values[N];
        load<N>(from, at, values);
        store<N>(to, at, values);
    });
}

struct FillArgs {
    void* to;
    u64 len;
    f32 value;
};

// Every element becomes the value, rounded.
template <class T>
FSDP_DEVICE void fill(const FillArgs& a) {
    T* to = static_cast<T*>(a.to);
    for_each(a.len, packs(to), [&](auto n, u64 at) {
        constexpr int N = decltype(n)::value;
        f32 values[N];
        FSDP_UNROLL
        for (int k = 0; k < N; ++k) values[k] = a.value;
        store<N>(to, at, values);
    });
}

FSDP_KERNEL(fsdp_cast_f32_f32, CastArgs, cast<f32, f32>);
FSDP_KERNEL(fsdp_cast_f32_bf16, CastArgs, cast<f32, bf16>);
FSDP_KERNEL(fsdp_cast_f32_f16, CastArgs, cast<f32, f16>);
FSDP_KERNEL(fsdp_cast_bf16_f32, CastArgs, cast<bf16, f32>);
FSDP_KERNEL(fsdp_cast_bf16_bf16, CastArgs, cast<bf16, bf16>);
FSDP_KERNEL(fsdp_cast_bf16_f16, CastArgs, cast<bf16, f16>);
FSDP_KERNEL(fsdp_cast_f16_f32, CastArgs, cast<f16, f32>);
FSDP_KERNEL(fsdp_cast_f16_bf16, CastArgs, cast<f16, bf16>);
FSDP_KERNEL(fsdp_cast_f16_f16, CastArgs, cast<f16, f16>);

FSDP_KERNEL(fsdp_fill_f32, FillArgs, fill<f32>);
FSDP_KERNEL(fsdp_fill_bf16, FillArgs, fill<bf16>);
FSDP_KERNEL(fsdp_fill_f16, FillArgs, fill<f16>);

}  // namespace fsdp
