//! Duplicates and groups.

use std::sync::Arc;

use fake_cuda::{Schedule, Session};
use fsdp_runtime::comm::{Communicator, DeviceMesh, Gather, HostOp};
use fsdp_runtime::device::Stream;
use fsdp_runtime::device::cuda::Priority;
use fsdp_runtime::mesh::MeshDim;
use fsdp_runtime::spec::Dtype;
use fsdp_test_fake_cuda::schedules;

use super::world::{Outcome, Rank, run, tag, values};

fn sum_of_ranks(rank: &Rank, comm: &dyn Communicator) -> Outcome<f32> {
    let data = rank.upload(Dtype::F32, &[rank.rank() as f32])?;
    rank.hand_over()?;
    comm.all_reduce(&*rank.side, tag("rank"), vec![(data.clone(), 1.0)])?;
    Ok(rank.download(&data)?[0])
}

/// The rows and columns of a mesh of 2 x 3.
#[test]
fn groups_are_the_dims_of_a_mesh() {
    for schedule in schedules(5) {
        let _session = Session::new(schedule);
        let sums = run(6, |rank| {
            let mesh = DeviceMesh::new(&[("dp_outer", 2), ("dp_shard", 3)], rank.join()?)?;
            let (row, column) = (mesh.group(&[MeshDim::DpShard])?, mesh.group(&[MeshDim::DpOuter])?);
            let alone = mesh.group(&[MeshDim::Tp])?;
            assert_eq!((row.rank(), row.size()), (rank.rank() % 3, 3));
            assert_eq!((column.rank(), column.size()), (rank.rank() / 3, 2));
            let groups = [&row, &column, &alone, mesh.communicator()];
            groups.map(|group| sum_of_ranks(rank, &**group)).into_iter().collect::<Outcome<Vec<_>>>()
        });
        for (rank, sums) in sums.iter().enumerate() {
            let (row, column) = (rank / 3, rank % 3);
            assert_eq!(*sums, [[3.0, 12.0][row], (2 * column + 3) as f32, rank as f32, 15.0]);
        }
    }
}

#[test]
fn a_group_has_its_own_order_of_ranks() {
    let _session = Session::new(Schedule::Latest);
    let gathered = run(4, |rank| {
        let comm = rank.join()?;
        let ranks: &[usize] = if rank.rank() == 2 { &[2] } else { &[3, 0, 1] };
        let group = comm.split("some", ranks)?;
        let send = rank.upload(Dtype::F32, &[rank.rank() as f32])?;
        let recv = rank.zeros(Dtype::F32, group.size())?;
        rank.hand_over()?;
        group.all_gather(&*rank.side, tag("ranks"), vec![Gather { send, recv: recv.clone() }])?;
        assert_eq!(group.host_gather(tag("ranks"), vec![rank.rank() as u8])?.concat(), ranks_of(ranks));
        rank.download(&recv)
    });
    assert_eq!(gathered, [vec![3.0, 0.0, 1.0], vec![3.0, 0.0, 1.0], vec![2.0], vec![3.0, 0.0, 1.0]]);
}

fn ranks_of(ranks: &[usize]) -> Vec<u8> {
    ranks.iter().map(|rank| *rank as u8).collect()
}

/// Two duplicates on two streams whose device is as late as can be.
#[test]
fn duplicates_run_beside_each_other() {
    for schedule in schedules(10) {
        let _session = Session::new(schedule);
        let sums = run(3, |rank| {
            let comm = rank.join()?;
            let lanes: Vec<(Arc<dyn Communicator>, _)> = vec![
                (comm.duplicate("gather"), rank.side.clone()),
                (comm.duplicate("reduce"), rank.device.stream("second", Priority::High)?),
            ];
            let data = (0..2).map(|i| rank.upload(Dtype::F32, &values(rank.rank() + i, 8)));
            let data = data.collect::<Outcome<Vec<_>>>()?;
            for (_, stream) in &lanes {
                stream.wait(&rank.compute.record())?;
            }
            for step in 0..6 {
                for (lane, data) in lanes.iter().zip(&data) {
                    lane.0.all_reduce(&*lane.1, tag(&format!("{step}")), vec![(data.clone(), 1.0 / 3.0)])?;
                }
            }
            rank.compute.wait(&lanes[1].1.record())?;
            data.iter().map(|data| rank.download(data)).collect::<Outcome<Vec<_>>>()
        });
        assert!(sums.iter().all(|ours| *ours == sums[0]));
    }
}

#[test]
fn the_host_has_its_part() {
    let _session = Session::new(Schedule::Latest);
    run(3, |rank| {
        let comm = rank.join()?;
        let mut values = [rank.rank() as f64, 1.0];
        comm.host_reduce(tag("sum"), HostOp::Sum, &mut values)?;
        assert_eq!(values, [3.0, 3.0]);
        assert_eq!(comm.host_gather(tag("all"), vec![7; rank.rank()])?, [vec![], vec![7], vec![7, 7]]);
        // Between collectives of the device, and without waiting for it.
        assert_eq!(sum_of_ranks(rank, &*comm)?, 3.0);
        comm.host_barrier(tag("end"))?;
        Ok(())
    });
}

#[test]
fn a_group_that_cannot_be_is_refused() {
    let _session = Session::new(Schedule::Latest);
    run(2, |rank| {
        let comm = rank.join()?;
        let error = comm.split("half", &[1 - rank.rank()]).err().ok_or("an error")?;
        let expected = format!(
            "rank {0}: `half` cannot be a group of the ranks [{1}]: it lacks rank {0}, which asks for it",
            rank.rank(),
            1 - rank.rank()
        );
        assert_eq!(error.to_string(), expected);
        Ok(())
    });
}

/// A communicator may go before the device has come to what was enqueued on it.
#[test]
fn communicators_end_after_their_collectives() {
    for schedule in schedules(10) {
        let _session = Session::new(schedule);
        let sums = run(4, |rank| {
            let data = rank.upload(Dtype::F32, &[rank.rank() as f32])?;
            rank.hand_over()?;
            let comm = rank.join()?;
            let duplicate = comm.duplicate("short-lived");
            duplicate.all_reduce(&*rank.side, tag("first"), vec![(data.clone(), 1.0)])?;
            drop(duplicate);
            comm.all_reduce(&*rank.side, tag("second"), vec![(data.clone(), 1.0)])?;
            drop(comm);
            rank.download(&data)
        });
        assert_eq!(sums, [[24.0], [24.0], [24.0], [24.0]]);
    }
}
