#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use fsdp::comm::CommError;
use fsdp_runtime::device::cpu::{ComputeStream, CpuStream};
use fsdp_runtime::device::{Backend, HostMemory, Memory, Slice, Stream};

/// Its compute stream is not the one that tensors are computed in.
#[derive(Debug)]
struct Beside;

impl Backend for Beside {
    fn memory(&self) -> Arc<dyn Memory> {
        Arc::new(HostMemory)
    }

    fn compute(&self) -> Arc<dyn Stream> {
        CpuStream::spawn("beside")
    }

    fn side(&self, name: String) -> Result<Arc<dyn Stream>, CommError> {
        Ok(ComputeStream::new(name))
    }

    fn download(&self, _: &Slice, _: &mut [u8]) -> Result<(), CommError> {
        Ok(())
    }

    fn upload(&self, _: &[u8], _: &Slice) -> Result<(), CommError> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn main() {}
