//! Allocation: of devices, at once and in stream order, and of pinned host memory.

#![allow(non_snake_case)]

use std::ffi::c_uint;

use super::{call, current_context, find_stream};
use crate::abi::{Out, Outcome, Raw, Status};
use crate::clock::Clock;
use crate::heap::Place;
use crate::queue::{StreamId, Work};
use crate::race::{Access, Mode, unawaited};
use crate::report::Kind;
use crate::scheduler;
use crate::state::{Held, State, Tag};

/// New memory of the device of `context`, counted, or out of memory.
pub fn allocate_on_device(
    held: &mut State,
    context: usize,
    bytes: usize,
    call: &str,
    place: fn(usize) -> Place,
) -> Outcome<usize> {
    let device = held.contexts[context].device;
    if let Some(left) = &mut held.allocations_left {
        if *left == 0 {
            held.allocations_left = None;
            return Err(Status::OUT_OF_MEMORY);
        }
        *left -= 1;
    }
    let usage = held.usage.entry(device).or_default();
    if usage.now.saturating_add(bytes) > held.machine.memory {
        return Err(Status::OUT_OF_MEMORY);
    }
    held.named += 1;
    let label = held.labels.get(&crate::clock::this_thread());
    let origin =
        format!("{call} #{}{}", held.named, label.map_or(String::new(), |label| format!(" ({label})")));
    let start = held.heap.allocate(bytes, place(device), context, origin).ok_or(Status::OUT_OF_MEMORY)?;
    let usage = held.usage.entry(device).or_default();
    usage.now += bytes;
    usage.peak = usage.peak.max(usage.now);
    Ok(start)
}

/// Marks a block as freed by `call`; refuses, with a report, what is no block or was freed before.
fn mark_freed(held: &mut State, address: usize, call: &str) -> Outcome {
    let Some(block) = held.heap.starting(address) else {
        let message = format!("{call} of {address:#x}, where no allocation starts");
        held.reports.add(Kind::InvalidAccess, message);
        return Err(Status::INVALID_VALUE);
    };
    let (owner, bytes, device) = (block.describe(), block.len(), block.place.device());
    if let Some(first) = &block.freed {
        let message = format!("{call} of {owner}, which {first} has freed already");
        held.reports.add(Kind::DoubleFree, message);
        return Err(Status::INVALID_VALUE);
    }
    block.freed = Some(call.to_owned());
    if let Some(usage) = device.and_then(|device| held.usage.get_mut(&device)) {
        usage.now -= bytes;
    }
    if let Some(comm) = held.nccl.registered(address, bytes) {
        held.reports.add(Kind::Misuse, format!("{call} of {owner}, still registered with {comm}"));
    }
    Ok(())
}

/// Frees a block at once. The real driver would wait for what is in flight, and a program that relies on that stalls
/// the device without knowing: whoever frees must have waited.
pub fn free_now(held: &mut Held, address: usize, call: &str) -> Outcome {
    mark_freed(held, address, call)?;
    let Some(block) = held.heap.starting(address) else { return Ok(()) };
    let (owner, whole) = (block.describe(), Access { range: block.range(), mode: Mode::Free });
    let known = held.lanes.known();
    for name in unawaited(&mut held.heap, &known, &whole) {
        held.reports.add(Kind::FreeInFlight, format!("{call} frees {owner} without waiting for {name}"));
    }
    held.retire(address);
    Ok(())
}

pub fn allocate_in_order(
    held: &mut Held,
    context: usize,
    stream: StreamId,
    bytes: usize,
    call: &str,
) -> Outcome<usize> {
    let start = allocate_on_device(held, context, bytes, call, Place::Device)?;
    let whole = Access { range: start..start + bytes, mode: Mode::Allocate };
    let captured = held.capture_status(stream).is_some();
    if let Some(block) = held.heap.starting(start) {
        block.of_graph = captured;
    }
    held.submit(stream, call, &[whole], if captured { Work::Refresh(start) } else { Work::Nothing })?;
    scheduler::after_submission(held);
    Ok(start)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) -> Status {
    call(|held| {
        held.refuse_disturbance()?;
        let context = current_context(held)?;
        if bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        let start = allocate_on_device(held, context, bytes, "cuMemAlloc", Place::Device)?;
        Ok(address.set(start as u64)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> Status {
    call(|held| {
        held.refuse_disturbance()?;
        if address == 0 { Ok(()) } else { free_now(held, address as usize, "cuMemFree") }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: Raw) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        let context = held.streams[stream].context;
        let start = match bytes {
            0 => 0,
            _ => allocate_in_order(held, context, stream, bytes, "cuMemAllocAsync")?,
        };
        Ok(address.set(start as u64)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: Raw, stream: Raw) -> Status {
    call(|held| {
        super::pool::find(held, pool)?;
        let stream = find_stream(held, stream)?;
        let context = held.streams[stream].context;
        let start = allocate_in_order(held, context, stream, bytes, "cuMemAllocFromPoolAsync")?;
        Ok(address.set(start as u64)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeAsync(address: u64, stream: Raw) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        if address == 0 {
            return Ok(());
        }
        let start = address as usize;
        if held.heap.starting(start).is_some_and(|block| block.of_graph) {
            let whole =
                held.heap.starting(start).map(|block| Access { range: block.range(), mode: Mode::Free });
            held.submit(stream, "cuMemFreeAsync", whole.as_slice(), Work::Lapse(start))?;
            scheduler::after_submission(held);
            return Ok(());
        }
        // What was allocated outside of a graph cannot be freed by each launch of one.
        held.refuse_capture(stream)?;
        mark_freed(held, start, "cuMemFreeAsync")?;
        let whole = held.heap.starting(start).map(|block| Access { range: block.range(), mode: Mode::Free });
        held.submit(stream, "cuMemFreeAsync", whole.as_slice(), Work::Free(start))?;
        scheduler::after_submission(held);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> Status {
    call(|held| {
        let context = current_context(held)?;
        let used = held.usage.get(&held.contexts[context].device).map_or(0, |usage| usage.now);
        free.set(held.machine.memory - used)?;
        Ok(total.set(held.machine.memory)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostAlloc(address: Out<Raw>, bytes: usize, _flags: c_uint) -> Status {
    call(|held| {
        held.refuse_disturbance()?;
        let context = current_context(held)?;
        held.named += 1;
        let origin = format!("cuMemHostAlloc #{}", held.named);
        let start = held.heap.allocate(bytes, Place::Host, context, origin).ok_or(Status::OUT_OF_MEMORY)?;
        Ok(address.set(start)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAllocHost_v2(address: Out<Raw>, bytes: usize) -> Status {
    cuMemHostAlloc(address, bytes, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(address: Raw) -> Status {
    call(|held| {
        held.refuse_disturbance()?;
        free_now(held, address, "cuMemFreeHost")
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostGetDevicePointer_v2(address: Out<u64>, host: Raw, _flags: c_uint) -> Status {
    call(|held| match held.heap.holding(host) {
        Some(_) => Ok(address.set(host as u64)?),
        None => Err(Status::INVALID_VALUE),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(data: Out<u64>, attribute: u32, address: u64) -> Status {
    const CONTEXT: u32 = 1;
    const MEMORY_TYPE: u32 = 2;
    const DEVICE_ORDINAL: u32 = 9;
    call(|held| {
        let block = held.heap.holding(address as usize).ok_or(Status::INVALID_VALUE)?;
        let value = match attribute {
            CONTEXT => Tag::Context.handle(block.context) as u64,
            MEMORY_TYPE => 1 + u64::from(block.place != Place::Host),
            DEVICE_ORDINAL => block.place.device().map_or(u64::MAX, |device| device as u64),
            _ => return Err(Status::NOT_SUPPORTED),
        };
        // All but the context are four bytes wide.
        let narrow = data.cast::<u32>();
        let written = if attribute == CONTEXT { data.set(value) } else { narrow.set(value as u32) };
        Ok(written?)
    })
}

/// What a thread that has waited for `clock` may do to host memory.
pub fn check_host_access(held: &mut State, clock: &Clock, access: &Access) {
    for name in unawaited(&mut held.heap, clock, access) {
        let verb = if access.mode == Mode::Read { "reads" } else { "writes" };
        let bytes = access.range.len();
        held.reports.add(Kind::Race, format!("the host {verb} {bytes} bytes without waiting for {name}"));
    }
}
