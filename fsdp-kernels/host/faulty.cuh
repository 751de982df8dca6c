// Kernels with one mistake each, which the emulation must find (tests/kernels/emulation.rs).

namespace faulty {

using fsdp::f32;
using fsdp::get;
using fsdp::put;
using fsdp::THREADS;
using fsdp::u32;
using fsdp::u64;

struct Args {
    f32* values;
    u64 len;
};

FSDP_DEVICE u64 global_thread() { return static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x; }

// None: reverses each block's values through shared memory.
FSDP_DEVICE void right(const Args& a) {
    FSDP_SHARED(f32, tile, THREADS);
    tile[threadIdx.x] = get(a.values, global_thread());
    __syncthreads();
    put(a.values, global_thread(), static_cast<f32>(tile[THREADS - 1 - threadIdx.x]));
}

FSDP_DEVICE void no_barrier(const Args& a) {
    FSDP_SHARED(f32, tile, THREADS);
    tile[threadIdx.x] = get(a.values, global_thread());
    put(a.values, global_thread(), static_cast<f32>(tile[THREADS - 1 - threadIdx.x]));
}

FSDP_DEVICE void no_second_barrier(const Args& a) {
    FSDP_SHARED(f32, tile, THREADS);
    for (int turn = 0; turn < 2; ++turn) {
        tile[threadIdx.x] = get(a.values, global_thread());
        __syncthreads();
        put(a.values, global_thread(), static_cast<f32>(tile[THREADS - 1 - threadIdx.x]));
    }
}

FSDP_DEVICE void no_first_write(const Args& a) {
    FSDP_SHARED(f32, tile, THREADS);
    put(a.values, global_thread(), static_cast<f32>(tile[threadIdx.x]));
}

FSDP_DEVICE void shared_too_small(const Args&) {
    FSDP_SHARED(f32, tile, THREADS - 1);
    tile[threadIdx.x] = 0.0f;
}

FSDP_DEVICE void dynamic_shared_too_small(const Args&) {
    FSDP_DYNAMIC_SHARED(f32, tile);
    tile[threadIdx.x] = 0.0f;
}

FSDP_DEVICE void barrier_for_some(const Args& a) {
    if (global_thread() >= a.len) return;
    __syncthreads();
}

FSDP_DEVICE void barriers_apart(const Args&) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

FSDP_DEVICE void shuffle_of_some(const Args& a) {
    if (global_thread() < a.len) put(a.values, global_thread(), __shfl_xor_sync(fsdp::ALL_LANES, 1.0f, 1));
}

FSDP_DEVICE void past_the_end(const Args& a) { put(a.values, global_thread(), 0.0f); }

FSDP_DEVICE void misaligned_pack(const Args& a) {
    f32 pack[4] = {};
    if (global_thread() == 0) fsdp::store<4>(a.values, 1, pack);
}

FSDP_DEVICE void threads_share_an_element(const Args& a) { put(a.values, threadIdx.x / 2, 0.0f); }

FSDP_DEVICE void blocks_share_an_element(const Args& a) {
    if (threadIdx.x == 0) put(a.values, 0, 0.0f);
}

FSDP_DEVICE void reads_its_neighbours_result(const Args& a) {
    if (threadIdx.x == 0) put(a.values, blockIdx.x, get(a.values, (blockIdx.x + 1) % gridDim.x));
}

FSDP_KERNEL(faulty_right, Args, right);
FSDP_KERNEL(faulty_no_barrier, Args, no_barrier);
FSDP_KERNEL(faulty_no_second_barrier, Args, no_second_barrier);
FSDP_KERNEL(faulty_no_first_write, Args, no_first_write);
FSDP_KERNEL(faulty_shared_too_small, Args, shared_too_small);
FSDP_KERNEL(faulty_dynamic_shared_too_small, Args, dynamic_shared_too_small);
FSDP_KERNEL(faulty_barrier_for_some, Args, barrier_for_some);
FSDP_KERNEL(faulty_barriers_apart, Args, barriers_apart);
FSDP_KERNEL(faulty_shuffle_of_some, Args, shuffle_of_some);
FSDP_KERNEL(faulty_past_the_end, Args, past_the_end);
FSDP_KERNEL(faulty_misaligned_pack, Args, misaligned_pack);
FSDP_KERNEL(faulty_threads_share_an_element, Args, threads_share_an_element);
FSDP_KERNEL(faulty_blocks_share_an_element, Args, blocks_share_an_element);
FSDP_KERNEL(faulty_reads_its_neighbours_result, Args, reads_its_neighbours_result);

}  // namespace faulty
