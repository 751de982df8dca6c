//! Byte accounting, pools of flat buffers, the bytes of tensors, gradients' places, and where tensor storage is swapped.

mod account;
mod alias;
mod pool;
pub(crate) mod sink;
pub(crate) mod tensor_bytes;

pub use account::{Account, Category, Usage};
pub(crate) use alias::{
    Aliases, Fault, TOMBSTONE, Thoroughness, Variable, candle_dtype, copy_out, names_tombstone, share_storage,
};
pub(crate) use pool::{Lease, Pool};
