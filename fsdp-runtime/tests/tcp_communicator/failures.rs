//! A rank that is lost, late or somewhere else ends as an error on every rank that names it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use fsdp_runtime::comm::local::LocalOptions;
use fsdp_runtime::comm::tcp::TcpComm;
use fsdp_runtime::comm::{CommError, Communicator};
use fsdp_runtime::launch::World;

use super::world::{LATE, Outcome, SOON, free_port, launch, place, tag};

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
        ["differs: rank 0 is in host-barrier of `a` (setup, step 0, 0 B), rank 1 in host-barrier of `b`"];
    all_but_one_fail(2, LATE, 2, &words, |world| {
        Ok(world.communicator().host_barrier(tag(["a", "b"][world.rank()]))?)
    });
    all_but_one_fail(2, LATE, 2, &["rank 0 is due 1; rank 1 is due 2"], |world| {
        world.communicator().note(&format!("due {}", world.rank() + 1));
        Ok(world.communicator().host_barrier(tag("a"))?)
    });
    let words = ["duplicate #1 of channel `world` differs: rank "];
    all_but_one_fail(2, LATE, 2, &words, |world| {
        Ok(world.communicator().duplicate(&world.rank().to_string()).host_barrier(tag("a"))?)
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
        let error = TcpComm::join(&place(rank, size, port), options()).err().expect("an error").to_string();
        assert!(error.contains(words), "{error}");
    }
    let second = TcpComm::join(&place(1, 2, port), options()).expect("it belongs");
    // Nobody listens for one who comes again.
    let again = TcpComm::join(&place(1, 2, port), options()).err().expect("an error");
    assert!(matches!(again, CommError::TimedOut { .. } | CommError::RankFailed { .. }), "{again}");
    thread::scope(|scope| {
        scope.spawn(|| drop(second));
    });
    drop(first);
}

#[test]
fn a_rank_0_that_is_not_there_is_named() {
    let port = free_port();
    let options = LocalOptions { timeout: SOON, ..LocalOptions::default() };
    let error = TcpComm::join(&place(1, 2, port), options).err().expect("an error").to_string();
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
    let hello = br#"{"Hello":{"version":2,"rank":1,"size":2}}"#;
    let mut frame = b"FSDP".to_vec();
    frame.extend((hello.len() as u64).to_le_bytes());
    frame.extend(0u64.to_le_bytes());
    frame.extend(hello);
    let mut rank = connect();
    rank.write_all(&frame).expect("it is taken");
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
        if world.rank() == 1 {
            return Ok(());
        }
        world.communicator().host_gather_patiently(tag("slow"), Vec::new())?;
        Ok(())
    });
}
