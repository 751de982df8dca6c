// The scheduler of the emulation, its checks, and the functions that Rust calls (src/host.rs).
#include "emulation.h"

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

namespace emulation {

thread_local Index thread_index, block_index, block_size, grid_size;

namespace {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 128 << 10;
// Bytes of global memory that share a trace: the smallest element.
constexpr size_t GRANULE = 2;

// Global memory that a launch may use. Mirrored by src/access.rs.
struct Memory {
    uint64_t begin;
    uint64_t bytes;
    bool writable;
};

// Accesses of several blocks to a granule race whenever one of them writes.
struct GlobalTrace {
    Trace trace;
    uint32_t writing_block = 0, reading_block = 0;  // 1 + the block's number in the grid; 0: none
};

struct Region {
    Memory memory;
    std::vector<GlobalTrace> traces;
};

enum class State { Ready, AtBarrier, AtExchange, Done };

struct Fiber {
    jmp_buf context;  // where it goes on, once it has a stack in use
    bool started = false;
    std::unique_ptr<char[]> stack;  // left untouched, so that only what is used becomes resident
    State state;
    Site site;  // of the barrier or exchange where it waits
};

struct Warp {
    uint64_t values[2][WARP];
    unsigned arrived;
    unsigned turn;
};

struct Launch {
    const Registration* kernel = nullptr;
    const void* args = nullptr;
    std::vector<Region> memory;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<unsigned> ready;
    std::vector<char> shared;
    std::vector<Trace> shared_traces;
    jmp_buf scheduler;
    unsigned threads = 0;
    unsigned running = 0;
    unsigned done = 0;
    uint64_t random = 0;
    bool failed = false;
    char message[512];
};

thread_local Launch launch;
// Never repeated in an OS thread, so that what an earlier launch left in static shared memory is seen to be old.
thread_local uint64_t now = 0, serial = 0;

// Barriers that the OS thread has seen, and the one that it passes over.
struct Barrier {
    Site site;
    char name[64];
};
thread_local std::vector<Barrier> barriers;
constexpr size_t NONE = ~static_cast<size_t>(0);
thread_local size_t skipped = NONE;

const char* file_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// The barrier's number, which it is given when it is first reached.
size_t number(Site site) {
    size_t index = 0;
    while (index < barriers.size() && !(barriers[index].site == site)) ++index;
    if (index == barriers.size()) {
        barriers.push_back(Barrier{site, ""});
        snprintf(barriers.back().name, sizeof barriers.back().name, "%s:%d", file_name(site.file), site.line);
    }
    return index;
}

uint64_t draw() {
    // splitmix64
    uint64_t z = launch.random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void note(const char* format, va_list values) {
    launch.failed = true;
    int used = snprintf(launch.message, sizeof launch.message, "%s, block (%u, %u), thread %u: ", launch.kernel->name,
                        block_index.x, block_index.y, launch.running);
    vsnprintf(launch.message + used, sizeof launch.message - used, format, values);
}

void note(const char* format, ...) __attribute__((format(printf, 1, 2)));
void note(const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(format, values);
    va_end(values);
}

void yield() {
    if (_setjmp(launch.fibers[launch.running].context) == 0) _longjmp(launch.scheduler, 1);
}

// A fiber is a thread of one block after the other.
void live() {
    for (;;) {
        launch.kernel->run(launch.args);
        launch.fibers[launch.running].state = State::Done;
        ++launch.done;
        yield();
    }
}

[[noreturn]] void start(Fiber& fiber) {
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    setcontext(&context);
    abort();
}

// Lets a fiber run until it yields. Jumps, unlike `swapcontext`, make no system call.
__attribute__((noinline)) void resume(Fiber& fiber) {
    if (_setjmp(launch.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.context, 1);
    start(fiber);
}

void release(unsigned first, unsigned count) {
    for (unsigned thread = first; thread < first + count; ++thread) {
        launch.fibers[thread].state = State::Ready;
        launch.ready.push_back(thread);
    }
}

// Whether threads `first..first + count` all wait as `state` says, at one place.
bool meet(unsigned first, unsigned count, State state) {
    for (unsigned thread = first; thread < first + count; ++thread) {
        if (launch.fibers[thread].state != state) return false;
        const Site here = launch.fibers[thread].site, there = launch.fibers[first].site;
        if (!(here == there)) {
            note("waits at %s:%d, thread %u at %s:%d", file_name(here.file), here.line, first,
                 file_name(there.file), there.line);
            return false;
        }
    }
    return true;
}

void run_block(bool shuffled) {
    ++now;
    ++serial;
    launch.done = 0;
    launch.shared_traces.assign(launch.shared_traces.size(), Trace());
    for (Fiber& fiber : launch.fibers) fiber.state = State::Ready;
    for (Warp& warp : launch.warps) warp.arrived = warp.turn = 0;
    launch.ready.clear();
    for (unsigned thread = launch.threads; thread > 0; --thread) launch.ready.push_back(thread - 1);
    while (!launch.ready.empty() && !launch.failed) {
        const size_t pick = shuffled ? draw() % launch.ready.size() : launch.ready.size() - 1;
        const unsigned thread = launch.ready[pick];
        launch.ready[pick] = launch.ready.back();
        launch.ready.pop_back();
        Fiber& fiber = launch.fibers[thread];
        fiber.state = State::Ready;
        launch.running = thread;
        thread_index = Index{thread, 0, 0};
        resume(fiber);
        if (launch.failed) return;
        const unsigned warp = thread / WARP;
        if (fiber.state == State::AtExchange && launch.warps[warp].arrived == WARP) {
            if (!meet(warp * WARP, WARP, State::AtExchange)) return;
            launch.warps[warp].arrived = 0;
            release(warp * WARP, WARP);
        }
        if (launch.ready.empty() && launch.done == 0 && meet(0, launch.threads, State::AtBarrier)) {
            ++now;
            release(0, launch.threads);
        }
    }
    if (launch.failed || launch.done == launch.threads) return;
    for (unsigned thread = 0; thread < launch.threads; ++thread) {
        const Fiber& fiber = launch.fibers[thread];
        if (fiber.state == State::Done) continue;
        launch.running = thread;
        note("waits at the %s of %s:%d, which not all others reach (%u threads have ended)",
             fiber.state == State::AtBarrier ? "barrier" : "exchange", file_name(fiber.site.file), fiber.site.line,
             launch.done);
        return;
    }
}

unsigned flat_block() { return block_index.y * grid_size.x + block_index.x; }

enum class Access { Read, Write, Atomic };

void check(const volatile void* address, size_t bytes, Access access) {
    if (launch.memory.empty()) return;
    const char* const what = access == Access::Read ? "read" : access == Access::Write ? "write" : "atomic";
    const uint64_t at = reinterpret_cast<uint64_t>(address);
    // Vectors of more than 16 bytes do not exist; structs are aligned as their largest member.
    size_t alignment = bytes & -bytes;
    if (bytes > 16 && alignment > 8) alignment = 8;
    if (at % alignment != 0) fail("%s of %zu bytes at a misaligned address", what, bytes);
    for (Region& region : launch.memory) {
        const Memory& memory = region.memory;
        if (at < memory.begin || at - memory.begin >= memory.bytes) continue;
        const size_t offset = at - memory.begin;
        const size_t index = &region - launch.memory.data();
        if (bytes > memory.bytes - offset) {
            fail("%s of %zu bytes at byte %zu of buffer %zu, which has %zu", what, bytes, offset, index,
                 static_cast<size_t>(memory.bytes));
        }
        if (access != Access::Read && !memory.writable) fail("%s of buffer %zu, which is read-only", what, index);
        if (access == Access::Atomic) return;
        const uint32_t block = 1 + flat_block();
        for (size_t granule = offset / GRANULE; granule * GRANULE < offset + bytes; ++granule) {
            GlobalTrace& trace = region.traces[granule];
            bool fine = trace.writing_block == 0 || trace.writing_block == block;
            if (access == Access::Write) {
                fine = fine && (trace.reading_block == 0 || trace.reading_block == block);
                fine = fine && trace.trace.writes(now, flat_thread());
                trace.writing_block = block;
            } else {
                fine = fine && trace.trace.reads(now, flat_thread());
                trace.reading_block = trace.reading_block == 0 || trace.reading_block == block ? block : Trace::MANY;
            }
            if (!fine) fail("race: %s of byte %zu of buffer %zu", what, granule * GRANULE, index);
        }
        return;
    }
    fail("%s of %zu bytes at %#zx, outside of all buffers", what, bytes, static_cast<size_t>(at));
}

}  // namespace

Registration::Registration(const char* name, size_t args_size, void (*run)(const void*))
    : name(name), args_size(args_size), run(run), next(registrations) {
    registrations = this;
}

void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(format, values);
    va_end(values);
    yield();
    abort();  // a launch that failed resumes no fiber
}

void barrier(Site site) {
    if (number(site) == skipped) return;
    Fiber& fiber = launch.fibers[launch.running];
    fiber.state = State::AtBarrier;
    fiber.site = site;
    yield();
}

const uint64_t* exchange(uint64_t value, Site site) {
    const unsigned thread = launch.running;
    Warp& warp = launch.warps[thread / WARP];
    // Two sets in turn: a lane may begin the next exchange before the others have read this one.
    const unsigned turn = warp.turn;
    uint64_t* values = warp.values[turn % 2];
    values[thread % WARP] = value;
    Fiber& fiber = launch.fibers[thread];
    fiber.state = State::AtExchange;
    fiber.site = site;
    if (++warp.arrived == WARP) warp.turn = turn + 1;
    yield();
    return values;
}

void reads(const volatile void* address, size_t bytes) { check(address, bytes, Access::Read); }
void writes(const volatile void* address, size_t bytes) { check(address, bytes, Access::Write); }
void atomic(const volatile void* address, size_t bytes) { check(address, bytes, Access::Atomic); }

uint64_t epoch() { return now; }
uint64_t block_serial() { return serial; }
unsigned flat_thread() { return launch.running; }

bool Trace::reads(uint64_t now, unsigned thread) {
    reader = read == now && reader != thread ? MANY : thread;
    read = now;
    return written != now || writer == thread;
}

bool Trace::writes(uint64_t now, unsigned thread) {
    const bool fine = (written != now || writer == thread) && (read != now || reader == thread);
    written = now;
    writer = thread;
    return fine;
}

void* dynamic_shared(size_t element, size_t size, Trace** trace) {
    if ((element + 1) * size > launch.shared.size()) {
        fail("dynamic shared memory [%zu] of %zu elements", element, launch.shared.size() / size);
    }
    *trace = &launch.shared_traces[element];
    return launch.shared.data() + element * size;
}

}  // namespace emulation

using namespace emulation;

extern "C" {

// The kernel `index` of those that were built: its name, or null after the last, and the size of its arguments.
const char* fsdp_kernels_host_kernel(size_t index, size_t* args_size) {
    const Registration* kernel = registrations;
    for (; kernel && index > 0; --index) kernel = kernel->next;
    if (!kernel) return nullptr;
    *args_size = kernel->args_size;
    return kernel->name;
}

// Barrier `index` of those that launches in this OS thread have reached: its place; null after the last.
const char* fsdp_kernels_host_barrier(size_t index) {
    return index < barriers.size() ? barriers[index].name : nullptr;
}

// From now on this OS thread's launches pass over a barrier; ~0: over none.
void fsdp_kernels_host_skip_barrier(size_t index) { skipped = index; }

// Runs a kernel; null, or what went wrong, in memory of the OS thread. `seed` 0 runs blocks and threads in order.
const char* fsdp_kernels_host_launch(const char* name, unsigned grid_x, unsigned grid_y, unsigned threads,
                                     size_t shared_bytes, const void* args, const Memory* memory, size_t memory_count,
                                     uint64_t seed) {
    const Registration* kernel = registrations;
    while (kernel && strcmp(kernel->name, name) != 0) kernel = kernel->next;
    if (!kernel) return "no kernel of this name";
    if (grid_x == 0 || grid_y == 0 || threads == 0 || threads % WARP != 0 || threads > 1024) {
        return "a grid of no blocks, or blocks that are not 1 to 32 whole warps";
    }
    launch.kernel = kernel;
    launch.args = args;
    launch.memory.clear();
    for (size_t i = 0; i < memory_count; ++i) {
        launch.memory.push_back(Region{memory[i], std::vector<GlobalTrace>(memory[i].bytes / GRANULE + 1)});
    }
    if (launch.fibers.size() != threads) {
        launch.fibers.clear();
        launch.fibers.resize(threads);
        for (Fiber& fiber : launch.fibers) fiber.stack.reset(new char[STACK]);
    }
    launch.threads = threads;
    launch.warps.resize(threads / WARP);
    launch.shared.assign(shared_bytes, static_cast<char>(0xab));
    launch.shared_traces.resize(shared_bytes / GRANULE);
    launch.random = seed;
    launch.failed = false;
    block_size = Index{threads, 1, 1};
    grid_size = Index{grid_x, grid_y, 1};
    std::vector<unsigned> blocks;
    for (unsigned block = 0; block < grid_x * grid_y; ++block) blocks.push_back(block);
    for (size_t left = blocks.size(); seed != 0 && left > 1; --left) {
        const size_t pick = draw() % left;
        const unsigned other = blocks[pick];
        blocks[pick] = blocks[left - 1];
        blocks[left - 1] = other;
    }
    for (unsigned block : blocks) {
        block_index = Index{block % grid_x, block / grid_x, 0};
        run_block(seed != 0);
        if (!launch.failed) continue;
        // What fibers were in the midst of is never finished.
        for (Fiber& fiber : launch.fibers) fiber.started = false;
        return launch.message;
    }
    return nullptr;
}

}  // extern "C"
