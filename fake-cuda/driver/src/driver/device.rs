//! Initialisation, devices and their attributes, names of errors.

#![allow(non_snake_case)]

use std::ffi::{c_char, c_int, c_uint};

use super::call;
use crate::abi::{Out, Outcome, Status, Text};
use crate::state::State;

impl State {
    pub fn check_device(&self, device: c_int) -> Outcome<usize> {
        usize::try_from(device).ok().filter(|i| *i < self.machine.devices).ok_or(Status::INVALID_DEVICE)
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> Status {
    Status::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> Status {
    call(|_| Ok(version.set(13_000)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> Status {
    call(|held| Ok(count.set(held.machine.devices as c_int)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> Status {
    call(|held| {
        held.check_device(ordinal)?;
        Ok(device.set(ordinal)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: Out<u8>, len: c_int, device: c_int) -> Status {
    call(|held| {
        held.check_device(device)?;
        write_text(&name, len, &format!("Fake CUDA device {device}"))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(id: Out<u8>, len: c_int, device: c_int) -> Status {
    call(|held| {
        held.check_device(device)?;
        write_text(&id, len, &format!("0000:{:02x}:00.0", device + 1))
    })
}

fn write_text(out: &Out<u8>, len: c_int, text: &str) -> Outcome {
    let room = usize::try_from(len).ok().and_then(|len| len.checked_sub(1)).ok_or(Status::INVALID_VALUE)?;
    Ok(out.set_all(text.bytes().take(room).chain([0]))?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) -> Status {
    call(|held| {
        let device = held.check_device(device)?;
        Ok(uuid.set(std::array::from_fn(|i| if i == 15 { device as u8 } else { 0xFA }))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> Status {
    cuDeviceGetUuid(uuid, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> Status {
    call(|held| {
        held.check_device(device)?;
        Ok(bytes.set(held.machine.memory)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) -> Status {
    call(|held| {
        held.check_device(device)?;
        let set = held.machine.attributes.get(&attribute).copied();
        Ok(value.set(set.unwrap_or_else(|| default_attribute(attribute, device)))?)
    })
}

/// Attributes of a small device of compute capability 9.0 (`CUdevice_attribute`).
fn default_attribute(attribute: c_int, device: c_int) -> c_int {
    match attribute {
        1..=3 => 1024,          // threads of a block, and along x and y
        4 => 64,                // threads of a block along z
        5 => i32::MAX,          // blocks along x
        6 | 7 => 65_535,        // blocks along y and z
        8 => 48 << 10,          // shared memory of a block
        10 => 32,               // warp
        12 | 82 => 65_536,      // registers of a block, of a multiprocessor
        13 => 1_500_000,        // clock, kHz
        16 => 4,                // multiprocessors
        19 | 31 | 41 | 78 => 1, // maps host memory, concurrent kernels, unified addresses, stream priorities
        33 => device + 1,       // PCI bus
        36 => 2_000_000,        // memory clock, kHz
        37 => 512,              // memory bus, bits
        38 => 4 << 20,          // L2 cache
        39 => 2048,             // threads of a multiprocessor
        40 => 3,                // copy engines
        75 => 9,                // compute capability, major
        76 => 0,                // compute capability, minor
        81 | 97 => 227 << 10,   // shared memory of a multiprocessor, of a block that opts in
        106 => 32,              // blocks of a multiprocessor
        115 => 1,               // memory pools
        _ => 0,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) -> Status {
    call(|held| {
        held.check_device(device)?;
        held.check_device(peer)?;
        Ok(can.set(c_int::from(device != peer))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(_peer: usize, _flags: c_uint) -> Status {
    Status::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuProfilerStart() -> Status {
    Status::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuProfilerStop() -> Status {
    Status::SUCCESS
}

/// The result codes that this library returns, with the texts of the real one.
const ERRORS: &[(Status, &std::ffi::CStr, &std::ffi::CStr)] = &[
    (Status::SUCCESS, c"CUDA_SUCCESS", c"no error"),
    (Status::INVALID_VALUE, c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
    (Status::OUT_OF_MEMORY, c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
    (Status::DEINITIALIZED, c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
    (Status::INVALID_IMAGE, c"CUDA_ERROR_INVALID_IMAGE", c"device kernel image is invalid"),
    (Status::INVALID_DEVICE, c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
    (Status::INVALID_CONTEXT, c"CUDA_ERROR_INVALID_CONTEXT", c"invalid device context"),
    (Status::INVALID_HANDLE, c"CUDA_ERROR_INVALID_HANDLE", c"invalid resource handle"),
    (Status::NOT_FOUND, c"CUDA_ERROR_NOT_FOUND", c"named symbol not found"),
    (Status::NOT_READY, c"CUDA_ERROR_NOT_READY", c"device not ready"),
    (Status::LAUNCH_TIMEOUT, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the launch timed out and was terminated"),
    (Status::NOT_SUPPORTED, c"CUDA_ERROR_NOT_SUPPORTED", c"operation not supported"),
    (
        Status::ILLEGAL_STATE,
        c"CUDA_ERROR_ILLEGAL_STATE",
        c"the operation cannot be performed in the present state",
    ),
    (
        Status::CAPTURE_UNSUPPORTED,
        c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"operation not permitted when stream is capturing",
    ),
    (
        Status::CAPTURE_INVALIDATED,
        c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"operation failed due to a previous error during capture",
    ),
    (
        Status::CAPTURE_MERGE,
        c"CUDA_ERROR_STREAM_CAPTURE_MERGE",
        c"operation would result in a merge of separate capture sequences",
    ),
    (
        Status::CAPTURE_UNMATCHED,
        c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        c"capture was not ended in the same stream as it began",
    ),
    (Status::CAPTURE_UNJOINED, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"capturing stream has unjoined work"),
    (
        Status::CAPTURE_ISOLATION,
        c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"dependency created on uncaptured work in another stream",
    ),
    (
        Status::CAPTURE_IMPLICIT,
        c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"operation would make the legacy stream depend on a capturing blocking stream",
    ),
    (
        Status::CAPTURED_EVENT,
        c"CUDA_ERROR_CAPTURED_EVENT",
        c"operation not permitted on an event last recorded in a capturing stream",
    ),
    (
        Status::CAPTURE_WRONG_THREAD,
        c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"attempt to terminate a thread-local capture sequence from another thread",
    ),
];

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(error: Status, text: Out<*const c_char>) -> Status {
    describe_error(error, &text, |entry| entry.1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(error: Status, text: Out<*const c_char>) -> Status {
    describe_error(error, &text, |entry| entry.2)
}

type Entry = (Status, &'static std::ffi::CStr, &'static std::ffi::CStr);

fn describe_error(
    error: Status,
    text: &Out<*const c_char>,
    part: fn(&Entry) -> &'static std::ffi::CStr,
) -> Status {
    let entry = ERRORS.iter().find(|entry| entry.0 == error);
    let found = text.set(entry.map_or(std::ptr::null(), |entry| part(entry).as_ptr()));
    if entry.is_some() && found.is_ok() { Status::SUCCESS } else { Status::INVALID_VALUE }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetByPCIBusId(device: Out<c_int>, id: Text) -> Status {
    call(|held| {
        let id = id.read()?;
        let bus = id.split(':').nth(1).and_then(|bus| c_int::from_str_radix(bus, 16).ok());
        let ordinal = bus.ok_or(Status::INVALID_VALUE)? - 1;
        held.check_device(ordinal)?;
        Ok(device.set(ordinal)?)
    })
}
