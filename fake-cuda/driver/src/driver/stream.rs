//! Streams.

#![allow(non_snake_case)]

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Once};
use std::time::Instant;

use super::{call, current_context};
use crate::abi::{Out, Outcome, Raw, Status};
use crate::clock::{Clock, this_thread};
use crate::host_functions;
use crate::mutation::Step;
use crate::queue::{Stream, StreamId, Work};
use crate::scheduler;
use crate::state::{Held, State, Tag};

const NON_BLOCKING: c_uint = 1;
const LEGACY: Raw = 1;
const PER_THREAD: Raw = 2;
/// The range that `cuCtxGetStreamPriorityRange` gives.
const PRIORITIES: std::ops::RangeInclusive<c_int> = -5..=0;

/// The stream that a caller means.
pub fn find_stream(held: &mut Held, raw: Raw) -> Outcome<StreamId> {
    match raw {
        0 | LEGACY => {
            let context = current_context(held)?;
            Ok(held.contexts[context].legacy)
        }
        PER_THREAD => {
            let context = current_context(held)?;
            let device = held.contexts[context].device;
            let name = format!("the default stream of thread {} on device {device}", this_thread());
            let existing = held.streams.iter().position(|s| s.context == context && s.name == name);
            Ok(existing.unwrap_or_else(|| create_default(held, context, name, false)))
        }
        _ => match Tag::Stream.index(raw).filter(|index| *index < held.streams.len()) {
            Some(index) if !held.streams[index].destroyed => Ok(index),
            Some(index) => {
                let name = held.streams[index].name.clone();
                held.misuse(Status::INVALID_HANDLE, format!("{name} is used after it was destroyed"))
            }
            None => held.misuse(Status::INVALID_HANDLE, format!("{raw:#x} is used as a stream, and is none")),
        },
    }
}

/// One of the streams that a context has without being asked for.
pub fn create_default(held: &mut State, context: usize, name: String, legacy: bool) -> StreamId {
    let stream = add(held, context, true, 0, name);
    held.streams[stream].legacy = legacy;
    held.streams[stream].is_default = true;
    stream
}

/// One of the streams that a graph runs on.
pub fn create_for_graph(held: &mut State, context: usize, name: String) -> StreamId {
    let stream = add(held, context, false, 0, name);
    held.streams[stream].is_default = true;
    stream
}

fn add(held: &mut State, context: usize, blocking: bool, priority: c_int, name: String) -> StreamId {
    let eagerness = held.scheduler.eagerness();
    held.streams.push(Stream {
        context,
        blocking,
        legacy: false,
        is_default: false,
        priority,
        name,
        destroyed: false,
        queue: VecDeque::new(),
        submitted: 0,
        done: 0,
        running: false,
        eagerness,
        clock: Clock::default(),
        capture: None,
    });
    held.streams.len() - 1
}

/// The host waits for all that a stream was given.
pub fn synchronize(held: &mut Held, stream: StreamId) -> Outcome {
    held.refuse_capture(stream)?;
    let end = held.end_of(stream);
    let clock = held.streams[stream].clock.clone();
    scheduler::run_until(held, end)?;
    held.lanes.learn(&clock);
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: Out<Raw>, flags: c_uint) -> Status {
    cuStreamCreateWithPriority(stream, flags, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreateWithPriority(stream: Out<Raw>, flags: c_uint, priority: c_int) -> Status {
    call(|held| {
        let context = current_context(held)?;
        let device = held.contexts[context].device;
        let name = format!("stream {} of device {device}", held.streams.len());
        let priority = priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
        let index = add(held, context, flags & NON_BLOCKING == 0, priority, name);
        Ok(stream.set(Tag::Stream.handle(index))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: Raw) -> Status {
    call(|held| {
        if stream <= PER_THREAD {
            return held.misuse(Status::INVALID_HANDLE, "a default stream is destroyed".to_owned());
        }
        let stream = find_stream(held, stream)?;
        held.streams[stream].destroyed = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: Raw) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        synchronize(held, stream)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: Raw) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        held.refuse_capture(stream)?;
        let end = held.end_of(stream);
        if !scheduler::poll(held, end) {
            return Err(Status::NOT_READY);
        }
        let clock = held.streams[stream].clock.clone();
        held.lanes.learn(&clock);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: Raw, event: Raw, _flags: c_uint) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        let event = super::event::find(held, event)?;
        let awaited = held.events[event].recorded.as_ref().map(|(position, _)| *position);
        if held.leaves_out(Step::Wait, stream, awaited) {
            return Ok(());
        }
        if let Some(mark) = held.events[event].mark.clone() {
            return held.wait_in_capture(stream, &mark);
        }
        if let Some((position, clock)) = held.events[event].recorded.clone() {
            held.refuse_outside_event(stream)?;
            held.wait_for(stream, position, &clock);
            scheduler::after_submission(held);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(stream: Raw, function: Option<extern "C" fn(Raw)>, data: Raw) -> Status {
    static OVERDUE: Once = Once::new();
    call(|held| {
        let stream = find_stream(held, stream)?;
        let function = function.ok_or(Status::INVALID_VALUE)?;
        OVERDUE.call_once(|| {
            std::thread::spawn(host_functions::run_overdue);
        });
        let work = Work::Host(Arc::new(move || function(data)), Instant::now());
        held.submit(stream, "cuLaunchHostFunc", &[], work)?;
        scheduler::after_submission(held);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetPriority(stream: Raw, priority: Out<c_int>) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        Ok(priority.set(held.streams[stream].priority)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetFlags(stream: Raw, flags: Out<c_uint>) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        Ok(flags.set(if held.streams[stream].blocking { 0 } else { NON_BLOCKING })?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamGetCtx(stream: Raw, context: Out<Raw>) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        Ok(context.set(Tag::Context.handle(held.streams[stream].context))?)
    })
}
