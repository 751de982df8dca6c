//! Memory pools: there are handles and attributes, and every allocation is one of its own.

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::c_int;

use super::call;
use crate::abi::{In, Out, Outcome, Raw, Status};
use crate::state::{Held, State, Tag};

pub struct Pool {
    /// The device whose default pool it is.
    default_of: Option<usize>,
    destroyed: bool,
    attributes: HashMap<c_int, u64>,
}

pub fn find(held: &State, raw: Raw) -> Outcome<usize> {
    let index = Tag::Pool.index(raw).ok_or(Status::INVALID_HANDLE)?;
    held.pools.get(index).filter(|pool| !pool.destroyed).map(|_| index).ok_or(Status::INVALID_HANDLE)
}

fn add(held: &mut Held, default_of: Option<usize>) -> usize {
    held.pools.push(Pool { default_of, destroyed: false, attributes: HashMap::new() });
    held.pools.len() - 1
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<Raw>, device: c_int) -> Status {
    call(|held| {
        let device = held.check_device(device)?;
        let existing = held.pools.iter().position(|pool| pool.default_of == Some(device));
        let index = existing.unwrap_or_else(|| add(held, Some(device)));
        Ok(pool.set(Tag::Pool.handle(index))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetMemPool(pool: Out<Raw>, device: c_int) -> Status {
    cuDeviceGetDefaultMemPool(pool, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceSetMemPool(device: c_int, pool: Raw) -> Status {
    call(|held| {
        held.check_device(device)?;
        find(held, pool).map(drop)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolCreate(pool: Out<Raw>, _properties: Raw) -> Status {
    call(|held| {
        let index = add(held, None);
        Ok(pool.set(Tag::Pool.handle(index))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: Raw) -> Status {
    call(|held| {
        let index = find(held, pool)?;
        held.pools[index].destroyed = true;
        Ok(())
    })
}

/// Attributes from the release threshold on are eight bytes wide, those before it four.
const RELEASE_THRESHOLD: c_int = 4;

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAttribute(pool: Raw, attribute: c_int, value: In<u64>) -> Status {
    call(|held| {
        let index = find(held, pool)?;
        let narrow = value.cast::<u32>();
        let value = if attribute < RELEASE_THRESHOLD { u64::from(narrow.get(0)?) } else { value.get(0)? };
        held.pools[index].attributes.insert(attribute, value);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolGetAttribute(pool: Raw, attribute: c_int, value: Out<u64>) -> Status {
    const USED_NOW: c_int = 7;
    const USED_PEAK: c_int = 8;
    call(|held| {
        let index = find(held, pool)?;
        let usage = held.pools[index]
            .default_of
            .and_then(|device| held.usage.get(&device).copied())
            .unwrap_or_default();
        let set = held.pools[index].attributes.get(&attribute).copied();
        let read = match attribute {
            USED_NOW => usage.now as u64,
            USED_PEAK => usage.peak as u64,
            _ => set.unwrap_or(0),
        };
        let narrow = value.cast::<u32>();
        let written = if attribute < RELEASE_THRESHOLD { narrow.set(read as u32) } else { value.set(read) };
        Ok(written?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolTrimTo(pool: Raw, _bytes: usize) -> Status {
    call(|held| find(held, pool).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolSetAccess(pool: Raw, _access: Raw, _count: usize) -> Status {
    call(|held| find(held, pool).map(drop))
}
