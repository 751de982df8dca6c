//! Joins ranks that are processes by TCP. It is a communicator of the host; NCCL's communicator is built on it.
//!
//! Rank 0 listens. Every rank, rank 0 included, connects to it and sends requests: barriers, small reductions and exchanges,
//! groups, and the record of collectives of devices ([`Control`]). Each request has a few hundred bytes. Collectives of streams
//! do not use this connection.
//!
//! # Failure
//! A rank whose process ends or whose connection is lost has failed: all others get an error that names it. The loss of rank 0
//! fails all ranks. Both sides send a sign of life every few seconds. An invalid message ends its connection. Ranks whose own
//! threads wait for each other in collectives of the host get an error at once.
//!
//! # Who is let in
//! Rank 0 listens on the address of `MASTER_ADDR` only, or on that of `FSDP_LISTEN`. Each side of a connection proves that it knows
//! the run's secret, `FSDP_TOKEN`, before the other side accepts anything. Without that variable the secret is the name of the
//! job (`TORCHELASTIC_RUN_ID`, or `SLURM_JOB_ID` and `SLURM_STEP_ID`), and rank 0 warns. Without a job either, only ranks at a
//! loopback address can join, and any program of that machine could be one. Later messages are neither signed nor encrypted.
//! Each rank has one place: a second claim is refused, and the run goes on. `SECURITY.md` has the whole threat model.

mod connection;
mod hello;
mod place;
mod secret;
mod server;
mod wire;

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fsdp_layout::warning::warn;

pub use self::place::Place;

use self::connection::Membership;
use self::secret::Secret;
use self::server::Server;
use self::wire::{Host, Request};
use super::arguments::Caller;
use super::call::{Call, Op};
use super::ledger::{Control, Ledger, Stage, Trouble};
use super::local::LocalOptions;
use super::traffic::Traffic;
use super::{CommCounter, CommError, Communicator, Exchange, Gather, HostOp, Reduce, Tag};
use crate::device::{Slice, Stream};

/// Between signs of life.
const PING: Duration = Duration::from_secs(5);

/// How long a side may be silent.
fn silence(timeout: Duration) -> Duration {
    const LONGEST: Duration = Duration::from_secs(60);
    const SHORTEST: Duration = Duration::from_secs(15);
    timeout.clamp(SHORTEST, LONGEST)
}

/// A process's communicator of the host.
pub struct TcpComm(Arc<End>);

impl std::fmt::Debug for TcpComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpComm")
            .field("index", &self.0.index)
            .field("members", &self.0.members)
            .finish_non_exhaustive()
    }
}

/// One rank's end of a communicator.
struct End {
    membership: Arc<Membership>,
    /// Its number on the wire.
    id: u64,
    /// World ranks, by their indices in the group.
    members: Arc<[usize]>,
    index: usize,
    /// Calls so far, as rank 0 counts them.
    called: AtomicU64,
    traffic: Arc<Traffic>,
}

impl TcpComm {
    /// Joins the ranks that were started together, this one in its `place`; all must call it.
    ///
    /// The rank leaves when the last communicator that was made of this one is dropped: it is a failure if others wait for
    /// it, or if that happens in a panic. In rank 0 this waits until all others have left, and up to 30 seconds after its start
    /// for those that have not come: they are told if the run has failed.
    ///
    /// # Errors
    /// [`CommError::Invalid`] if rank 0 cannot listen, or ranks on several machines share no secret, [`CommError::TimedOut`]
    /// if rank 0 is not reached in time, [`CommError::RankFailed`] if it does not know the secret or refuses this rank.
    pub fn join(place: &Place, options: LocalOptions) -> Result<Arc<TcpComm>, CommError> {
        let timeout = options.timeout;
        let invalid = |message: String| CommError::Invalid { rank: place.rank, message };
        // A name that is not known yet may come to be: a rank asks again.
        let listen_at = std::env::var(LISTEN).ok();
        let secret = Secret::from_env(is_local(place, listen_at.as_deref())).map_err(invalid)?;
        let server =
            if place.rank == 0 { Some(listen(place, options, &secret).map_err(invalid)?) } else { None };
        let membership = Arc::new(Membership::join(place, timeout, &secret, server)?);
        Ok(Arc::new(TcpComm(Arc::new(End {
            membership,
            id: 0,
            members: (0..place.size).collect(),
            index: place.rank,
            called: AtomicU64::new(0),
            traffic: Arc::default(),
        }))))
    }

    /// The present thread is the rank's own: while it is in a collective of the host the rank comes to no other one, so that
    /// ranks which wait for each other are told at once.
    pub(crate) fn begin(&self) {
        self.0.membership.connection.begin();
    }

    /// Says that this rank has returned, or `how` it has failed, as in `panicked: boom`, before it leaves.
    pub(crate) fn leave(&self, how: Option<&str>) {
        self.0.membership.leave(how);
    }

    /// The failure of the world, as this rank reports it.
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.0.failure()
    }

    /// Asks rank 0 to make a communicator of these members.
    fn make(&self, name: &str, ranks: Option<&[usize]>, members: Arc<[usize]>, apart: bool) -> TcpComm {
        let End { membership, id, traffic, index, members: own, .. } = &*self.0;
        let connection = &membership.connection;
        let (new, rank) = (connection.number(), own[*index]);
        let ranks = ranks.map(<[usize]>::to_vec);
        connection.send(&Request::Make { comm: *id, new, name: name.to_owned(), ranks, apart }, &[]);
        let index = members.iter().position(|member| *member == rank).unwrap_or(0);
        let (membership, traffic, called) = (membership.clone(), traffic.clone(), AtomicU64::new(0));
        TcpComm(Arc::new(End { membership, id: new, members, index, called, traffic }))
    }

    /// A collective of the host.
    fn host(&self, tag: Tag, op: Host, body: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let End { membership, id: comm, called, .. } = &*self.0;
        called.fetch_add(1, Ordering::Relaxed);
        let id = membership.connection.number();
        let by_own_thread = membership.connection.is_own_thread();
        let request = Request::Host { id, comm: *comm, tag: tag.into(), op, by_own_thread };
        membership.connection.ask(id, &request, body)
    }

    fn gather_bytes(&self, tag: Tag, op: Host, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let gathered = self.host(tag, op, bytes)?;
        if gathered.get(self.rank()).is_none_or(|own| own != bytes) || gathered.len() != self.size() {
            return Err(self.garbled(format!("{} parts instead of {}", gathered.len(), self.size())));
        }
        self.0.count(Op::HostGather, gathered.iter().map(Vec::len).sum::<usize>() - bytes.len());
        Ok(gathered)
    }

    fn garbled(&self, what: String) -> CommError {
        let message = format!("rank 0 has answered with {what}");
        CommError::RankFailed { rank: self.0.caller().rank, failed: 0, message }
    }

    fn moves_nothing(&self, call: &Call) -> CommError {
        let message = format!("{}: make a `NcclComm` on this", self.moves_no_data().unwrap_or_default());
        self.0.caller().invalid(call, message)
    }
}

/// The variable that holds the address on which rank 0 listens, where that is not `MASTER_ADDR`.
const LISTEN: &str = "FSDP_LISTEN";

/// Whether rank 0 can be reached from its own machine only: at its address, and where it listens instead.
fn is_local(place: &Place, listen_at: Option<&str>) -> bool {
    listen_at.is_none_or(|address| address.parse().is_ok_and(|address: IpAddr| address.is_loopback()))
        && resolve(place).is_ok_and(|addresses| addresses.iter().all(|address| address.ip().is_loopback()))
}

/// The addresses at which rank 0 is to be reached.
fn resolve(place: &Place) -> std::io::Result<Vec<SocketAddr>> {
    let (host, port) = &place.address;
    Ok((host.as_str(), *port).to_socket_addrs()?.collect())
}

fn listen(place: &Place, options: LocalOptions, secret: &Secret) -> Result<Server, String> {
    let (host, port) = &place.address;
    let addresses = match std::env::var(LISTEN) {
        Ok(address) => {
            let address: IpAddr =
                address.parse().map_err(|error| format!("{LISTEN} is `{address}`: {error}"))?;
            vec![SocketAddr::new(address, *port)]
        }
        Err(_) => {
            resolve(place).map_err(|error| format!("rank 0's own address `{host}` is not known: {error}"))?
        }
    };
    let listener = TcpListener::bind(&addresses[..]);
    let server = listener.and_then(|listener| Server::start(listener, place.size, options, secret.clone()));
    let server = server.map_err(|error| {
        format!(
            "rank 0 cannot listen on port {port} of {host}: {error}; FSDP_PORT sets another port, {LISTEN} an address of this \
             machine (0.0.0.0 for all) if `{host}` is none"
        )
    })?;
    if let Some(warning) = secret.warning() {
        warn(warning);
    }
    Ok(server)
}

/// Values as they go over the wire.
fn values(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
}

impl Ledger for End {
    fn caller(&self) -> Caller {
        Caller { rank: self.members[self.index], index: self.index, size: self.members.len() }
    }

    fn world_rank(&self, index: usize) -> usize {
        self.members.get(index).copied().unwrap_or(index)
    }

    fn timeout(&self) -> Duration {
        self.membership.connection.timeout
    }

    fn call(&self, call: Call) -> Result<u64, CommError> {
        self.failure().map_or(Ok(()), Err)?;
        let number = self.called.fetch_add(1, Ordering::Relaxed) + 1;
        self.membership.connection.send(&Request::Enter { comm: self.id, call: call.into() }, &[]);
        Ok(number)
    }

    fn reached(&self, number: u64, stage: Stage) {
        self.membership.connection.send(&Request::Reached { comm: self.id, number, stage }, &[]);
    }

    fn count(&self, op: Op, bytes_from_peers: usize) {
        self.traffic.count(op, bytes_from_peers);
    }

    fn give_up(&self, number: Option<u64>, trouble: Trouble) -> CommError {
        let connection = &self.membership.connection;
        let id = connection.number();
        match connection.ask(id, &Request::GiveUp { id, comm: self.id, number, trouble }, &[]) {
            Err(error) => error,
            Ok(_) => {
                let message = "rank 0 does not say why the ranks have failed".to_owned();
                CommError::RankFailed { rank: self.caller().rank, failed: 0, message }
            }
        }
    }

    fn failure(&self) -> Option<CommError> {
        self.membership.connection.failure()
    }
}

// SAFETY: it uses no slice: collectives of streams are refused.
unsafe impl Communicator for TcpComm {
    fn rank(&self) -> usize {
        self.0.index
    }

    fn size(&self) -> usize {
        self.0.members.len()
    }

    fn duplicate(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(self.make(name, None, self.0.members.clone(), false))
    }

    fn duplicate_apart(&self, name: &str) -> Arc<dyn Communicator> {
        Arc::new(self.make(name, None, self.0.members.clone(), true))
    }

    fn split(&self, name: &str, ranks: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        self.0.caller().split(name, ranks)?;
        let members = ranks.iter().map(|rank| self.0.members[*rank]).collect();
        Ok(Arc::new(self.make(name, Some(ranks), members, false)))
    }

    fn all_gather(&self, _: &dyn Stream, tag: Tag, parts: Vec<Gather>) -> Result<(), CommError> {
        Err(self.moves_nothing(&Call::all_gather(tag, &parts)))
    }

    fn reduce_scatter(&self, _: &dyn Stream, tag: Tag, parts: Vec<Reduce>) -> Result<(), CommError> {
        Err(self.moves_nothing(&Call::reduce_scatter(tag, &parts)))
    }

    fn all_reduce(&self, _: &dyn Stream, tag: Tag, parts: Vec<(Slice, f32)>) -> Result<(), CommError> {
        Err(self.moves_nothing(&Call::all_reduce(tag, &parts)))
    }

    fn broadcast(&self, _: &dyn Stream, tag: Tag, data: Slice, root: usize) -> Result<(), CommError> {
        Err(self.moves_nothing(&Call::broadcast(tag, &data, root)))
    }

    fn all_to_all(&self, _: &dyn Stream, tag: Tag, parts: Vec<Exchange>) -> Result<(), CommError> {
        Err(self.moves_nothing(&Call::all_to_all(tag, &parts)))
    }

    fn host_barrier(&self, tag: Tag) -> Result<(), CommError> {
        self.host(tag, Host::Barrier, &[])?;
        self.0.count(Op::HostBarrier, 0);
        Ok(())
    }

    fn host_reduce(&self, tag: Tag, op: HostOp, reduced: &mut [f64]) -> Result<(), CommError> {
        let body: Vec<u8> = reduced.iter().flat_map(|value| value.to_le_bytes()).collect();
        let result = values(&self.host(tag, Host::Reduce(op), &body)?.concat());
        if result.len() != reduced.len() {
            return Err(self.garbled(format!("{} values instead of {}", result.len(), reduced.len())));
        }
        reduced.copy_from_slice(&result);
        self.0.count(Op::HostReduce(op), body.len() * (self.size() - 1));
        Ok(())
    }

    fn host_gather(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather_bytes(tag, Host::Gather, &bytes)
    }

    fn host_gather_patiently(&self, tag: Tag, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather_bytes(tag, Host::PatientGather, &bytes)
    }

    fn moves_no_data(&self) -> Option<&'static str> {
        Some("ranks that are joined by TCP have no collectives of streams")
    }

    fn note(&self, state: &str) {
        let state = state.to_owned();
        self.0.membership.connection.send(&Request::Note { comm: self.0.id, state }, &[]);
    }

    fn control(&self) -> Option<Control> {
        Some(Control(self.0.clone()))
    }

    fn counters(&self) -> Vec<(&'static str, CommCounter)> {
        self.0.traffic.counters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_listens_for_other_machines_is_not_local_whatever_its_address() {
        let at = |host: &str, listen_at| {
            let place = Place { rank: 0, size: 2, address: (host.to_owned(), 29500), local_rank: 0 };
            is_local(&place, listen_at)
        };
        assert!(at("127.0.0.1", None) && at("127.0.0.1", Some("127.0.0.2")) && at("::1", Some("::1")));
        for listen_at in ["0.0.0.0", "::", "192.0.2.2", "nothing"] {
            assert!(!at("127.0.0.1", Some(listen_at)), "{listen_at}");
        }
        assert!(!at("192.0.2.1", None) && !at("192.0.2.1", Some("127.0.0.1")));
    }
}
