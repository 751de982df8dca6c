//! Communicators of some of the ranks, and what they keep.

use std::sync::Arc;

use fsdp_comm::comm::{CommError, HostOp};
use fsdp_comm::device::cpu::{ComputeStream, CpuStream};
use fsdp_comm::device::{Slice, Stream};
use fsdp_comm::launch::{Launcher, local};
use fsdp_comm::mesh::MeshDim;

use crate::{slice, values};

fn tag(name: &str) -> fsdp_comm::comm::Tag {
    crate::tag(name, 0)
}

#[test]
fn rows_and_columns_of_a_mesh_work_side_by_side() {
    local(6, |world| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mesh = world.mesh(&[("dp_outer", 2), ("dp_shard", 3)])?;
        let (row, column) = (mesh.group(&[MeshDim::DpShard])?, mesh.group(&[MeshDim::DpOuter])?);
        assert_eq!((row.rank(), row.size()), (world.rank() % 3, 3));
        assert_eq!((column.rank(), column.size()), (world.rank() / 3, 2));
        let stream = ComputeStream::new("compute");
        for _ in 0..10 {
            let data = slice([world.rank() as f32; 7]);
            row.all_reduce(&*stream, tag("row"), vec![(data.clone(), 1.0)])?;
            assert_eq!(values::<f32>(&data), [[3.0; 7], [12.0; 7]][world.rank() / 3]);
            column.all_reduce(&*stream, tag("column"), vec![(data.clone(), 0.5)])?;
            assert_eq!(values::<f32>(&data), [7.5; 7]);
            let mut rank = [world.rank() as f64];
            column.host_reduce(tag("ranks"), HostOp::Max, &mut rank)?;
            assert_eq!(rank, [(world.rank() % 3 + 3) as f64]);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn groups_are_made_once_and_flattened_in_the_order_of_the_mesh() {
    local(8, |world| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mesh = world.mesh(&[("dp_shard", 2), ("cp", 2), ("tp", 2), ("ep", 1)])?;
        let flat = mesh.group(&[MeshDim::Cp, MeshDim::DpShard])?;
        let again = mesh.clone().group(&[MeshDim::DpShard, MeshDim::Ep, MeshDim::Cp])?;
        assert!(std::ptr::eq(&raw const *flat as *const u8, &raw const *again as *const u8));
        assert_eq!((flat.rank(), flat.size()), (world.rank() / 2, 4));
        let members = flat.host_gather(tag("members"), vec![world.rank() as u8])?;
        assert_eq!(members.concat(), if world.rank() % 2 == 0 { [0, 2, 4, 6] } else { [1, 3, 5, 7] });
        assert_eq!(mesh.group(&[MeshDim::Ep])?.size(), 1);
        assert_eq!(mesh.group(&MeshDim::ALL)?.size(), 8);
        let sub = mesh.sub_mesh(&["tp", "cp"])?;
        assert_eq!(format!("{:?}", sub), format!("DeviceMesh(cp=2 x tp=2, rank {} of 4)", world.rank() % 4));
        assert_eq!(sub.group(&[MeshDim::Tp])?.size(), 2);
        assert_eq!(
            mesh.sub_mesh(&["dp_outer"]).unwrap_err().to_string().split(':').next(),
            Some("the mesh has no dim")
        );
        assert!(mesh.sub_mesh(&["pp"]).unwrap_err().to_string().contains("unknown mesh dim `pp`"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn impossible_groups_are_refused_at_once() {
    local(2, |world| {
        let error = |ranks: &[usize]| world.communicator().split("odd", ranks).err().unwrap().to_string();
        let rank = world.rank();
        let message = |ranks: &str, wrong: &str| {
            format!("rank {rank}: `odd` cannot be a group of the ranks {ranks}: {wrong}")
        };
        let other = 1 - rank;
        assert_eq!(
            error(&[other]),
            message(&format!("[{other}]"), &format!("it lacks rank {rank}, which asks for it"))
        );
        assert_eq!(error(&[0, 1, 2]), message("[0, 1, 2]", "there is no rank 2 among 2 ranks"));
        assert_eq!(error(&[0, 1, 1]), message("[0, 1, 1]", "it names rank 1 twice"));
        Ok::<_, CommError>(())
    })
    .unwrap();
}

#[test]
fn groups_that_overlap_fail_every_rank() {
    let error = Launcher::new()
        .ranks(3)
        .run(|world| -> Result<(), CommError> {
            let ranks: &[usize] = if world.rank() == 0 { &[0, 1] } else { &[0, 1, 2] };
            let group = world.communicator().split("pair", ranks)?;
            group.host_barrier(tag("barrier"))
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("duplicate #1 of channel `world` differs: `pair` is both of ranks ["), "{error}");
    let (first, others) = error.split_once("\nthe same on ranks ").unwrap();
    let mut ranks: Vec<&str> = others.split(", ").chain(first.split(' ').nth(1)).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, ["0", "1", "2"], "{error}");
}

#[test]
fn a_failure_in_one_group_names_world_ranks_and_reaches_the_others() {
    let error = Launcher::new()
        .ranks(4)
        .run(|world| -> Result<(), CommError> {
            let ranks = if world.rank() < 2 { [0, 1] } else { [2, 3] };
            let group = world.communicator().split("half", &ranks)?;
            group.host_barrier(tag("together"))?;
            match world.rank() {
                // Returns while 2 waits for it.
                3 => Ok(()),
                _ => (0..1000).try_for_each(|_| group.host_barrier(tag("again"))),
            }
        })
        .unwrap_err()
        .to_string();
    assert!(error.contains("rank 3 returned early"), "{error}");
    assert!(error.contains("rank 2 waits for it in host-barrier of `again`"), "{error}");

    let error = Launcher::new()
        .ranks(4)
        .run(|world| -> Result<(), CommError> {
            let ranks = if world.rank() < 2 { [0, 1] } else { [2, 3] };
            let group = world.communicator().split("half", &ranks)?;
            let name = if world.rank() == 3 { "b" } else { "a" };
            group.host_barrier(tag(name))?;
            world.communicator().host_barrier(tag("all"))
        })
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(
            "collective #1 of channel `half` of ranks [2, 3] differs: rank 2 is in host-barrier of `a` (forward, \
             step 1, 0 B), rank 3 in host-barrier of `b`"
        ),
        "{error}"
    );
}

#[test]
fn nothing_is_kept_alive_by_a_collective_that_is_done() {
    let freed = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    local(3, |world| {
        let stream = CpuStream::spawn(format!("rank{}/side", world.rank()));
        let counted = || {
            let freed = freed.clone();
            let on_free = move |bytes| {
                freed.fetch_add(bytes, std::sync::atomic::Ordering::SeqCst);
            };
            // SAFETY: one all-reduce uses it.
            unsafe { Slice::zeros(fsdp_comm::spec::Dtype::F32, 3, Some(Box::new(on_free))) }
        };
        for round in 0..20 {
            let data = counted();
            world.communicator().all_reduce(&*stream, crate::tag("u", round), vec![(data.clone(), 1.0)])?;
            stream.record().synchronize()?;
            drop(data);
            world.communicator().host_barrier(crate::tag("u", round))?;
            assert_eq!(freed.load(std::sync::atomic::Ordering::SeqCst), 36 * (round as usize + 1));
            world.communicator().host_barrier(crate::tag("u", round))?;
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}
