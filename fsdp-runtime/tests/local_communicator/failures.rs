//! Errors, not hangs: whatever goes wrong on one rank ends as an error with names on every rank.

use std::sync::Mutex;
use std::time::Duration;

use fsdp_runtime::comm::{Accumulate, CommError, Communicator, Exchange, Gather, HostOp, Phase, Reduce, Tag};
use fsdp_runtime::device::Stream;
use fsdp_runtime::device::cpu::{ComputeStream, CpuStream};
use fsdp_runtime::launch::{LaunchError, Launcher, RankEnd, World, local};

use crate::{slice, tag};

/// Runs ranks that are expected to fail, and gives the error that each one saw, by rank, and that of the
/// launch.
fn fails<F>(ranks: usize, rank_main: F) -> (Vec<Option<String>>, LaunchError)
where
    F: Fn(&World) -> Result<(), CommError> + Sync,
{
    fails_with(&Launcher::new().ranks(ranks), ranks, rank_main)
}

fn fails_with<F>(launcher: &Launcher, ranks: usize, rank_main: F) -> (Vec<Option<String>>, LaunchError)
where
    F: Fn(&World) -> Result<(), CommError> + Sync,
{
    let seen = Mutex::new(vec![None; ranks]);
    let launched = launcher.run(|world| {
        let end = rank_main(&world);
        if let Err(error) = &end {
            seen.lock().unwrap()[world.rank()] = Some(error.to_string());
            // What has failed the world is for good; its own arguments or streams are this rank's alone.
            if !matches!(error, CommError::Invalid { .. } | CommError::Stream { .. }) {
                let later = world.communicator().host_barrier(tag("later", 9)).unwrap_err();
                assert_eq!(later.to_string(), error.to_string());
            }
        }
        end
    });
    (seen.into_inner().unwrap(), launched.unwrap_err())
}

/// An all-gather of `len` f32 a rank.
fn gather(comm: &dyn Communicator, stream: &dyn Stream, tag: Tag, len: usize) -> Result<(), CommError> {
    let part = Gather { send: slice(vec![0f32; len]), recv: slice(vec![0f32; len * comm.size()]) };
    comm.all_gather(stream, tag, vec![part])
}

fn all_same(errors: &[Option<String>], message: &str) {
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(error.as_deref(), Some(format!("rank {rank}: {message}").as_str()));
    }
}

#[test]
fn ranks_in_different_units_are_both_named() {
    let (errors, launch) = fails(2, |world| {
        let comm = world.communicator().duplicate("gather");
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        gather(&*comm, &*stream, tag("B", 3), 4)?;
        gather(&*comm, &*stream, tag(if world.rank() == 0 { "A" } else { "B" }, 3), 4)?;
        stream.record().synchronize()
    });
    all_same(
        &errors,
        "collective #2 of channel `gather` differs: rank 0 is in all-gather of unit `A` (forward, step 4, 32 B), \
         rank 1 in all-gather of unit `B` (forward, step 4, 32 B); was something called on one rank only?",
    );
    let LaunchError::Ranks { others, .. } = &launch else { panic!("{launch}") };
    assert_eq!(others.len(), 1);
}

#[test]
fn ranks_in_different_operations_are_both_named() {
    let (errors, _) = fails(2, |world| {
        let comm = world.communicator();
        let stream = ComputeStream::new("compute");
        if world.rank() == 0 {
            comm.host_barrier(tag("A", 0))
        } else {
            comm.broadcast(&*stream, tag("A", 0), slice([0f32; 2]), 1)
        }
    });
    all_same(
        &errors,
        "collective #1 of channel `world` differs: rank 0 is in host-barrier of `A` (forward, step 1, 0 B), rank 1 in \
         broadcast from rank 1 of unit `A` (forward, step 1, 8 B); was something called on one rank only?",
    );
}

#[test]
fn ranks_with_different_sizes_are_told_which_part() {
    let (errors, _) = fails(3, |world| {
        let stream = CpuStream::spawn("side");
        let len = if world.rank() == 2 { 10 } else { 8 };
        gather(&**world.communicator(), &*stream, tag("fc", 0), len)?;
        stream.record().synchronize()
    });
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("collective #1 of channel `world` differs: rank "), "{error}");
        assert!(error.contains("8 x f32 into 24 x f32 on rank"), "{error}");
        assert!(error.contains("10 x f32 into 30 x f32 on rank 2"), "{error}");
        assert!(error.contains("rank 2 in all-gather of unit `fc` (forward, step 1, 120 B)"), "{error}");
    }
}

/// Both ranks reduce; `change` makes rank 1 differ.
#[test]
fn ranks_that_exchange_chunks_of_different_sizes_are_told_which_part() {
    let (errors, _) = fails(2, |world| {
        let stream = CpuStream::spawn(format!("rank{}/side", world.rank()));
        let part = |len: usize| Exchange { send: slice(vec![0f32; len]), recv: slice(vec![0f32; len]) };
        let parts = vec![part(4), part([2, 8][world.rank()])];
        world.communicator().all_to_all(&*stream, tag("tokens", 3), parts)?;
        stream.record().synchronize()
    });
    all_same(
        &errors,
        "collective #1 of channel `world` differs: rank 0 is in all-to-all of unit `tokens` (forward, step 4, 24 B), \
         rank 1 in all-to-all of unit `tokens` (forward, step 4, 48 B): part 1 is 2 x f32 on rank 0, 8 x f32 on rank 1",
    );
}

fn differing_reduce(change: impl Fn(&mut Tag, &mut Vec<Reduce>) + Sync) -> String {
    let (errors, _) = fails(2, |world| {
        let mut tag = tag("u", 0);
        let part = || Reduce {
            send: slice([0f32; 8]),
            recv: slice([0f32; 4]),
            scale: 0.5,
            accumulate: Accumulate::Overwrite,
        };
        let mut parts = vec![part(), part()];
        if world.rank() == 1 {
            change(&mut tag, &mut parts);
        }
        world.communicator().reduce_scatter(&*ComputeStream::new("compute"), tag, parts)
    });
    let message = errors[0].as_ref().unwrap().strip_prefix("rank 0: ").unwrap();
    all_same(&errors, message);
    message.split_once(" differs: ").unwrap().1.to_owned()
}

#[test]
fn every_disagreement_of_a_reduction_is_found() {
    let names = "rank 0 is in reduce-scatter of unit `u` (forward, step 1, 64 B), rank 1 in reduce-scatter of unit `u` \
                 (forward, step 1, 64 B)";
    assert_eq!(
        differing_reduce(|_, parts| parts[1].scale = 0.25),
        format!(
            "{names}: part 1 is 8 x f32 into 4 x f32, scale 0.5, overwriting on rank 0, \
             8 x f32 into 4 x f32, scale 0.25, overwriting on rank 1"
        )
    );
    assert_eq!(
        differing_reduce(|_, parts| parts[0].accumulate = Accumulate::Add),
        format!(
            "{names}: part 0 is 8 x f32 into 4 x f32, scale 0.5, overwriting on rank 0, \
             8 x f32 into 4 x f32, scale 0.5, adding on rank 1"
        )
    );
    let bf16s = |n| slice(vec![half::bf16::ZERO; n]);
    let message = differing_reduce(|_, parts| parts[1].send = bf16s(8));
    assert!(message.ends_with("8 x bf16 into 4 x f32, scale 0.5, overwriting on rank 1"), "{message}");
    let message = differing_reduce(|_, parts| drop(parts.pop()));
    assert!(message.ends_with(": 2 parts on rank 0, 1 on rank 1"), "{message}");
    let message = differing_reduce(|tag, _| tag.phase = Phase::Backward);
    let end = "rank 1 in reduce-scatter of unit `u` (backward, step 1, 64 B); was something called on one rank only?";
    assert!(message.ends_with(end), "{message}");
}

#[test]
fn ranks_in_different_steps_are_told_apart() {
    let (errors, _) = fails(2, |world| world.communicator().host_barrier(tag("u", world.rank() as u64)));
    all_same(
        &errors,
        "collective #1 of channel `world` differs: rank 0 is in host-barrier of `u` (forward, step 1, 0 B), rank 1 in \
         host-barrier of `u` (forward, step 2, 0 B); was something called on one rank only?",
    );
}

#[test]
fn host_reductions_must_agree() {
    let (errors, _) = fails(2, |world| {
        let op = [HostOp::Sum, HostOp::Max][world.rank()];
        world.communicator().host_reduce(tag("norm", 0), op, &mut [0.0])
    });
    all_same(
        &errors,
        "collective #1 of channel `world` differs: rank 0 is in host-reduce (sum) of `norm` (forward, step 1, 8 B), \
         rank 1 in host-reduce (max) of `norm` (forward, step 1, 8 B); was something called on one rank only?",
    );
}

#[test]
fn duplicates_must_be_named_alike() {
    let (errors, _) = fails(2, |world| {
        world.communicator().duplicate("gather");
        let name = ["reduce", "outer"][world.rank()];
        world.communicator().duplicate(name).host_barrier(tag("u", 0))
    });
    for error in errors {
        let error = error.unwrap();
        assert!(error.contains("duplicate #2 of channel `world` differs: rank "), "{error}");
        assert!(error.contains("`reduce`") && error.contains("`outer`"), "{error}");
    }
}

#[test]
fn a_panic_fails_the_waiters_at_once() {
    let (errors, launch) = fails(3, |world| {
        let comm = world.communicator().duplicate("gather");
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        gather(&*comm, &*stream, tag("layers.2", 3), 4)?;
        stream.record().synchronize()?;
        if world.rank() == 1 {
            panic!("boom");
        }
        gather(&*comm, &*stream, tag("layers.3", 3), 4)?;
        stream.record().synchronize()
    });
    let message =
        "rank 1 panicked: boom (last seen in all-gather of unit `layers.2` (forward, step 4, 48 B))";
    assert_eq!(errors[0].as_deref(), Some(format!("rank 0: {message}").as_str()));
    assert_eq!(errors[1], None);
    assert_eq!(errors[2].as_deref(), Some(format!("rank 2: {message}").as_str()));
    let LaunchError::Ranks { first, others } = &launch else { panic!("{launch}") };
    assert_eq!((first.rank, &first.end), (1, &RankEnd::Panicked("boom".to_owned())));
    assert_eq!(others.iter().map(|failure| failure.rank).collect::<Vec<_>>(), [0, 2]);
    assert!(
        launch
            .to_string()
            .starts_with("rank 1 panicked: boom\nafter that:\n  ranks 0, 2 failed: rank 1 panicked: boom (")
    );
}

#[test]
fn an_error_of_one_rank_fails_the_others() {
    let launch = local(4, |world| {
        if world.rank() == 2 {
            return Err("out of memory".to_owned());
        }
        world.communicator().host_barrier(tag("u", 0)).map_err(|error| error.to_string())
    })
    .unwrap_err();
    let LaunchError::Ranks { first, others } = &launch else { panic!("{launch}") };
    assert_eq!(first.to_string(), "rank 2 failed: out of memory");
    let expected =
        |rank| format!("rank {rank} failed: rank 2 failed: out of memory (seen in no collective yet)");
    assert_eq!(others.iter().map(ToString::to_string).collect::<Vec<_>>(), [0, 1, 3].map(expected));
}

#[test]
fn a_rank_that_returns_early_fails_those_who_wait_for_it() {
    let (errors, launch) = fails(3, |world| {
        world.communicator().host_barrier(tag("start", 0))?;
        if world.rank() == 1 { Ok(()) } else { world.communicator().host_barrier(tag("end", 5)) }
    });
    // Which is known first depends on when the streams and the return of rank 1 are seen.
    let told = |text: &str| {
        text.contains("rank 1 returned early (") || text.contains("the ranks wait for each other: ")
    };
    for rank in [0, 2] {
        let error = errors[rank].as_ref().unwrap();
        assert!(error.starts_with(&format!("rank {rank}: ")) && told(error), "{error}");
    }
    assert!(told(&launch.to_string()), "{launch}");
}

#[test]
fn threads_of_the_users_own_may_end_what_looks_like_a_knot() {
    let sums = local(2, |world| {
        let (comm, rank) = (world.communicator(), world.rank());
        let channels = [comm.duplicate("a"), comm.duplicate("b")];
        let reduce = |channel: usize| {
            let mut value = [1.0 + rank as f64];
            channels[channel].host_reduce(tag("u", 0), HostOp::Sum, &mut value).map(|()| value[0])
        };
        let (called, calls) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                // Known before the rank's own thread waits.
                comm.host_barrier(tag("other", 0))?;
                drop(called);
                reduce(1 - rank)
            });
            let _ = calls.recv();
            // The own threads are in different collectives; the other ones come.
            let own = reduce(rank)?;
            Ok::<_, CommError>(own + other.join().unwrap()?)
        })
    });
    assert_eq!(sums.unwrap(), [6.0, 6.0]);
}
