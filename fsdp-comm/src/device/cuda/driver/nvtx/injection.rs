//! How a profiler attaches to NVTX: the injection interface of NVTX 3 (`nvtxTypes.h` of <https://github.com/NVIDIA/NVTX>).
//!
//! NVTX 3 is no library but headers with tables of functions that do nothing. A profiler names its own library in
//! `NVTX_INJECTION64_PATH`; the program loads it and calls its `InitializeInjectionNvtx2`, and the library asks for the tables
//! and puts its functions there. It does so for each copy of NVTX in the process, of which this is one and NCCL's another.
//!
//! It is written out here, since NVIDIA's crate `nvtx` needs a C compiler and libclang to build, and cudarc loads the library of
//! NVTX 2 (`libnvToolsExt`), which CUDA 13 has not.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libloading::Library;

/// `NVTX_VERSION`, and that of the event attributes.
pub(super) const VERSION: u16 = 3;

#[cfg(target_pointer_width = "64")]
const PATH: &str = "NVTX_INJECTION64_PATH";
#[cfg(not(target_pointer_width = "64"))]
const PATH: &str = "NVTX_INJECTION32_PATH";

/// A function of the profiler; null until it sets it.
type Slot = AtomicPtr<c_void>;

/// What a profiler is given: a null pointer, a pointer to each slot, a null pointer. `N` is the number of slots and 2.
struct Table<const N: usize>([*const Slot; N]);

// SAFETY: it points to statics, which are shared by atomic accesses.
unsafe impl<const N: usize> Sync for Table<N> {}

impl<const N: usize> Table<N> {
    const fn of(slots: &'static [Slot]) -> Table<N> {
        assert!(slots.len() + 2 == N);
        let mut table = [ptr::null(); N];
        let mut slot = 0;
        while slot < slots.len() {
            table[slot + 1] = &raw const slots[slot];
            slot += 1;
        }
        Table(table)
    }
}

/// Slots of a module and their table.
macro_rules! module {
    ($slots:ident, $table:ident, $functions:literal) => {
        static $slots: [Slot; $functions] = [const { AtomicPtr::new(ptr::null_mut()) }; $functions];
        static $table: Table<{ $functions + 2 }> = Table::of(&$slots);
    };
}

// All modules that NVTX has: a profiler may take one that is missing for a mistake. Only CORE2 is used.
module!(CORE, CORE_TABLE, 15);
module!(CUDA, CUDA_TABLE, 8);
module!(OPENCL, OPENCL_TABLE, 14);
module!(CUDART, CUDART_TABLE, 6);
module!(CORE2, CORE2_TABLE, 15);
module!(SYNC, SYNC_TABLE, 6);

/// `nvtxEventAttributes_t`.
#[repr(C)]
pub(super) struct EventAttributes {
    pub version: u16,
    /// Bytes of the attributes.
    pub size: u16,
    pub category: u32,
    pub color_type: i32,
    pub color: u32,
    pub payload_type: i32,
    pub reserved: i32,
    pub payload: u64,
    pub message_type: i32,
    pub message: *const c_char,
}

/// The handle of a domain; null is the profiler's default domain.
pub(super) type DomainHandle = *mut c_void;

/// A function of the module CORE2, of type `F`.
pub(super) struct Function<F> {
    slot: &'static Slot,
    of_type: PhantomData<F>,
}

impl<F: Copy> Function<F> {
    /// # Safety
    /// `F` is the C function that NVTX declares with this number in `NvtxCallbackIdCore2`.
    const unsafe fn numbered(number: usize) -> Self {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        Function { slot: &CORE2[number - 1], of_type: PhantomData }
    }

    /// The profiler's, if it has set one.
    pub(super) fn get(&self) -> Option<F> {
        let function = self.slot.load(Ordering::Acquire);
        // SAFETY: the profiler has set it to a function of the type that NVTX declares, which `F` is.
        (!function.is_null()).then(|| unsafe { std::mem::transmute_copy(&function) })
    }
}

// SAFETY: numbers and types are those of `nvtxTypes.h`.
pub(super) static RANGE_PUSH: Function<unsafe extern "C" fn(DomainHandle, *const EventAttributes) -> c_int> =
    unsafe { Function::numbered(4) };
// SAFETY: as above.
pub(super) static RANGE_POP: Function<unsafe extern "C" fn(DomainHandle) -> c_int> =
    unsafe { Function::numbered(5) };
// SAFETY: as above.
pub(super) static NAME_CATEGORY: Function<unsafe extern "C" fn(DomainHandle, u32, *const c_char)> =
    unsafe { Function::numbered(8) };
// SAFETY: as above.
pub(super) static CREATE_DOMAIN: Function<unsafe extern "C" fn(*const c_char) -> DomainHandle> =
    unsafe { Function::numbered(12) };

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    module_functions: extern "C" fn(c_int, *mut *const *const Slot, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), module_functions };
static VERSION_INFO: VersionInfo = VersionInfo {
    size: size_of::<VersionInfo>(),
    version: VERSION as u32,
    reserved: 0,
    set_injection_version,
};

/// The table of a module (`NvtxCallbackModule`) and the number of its entries before the last; 0 if there is no such module.
extern "C" fn module_functions(module: c_int, table: *mut *const *const Slot, size: *mut c_uint) -> c_int {
    let pointers: &'static [*const Slot] = match module {
        1 => &CORE_TABLE.0,
        2 => &CUDA_TABLE.0,
        3 => &OPENCL_TABLE.0,
        4 => &CUDART_TABLE.0,
        5 => &CORE2_TABLE.0,
        6 => &SYNC_TABLE.0,
        _ => return 0,
    };
    if !size.is_null() {
        // SAFETY: the profiler passes null or room for a number.
        unsafe { size.write(pointers.len() as c_uint - 1) };
    }
    if !table.is_null() {
        // SAFETY: the profiler passes null or room for a pointer.
        unsafe { table.write(pointers.as_ptr()) };
    }
    1
}

extern "C" fn set_injection_version(_version: u32) {}

/// The table with this number in `NvtxExportTableID`, or null.
extern "C" fn export_table(table: u32) -> *const c_void {
    match table {
        1 => (&raw const CALLBACKS).cast(),
        3 => (&raw const VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

/// Loads the library that the environment names and lets it set the functions. False if none is named, or it is no
/// profiler's or does not want to attach: NVTX is silent about that.
pub(super) fn attach() -> bool {
    type Initialize = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
    let Some(path) = std::env::var_os(PATH) else { return false };
    // SAFETY: whoever set the variable wants the library in the process, with its initialisers.
    let Ok(library) = (unsafe { Library::new(path) }) else { return false };
    // SAFETY: a library that is named there has the function with this type.
    let Ok(initialize) = (unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") }) else {
        return false;
    };
    // SAFETY: it is given what NVTX's headers give it, and the tables last as long as the process.
    let attached = unsafe { initialize(export_table) } != 0;
    if attached {
        // Its functions are called from now on.
        std::mem::forget(library);
    }
    attached
}
