//! What tests call beside the driver: schedules, reports, kernels, faults.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use crate::abi::{In, Out, Raw, Status, Text};
use crate::driver::{self, Kernel, find_stream};
use crate::kernel_abi::{Declare, Run};
use crate::log::Log;
use crate::mutation::{Mutation, Owner, Step};
use crate::race::Access;
use crate::scheduler::{Mode, Scheduler};
use crate::state::{CHANGED, lock};

/// Forgets all but the kernels, and sets the schedule: 0 latest, 1 random, 2 earliest.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_reset(seed: u64, mode: c_int) {
    let mode = match mode {
        0 => Mode::Latest,
        1 => Mode::Random,
        _ => Mode::Earliest,
    };
    let mut held = lock();
    held.reset();
    held.scheduler = Scheduler::new(mode, seed);
    CHANGED.notify_all();
}

/// Copies the findings into `buffer` and returns their length; see `report::Reports::text`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_report(buffer: Out<u8>, room: usize) -> usize {
    let text = lock().reports.text();
    if text.len() <= room {
        let _ = buffer.set_all(text.bytes());
    }
    text.len()
}

/// Forgets the findings.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_clear_report() {
    lock().reports.clear();
}

/// Reports what contexts that are still alive hold.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_report_leaks() {
    driver::end_contexts();
}

/// Registers what a kernel does. Both functions may be called from any thread, with `data`, for ever.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_register_kernel(
    name: Text,
    sizes: In<usize>,
    count: usize,
    declare: Declare,
    run: Run,
    data: *const c_void,
) -> Status {
    let Ok(name) = name.read() else { return Status::INVALID_VALUE };
    let Ok(sizes) = (0..count).map(|index| sizes.get(index)).collect::<Result<Vec<_>, _>>() else {
        return Status::INVALID_VALUE;
    };
    lock().kernels.insert(name, Arc::new(Kernel { sizes, declare, run, data }));
    Status::SUCCESS
}

/// After `successes` more allocations on devices, one fails.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_fail_allocation(successes: u64) {
    lock().allocations_left = Some(successes);
}

/// How long a thread waits for others before it gives up, with a finding.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_set_patience(milliseconds: u64) {
    lock().scheduler.patience = Duration::from_millis(milliseconds);
}

/// How many devices there are, and their memory in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_set_devices(devices: usize, memory: usize) {
    let mut held = lock();
    held.machine.devices = devices;
    held.machine.memory = memory;
}

/// What `cuDeviceGetAttribute` says.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_set_attribute(attribute: c_int, value: c_int) {
    lock().machine.attributes.insert(attribute, value);
}

/// Bytes allocated on a device, now and at most.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_usage(device: usize, now: Out<usize>, peak: Out<usize>) {
    let usage = lock().usage.get(&device).copied().unwrap_or_default();
    now.set_if_wanted(usage.now);
    peak.set_if_wanted(usage.peak);
}

/// Leaves out one step, the `nth` of its kind from 0: of the thread of that name, or, without one, of a device.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_leave_out(step: c_int, thread: Text, device: usize, nth: u64) {
    if let Some(step) = Step::find(step) {
        lock().mutations.leave_out(Mutation { step, owner: owner(&thread, device), nth });
    }
}

fn owner(thread: &Text, device: usize) -> Owner {
    thread.read().map_or(Owner::Device(device), |name| Owner::Thread(name.chars().take(15).collect()))
}

/// What became of it: 0 it has not come, 1 left out, 2 left out and not needed.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_left_out() -> c_int {
    lock().mutations.fate as c_int
}

/// How many such steps there were.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_steps(step: c_int, thread: Text, device: usize) -> u64 {
    Step::find(step).map_or(0, |step| lock().mutations.seen(step, owner(&thread, device)))
}

/// How many operations have not run.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_pending() -> usize {
    lock().streams.iter().map(|stream| stream.queue.len()).sum()
}

/// How reports call a stream.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_name_stream(stream: Raw, name: Text) -> Status {
    let mut held = lock();
    let (Ok(stream), Ok(name)) = (find_stream(&mut held, stream), name.read()) else {
        return Status::INVALID_HANDLE;
    };
    let device = held.contexts[held.streams[stream].context].device;
    held.streams[stream].name = format!("stream {name:?} of device {device}");
    Status::SUCCESS
}

/// What the calling thread's operations are for, until the next call; an empty label ends it.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_label(label: Text) {
    let thread = crate::clock::this_thread();
    let mut held = lock();
    match label.read() {
        Ok(label) if !label.is_empty() => held.labels.insert(thread, label),
        _ => held.labels.remove(&thread),
    };
}

/// The host touches pinned memory: reports the operations it should have waited for.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_host_access(address: usize, bytes: usize, writes: bool) {
    let mut held = lock();
    let known = held.lanes.known();
    let access = if writes { Access::write(address, bytes) } else { Access::read(address, bytes) };
    driver::check_host_access(&mut held, &known, &access);
}

/// What the calling thread has waited for, for a thread that it tells.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_release() -> u64 {
    lock().lanes.release()
}

/// The calling thread was told by the one that made `token`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_acquire(token: u64) {
    lock().lanes.acquire(token);
}

/// After `calls` more NCCL calls of the rank on `device`, in any communicator, its part never arrives: those that need
/// it hang until they are aborted, and learn why from `ncclCommGetAsyncError` if `reported`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_nccl_lose_device(device: usize, calls: u64, reported: bool) {
    lock().nccl.lose(device, calls, reported);
}

/// From now on, remembers every operation: see `log`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_start_log() {
    lock().log = Some(Log::default());
}

/// Copies the log into `buffer` and returns its length; see `log::Log::text`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_log(buffer: Out<u8>, room: usize) -> usize {
    let held = lock();
    let text = held.log.as_ref().map_or(String::new(), |log| log.text(&held.streams));
    if text.len() <= room {
        let _ = buffer.set_all(text.bytes());
    }
    text.len()
}

/// Whether the operation at `later` in the log waits for the one at `earlier`.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_is_ordered(earlier: usize, later: usize) -> bool {
    lock().log.as_ref().is_some_and(|log| log.is_ordered(earlier, later))
}
