//! Groups of calls, and calls of communicators that do not block.

#![allow(non_snake_case)]

use std::cell::RefCell;

use super::calls::Part;
use super::comm::{Life, wait_until_formed};
use super::{Answer, Code, call, rendezvous};
use crate::abi::{Out, Raw};
use crate::queue::StreamId;
use crate::scheduler::Mode;
use crate::state::Held;

/// The calls of a thread since its `ncclGroupStart`.
#[derive(Default)]
pub struct Group {
    depth: usize,
    parts: Vec<(StreamId, Part)>,
    /// Communicators that are waiting for their ranks.
    pub forming: Vec<usize>,
}

/// What NCCL has accepted and not yet done.
///
/// A call on a communicator that does not block may return before it has done anything: an event recorded then is
/// recorded before it, and a handle that it gives is written later. Here it always does, until `ncclCommGetAsyncError`
/// has been asked.
pub struct HeldBack {
    what: Left,
    asked: bool,
}

enum Left {
    /// Parts to be put on their streams.
    Parts(Vec<(StreamId, Part)>),
    /// The handle of a window, to be written to this address.
    Window { comm: usize, out: usize, handle: Raw },
}

impl HeldBack {
    fn concerns(&self, comm: usize) -> bool {
        match &self.what {
            Left::Parts(parts) => parts.iter().any(|(_, part)| part.comm == comm),
            Left::Window { comm: of, .. } => *of == comm,
        }
    }
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Adds to the open group of the calling thread; false if none is open.
pub fn enter_group(add: impl FnOnce(&mut Group)) -> bool {
    GROUP.with_borrow_mut(|group| {
        let open = group.depth > 0;
        if open {
            add(group);
        }
        open
    })
}

/// Takes a call: into the open group, or as a group of its own.
pub fn issue(held: &mut Held, stream: StreamId, part: Part) -> Answer {
    let alone = part.clone();
    if enter_group(|group| group.parts.push((stream, part))) {
        return Ok(());
    }
    launch(held, vec![(stream, alone)])
}

fn launch(held: &mut Held, parts: Vec<(StreamId, Part)>) -> Answer {
    let blocking = parts.iter().all(|(_, part)| held.nccl.comms[part.comm].blocking);
    if blocking || held.scheduler.mode == Mode::Earliest {
        return rendezvous::submit(held, parts);
    }
    held.nccl.held_back.push(HeldBack { what: Left::Parts(parts), asked: false });
    Err(Code::IN_PROGRESS)
}

/// Gives the handle of a window: later, where the communicator does not block.
pub fn give_window(held: &mut Held, comm: usize, out: &Out<Raw>, handle: Raw) -> Answer {
    if held.nccl.comms[comm].blocking || held.scheduler.mode == Mode::Earliest {
        return Ok(out.set(handle)?);
    }
    let what = Left::Window { comm, out: out.address(), handle };
    held.nccl.held_back.push(HeldBack { what, asked: false });
    Err(Code::IN_PROGRESS)
}

/// Does what a communicator's calls left behind, once it has been asked for twice; whether nothing is left behind.
pub fn submit_held_back(held: &mut Held, comm: usize) -> Answer<bool> {
    let Some(index) = held.nccl.held_back.iter().position(|batch| batch.concerns(comm)) else {
        return Ok(true);
    };
    if !std::mem::replace(&mut held.nccl.held_back[index].asked, true) {
        return Ok(false);
    }
    match held.nccl.held_back.remove(index).what {
        Left::Parts(parts) => rendezvous::submit(held, parts)?,
        Left::Window { out, handle, .. } => Out::at(out).set(handle)?,
    }
    Ok(true)
}

/// Forgets what an aborted communicator's calls left behind.
pub fn drop_held_back(held: &mut Held, comm: usize) {
    held.nccl.held_back.retain(|batch| !batch.concerns(comm));
}

/// Refuses a call on a communicator whose last one is still in progress.
pub fn check_settled(held: &mut Held, comm: usize, name: &str) -> Answer {
    let finalizing = held.nccl.comms[comm].life == Life::Finalizing;
    if finalizing || held.nccl.held_back.iter().any(|batch| batch.concerns(comm)) {
        let message =
            format!("{name} on {} before its last call is out of progress", held.nccl.comms[comm].name);
        return held.nccl_misuse(Code::INVALID_USAGE, message);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Code {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    Code::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Code {
    call(|held| {
        let ended = GROUP.with_borrow_mut(|group| match group.depth {
            0 => None,
            1 => Some(std::mem::take(group)),
            _ => {
                group.depth -= 1;
                Some(Group::default())
            }
        });
        let Some(group) = ended else {
            return held.nccl_misuse(Code::INVALID_USAGE, "ncclGroupEnd without ncclGroupStart".to_owned());
        };
        for comm in group.forming {
            wait_until_formed(held, comm)?;
        }
        if group.parts.is_empty() { Ok(()) } else { launch(held, group.parts) }
    })
}
