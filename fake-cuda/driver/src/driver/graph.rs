//! Graphs: what a capture recorded, launched as often as wanted.
//!
//! A graph runs on streams of its own, one for each that was captured, which the launching stream waits for: so it is
//! scheduled and checked like everything else.

#![allow(non_snake_case)]

use std::ffi::c_int;

use super::{call, find_stream, stream};
use crate::abi::{In, Out, Outcome, Raw, Status};
use crate::capture::{Act, Node, Reach, Recording};
use crate::clock::Clock;
use crate::nccl;
use crate::queue::{Position, StreamId, Work};
use crate::report::Kind;
use crate::scheduler;
use crate::state::{Held, State, Tag};

pub struct Graph {
    pub context: usize,
    recording: Recording,
    pub destroyed: bool,
}

pub struct GraphExec {
    pub context: usize,
    nodes: Vec<Node>,
    lanes: Vec<StreamId>,
    /// Where its last launch ends.
    last: Option<(Position, Clock)>,
    pub destroyed: bool,
}

fn find(held: &State, raw: Raw) -> Outcome<usize> {
    let index = Tag::Graph.index(raw).ok_or(Status::INVALID_VALUE)?;
    held.graphs.get(index).filter(|graph| !graph.destroyed).map(|_| index).ok_or(Status::INVALID_VALUE)
}

fn find_exec(held: &State, raw: Raw) -> Outcome<usize> {
    let index = Tag::GraphExec.index(raw).ok_or(Status::INVALID_VALUE)?;
    held.execs.get(index).filter(|exec| !exec.destroyed).map(|_| index).ok_or(Status::INVALID_VALUE)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: Raw, mode: c_int) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        held.begin_capture(stream, Reach::find(mode)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamEndCapture(stream: Raw, graph: Out<Raw>) -> Status {
    call(|held| {
        graph.set(0)?;
        let stream = find_stream(held, stream)?;
        let context = held.streams[stream].context;
        let recording = held.end_capture(stream)?;
        held.graphs.push(Graph { context, recording, destroyed: false });
        Ok(graph.set(Tag::Graph.handle(held.graphs.len() - 1))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamIsCapturing(stream: Raw, status: Out<c_int>) -> Status {
    call(|held| {
        let stream = find_stream(held, stream)?;
        let code = match held.capture_status(stream) {
            None => 0,
            Some(true) => 1,
            Some(false) => 2,
        };
        Ok(status.set(code)?)
    })
}

/// How far captures of a thread reach is theirs to say; nothing is stored for the thread.
#[unsafe(no_mangle)]
pub extern "C" fn cuThreadExchangeStreamCaptureMode(mode: In<c_int>) -> Status {
    mode.get(0).map_err(Status::from).and_then(Reach::find).map(drop).into()
}

/// Only the number of nodes, which is what a caller without room asks for.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphGetNodes(graph: Raw, nodes: In<Raw>, count: Out<usize>) -> Status {
    call(|held| {
        let graph = find(held, graph)?;
        if !nodes.is_null() {
            held.reports.add(Kind::Unsupported, "cuGraphGetNodes with room for nodes".to_owned());
            return Err(Status::NOT_SUPPORTED);
        }
        Ok(count.set(held.graphs[graph].recording.nodes.len())?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(exec: Out<Raw>, graph: Raw, flags: u64) -> Status {
    const AUTO_FREE_ON_LAUNCH: u64 = 1;
    const DEVICE_LAUNCH: u64 = 4;
    call(|held| {
        let graph = find(held, graph)?;
        if flags & DEVICE_LAUNCH != 0 && flags & AUTO_FREE_ON_LAUNCH != 0 {
            return Err(Status::INVALID_VALUE);
        }
        let number = held.execs.len();
        let Graph { context, recording: Recording { nodes, lanes }, .. } = &held.graphs[graph];
        let (context, nodes, captured) = (*context, nodes.clone(), lanes.clone());
        let lanes = captured.into_iter().map(|of| {
            let name = format!("graph {number}, captured from {}", held.streams[of].name);
            stream::create_for_graph(held, context, name)
        });
        let lanes = lanes.collect();
        held.execs.push(GraphExec { context, nodes, lanes, last: None, destroyed: false });
        Ok(exec.set(Tag::GraphExec.handle(number))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(exec: Raw, stream: Raw) -> Status {
    call(|held| {
        find_exec(held, exec)?;
        find_stream(held, stream).map(drop)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(exec: Raw, stream: Raw) -> Status {
    call(|held| {
        let exec = find_exec(held, exec)?;
        let stream = find_stream(held, stream)?;
        if held.capture_status(stream).is_some() {
            held.reports.add(Kind::Unsupported, "cuGraphLaunch on a stream that captures".to_owned());
            return Err(Status::NOT_SUPPORTED);
        }
        launch(held, exec, stream)
    })
}

/// Queues all nodes on the graph's streams, between what the launching stream was given before and after.
fn launch(held: &mut Held, exec: usize, stream: StreamId) -> Outcome {
    let (nodes, lanes) = (held.execs[exec].nodes.clone(), held.execs[exec].lanes.clone());
    if let Some((end, clock)) = held.execs[exec].last.take() {
        held.wait_for(stream, end, &clock);
    }
    let start = held.submit(stream, "cuGraphLaunch", &[], Work::Nothing)?;
    let clock = held.streams[stream].clock.clone();
    for lane in &lanes {
        held.wait_for(*lane, start, &clock);
    }
    let mut places = Vec::<(Position, Clock)>::with_capacity(nodes.len());
    for node in nodes {
        let lane = lanes[node.lane];
        for before in &node.after {
            let (place, clock) = places[*before].clone();
            held.wait_for(lane, place, &clock);
        }
        match node.act {
            Act::Queue(work) => drop(held.submit(lane, &node.call, &node.accesses, work.again())?),
            Act::Collectives(parts) => nccl::submit_again(held, lane, parts)?,
        }
        places.push((held.end_of(lane), held.streams[lane].clock.clone()));
    }
    for lane in &lanes {
        let (end, clock) = (held.end_of(*lane), held.streams[*lane].clock.clone());
        held.wait_for(stream, end, &clock);
    }
    let end = held.submit(stream, "the end of a graph", &[], Work::Nothing)?;
    held.execs[exec].last = Some((end, held.streams[stream].clock.clone()));
    scheduler::after_submission(held);
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(exec: Raw) -> Status {
    call(|held| {
        let exec = find_exec(held, exec)?;
        held.execs[exec].destroyed = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: Raw) -> Status {
    call(|held| {
        let graph = find(held, graph)?;
        held.graphs[graph].destroyed = true;
        Ok(())
    })
}
