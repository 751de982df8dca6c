// What CUDA and the host emulation spell differently, and the rules that all kernels keep.
//
// - Blocks have THREADS threads; grids have any size: work is dealt out in strides, and no result depends on the
//   number of blocks.
// - A kernel takes one struct by value, which a struct of the same name in src/ mirrors.
// - No floating-point atomics: a sum has one order, written down where it is taken.
// - Global memory is reached through element.cuh, shared memory through FSDP_SHARED: there the emulation looks for
//   accesses out of bounds and for races.
// - Products and sums are compiled apart (--fmad=false); where a fused one is meant, the text says fmaf.
// - No header is included, so that NVRTC needs no include path.

namespace fsdp {

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
typedef double f64;

// Threads of a block, in every kernel.
constexpr u32 THREADS = 256;
constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

#ifdef FSDP_HOST

#define FSDP_DEVICE inline
#define FSDP_UNROLL
#define FSDP_SHARED(T, name, count) static thread_local emulation::Shared<T, count> name(#name)
#define FSDP_DYNAMIC_SHARED(T, name) emulation::DynamicShared<T> name(#name)
// Tells the emulation of an access to global memory.
#define FSDP_READS(address, bytes) emulation::reads(address, bytes)
#define FSDP_WRITES(address, bytes) emulation::writes(address, bytes)
#define FSDP_KERNEL(name, Args, ...)                                                                      \
    static void name(const void* args) { __VA_ARGS__(*static_cast<const Args*>(args)); }                  \
    static const emulation::Registration name##_registration(#name, sizeof(Args), name)

FSDP_DEVICE f32 f32_from_bits(u32 bits) { return __builtin_bit_cast(f32, bits); }
FSDP_DEVICE u32 bits_of(f32 value) { return __builtin_bit_cast(u32, value); }
// Position of the lowest bit that is set; there must be one.
FSDP_DEVICE u32 lowest_bit(u32 bits) { return __builtin_ctz(bits); }

#else

#define FSDP_DEVICE __device__ __forceinline__
#define FSDP_UNROLL _Pragma("unroll")
#define FSDP_SHARED(T, name, count) __shared__ T name[count]
#define FSDP_DYNAMIC_SHARED(T, name) extern __shared__ T name[]
#define FSDP_READS(address, bytes)
#define FSDP_WRITES(address, bytes)
#define FSDP_KERNEL(name, Args, ...)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ Args args) {      \
        __VA_ARGS__(args);                                                                                \
    }

FSDP_DEVICE f32 f32_from_bits(u32 bits) { return __uint_as_float(bits); }
FSDP_DEVICE u32 bits_of(f32 value) { return __float_as_uint(value); }
// Position of the lowest bit that is set; there must be one.
FSDP_DEVICE u32 lowest_bit(u32 bits) { return __ffs(bits) - 1; }

#endif

}  // namespace fsdp
