#![forbid(unsafe_code)]

use std::any::Any;
use std::sync::Arc;

use candle_core::Device;
use fsdp::comm::CommError;
use fsdp_runtime::device::cpu::{ComputeStream, CpuStream};
use fsdp_runtime::device::{Backend, HostMemory, Memory, Slice, Stream};

/// Its compute stream is not the one that candle computes in.
#[derive(Debug)]
struct Beside;

impl Backend for Beside {
    fn tensors(&self) -> &Device {
        &Device::Cpu
    }

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
