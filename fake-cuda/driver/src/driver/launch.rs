//! Launches of kernels, which are functions that tests register.

#![allow(non_snake_case)]

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use super::module::find_function;
use super::{call, find_stream};
use crate::abi::{In, Outcome, Raw, Status};
use crate::kernel_abi::{Declare, RawLaunch, RawUpload, Run};
use crate::queue::Work;
use crate::race::Access;
use crate::scheduler;
use crate::state::{Held, State};

/// What a test has registered under a kernel's name.
pub struct Kernel {
    /// Bytes of each parameter.
    pub sizes: Vec<usize>,
    pub declare: Declare,
    pub run: Run,
    pub data: *const c_void,
}

// SAFETY: who registers a kernel promises that both functions may be called with `data` from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// The parameters' values as they were when the kernel was launched, and its shape.
struct Launch {
    values: Vec<Vec<u8>>,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    uploads: Vec<Option<Arc<[u8]>>>,
}

impl Launch {
    fn with_raw<R>(&self, f: impl FnOnce(&RawLaunch) -> R) -> R {
        let params = self.values.iter().map(|value| value.as_ptr()).collect::<Vec<_>>();
        let upload = |bytes: &Option<Arc<[u8]>>| match bytes {
            Some(bytes) => RawUpload { bytes: bytes.as_ptr(), len: bytes.len() },
            None => RawUpload { bytes: std::ptr::null(), len: 0 },
        };
        let uploads = self.uploads.iter().map(upload).collect::<Vec<_>>();
        f(&RawLaunch {
            params: params.as_ptr(),
            count: params.len(),
            grid: self.grid,
            block: self.block,
            shared_bytes: self.shared_bytes,
            uploads: uploads.as_ptr(),
        })
    }
}

extern "C" fn add_access(sink: *mut c_void, address: u64, bytes: usize, writes: bool) {
    // SAFETY: `sink` is what `accesses_of` passed to the declaring function, which hands it on during that call.
    let accesses = unsafe { &mut *sink.cast::<Vec<Access>>() };
    let of = if writes { Access::write } else { Access::read };
    accesses.push(of(address as usize, bytes));
}

fn accesses_of(kernel: &Kernel, launch: &Launch) -> Vec<Access> {
    let mut accesses = Vec::<Access>::new();
    launch.with_raw(|raw| (kernel.declare)(kernel.data, raw, (&raw mut accesses).cast(), add_access));
    accesses
}

/// The shape of a launch, if a device could run it.
fn check_shape(held: &mut State, name: &str, grid: [u32; 3], block: [u32; 3]) -> Outcome {
    let threads = block.iter().map(|n| u64::from(*n)).product::<u64>();
    let possible =
        grid.iter().all(|n| *n > 0) && (1..=1024).contains(&threads) && grid[1].max(grid[2]) <= 65_535;
    match possible {
        true => Ok(()),
        false => held.misuse(
            Status::INVALID_VALUE,
            format!(
                "kernel {name} is launched with {grid:?} blocks of {block:?} threads, which no device runs"
            ),
        ),
    }
}

fn launch(
    held: &mut Held,
    function: Raw,
    (grid, block): ([u32; 3], [u32; 3]),
    shared_bytes: u32,
    stream: Raw,
    params: &In<In<u8>>,
) -> Outcome {
    let stream = find_stream(held, stream)?;
    let function = find_function(held, function)?;
    let name = held.functions[function].name.clone();
    check_shape(held, &name, grid, block)?;
    let kernel = held.kernels.get(&name).cloned().ok_or(Status::NOT_FOUND)?;
    let mut values = Vec::new();
    for (index, size) in kernel.sizes.iter().enumerate() {
        let param = params.get(index)?;
        values.push((0..*size).map(|byte| param.get(byte)).collect::<Result<Vec<u8>, _>>()?);
    }
    let upload = |value: &Vec<u8>| held.uploads.at(usize::from_ne_bytes(value.as_slice().try_into().ok()?));
    let uploads = values.iter().map(upload).collect();
    let launch = Launch { values, grid, block, shared_bytes, uploads };
    let accesses = accesses_of(&kernel, &launch);
    let run = Arc::new(move || launch.with_raw(|raw| (kernel.run)(kernel.data, raw)));
    held.submit(stream, &name, &accesses, Work::Memory(run))?;
    scheduler::after_submission(held);
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    function: Raw,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Raw,
    params: In<In<u8>>,
    extra: Raw,
) -> Status {
    call(|held| {
        if extra != 0 {
            return held
                .misuse(Status::NOT_SUPPORTED, "cuLaunchKernel with packed parameters (`extra`)".to_owned());
        }
        let shape = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        launch(held, function, shape, shared_bytes, stream, &params)
    })
}
