// Sums over the threads of a team, which is a warp or a block. Every thread gets the same bits: lanes are added as a
// butterfly, which is symmetric, and warps in their order.

namespace fsdp {

constexpr u32 WARPS = THREADS / WARP;

template <class T>
FSDP_DEVICE T warp_sum(T value) {
    FSDP_UNROLL
    for (int distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// All threads of the block must call it.
template <class T>
FSDP_DEVICE T block_sum(T value) {
    FSDP_SHARED(T, sums, WARPS);
    value = warp_sum(value);
    __syncthreads();  // the last call's readers are done
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    T total = sums[0];
    FSDP_UNROLL
    for (u32 warp = 1; warp < WARPS; ++warp) total += sums[warp];
    return total;
}

// TEAM is WARP or THREADS; all threads of the block must call it.
template <u32 TEAM, class T>
FSDP_DEVICE T team_sum(T value) {
    if constexpr (TEAM == WARP) {
        return warp_sum(value);
    } else {
        return block_sum(value);
    }
}

}  // namespace fsdp
