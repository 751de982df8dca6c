//! Communicators made of the ranks of another one.

#![allow(non_snake_case)]

use std::ffi::c_int;

use super::comm::{Config, Life, add, join, new_clique, settle};
use super::{Code, call, group};
use crate::abi::{In, Out, Raw};
use crate::state::{Held, Tag};

/// A rank's part in a split.
pub struct Split {
    comm: usize,
    color: c_int,
    key: c_int,
    rank: usize,
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSplit(
    comm: Raw,
    color: c_int,
    key: c_int,
    new: Out<Raw>,
    config: In<Config>,
) -> Code {
    const NO_COLOR: c_int = -1;
    call(|held| {
        let parent = held.find_comm(comm)?;
        group::check_settled(held, parent, "ncclCommSplit")?;
        let inherited = held.nccl.comms[parent].blocking;
        let blocking = Config::blocking(held, &config, inherited)?;
        let (clique, rank) = (held.nccl.comms[parent].clique, held.nccl.comms[parent].rank);
        // Which clique it gets is known when all ranks have come.
        let child = add(held, clique, rank, blocking)?;
        let round = held.nccl.comms[parent].splits;
        held.nccl.comms[parent].splits += 1;
        let size = held.nccl.cliques[clique].size;
        let parts = held.nccl.cliques[clique].splits.entry(round).or_default();
        parts.push(Split { comm: child, color, key, rank });
        if parts.len() == size {
            let parts = held.nccl.cliques[clique].splits.remove(&round).unwrap_or_default();
            split(held, parts);
        }
        if color == NO_COLOR {
            new.set(0)?;
            held.nccl.comms[child].life = Life::Destroyed;
            return Ok(());
        }
        new.set(Tag::Comm.handle(child))?;
        settle(held, child)
    })
}

/// Makes a clique of each color, its ranks ordered by key and then by rank in the parent.
fn split(held: &mut Held, mut parts: Vec<Split>) {
    parts.sort_by_key(|part| (part.color, part.key, part.rank));
    for members in parts.chunk_by(|a, b| a.color == b.color).filter(|members| members[0].color >= 0) {
        let clique = new_clique(held, members.len());
        for (rank, part) in members.iter().enumerate() {
            let comm = &mut held.nccl.comms[part.comm];
            (comm.clique, comm.rank) = (clique, rank);
            comm.name = format!("communicator {} (rank {rank})", part.comm);
            join(held, clique, rank, part.comm);
        }
    }
}
