//! Who does not know the run's secret, or says nothing, gets nothing and holds up nobody.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout};
use std::time::Duration;

use fsdp_comm::comm::local::LocalOptions;
use fsdp_comm::comm::tcp::TcpComm;
use fsdp_comm::comm::{Communicator, HostOp};

use super::processes::{command, rank, text};
use super::world::{LATE, free_port, hello, place, tag};

fn start(test: &str, rank: usize, size: usize, port: u16, token: &str) -> Child {
    let mut command = command(&format!("strangers::{test}"), test, rank, size, port);
    command.env("FSDP_TOKEN", token).spawn().expect("it starts")
}

/// Connects to a rank 0 that is about to listen.
fn connect(port: u16) -> TcpStream {
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// What a closed connection still says.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.set_read_timeout(Some(LATE)).expect("a time-out is set");
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("it is not closed: {error}"),
    }
}

#[test]
fn a_seat_is_for_who_knows_the_secret() {
    let test = "a_seat_is_for_who_knows_the_secret";
    let main = |comm: &dyn Communicator| {
        let mut value = [1.0 + comm.rank() as f64];
        comm.host_reduce(tag("sum"), HostOp::Sum, &mut value)?;
        assert_eq!(value, [3.0]);
        Ok(())
    };
    if rank(test, main) {
        return;
    }
    let port = free_port();
    let first = start(test, 0, 2, port, "the right one");
    for secret in ["", "token the wrong one", "the right one"] {
        let mut stranger = connect(port);
        assert!(!hello(&mut stranger, secret, 1, 2), "rank 0 shows what it does not know");
        assert!(rest(stranger).is_empty(), "it is not answered");
    }
    // Another version is told which one this is, and no more.
    let mut stranger = connect(port);
    stranger.write_all(b"FSDP\x02\0\0\0................").expect("it is taken");
    let said = rest(stranger);
    assert_eq!(&said[..8], b"FSDP\x04\0\0\0");
    // Another token ends on its own side, in words.
    let wrong = text(start(test, 1, 2, port, "the wrong one").wait_with_output().expect("it ends"));
    assert!(
        wrong.contains("it does not know the secret of this rank: give all ranks the same FSDP_TOKEN"),
        "{wrong}"
    );
    let second = start(test, 1, 2, port, "the right one");
    for child in [first, second] {
        let said = text(child.wait_with_output().expect("it ends"));
        assert!(said.contains("rank ended well"), "{said}");
    }
}

#[test]
fn rank_0_listens_where_it_was_asked_to() {
    let port = free_port();
    let options = LocalOptions { timeout: LATE, ..LocalOptions::default() };
    let comm = TcpComm::join(&place(0, 1, port), options).expect("rank 0 listens");
    drop(TcpStream::connect(("127.0.0.1", port)).expect("it is heard"));
    let elsewhere = TcpStream::connect(("127.0.0.2", port)).expect_err("it is not heard");
    assert_eq!(elsewhere.kind(), ErrorKind::ConnectionRefused);
    drop(comm);
}

#[test]
fn a_connection_that_drips_is_closed() {
    let port = free_port();
    let options = LocalOptions { timeout: LATE, ..LocalOptions::default() };
    let comm = TcpComm::join(&place(0, 2, port), options).expect("rank 0 listens");
    let mut stranger = connect(port);
    // The wait between two bytes, in which it would be heard that it is over. Of 24 bytes that are looked at, some ten come
    // in time.
    stranger.set_read_timeout(Some(Duration::from_millis(500))).expect("a time-out is set");
    let mut sent = 0;
    loop {
        if stranger.write_all(b"F").is_err() {
            break;
        }
        sent += 1;
        match stranger.read(&mut [0; 64]) {
            Ok(0) => break,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => break,
            Ok(_) => panic!("it is answered"),
        }
        assert!(sent <= 24, "it is not closed");
    }
    // With the last byte it would have been looked at, and closed for what it says.
    assert!(sent < 24, "it was closed after {sent} bytes, not in time");
    drop(TcpComm::join(&place(1, 2, port), LocalOptions::default()).expect("there is room"));
    drop(comm);
}

/// Threads of this process by the start of their names.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the system lists threads");
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|known| known.starts_with(name)).count()
}

#[test]
fn many_silent_connections_are_few_threads_and_none_in_the_end() {
    let test = "many_silent_connections_are_few_threads_and_none_in_the_end";
    let port = || std::env::var("MASTER_PORT").expect("it is set").parse().expect("it is a port");
    let main = |comm: &dyn Communicator| {
        let mut silent: Vec<TcpStream> = Vec::new();
        let mut most = 0;
        for _ in 0..120 {
            silent.push(connect(port()));
            most = most.max(threads("fsdp-rank"));
            comm.host_barrier(tag("a"))?;
        }
        // This rank's own, and 64 that are waited for.
        println!("at most 65: {}", most <= 65);
        Ok(())
    };
    if rank(test, main) {
        println!("threads left: {}", threads("fsdp-"));
        return;
    }
    let said: ChildStdout = {
        let mut child = start(test, 0, 1, free_port(), "a");
        let said = child.stdout.take().expect("it is piped");
        child.wait().expect("it ends");
        said
    };
    let said = std::io::read_to_string(said).expect("it is text");
    for words in ["at most 65: true", "rank ended well", "threads left: 0"] {
        assert!(said.contains(words), "{words}: {said}");
    }
}
