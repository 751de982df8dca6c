#![forbid(unsafe_code)]

use std::sync::Arc;

use fsdp::comm::{
    CommCounter, CommError, Communicator, DeviceMesh, Exchange, Gather, HostOp, Reduce, Tag,
};
use fsdp_runtime::device::{Slice, Stream};

/// Has more ranks than there are, and gathers nothing.
struct Alone;

impl Communicator for Alone {
    fn rank(&self) -> usize {
        7
    }

    fn size(&self) -> usize {
        1
    }

    fn duplicate(&self, _: &str) -> Arc<dyn Communicator> {
        Arc::new(Alone)
    }

    fn split(&self, _: &str, _: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Arc::new(Alone))
    }

    fn all_gather(&self, _: &dyn Stream, _: Tag, _: Vec<Gather>) -> Result<(), CommError> {
        Ok(())
    }

    fn reduce_scatter(&self, _: &dyn Stream, _: Tag, _: Vec<Reduce>) -> Result<(), CommError> {
        Ok(())
    }

    fn all_reduce(&self, _: &dyn Stream, _: Tag, _: Vec<(Slice, f32)>) -> Result<(), CommError> {
        Ok(())
    }

    fn broadcast(&self, _: &dyn Stream, _: Tag, _: Slice, _: usize) -> Result<(), CommError> {
        Ok(())
    }

    fn all_to_all(&self, _: &dyn Stream, _: Tag, _: Vec<Exchange>) -> Result<(), CommError> {
        Ok(())
    }

    fn host_barrier(&self, _: Tag) -> Result<(), CommError> {
        Ok(())
    }

    fn host_reduce(&self, _: Tag, _: HostOp, _: &mut [f64]) -> Result<(), CommError> {
        Ok(())
    }

    fn host_gather(&self, _: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        Ok(vec![bytes])
    }

    fn counters(&self) -> Vec<(&'static str, CommCounter)> {
        Vec::new()
    }
}

fn main() {
    let _ = DeviceMesh::new(&[("dp_shard", 1)], Arc::new(Alone));
}
