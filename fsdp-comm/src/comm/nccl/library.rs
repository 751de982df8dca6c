//! NCCL's library: finds it, configures it, and reads its errors.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use cudarc::nccl::sys::{self, ncclComm_t, ncclConfig_t, ncclResult_t};

use crate::comm::ledger::Trouble;
use crate::device::cuda::{CudaError, has_nccl};
use crate::spec::Dtype;

/// The oldest version that has all that is called here, as `ncclGetVersion` says it.
const OLDEST: c_int = 22_200;

const MISSING: CudaError = CudaError::MissingLibrary {
    library: "NCCL 2.22 or newer (libnccl.so)",
    install: "install the package `libnccl-dev` or `nvidia-nccl-cu13`; where there is only libnccl.so.2, make a link \
              libnccl.so to it in a folder of LD_LIBRARY_PATH",
};

/// cudarc panics where a library, or a function of it, cannot be loaded.
pub(super) fn require() -> Result<(), CudaError> {
    if !has_nccl() {
        return Err(MISSING);
    }
    if version() >= OLDEST { Ok(()) } else { Err(MISSING) }
}

/// Whether the library, which is there, has windows.
pub(super) fn has_windows() -> bool {
    version() >= 22_700
}

fn version() -> c_int {
    let mut version = 0;
    // SAFETY: the call writes an integer.
    let code = unsafe { sys::ncclGetVersion(&mut version) };
    if code == ncclResult_t::ncclSuccess { version } else { 0 }
}

/// `NCCL_CONFIG_INITIALIZER` of calls that do not block.
pub(super) fn config() -> ncclConfig_t {
    const MAGIC: u32 = 0xcafe_beef;
    const VERSION: u32 = 23_000;
    const UNDEFINED: c_int = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: MAGIC,
        version: VERSION,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

pub(super) fn data_type(dtype: Dtype) -> sys::ncclDataType_t {
    match dtype {
        Dtype::F32 => sys::ncclDataType_t::ncclFloat32,
        Dtype::BF16 => sys::ncclDataType_t::ncclBfloat16,
        Dtype::F16 => sys::ncclDataType_t::ncclFloat16,
    }
}

/// A call of NCCL that failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    code: ncclResult_t,
    message: String,
}

impl Failure {
    pub(super) fn trouble(self) -> Trouble {
        match self.code {
            ncclResult_t::ncclRemoteError => Trouble::Elsewhere(self.message),
            _ => Trouble::Here(self.message),
        }
    }

    /// Whether another rank may be what failed.
    pub(super) fn is_remote(&self) -> bool {
        self.code == ncclResult_t::ncclRemoteError
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The outcome of `call` on `comm`, which is null or alive; a call that is still in progress has not failed.
pub(super) fn outcome(call: &str, comm: ncclComm_t, code: ncclResult_t) -> Result<(), Failure> {
    if matches!(code, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    // SAFETY: NCCL's strings are static.
    let what = unsafe { text(sys::ncclGetErrorString(code)) };
    // SAFETY: the communicator is null or alive; the string lives until the next call on this thread.
    let last = unsafe { text(sys::ncclGetLastError(comm)) };
    let last = if last.is_empty() { last } else { format!(" ({last})") };
    Err(Failure { code, message: format!("{call}: {what}{last}") })
}

/// # Safety
/// `text` is null or a string of C that lives during the call.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}
