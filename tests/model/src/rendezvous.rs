//! How ranks meet, and how they fail together.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::check::{check, check_all, choose, choose_of};
use crate::comm::local::{LocalOptions, LocalWorld};
use crate::comm::{Accumulate, CommError, Communicator, Exchange, Gather, HostOp, Phase, Reduce, Tag};
use crate::device::cpu::{ComputeStream, CpuStream};
use crate::device::{Slice, Stream};
use crate::launch::{LaunchError, Launcher, World};
use crate::spec::Dtype;

pub(crate) fn tag(unit: &str) -> Tag {
    Tag { unit: unit.into(), phase: Phase::Forward, step: 0 }
}

/// Fills `slice`, in this thread.
pub(crate) fn write(slice: &Slice, value: f32) {
    // SAFETY: the checker runs one thread at a time, and reports an access that is not ordered with this.
    unsafe { slice.as_mut_slice::<f32>() }.fill(value);
}

/// The elements of `slice`.
pub(crate) fn read(slice: &Slice) -> Vec<f32> {
    // SAFETY: as above.
    unsafe { slice.as_slice::<f32>() }.to_vec()
}

pub(crate) fn buffer(len: usize) -> Slice {
    // SAFETY: the checker reports uses that are not ordered.
    unsafe { Slice::zeros(Dtype::F32, len, None) }
}

fn launcher(ranks: usize, timeout: Duration) -> Launcher {
    Launcher::new().ranks(ranks).timeout(timeout).trace(false)
}

/// Launches ranks that wait for each other as long as it takes.
pub(crate) fn launch<T: Send>(
    ranks: usize,
    rank_main: impl Fn(World) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>, LaunchError> {
    launcher(ranks, Duration::MAX).run(rank_main)
}

/// Every collective, on two channels, two streams and a part of the ranks, gives exact values; buffers are
/// written again as soon as the rank's own event says that it may.
pub fn collectives_are_exact(ranks: usize, schedules: usize) {
    match ranks {
        2 => check(schedules, || drop(launch(2, every_collective).unwrap())),
        _ => check(schedules, || drop(launch(3, every_collective).unwrap())),
    }
}

fn every_collective(world: World) -> Result<(), CommError> {
    let (comm, rank, size) = (world.communicator(), world.rank(), world.size());
    let (gather, reduce) = (comm.duplicate("gather"), comm.duplicate("reduce"));
    let pair: Vec<usize> = if rank < 2 { vec![0, 1] } else { vec![2] };
    let pair = comm.split("pair", &pair)?;
    let compute = ComputeStream::new("compute");
    let (gathers, reduces) = (CpuStream::spawn("gather"), CpuStream::spawn("reduce"));
    let (send, whole) = (buffer(1), buffer(size));
    let (grads, sum, shared) = (buffer(size), buffer(1), buffer(3));
    let all = |value: &dyn Fn(usize) -> f32| (0..size).map(value).collect::<Vec<_>>();
    let total = |value: &dyn Fn(usize) -> f32| (0..size).map(value).sum::<f32>();

    for round in 0..2 {
        let value = move |rank: usize| (10 * round + rank + 1) as f32;
        write(&send, value(rank));
        gathers.wait(&compute.record())?;
        gather.all_gather(
            &*gathers,
            tag("weights"),
            vec![Gather { send: send.clone(), recv: whole.clone() }],
        )?;
        let gathered = gathers.record();

        write(&grads, value(rank));
        reduces.wait(&compute.record())?;
        let accumulate = if round == 0 { Accumulate::Overwrite } else { Accumulate::Add };
        let part = Reduce { send: grads.clone(), recv: sum.clone(), scale: 0.5, accumulate };
        reduce.reduce_scatter(&*reduces, tag("grads"), vec![part])?;
        let reduced = reduces.record();

        compute.wait(&gathered)?;
        assert_eq!(read(&whole), all(&value));
        // No peer reads them any more.
        write(&send, f32::NAN);
        compute.wait(&reduced)?;
        write(&grads, f32::NAN);
        let first = 0.5 * total(&|rank| (rank + 1) as f32);
        let expected = if round == 0 { first } else { first + 0.5 * total(&value) };
        assert_eq!(read(&sum), [expected]);
    }

    // In place, of a group, and on one stream behind the other.
    let own = whole.range(rank..rank + 1);
    write(&own, rank as f32);
    write(&shared, 1.0 + rank as f32);
    reduces.wait(&compute.record())?;
    pair.all_reduce(&*reduces, tag("pair"), vec![(shared.clone(), 2.0)])?;
    gathers.wait(&reduces.record())?;
    gather.all_gather(&*gathers, tag("in place"), vec![Gather { send: own, recv: whole.clone() }])?;
    gather.broadcast(&*gathers, tag("root"), shared.clone(), size - 1)?;
    // Behind what the stream still has to do on the channel.
    gather.host_barrier(tag("behind"))?;
    let mut values = [rank as f64];
    comm.host_reduce(tag("host"), HostOp::Sum, &mut values)?;
    assert_eq!(values, [(size * (size - 1) / 2) as f64]);
    compute.wait(&gathers.record())?;
    assert_eq!(read(&whole), all(&|rank| rank as f32));
    assert_eq!(read(&shared), [6.0; 3]);
    write(&shared, f32::NAN);
    write(&whole, f32::NAN);

    write(&grads, rank as f32);
    gathers.wait(&compute.record())?;
    let exchange = Exchange { send: grads.clone(), recv: whole.clone() };
    gather.all_to_all(&*gathers, tag("exchange"), vec![exchange])?;
    compute.wait(&gathers.record())?;
    assert_eq!(read(&whole), all(&|rank| rank as f32));
    // No peer reads it any more.
    write(&grads, f32::NAN);
    let lengths: Vec<usize> = comm.host_gather(tag("lengths"), vec![0; rank])?.iter().map(Vec::len).collect();
    assert_eq!(lengths, (0..size).collect::<Vec<_>>());
    comm.host_barrier(tag("end"))
}

/// Ranks return with collectives under way on their streams: these are finished all the same.
pub fn streams_outlive_the_ranks_code(schedules: usize) {
    check(schedules, || {
        let done = Arc::new(AtomicUsize::new(0));
        let launched = launch(3, |world| {
            let (comm, stream) = (world.communicator(), CpuStream::spawn("gather"));
            for _ in 0..2 {
                let part = Gather { send: buffer(1), recv: buffer(3) };
                comm.all_gather(&*stream, tag("all"), vec![part])?;
            }
            let done = done.clone();
            stream.submit(Box::new(move || {
                done.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }))
        });
        launched.unwrap();
        assert_eq!(done.load(Ordering::Relaxed), 3);
    });
}

/// All schedules of two ranks that meet once: how many there are.
pub fn two_ranks_meet_in_every_schedule() -> usize {
    check_all(|| {
        let world = LocalWorld::new(2, LocalOptions { timeout: Duration::MAX, ..LocalOptions::default() });
        let comms = [0, 1].map(|rank| world.communicator(rank).unwrap());
        let [zero, one] = comms;
        let other = shuttle::thread::spawn(move || one.host_barrier(tag("barrier")));
        zero.host_barrier(tag("barrier")).unwrap();
        other.join().unwrap().unwrap();
    })
}

/// All schedules of a rank that waits and another that fails.
pub fn a_failure_wakes_in_every_schedule() -> usize {
    check_all(|| {
        let world = LocalWorld::new(2, LocalOptions { timeout: Duration::MAX, ..LocalOptions::default() });
        let zero = world.communicator(0).unwrap();
        let other = shuttle::thread::spawn(move || world.fail(1, "failed"));
        let error = zero.host_barrier(tag("barrier")).unwrap_err();
        assert!(matches!(error, CommError::RankFailed { rank: 0, failed: 1, .. }));
        // For good, and for groups that the failed rank is not in.
        let alone = zero.split("alone", &[0]).unwrap();
        assert!(alone.host_barrier(tag("barrier")).is_err());
        other.join().unwrap();
    })
}

/// What one rank does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Panic,
    Fail,
    /// It fails with a collective under way that the others, who wait for it elsewhere, have not come to.
    FailAhead,
    ReturnEarly,
    /// It calls the next collective with another tag.
    Disagree,
    /// It asks for a group by another name.
    DisagreeOnGroup,
    /// The stream of the next collective has failed before.
    FailedStream,
    /// Its work in the next collective panics.
    PanicAtWork,
}

const FAULTS: [Fault; 8] = [
    Fault::Panic,
    Fault::Fail,
    Fault::FailAhead,
    Fault::ReturnEarly,
    Fault::Disagree,
    Fault::DisagreeOnGroup,
    Fault::FailedStream,
    Fault::PanicAtWork,
];

#[derive(Clone, Copy, Debug)]
struct Plan {
    fault: Fault,
    rank: usize,
    step: usize,
}

const STEPS: usize = 6;

/// What became of each rank.
struct Log {
    /// Collectives done, by rank and channel.
    done: Vec<Arc<[AtomicUsize; 3]>>,
    outcomes: Mutex<Vec<Option<Result<(), CommError>>>>,
}

impl Log {
    fn new(ranks: usize) -> Log {
        Log { done: (0..ranks).map(|_| Arc::default()).collect(), outcomes: Mutex::new(vec![None; ranks]) }
    }
}

/// A rank that fails in some way at some step, chosen by the checker: all others fail too, and what met was
/// finished by all who met.
pub fn a_fault_reaches_every_rank(ranks: usize, schedules: usize) {
    match ranks {
        2 => check(schedules, || fault(2, Duration::MAX)),
        _ => check(schedules, || fault(3, Duration::MAX)),
    }
}

/// The same where any wait may time out besides.
pub fn a_fault_beside_time_outs_reaches_every_rank(schedules: usize) {
    check(schedules, || fault(choose_of(&[2, 3]), Duration::from_secs(1)));
}

fn fault(ranks: usize, timeout: Duration) {
    let plan = Plan { fault: choose_of(&FAULTS), rank: choose(ranks), step: choose(STEPS) };
    let log = Log::new(ranks);
    let launched = launcher(ranks, timeout).run(|world| rank_main(world, Some(plan), &log));
    assert!(matches!(launched, Err(LaunchError::Ranks { .. })), "{plan:?}: {launched:?}");
    let outcomes = log.outcomes.into_inner().unwrap();
    for (rank, outcome) in outcomes.iter().enumerate().filter(|(rank, _)| *rank != plan.rank) {
        assert!(matches!(outcome, Some(Err(_))), "{plan:?}: rank {rank} ended with {outcome:?}");
    }
    assert_done(&log.done, &format!("{plan:?}"), (plan.fault == Fault::PanicAtWork).then_some(plan.rank));
}

/// Every rank has finished the same collectives; the one whose work panicked may lack the last.
fn assert_done(done: &[Arc<[AtomicUsize; 3]>], context: &str, panicked: Option<usize>) {
    for channel in 0..3 {
        let counts: Vec<usize> = done.iter().map(|done| done[channel].load(Ordering::Relaxed)).collect();
        let most = counts.iter().max().copied().unwrap_or(0);
        for (rank, count) in counts.iter().enumerate() {
            let may_lack = usize::from(panicked == Some(rank));
            assert!(count + may_lack >= most, "{context}: channel {channel} was left by {counts:?}");
        }
    }
}

/// Any wait may time out: the launch ends, what met was finished by all who met, and the launch is reported to
/// have failed if and only if a rank has.
pub fn time_outs_end_all_ranks(ranks: usize, schedules: usize) {
    match ranks {
        2 => check(schedules, || time_outs(2)),
        _ => check(schedules, || time_outs(3)),
    }
}

fn time_outs(ranks: usize) {
    let log = Log::new(ranks);
    let launched = launcher(ranks, Duration::from_secs(1)).run(|world| rank_main(world, None, &log));
    let outcomes = log.outcomes.into_inner().unwrap();
    let errors: Vec<&CommError> =
        outcomes.iter().flatten().filter_map(|outcome| outcome.as_ref().err()).collect();
    assert_eq!(launched.is_err(), !errors.is_empty(), "{launched:?}, but ranks ended with {outcomes:?}");
    for error in errors {
        let CommError::TimedOut { missing, message, .. } = error else { panic!("{error}") };
        assert!((1..ranks).contains(&missing.len()), "{error}, missing {missing:?}");
        if message.contains("waits for an earlier collective of the same rank") {
            let (_, seen) = message.rsplit_once("channel `gather`: ").expect("where the rank was seen");
            let seen = seen.split(';').next().unwrap_or(seen);
            let left = seen.starts_with("#2 ") && seen.ends_with("done");
            assert!(!left, "nothing to wait for: {error}");
        }
    }
    assert_done(&log.done, "time-outs", None);
}

fn rank_main(world: World, plan: Option<Plan>, log: &Log) -> Result<(), CommError> {
    let rank = world.rank();
    let outcome = steps(world, plan.filter(|plan| plan.rank == rank), &log.done[rank]);
    log.outcomes.lock().unwrap()[rank] = Some(outcome.clone());
    outcome
}

fn steps(world: World, plan: Option<Plan>, done: &Arc<[AtomicUsize; 3]>) -> Result<(), CommError> {
    let (comm, size) = (world.communicator(), world.size());
    let (gather, reduce) = (comm.duplicate("gather"), comm.duplicate("reduce"));
    let (gathers, reduces) = (CpuStream::spawn("gather"), CpuStream::spawn("reduce"));
    let failure = || CommError::Invalid { rank: world.rank(), message: "planned".to_owned() };
    let log = |stream: &CpuStream, channel: usize| {
        let done = done.clone();
        stream.submit(Box::new(move || {
            done[channel].fetch_add(1, Ordering::Relaxed);
            Ok(())
        }))
    };
    for step in 0..STEPS {
        let fault = plan.filter(|plan| plan.step == step).map(|plan| plan.fault);
        let (mut name, mut group, own, all) = ("all", "last", buffer(1), buffer(size));
        match fault {
            Some(Fault::Panic) => resume_unwind(Box::new("planned")),
            Some(Fault::Fail) => return Err(failure()),
            Some(Fault::FailAhead) => {
                let part = Gather { send: own, recv: all };
                gather.all_gather(&*gathers, tag(name), vec![part])?;
                log(&gathers, 1)?;
                return Err(failure());
            }
            Some(Fault::ReturnEarly) => return Ok(()),
            Some(Fault::Disagree) => name = "other",
            // There is one group to ask for.
            Some(Fault::DisagreeOnGroup) if step < STEPS - 1 => return Err(failure()),
            Some(Fault::DisagreeOnGroup) => group = "other",
            // A collective of hosts has no stream that could fail.
            Some(Fault::FailedStream | Fault::PanicAtWork) if matches!(step, 2 | 5) => return Err(failure()),
            Some(Fault::FailedStream) => {
                let stream = if matches!(step, 0 | 3) { &gathers } else { &reduces };
                let error = failure();
                stream.submit(Box::new(move || Err(error)))?;
            }
            // No peer writes them.
            Some(Fault::PanicAtWork) => {
                if matches!(step, 0 | 3 | 4) { &all } else { &own }.panic_at_next_write();
            }
            None => {}
        }
        match step {
            0 | 3 => {
                let part = Gather { send: own, recv: all };
                gather.all_gather(&*gathers, tag(name), vec![part])?;
                log(&gathers, 1)?;
                if step == 3 {
                    // Behind what the stream still has to do on the channel.
                    gather.host_barrier(tag(name))?;
                    done[1].fetch_add(1, Ordering::Relaxed);
                }
            }
            1 => {
                let part = Reduce { send: all, recv: own, scale: 1.0, accumulate: Accumulate::Overwrite };
                reduce.reduce_scatter(&*reduces, tag(name), vec![part])?;
                log(&reduces, 2)?;
            }
            4 => {
                reduce.all_reduce(&*reduces, tag(name), vec![(all, 1.0)])?;
                log(&reduces, 2)?;
            }
            2 => {
                comm.host_reduce(tag(name), HostOp::Max, &mut [0.0])?;
                done[0].fetch_add(1, Ordering::Relaxed);
            }
            _ => {
                comm.duplicate(group);
                // A rank may not look at what became of its streams: its peers are told all the same.
                if plan.is_none_or(|plan| plan.fault != Fault::FailedStream) {
                    gathers.record().synchronize()?;
                    reduces.record().synchronize()?;
                }
                comm.host_barrier(tag(name))?;
                done[0].fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}
