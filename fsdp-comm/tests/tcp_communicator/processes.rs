//! Ranks that are processes: this test's own program, started once a rank.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use fsdp_comm::comm::Communicator;
use fsdp_comm::launch::distributed;

use super::world::{Outcome, free_port, tag};

/// What a rank does, if this process is one: the variable says which test started it.
pub fn rank(test: &str, main: impl Fn(&dyn Communicator) -> Outcome<()> + Sync) -> bool {
    if std::env::var("TCP_TEST").is_ok_and(|started| started == test) {
        match distributed(|world| main(&**world.communicator())) {
            Ok(()) => println!("rank ended well"),
            Err(error) => println!("rank ended so: {error}"),
        }
        return true;
    }
    false
}

/// Starts this test's program as each of `size` ranks, one of which may be told to die.
fn start(test: &str, size: usize, dying: Option<usize>) -> Vec<Child> {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = command(&format!("processes::{test}"), test, rank, size, port);
        if dying == Some(rank) {
            command.env("DYING", "1");
        }
        command.spawn().expect("it starts")
    };
    (0..size).map(start).collect()
}

/// This test's program as a rank of the test at `path`.
pub fn command(path: &str, test: &str, rank: usize, size: usize, port: u16) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the program has a path"));
    command.args(["--exact", path, "--nocapture"]);
    command.env("TCP_TEST", test).env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
    command.env("WORLD_SIZE", size.to_string()).env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", port.to_string()).env("FSDP_TIMEOUT_SECS", "60").env_remove("FSDP_PORT");
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

pub fn text(output: Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn processes_are_joined() {
    let main = |comm: &dyn Communicator| {
        let gathered = comm.host_gather(tag("rank"), vec![comm.rank() as u8])?;
        assert_eq!(gathered, [[0], [1], [2]]);
        Ok(())
    };
    if rank("processes_are_joined", main) {
        return;
    }
    for child in start("processes_are_joined", 3, None) {
        let said = text(child.wait_with_output().expect("it ends"));
        assert!(said.contains("rank ended well"), "{said}");
    }
}

/// Whoever comes when the others have failed learns why, and does not look for rank 0 until the time-out.
#[test]
fn a_process_that_comes_after_rank_0_has_failed_is_told_at_once() {
    let test = "a_process_that_comes_after_rank_0_has_failed_is_told_at_once";
    if std::env::var("TCP_TEST").is_ok_and(|started| started == test) {
        let ended = distributed(|world| -> Outcome<()> {
            if world.rank() == 0 {
                println!("it fails");
                return Err("what it did is refused".into());
            }
            // Should it come before rank 0 has said how it failed.
            Ok(world.communicator().host_barrier(tag("start"))?)
        });
        println!("{}", ended.unwrap_err());
        return;
    }
    let port = free_port();
    let start = |rank: usize| command(&format!("processes::{test}"), test, rank, 2, port).spawn();
    let mut first = start(0).expect("it starts");
    let mut said = BufReader::new(first.stdout.take().expect("it is piped")).lines();
    assert!(said.any(|line| line.expect("it is text").contains("it fails")));
    let second = text(start(1).expect("it starts").wait_with_output().expect("it ends"));
    assert!(second.contains("rank 0 failed: what it did is refused"), "{second}");
    assert!(said.any(|line| line.expect("it is text").contains("what it did is refused")));
    first.wait().expect("it ends");
}

#[test]
fn a_process_that_dies_is_named() {
    let test = "a_process_that_dies_is_named";
    let main = |comm: &dyn Communicator| {
        comm.host_barrier(tag("a"))?;
        if std::env::var("DYING").is_ok() {
            std::process::abort();
        }
        Ok(comm.host_barrier(tag("b"))?)
    };
    if rank(test, main) {
        return;
    }
    for (dying, words) in
        [(0, "the connection to rank 0 was lost"), (1, "rank 1 lost its connection to rank 0")]
    {
        for (rank, child) in start(test, 3, Some(dying)).into_iter().enumerate() {
            let said = text(child.wait_with_output().expect("it ends"));
            assert!(rank == dying || said.contains(words), "rank {rank}: {said}");
        }
    }
}
