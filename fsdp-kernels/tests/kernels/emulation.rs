//! The emulation finds what it is there to find: kernels with one mistake each (host/faulty.cuh).

use fsdp_kernels::{Access, Args, DevicePtr, Dtype, Launch, THREADS, host};

use crate::device::Buffer;

/// The arguments of all faulty kernels.
#[derive(Clone, Copy)]
#[repr(C)]
struct Faulty {
    values: DevicePtr,
    len: u64,
}

// SAFETY: repr(C), the fields of `Args` in faulty.cuh.
unsafe impl Args for Faulty {
    fn launch(&self, blocks: u32) -> Option<Launch> {
        Some(Launch { grid: [blocks, 1], threads: THREADS, shared_bytes: 4 * (THREADS - 1) })
    }

    fn accesses(&self, _: [Dtype; 2]) -> Vec<Access> {
        vec![Access { begin: self.values, bytes: self.len * 4, writes: true }]
    }
}

/// What a kernel that should touch `len` values, by as many threads as whole blocks have, says of itself.
fn run(kernel: &str, len: usize, writes: bool) -> (Result<(), String>, Vec<f32>) {
    let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
    let buffer = Buffer::of(&values, 0);
    let args = Faulty { values: buffer.at(), len: len as u64 };
    let launch = args.launch((len as u32).div_ceil(THREADS)).expect("there are values");
    let memory: Vec<Access> =
        args.accesses([Dtype::F32; 2]).into_iter().map(|access| Access { writes, ..access }).collect();
    // SAFETY: what is out of bounds is found before it happens.
    let result = unsafe { host::launch(kernel, launch, &args, &memory, 5) };
    (result.map_err(|error| error.to_string()), buffer.read())
}

#[test]
fn a_kernel_without_fault_runs() {
    let (result, values) = run("faulty_right", 512, true);
    assert_eq!(result, Ok(()));
    assert_eq!((values[0], values[255], values[256]), (255.0, 0.0, 511.0));
}

#[track_caller]
fn assert_found(kernel: &str, len: usize, what: &str) {
    let message = run(kernel, len, true).0.expect_err("the fault was not found");
    assert!(message.starts_with(kernel) && message.contains(what), "{message}");
}

#[test]
fn missing_barriers_are_found() {
    assert_found("faulty_no_barrier", 256, "tile[");
    assert_found("faulty_no_second_barrier", 256, "race: shared memory tile");
}

#[test]
fn shared_memory_is_checked() {
    assert_found("faulty_no_first_write", 256, "is read before it is written");
    assert_found("faulty_shared_too_small", 256, "shared memory tile[255] of 255 elements");
    assert_found("faulty_dynamic_shared_too_small", 256, "dynamic shared memory [255] of 255 elements");
}

#[test]
fn barriers_that_not_all_reach_are_found() {
    assert_found("faulty_barrier_for_some", 255, "which not all others reach");
    assert_found("faulty_barriers_apart", 256, "waits at faulty.cuh:");
    assert_found("faulty_shuffle_of_some", 255, "waits at the exchange");
}

#[test]
fn global_memory_is_checked() {
    assert_found("faulty_past_the_end", 255, "outside of all buffers");
    assert_found("faulty_misaligned_pack", 256, "misaligned address");
    let (result, _) = run("faulty_right", 256, false);
    assert!(result.expect_err("the write was not found").contains("read-only"));
}

#[test]
fn races_in_global_memory_are_found() {
    assert_found("faulty_threads_share_an_element", 256, "race: write");
    assert_found("faulty_blocks_share_an_element", 512, "race: write");
    assert_found("faulty_reads_its_neighbours_result", 512, "race: ");
}

#[test]
fn names_and_sizes_are_checked() {
    let args = Faulty { values: 0, len: 0 };
    let launch = args.launch(1).expect("one block");
    // SAFETY: neither starts.
    let [unknown, size] = ["fsdp_no_such", "fsdp_sum_f64"]
        .map(|kernel| unsafe { host::launch(kernel, launch, &args, &[], 0) }.unwrap_err().to_string());
    assert_eq!(unknown, "there is no kernel fsdp_no_such");
    assert_eq!(size, "fsdp_sum_f64 takes arguments of 40 bytes, got 16");
}

#[test]
fn shapes_that_no_kernel_is_made_for_are_refused() {
    let args = Faulty { values: 0, len: 0 };
    for (grid, threads) in [([0, 1], 256), ([1, 0], 256), ([1, 1], 0), ([1, 1], 33), ([1, 1], 1056)] {
        let launch = Launch { grid, threads, shared_bytes: 0 };
        // SAFETY: it does not start.
        let result = unsafe { host::launch("faulty_right", launch, &args, &[], 0) };
        assert!(matches!(result, Err(host::HostError::Fault(_))), "{grid:?} {threads}");
    }
}
