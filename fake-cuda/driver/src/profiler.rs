//! A profiler that attaches to NVTX where `NVTX_INJECTION64_PATH` names this library, and remembers the ranges that threads
//! push. It attaches to one copy of NVTX; not cleared by a reset, as one attaches for good.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::thread::ThreadId;

use parking_lot::Mutex;

use crate::abi::{Out, Text};

/// `NvtxExportTableCallbacks`.
#[repr(C)]
pub struct Callbacks {
    size: usize,
    module_functions: extern "C" fn(c_int, *mut *const *mut *const c_void, *mut c_uint) -> c_int,
}

/// `nvtxEventAttributes_t`, as far as it is looked at.
#[repr(C)]
struct EventAttributes {
    version: u16,
    size: u16,
    category: u32,
    colors_and_payload: [u64; 3],
    message_type: i32,
    message: Text,
}

/// The one domain that there may be.
const DOMAIN: usize = 0xd0;
/// `NVTX_CB_MODULE_CORE2`, and the numbers of its functions.
const CORE2: c_int = 5;
const RANGE_PUSH: usize = 4;
const RANGE_POP: usize = 5;
const NAME_CATEGORY: usize = 8;
const CREATE_DOMAIN: usize = 12;

#[derive(Default)]
struct Profile {
    domain: String,
    categories: HashMap<u32, String>,
    /// How deep each thread is.
    open: HashMap<ThreadId, usize>,
    /// A line each: see [`fake_cuda_profile`].
    lines: String,
}

static PROFILE: Mutex<Option<Profile>> = Mutex::new(None);

fn with<T: Default>(f: impl FnOnce(&mut Profile) -> T) -> T {
    PROFILE.lock().as_mut().map_or_else(T::default, f)
}

extern "C" fn create_domain(name: Text) -> usize {
    with(|profile| profile.domain = name.read().unwrap_or_default());
    DOMAIN
}

extern "C" fn name_category(domain: usize, category: u32, name: Text) {
    with(|profile| {
        let name =
            if domain == DOMAIN { name.read().unwrap_or_default() } else { "of another domain".into() };
        profile.categories.insert(category, name)
    });
}

extern "C" fn push(domain: usize, attributes: &EventAttributes) -> c_int {
    with(|profile| {
        let sound = domain == DOMAIN
            && (attributes.version, attributes.size, attributes.message_type) == (3, 48, 1)
            && attributes.colors_and_payload == [0; 3];
        let message = attributes.message.read().ok().filter(|_| sound);
        let depth = profile.open.entry(std::thread::current().id()).or_default();
        let lane = profile.categories.get(&attributes.category).map_or("", String::as_str);
        let message = message.as_deref().unwrap_or("attributes that are not NVTX's");
        profile.lines += &format!("{}{lane}: {message}\n", "  ".repeat(*depth));
        *depth += 1;
        *depth as c_int - 1
    })
}

extern "C" fn pop(domain: usize) -> c_int {
    with(|profile| {
        let depth = profile.open.entry(std::thread::current().id()).or_default();
        if *depth == 0 || domain != DOMAIN {
            profile.lines += "a pop without a push\n";
            return -1;
        }
        *depth -= 1;
        *depth as c_int
    })
}

/// Attaches: `export_table` is NVTX's.
#[unsafe(no_mangle)]
pub extern "C" fn InitializeInjectionNvtx2(export_table: extern "C" fn(u32) -> *const Callbacks) -> c_int {
    let callbacks = export_table(1);
    if callbacks.is_null() {
        return 0;
    }
    // SAFETY: the table with this number is that of the callbacks, and it is not null.
    let callbacks = unsafe { &*callbacks };
    let (mut table, mut size) = (std::ptr::null(), 0);
    let found = (callbacks.module_functions)(CORE2, &raw mut table, &raw mut size);
    if found == 0 || size != 16 || callbacks.size != size_of::<Callbacks>() {
        return 0;
    }
    let functions = [
        (RANGE_PUSH, push as *const c_void),
        (RANGE_POP, pop as *const c_void),
        (NAME_CATEGORY, name_category as *const c_void),
        (CREATE_DOMAIN, create_domain as *const c_void),
    ];
    *PROFILE.lock() = Some(Profile::default());
    for (number, function) in functions {
        // SAFETY: the table has `size` entries, each but the first a pointer to a function that may be set.
        unsafe { **table.add(number) = function };
    }
    1
}

/// Copies the ranges so far into `buffer` and returns their length: a line each, indented by their depth in their thread,
/// `LANE: MESSAGE`; at last the domain's name and how many ranges are open.
#[unsafe(no_mangle)]
pub extern "C" fn fake_cuda_profile(buffer: Out<u8>, room: usize) -> usize {
    let text = with(|profile| {
        let open: usize = profile.open.values().sum();
        format!("{}domain {}, {open} open\n", profile.lines, profile.domain)
    });
    if text.len() <= room {
        let _ = buffer.set_all(text.bytes());
    }
    text.len()
}
