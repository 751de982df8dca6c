//! Memory that communicators may register, and its registrations.

#![allow(non_snake_case)]

use std::ffi::c_int;

use super::{Answer, Code, call, group};
use crate::abi::{Out, Raw};
use crate::driver::{allocate_on_device, current_context, free_now};
use crate::heap::Place;
use crate::state::{Held, Tag};

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemAlloc(address: Out<Raw>, bytes: usize) -> Code {
    call(|held| {
        let context = current_context(held)?;
        let start = allocate_on_device(held, context, bytes, "ncclMemAlloc", Place::Registrable)?;
        Ok(address.set(start)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(address: Raw) -> Code {
    call(|held| Ok(free_now(held, address, "ncclMemFree")?))
}

/// Registers memory with a communicator, and gives the handle.
fn register(held: &mut Held, comm: usize, start: usize, bytes: usize, window: bool) -> Answer<Raw> {
    group::check_settled(held, comm, "a registration")?;
    let name = held.nccl.comms[comm].name.clone();
    let place = held.heap.holding(start).filter(|b| start + bytes <= b.range().end).map(|b| b.place);
    let accepted = match place {
        Some(Place::Registrable(_)) => true,
        Some(Place::Device(_)) => !window,
        Some(Place::Host) | None => false,
    };
    if !accepted {
        let kind = if window { "a window" } else { "a buffer" };
        let message =
            format!("{bytes} bytes registered as {kind} of {name} that are not from the right allocator");
        return held.nccl_misuse(Code::INVALID_ARGUMENT, message);
    }
    let this = &mut held.nccl.comms[comm];
    this.registered += 1;
    this.registrations.insert(this.registered, start..start + bytes);
    Ok(Tag::Registration.handle(this.registered))
}

fn deregister(held: &mut Held, comm: Raw, handle: Raw) -> Answer {
    let comm = held.find_comm(comm)?;
    group::check_settled(held, comm, "the end of a registration")?;
    let known = Tag::Registration.index(handle);
    match known.and_then(|number| held.nccl.comms[comm].registrations.remove(&number)) {
        Some(_) => Ok(()),
        None => {
            let message = format!("{} has no registration {handle:#x}", held.nccl.comms[comm].name);
            held.nccl_misuse(Code::INVALID_ARGUMENT, message)
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRegister(comm: Raw, buffer: Raw, bytes: usize, handle: Out<Raw>) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        let registration = register(held, comm, buffer, bytes, false)?;
        Ok(handle.set(registration)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(comm: Raw, handle: Raw) -> Code {
    call(|held| deregister(held, comm, handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowRegister(
    comm: Raw,
    buffer: Raw,
    bytes: usize,
    window: Out<Raw>,
    _flags: c_int,
) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        let registration = register(held, comm, buffer, bytes, true)?;
        group::give_window(held, comm, &window, registration)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(comm: Raw, window: Raw) -> Code {
    call(|held| deregister(held, comm, window))
}
