//! Communicators: how ranks find each other, and how they part.

#![allow(non_snake_case)]

use std::collections::HashMap;
use std::ffi::{c_int, c_uint};
use std::ops::Range;

use super::group::{self, enter_group};
use super::redop::RedOp;
use super::rendezvous::{Message, Round};
use super::split::Split;
use super::{Answer, Code, call};
use crate::abi::{In, Out, Raw};
use crate::driver::current_context;
use crate::report::Kind;
use crate::scheduler::{self, Mode, Patience};
use crate::state::{CHANGED, Held, State, Tag};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Ranks are missing.
    Forming,
    Ready,
    /// Finalized by a call that did not block, and not asked for since.
    Finalizing,
    Finalized,
    Aborted,
    Destroyed,
}

/// One rank's end of a clique.
pub struct Comm {
    pub name: String,
    pub clique: usize,
    pub rank: usize,
    pub context: usize,
    pub device: usize,
    pub blocking: bool,
    pub life: Life,
    /// What `ncclCommGetAsyncError` says.
    pub error: Code,
    pub collectives: u64,
    pub sent: HashMap<usize, u64>,
    pub received: HashMap<usize, u64>,
    pub splits: u64,
    pub redops: Vec<Option<RedOp>>,
    pub registrations: HashMap<usize, Range<usize>>,
    pub registered: usize,
}

impl Comm {
    pub fn is_closed(&self) -> bool {
        matches!(self.life, Life::Aborted | Life::Destroyed)
    }
}

/// The ranks that communicate.
#[derive(Default)]
pub struct Clique {
    pub size: usize,
    pub members: Vec<Option<usize>>,
    pub rounds: HashMap<u64, Round>,
    pub mail: HashMap<(usize, usize, u64), Message>,
    pub splits: HashMap<u64, Vec<Split>>,
}

/// The fields of `ncclConfig_t` that are in every version.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// Whether calls block: as the configuration says, or as `otherwise` if it leaves it open.
    pub fn blocking(held: &mut State, config: &In<Config>, otherwise: bool) -> Answer<bool> {
        const MAGIC: c_uint = 0xcafe_beef;
        const UNDEFINED: c_int = c_int::MIN;
        if config.is_null() {
            return Ok(otherwise);
        }
        let config = config.get(0)?;
        if config.magic != MAGIC || config.size < size_of::<Config>() {
            let message = "a configuration that NCCL_CONFIG_INITIALIZER did not make".to_owned();
            return held.nccl_misuse(Code::INVALID_ARGUMENT, message);
        }
        Ok(if config.blocking == UNDEFINED { otherwise } else { config.blocking != 0 })
    }
}

pub fn add(held: &mut Held, clique: usize, rank: usize, blocking: bool) -> Answer<usize> {
    let context = current_context(held)?;
    let device = held.contexts[context].device;
    let index = held.nccl.comms.len();
    held.nccl.comms.push(Comm {
        name: format!("communicator {index} (rank {rank})"),
        clique,
        rank,
        context,
        device,
        blocking,
        life: Life::Forming,
        error: Code::SUCCESS,
        collectives: 0,
        sent: HashMap::new(),
        received: HashMap::new(),
        splits: 0,
        redops: Vec::new(),
        registrations: HashMap::new(),
        registered: 0,
    });
    Ok(index)
}

/// Puts a communicator into its place; the last one makes them all ready.
pub fn join(held: &mut Held, clique: usize, rank: usize, comm: usize) {
    held.nccl.cliques[clique].members[rank] = Some(comm);
    if let Some(members) = held.nccl.cliques[clique].members.iter().copied().collect::<Option<Vec<_>>>() {
        members.into_iter().for_each(|member| held.nccl.comms[member].life = Life::Ready);
    }
    CHANGED.notify_all();
}

/// Waits until a communicator has all its ranks, if its calls block and no group is open.
pub fn settle(held: &mut Held, comm: usize) -> Answer {
    if enter_group(|group| group.forming.push(comm)) {
        return Ok(());
    }
    wait_until_formed(held, comm)
}

pub fn wait_until_formed(held: &mut Held, comm: usize) -> Answer {
    if !held.nccl.comms[comm].blocking {
        let forming = held.nccl.comms[comm].life == Life::Forming;
        return if forming { Err(Code::IN_PROGRESS) } else { Ok(()) };
    }
    let patience = Patience::new(held);
    while held.nccl.comms[comm].life == Life::Forming {
        let reason = format!("{} lacks ranks that have not joined", held.nccl.comms[comm].name);
        patience.wait(held, &reason).map_err(|_| Code::SYSTEM_ERROR)?;
    }
    // Another thread may have given up on it meanwhile.
    if held.nccl.comms[comm].life == Life::Aborted { Err(Code::INVALID_USAGE) } else { Ok(()) }
}

fn join_by_id(held: &mut Held, id: &[u8], size: c_int, rank: c_int, blocking: bool) -> Answer<usize> {
    let (Ok(size), Ok(rank)) = (usize::try_from(size), usize::try_from(rank)) else {
        return Err(Code::INVALID_ARGUMENT);
    };
    if rank >= size {
        return held.nccl_misuse(Code::INVALID_ARGUMENT, format!("rank {rank} of {size} ranks"));
    }
    let clique = match held.nccl.by_id.get(id) {
        Some(clique) => *clique,
        None => {
            let clique = new_clique(held, size);
            held.nccl.by_id.insert(id.to_vec(), clique);
            clique
        }
    };
    let others = &held.nccl.cliques[clique];
    if others.size != size || others.members[rank].is_some() {
        let message = format!("rank {rank} of {size} joins {} ranks, or joins twice", others.size);
        return held.nccl_misuse(Code::INVALID_ARGUMENT, message);
    }
    let comm = add(held, clique, rank, blocking)?;
    join(held, clique, rank, comm);
    Ok(comm)
}

pub fn new_clique(held: &mut Held, size: usize) -> usize {
    held.nccl.cliques.push(Clique { size, members: vec![None; size], ..Clique::default() });
    held.nccl.cliques.len() - 1
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(id: Out<[u8; 128]>) -> Code {
    call(|held| {
        held.nccl.unique_ids += 1;
        let mut bytes = [0xFA; 128];
        bytes[..8].copy_from_slice(&held.nccl.unique_ids.to_le_bytes());
        Ok(id.set(bytes)?)
    })
}

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(comm: Out<Raw>, size: c_int, id: UniqueId, rank: c_int) -> Code {
    call(|held| {
        let index = join_by_id(held, &id.0, size, rank, true)?;
        comm.set(Tag::Comm.handle(index))?;
        settle(held, index)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    comm: Out<Raw>,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: In<Config>,
) -> Code {
    call(|held| {
        let blocking = Config::blocking(held, &config, true)?;
        let index = join_by_id(held, &id.0, size, rank, blocking)?;
        comm.set(Tag::Comm.handle(index))?;
        settle(held, index)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitAll(comms: Out<Raw>, size: c_int, devices: In<c_int>) -> Code {
    call(|held| {
        let count = usize::try_from(size).map_err(|_| Code::INVALID_ARGUMENT)?;
        let clique = new_clique(held, count);
        let mut handles = Vec::new();
        for rank in 0..count {
            let device = if devices.is_null() { rank as c_int } else { devices.get(rank)? };
            let device = held.check_device(device)?;
            let context = held.contexts.iter().position(|c| c.alive && c.device == device);
            let context = context.ok_or(Code::CUDA_ERROR)?;
            let comm = add(held, clique, rank, true)?;
            (held.nccl.comms[comm].context, held.nccl.comms[comm].device) = (context, device);
            join(held, clique, rank, comm);
            handles.push(Tag::Comm.handle(comm));
        }
        Ok(comms.set_all(handles)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(comm: Raw, count: Out<c_int>) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        Ok(count.set(held.nccl.cliques[held.nccl.comms[comm].clique].size as c_int)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(comm: Raw, rank: Out<c_int>) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        Ok(rank.set(held.nccl.comms[comm].rank as c_int)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(comm: Raw, device: Out<c_int>) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        Ok(device.set(held.nccl.comms[comm].device as c_int)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(comm: Raw, error: Out<Code>) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        let settled = match held.nccl.comms[comm].life {
            Life::Forming => false,
            Life::Finalizing => {
                finish(held, comm)?;
                held.nccl.comms[comm].life = Life::Finalized;
                false
            }
            _ => group::submit_held_back(held, comm)?,
        };
        Ok(error.set(if settled { held.nccl.comms[comm].error } else { Code::IN_PROGRESS })?)
    })
}

/// Lets a rank go without the others: what it has queued completes without effect. What they wait for never does, and
/// nobody tells them.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: Raw) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        held.nccl.comms[comm].life = Life::Aborted;
        group::drop_held_back(held, comm);
        CHANGED.notify_all();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: Raw) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        group::check_settled(held, comm, "ncclCommFinalize")?;
        if !held.nccl.comms[comm].blocking && held.scheduler.mode != Mode::Earliest {
            held.nccl.comms[comm].life = Life::Finalizing;
            return Err(Code::IN_PROGRESS);
        }
        finish(held, comm)?;
        held.nccl.comms[comm].life = Life::Finalized;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: Raw) -> Code {
    call(|held| {
        let comm = held.find_comm(comm)?;
        group::check_settled(held, comm, "ncclCommDestroy")?;
        finish(held, comm)?;
        let this = &mut held.nccl.comms[comm];
        this.life = Life::Destroyed;
        let name = this.name.clone();
        let left = this.registrations.len() + this.redops.iter().flatten().count();
        if left > 0 {
            let message = format!("{name} is destroyed with {left} registrations and reductions of its own");
            held.reports.add(Kind::Leak, message);
        }
        Ok(())
    })
}

/// Waits for what a communicator has queued.
fn finish(held: &mut Held, comm: usize) -> Answer {
    let launches = (0..held.nccl.launches.len()).filter(|l| held.nccl.launches[*l].concerns(comm));
    let launches = launches.map(|launch| held.nccl.launches[launch].at).collect::<Vec<_>>();
    for at in launches.into_iter().flatten() {
        scheduler::run_until(held, at)?;
    }
    Ok(())
}
