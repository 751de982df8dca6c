//! Memory of the host, and threads as streams.

use std::sync::Arc;

use super::rank::{Change32, Check, Place};
use crate::comm::CommError;
use crate::device::cpu::{ComputeStream, CpuStream};
use crate::device::{Slice, Stream, read_f32, update_f32};
use crate::memory::Account;

pub(super) struct Host;

impl Place for Host {
    fn account(&self) -> Account {
        Account::default()
    }

    fn compute(&self, apart: bool) -> Arc<dyn Stream> {
        if apart { CpuStream::spawn("compute") } else { ComputeStream::new("compute") }
    }

    fn side(&self, name: &str) -> Result<Arc<dyn Stream>, CommError> {
        Ok(CpuStream::spawn(name))
    }

    fn read(&self, compute: &dyn Stream, slice: Slice, check: Check) -> Result<(), CommError> {
        compute.submit(Box::new(move || {
            // SAFETY: the checker reports an access that is not ordered with this.
            unsafe { read_f32(&slice, |values| check(values)) };
            Ok(())
        }))
    }

    fn update(&self, compute: &dyn Stream, slice: Slice, update: Change32) -> Result<(), CommError> {
        compute.submit(Box::new(move || {
            // SAFETY: as in `read`.
            unsafe { update_f32(&slice, |values| update(values)) };
            Ok(())
        }))
    }
}
