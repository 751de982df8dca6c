//! A rank's connection to rank 0.

use std::collections::HashMap;
use std::io::{Error, ErrorKind};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::hello::{self, Hello};
use super::secret::Secret;
use super::server::{Server, words};
use super::wire::{self, Answer, Request};
use super::{PING, Place, silence};
use crate::comm::CommError;

/// What a rank and its threads share of the connection.
pub(super) struct Connection {
    rank: usize,
    pub(super) timeout: Duration,
    writer: Mutex<TcpStream>,
    /// Who waits for an answer; `None` once there will be no more.
    waiting: Mutex<Option<HashMap<u64, Sender<Reply>>>>,
    /// The failure of the world, or of the connection.
    failure: Mutex<Option<CommError>>,
    next: AtomicU64,
    /// The thread of a launched rank.
    own: OnceLock<ThreadId>,
    /// The rank has said that it goes: the connection may end.
    left: AtomicBool,
}

type Reply = Result<Vec<Vec<u8>>, CommError>;

/// A rank that has joined. Dropping it leaves, unless that has been said.
pub(super) struct Membership {
    pub(super) connection: Arc<Connection>,
    reader: Option<JoinHandle<()>>,
    /// Ends the pings by being dropped.
    pings: Option<(Sender<()>, JoinHandle<()>)>,
    /// Rank 0's: dropped last, when it has left itself.
    _server: Option<Server>,
}

impl Membership {
    /// Joins rank 0, which `server` is of if this is it.
    pub(super) fn join(
        place: &Place,
        timeout: Duration,
        secret: &Secret,
        server: Option<Server>,
    ) -> Result<Membership, CommError> {
        let failed = |message: String| CommError::RankFailed { rank: place.rank, failed: 0, message };
        let (host, port) = &place.address;
        let lost =
            |error: Error| failed(format!("rank 0 at {host}:{port} does not let it in: {}", words(&error)));
        let mut stream = reach(place, timeout)?;
        let own = Hello { rank: place.rank, size: place.size };
        let prepare = |stream: &mut TcpStream| {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(silence(timeout)))?;
            stream.set_write_timeout(Some(silence(timeout)))?;
            hello::say(stream, secret, own)?;
            wire::read::<Answer>(stream)
        };
        match prepare(&mut stream).map_err(lost)? {
            (Answer::Welcome, _) => {}
            (Answer::Refused { message }, _) => return Err(failed(message)),
            (other, _) => return Err(failed(format!("rank 0 at {host}:{port} answers {other:?}"))),
        }
        let connection = Arc::new(Connection {
            rank: place.rank,
            timeout,
            writer: Mutex::new(stream.try_clone().map_err(lost)?),
            waiting: Mutex::new(Some(HashMap::new())),
            failure: Mutex::default(),
            next: AtomicU64::new(1),
            own: OnceLock::new(),
            left: AtomicBool::new(false),
        });
        let named = |name: &str| thread::Builder::new().name(format!("rank{}/{name}", place.rank));
        let (reader, pinger, (stop, stopped)) = (connection.clone(), connection.clone(), mpsc::channel());
        let reader = named("control").spawn(move || reader.listen(stream)).map_err(lost)?;
        let pings = named("ping").spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PING) {
                pinger.send(&Request::Ping, &[]);
            }
        });
        let pings = Some((stop, pings.map_err(lost)?));
        Ok(Membership { connection, reader: Some(reader), pings, _server: server })
    }

    /// Says that the rank has returned, or `how` it has failed. Only the first word counts.
    pub(super) fn leave(&self, how: Option<&str>) {
        if !self.connection.left.swap(true, Ordering::AcqRel) {
            let request = how.map_or(Request::Finish, |how| Request::Fail { how: how.to_owned() });
            self.connection.send(&request, &[]);
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave(thread::panicking().then_some("panicked"));
        if let Some((stop, pings)) = self.pings.take() {
            drop(stop);
            let _ = pings.join();
        }
        // What was sent comes first; the reader ends when rank 0 has closed its side.
        let _ = self.connection.writer.lock().shutdown(Shutdown::Write);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Connects, as often as it takes rank 0 to be there.
fn reach(place: &Place, timeout: Duration) -> Result<TcpStream, CommError> {
    const PAUSE: Duration = Duration::from_millis(100);
    let (host, port) = &place.address;
    let start = Instant::now();
    loop {
        match TcpStream::connect((host.as_str(), *port)) {
            Ok(stream) => return Ok(stream),
            Err(error) if start.elapsed() > timeout => {
                let message = format!("rank 0 was not reached at {host}:{port} in {timeout:?}: {error}");
                return Err(CommError::TimedOut { rank: place.rank, missing: vec![0], message });
            }
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

impl Connection {
    /// The present thread is the rank's own.
    pub(super) fn begin(&self) {
        self.own.get_or_init(|| thread::current().id());
    }

    pub(super) fn is_own_thread(&self) -> bool {
        self.own.get().is_some_and(|own| *own == thread::current().id())
    }

    pub(super) fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn failure(&self) -> Option<CommError> {
        self.failure.lock().clone()
    }

    /// Sends what is not answered. If it cannot be sent the connection has failed.
    pub(super) fn send(&self, request: &Request, body: &[u8]) {
        let written = wire::write(&mut *self.writer.lock(), request, body);
        if let Err(error) = written {
            self.lose(&error);
        }
    }

    /// Sends a request of number `id`, and waits for its answer.
    pub(super) fn ask(&self, id: u64, request: &Request, body: &[u8]) -> Reply {
        let (sender, answer) = mpsc::channel();
        if let Some(failure) = self.failure().filter(|_| !matches!(request, Request::GiveUp { .. })) {
            return Err(failure);
        }
        match &mut *self.waiting.lock() {
            Some(waiting) => drop(waiting.insert(id, sender)),
            // There will be no answer: nobody waits for one.
            None => drop(sender),
        }
        self.send(request, body);
        match answer.recv() {
            Ok(reply) => reply,
            Err(_) => Err(self.failure().unwrap_or_else(|| self.lost("it was closed"))),
        }
    }

    fn lost(&self, why: &str) -> CommError {
        let message = format!("the connection to rank 0 was lost: {why}");
        CommError::RankFailed { rank: self.rank, failed: 0, message }
    }

    /// The connection has failed: so has the world, for this rank.
    fn lose(&self, error: &Error) {
        if !self.left.load(Ordering::Acquire) {
            let lost = self.lost(&words(error));
            self.failure.lock().get_or_insert(lost);
        }
        *self.waiting.lock() = None;
    }

    /// Reads what rank 0 says, until it says no more.
    fn listen(&self, mut stream: TcpStream) {
        loop {
            match wire::read(&mut stream) {
                Ok((Answer::Done { id, lengths }, body)) => match parts(&lengths, &body) {
                    Some(parts) => self.reply(id, Ok(parts)),
                    None => return self.lose(&ErrorKind::InvalidData.into()),
                },
                Ok((Answer::Failed { id, error }, _)) => self.reply(id, Err(error)),
                Ok((Answer::Failure { error }, _)) => {
                    self.failure.lock().get_or_insert(error);
                }
                Ok((Answer::Ping | Answer::Welcome | Answer::Refused { .. }, _)) => {}
                Err(error) => return self.lose(&error),
            }
        }
    }

    fn reply(&self, id: u64, reply: Reply) {
        let waiting = self.waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id));
        let Some(sender) = waiting else { return };
        // Whoever waits is there until it is answered.
        let _ = sender.send(reply);
    }
}

/// The parts of a body, if they are of these lengths.
fn parts(lengths: &[u64], mut body: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::with_capacity(lengths.len());
    for length in lengths {
        let (part, rest) = body.split_at_checked(usize::try_from(*length).ok()?)?;
        parts.push(part.to_vec());
        body = rest;
    }
    body.is_empty().then_some(parts)
}
