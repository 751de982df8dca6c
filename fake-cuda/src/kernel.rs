//! Kernels as Rust functions.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::kernel_abi::{AddAccess, RawLaunch};
use crate::library::control;

/// Bytes of device memory that a launch reads or writes. What it reads and writes are two accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    address: u64,
    bytes: usize,
    writes: bool,
}

impl Access {
    /// Reads `bytes` from `address` on.
    pub fn read(address: u64, bytes: usize) -> Self {
        Access { address, bytes, writes: false }
    }

    /// Writes `bytes` from `address` on.
    pub fn write(address: u64, bytes: usize) -> Self {
        Access { address, bytes, writes: true }
    }

    fn covers(&self, address: u64, bytes: usize) -> bool {
        self.address <= address && address + bytes as u64 <= self.address + self.bytes as u64
    }
}

/// A launch of a kernel: its parameters, its shape, and the memory that it has said it uses.
pub struct Launch<'a> {
    raw: &'a RawLaunch,
    sizes: &'a [usize],
    accesses: Vec<Access>,
    /// Belongs to the thread that runs it.
    _here: PhantomData<*const ()>,
}

impl Launch<'_> {
    /// Blocks along x, y, z.
    pub fn grid(&self) -> [u32; 3] {
        self.raw.grid
    }

    /// Threads of a block along x, y, z.
    pub fn block(&self) -> [u32; 3] {
        self.raw.block
    }

    /// Bytes of dynamic shared memory.
    pub fn shared_bytes(&self) -> u32 {
        self.raw.shared_bytes
    }

    /// The `index`th parameter as it was passed; a pointer is a `u64`. Panics if it is of another size.
    pub fn param<T: AnyBitPattern>(&self, index: usize) -> T {
        let size = self.sizes[index];
        assert_eq!(size, size_of::<T>(), "parameter {index} was registered with {size} bytes");
        // SAFETY: the driver passes as many pointers as sizes were registered, each to so many bytes.
        unsafe { (*self.raw.params.add(index)).cast::<T>().read_unaligned() }
    }

    /// What the host has copied to where the `index`th parameter points: shapes and strides of up to 1 KiB, which a kernel
    /// needs to say what it touches, at a time when the copy need not have run. `None` if the parameter is null, or if
    /// anything else has written there since.
    pub fn uploaded<T: AnyBitPattern>(&self, index: usize) -> Option<Vec<T>> {
        assert_eq!(self.sizes[index], size_of::<u64>(), "parameter {index} is no pointer");
        // SAFETY: the driver passes as many uploads as sizes were registered.
        let upload = unsafe { &*self.raw.uploads.add(index) };
        let values = upload.bytes.cast::<T>();
        // SAFETY: where `bytes` is not null, it points to `len` bytes that live during the call.
        let value = |i| unsafe { values.add(i).read_unaligned() };
        (!upload.bytes.is_null()).then(|| (0..upload.len / size_of::<T>()).map(value).collect())
    }

    /// Where the `index`th parameter is, of as many bytes as it was registered with, at no particular alignment: for kernels
    /// that take a struct.
    pub fn param_pointer(&self, index: usize) -> *const c_void {
        assert!(index < self.sizes.len(), "parameter {index} of a kernel that takes {}", self.sizes.len());
        // SAFETY: the driver passes a pointer for each registered size.
        unsafe { (*self.raw.params.add(index)).cast() }
    }

    /// The values at `address`. Panics if the kernel has not said that it reads them.
    pub fn read<T: AnyBitPattern>(&self, address: u64, len: usize) -> Vec<T> {
        self.check(address, len * size_of::<T>(), false);
        let at = address as *const T;
        // SAFETY: the driver runs a kernel only while all that it has said it reads is memory, and under its lock.
        (0..len).map(|i| unsafe { at.add(i).read_unaligned() }).collect()
    }

    /// Sets the values at `address`. Panics if the kernel has not said that it writes them.
    pub fn write<T: NoUninit>(&self, address: u64, values: &[T]) {
        self.check(address, size_of_val(values), true);
        let at = address as *mut T;
        for (i, value) in values.iter().enumerate() {
            // SAFETY: as in `read`.
            unsafe { at.add(i).write_unaligned(*value) };
        }
    }

    fn check(&self, address: u64, bytes: usize, writes: bool) {
        let declared = self.accesses.iter().any(|a| a.writes == writes && a.covers(address, bytes));
        let verb = if writes { "writes" } else { "reads" };
        assert!(
            declared || bytes == 0,
            "a kernel {verb} {bytes} bytes at {address:#x} without having said so"
        );
    }
}

struct Kernel {
    sizes: Vec<usize>,
    accesses: Box<Body<Vec<Access>>>,
    run: Box<Body<()>>,
}

type Body<R> = dyn Fn(&Launch<'_>) -> R + Send + Sync;

impl Kernel {
    /// The kernel that was registered with `data`, and a launch of it.
    fn with_launch<R>(
        data: *const c_void,
        raw: *const RawLaunch,
        f: impl FnOnce(&Kernel, Launch<'_>) -> R,
    ) -> R {
        // SAFETY: `register` passes a kernel that lives for ever as `data`.
        let kernel = unsafe { &*data.cast::<Kernel>() };
        // SAFETY: the driver passes a launch that lives during the call.
        let raw = unsafe { &*raw };
        f(kernel, Launch { raw, sizes: &kernel.sizes, accesses: Vec::new(), _here: PhantomData })
    }
}

/// A panic ends the process, after its message: the function is called from C.
extern "C" fn declare(data: *const c_void, raw: *const RawLaunch, sink: *mut c_void, add: AddAccess) {
    Kernel::with_launch(data, raw, |kernel, launch| {
        (kernel.accesses)(&launch).iter().for_each(|a| add(sink, a.address, a.bytes, a.writes));
    });
}

extern "C" fn run(data: *const c_void, raw: *const RawLaunch) {
    Kernel::with_launch(data, raw, |kernel, mut launch| {
        launch.accesses = (kernel.accesses)(&launch);
        (kernel.run)(&launch);
    });
}

/// Registers what a kernel does, for the rest of the process.
pub fn register(
    name: &str,
    sizes: &[usize],
    accesses: impl Fn(&Launch<'_>) -> Vec<Access> + Send + Sync + 'static,
    body: impl Fn(&Launch<'_>) + Send + Sync + 'static,
) {
    let c_name = CString::new(name).expect("a kernel's name holds no zero");
    let kernel = Kernel { sizes: sizes.to_vec(), accesses: Box::new(accesses), run: Box::new(body) };
    let kernel: &'static Kernel = Box::leak(Box::new(kernel));
    let data = std::ptr::from_ref(kernel).cast();
    let status =
        (control().register_kernel)(c_name.as_ptr(), sizes.as_ptr(), sizes.len(), declare, run, data);
    assert_eq!(status, 0, "kernel {name} was not registered");
}
