//! When queues advance: never on their own, but when somebody waits, asks, or the mode runs ahead.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;

use crate::abi::{Outcome, Status};
use crate::clock::thread_name;
use crate::nccl;
use crate::queue::{Operation, Position, StreamId, Work};
use crate::report::Kind;
use crate::state::{CHANGED, Held, State};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// An operation runs when something that the host waits for needs it, and not before; of two that race, the one
    /// that was submitted later runs first.
    #[default]
    Latest,
    /// Each stream runs ahead as readily as the seed says, one early and another late; what the host waits for runs in
    /// an order of the seed's.
    Random,
    /// An operation runs as soon as what it waits for is complete.
    Earliest,
}

pub struct Scheduler {
    pub mode: Mode,
    /// How long a thread waits for others before it gives up.
    pub patience: Duration,
    random: u64,
    /// What was asked for last, of each stream: asked again, it advances.
    polled: HashMap<StreamId, u64>,
}

impl Default for Scheduler {
    fn default() -> Self {
        Scheduler::new(Mode::default(), 0)
    }
}

impl Scheduler {
    pub fn new(mode: Mode, seed: u64) -> Self {
        Scheduler { mode, patience: Duration::from_secs(30), random: seed, polled: HashMap::new() }
    }

    /// A number below `bound`, of the seed's sequence (SplitMix64).
    fn draw(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    /// How readily a stream runs ahead, of 255: never, sometimes or always.
    pub fn eagerness(&mut self) -> u8 {
        [0, 128, 255][self.draw(3)]
    }
}

/// What came of an attempt to advance a stream.
enum Step {
    /// An operation ran, of that stream or of one that it needs.
    Moved,
    /// Nothing can run until another thread does something.
    Blocked(String),
    /// What should rather run first waits for what it should run before.
    Circular,
}

/// An operation that waits for what is being run.
#[derive(Clone, Copy)]
struct Waiting {
    at: Position,
    /// It does not have to: see [`Operation::rather_after`].
    rather: bool,
}

/// Whether operations that race run in the inverse of the order in which they were submitted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Races {
    Inverted,
    AsTheyCome,
}

/// Runs what `target` needs, and blocks while another thread has to do its part.
pub fn run_until(held: &mut Held, target: Position) -> Outcome {
    /// How long what should run first may keep a thread waiting for another one.
    const A_WHILE: Duration = Duration::from_millis(10);
    let mut patience = Patience::new(held);
    while !held.is_done(target) {
        if held.scheduler.mode == Mode::Random {
            run_ahead(held);
            patience.check_epoch(held)?;
            if held.is_done(target) {
                break;
            }
        }
        if matches!(step(held, target, Races::Inverted, &mut Vec::new()), Step::Moved) {
            patience = Patience::new(held);
            continue;
        }
        let inverts = held.scheduler.mode == Mode::Latest;
        if inverts && !CHANGED.wait_for(held, A_WHILE).timed_out() {
            patience.check_epoch(held)?;
            continue;
        }
        patience.check_epoch(held)?;
        match step(held, target, Races::AsTheyCome, &mut Vec::new()) {
            Step::Moved => patience = Patience::new(held),
            Step::Blocked(reason) => patience.wait(held, &reason)?,
            Step::Circular => patience.wait(held, "a circle")?,
        }
    }
    Ok(())
}

/// A thread's waiting for others, which has an end: what never comes is an error and a finding.
pub struct Patience {
    epoch: u64,
    until: Instant,
}

impl Patience {
    pub fn new(held: &State) -> Self {
        Patience { epoch: held.epoch, until: Instant::now() + held.scheduler.patience }
    }

    /// Waits until something may have become possible.
    pub fn wait(&self, held: &mut Held, reason: &str) -> Outcome {
        self.check_epoch(held)?;
        let timed_out = CHANGED.wait_until(held, self.until).timed_out();
        self.check_epoch(held)?;
        if !timed_out {
            return Ok(());
        }
        let name = thread_name();
        held.reports.add(Kind::Deadlock, format!("thread {name:?} waits for what does not come: {reason}"));
        Err(Status::LAUNCH_TIMEOUT)
    }

    /// Whether the state is still the one that this thread knew.
    fn check_epoch(&self, held: &State) -> Outcome {
        if held.epoch == self.epoch { Ok(()) } else { Err(Status::DEINITIALIZED) }
    }
}

/// Whether `target` is complete. Asked again and again, it comes nearer.
pub fn poll(held: &mut Held, target: Position) -> bool {
    if held.is_done(target) {
        return true;
    }
    let again = held.scheduler.polled.insert(target.stream, target.index) == Some(target.index);
    if again && !matches!(step(held, target, Races::Inverted, &mut Vec::new()), Step::Moved)
        || held.scheduler.mode != Mode::Latest
    {
        step(held, target, Races::AsTheyCome, &mut Vec::new());
    }
    false
}

/// Runs what the mode wants run after something was submitted.
pub fn after_submission(held: &mut Held) {
    match held.scheduler.mode {
        Mode::Latest => {}
        Mode::Random => run_ahead(held),
        Mode::Earliest => while (0..held.streams.len()).any(|stream| advance(held, stream)) {},
    }
    CHANGED.notify_all();
}

/// Runs streams ahead, each as far as it is eager.
fn run_ahead(held: &mut Held) {
    let streams = held.streams.len();
    let first = held.scheduler.draw(streams.max(1));
    for stream in (0..streams).map(|i| (first + i) % streams) {
        if stream >= held.streams.len() {
            return; // The test has ended while a host function ran.
        }
        if held.scheduler.draw(16) == 0 {
            held.streams[stream].eagerness = held.scheduler.eagerness();
        }
        let eagerness = held.streams[stream].eagerness as usize;
        while held.scheduler.draw(255) < eagerness && advance(held, stream) {}
    }
}

/// Runs what comes next on a stream, or what that needs; false if nothing can.
pub fn advance(held: &mut Held, stream: StreamId) -> bool {
    let next =
        held.streams.get(stream).filter(|stream| !stream.queue.is_empty()).map(|stream| stream.done + 1);
    let target = next.map(|index| Position { stream, index });
    target.is_some_and(|target| matches!(step(held, target, Races::AsTheyCome, &mut Vec::new()), Step::Moved))
}

/// Runs the next operation of the stream of `target`, or one that it needs first. `path` holds what waits for `target`.
fn step(held: &mut Held, target: Position, races: Races, path: &mut Vec<Waiting>) -> Step {
    let stream = target.stream;
    let circle =
        path.iter().position(|waiting| waiting.at.stream == stream && waiting.at.index <= target.index);
    if let Some(start) = circle {
        return if path[start..].iter().any(|waiting| waiting.rather) {
            Step::Circular
        } else {
            deadlock(held, path)
        };
    }
    let this = &held.streams[stream];
    if this.running {
        return Step::Blocked(format!("a host function runs on {}", this.name));
    }
    if this.queue.is_empty() {
        return Step::Blocked(format!("nothing is queued on {}", this.name));
    }
    if let Some(step) = invert(held, stream, races, path) {
        return step;
    }
    let head = Position { stream, index: held.streams[stream].done + 1 };
    path.push(Waiting { at: head, rather: false });
    let step = match held.streams[stream].queue[0].work {
        Work::Wait(position) if !held.is_done(position) => step(held, position, races, path),
        Work::Launch(launch) => step_launch(held, stream, launch, races, path),
        _ => execute(held, stream),
    };
    path.pop();
    step
}

/// Runs what should rather run before the next operation of a stream, if there is something and it can.
fn invert(held: &mut Held, stream: StreamId, races: Races, path: &mut Vec<Waiting>) -> Option<Step> {
    if races == Races::AsTheyCome {
        return None;
    }
    let at = Position { stream, index: held.streams[stream].done + 1 };
    for position in held.streams[stream].queue.front()?.rather_after.clone() {
        if held.is_done(position) {
            continue;
        }
        path.push(Waiting { at, rather: true });
        let step = step(held, position, races, path);
        path.pop();
        if !matches!(step, Step::Circular) {
            return Some(step);
        }
    }
    None
}

fn step_launch(
    held: &mut Held,
    stream: StreamId,
    launch: usize,
    races: Races,
    path: &mut Vec<Waiting>,
) -> Step {
    match nccl::progress(held, launch) {
        nccl::Progress::Complete => execute(held, stream),
        nccl::Progress::Needs { peers, absent } => {
            let mut reason = absent;
            for peer in peers {
                match bring_to(held, peer, races, path) {
                    Step::Blocked(why) => reason = why,
                    step => return step,
                }
            }
            Step::Blocked(format!("{}: {reason}", held.streams[stream].queue[0].name))
        }
    }
}

/// Runs a stream up to a launch, which has then arrived; what it gets is its own stream's matter.
fn bring_to(held: &mut Held, launch: Position, races: Races, path: &mut Vec<Waiting>) -> Step {
    let stream = &held.streams[launch.stream];
    match stream.queue.front().map(|op| &op.work) {
        Some(Work::Launch(number)) if stream.done + 1 == launch.index => {
            let number = *number;
            invert(held, launch.stream, races, path).unwrap_or_else(|| {
                nccl::arrive(held, number);
                Step::Moved
            })
        }
        _ => step(held, Position { index: launch.index - 1, ..launch }, races, path),
    }
}

/// Operations that wait for each other in a circle: whatever is submitted later, they stay until one is aborted.
fn deadlock(held: &mut Held, path: &[Waiting]) -> Step {
    let name =
        |waiting: &Waiting| held.streams[waiting.at.stream].queue.front().map(|op| op.name.to_string());
    let names = path.iter().filter_map(name).collect::<Vec<_>>().join(", which waits for ");
    let message = format!("{names}, which waits for the first");
    held.reports.add(Kind::Deadlock, message.clone());
    Step::Blocked(format!("deadlock: {message}"))
}

/// Runs the first operation of a stream.
fn execute(held: &mut Held, stream: StreamId) -> Step {
    let Some(Operation { name, work, ranges, .. }) = held.streams[stream].queue.pop_front() else {
        return Step::Blocked("nothing is queued".to_owned());
    };
    match work {
        Work::Nothing | Work::Wait(_) | Work::Launch(_) => {}
        Work::Memory(run) => {
            if ranges.iter().all(|range| held.heap.is_mapped(range)) {
                run();
            } else {
                held.reports.add(Kind::UseAfterFree, format!("{name} ran after its memory was given back"));
            }
        }
        Work::Host(run, _) => {
            let epoch = held.epoch;
            held.streams[stream].running = true;
            MutexGuard::unlocked(held, || run());
            if held.epoch != epoch {
                return Step::Blocked("the test has ended".to_owned());
            }
            held.streams[stream].running = false;
        }
        Work::Free(start) => held.retire(start),
        Work::Refresh(start) => held.heap.repattern(start, true),
        Work::Lapse(start) => held.heap.repattern(start, false),
        Work::Record(event) => {
            let ticks = held.ticks;
            held.events[event].time = Some(ticks);
        }
    }
    held.streams[stream].done += 1;
    held.ticks += 1;
    CHANGED.notify_all();
    Step::Moved
}

impl State {
    /// The free of a block has come in stream order.
    pub fn retire(&mut self, start: usize) {
        let owner = self.heap.starting(start).map(|block| block.describe()).unwrap_or_default();
        if !self.heap.retire(start) {
            self.reports.add(Kind::Overrun, format!("something wrote behind the end of {owner}"));
        }
    }
}
