//! NVTX ranges for Nsight and other profilers: what the host was doing when it submitted work.
//!
//! A profiler that wants them says so before it starts the program, by `NVTX_INJECTION64_PATH` ([`injection`]); without one
//! a range costs one load. They are in the domain `fsdp`, each named for what is done and the unit (`forward layers.3`), in
//! a category named for the lane: `compute`, `all-gather`, `reduce`. A range is of the thread that pushes it and lasts
//! as long as the host needs to submit the work; a profiler projects it onto the kernels and collectives that were
//! submitted in it.

mod injection;

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;

use injection::{CREATE_DOMAIN, DomainHandle, EventAttributes, NAME_CATEGORY, RANGE_POP, RANGE_PUSH};

const DOMAIN: &CStr = c"fsdp";
/// The lanes that have a category of their own; its number is the place in this list, from 1.
const LANES: [(&str, &CStr); 4] = [
    ("compute", c"compute"),
    ("all-gather", c"all-gather"),
    ("reduce", c"reduce"),
    ("outer reduce", c"outer reduce"),
];

/// `NVTX_MESSAGE_TYPE_ASCII`; profilers take UTF-8.
const MESSAGE_TEXT: i32 = 1;

/// The profiler's handle of [`DOMAIN`].
struct Domain(DomainHandle);

// SAFETY: NVTX's functions may be called from any thread, with any domain.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

/// The domain, if a profiler is attached. The first call attaches it.
fn domain() -> Option<&'static Domain> {
    static ATTACHED: OnceLock<Option<Domain>> = OnceLock::new();
    let attach = || {
        if !injection::attach() {
            return None;
        }
        // SAFETY: the name is a string that lasts.
        let domain = CREATE_DOMAIN.get().map_or(ptr::null_mut(), |create| unsafe { create(DOMAIN.as_ptr()) });
        if let Some(name) = NAME_CATEGORY.get() {
            for (number, (_, lane)) in (1..).zip(LANES) {
                // SAFETY: the domain is the profiler's, the name a string that lasts.
                unsafe { name(domain, number, lane.as_ptr()) };
            }
        }
        Some(Domain(domain))
    };
    ATTACHED.get_or_init(attach).as_ref()
}

/// A range of this thread, which ends when it is dropped.
pub(crate) struct HostRange {
    pushed: Option<&'static Domain>,
    /// It ends on the thread where it began.
    _of_thread: PhantomData<*const ()>,
}

impl HostRange {
    /// Begins `name` of `unit`, inside the ranges of this thread that have not ended. Nothing without a profiler.
    pub(crate) fn push(lane: &str, name: &str, unit: &str) -> HostRange {
        let pushed = domain().filter(|domain| push(domain, lane, name, unit));
        HostRange { pushed, _of_thread: PhantomData }
    }
}

impl Drop for HostRange {
    fn drop(&mut self) {
        if let Some(domain) = self.pushed
            && let Some(pop) = RANGE_POP.get()
        {
            // SAFETY: the domain is the profiler's.
            unsafe { pop(domain.0) };
        }
    }
}

/// Whether the profiler was told.
fn push(domain: &Domain, lane: &str, name: &str, unit: &str) -> bool {
    let Some(push) = RANGE_PUSH.get() else { return false };
    let unit = if unit.is_empty() { "(root)" } else { unit };
    let message = format!("{name} {unit}\0");
    let category = LANES.iter().position(|(known, _)| *known == lane).map_or(0, |at| at as u32 + 1);
    let attributes = EventAttributes {
        version: injection::VERSION,
        size: size_of::<EventAttributes>() as u16,
        category,
        color_type: 0,
        color: 0,
        payload_type: 0,
        reserved: 0,
        payload: 0,
        message_type: MESSAGE_TEXT,
        message: message.as_ptr().cast(),
    };
    // SAFETY: the attributes are of the version and size that they say, and the message ends with a zero; both are there
    // during the call, in which the profiler copies what it keeps.
    unsafe { push(domain.0, &raw const attributes) };
    true
}
