//! Streams that record what they are given instead of queueing it: the making of a graph.

use std::ffi::c_int;

use crate::abi::{Outcome, Status};
use crate::clock::this_thread;
use crate::nccl::Part;
use crate::queue::{StreamId, Work};
use crate::race::Access;
use crate::state::State;

/// How far a capture forbids calls that would disturb it (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    AllThreads,
    OneThread,
    Relaxed,
}

impl Reach {
    pub fn find(mode: c_int) -> Outcome<Self> {
        match mode {
            0 => Ok(Reach::AllThreads),
            1 => Ok(Reach::OneThread),
            2 => Ok(Reach::Relaxed),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}

pub struct Capture {
    reach: Reach,
    thread: u64,
    /// The streams that record, the one that began first.
    lanes: Vec<Lane>,
    nodes: Vec<Node>,
    invalidated: bool,
}

struct Lane {
    stream: StreamId,
    /// What its next node comes after.
    frontier: Vec<usize>,
}

/// A recorded operation.
#[derive(Clone)]
pub struct Node {
    pub lane: usize,
    pub after: Vec<usize>,
    pub call: String,
    pub accesses: Vec<Access>,
    pub act: Act,
}

#[derive(Clone)]
pub enum Act {
    Queue(Work),
    Collectives(Vec<Part>),
}

/// Where an event was recorded during a capture.
#[derive(Clone)]
pub struct Mark {
    capture: usize,
    nodes: Vec<usize>,
}

/// What a capture became: its nodes, in an order in which they may run, and the streams they were recorded on.
pub struct Recording {
    pub nodes: Vec<Node>,
    pub lanes: Vec<StreamId>,
}

impl State {
    fn capture_of(&mut self, stream: StreamId) -> Option<&mut Capture> {
        let capture = self.streams[stream].capture?;
        self.captures[capture].as_mut()
    }

    /// Whether a stream records: whether its capture is still sound.
    pub fn capture_status(&mut self, stream: StreamId) -> Option<bool> {
        self.capture_of(stream).map(|capture| !capture.invalidated)
    }

    pub fn begin_capture(&mut self, stream: StreamId, reach: Reach) -> Outcome {
        if self.streams[stream].legacy {
            return Err(Status::CAPTURE_UNSUPPORTED);
        }
        if self.streams[stream].capture.is_some() {
            return Err(Status::ILLEGAL_STATE);
        }
        self.streams[stream].capture = Some(self.captures.len());
        let lanes = vec![Lane { stream, frontier: Vec::new() }];
        let capture = Capture { reach, thread: this_thread(), lanes, nodes: Vec::new(), invalidated: false };
        self.captures.push(Some(capture));
        Ok(())
    }

    /// Ends the capture that `stream` has begun.
    pub fn end_capture(&mut self, stream: StreamId) -> Outcome<Recording> {
        let id = self.streams[stream].capture.ok_or(Status::ILLEGAL_STATE)?;
        let capture = self.captures[id].as_ref().ok_or(Status::ILLEGAL_STATE)?;
        if capture.lanes[0].stream != stream {
            return Err(Status::CAPTURE_UNMATCHED);
        }
        if capture.reach != Reach::Relaxed && capture.thread != this_thread() {
            return Err(Status::CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = self.captures[id].take() else { return Err(Status::ILLEGAL_STATE) };
        for lane in &capture.lanes {
            self.streams[lane.stream].capture = None;
        }
        if capture.invalidated {
            return Err(Status::CAPTURE_INVALIDATED);
        }
        if !capture.is_joined() {
            return Err(Status::CAPTURE_UNJOINED);
        }
        Ok(Recording { nodes: capture.nodes, lanes: capture.lanes.iter().map(|lane| lane.stream).collect() })
    }

    /// Records an operation of a stream that captures; false if it does not.
    pub fn record(&mut self, stream: StreamId, call: &str, accesses: &[Access], act: Act) -> Outcome<bool> {
        let Some(capture) = self.capture_of(stream) else { return Ok(false) };
        if capture.invalidated {
            return Err(Status::CAPTURE_INVALIDATED);
        }
        let Some(lane) = capture.lanes.iter().position(|lane| lane.stream == stream) else {
            return Ok(false);
        };
        let after = std::mem::replace(&mut capture.lanes[lane].frontier, vec![capture.nodes.len()]);
        capture.nodes.push(Node { lane, after, call: call.to_owned(), accesses: accesses.to_vec(), act });
        Ok(true)
    }

    /// Where an event is that a stream records now, if it captures.
    pub fn mark(&mut self, stream: StreamId) -> Outcome<Option<Mark>> {
        let id = self.streams[stream].capture;
        let (Some(id), Some(capture)) = (id, self.capture_of(stream)) else { return Ok(None) };
        if capture.invalidated {
            return Err(Status::CAPTURE_INVALIDATED);
        }
        let lane = capture.lanes.iter().find(|lane| lane.stream == stream);
        Ok(lane.map(|lane| Mark { capture: id, nodes: lane.frontier.clone() }))
    }

    /// Makes a stream wait for a place in a capture, which it joins.
    pub fn wait_in_capture(&mut self, stream: StreamId, mark: &Mark) -> Outcome {
        if self.streams[stream].legacy {
            return Err(Status::CAPTURE_IMPLICIT);
        }
        if self.streams[stream].capture.is_some_and(|capture| capture != mark.capture) {
            self.invalidate(stream);
            return Err(Status::CAPTURE_MERGE);
        }
        let Some(capture) = self.captures[mark.capture].as_mut() else {
            return Err(Status::CAPTURE_ISOLATION);
        };
        if !capture.lanes.iter().any(|lane| lane.stream == stream) {
            capture.lanes.push(Lane { stream, frontier: Vec::new() });
        }
        self.streams[stream].capture = Some(mark.capture);
        for lane in capture.lanes.iter_mut().filter(|lane| lane.stream == stream) {
            let new =
                mark.nodes.iter().filter(|node| !lane.frontier.contains(node)).copied().collect::<Vec<_>>();
            lane.frontier.extend(new);
        }
        Ok(())
    }

    fn invalidate(&mut self, stream: StreamId) {
        if let Some(capture) = self.capture_of(stream) {
            capture.invalidated = true;
        }
    }

    /// A stream that captures waits for an event from outside, which no graph can.
    pub fn refuse_outside_event(&mut self, stream: StreamId) -> Outcome {
        match self.capture_of(stream) {
            Some(capture) => {
                capture.invalidated = true;
                Err(Status::CAPTURE_ISOLATION)
            }
            None => Ok(()),
        }
    }

    /// Refuses what the host waits for in a stream that captures; the capture is void then.
    pub fn refuse_capture(&mut self, stream: StreamId) -> Outcome {
        match self.capture_of(stream) {
            Some(capture) => {
                capture.invalidated = true;
                Err(Status::CAPTURE_UNSUPPORTED)
            }
            None => Ok(()),
        }
    }

    /// Refuses to wait for or ask an event that is part of a capture, which is void then.
    pub fn refuse_mark(&mut self, mark: Option<Mark>) -> Outcome {
        let Some(mark) = mark else { return Ok(()) };
        if let Some(capture) = self.captures[mark.capture].as_mut() {
            capture.invalidated = true;
        }
        Err(Status::CAPTURED_EVENT)
    }

    /// Refuses a call that would disturb a capture of this thread, or of any if that is how far it reaches.
    pub fn refuse_disturbance(&mut self) -> Outcome {
        let disturbed = self.captures.iter_mut().flatten().filter(|capture| match capture.reach {
            Reach::AllThreads => true,
            Reach::OneThread => capture.thread == this_thread(),
            Reach::Relaxed => false,
        });
        let mut any = false;
        for capture in disturbed {
            capture.invalidated = true;
            any = true;
        }
        if any { Err(Status::CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Refuses the legacy stream while a stream captures that waits for it.
    pub fn refuse_implicit_wait(&mut self, stream: StreamId) -> Outcome {
        if !self.streams[stream].legacy {
            return Ok(());
        }
        let context = self.streams[stream].context;
        let capturing = (0..self.streams.len()).filter(|other| {
            let other = &self.streams[*other];
            other.context == context && other.blocking && other.capture.is_some()
        });
        let capturing = capturing.collect::<Vec<_>>();
        capturing.iter().for_each(|other| self.invalidate(*other));
        if capturing.is_empty() { Ok(()) } else { Err(Status::CAPTURE_IMPLICIT) }
    }
}

impl Capture {
    /// Whether the first lane comes after all that the others have recorded.
    fn is_joined(&self) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        let mut next = self.lanes[0].frontier.clone();
        while let Some(node) = next.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                next.extend(&self.nodes[node].after);
            }
        }
        reached.into_iter().all(|reached| reached)
    }
}
