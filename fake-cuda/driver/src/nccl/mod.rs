//! The exported functions of NCCL.
//!
//! The ranks are threads of this process. Each call queues this rank's part on its stream; when the stream comes to it
//! the part has arrived, and when the parts of all ranks have, whichever thread runs the last of them moves the data.

mod arithmetic;
mod calls;
mod comm;
mod exchange;
mod group;
mod memory;
mod missing;
mod redop;
mod rendezvous;
mod split;

use std::collections::HashMap;
use std::ffi::{c_char, c_int};

use crate::abi::{Null, Out, Status};
use crate::state::{Held, State, Tag, lock};

pub use calls::Part;
pub use rendezvous::{Progress, arrive, progress, submit_again};

/// `ncclResult_t`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub c_int);

impl Code {
    pub const SUCCESS: Code = Code(0);
    pub const CUDA_ERROR: Code = Code(1);
    pub const SYSTEM_ERROR: Code = Code(2);
    pub const INVALID_ARGUMENT: Code = Code(4);
    pub const INVALID_USAGE: Code = Code(5);
    pub const REMOTE_ERROR: Code = Code(6);
    pub const IN_PROGRESS: Code = Code(7);
}

pub type Answer<T = ()> = Result<T, Code>;

impl From<Null> for Code {
    fn from(_: Null) -> Self {
        Code::INVALID_ARGUMENT
    }
}

impl From<Status> for Code {
    fn from(_: Status) -> Self {
        Code::CUDA_ERROR
    }
}

/// For parts that a graph submits, of which the driver's caller hears.
impl From<Code> for Status {
    fn from(_: Code) -> Self {
        Status::INVALID_VALUE
    }
}

impl From<Answer> for Code {
    fn from(answer: Answer) -> Self {
        answer.err().unwrap_or(Code::SUCCESS)
    }
}

/// Runs the body of an exported function under the lock.
fn call(body: impl FnOnce(&mut Held) -> Answer) -> Code {
    body(&mut lock()).into()
}

/// A device whose ranks' parts never arrive any more.
struct Lost {
    device: usize,
    calls_left: u64,
    reported: bool,
}

#[derive(Default)]
pub struct Nccl {
    unique_ids: u64,
    comms: Vec<comm::Comm>,
    cliques: Vec<comm::Clique>,
    by_id: HashMap<Vec<u8>, usize>,
    launches: Vec<rendezvous::Launch>,
    held_back: Vec<group::HeldBack>,
    lost: Option<Lost>,
}

impl Nccl {
    pub fn lose(&mut self, device: usize, calls: u64, reported: bool) {
        self.lost = Some(Lost { device, calls_left: calls, reported });
    }

    /// The communicators of a context that nobody has destroyed.
    pub fn open_comms(&self, context: usize) -> Vec<String> {
        let open = self.comms.iter().filter(|comm| comm.context == context && !comm.is_closed());
        open.map(|comm| comm.name.clone()).collect()
    }

    /// The communicator that memory is registered with.
    pub fn registered(&self, start: usize, bytes: usize) -> Option<String> {
        let with = self.comms.iter().filter(|comm| !comm.is_closed()).find(|comm| {
            comm.registrations.values().any(|range| range.start < start + bytes && start < range.end)
        });
        with.map(|comm| comm.name.clone())
    }
}

impl State {
    /// Reports a call that NCCL leaves undefined or refuses, and its result.
    fn nccl_misuse<T>(&mut self, code: Code, message: String) -> Answer<T> {
        self.reports.add(crate::report::Kind::Misuse, message);
        Err(code)
    }

    fn find_comm(&mut self, raw: usize) -> Answer<usize> {
        match Tag::Comm.index(raw).filter(|index| *index < self.nccl.comms.len()) {
            Some(index) if !self.nccl.comms[index].is_closed() => Ok(index),
            Some(index) => {
                let name = self.nccl.comms[index].name.clone();
                self.nccl_misuse(Code::INVALID_ARGUMENT, format!("{name} is used after it was destroyed"))
            }
            None => self.nccl_misuse(
                Code::INVALID_ARGUMENT,
                format!("{raw:#x} is used as a communicator, and is none"),
            ),
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetVersion(version: Out<c_int>) -> Code {
    version.set(23_007).map_err(Code::from).into()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code.0 {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// The report holds what went wrong.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: usize) -> *const c_char {
    c"see the report of the fake".as_ptr()
}
