//! What crosses the C interface: results, pointers to write results to, strings.
//!
//! Handles (`CUstream`, `CUevent`, `ncclComm_t`, ...) are opaque to callers, so they are plain numbers here.

use std::ffi::{CStr, c_char, c_int};

/// A handle as the caller holds it.
pub type Raw = usize;

/// `CUresult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub c_int);

impl Status {
    pub const SUCCESS: Status = Status(0);
    pub const INVALID_VALUE: Status = Status(1);
    pub const OUT_OF_MEMORY: Status = Status(2);
    /// What a thread gets that was waiting when the test ended.
    pub const DEINITIALIZED: Status = Status(4);
    pub const INVALID_IMAGE: Status = Status(200);
    pub const INVALID_DEVICE: Status = Status(101);
    pub const INVALID_CONTEXT: Status = Status(201);
    pub const INVALID_HANDLE: Status = Status(400);
    pub const ILLEGAL_STATE: Status = Status(401);
    pub const NOT_FOUND: Status = Status(500);
    pub const NOT_READY: Status = Status(600);
    /// What a thread gets that waits for what never comes.
    pub const LAUNCH_TIMEOUT: Status = Status(702);
    pub const NOT_SUPPORTED: Status = Status(801);
    pub const CAPTURE_UNSUPPORTED: Status = Status(900);
    pub const CAPTURE_INVALIDATED: Status = Status(901);
    pub const CAPTURE_MERGE: Status = Status(902);
    pub const CAPTURE_UNMATCHED: Status = Status(903);
    pub const CAPTURE_UNJOINED: Status = Status(904);
    pub const CAPTURE_ISOLATION: Status = Status(905);
    pub const CAPTURE_IMPLICIT: Status = Status(906);
    pub const CAPTURED_EVENT: Status = Status(907);
    pub const CAPTURE_WRONG_THREAD: Status = Status(908);
}

pub type Outcome<T = ()> = Result<T, Status>;

impl From<Outcome> for Status {
    fn from(outcome: Outcome) -> Self {
        outcome.err().unwrap_or(Status::SUCCESS)
    }
}

/// A pointer that must not be null, and was.
pub struct Null;

impl From<Null> for Status {
    fn from(_: Null) -> Self {
        Status::INVALID_VALUE
    }
}

/// Where a caller wants a result. Only a C caller makes one, by its argument.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the result.
    pub fn set(&self, value: T) -> Result<(), Null> {
        if self.0.is_null() {
            return Err(Null);
        }
        // SAFETY: a caller of the C interface passes null or a pointer to room for one `T`, valid during the call.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes a result that the caller may not want.
    pub fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }

    /// The same address, for a result of another type.
    pub fn cast<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }

    pub fn address(&self) -> usize {
        self.0 as usize
    }

    /// Where a caller wants a result after its call, which it keeps room for.
    pub fn at(address: usize) -> Self {
        Out(address as *mut T)
    }

    /// Writes results one after the other; the caller gave room for as many.
    pub fn set_all(&self, values: impl IntoIterator<Item = T>) -> Result<(), Null> {
        values.into_iter().enumerate().try_for_each(|(i, value)| Out(self.0.wrapping_add(i)).set(value))
    }
}

/// Values that a caller hands in by pointer. Only a C caller makes one, by its argument.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The `index`th value.
    pub fn get(&self, index: usize) -> Result<T, Null> {
        if self.0.is_null() {
            return Err(Null);
        }
        // SAFETY: a caller of the C interface passes null or a pointer to as many values as the call's other
        // arguments say; every use asks for fewer.
        Ok(unsafe { self.0.wrapping_add(index).read_unaligned() })
    }

    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// The values of a slice, while it lives.
    pub fn of(values: &[T]) -> Self {
        In(values.as_ptr())
    }

    pub fn address(&self) -> usize {
        self.0 as usize
    }

    /// Values that lie at `address`, which whoever calls this has seen to be mapped.
    pub fn at(address: usize) -> Self {
        In(address as *const T)
    }

    /// The same address, seen as another type.
    pub fn cast<U>(&self) -> In<U> {
        In(self.0.cast())
    }
}

/// A C string that a caller hands in.
#[repr(transparent)]
pub struct Text(*const c_char);

impl Text {
    pub fn read(&self) -> Result<String, Null> {
        if self.0.is_null() {
            return Err(Null);
        }
        // SAFETY: a caller of the C interface passes null or a string that ends with a zero.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
