// How element-wise kernels deal out their elements.

namespace fsdp {

// A number of elements as a type, so that a generic lambda can take it.
template <int N>
struct Width {
    static constexpr int value = N;
};

// The elements `0..len` among the threads `first`, `first + 1`, .. `first + step - 1`: calls `f(Width<N>(), at)` for
// `at..at + N`, by packs where `packed`, and one by one for the rest.
template <class F>
FSDP_DEVICE void for_each_by(u64 first, u64 step, u64 len, bool packed, const F& f) {
    const u64 count = packed ? len / PACK : 0;
    for (u64 pack = first; pack < count; pack += step) f(Width<PACK>(), pack * PACK);
    for (u64 at = count * PACK + first; at < len; at += step) f(Width<1>(), at);
}

// The elements `0..len` among all threads of the grid's x dimension.
template <class F>
FSDP_DEVICE void for_each(u64 len, bool packed, const F& f) {
    const u64 first = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x;
    for_each_by(first, static_cast<u64>(gridDim.x) * THREADS, len, packed, f);
}

// The elements of `rows` rows of `width`: calls `f(Width<N>(), a, b)` with where they are in two matrices whose rows
// start `a_stride` and `b_stride` elements apart.
template <class F>
FSDP_DEVICE void for_each_in_rows(u64 rows, u64 width, u64 a_stride, u64 b_stride, bool packed, const F& f) {
    if (a_stride == width && b_stride == width) {
        for_each(rows * width, packed, [&](auto n, u64 at) { f(n, at, at); });
        return;
    }
    packed = packed && a_stride % PACK == 0 && b_stride % PACK == 0;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        for_each_by(threadIdx.x, THREADS, width, packed, [&](auto n, u64 at) {
            f(n, row * a_stride + at, row * b_stride + at);
        });
    }
}

}  // namespace fsdp
