//! Reductions, the built-in ones and a sum of scaled values.

#![allow(non_snake_case)]

use std::ffi::c_int;

use super::arithmetic::{Type, Value};
use super::{Answer, Code, call};
use crate::abi::{In, Out, Raw};
use crate::state::State;

/// A reduction that a communicator's user has made: the scale is known now, or lies on the device.
#[derive(Clone, Copy)]
pub enum RedOp {
    Scale(Value),
    ScaleAt(usize, Type),
}

#[derive(Clone, Copy)]
pub enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
    Made(RedOp),
}

/// The built-in ones come first.
const BUILT_IN: c_int = 5;

impl Reduction {
    pub fn find(held: &mut State, comm: usize, op: c_int) -> Answer<Self> {
        Ok(match op {
            0 => Reduction::Sum,
            1 => Reduction::Product,
            2 => Reduction::Max,
            3 => Reduction::Min,
            4 => Reduction::Average,
            _ => {
                let made = usize::try_from(op - BUILT_IN).ok();
                let found = made.and_then(|index| held.nccl.comms[comm].redops.get(index).copied().flatten());
                match found {
                    Some(redop) => Reduction::Made(redop),
                    None => {
                        let message = format!("{} has no reduction {op}", held.nccl.comms[comm].name);
                        return held.nccl_misuse(Code::INVALID_ARGUMENT, message);
                    }
                }
            }
        })
    }

    /// What ranks have to agree on; the scale may differ.
    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Product => "product",
            Reduction::Max => "max",
            Reduction::Min => "min",
            Reduction::Average => "average",
            Reduction::Made(_) => "scaled sum",
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpCreatePreMulSum(
    op: Out<c_int>,
    scalar: In<u8>,
    dtype: c_int,
    residence: c_int,
    comm: Raw,
) -> Code {
    const ON_DEVICE: c_int = 0;
    call(|held| {
        let comm = held.find_comm(comm)?;
        let dtype = Type::find(dtype).ok_or(Code::INVALID_ARGUMENT)?;
        let made = if residence == ON_DEVICE {
            RedOp::ScaleAt(scalar.address(), dtype)
        } else {
            RedOp::Scale(dtype.read(&scalar)?)
        };
        let redops = &mut held.nccl.comms[comm].redops;
        redops.push(Some(made));
        Ok(op.set(BUILT_IN + redops.len() as c_int - 1)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(op: c_int, comm: Raw) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        Reduction::find(held, comm, op)?;
        let index = usize::try_from(op - BUILT_IN).map_err(|_| Code::INVALID_ARGUMENT)?;
        held.nccl.comms[comm].redops[index] = None;
        Ok(())
    })
}
