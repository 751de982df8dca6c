// Rows of a table, and its gradient, summed in the order of the positions: the bits of the CPU op.

namespace fsdp {

struct EmbeddingArgs {
    const u32* ids;      // [count]
    const void* weight;  // [vocab, dim]
    void* rows;          // [count, dim]
    u64 dim;
    u64 count;
    u32 vocab;
};

// rows[p] = weight[ids[p]]; NaN for an id that is not below vocab.
template <class T>
FSDP_DEVICE void embedding(const EmbeddingArgs& a) {
    const T* weight = static_cast<const T*>(a.weight);
    T* rows = static_cast<T*>(a.rows);
    const bool packed = a.dim % PACK == 0 && packs(weight) && packs(rows);
    for (u64 position = blockIdx.x; position < a.count; position += gridDim.x) {
        const u32 id = get(a.ids, position);
        for_each_by(threadIdx.x, THREADS, a.dim, packed, [&](auto n, u64 at) {
            constexpr int N = decltype(n)::value;
            f32 value[N];
            if (id < a.vocab) {
                load<N>(weight, id * a.dim + at, value);
            } else {
                FSDP_UNROLL
                for (int k = 0; k < N; ++k) value[k] = f32_from_bits(0x7fc00000);
            }
            store<N>(rows, position * a.dim + at, value);
        });
    }
}

struct EmbeddingSpansArgs {
    const u32* ids;  // [count]
    u32* first;      // [vocab], zero before: then count - position of the id's first occurrence
    u32* end;        // [vocab], zero before: then 1 + position of its last
    u32 count;
    u32 vocab;
};

// Where each id occurs first and last. Maxima of integers: the order of the atomics does not matter.
FSDP_DEVICE void embedding_spans(const EmbeddingSpansArgs& a) {
    for_each(a.count, false, [&](auto, u64 at) {
        const u32 id = get(a.ids, at);
        if (id >= a.vocab) return;
        atomicMax(a.first + id, a.count - static_cast<u32>(at));
        atomicMax(a.end + id, static_cast<u32>(at) + 1);
    });
}

struct EmbeddingBackwardArgs {
    const u32* ids;
    const u32* first;  // of embedding_spans
    const u32* end;
    const void* drows;  // [count, dim]
    f32* dweight;       // [vocab, dim], added to
    u64 dim;
    u32 count;
    u32 vocab;
};

// Columns of a row that a block takes at a time.
constexpr u64 TILE = THREADS * PACK;

// dweight[id] += drows[p] for each position p of the id, in order. An id's block is that of its first position; it
// searches the span for the others, THREADS positions at a time. Ids that are not below vocab have no row.
template <class T>
FSDP_DEVICE void embedding_backward(const EmbeddingBackwardArgs& a) {
    FSDP_SHARED(u32, matches, WARPS);
    const T* drows = static_cast<const T*>(a.drows);
    const bool packed = a.dim % PACK == 0 && packs(drows) && packs(a.dweight);
    for (u64 position = blockIdx.x; position < a.count; position += gridDim.x) {
        const u32 id = get(a.ids, position);
        if (id >= a.vocab || a.count - get(a.first, id) != position) continue;
        const u64 end = get(a.end, id);
        for (u64 tile = blockIdx.y * TILE; tile < a.dim; tile += gridDim.y * TILE) {
            const u64 column = tile + threadIdx.x * PACK;
            const u64 columns = column >= a.dim ? 0 : a.dim - column < PACK ? a.dim - column : PACK;
            f32* row = a.dweight + id * a.dim + column;
            f32 sum[PACK] = {}, grad[PACK] = {};
            const bool whole = packed && columns == PACK;
            load_up_to(row, columns, whole, sum);
            for (u64 begin = position; begin < end; begin += THREADS) {
                const u64 candidate = begin + threadIdx.x;
                const u32 match = __ballot_sync(ALL_LANES, candidate < end && get(a.ids, candidate) == id);
                __syncthreads();  // the last search's readers are done
                if (threadIdx.x % WARP == 0) matches[threadIdx.x / WARP] = match;
                __syncthreads();
                for (u32 warp = 0; warp < WARPS; ++warp) {
                    for (u32 bits = matches[warp]; bits != 0; bits &= bits - 1) {
                        const T* from = drows + (begin + warp * WARP + lowest_bit(bits)) * a.dim + column;
                        load_up_to(from, columns, whole, grad);
                        FSDP_UNROLL
                        for (int k = 0; k < PACK; ++k) sum[k] += grad[k];
                    }
                }
            }
            store_up_to(row, columns, whole, sum);
        }
    }
}

FSDP_KERNEL(fsdp_embedding_f32, EmbeddingArgs, embedding<f32>);
FSDP_KERNEL(fsdp_embedding_bf16, EmbeddingArgs, embedding<bf16>);
FSDP_KERNEL(fsdp_embedding_f16, EmbeddingArgs, embedding<f16>);
FSDP_KERNEL(fsdp_embedding_spans, EmbeddingSpansArgs, embedding_spans);
FSDP_KERNEL(fsdp_embedding_backward_f32, EmbeddingBackwardArgs, embedding_backward<f32>);
FSDP_KERNEL(fsdp_embedding_backward_bf16, EmbeddingBackwardArgs, embedding_backward<bf16>);
FSDP_KERNEL(fsdp_embedding_backward_f16, EmbeddingBackwardArgs, embedding_backward<f16>);

}  // namespace fsdp
