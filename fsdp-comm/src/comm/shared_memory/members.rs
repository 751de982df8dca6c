//! Who the ranks are, and the windows that they open to each other.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::flow::Windows;
use super::segment::{Place, Segment};
use super::window::{BYTES, Window};
use crate::comm::call::Op;
use crate::comm::{CommCounter, CommError, Communicator, Tag};

/// A rank's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    /// The machine, by a number that it has drawn when it was started, and the process's name space of processes.
    machine: String,
    /// What people call the machine.
    host: String,
    id: u32,
}

/// Bytes of an offer: the ranks' parts of an exchange are of one length, and what they say is not. Names of hosts and reasons of the
/// system are far shorter.
const OFFER: usize = 1024;

/// What a rank tells the others of its window.
#[derive(Serialize, Deserialize)]
struct Offer {
    process: Process,
    /// Or why there is none.
    window: Result<Place, String>,
    /// Of the window: what another version would lay out otherwise.
    bytes: usize,
}

/// What is known of the ranks by opening windows, for all communicators that are made of each other.
#[derive(Default)]
pub(super) struct Processes {
    /// By world ranks.
    known: Mutex<BTreeMap<usize, Process>>,
    /// What the offers of windows took, which is no traffic of the program.
    offers: Mutex<CommCounter>,
}

impl Process {
    fn own() -> Process {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let names = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let machine = format!("{} {}", read("/proc/sys/kernel/random/boot_id"), names.display());
        Process { machine, host: read("/proc/sys/kernel/hostname"), id: std::process::id() }
    }
}

impl Processes {
    /// `; rank 1 is process 4711 on `node0``, for the ranks that are known.
    fn words(&self, ranks: &[usize]) -> String {
        let known = self.known.lock();
        let word = |rank: &usize| {
            let Process { host, id, .. } = known.get(rank)?;
            Some(format!("; rank {rank} is process {id} on `{host}`"))
        };
        ranks.iter().filter_map(word).collect()
    }

    /// An exchange of offers is counted already, with so many bytes from peers.
    fn took(&self, bytes: usize) {
        let mut offers = self.offers.lock();
        offers.calls += 1;
        offers.bytes_from_peers += bytes as u64;
    }

    /// Counters without the offers of windows.
    pub(super) fn without_offers(
        &self,
        counters: Vec<(&'static str, CommCounter)>,
    ) -> Vec<(&'static str, CommCounter)> {
        let offers = *self.offers.lock();
        let less =
            |(name, counter): (&'static str, CommCounter)| match name == Op::NAMES[Op::HostGather.index()] {
                true => (
                    name,
                    CommCounter {
                        calls: counter.calls - offers.calls,
                        bytes_from_peers: counter.bytes_from_peers - offers.bytes_from_peers,
                    },
                ),
                false => (name, counter),
            };
        counters.into_iter().map(less).collect()
    }

    /// An error, with the processes of the ranks that are to blame.
    pub(super) fn told(&self, mut error: CommError) -> CommError {
        match &mut error {
            CommError::RankFailed { failed, message, .. } => *message += &self.words(&[*failed]),
            CommError::TimedOut { missing, message, .. } => *message += &self.words(missing),
            _ => {}
        }
        error
    }
}

/// Why there are no windows.
pub(super) enum Refusal {
    /// The ranks could not tell each other.
    Comm(CommError),
    /// What this rank has found, in words.
    Here(String),
}

/// Opens a window of this rank, and those of all others, for the first of their collectives. All ranks of `control` must call it.
pub(super) fn open(
    control: &dyn Communicator,
    world_rank: impl Fn(usize) -> usize,
    processes: &Processes,
    first: Tag,
) -> Result<Arc<Windows>, Refusal> {
    let index = control.rank();
    let own = Segment::create(BYTES);
    let place = own.as_ref().map_err(ToString::to_string);
    let window = place.and_then(|own| own.place().map_err(|error| error.to_string()));
    let offer = Offer { process: Process::own(), window, bytes: BYTES };
    let here = |error: &dyn std::fmt::Display| Refusal::Here(error.to_string());
    let mut offered = serde_json::to_vec(&offer).map_err(|error| here(&error))?;
    // Blanks after it are no part of it.
    offered.resize(offered.len().max(OFFER), b' ');
    let tag = Tag { unit: format!("memory for {}", first.unit).into(), ..first };
    let own_bytes = offered.len();
    let offers = control.host_gather(tag, offered).map_err(Refusal::Comm)?;
    processes.took(offers.iter().map(Vec::len).sum::<usize>() - own_bytes);
    let read = |bytes: &Vec<u8>| serde_json::from_slice::<Offer>(bytes);
    let offers: Vec<Offer> =
        offers.iter().map(read).collect::<Result<_, _>>().map_err(|error| here(&error))?;
    for (i, offer) in offers.iter().enumerate() {
        processes.known.lock().insert(world_rank(i), offer.process.clone());
    }
    let first = &offers[0].process;
    if let Some(other) = offers.iter().position(|offer| offer.process.machine != first.machine) {
        return Err(Refusal::Here(format!(
            "ranks {} and {} are on different machines, `{}` and `{}`: ranks that compute on the CPU exchange through the memory \
             of one",
            world_rank(0),
            world_rank(other),
            first.host,
            offers[other].process.host
        )));
    }
    let mut own = own.ok();
    let mut all = Vec::with_capacity(offers.len());
    for (i, Offer { process, window, bytes }) in offers.iter().enumerate() {
        let rank = world_rank(i);
        let place = window.as_ref().map_err(|error| {
            Refusal::Here(format!("rank {rank} has no memory that it could share: {error}"))
        })?;
        if *bytes != BYTES {
            return Err(Refusal::Here(format!("rank {rank} runs another version of the program")));
        }
        let segment = match own.take_if(|_| i == index) {
            Some(own) => own,
            None => Segment::open(place, BYTES).map_err(|error| {
                let id = process.id;
                Refusal::Here(format!("the memory of rank {rank}, process {id}, cannot be opened: {error}"))
            })?,
        };
        all.push(Window::new(segment));
    }
    Ok(Arc::new(Windows { all, index, rounds: Mutex::new(0) }))
}
