//! The host's collectives and groups are those of ranks that are threads.

use std::sync::Arc;

use fsdp_comm::comm::local::LocalOptions;
use fsdp_comm::comm::tcp::TcpComm;
use fsdp_comm::comm::{Communicator, DeviceMesh, Exchange, HostOp};
use fsdp_comm::device::Slice;
use fsdp_comm::device::cpu::ComputeStream;
use fsdp_comm::mesh::MeshDim;
use fsdp_comm::spec::Dtype;

use super::world::{LATE, free_port, place, run, tag};

#[test]
fn values_are_reduced_in_rank_order() {
    for size in [1, 2, 3, 8] {
        let reduced = run(size, |world| {
            let comm = world.communicator();
            comm.host_barrier(tag("start"))?;
            let own = 0.1 * (world.rank() + 1) as f64;
            let mut all = [[own], [own], [own]];
            for (values, op) in all.iter_mut().zip([HostOp::Sum, HostOp::Max, HostOp::Min]) {
                comm.host_reduce(tag("values"), op, values)?;
            }
            comm.host_reduce(tag("none"), HostOp::Sum, &mut [])?;
            Ok(all.concat())
        });
        let sum = (1..=size).map(|i| 0.1 * i as f64).fold(0.0, |sum, x| sum + x);
        reduced.iter().for_each(|all| assert_eq!(*all, [sum, 0.1 * size as f64, 0.1]));
    }
}

#[test]
fn bytes_are_gathered_by_rank() {
    let gathered = run(3, |world| {
        let comm = world.communicator();
        let short = comm.host_gather(tag("short"), vec![world.rank() as u8; world.rank()])?;
        let long = comm.host_gather(tag("long"), vec![7; 3 << 20])?;
        assert_eq!(comm.host_gather(tag("empty"), Vec::new())?, vec![Vec::<u8>::new(); 3]);
        Ok((short, long.concat().len()))
    });
    gathered.iter().for_each(|all| assert_eq!(*all, (vec![vec![], vec![1], vec![2, 2]], 9 << 20)));
}

#[test]
fn groups_are_the_dims_of_a_mesh() {
    let ranks = run(6, |world| {
        let mesh = DeviceMesh::new(&[("dp_outer", 2), ("dp_shard", 3)], world.communicator().clone())?;
        let (row, column) =
            (mesh.group(&[MeshDim::DpShard])?, mesh.group(&[MeshDim::DpOuter])?.duplicate("again"));
        let ranks = |group: &dyn Communicator| group.host_gather(tag("rank"), vec![world.rank() as u8]);
        assert_eq!((row.rank(), column.rank()), (world.rank() % 3, world.rank() / 3));
        Ok((ranks(&*row)?.concat(), ranks(&*column)?.concat()))
    });
    for (rank, (row, column)) in ranks.into_iter().enumerate() {
        let (first, second) = (rank as u8 / 3 * 3, rank as u8 % 3);
        assert_eq!(row, [first, first + 1, first + 2]);
        assert_eq!(column, [second, second + 3]);
    }
}

/// Each rank's threads use communicators of their own at the same time.
#[test]
fn communicators_do_not_wait_for_each_other() {
    run(3, |world| {
        let comms: Vec<_> = (0..4).map(|i| world.communicator().duplicate(&format!("lane {i}"))).collect();
        std::thread::scope(|scope| {
            let lane = |comm: Arc<dyn Communicator>| {
                scope.spawn(move || (0..50u8).try_for_each(|i| comm.host_gather(tag("i"), vec![i]).map(drop)))
            };
            let lanes: Vec<_> = comms.into_iter().map(lane).collect();
            lanes.into_iter().try_for_each(|lane| lane.join().expect("it does not panic"))
        })?;
        Ok(())
    });
}

#[test]
fn calls_and_bytes_are_counted() {
    let counters = run(2, |world| {
        world.communicator().host_reduce(tag("a"), HostOp::Sum, &mut [1.0, 2.0])?;
        world.communicator().duplicate("b").host_gather(tag("b"), vec![0; 5])?;
        Ok(world.communicator().counters())
    });
    for counters in counters {
        let of = |name| {
            counters.iter().find(|(known, _)| *known == name).map(|(_, c)| (c.calls, c.bytes_from_peers))
        };
        assert_eq!((of("host-reduce"), of("host-gather")), (Some((1, 16)), Some((1, 5))));
    }
}

#[test]
fn without_memory_to_share_streams_have_no_collectives() {
    let options = LocalOptions { timeout: LATE, ..LocalOptions::default() };
    let comm = TcpComm::join(&place(0, 1, free_port()), options).expect("it joins itself");
    let stream = ComputeStream::new("compute");
    // SAFETY: nothing uses it: the collectives are refused.
    let data = unsafe { Slice::zeros(Dtype::F32, 4, None) };
    let exchange = Exchange { send: data.clone(), recv: data.clone() };
    for refused in
        [comm.broadcast(&*stream, tag("a"), data, 0), comm.all_to_all(&*stream, tag("a"), vec![exchange])]
    {
        let error = refused.expect_err("it is refused");
        assert!(error.to_string().ends_with("make a `NcclComm` on this"), "{error}");
    }
    assert!(comm.moves_no_data().is_some());
}
