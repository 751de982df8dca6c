//! Copies and fills, in stream order and at once.
//!
//! As with the real driver, a copy from pageable host memory takes the values when it is called, and one to pageable
//! memory has arrived when the call returns; only pinned memory is read and written in stream order.

#![allow(non_snake_case)]

use std::sync::Arc;

use super::{call, current_context, find_stream};
use crate::abi::{Outcome, Raw, Status};
use crate::heap::Place;
use crate::queue::{StreamId, Work};
use crate::race::Access;
use crate::report::Kind;
use crate::scheduler;
use crate::state::Held;

/// What a call says an address is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Device(u64),
    Host(Raw),
    /// To be seen from the address.
    Unified(u64),
}

impl Side {
    fn address(self) -> usize {
        match self {
            Side::Device(address) | Side::Unified(address) => address as usize,
            Side::Host(address) => address,
        }
    }

    /// Whether the memory is one of ours, which is read and written in stream order.
    fn is_ours(self, held: &mut Held, call: &str) -> Outcome<bool> {
        let place = held.heap.holding(self.address()).map(|block| block.place);
        match (self, place) {
            (Side::Device(address), None | Some(Place::Host)) => {
                held.reports
                    .add(Kind::InvalidAccess, format!("{call} at {address:#x}, no memory of a device"));
                Err(Status::INVALID_VALUE)
            }
            (_, place) => Ok(place.is_some()),
        }
    }
}

fn copy(
    held: &mut Held,
    call: &str,
    stream: StreamId,
    to: Side,
    from: Side,
    bytes: usize,
    at_once: bool,
) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let (to_ours, from_ours) = (to.is_ours(held, call)?, from.is_ours(held, call)?);
    if at_once {
        held.refuse_disturbance()?;
    }
    if !(to_ours && from_ours) {
        // The real driver would read the host's memory at each launch of the graph, if it is still there.
        held.refuse_capture(stream)?;
    }
    let (target, source) = (to.address(), from.address());
    if target == 0 || source == 0 {
        return Err(Status::INVALID_VALUE);
    }
    let mut accesses = Vec::new();
    let mut uploaded = None;
    let run: Arc<dyn Fn() + Send + Sync> = if from_ours {
        accesses.push(Access::read(source, bytes));
        // SAFETY: the scheduler runs this only while all named ranges are mapped; a range that is not named is the
        // caller's, who keeps it for the call, and the call does not return before this has run.
        Arc::new(move || unsafe { std::ptr::copy(source as *const u8, target as *mut u8, bytes) })
    } else {
        let mut values = vec![0; bytes];
        // SAFETY: the caller passes `bytes` readable bytes of host memory.
        unsafe { std::ptr::copy_nonoverlapping(source as *const u8, values.as_mut_ptr(), bytes) };
        let values: Arc<[u8]> = values.into();
        uploaded = Some(values.clone());
        // SAFETY: as above.
        Arc::new(move || unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), target as *mut u8, bytes) })
    };
    if to_ours {
        accesses.push(Access::write(target, bytes));
    }
    let position = held.submit(stream, call, &accesses, Work::Memory(run))?;
    if let Some(values) = uploaded {
        held.uploads.keep(target, &values);
    }
    if at_once || !to_ours {
        let clock = held.streams[stream].clock.clone();
        scheduler::run_until(held, position)?;
        held.lanes.learn(&clock);
    } else {
        scheduler::after_submission(held);
    }
    Ok(())
}

fn copy_at_once(name: &str, to: Side, from: Side, bytes: usize) -> Status {
    call(|held| {
        let context = current_context(held)?;
        let legacy = held.contexts[context].legacy;
        copy(held, name, legacy, to, from, bytes, true)
    })
}

fn copy_in_order(name: &str, to: Side, from: Side, bytes: usize, stream: Raw) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        copy(held, name, stream, to, from, bytes, false)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(to: u64, from: Raw, bytes: usize) -> Status {
    copy_at_once("cuMemcpyHtoD", Side::Device(to), Side::Host(from), bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(to: Raw, from: u64, bytes: usize) -> Status {
    copy_at_once("cuMemcpyDtoH", Side::Host(to), Side::Device(from), bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) -> Status {
    copy_at_once("cuMemcpyDtoD", Side::Device(to), Side::Device(from), bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpy(to: u64, from: u64, bytes: usize) -> Status {
    copy_at_once("cuMemcpy", Side::Unified(to), Side::Unified(from), bytes)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: Raw, bytes: usize, stream: Raw) -> Status {
    copy_in_order("cuMemcpyHtoDAsync", Side::Device(to), Side::Host(from), bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(to: Raw, from: u64, bytes: usize, stream: Raw) -> Status {
    copy_in_order("cuMemcpyDtoHAsync", Side::Host(to), Side::Device(from), bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Raw) -> Status {
    copy_in_order("cuMemcpyDtoDAsync", Side::Device(to), Side::Device(from), bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: Raw) -> Status {
    copy_in_order("cuMemcpyAsync", Side::Unified(to), Side::Unified(from), bytes, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    _to_ctx: Raw,
    from: u64,
    _from_ctx: Raw,
    bytes: usize,
    stream: Raw,
) -> Status {
    copy_in_order("cuMemcpyPeerAsync", Side::Device(to), Side::Device(from), bytes, stream)
}

/// Fills `count` values with the bytes of one.
fn fill<const N: usize>(name: &str, to: u64, value: [u8; N], count: usize, stream: Option<Raw>) -> Status {
    call(|held| {
        let id = match stream {
            Some(stream) => find_stream(held, stream)?,
            None => {
                held.refuse_disturbance()?;
                let context = current_context(held)?;
                held.contexts[context].legacy
            }
        };
        if count == 0 {
            return Ok(());
        }
        Side::Device(to).is_ours(held, name)?;
        let run = Arc::new(move || {
            for i in 0..count {
                // SAFETY: the scheduler runs this only while the named range, `count` values long, is mapped.
                unsafe { (to as *mut [u8; N]).add(i).write_unaligned(value) };
            }
        });
        let position = held.submit(id, name, &[Access::write(to as usize, count * N)], Work::Memory(run))?;
        if stream.is_none() {
            let clock = held.streams[id].clock.clone();
            scheduler::run_until(held, position)?;
            held.lanes.learn(&clock);
        } else {
            scheduler::after_submission(held);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(to: u64, value: u8, count: usize) -> Status {
    fill("cuMemsetD8", to, [value], count, None)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: Raw) -> Status {
    fill("cuMemsetD8Async", to, [value], count, Some(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: Raw) -> Status {
    fill("cuMemsetD16Async", to, value.to_ne_bytes(), count, Some(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Raw) -> Status {
    fill("cuMemsetD32Async", to, value.to_ne_bytes(), count, Some(stream))
}
