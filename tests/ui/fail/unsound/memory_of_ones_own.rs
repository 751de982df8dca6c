#![forbid(unsafe_code)]

use std::any::Any;
use std::ptr::NonNull;

use fsdp::comm::CommError;
use fsdp_runtime::device::{Block, Memory};

#[derive(Debug)]
struct MadeUp;

impl Memory for MadeUp {
    fn allocate(&self, _: usize) -> Result<Box<dyn Block>, CommError> {
        Ok(Box::new(MadeUp))
    }
}

impl Block for MadeUp {
    fn ptr(&self) -> NonNull<u8> {
        NonNull::dangling()
    }

    fn is_host(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn main() {}
