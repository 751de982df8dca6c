//! Rank 0's side: for every rank a thread carries out the requests of that rank.
//!
//! These threads are the ranks of a [`LocalWorld`], which compares calls, names missing ranks, and fails as a whole. A rank
//! whose connection ends before it has said that it returned has failed.

use std::collections::HashMap;
use std::io::{Error, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::hello::{self, Hello};
use super::secret::Secret;
use super::wire::{self, Answer, Host, Request};
use super::{PING, silence};
use crate::comm::ledger::{Control, Ledger};
use crate::comm::local::{LocalOptions, LocalWorld};
use crate::comm::{CommError, Communicator, Tag};
use crate::device::Activity;

/// The world, and who has come.
pub(super) struct Server {
    hub: Arc<Hub>,
    started: Instant,
    threads: Vec<JoinHandle<()>>,
}

struct Hub {
    world: Arc<LocalWorld>,
    size: usize,
    timeout: Duration,
    secret: Secret,
    seats: Mutex<Vec<Seat>>,
    /// Connections that have not said who they are, by number.
    unknown: Mutex<HashMap<u64, TcpStream>>,
    changed: Condvar,
    /// Rank 0 goes.
    closing: AtomicBool,
}

/// A rank's place.
#[derive(Clone)]
enum Seat {
    Empty,
    Taken(Arc<Client>),
    Left,
}

/// A rank that has its seat, and its communicator.
type Seated = (Arc<Client>, Arc<dyn Communicator>);

struct Client {
    rank: usize,
    /// Where it comes from.
    address: SocketAddr,
    writer: Mutex<TcpStream>,
    ledger: Arc<dyn Ledger>,
    /// That of the rank's own thread: it rests while a collective that it has called is not done.
    activity: Arc<Activity>,
    /// It knows of the world's failure.
    told: AtomicBool,
}

/// Connections that have not said who they are, at most; more wait to be accepted.
const MAX_UNKNOWN: usize = 64;
/// Between looks at what other threads do.
const TICK: Duration = Duration::from_millis(20);
/// Bytes of stack of a thread that serves a rank.
const STACK: usize = 256 << 10;
/// How long ranks have to hear of a failure before rank 0 goes.
const FAREWELL: Duration = Duration::from_secs(10);
/// How long after its start rank 0 stays for ranks that have not come yet, to tell them that the run has failed: without it
/// they would look for rank 0 until their time-out.
const LATECOMERS: Duration = Duration::from_secs(30);

impl Seat {
    fn client(&self) -> Option<&Arc<Client>> {
        match self {
            Seat::Taken(client) => Some(client),
            Seat::Empty | Seat::Left => None,
        }
    }
}

impl Client {
    fn send(&self, answer: &Answer, body: &[u8]) -> Result<(), Error> {
        wire::write(&mut *self.writer.lock(), answer, body)
    }
}

impl Server {
    /// Waits for the ranks on `listener`, in threads of its own.
    pub(super) fn start(
        listener: TcpListener,
        size: usize,
        options: LocalOptions,
        secret: Secret,
    ) -> Result<Server, Error> {
        listener.set_nonblocking(true)?;
        let timeout = options.timeout;
        let hub = Arc::new(Hub {
            world: LocalWorld::new(size, options),
            size,
            timeout,
            secret,
            seats: Mutex::new(vec![Seat::Empty; size]),
            unknown: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
        });
        let (doorman, crier) = (hub.clone(), hub.clone());
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        let threads = vec![
            named("fsdp-doorman").spawn(move || doorman.welcome(&listener))?,
            named("fsdp-crier").spawn(move || crier.cry())?,
        ];
        Ok(Server { hub, started: Instant::now(), threads })
    }
}

impl Drop for Server {
    /// Waits until all ranks that came have left, or have heard that the world has failed, and for a while for those that
    /// have not come.
    fn drop(&mut self) {
        let mut failed = None;
        let mut seats = self.hub.seats.lock();
        loop {
            let told = self.hub.world.failure().is_some()
                && failed.get_or_insert_with(Instant::now).elapsed() > FAREWELL;
            let late = self.started.elapsed() > LATECOMERS.min(self.hub.timeout);
            let is_waited_for = |seat: &Seat| match seat {
                Seat::Taken(_) => !told,
                Seat::Empty => !late,
                Seat::Left => false,
            };
            if !seats.iter().any(is_waited_for) {
                break;
            }
            self.hub.changed.wait_for(&mut seats, TICK);
        }
        for seat in seats.iter_mut() {
            if let Seat::Taken(client) = std::mem::replace(seat, Seat::Left) {
                // Its reader sees the end.
                let _ = client.writer.lock().shutdown(Shutdown::Both);
            }
        }
        drop(seats);
        // Whatever still waits for ranks that never came.
        self.hub.world.fail(0, "has left");
        self.hub.closing.store(true, Ordering::Release);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Hub {
    /// Lets ranks in, and hears those out that come for a place that is taken, as long as rank 0 is here. Ends when the
    /// threads of all connections have ended.
    fn welcome(self: &Arc<Self>, listener: &TcpListener) {
        let mut threads: Vec<JoinHandle<()>> = Vec::new();
        let mut number = 0;
        while !self.is_closing() {
            threads.retain(|thread| !thread.is_finished());
            if self.unknown.lock().len() >= MAX_UNKNOWN {
                thread::sleep(TICK);
                continue;
            }
            match listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream))) {
                Ok((copy, stream)) => {
                    number += 1;
                    self.unknown.lock().insert(number, copy);
                    let hub = self.clone();
                    let named = thread::Builder::new().name("fsdp-rank".to_owned()).stack_size(STACK);
                    match named.spawn(move || hub.serve(number, stream)) {
                        Ok(thread) => threads.push(thread),
                        // The peer sees its connection end.
                        Err(_) => drop(self.unknown.lock().remove(&number)),
                    }
                }
                Err(_) => thread::sleep(TICK),
            }
        }
        for stream in self.unknown.lock().values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Tells all ranks of the world's failure, and that rank 0 is alive.
    fn cry(&self) {
        let mut pinged = Instant::now();
        while !self.is_closing() {
            let ping = pinged.elapsed() > PING;
            if ping {
                pinged = Instant::now();
            }
            let clients = self.seats.lock().iter().filter_map(Seat::client).cloned().collect::<Vec<_>>();
            for client in clients {
                // A rank that cannot be reached is found by its reader.
                let failure = client.ledger.failure();
                if let Some(error) = failure.filter(|_| !client.told.swap(true, Ordering::Relaxed)) {
                    let _ = client.send(&Answer::Failure { error }, &[]);
                } else if ping {
                    let _ = client.send(&Answer::Ping, &[]);
                }
            }
            thread::sleep(TICK);
        }
    }

    /// A connection: of a rank, if it shows that.
    fn serve(&self, number: u64, mut stream: TcpStream) {
        let admitted = self.admit(&mut stream);
        self.unknown.lock().remove(&number);
        let Ok((client, communicator)) = admitted else {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        };
        let rank = client.rank;
        let mut communicators = HashMap::from([(0, communicator)]);
        let mut collectives: Vec<JoinHandle<()>> = Vec::new();
        loop {
            collectives.retain(|collective| !collective.is_finished());
            match wire::read(&mut stream) {
                Ok((Request::Finish, _)) => {
                    client.activity.enter();
                    self.world.returns(rank);
                    self.world.finish(rank);
                }
                Ok((Request::Fail { how }, _)) => self.world.fail(rank, &how),
                Ok((request, body)) => match self.obey(&client, &mut communicators, request, body) {
                    Ok(collective) => {
                        collectives.extend(collective);
                        continue;
                    }
                    Err(how) => self.world.fail(rank, &how),
                },
                Err(error) => {
                    self.world.fail(rank, &format!("lost its connection to rank 0: {}", words(&error)))
                }
            }
            break;
        }
        self.seats.lock()[rank] = Seat::Left;
        self.changed.notify_all();
        let _ = stream.shutdown(Shutdown::Both);
        collectives.into_iter().for_each(|collective| drop(collective.join()));
    }

    /// Gives a rank its seat.
    fn admit(&self, stream: &mut TcpStream) -> Result<Seated, Error> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let address = stream.peer_addr()?;
        let hello = hello::hear(stream, &self.secret)?;
        stream.set_read_timeout(Some(silence(self.timeout)))?;
        stream.set_write_timeout(Some(silence(self.timeout)))?;
        match self.seat(hello, address, stream)? {
            Ok(seated) => Ok(seated),
            Err(message) => {
                let message = format!("rank 0 refuses rank {}: {message}", hello.rank);
                wire::write(stream, &Answer::Refused { message }, &[])?;
                if self.world.failure().is_some()
                    && let Some(seat @ Seat::Empty) = self.seats.lock().get_mut(hello.rank)
                {
                    // It knows now: rank 0 need not stay for it.
                    *seat = Seat::Left;
                    self.changed.notify_all();
                }
                Err(ErrorKind::ConnectionRefused.into())
            }
        }
    }

    /// Takes the seat of a rank and welcomes it, or says why not.
    fn seat(
        &self,
        Hello { rank, size }: Hello,
        address: SocketAddr,
        stream: &TcpStream,
    ) -> Result<Result<Seated, String>, Error> {
        if size != self.size {
            return Ok(Err(format!("it is one of {size} ranks, rank 0 of {}", self.size)));
        }
        if let Some((_, failure)) = self.world.failure() {
            return Ok(Err(format!("the run has failed already: {failure}")));
        }
        let writer = stream.try_clone()?;
        let mut seats = self.seats.lock();
        match seats.get(rank) {
            None => return Ok(Err(format!("a world of {} ranks has no rank {rank}", self.size))),
            Some(Seat::Taken(client)) => {
                let message =
                    format!("rank {rank} has joined already, from {}, and this is {address}", client.address);
                return Ok(Err(format!("{message}; are two processes started as rank {rank}?")));
            }
            Some(Seat::Left) => return Ok(Err(format!("rank {rank} has joined already and left"))),
            Some(Seat::Empty) => {}
        }
        let communicator = match self.world.communicator(rank) {
            Ok(communicator) => communicator,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let Some(Control(ledger)) = communicator.control() else {
            return Ok(Err("its communicator keeps no record".to_owned()));
        };
        let (writer, told) = (Mutex::new(writer), AtomicBool::new(false));
        let activity = self.world.activity(rank);
        let client = Arc::new(Client { rank, address, writer, ledger, activity, told });
        // Nobody else says anything to it before it is welcome; if it is gone its reader finds out.
        let mut first = client.writer.lock();
        seats[rank] = Seat::Taken(client.clone());
        drop(seats);
        let _ = wire::write(&mut *first, &Answer::Welcome, &[]);
        drop(first);
        Ok(Ok((client, communicator)))
    }

    /// Does what a rank asks for; what takes time, in a thread.
    ///
    /// # Errors
    /// What no rank would ask for, in words that follow its name.
    fn obey(
        &self,
        client: &Arc<Client>,
        communicators: &mut HashMap<u64, Arc<dyn Communicator>>,
        request: Request,
        body: Vec<u8>,
    ) -> Result<Option<JoinHandle<()>>, String> {
        let known = |comm: u64| {
            let known = communicators.get(&comm).cloned();
            known.ok_or_else(|| format!("asked for something on communicator {comm}, which it has not made"))
        };
        let ledger = |comm: u64| match known(comm)?.control() {
            Some(Control(ledger)) => Ok(ledger),
            None => Err("asked for a record that is not kept".to_owned()),
        };
        let lost = |error: Error| format!("lost its connection to rank 0: {}", words(&error));
        match request {
            Request::Host { id, comm, tag, op, by_own_thread } => {
                let (comm, client) = (known(comm)?, client.clone());
                let work = move || {
                    if by_own_thread {
                        client.activity.enter();
                    }
                    let answer = match collective(&*comm, tag.into(), op, body) {
                        Ok(parts) => {
                            let lengths = parts.iter().map(|part| part.len() as u64).collect();
                            client.send(&Answer::Done { id, lengths }, &parts.concat())
                        }
                        Err(error) => client.send(&Answer::Failed { id, error }, &[]),
                    };
                    // The reader finds out that the rank cannot be reached.
                    drop(answer);
                };
                let named = thread::Builder::new().name("fsdp-collective".to_owned()).stack_size(STACK);
                let collective = named.spawn(work).map_err(|error| format!("cannot be served: {error}"))?;
                return Ok(Some(collective));
            }
            Request::Make { comm, new, name, ranks, apart } => {
                let parent = known(comm)?;
                let made = match ranks {
                    None if apart => parent.duplicate_apart(&name),
                    None => parent.duplicate(&name),
                    Some(ranks) => {
                        parent.split(&name, &ranks).map_err(|error| format!("asked for a group: {error}"))?
                    }
                };
                communicators.insert(new, made);
            }
            Request::Note { comm, state } => known(comm)?.note(&state),
            Request::Enter { comm, call } => {
                let call = call.call().ok_or("called a collective of a dtype that is not known")?;
                // If it differs the world fails, of which the rank is told.
                drop(ledger(comm)?.call(call));
            }
            Request::Reached { comm, number, stage } => ledger(comm)?.reached(number, stage),
            Request::GiveUp { id, comm, number, trouble } => {
                let error = ledger(comm)?.give_up(number, trouble);
                client.send(&Answer::Failed { id, error }, &[]).map_err(lost)?;
            }
            Request::Ping => {}
            Request::Finish | Request::Fail { .. } => {
                return Err("spoke out of turn".to_owned());
            }
        }
        Ok(None)
    }
}

/// A collective of the host, for a rank: what it brings, and what it gets.
fn collective(comm: &dyn Communicator, tag: Tag, op: Host, body: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
    match op {
        Host::Barrier => comm.host_barrier(tag).map(|()| Vec::new()),
        Host::Gather => comm.host_gather(tag, body),
        Host::PatientGather => comm.host_gather_patiently(tag, body),
        Host::Reduce(op) => {
            let mut values: Vec<f64> = super::values(&body);
            comm.host_reduce(tag, op, &mut values)?;
            Ok(vec![values.iter().flat_map(|value| value.to_le_bytes()).collect()])
        }
    }
}

/// The system's words for the end of a connection.
pub(super) fn words(error: &Error) -> String {
    match error.kind() {
        ErrorKind::UnexpectedEof => "it was closed".to_owned(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "it is silent".to_owned(),
        _ => error.to_string(),
    }
}
