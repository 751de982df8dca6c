// The element types, and the only functions that touch global memory.

namespace fsdp {

// bfloat16: the upper half of an f32.
struct bf16 {
    u16 bits;
};

// IEEE binary16.
struct f16 {
    u16 bits;
};

FSDP_DEVICE f32 widen(f32 value) { return value; }
FSDP_DEVICE f32 widen(bf16 value) { return f32_from_bits(static_cast<u32>(value.bits) << 16); }

// Rounds to nearest, ties to even. A NaN becomes the canonical one of its type.
template <class T>
FSDP_DEVICE T narrow(f32 value);

template <>
FSDP_DEVICE f32 narrow<f32>(f32 value) {
    return value;
}

#ifdef FSDP_HOST

template <>
FSDP_DEVICE bf16 narrow<bf16>(f32 value) {
    const u32 bits = bits_of(value);
    if (value != value) return bf16{0x7fff};
    return bf16{static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

FSDP_DEVICE f32 widen(f16 value) {
    const u32 sign = static_cast<u32>(value.bits & 0x8000) << 16;
    const u32 magnitude = value.bits & 0x7fff;
    if (magnitude >= 0x7c00) return f32_from_bits(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
    // The bits as those of an f32 whose exponent is 112 too small; the product is exact, subnormal numbers included.
    return f32_from_bits(sign | bits_of(f32_from_bits(magnitude << 13) * 0x1p112f));
}

template <>
FSDP_DEVICE f16 narrow<f16>(f32 value) {
    const u32 bits = bits_of(value);
    const u16 sign = static_cast<u16>((bits >> 16) & 0x8000);
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return f16{0x7fff};
    // From the midpoint between the largest number and the one that would follow it.
    if (magnitude >= 0x477ff000) return f16{static_cast<u16>(sign | 0x7c00)};
    if (magnitude < 0x38800000) {
        // Subnormal: the sum leaves the value in the low bits, in units of 2^-24, rounded by the adder.
        return f16{static_cast<u16>(sign | (bits_of(f32_from_bits(magnitude) + 0.5f) - bits_of(0.5f)))};
    }
    return f16{static_cast<u16>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13))};
}

#else

template <>
FSDP_DEVICE bf16 narrow<bf16>(f32 value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

FSDP_DEVICE f32 widen(f16 value) {
    f32 result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

template <>
FSDP_DEVICE f16 narrow<f16>(f32 value) {
    f16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

#endif

// The value that is left when `value` is stored as a T.
template <class T>
FSDP_DEVICE f32 rounded(f32 value) {
    return widen(narrow<T>(value));
}

// N elements that are loaded or stored by one instruction.
template <class T, int N>
struct alignas(N * sizeof(T)) Pack {
    T elements[N];
};

// Elements of a pack where the addresses allow one.
constexpr int PACK = 4;

// Whether packs of T can be read from `address` on. A null pointer, which is not read, does not mind.
template <class T>
FSDP_DEVICE bool packs(const T* address) {
    return reinterpret_cast<u64>(address) % (PACK * sizeof(T)) == 0;
}

// A pack to memory. By assembly, because the compiler often takes packs apart again where there are several.
#ifdef FSDP_HOST

template <class T>
FSDP_DEVICE void put_pack(T* to, const Pack<T, PACK>& pack) {
    *reinterpret_cast<Pack<T, PACK>*>(to) = pack;
}

#else

FSDP_DEVICE void put_pack(f32* to, const Pack<f32, 4>& pack) {
    const f32(&e)[4] = pack.elements;
    asm volatile("{ .reg .u64 a; cvta.to.global.u64 a, %0; st.global.v4.f32 [a], {%1, %2, %3, %4}; }"
                 : : "l"(to), "f"(e[0]), "f"(e[1]), "f"(e[2]), "f"(e[3]) : "memory");
}

template <class T>
FSDP_DEVICE void put_pack(T* to, const Pack<T, 4>& pack) {
    const T(&e)[4] = pack.elements;
    asm volatile("{ .reg .u64 a; cvta.to.global.u64 a, %0; st.global.v4.u16 [a], {%1, %2, %3, %4}; }"
                 : : "l"(to), "h"(e[0].bits), "h"(e[1].bits), "h"(e[2].bits), "h"(e[3].bits) : "memory");
}

#endif

// Element `at`, as it is.
template <class T>
FSDP_DEVICE T get(const T* from, u64 at) {
    FSDP_READS(from + at, sizeof(T));
    return from[at];
}

template <class T>
FSDP_DEVICE void put(T* to, u64 at, T value) {
    FSDP_WRITES(to + at, sizeof(T));
    to[at] = value;
}

// Elements `at..at + N`, widened. With N above 1 the address must allow packs of N.
template <int N, class T>
FSDP_DEVICE void load(const T* from, u64 at, f32 (&values)[N]) {
    FSDP_READS(from + at, N * sizeof(T));
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from + at);
    FSDP_UNROLL
    for (int k = 0; k < N; ++k) values[k] = widen(pack.elements[k]);
}

// The values to elements `at..at + N`, rounded.
template <int N, class T>
FSDP_DEVICE void store(T* to, u64 at, const f32 (&values)[N]) {
    FSDP_WRITES(to + at, N * sizeof(T));
    Pack<T, N> pack;
    FSDP_UNROLL
    for (int k = 0; k < N; ++k) pack.elements[k] = narrow<T>(values[k]);
    if constexpr (N == PACK) {
        put_pack(to + at, pack);
    } else {
        static_assert(N == 1, "elements go by packs or alone");
        to[at] = pack.elements[0];
    }
}

// The first `count` of a pack, the others left as they are; `packed` only for a whole one. Indices are constants, so
// that the values stay in registers.
template <class T>
FSDP_DEVICE void load_up_to(const T* from, u64 count, bool packed, f32 (&values)[PACK]) {
    if (packed) {
        load<PACK>(from, 0, values);
        return;
    }
    FSDP_UNROLL
    for (int k = 0; k < PACK; ++k) {
        if (static_cast<u64>(k) < count) values[k] = widen(get(from, k));
    }
}

template <class T>
FSDP_DEVICE void store_up_to(T* to, u64 count, bool packed, const f32 (&values)[PACK]) {
    if (packed) {
        store<PACK>(to, 0, values);
        return;
    }
    FSDP_UNROLL
    for (int k = 0; k < PACK; ++k) {
        if (static_cast<u64>(k) < count) put(to, k, narrow<T>(values[k]));
    }
}

}  // namespace fsdp
