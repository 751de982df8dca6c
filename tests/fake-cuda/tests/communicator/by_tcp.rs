//! The same by ranks whose communicator of the host is TCP.

use std::time::Duration;

use fake_cuda::{Schedule, Session};
use fsdp_runtime::comm::{Communicator, DeviceMesh, Gather};
use fsdp_runtime::mesh::MeshDim;
use fsdp_runtime::spec::Dtype;
use fsdp_test_fake_cuda::schedules;

use super::failures::{SOON, all_reduce, expect_memory_only};
use super::world::{Outcome, Rank, launch_by_tcp, tag};

const LATE: Duration = Duration::from_secs(60);

#[test]
fn groups_are_the_dims_of_a_mesh() {
    for schedule in schedules(2) {
        let _session = Session::new(schedule);
        let gathered = launch_by_tcp(4, LATE, |rank| {
            let mesh = DeviceMesh::new(&[("dp_outer", 2), ("dp_shard", 2)], rank.join()?)?;
            let send = rank.upload(Dtype::BF16, &[rank.rank() as f32])?;
            rank.hand_over()?;
            let gather = |group: &dyn Communicator| {
                let recv = rank.zeros(Dtype::BF16, group.size())?;
                rank.hand_over()?;
                let part = Gather { send: send.clone(), recv: recv.clone() };
                group.all_gather(&*rank.side, tag("ranks"), vec![part])?;
                rank.download(&recv)
            };
            let (row, column) = (mesh.group(&[MeshDim::DpShard])?, mesh.group(&[MeshDim::DpOuter])?);
            Ok((gather(&*row)?, gather(&*column.duplicate("again"))?, gather(&**mesh.communicator())?))
        });
        for (rank, gathered) in gathered.into_iter().enumerate() {
            let (row, column) = ((rank / 2 * 2) as f32, (rank % 2) as f32);
            let expected = (vec![row, row + 1.0], vec![column, column + 2.0], vec![0.0, 1.0, 2.0, 3.0]);
            assert_eq!(gathered.expect("it ends well"), expected);
        }
    }
}

/// Launches, and checks that ranks 0 and 2 fail with `words` in their message.
fn all_but_rank_1_fail(words: &[&str], timeout: Duration, body: impl Fn(&Rank) -> Outcome<()> + Sync) {
    let session = Session::new(Schedule::Latest);
    let ends = launch_by_tcp(3, timeout, body);
    for (rank, end) in ends.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let text = end.expect_err("a rank is lost").to_string();
        words
            .iter()
            .for_each(|word| assert!(text.contains(word), "rank {rank} does not say {word:?}: {text}"));
    }
    expect_memory_only(&session);
}

#[test]
fn a_rank_that_fails_ends_the_others_waits_for_the_device() {
    let words = ["rank 1 failed: boom", "all-reduce of unit `layers.0`"];
    all_but_rank_1_fail(&words, LATE, |rank| {
        let comm = rank.join()?;
        all_reduce(rank, &*comm, "layers.0")?;
        if rank.rank() == 1 { Err("boom".into()) } else { all_reduce(rank, &*comm, "layers.1") }
    });
}

#[test]
fn a_rank_that_is_late_is_named() {
    let words = [
        "timed out after 1s in all-reduce of unit `layers.1` (forward, step 1, 16 B), collective #3 of channel `world`",
        "called by: [0, 2], missing: [1]",
    ];
    all_but_rank_1_fail(&words, SOON, |rank| {
        let comm = rank.join()?;
        all_reduce(rank, &*comm, "layers.0")?;
        if rank.rank() == 1 {
            // Until the others' failure is known.
            while rank.device.check().is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        all_reduce(rank, &*comm, "layers.1")
    });
}

#[test]
fn ranks_that_call_different_collectives_are_told() {
    let words = ["collective #2 of channel `world` differs", "all-reduce of unit `b`"];
    all_but_rank_1_fail(&words, LATE, |rank| {
        let comm = rank.join()?;
        all_reduce(rank, &*comm, if rank.rank() == 1 { "b" } else { "a" })?;
        // The devices do the same, and may be done before anyone is told.
        Ok(comm.host_barrier(tag("after"))?)
    });
}
