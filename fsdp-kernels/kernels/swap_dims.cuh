// The two middle dims of four, swapped: positions and heads.

namespace fsdp {

struct SwapDimsArgs {
    const void* from;  // [batch, first, second, width]
    void* to;          // [batch, second, first, width]
    u64 batch;
    u64 first;
    u64 second;
    u64 width;
};

template <class T>
FSDP_DEVICE void swap_dims(const SwapDimsArgs& a) {
    const T* from = static_cast<const T*>(a.from);
    T* to = static_cast<T*>(a.to);
    const bool packed = a.width % PACK == 0 && packs(from) && packs(to);
    const u64 len = a.batch * a.first * a.second * a.width;
    // Packs do not cross rows: the row of their first element is that of all.
    for_each(len, packed, [&](auto n, u64 at) {
        constexpr int N = decltype(n)::value;
        const u64 row = at / a.width, column = at % a.width;
        const u64 second = row % a.second, first = row / a.second % a.first, batch = row / (a.second * a.first);
        f32 value[N];
        load<N>(from, at, value);
        store<N>(to, ((batch * a.second + second) * a.first + first) * a.width + column, value);
    });
}

FSDP_KERNEL(fsdp_swap_dims_f32, SwapDimsArgs, swap_dims<f32>);
FSDP_KERNEL(fsdp_swap_dims_bf16, SwapDimsArgs, swap_dims<bf16>);
FSDP_KERNEL(fsdp_swap_dims_f16, SwapDimsArgs, swap_dims<f16>);

}  // namespace fsdp
