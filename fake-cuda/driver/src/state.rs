//! The one state, its lock, and the handles by which callers name what is in it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::abi::{Outcome, Raw, Status};
use crate::blas::Blas;
use crate::capture::Capture;
use crate::clock::Lanes;
use crate::driver::{Context, Event, Function, Graph, GraphExec, Kernel, Module, Pool};
use crate::heap::Heap;
use crate::log::Log;
use crate::mutation::Mutations;
use crate::nccl::Nccl;
use crate::nvrtc::Program;
use crate::queue::{Stream, StreamId};
use crate::rand::Generator;
use crate::report::{Kind, Reports};
use crate::scheduler::Scheduler;
use crate::upload::Uploads;

pub type Held = MutexGuard<'static, State>;

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::default()));

/// Notified whenever something may have become possible that was not.
pub static CHANGED: Condvar = Condvar::new();

pub fn lock() -> Held {
    STATE.lock()
}

/// What tests set about the devices.
pub struct Machine {
    pub devices: usize,
    /// Bytes of memory of each device.
    pub memory: usize,
    pub attributes: HashMap<i32, i32>,
}

impl Default for Machine {
    fn default() -> Self {
        Machine { devices: 8, memory: 16 << 30, attributes: HashMap::new() }
    }
}

/// Bytes allocated on a device.
#[derive(Clone, Copy, Default)]
pub struct Usage {
    pub now: usize,
    pub peak: usize,
}

#[derive(Default)]
pub struct State {
    pub machine: Machine,
    /// How often the state was reset: a thread that let go of the lock sees whether its stream is still there.
    pub epoch: u64,
    pub kernels: BTreeMap<String, Arc<Kernel>>,
    pub scheduler: Scheduler,
    pub reports: Reports,
    pub heap: Heap,
    pub uploads: Uploads,
    pub usage: HashMap<usize, Usage>,
    /// How many allocations on devices still succeed before one fails.
    pub allocations_left: Option<u64>,
    pub lanes: Lanes,
    pub mutations: Mutations,
    /// What was submitted, if a test wants to know.
    pub log: Option<Log>,
    pub contexts: Vec<Context>,
    pub streams: Vec<Stream>,
    pub events: Vec<Event>,
    /// Those that have ended are gone.
    pub captures: Vec<Option<Capture>>,
    pub graphs: Vec<Graph>,
    pub execs: Vec<GraphExec>,
    pub modules: Vec<Module>,
    pub functions: Vec<Function>,
    pub pools: Vec<Pool>,
    pub nccl: Nccl,
    /// cuBLAS's handles.
    pub blas: Vec<Blas>,
    /// cuRAND's generators.
    pub generators: Vec<Generator>,
    /// NVRTC's programs; those that were destroyed are gone.
    pub programs: Vec<Option<Program>>,
    /// Operations named so far.
    pub named: u64,
    /// What the thread says its operations are for, by thread.
    pub labels: HashMap<u64, String>,
    /// Operations run so far: the time.
    pub ticks: u64,
}

/// The kinds of handles. A handle holds its kind, so that one of another kind is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    Context = 0xC0,
    Stream = 0x57,
    Event = 0xE7,
    Module = 0x30,
    Function = 0xF0,
    Pool = 0x90,
    Comm = 0xCC,
    Registration = 0x9E,
    Graph = 0x96,
    GraphExec = 0x97,
    Blas = 0xB1,
    Generator = 0x6E,
    Program = 0xC3,
}

const SHIFT: u32 = 40;

impl Tag {
    pub fn handle(self, index: usize) -> Raw {
        ((self as usize) << SHIFT) | ((index + 1) << 4)
    }

    pub fn index(self, raw: Raw) -> Option<usize> {
        (raw >> SHIFT == self as usize).then(|| ((raw & ((1 << SHIFT) - 1)) >> 4).checked_sub(1))?
    }
}

impl State {
    /// A name for an operation, as reports give it.
    pub fn name_operation(&mut self, call: &str, stream: StreamId) -> Arc<str> {
        self.named += 1;
        let label = self.labels.get(&crate::clock::this_thread());
        let label = label.map_or(String::new(), |label| format!(" ({label})"));
        format!("{call} #{}{label} on {}", self.named, self.streams[stream].name).into()
    }

    /// Reports a call that the real library leaves undefined or refuses, and its status.
    pub fn misuse<T>(&mut self, status: Status, message: String) -> Outcome<T> {
        self.reports.add(Kind::Misuse, message);
        Err(status)
    }

    /// Starts anew: what callers hold is void. The kernels that tests registered stay.
    pub fn reset(&mut self) {
        let fresh =
            State { epoch: self.epoch + 1, kernels: std::mem::take(&mut self.kernels), ..State::default() };
        *self = fresh;
    }
}
