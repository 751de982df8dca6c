//! Events: positions in streams.

#![allow(non_snake_case)]

use std::ffi::c_uint;

use super::{call, current_context, find_stream};
use crate::abi::{Out, Outcome, Raw, Status};
use crate::capture::Mark;
use crate::clock::Clock;
use crate::mutation::Step;
use crate::queue::{Position, Work};
use crate::report::Kind;
use crate::scheduler;
use crate::state::{Held, Tag, lock};

const DISABLE_TIMING: c_uint = 2;

pub struct Event {
    pub context: usize,
    pub name: String,
    timed: bool,
    pub destroyed: bool,
    /// Where it was last recorded, and what is complete there.
    pub recorded: Option<(Position, Clock)>,
    /// Where it was recorded in a capture, if that was last.
    pub mark: Option<Mark>,
    /// When its last record ran, in operations.
    pub time: Option<u64>,
}

pub fn find(held: &mut Held, raw: Raw) -> Outcome<usize> {
    match Tag::Event.index(raw).filter(|index| *index < held.events.len()) {
        Some(index) if !held.events[index].destroyed => Ok(index),
        Some(index) => {
            let name = held.events[index].name.clone();
            held.misuse(Status::INVALID_HANDLE, format!("{name} is used after it was destroyed"))
        }
        None => held.misuse(Status::INVALID_HANDLE, format!("{raw:#x} is used as an event, and is none")),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: Out<Raw>, flags: c_uint) -> Status {
    call(|held| {
        let context = current_context(held)?;
        let index = held.events.len();
        let name = format!("event {index} of device {}", held.contexts[context].device);
        held.events.push(Event {
            context,
            name,
            timed: flags & DISABLE_TIMING == 0,
            destroyed: false,
            recorded: None,
            mark: None,
            time: None,
        });
        Ok(event.set(Tag::Event.handle(index))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: Raw) -> Status {
    call(|held| {
        let event = find(held, event)?;
        held.events[event].destroyed = true;
        held.events[event].recorded = None;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: Raw, stream: Raw) -> Status {
    call(|held| {
        let event = find(held, event)?;
        let stream = find_stream(held, stream)?;
        if held.events[event].context != held.streams[stream].context {
            let (event, stream) = (&held.events[event].name, &held.streams[stream].name);
            let message = format!("{event} is recorded on {stream}, of another context");
            return held.misuse(Status::INVALID_HANDLE, message);
        }
        if held.leaves_out(Step::Record, stream, None) {
            return Ok(());
        }
        held.events[event].mark = held.mark(stream)?;
        if held.events[event].mark.is_some() {
            held.events[event].recorded = None;
            return Ok(());
        }
        let position = held.submit(stream, "cuEventRecord", &[], Work::Record(event))?;
        let clock = held.streams[stream].clock.clone();
        held.events[event].recorded = Some((position, clock));
        held.events[event].time = None;
        scheduler::after_submission(held);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecordWithFlags(event: Raw, stream: Raw, flags: c_uint) -> Status {
    const EXTERNAL: c_uint = 1;
    if flags & EXTERNAL != 0 {
        let message = "cuEventRecordWithFlags for use outside of a graph".to_owned();
        lock().reports.add(Kind::Unsupported, message);
        return Status::NOT_SUPPORTED;
    }
    cuEventRecord(event, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: Raw) -> Status {
    call(|held| {
        let event = find(held, event)?;
        let mark = held.events[event].mark.clone();
        held.refuse_mark(mark)?;
        if let Some((position, clock)) = held.events[event].recorded.clone() {
            scheduler::run_until(held, position)?;
            held.lanes.learn(&clock);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: Raw) -> Status {
    call(|held| {
        let event = find(held, event)?;
        let mark = held.events[event].mark.clone();
        held.refuse_mark(mark)?;
        held.refuse_disturbance()?;
        if let Some((position, clock)) = held.events[event].recorded.clone() {
            if !scheduler::poll(held, position) {
                return Err(Status::NOT_READY);
            }
            held.lanes.learn(&clock);
        }
        Ok(())
    })
}

/// A microsecond for each operation that any stream ran in between.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime(milliseconds: Out<f32>, start: Raw, end: Raw) -> Status {
    call(|held| {
        let mut times = [0; 2];
        for (time, event) in times.iter_mut().zip([start, end]) {
            let event = find(held, event)?;
            let event = &held.events[event];
            if !event.timed || event.recorded.is_none() {
                return Err(Status::INVALID_HANDLE);
            }
            *time = event.time.ok_or(Status::NOT_READY)?;
        }
        Ok(milliseconds.set((times[1] as f32 - times[0] as f32) / 1000.0)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: Raw, end: Raw) -> Status {
    cuEventElapsedTime(milliseconds, start, end)
}
