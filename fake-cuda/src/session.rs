//! A test's time with the driver.

use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use crate::finding::{Finding, Kind};
use crate::kernel::{self, Access, Launch};
use crate::library::control;

/// When operations run that streams were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// When something needs them that the host waits for, and not before.
    Latest,
    /// Each stream as readily as the seed says, one early and another late.
    Random(u64),
    /// As soon as what they wait for is complete.
    Earliest,
}

impl Schedule {
    /// The latest, the earliest, and as many random ones.
    pub fn all(random: u64) -> impl Iterator<Item = Schedule> {
        [Schedule::Latest, Schedule::Earliest].into_iter().chain((0..random).map(Schedule::Random))
    }
}

/// Bytes allocated on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// By now.
    pub now: usize,
    /// At most so far.
    pub peak: usize,
}

/// The driver and NCCL as one test sees them: new, with eight devices of 16 GiB.
///
/// There is one at a time in a process; a second one waits. When it is dropped, what is still allocated or not
/// destroyed is a finding, and findings that nobody took are a panic. What was made during a session is void after
/// it, so drop what owns contexts, streams and memory first: declare the session before it.
pub struct Session {
    _alone: MutexGuard<'static, ()>,
    ended: bool,
}

impl Session {
    /// Starts anew. Panics if the driver cannot be loaded under the names of the real libraries.
    pub fn new(schedule: Schedule) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        // A test that panicked leaves nothing behind that a reset does not clear.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let (seed, mode) = match schedule {
            Schedule::Latest => (0, 0),
            Schedule::Random(seed) => (seed, 1),
            Schedule::Earliest => (0, 2),
        };
        (control().reset)(seed, mode);
        Session { _alone: alone, ended: false }
    }

    /// Starts anew, with candle's kernels registered: see [`register_candle_kernels`](crate::register_candle_kernels).
    pub fn with_candle_kernels(schedule: Schedule) -> Self {
        static REGISTERED: Once = Once::new();
        let session = Session::new(schedule);
        REGISTERED.call_once(crate::register_candle_kernels);
        session
    }

    /// Registers what the kernel `name` does, for this and later sessions: the bytes of each parameter, what memory a
    /// launch reads and writes (the same whenever it is asked), and its effect. Both closures run under the driver's
    /// lock and must not call it; a panic in one ends the process.
    pub fn kernel(
        &self,
        name: &str,
        sizes: &[usize],
        accesses: impl Fn(&Launch<'_>) -> Vec<Access> + Send + Sync + 'static,
        run: impl Fn(&Launch<'_>) + Send + Sync + 'static,
    ) {
        kernel::register(name, sizes, accesses, run);
    }

    /// Text that `cuModuleLoadData` takes for a module with these kernels.
    pub fn image<'a>(kernels: impl IntoIterator<Item = &'a str>) -> String {
        kernels.into_iter().map(|name| format!(".visible .entry {name}()\n")).collect()
    }

    /// What was found so far.
    pub fn findings(&self) -> Vec<Finding> {
        Finding::parse(&read_text(control().report))
    }

    /// What was found so far, for a test that expects it: it will not be found at the end.
    pub fn take_findings(&self) -> Vec<Finding> {
        let findings = self.findings();
        (control().clear_report)();
        findings
    }

    /// Ends the session, and returns what was found and nobody took, leaks included: for a test that expects them.
    pub fn end(mut self) -> Vec<Finding> {
        self.ended = true;
        (control().report_leaks)();
        self.take_findings()
    }

    /// Takes the findings. Panics unless there are some, all of `kind`, one of which contains `text`.
    pub fn expect(&self, kind: Kind, text: &str) {
        let findings = self.take_findings();
        let said =
            findings.iter().any(|f| f.message.contains(text)) && findings.iter().all(|f| f.kind == kind);
        assert!(said, "expected {kind:?} with {text:?}, found {}", list(&findings));
    }

    /// How many operations have been submitted and have not run.
    pub fn pending(&self) -> usize {
        (control().pending)()
    }

    /// Bytes allocated on a device.
    pub fn usage(&self, device: usize) -> Usage {
        let mut usage = Usage::default();
        (control().usage)(device, &raw mut usage.now, &raw mut usage.peak);
        usage
    }

    /// How many devices there are, and the bytes of memory of each. Before the first context.
    pub fn set_devices(&self, count: usize, memory: usize) {
        (control().set_devices)(count, memory);
    }

    /// What `cuDeviceGetAttribute` says of `attribute`, a `CUdevice_attribute`.
    pub fn set_attribute(&self, attribute: i32, value: i32) {
        (control().set_attribute)(attribute, value);
    }

    /// After `successes` more allocations on any device, one fails for lack of memory.
    pub fn fail_allocation(&self, successes: u64) {
        (control().fail_allocation)(successes);
    }

    /// How long a thread waits for others (30 s at first). Then its call fails with `CUDA_ERROR_LAUNCH_TIMEOUT` or
    /// `ncclSystemError`, and what it waited for is a [`Kind::Deadlock`].
    pub fn set_patience(&self, patience: Duration) {
        (control().set_patience)(patience.as_millis() as u64);
    }

    /// After `calls` more collectives, sends and receives of the rank on `device`, in any communicator, none of its parts
    /// arrives any more: operations that need them do not end until their communicator is aborted. The other ranks get
    /// `ncclRemoteError` from `ncclCommGetAsyncError` if `reported`, and nothing otherwise.
    pub fn lose_device(&self, device: usize, calls: u64, reported: bool) {
        (control().lose_device)(device, calls, reported);
    }

    /// How findings call a stream. Panics if `stream`, a `CUstream`, is none.
    pub fn name_stream<T>(&self, stream: *mut T, name: &str) {
        let status = (control().name_stream)(stream as usize, text(name).as_ptr());
        assert_eq!(status, 0, "{stream:?} is no stream of the fake driver");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        (control().report_leaks)();
        let findings = self.findings();
        if !std::thread::panicking() {
            assert!(findings.is_empty(), "found at the end of the session: {}", list(&findings));
        } else if !findings.is_empty() {
            eprintln!("found until the panic: {}", list(&findings));
        }
    }
}

fn list(findings: &[Finding]) -> String {
    match findings {
        [] => "nothing".to_owned(),
        _ => findings.iter().map(|finding| format!("\n  {finding}")).collect(),
    }
}

/// What the driver has to say, by a function that copies it where there is room and returns its length.
pub(crate) fn read_text(copy: extern "C" fn(*mut u8, usize) -> usize) -> String {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let len = copy(bytes.as_mut_ptr(), bytes.len());
        if len <= bytes.len() {
            bytes.truncate(len);
            return String::from_utf8(bytes).expect("the driver writes text");
        }
        bytes.resize(len, 0);
    }
}

fn text(text: &str) -> CString {
    CString::new(text).expect("the text holds no zero")
}

/// What the calling thread's operations are for, in findings, until the next call; an empty label ends it.
pub fn label(label: &str) {
    (control().label)(text(label).as_ptr());
}

/// The host reads pinned memory: what writes it and was not waited for is a [`Kind::Race`].
pub fn read_pinned<T>(values: &[T]) {
    (control().host_access)(values.as_ptr() as usize, size_of_val(values), false);
}

/// The host writes pinned memory: what reads or writes it and was not waited for is a [`Kind::Race`].
pub fn write_pinned<T>(values: &mut [T]) {
    (control().host_access)(values.as_ptr() as usize, size_of_val(values), true);
}

/// What the calling thread has waited for, to be passed to [`acquire`] by a thread that it tells so.
///
/// The driver does not see how threads wait for each other, except by spawning and joining.
pub fn release() -> u64 {
    (control().release)()
}

/// The calling thread has been told by the one that made `token` with [`release`].
pub fn acquire(token: u64) {
    (control().acquire)(token);
}
