//! Errors, not hangs: whatever goes wrong on one rank ends as an error with names on every rank.

use std::sync::Mutex;
use std::time::Duration;

use fsdp_comm::comm::{Accumulate, CommError, Communicator, Exchange, Gather, HostOp, Phase, Reduce, Tag};
use fsdp_comm::device::Stream;
use fsdp_comm::device::cpu::{ComputeStream, CpuStream};
use fsdp_comm::launch::{LaunchError, Launcher, RankEnd, World, local};

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
    for rank in [0, 2] {
        let error = errors[rank].as_ref().unwrap();
        let early =
            "rank 1 returned early (last seen in host-barrier of `start` (forward, step 1, 0 B)), but rank ";
        assert!(error.starts_with(&format!("rank {rank}: {early}")), "{error}");
        assert!(error.ends_with(" waits for it in host-barrier of `end` (forward, step 6, 0 B)"), "{error}");
    }
    let LaunchError::Ranks { first, others } = &launch else { panic!("{launch}") };
    assert_eq!((first.rank, others.len()), (1, 2));
    assert!(launch.to_string().starts_with("rank 1 returned early"), "{launch}");
}

#[test]
fn a_time_out_says_who_is_missing_and_where_it_was() {
    let launcher = Launcher::new().ranks(3).timeout(Duration::from_millis(200));
    let (errors, launch) = fails_with(&launcher, 3, |world| {
        let comm = world.communicator().duplicate("gather");
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        gather(&*comm, &*stream, tag("blocks.0", 2), 4)?;
        stream.record().synchronize()?;
        if world.rank() == 1 {
            // A slow rank: its peers give up meanwhile.
            std::thread::sleep(Duration::from_millis(600));
        }
        gather(&*comm, &*stream, tag("blocks.1", 2), 4)?;
        stream.record().synchronize()
    });
    all_same(
        &errors,
        "timed out after 200ms in all-gather of unit `blocks.1` (forward, step 3, 48 B), collective #2 of channel \
         `gather`; arrived: [0, 2], missing: [1]; rank 1 was last seen: channel `gather`: \
         #1 all-gather of unit `blocks.0` (forward, step 3, 48 B), done",
    );
    let LaunchError::Ranks { others, .. } = &launch else { panic!("{launch}") };
    assert_eq!(others.len(), 2);
}

#[test]
fn a_failed_rank_with_pending_collectives_does_not_wait_for_them() {
    // Rank 1 fails while its side stream waits for rank 0 in `gather`, and rank 0 waits for rank 1 in
    // `world`.
    let (errors, launch) = fails(2, |world| {
        let comm = world.communicator().duplicate("gather");
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        if world.rank() == 1 {
            gather(&*comm, &*stream, tag("next", 0), 4)?;
            return Err(CommError::Invalid { rank: 1, message: "no".to_owned() });
        }
        world.communicator().host_barrier(tag("u", 0))
    });
    let error = errors[0].as_ref().unwrap();
    assert!(error.starts_with("rank 0: rank 1 failed: no ("), "{error}");
    let LaunchError::Ranks { first, .. } = &launch else { panic!("{launch}") };
    assert_eq!(first.to_string(), "rank 1 failed: no");
}

#[test]
fn a_collective_dropped_by_a_failed_stream_fails_the_peers() {
    let (errors, launch) = fails(2, |world| {
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        if world.rank() == 1 {
            stream.submit(Box::new(|| panic!("boom")))?;
        }
        gather(&**world.communicator(), &*stream, tag("u", 1), 4)?;
        stream.record().synchronize()
    });
    assert_eq!(
        errors[0].as_deref(),
        Some(
            "rank 0: rank 1 cannot run all-gather of unit `u` (forward, step 2, 32 B): its stream had failed before"
        )
    );
    assert_eq!(errors[1].as_deref(), Some("stream `rank1/all-gather`: work panicked: boom"));
    let LaunchError::Ranks { first, .. } = &launch else { panic!("{launch}") };
    assert_eq!(first.to_string(), "rank 1 failed: stream `rank1/all-gather`: work panicked: boom");
}

#[test]
fn a_trace_of_the_last_collectives_is_added_when_asked() {
    let launcher = Launcher::new().ranks(2).trace(true);
    let (errors, _) = fails_with(&launcher, 2, |world| {
        for step in 0..40 {
            world.communicator().host_barrier(tag("u", step))?;
        }
        world.communicator().host_barrier(tag(["a", "b"][world.rank()], 40))
    });
    let error = errors[0].as_ref().unwrap();
    for rank in 0..2 {
        assert!(error.contains(&format!("\nlast 32 collectives of rank {rank}:\n  world #")), "{error}");
    }
    assert!(error.contains("\n  world #40 host-barrier of `u` (forward, step 40, 0 B), done"), "{error}");
    assert!(!error.contains("step 7,"), "{error}");
}

/// The error of one rank's call; nothing is sent.
fn invalid(call: impl Fn(&dyn Communicator, &dyn Stream) -> Result<(), CommError> + Sync) -> String {
    let (errors, _) = fails(2, |world| {
        if world.rank() == 1 {
            call(&**world.communicator(), &*ComputeStream::new("compute"))
        } else {
            world.communicator().host_barrier(tag("u", 0))
        }
    });
    assert!(errors[0].as_ref().unwrap().starts_with("rank 0: rank 1 failed: "), "{errors:?}");
    errors[1].clone().unwrap()
}

#[test]
fn arguments_that_do_not_fit_are_errors() {
    let f32s = |n: usize| slice(vec![0f32; n]);
    let bf16s = |n: usize| slice(vec![half::bf16::ZERO; n]);
    let gather = |send, recv| {
        invalid(move |comm, stream| {
            let (send, recv) = (f32s(send), f32s(recv));
            comm.all_gather(stream, tag("u", 0), vec![Gather { send, recv }])
        })
    };
    assert_eq!(
        gather(4, 10),
        "rank 1: all-gather of unit `u` (forward, step 1, 40 B): part 0: recv has 10 elements, expected 2 ranks x 4 of \
         send"
    );
    let error = invalid(|comm, stream| {
        comm.all_gather(stream, tag("u", 0), vec![Gather { send: bf16s(4), recv: f32s(8) }])
    });
    assert!(error.ends_with("part 0: send is bf16, but recv is f32"), "{error}");
    let error = invalid(|comm, stream| {
        let recv = f32s(8);
        comm.all_gather(stream, tag("u", 0), vec![Gather { send: recv.range(0..4), recv }])
    });
    assert!(error.ends_with("send overlaps recv without being its part of rank 1, elements 4..8"), "{error}");

    let reduce = |send, recv| {
        let part = Reduce { send, recv, scale: 1.0, accumulate: Accumulate::Add };
        invalid(move |comm, stream| comm.reduce_scatter(stream, tag("u", 0), vec![part.clone()]))
    };
    assert!(reduce(f32s(8), f32s(3)).ends_with("part 0: send has 8 elements, expected 2 ranks x 3 of recv"));
    assert!(
        reduce(f32s(8), bf16s(4))
            .ends_with("part 0: a sum of f32 can be stored as f32 only, but recv is bf16")
    );
    let send = f32s(8);
    assert!(
        reduce(send.clone(), send.range(2..6)).ends_with("without being its part of rank 1, elements 4..8")
    );

    let exchange = |send, recv| {
        let part = Exchange { send, recv };
        invalid(move |comm, stream| comm.all_to_all(stream, tag("u", 0), vec![part.clone()]))
    };
    assert_eq!(
        exchange(f32s(8), f32s(6)),
        "rank 1: all-to-all of unit `u` (forward, step 1, 32 B): part 0: recv has 6 elements, expected 8, as many as \
         send"
    );
    assert!(exchange(bf16s(8), f32s(8)).ends_with("part 0: send is bf16, but recv is f32"));
    assert!(exchange(f32s(7), f32s(7)).ends_with("7 elements cannot be cut into 2 equal chunks, one a rank"));
    let whole = f32s(12);
    assert!(
        exchange(whole.range(0..8), whole.range(4..12)).ends_with("overlap, expected memory apart"),
        "it is never in place"
    );

    let error = invalid(|comm, stream| comm.broadcast(stream, tag("u", 0), f32s(7), 2));
    assert!(error.ends_with("there is no rank 2 among 2 ranks"), "{error}");
}

/// A part that writes what another one reads or writes would be a race, in one rank or between two.
#[test]
fn parts_of_one_launch_that_share_memory_are_refused() {
    let f32s = |n: usize| slice(vec![0f32; n]);
    let gather = |send, recv| Gather { send, recv };
    let reduce = |send, recv| Reduce { send, recv, scale: 1.0, accumulate: Accumulate::Add };
    let exchange = |send, recv| Exchange { send, recv };

    let whole = f32s(8);
    let parts = vec![gather(f32s(4), whole.clone()), gather(f32s(4), whole.clone())];
    let error = invalid(|comm, stream| comm.all_gather(stream, tag("u", 0), parts.clone()));
    assert!(error.ends_with("part 0 writes memory that part 1 uses too"), "{error}");
    // One reads what the other writes.
    let parts = vec![gather(whole.range(0..2), f32s(4)), gather(f32s(4), whole.clone())];
    let error = invalid(|comm, stream| comm.all_gather(stream, tag("u", 0), parts.clone()));
    assert!(error.ends_with("part 1 writes memory that part 0 uses too"), "{error}");

    let parts = vec![reduce(f32s(8), whole.range(0..4)), reduce(f32s(8), whole.range(3..7))];
    let error = invalid(|comm, stream| comm.reduce_scatter(stream, tag("u", 0), parts.clone()));
    assert!(error.ends_with("part 0 writes memory that part 1 uses too"), "{error}");

    let parts = vec![(whole.range(0..5), 1.0), (f32s(3), 1.0), (whole.range(4..8), 1.0)];
    let error = invalid(|comm, stream| comm.all_reduce(stream, tag("u", 0), parts.clone()));
    assert!(error.ends_with("part 0 writes memory that part 2 uses too"), "{error}");

    let parts = vec![exchange(f32s(4), whole.range(0..4)), exchange(whole.range(2..6), f32s(4))];
    let error = invalid(|comm, stream| comm.all_to_all(stream, tag("u", 0), parts.clone()));
    assert!(error.ends_with("part 0 writes memory that part 1 uses too"), "{error}");

    // What is only read may be shared.
    local(2, |world| {
        let (shared, stream) = (f32s(4), ComputeStream::new("compute"));
        let parts = vec![gather(shared.clone(), f32s(8)), gather(shared, f32s(8))];
        world.communicator().all_gather(&*stream, tag("u", 0), parts)
    })
    .unwrap();
}

#[test]
fn states_that_were_noted_must_agree_on_what_was_made_of_a_communicator() {
    let (errors, _) = fails(2, |world| {
        let comm = world.communicator().duplicate("model");
        let gather = comm.duplicate("gather");
        comm.note("in step 3");
        gather.host_barrier(tag("u", 0))?;
        comm.note(["in step 4", "in step 5"][world.rank()]);
        // Nothing was said of the others.
        world.communicator().host_barrier(tag("u", 0))?;
        gather.host_barrier(tag("u", 0))
    });
    all_same(
        &errors,
        "collective #2 of channel `model/gather` differs: rank 0 is in host-barrier of `u` (forward, step 1, 0 B), rank \
         1 in host-barrier of `u` (forward, step 1, 0 B): rank 0 is in step 4; rank 1 is in step 5",
    );
}

#[test]
fn ranks_that_wait_for_each_other_in_different_channels_fail_at_once() {
    let (errors, launch) = fails(3, |world| {
        let comm = world.communicator();
        let (gathers, norms) = (comm.duplicate("gather"), comm.duplicate("norm"));
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        if world.rank() == 1 {
            norms.host_reduce(tag("norm", 2), HostOp::Sum, &mut [0.0])
        } else {
            // The others meet first, so that all is to be told in one way.
            comm.split("others", &[0, 2])?.host_barrier(tag("others", 2))?;
            gather(&*gathers, &*stream, tag("", 3), 4)?;
            stream.record().synchronize()
        }
    });
    for (rank, error) in errors.iter().enumerate() {
        let error = error.as_ref().unwrap();
        let start = format!("rank {rank}: the ranks wait for each other: ");
        assert!(error.starts_with(&start), "{error}");
        for part in [
            " in all-gather of unit `(root)` (forward, step 4, 48 B) for rank",
            "rank 1 waits in host-reduce (sum) of `norm` (forward, step 3, 8 B) for ranks [0, 2]; ",
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert!(error.ends_with("; was something called on one rank only?"), "{error}");
        assert!(error.len() < 300, "{error}");
    }
    // Once.
    assert_eq!(launch.to_string().matches("norm").count(), 1, "{launch}");
}

#[test]
fn a_rank_that_has_returned_is_missed_at_once_by_one_that_waits_for_another() {
    // Rank 0 waits for rank 2, which waits elsewhere for rank 1, which has returned with a collective under way.
    let (errors, launch) = fails(3, |world| {
        let comm = world.communicator();
        let [a, b, c] = ["a", "b", "c"].map(|name| comm.duplicate(name));
        let stream = CpuStream::spawn(format!("rank{}/all-gather", world.rank()));
        match world.rank() {
            0 => a.host_barrier(tag("a", 0)),
            1 => gather(&*c, &*stream, tag("c", 0), 4),
            _ => {
                gather(&*b, &*stream, tag("b", 0), 4)?;
                stream.record().synchronize()
            }
        }
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
