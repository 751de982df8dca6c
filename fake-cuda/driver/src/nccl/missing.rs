//! The functions of NCCL that are not there. A call says so by name, in the report and by its result.

#![allow(non_snake_case)]

use super::Code;
use crate::report::Kind;
use crate::state::lock;

/// Each is declared without parameters: by C's calling convention the caller passes and removes them.
macro_rules! missing {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> Code {
            lock().reports.add(Kind::Unsupported, concat!(stringify!($name), " is not implemented").to_owned());
            Code::INVALID_USAGE
        }
    )*};
}

missing! {
    ncclCommGetUniqueId ncclCommGrow ncclCommInitRankScalable ncclCommMemStats ncclCommResume
    ncclCommRevoke ncclCommShrink ncclCommSuspend ncclGather ncclGroupSimulateEnd ncclParamBind ncclParamDumpAll ncclParamGet
    ncclParamGetAllParameterKeys ncclParamGetI16 ncclParamGetI32 ncclParamGetI64 ncclParamGetI8
    ncclParamGetParameter ncclParamGetStr ncclParamGetU16 ncclParamGetU32 ncclParamGetU64 ncclParamGetU8
    ncclPutSignal ncclResetDebugInit ncclScatter ncclSignal ncclWaitSignal ncclWinGetUserPtr
}
