//! How the parts of the ranks meet, and the data moves.

use super::calls::{Part, Verb};
use super::comm::Life;
use super::exchange::{exchange, write};
use super::{Answer, Code};
use crate::abi::{Outcome, Status};
use crate::capture::Act;
use crate::queue::{Position, StreamId, Work};
use crate::report::Kind;
use crate::scheduler;
use crate::state::{Held, State};

/// The parts of one rank that start together, at one place of a stream.
pub struct Launch {
    parts: Vec<(Meeting, Part)>,
    pub at: Option<Position>,
    started: bool,
}

impl Launch {
    pub fn concerns(&self, comm: usize) -> bool {
        self.parts.iter().any(|(_, part)| part.comm == comm)
    }
}

/// Where a part meets those of the other ranks.
#[derive(Clone, Copy)]
enum Meeting {
    /// The communicator's nth collective.
    Round(u64),
    /// The nth message from one rank to another.
    Mail { from: usize, to: usize, number: u64 },
    /// Nowhere: the rank is lost.
    Never,
}

/// A part that has been queued.
#[derive(Clone)]
pub struct Entry {
    launch: usize,
    part: Part,
    started: bool,
}

/// What each part gets once all have arrived, until its own stream takes it.
#[derive(Default)]
enum Results {
    #[default]
    Pending,
    Of(Vec<Option<Vec<u8>>>),
}

/// A collective: the parts by rank.
#[derive(Default)]
pub struct Round {
    entries: Vec<Option<Entry>>,
    results: Results,
}

/// A message: its sender's part and its receiver's.
#[derive(Default)]
pub struct Message {
    sender: Option<Entry>,
    receiver: Option<Entry>,
    results: Results,
}

/// What a launch at the head of its stream is waiting for.
pub enum Progress {
    Complete,
    Needs {
        /// Parts which are queued, and whose streams have to come to them.
        peers: Vec<Position>,
        /// What nobody has queued, in words.
        absent: String,
    },
}

/// Queues parts on their streams, those of one stream as one operation.
pub fn submit(held: &mut Held, parts: Vec<(StreamId, Part)>) -> Answer {
    let mut streams = Vec::<StreamId>::new();
    for (stream, _) in &parts {
        if !streams.contains(stream) {
            streams.push(*stream);
        }
    }
    for stream in streams {
        let here =
            parts.iter().filter(|(s, _)| *s == stream).map(|(_, part)| part.clone()).collect::<Vec<_>>();
        submit_on(held, stream, here)?;
    }
    scheduler::after_submission(held);
    Ok(())
}

/// Queues parts that a graph has recorded, if their communicators are still there.
pub fn submit_again(held: &mut Held, stream: StreamId, parts: Vec<Part>) -> Outcome {
    for part in &parts {
        let comm = &held.nccl.comms[part.comm];
        if comm.life != Life::Ready {
            let message = format!("a graph calls {} on {}, which is {:?}", part.name(), comm.name, comm.life);
            return held.misuse(Status::INVALID_VALUE, message);
        }
    }
    Ok(submit_on(held, stream, parts)?)
}

fn submit_on(held: &mut Held, stream: StreamId, parts: Vec<Part>) -> Answer {
    let names = parts.iter().map(|part| called(held, part)).collect::<Vec<_>>().join(" + ");
    let accesses = parts.iter().flat_map(Part::accesses).collect::<Vec<_>>();
    if held.record(stream, &names, &accesses, Act::Collectives(parts.clone()))? {
        return Ok(());
    }
    let launch = held.nccl.launches.len();
    let at = held.submit(stream, &names, &accesses, Work::Launch(launch))?;
    check_apart(held, &names, &parts);
    let parts = parts.into_iter().map(|part| (enter(held, launch, &part), part)).collect();
    held.nccl.launches.push(Launch { parts, at: Some(at), started: false });
    Ok(())
}

/// The name of a call, which says whether it has memory that its communicator has registered.
fn called(held: &State, part: &Part) -> String {
    let registrations = &held.nccl.comms[part.comm].registrations;
    let is_registered = |start: usize, bytes: usize| {
        bytes > 0 && registrations.values().any(|known| known.start <= start && start + bytes <= known.end)
    };
    let registered =
        is_registered(part.send, part.sent_bytes()) || is_registered(part.receive, part.received_bytes());
    let of = if registered { " of registered memory" } else { "" };
    format!("{}{of}", part.name())
}

/// Reports calls of one group that touch the same bytes: nothing orders them.
fn check_apart(held: &mut State, names: &str, parts: &[Part]) {
    let conflict = |(i, part): (usize, &Part)| {
        let others = parts[..i].iter().flat_map(Part::accesses).collect::<Vec<_>>();
        part.accesses().iter().any(|access| others.iter().any(|other| other.conflicts(access)))
    };
    if parts.iter().enumerate().any(conflict) {
        held.reports.add(Kind::Race, format!("{names}, of one group, touch the same bytes"));
    }
}

/// Puts a part where the other ranks' parts will find it.
fn enter(held: &mut State, launch: usize, part: &Part) -> Meeting {
    if held.is_lost(part) {
        return Meeting::Never;
    }
    let entry = Entry { launch, part: part.clone(), started: false };
    let comm = &mut held.nccl.comms[part.comm];
    let clique = &mut held.nccl.cliques[comm.clique];
    match part.verb {
        Verb::Send { to } => {
            let number = comm.sent.entry(to).or_default();
            *number += 1;
            clique.mail.entry((part.rank, to, *number)).or_default().sender = Some(entry);
            Meeting::Mail { from: part.rank, to, number: *number }
        }
        Verb::Receive { from } => {
            let number = comm.received.entry(from).or_default();
            *number += 1;
            clique.mail.entry((from, part.rank, *number)).or_default().receiver = Some(entry);
            Meeting::Mail { from, to: part.rank, number: *number }
        }
        _ => {
            comm.collectives += 1;
            let round = clique.rounds.entry(comm.collectives).or_default();
            round.entries.resize(part.ranks, None);
            round.entries[part.rank] = Some(entry);
            Meeting::Round(comm.collectives)
        }
    }
}

impl State {
    /// Whether a test has lost this part's device; the others may learn of it.
    fn is_lost(&mut self, part: &Part) -> bool {
        let device = self.nccl.comms[part.comm].device;
        let Some(lost) = self.nccl.lost.as_mut().filter(|lost| lost.device == device) else { return false };
        if lost.calls_left > 0 {
            lost.calls_left -= 1;
            return false;
        }
        if lost.reported {
            let clique = &self.nccl.cliques[self.nccl.comms[part.comm].clique];
            for member in clique.members.iter().flatten() {
                self.nccl.comms[*member].error = Code::REMOTE_ERROR;
            }
        }
        true
    }
}

/// A launch has come to the head of its stream: its parts have arrived, and data moves where all have.
pub fn progress(held: &mut Held, launch: usize) -> Progress {
    arrive(held, launch);
    let mut peers = Vec::new();
    let mut absent = Vec::new();
    let mut complete = true;
    for (meeting, part) in held.nccl.launches[launch].parts.clone() {
        complete &= is_met(held, meeting, &part, &mut peers, &mut absent);
    }
    match complete {
        true => Progress::Complete,
        false => Progress::Needs { peers, absent: absent.join(", ") },
    }
}

/// The parts of a launch have arrived.
pub fn arrive(held: &mut Held, launch: usize) {
    if std::mem::replace(&mut held.nccl.launches[launch].started, true) {
        return;
    }
    for (meeting, part) in held.nccl.launches[launch].parts.clone() {
        let clique = held.nccl.comms[part.comm].clique;
        let clique = &mut held.nccl.cliques[clique];
        let entry = match meeting {
            Meeting::Never => None,
            Meeting::Round(number) => {
                clique.rounds.get_mut(&number).and_then(|r| r.entries[part.rank].as_mut())
            }
            Meeting::Mail { from, to, number } => {
                let mail = clique.mail.get_mut(&(from, to, number));
                mail.and_then(|mail| match part.verb {
                    Verb::Send { .. } => mail.sender.as_mut(),
                    _ => mail.receiver.as_mut(),
                })
            }
        };
        if let Some(entry) = entry {
            debug_assert_eq!(entry.launch, launch);
            entry.started = true;
        }
    }
}

/// Whether a part is done; if its counterparts are queued, where, and who is absent.
fn is_met(
    held: &mut Held,
    meeting: Meeting,
    part: &Part,
    peers: &mut Vec<Position>,
    absent: &mut Vec<String>,
) -> bool {
    if held.nccl.comms[part.comm].life == Life::Aborted {
        return true;
    }
    let clique = held.nccl.comms[part.comm].clique;
    let rounds = &held.nccl.cliques[clique];
    let is_there = |entry: &Option<Entry>| {
        entry.as_ref().is_some_and(|entry| held.nccl.comms[entry.part.comm].life != Life::Aborted)
    };
    let (index, pending, entries, missing) = match meeting {
        Meeting::Never => {
            absent.push("it is lost, as the test asked".to_owned());
            return false;
        }
        Meeting::Round(number) => {
            let round = &rounds.rounds[&number];
            let missing = (0..part.ranks).filter(|rank| !is_there(&round.entries[*rank]));
            let ranks = missing.map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ");
            let missing = format!("collective {number} lacks the call of rank {ranks}");
            (part.rank, matches!(round.results, Results::Pending), round.entries.clone(), missing)
        }
        Meeting::Mail { from, to, number } => {
            let mail = &rounds.mail[&(from, to, number)];
            let missing = format!("message {number} from rank {from} to rank {to} lacks one side");
            let index = usize::from(matches!(part.verb, Verb::Receive { .. }));
            let entries = vec![mail.sender.clone(), mail.receiver.clone()];
            (index, matches!(mail.results, Results::Pending), entries, missing)
        }
    };
    if pending {
        if !entries.iter().all(is_there) {
            absent.push(missing);
            return false;
        }
        let waiting = entries.iter().flatten().filter(|entry| !entry.started);
        let waiting = waiting.filter_map(|entry| held.nccl.launches[entry.launch].at).collect::<Vec<_>>();
        if !waiting.is_empty() {
            peers.extend(waiting);
            return false;
        }
        let parts = entries.into_iter().flatten().map(|entry| entry.part).collect::<Vec<_>>();
        *results(held, clique, meeting) = Results::Of(exchange(held, &parts));
    }
    // Each rank gets its values when its own stream is run, however early the others were.
    let taken = match results(held, clique, meeting) {
        Results::Of(results) => results[index].take(),
        Results::Pending => None,
    };
    if let Some(values) = taken {
        write(held, part, &values);
    }
    true
}

fn results(held: &mut Held, clique: usize, meeting: Meeting) -> &mut Results {
    let clique = &mut held.nccl.cliques[clique];
    match meeting {
        Meeting::Round(number) => &mut clique.rounds.entry(number).or_default().results,
        Meeting::Mail { from, to, number } => &mut clique.mail.entry((from, to, number)).or_default().results,
        Meeting::Never => unreachable!("a lost part meets nobody"),
    }
}
