//! Waits that can never end, and long ones that can.

use std::sync::Mutex;

use crate::check::{check, choose, choose_of};
use crate::comm::{CommError, Communicator, Gather, HostOp};
use crate::device::cpu::{ComputeStream, CpuStream};
use crate::device::{Event, Stream};
use crate::launch::{LaunchError, World};
use crate::rendezvous::{buffer, launch, tag};

/// How a rank waits in a collective.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// Its own thread is in it.
    Host,
    /// Its own thread waits for the stream that is in it.
    Event,
    /// A second stream waits for the first, and the thread for the second.
    Chain,
    /// Its thread is in a collective of the host behind the one that the stream is in.
    Behind,
    /// The stream is in it, and the thread has returned.
    Returned,
}

const WAITS: [Wait; 5] = [Wait::Host, Wait::Event, Wait::Chain, Wait::Behind, Wait::Returned];

/// Waits in a gather on `comm`.
fn wait_in(comm: &dyn Communicator, name: &str, wait: Wait) -> Result<(), CommError> {
    if let Wait::Host = wait {
        return comm.host_reduce(tag(name), HostOp::Sum, &mut [0.0]);
    }
    let (first, second, compute) =
        (CpuStream::spawn("first"), CpuStream::spawn("second"), ComputeStream::new("compute"));
    let part = Gather { send: buffer(1), recv: buffer(comm.size()) };
    comm.all_gather(&*first, tag(name), vec![part])?;
    match wait {
        Wait::Host | Wait::Returned => Ok(()),
        Wait::Event => first.record().synchronize(),
        Wait::Chain => {
            second.wait(&first.record())?;
            compute.wait(&second.record())
        }
        Wait::Behind => comm.host_barrier(tag("behind")),
    }
}

/// Runs `main`, which ends in waits without end, on so many ranks, and gives each rank's error.
fn stuck(ranks: usize, main: impl Fn(&World) -> Result<(), CommError> + Sync) -> Vec<Option<CommError>> {
    let errors = Mutex::new(vec![None; ranks]);
    let launched = launch(ranks, |world| {
        let end = main(&world);
        errors.lock().unwrap()[world.rank()] = end.clone().err();
        end
    });
    assert!(matches!(launched, Err(LaunchError::Ranks { .. })), "{launched:?}");
    errors.into_inner().unwrap()
}

/// Each rank waits in a collective of its own for the next one, in a way that the checker chooses.
pub fn ranks_in_a_circle_fail(ranks: usize, schedules: usize) {
    match ranks {
        2 => check(schedules, || circle(2)),
        _ => check(schedules, || circle(3)),
    }
}

fn circle(ranks: usize) {
    let waits: Vec<Wait> = (0..ranks).map(|_| choose_of(&WAITS)).collect();
    let errors = stuck(ranks, |world| {
        let (comm, rank) = (world.communicator(), world.rank());
        // All have met before.
        comm.host_barrier(tag("start"))?;
        let channels: Vec<_> = (0..ranks).map(|rank| comm.duplicate(&rank.to_string())).collect();
        wait_in(&*channels[rank], &rank.to_string(), waits[rank])
    });
    for (rank, error) in errors.iter().enumerate() {
        let told = matches!(error, Some(CommError::Diverged { .. } | CommError::RankFailed { .. }));
        // One that has returned learns nothing itself.
        assert!(told || matches!(waits[rank], Wait::Returned), "{waits:?}: rank {rank} ended with {error:?}");
    }
}

/// Three ranks wait in groups of two, around.
pub fn groups_in_a_circle_fail(schedules: usize) {
    check(schedules, || {
        let errors = stuck(3, |world| {
            let (comm, rank) = (world.communicator(), world.rank());
            let pair = |one: usize, other: usize| -> Result<_, CommError> {
                let pair = if rank == one || rank == other { vec![one, other] } else { vec![rank] };
                comm.split("pair", &pair)
            };
            let pairs = [pair(0, 1)?, pair(1, 2)?, pair(2, 0)?];
            wait_in(&*pairs[rank], &rank.to_string(), choose_of(&[Wait::Host, Wait::Event]))
        });
        for error in errors {
            let Some(CommError::Diverged { message, .. }) = error else { panic!("{error:?}") };
            assert!(message.starts_with("the ranks wait for each other: rank "), "{message}");
        }
    });
}

/// Two of three ranks wait for each other while the third is at work, which it then finds to be in vain.
pub fn a_knot_of_two_ends_the_third(schedules: usize) {
    check(schedules, || {
        let errors = stuck(3, |world| {
            let (comm, rank) = (world.communicator(), world.rank());
            let channels = [comm.duplicate("a"), comm.duplicate("b")];
            wait_in(&*channels[usize::from(rank == 1)], "u", choose_of(&[Wait::Host, Wait::Event]))
        });
        assert!(errors.iter().all(|error| matches!(error, Some(CommError::Diverged { .. }))), "{errors:?}");
    });
}

/// Ranks meet on several channels in orders that hold each other up but never for good: no rank is told otherwise.
pub fn long_waits_end(schedules: usize) {
    check(schedules, || {
        let (first, waits) = (choose(3), [(); 3].map(|()| choose_of(&[Wait::Event, Wait::Chain])));
        let launched = launch(3, |world| {
            let (comm, rank) = (world.communicator(), world.rank());
            let (left, right) = (comm.duplicate("left"), comm.duplicate("right"));
            let stream = CpuStream::spawn("ahead");
            let part = || Gather { send: buffer(1), recv: buffer(3) };
            // On one rank it comes last, on the others first: they wait in `left` until then.
            if rank != first {
                left.all_gather(&*stream, tag("ahead"), vec![part()])?;
            }
            wait_in(&*right, "u", waits[rank])?;
            if rank == first {
                left.all_gather(&*stream, tag("ahead"), vec![part()])?;
            }
            stream.record().synchronize()
        });
        launched.unwrap();
    });
}
