//! Contexts: the primary ones of the devices, and others; which is current to a thread; what one leaves behind.

#![allow(non_snake_case)]

use std::cell::RefCell;
use std::ffi::{c_int, c_uint};

use super::{call, stream};
use crate::abi::{Out, Outcome, Raw, Status};
use crate::queue::StreamId;
use crate::report::Kind;
use crate::scheduler;
use crate::state::{Held, State, Tag, lock};

pub struct Context {
    pub device: usize,
    primary: bool,
    /// How often the primary context is retained; 1 for others.
    retained: usize,
    pub alive: bool,
    pub legacy: StreamId,
}

thread_local! {
    static CURRENT: RefCell<Vec<Raw>> = const { RefCell::new(Vec::new()) };
}

/// The context that is current to the calling thread.
pub fn current_context(held: &State) -> Outcome<usize> {
    let raw = CURRENT.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
    find(held, raw)
}

fn find(held: &State, raw: Raw) -> Outcome<usize> {
    let index = Tag::Context.index(raw).ok_or(Status::INVALID_CONTEXT)?;
    held.contexts.get(index).filter(|context| context.alive).map(|_| index).ok_or(Status::INVALID_CONTEXT)
}

fn create(held: &mut Held, device: usize, primary: bool) -> usize {
    let index = held.contexts.len();
    held.contexts.push(Context { device, primary, retained: 1, alive: true, legacy: 0 });
    let legacy = stream::create_default(held, index, format!("the default stream of device {device}"), true);
    held.contexts[index].legacy = legacy;
    index
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: Out<Raw>, device: c_int) -> Status {
    call(|held| {
        let device = held.check_device(device)?;
        let existing = held.contexts.iter().position(|c| c.alive && c.primary && c.device == device);
        let index = match existing {
            Some(index) => {
                held.contexts[index].retained += 1;
                index
            }
            None => create(held, device, true),
        };
        Ok(context.set(Tag::Context.handle(index))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status {
    call(|held| {
        let device = held.check_device(device)?;
        // One of an earlier session is not retained here.
        let existing =
            held.contexts.iter().position(|c| c.alive && c.primary && c.device == device && c.retained > 0);
        let index = existing.ok_or(Status::INVALID_CONTEXT)?;
        held.contexts[index].retained -= 1;
        if held.contexts[index].retained == 0 {
            end(held, index)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) -> Status {
    call(|held| {
        let device = held.check_device(device)?;
        flags.set(0)?;
        let alive = held.contexts.iter().any(|c| c.alive && c.primary && c.device == device);
        Ok(active.set(c_int::from(alive))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, _flags: c_uint) -> Status {
    call(|held| held.check_device(device).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v2(context: Out<Raw>, _flags: c_uint, device: c_int) -> Status {
    create_current(&context, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v4(context: Out<Raw>, _params: Raw, _flags: c_uint, device: c_int) -> Status {
    create_current(&context, device)
}

fn create_current(context: &Out<Raw>, device: c_int) -> Status {
    call(|held| {
        let device = held.check_device(device)?;
        let raw = Tag::Context.handle(create(held, device, false));
        CURRENT.with_borrow_mut(|stack| stack.push(raw));
        Ok(context.set(raw)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(context: Raw) -> Status {
    call(|held| {
        let index = find(held, context)?;
        if held.contexts[index].primary {
            return held.misuse(Status::INVALID_CONTEXT, "cuCtxDestroy of a primary context".to_owned());
        }
        end(held, index)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: Out<Raw>) -> Status {
    let raw = CURRENT.with_borrow(|stack| stack.last().copied()).unwrap_or(0);
    context.set(raw).map_err(Status::from).into()
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: Raw) -> Status {
    call(|held| {
        if context != 0 {
            find(held, context)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: Raw) -> Status {
    call(|held| {
        find(held, context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(context: Out<Raw>) -> Status {
    let popped = CURRENT.with_borrow_mut(|stack| stack.pop());
    context.set_if_wanted(popped.unwrap_or(0));
    if popped.is_some() { Status::SUCCESS } else { Status::INVALID_CONTEXT }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> Status {
    call(|held| {
        let context = current_context(held)?;
        Ok(device.set(held.contexts[context].device as c_int)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    call(|held| {
        let context = current_context(held)?;
        synchronize(held, context)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) -> Status {
    least.set_if_wanted(0);
    greatest.set_if_wanted(-5);
    Status::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetFlags(_flags: c_uint) -> Status {
    call(|held| current_context(held).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(_limit: c_int, _value: usize) -> Status {
    call(|held| current_context(held).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetLimit(value: Out<usize>, _limit: c_int) -> Status {
    value.set(1 << 20).map_err(Status::from).into()
}

/// The host waits for all streams of a context.
pub fn synchronize(held: &mut Held, context: usize) -> Outcome {
    let streams = (0..held.streams.len()).filter(|s| held.streams[*s].context == context).collect::<Vec<_>>();
    for stream in streams {
        stream::synchronize(held, stream)?;
    }
    Ok(())
}

/// Ends a context: what it has queued runs, what it still holds is a leak.
fn end(held: &mut Held, context: usize) -> Outcome {
    for stream in 0..held.streams.len() {
        if held.streams[stream].context == context {
            let end = held.end_of(stream);
            scheduler::run_until(held, end)?;
        }
    }
    report_leaks(held, context);
    held.contexts[context].alive = false;
    Ok(())
}

fn report_leaks(held: &mut State, context: usize) {
    let mut leaks = Vec::new();
    leaks.extend(held.heap.live().filter(|block| block.context == context).map(|block| block.describe()));
    let streams = held.streams.iter().enumerate();
    let owned = streams.filter(|(_, s)| s.context == context && !s.is_default && !s.destroyed);
    leaks.extend(owned.map(|(_, stream)| stream.name.clone()));
    let events = held.events.iter().filter(|event| event.context == context && !event.destroyed);
    leaks.extend(events.map(|event| event.name.clone()));
    leaks.extend(held.nccl.open_comms(context));
    let handles = held.blas.iter().filter(|blas| blas.context == context && !blas.destroyed);
    leaks.extend(handles.map(|_| "a cuBLAS handle".to_owned()));
    let generators = held.generators.iter().filter(|rng| rng.context == context && !rng.destroyed);
    leaks.extend(generators.map(|_| "a cuRAND generator".to_owned()));
    let graphs = held.graphs.iter().filter(|graph| graph.context == context && !graph.destroyed).count();
    let execs = held.execs.iter().filter(|exec| exec.context == context && !exec.destroyed).count();
    if graphs + execs > 0 {
        leaks.push(format!("{graphs} graphs, and {execs} instances of graphs: what was captured"));
    }
    let device = held.contexts[context].device;
    for leak in leaks {
        held.reports.add(Kind::Leak, format!("{leak} outlives the context of device {device}"));
    }
}

/// Reports what contexts that are still alive would leak, for tests that keep theirs.
pub fn end_contexts() {
    let mut held = lock();
    for context in 0..held.contexts.len() {
        if held.contexts[context].alive {
            report_leaks(&mut held, context);
        }
    }
}
