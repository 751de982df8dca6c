//! A rank that is lost, late or somewhere else ends as an error on every rank that names it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use fsdp_comm::comm::local::LocalOptions;
use fsdp_comm::comm::tcp::{Place, TcpComm};
use fsdp_comm::comm::{CommError, Communicator};
use fsdp_comm::launch::World;

use super::world::{LATE, Outcome, SOON, free_port, hello, launch, place, tag};

/// Launches, and checks that all ranks but `lost` fail soon with all of `words` in their message.
fn all_but_one_fail(
    size: usize,
    timeout: Duration,
    lost: usize,
    words: &[&str],
    body: impl Fn(&World) -> Outcome<()> + Sync,
) {
    let start = Instant::now();
    for (rank, end) in launch(size, timeout, body).into_iter().enumerate().filter(|(rank, _)| *rank != lost) {
        let text = end.expect_err("a rank is lost").to_string();
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "rank {rank} does not say {word:?}: {text}"));
    }
    assert!(start.elapsed() < Duration::from_secs(15), "took {:?}", start.elapsed());
}

#[test]
fn a_rank_that_fails_or_panics_or_returns_is_named() {
    let cases = [(0, "rank 1 failed: boom"), (1, "rank 1 panicked: boom"), (2, "rank 1 returned early")];
    for (how, words) in cases {
        all_but_one_fail(3, LATE, 1, &[words, "host-barrier of `a`"], |world| {
            world.communicator().host_barrier(tag("a"))?;
            match (world.rank(), how) {
                (1, 0) => Err("boom".into()),
                (1, 1) => panic!("boom"),
                (1, _) => Ok(()),
                _ => Ok(world.communicator().duplicate("b").host_barrier(tag("b"))?),
            }
        });
    }
}

#[test]
fn a_rank_that_is_late_is_named() {
    let words = ["timed out after 1s in host-barrier of `b`", "arrived: [0, 2], missing: [1]"];
    all_but_one_fail(3, SOON, 3, &words, |world| {
        let comm = world.communicator();
        comm.host_barrier(tag("a"))?;
        if world.rank() == 1 {
            thread::sleep(SOON + SOON / 2);
        }
        Ok(comm.host_barrier(tag("b"))?)
    });
}

#[test]
fn ranks_that_call_different_collectives_are_told() {
    let words =
        ["differs: rank 0 is in host-barrier of `a` (setup, step 1, 0 B), rank 1 in host-barrier of `b`"];
    all_but_one_fail(2, LATE, 2, &words, |world| {
        Ok(world.communicator().host_barrier(tag(["a", "b"][world.rank()]))?)
    });
    all_but_one_fail(2, LATE, 2, &["rank 0 is due 1; rank 1 is due 2"], |world| {
        world.communicator().note(&format!("due {}", world.rank() + 1));
        Ok(world.communicator().host_barrier(tag("a"))?)
    });
    let words = ["duplicate #2 of channel `world` differs: rank "];
    all_but_one_fail(2, LATE, 2, &words, |world| {
        Ok(world.communicator().duplicate(&world.rank().to_string()).host_barrier(tag("a"))?)
    });
}

#[test]
fn ranks_that_wait_for_each_other_are_told_at_once() {
    let words = [
        "the ranks wait for each other: ",
        "rank 1 waits in host-barrier of `b` (setup, step 1, 0 B) for ranks [0, 2]",
        " in host-gather of `a` (setup, step 1, 0 B) for rank",
        "was something called on one rank only?",
    ];
    all_but_one_fail(3, LATE, 3, &words, |world| {
        let comm = world.communicator();
        // Two ranks are a knot already: the third must be there to be told.
        comm.host_barrier(tag("all are there"))?;
        let (a, b) = (comm.duplicate("a"), comm.duplicate("b"));
        match world.rank() {
            1 => Ok(b.host_barrier(tag("b"))?),
            _ => Ok(a.host_gather(tag("a"), Vec::new()).map(drop)?),
        }
    });
}

#[test]
fn ranks_that_do_not_belong_are_refused() {
    let port = free_port();
    let options = || LocalOptions { timeout: SOON, ..LocalOptions::default() };
    let first = TcpComm::join(&place(0, 2, port), options()).expect("rank 0 listens");
    let cases = [
        (0, 3, "cannot listen on port"),
        (2, 3, "it is one of 3 ranks, rank 0 of 2"),
        (2, 2, "has no rank 2"),
    ];
    for (rank, size, words) in cases {
        let error = TcpComm::join(&place(rank, size, port), options()).expect_err("an error").to_string();
        assert!(error.contains(words), "{error}");
    }
    let second = TcpComm::join(&place(1, 2, port), options()).expect("it belongs");
    // Whoever comes again learns it, and does no harm.
    for rank in [1, 1, 0] {
        let again = TcpComm::join(&place(1, 2, port), options()).expect_err("an error");
        assert!(matches!(again, CommError::RankFailed { failed: 0, .. }), "{rank}: {again}");
        let again = again.to_string();
        assert!(
            again.starts_with("rank 1: rank 0 refuses rank 1: rank 1 has joined already, from 127.0.0.1:"),
            "{again}"
        );
        assert!(again.ends_with("; are two processes started as rank 1?"), "{again}");
    }
    thread::scope(|scope| {
        let second = scope.spawn(move || second.host_gather(tag("rank"), vec![1]).map(drop));
        assert_eq!(first.host_gather(tag("rank"), vec![0]), Ok(vec![vec![0], vec![1]]));
        second.join().expect("it does not panic").expect("the run goes on");
        // It has left.
        let again = TcpComm::join(&place(1, 2, port), options()).expect_err("an error").to_string();
        assert!(again.contains("rank 1 has joined already"), "{again}");
    });
    drop(first);
}

#[test]
fn ranks_on_several_machines_need_a_secret() {
    let place = Place { address: ("192.0.2.1".to_owned(), 29500), ..place(1, 2, 0) };
    let error = TcpComm::join(&place, LocalOptions::default()).expect_err("an error").to_string();
    assert!(error.starts_with("rank 1: FSDP_TOKEN is not set: "), "{error}");
}

#[test]
fn a_rank_0_that_is_not_there_is_named() {
    let port = free_port();
    let options = LocalOptions { timeout: SOON, ..LocalOptions::default() };
    let error = TcpComm::join(&place(1, 2, port), options).expect_err("an error").to_string();
    assert!(error.contains(&format!("rank 0 was not reached at 127.0.0.1:{port} in 1s")), "{error}");
}

/// Who is no rank is shown the door; a rank that sends what is no message has failed.
#[test]
fn garbage_does_no_harm() {
    let (port, message) = (free_port(), b"GET / HTTP/1.1\r\nHost: rank0.example\r\n\r\n");
    let options = LocalOptions { timeout: LATE, ..LocalOptions::default() };
    let comm = TcpComm::join(&place(0, 2, port), options).expect("rank 0 listens");
    let connect = || TcpStream::connect(("127.0.0.1", port)).expect("it is heard");
    let mut stranger = connect();
    stranger.write_all(message).expect("it is taken");
    assert_eq!(stranger.read_to_end(&mut Vec::new()).unwrap_or(0), 0);
    // As a rank's first message, and something else after it.
    let mut rank = connect();
    assert!(hello(&mut rank, "", 1, 2), "it is one of this machine");
    let mut welcome = [0; 20];
    rank.read_exact(&mut welcome).expect("it is welcome");
    rank.write_all(message).expect("it is taken");
    let error = comm.host_barrier(tag("a")).expect_err("rank 1 has failed").to_string();
    assert!(error.contains("rank 1 lost its connection to rank 0: not a message of a rank"), "{error}");
}

/// Where ranks are waited for without a time-out, one that is lost still ends it.
#[test]
fn patience_is_for_the_living() {
    let ends = launch(2, SOON, |world| {
        if world.rank() == 1 {
            std::thread::sleep(2 * SOON);
        }
        Ok(world.communicator().host_gather_patiently(tag("slow"), vec![world.rank() as u8])?)
    });
    for end in ends {
        assert_eq!(end.expect("nobody is lost"), [[0], [1]]);
    }
    all_but_one_fail(3, SOON, 1, &["rank 1 returned early", "host-gather of `slow`"], |world| {
        // All are here before one of them goes.
        world.communicator().host_barrier(tag("start"))?;
        if world.rank() == 1 {
            return Ok(());
        }
        world.communicator().host_gather_patiently(tag("slow"), Vec::new())?;
        Ok(())
    });
}
