// What CUDA gives a kernel, on the host: built-in variables, barriers, warp exchanges, shared memory.
//
// A thread of CUDA is a fiber of the calling OS thread and runs until a barrier, a warp exchange or its end. Which of
// those that can run is next is drawn from a seeded generator, so that a missing barrier shows as other bits; and each
// access to shared memory, and to global memory where the launch says what there is of it, is checked:
// - out of bounds, misaligned, or to memory that the kernel may only read;
// - a race: two threads of which one writes, without a barrier of their block between them;
// - shared memory read before it is written;
// - a barrier or exchange that not all threads of the block or warp reach, at one place in the text.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulation {

using ::std::size_t;

struct Index {
    unsigned x, y, z;
};

extern thread_local Index thread_index, block_index, block_size, grid_size;

// A kernel that can be launched by name.
struct Registration {
    const char* name;
    size_t args_size;
    void (*run)(const void* args);
    const Registration* next;

    Registration(const char* name, size_t args_size, void (*run)(const void*));
};

// The last one. Defined beside the kernels, so that a linker that wants it takes them.
extern const Registration* registrations;

// Ends the launch with a message that names kernel, block and thread. Called by a fiber.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A place in the text.
struct Site {
    const char* file;
    int line;

    bool operator==(const Site& other) const { return line == other.line && strcmp(file, other.file) == 0; }
};

void barrier(Site site);
// Waits for all lanes of the warp, then returns what each of the 32 brought, until the next but one exchange.
const uint64_t* exchange(uint64_t value, Site site);

void reads(const volatile void* address, size_t bytes);
void writes(const volatile void* address, size_t bytes);
// Bounds and alignment only: atomics do not race with each other.
void atomic(const volatile void* address, size_t bytes);

// Changes at each barrier, and from block to block.
uint64_t epoch();
uint64_t block_serial();
unsigned flat_thread();

// Who touched a piece of memory last.
struct Trace {
    static constexpr unsigned MANY = ~0u;

    uint64_t written = 0, read = 0;  // epochs; 0: never
    unsigned writer = 0, reader = 0;

    // Whether the access races with one before, in shared memory or in that of one block.
    bool reads(uint64_t now, unsigned thread);
    bool writes(uint64_t now, unsigned thread);
};

// One element of shared memory.
template <class T>
class Cell {
public:
    Cell(T* value, Trace* trace, const char* array, size_t at) : value(value), trace(trace), array(array), at(at) {}

    operator T() const {
        if (trace->written == 0) fail("shared memory %s[%zu] is read before it is written", array, at);
        if (!trace->reads(epoch(), flat_thread())) fail("race: shared memory %s[%zu] is read", array, at);
        return *value;
    }

    Cell& operator=(T other) {
        if (!trace->writes(epoch(), flat_thread())) fail("race: shared memory %s[%zu] is written", array, at);
        *value = other;
        return *this;
    }

    Cell& operator=(const Cell& other) { return *this = static_cast<T>(other); }

private:
    T* value;
    Trace* trace;
    const char* array;
    size_t at;
};

// `__shared__ T name[COUNT]`, as a variable of the OS thread: each block finds it unwritten.
template <class T, size_t COUNT>
class Shared {
public:
    explicit Shared(const char* name) : name(name) {}

    Cell<T> operator[](size_t at) {
        if (at >= COUNT) fail("shared memory %s[%zu] of %zu elements", name, at, COUNT);
        if (block != block_serial()) {
            block = block_serial();
            for (Trace& trace : traces) trace = Trace();
        }
        return Cell<T>(&values[at], &traces[at], name, at);
    }

private:
    const char* name;
    T values[COUNT];
    Trace traces[COUNT];
    uint64_t block = 0;
};

// The bytes of shared memory that the launch asked for; `element` of `size` bytes, and its trace.
void* dynamic_shared(size_t element, size_t size, Trace** trace);

// `extern __shared__ T name[]`.
template <class T>
class DynamicShared {
public:
    explicit DynamicShared(const char* name) : name(name) {}

    Cell<T> operator[](size_t at) {
        Trace* trace;
        T* value = static_cast<T*>(dynamic_shared(at, sizeof(T), &trace));
        return Cell<T>(value, trace, name, at);
    }

private:
    const char* name;
};

template <class T>
T shuffle_xor(unsigned lanes, T value, int lane_mask, Site site) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "one register pair");
    if (lanes != ~0u) fail("a shuffle of some lanes only");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const uint64_t* all = exchange(bits, site);
    memcpy(&value, &all[(flat_thread() % 32) ^ static_cast<unsigned>(lane_mask)], sizeof(T));
    return value;
}

inline unsigned ballot(unsigned lanes, bool vote, Site site) {
    if (lanes != ~0u) fail("a ballot of some lanes only");
    const uint64_t* all = exchange(vote, site);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(all[lane]) << lane;
    return votes;
}

inline unsigned atomic_max(unsigned* address, unsigned value) {
    atomic(address, sizeof(unsigned));
    const unsigned old = *address;
    if (value > old) *address = value;
    return old;
}

}  // namespace emulation

#define threadIdx (::emulation::thread_index)
#define blockIdx (::emulation::block_index)
#define blockDim (::emulation::block_size)
#define gridDim (::emulation::grid_size)
#define EMULATION_SITE (::emulation::Site{__FILE__, __LINE__})
#define __syncthreads() ::emulation::barrier(EMULATION_SITE)
#define __shfl_xor_sync(lanes, value, lane_mask) ::emulation::shuffle_xor(lanes, value, lane_mask, EMULATION_SITE)
#define __ballot_sync(lanes, vote) ::emulation::ballot(lanes, vote, EMULATION_SITE)
#define atomicMax(address, value) ::emulation::atomic_max(address, value)
