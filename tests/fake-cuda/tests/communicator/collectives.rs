//! Each collective gives what plain sums and copies give, however late the device is.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use fake_cuda::{Schedule, Session};
use fsdp_runtime::comm::nccl::Sums;
use fsdp_runtime::comm::{Accumulate, Communicator, Exchange, Gather, Reduce};
use fsdp_runtime::device::cuda::Priority;
use fsdp_runtime::device::{Slice, Stream};
use fsdp_runtime::memory::{Account, Category};
use fsdp_runtime::spec::Dtype;
use fsdp_test_fake_cuda::schedules;
use fsdp_test_support::{Within, assert_close, relative};
use half::{bf16, f16};

use super::world::{Outcome, Rank, is_real, run, run_on_one_device, tag, values};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
/// Elements of a rank's share, one part each: short, of many, none.
const LENGTHS: [usize; 3] = [5, 70, 0];

/// Runs `body` on all numbers of ranks in all schedules, and gives what the ranks returned to `check`. On the machine's
/// devices, once on as many ranks as there are.
fn everywhere<T: Send>(body: impl Fn(&Rank) -> Outcome<T> + Sync, check: impl Fn(usize, Vec<T>)) {
    if is_real() {
        let devices = CudaContext::device_count().expect("there is a driver") as usize;
        return RANKS
            .into_iter()
            .filter(|&ranks| ranks <= devices)
            .for_each(|ranks| check(ranks, run(ranks, &body)));
    }
    for schedule in schedules(3) {
        for ranks in RANKS {
            let _session = Session::new(schedule);
            check(ranks, run(ranks, &body));
        }
    }
}

fn download(rank: &Rank, slices: &[Slice]) -> Outcome<Vec<Vec<f32>>> {
    slices.iter().map(|slice| rank.download(slice)).collect()
}

/// Rank `r`'s share of a slice of all ranks' shares.
fn share(whole: &Slice, rank: usize, len: usize) -> Slice {
    whole.range(rank * len..(rank + 1) * len)
}

/// The sum of all ranks' values, element by element.
fn sum(ranks: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| (0..ranks).map(|rank| values(rank, len)[i]).sum()).collect()
}

fn rounded(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::BF16 => bf16::from_f32(value).to_f32(),
        Dtype::F16 => f16::from_f32(value).to_f32(),
    }
}

/// NCCL divides for an average.
const OF_AVERAGES: Within = relative(1e-6);

#[test]
fn an_all_gather_gives_all_shares() {
    let gather = |rank: &Rank| {
        let comm = rank.join()?;
        let mut parts = Vec::new();
        for (dtype, len) in DTYPES.into_iter().zip(LENGTHS) {
            let send = rank.upload(dtype, &values(rank.rank(), len))?;
            parts.push(Gather { send, recv: rank.zeros(dtype, len * rank.size())? });
        }
        rank.hand_over()?;
        comm.all_gather(&*rank.side, tag("layers.0"), parts.clone())?;
        download(rank, &parts.into_iter().map(|part| part.recv).collect::<Vec<_>>())
    };
    everywhere(gather, |ranks, gathered| {
        for (part, len) in gathered.iter().flat_map(|parts| parts.iter().zip(LENGTHS)) {
            let expected: Vec<f32> = (0..ranks).flat_map(|rank| values(rank, len)).collect();
            assert_eq!(*part, expected);
        }
    });
}

#[test]
fn a_share_may_lie_in_the_whole_that_is_gathered() {
    let gather = |rank: &Rank| {
        let comm = rank.join()?;
        let (index, len) = (rank.rank(), 6);
        let mut all = vec![-1.0; rank.size() * len];
        all[index * len..][..len].copy_from_slice(&values(index, len));
        let recv = rank.upload(Dtype::BF16, &all)?;
        rank.hand_over()?;
        comm.all_gather(
            &*rank.side,
            tag("layers.0"),
            vec![Gather { send: share(&recv, index, len), recv: recv.clone() }],
        )?;
        rank.download(&recv)
    };
    everywhere(gather, |ranks, gathered| {
        let expected: Vec<f32> = (0..ranks).flat_map(|rank| values(rank, 6)).collect();
        gathered.iter().for_each(|part| assert_eq!(*part, expected));
    });
}

/// How a part is reduced.
#[derive(Clone, Copy, Debug)]
struct Way {
    dtype: Dtype,
    recv: Dtype,
    accumulate: Accumulate,
    scale: f32,
    in_place: bool,
}

fn ways(ranks: usize) -> Vec<Way> {
    let mut ways = Vec::new();
    for dtype in DTYPES {
        for scale in [1.0, 1.0 / ranks as f32, 0.75] {
            for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                ways.push(Way { dtype, recv: dtype, accumulate, scale, in_place: false });
                ways.push(Way { dtype, recv: dtype, accumulate, scale, in_place: true });
                if dtype != Dtype::F32 {
                    ways.push(Way { dtype, recv: Dtype::F32, accumulate, scale, in_place: false });
                }
            }
        }
    }
    ways
}

#[test]
fn a_reduce_scatter_gives_each_rank_its_share_of_the_sum() {
    const LEN: usize = 9;
    let reduce = |rank: &Rank| {
        let comm = rank.join()?;
        let index = rank.rank();
        let mut parts = Vec::new();
        for Way { dtype, recv, accumulate, scale, in_place } in ways(rank.size()) {
            let send = rank.upload(dtype, &values(index, LEN * rank.size()))?;
            let recv = match in_place {
                true => share(&send, index, LEN),
                false => rank.upload(recv, &[100.0; LEN])?,
            };
            parts.push(Reduce { send, recv, scale, accumulate });
        }
        rank.hand_over()?;
        // The scratch memory is used again by the second.
        for (i, parts) in parts.chunks(20).enumerate() {
            comm.reduce_scatter(&*rank.side, tag(&format!("layers.{i}")), parts.to_vec())?;
        }
        download(rank, &parts.into_iter().map(|part| part.recv).collect::<Vec<_>>())
    };
    everywhere(reduce, |ranks, reduced| {
        let sum = sum(ranks, LEN * ranks);
        for (index, parts) in reduced.iter().enumerate() {
            for (part, way) in parts.iter().zip(ways(ranks)) {
                let expected = |i: usize| {
                    let old = match (way.accumulate, way.in_place) {
                        (Accumulate::Overwrite, _) => 0.0,
                        (Accumulate::Add, false) => 100.0,
                        (Accumulate::Add, true) => values(index, LEN * ranks)[i],
                    };
                    rounded(way.recv, old + way.scale * sum[i])
                };
                let expected: Vec<f32> = (index * LEN..(index + 1) * LEN).map(expected).collect();
                assert_close(part, &expected, OF_AVERAGES, format!("rank {index} of {ranks}, {way:?}"));
            }
        }
    });
}

#[test]
fn an_all_reduce_gives_all_ranks_the_sum() {
    let parts = |ranks: usize| {
        DTYPES.into_iter().flat_map(move |dtype| [1.0, 1.0 / ranks as f32, 0.75].map(|s| (dtype, s)))
    };
    let reduce = |rank: &Rank| {
        let comm = rank.join()?;
        let mut data = Vec::new();
        for (dtype, scale) in parts(rank.size()) {
            data.push((rank.upload(dtype, &values(rank.rank(), 7))?, scale));
        }
        data.push((rank.zeros(Dtype::F32, 0)?, 0.5));
        rank.hand_over()?;
        comm.all_reduce(&*rank.side, tag("norm"), data.clone())?;
        download(rank, &data.into_iter().map(|(data, _)| data).collect::<Vec<_>>())
    };
    everywhere(reduce, |ranks, reduced| {
        for all in reduced {
            for (data, (dtype, scale)) in all.iter().zip(parts(ranks)) {
                let expected: Vec<f32> = sum(ranks, 7).iter().map(|x| rounded(dtype, scale * x)).collect();
                assert_close(data, &expected, OF_AVERAGES, format!("{ranks} ranks, {dtype}, scale {scale}"));
            }
        }
    });
}

#[test]
fn a_broadcast_gives_all_ranks_the_values_of_its_root() {
    let broadcast = |rank: &Rank| {
        let comm = rank.join()?;
        let data: Vec<Slice> = (0..rank.size())
            .map(|_| rank.upload(Dtype::F16, &values(rank.rank(), 11)))
            .collect::<Outcome<_>>()?;
        rank.hand_over()?;
        for (root, data) in data.iter().enumerate() {
            comm.broadcast(&*rank.side, tag("weights"), data.clone(), root)?;
        }
        comm.broadcast(&*rank.side, tag("nothing"), rank.zeros(Dtype::F32, 0)?, 0)?;
        download(rank, &data)
    };
    everywhere(broadcast, |_, received| {
        for data in received {
            data.iter().enumerate().for_each(|(root, data)| assert_eq!(*data, values(root, 11)));
        }
    });
}

/// By NCCL, and by ranks that share a device.
#[test]
fn an_all_to_all_transposes_chunks_and_ranks() {
    let exchange = |rank: &Rank, comm: &dyn Communicator| {
        let (index, size) = (rank.rank(), rank.size());
        let mut received = Vec::new();
        for unit in ["layers.0", "layers.1"] {
            let mut parts = Vec::new();
            for (dtype, len) in DTYPES.into_iter().zip(LENGTHS) {
                let send = rank.upload(dtype, &values(index, len * size))?;
                parts.push(Exchange { send, recv: rank.zeros(dtype, len * size)? });
            }
            rank.hand_over()?;
            comm.all_to_all(&*rank.side, tag(unit), parts.clone())?;
            received.extend(parts.into_iter().map(|part| part.recv));
        }
        download(rank, &received)
    };
    let check = |ranks: usize, received: Vec<Vec<Vec<f32>>>| {
        for (index, parts) in received.iter().enumerate() {
            for (part, len) in parts.iter().zip(LENGTHS.into_iter().cycle()) {
                let chunk = |peer| values(peer, len * ranks)[index * len..][..len].to_vec();
                assert_eq!(*part, (0..ranks).flat_map(chunk).collect::<Vec<_>>());
            }
        }
    };
    everywhere(|rank| exchange(rank, &*rank.join()?), check);
    for schedule in schedules(3) {
        for ranks in RANKS {
            let _session = Session::new(schedule);
            check(ranks, run_on_one_device(ranks, |rank| exchange(rank, &**rank.world.communicator())));
        }
    }
}

/// What a collective reads is freed, and what it writes is read, as soon as the host has called it.
#[test]
fn memory_stays_until_the_collective_is_done_with_it() {
    for schedule in schedules(10) {
        let session = Session::new(schedule);
        run(3, |rank| {
            let comm = rank.join()?;
            for step in 0..5 {
                let send = rank.upload(Dtype::F32, &values(rank.rank() + step, 12))?;
                let recv = rank.upload(Dtype::F32, &[1.0; 4])?;
                rank.hand_over()?;
                let (scale, accumulate) = (0.5, Accumulate::Add);
                let part = Reduce { send, recv: recv.clone(), scale, accumulate };
                comm.reduce_scatter(&*rank.side, tag("layers.0"), vec![part])?;
                let sum =
                    |i| 1.0 + 0.5 * (0..3).map(|r| values(r + step, 12)[rank.rank() * 4 + i]).sum::<f32>();
                assert_eq!(rank.download(&recv)?, (0..4).map(sum).collect::<Vec<f32>>());
            }
            Ok(())
        });
        assert_eq!(session.findings(), []);
    }
}

/// Two streams take turns on one communicator, whose scratch memory they share.
#[test]
fn scratch_memory_is_used_by_one_stream_at_a_time() {
    for schedule in schedules(10) {
        let _session = Session::new(schedule);
        let sums = run(2, |rank| {
            let comm = rank.join()?;
            let lanes = [rank.side.clone(), rank.device.stream("second", Priority::High)?];
            let (scale, accumulate) = (1.0, Accumulate::Add);
            let mut sums = Vec::new();
            for step in 0..6 {
                let send = rank.upload(Dtype::BF16, &values(rank.rank() + step, 16))?;
                let recv = rank.zeros(Dtype::F32, 8)?;
                lanes.iter().try_for_each(|lane| lane.wait(&rank.compute.record()))?;
                let part = Reduce { send, recv: recv.clone(), scale, accumulate };
                comm.reduce_scatter(&*lanes[step % 2], tag(&step.to_string()), vec![part])?;
                sums.push(recv);
            }
            rank.compute.wait(&lanes[1].record())?;
            download(rank, &sums)
        });
        for (rank, sums) in sums.iter().enumerate() {
            for (step, sum) in sums.iter().enumerate() {
                let whole: Vec<f32> =
                    values(step, 16).iter().zip(values(step + 1, 16)).map(|(a, b)| a + b).collect();
                assert_eq!(*sum, whole[rank * 8..][..8]);
            }
        }
    }
}

/// That of communicators which were made of the one it was said to, too.
#[test]
fn scratch_memory_is_counted_where_it_is_wanted() {
    let _session = Session::new(Schedule::Latest);
    run(2, |rank| {
        let account = Account::new(Arc::new(rank.device.memory()));
        let used = || account.usage(Category::Collectives).current;
        let comm = rank.join()?;
        comm.allocate_by(account.allocator(Category::Collectives));
        let duplicate = comm.duplicate("reduce");
        let reduce = |comm: &dyn Communicator, len| -> Outcome<()> {
            let (send, recv) = (rank.zeros(Dtype::BF16, 2 * len)?, rank.zeros(Dtype::F32, len)?);
            rank.hand_over()?;
            let part = Reduce { send, recv, scale: 1.0, accumulate: Accumulate::Add };
            Ok(comm.reduce_scatter(&*rank.side, tag("a"), vec![part])?)
        };
        reduce(&*comm, 32)?;
        assert_eq!(used(), 32 * 2);
        reduce(&*duplicate, 64)?;
        reduce(&*duplicate, 32)?;
        assert_eq!(used(), (32 + 64) * 2);
        drop(duplicate);
        assert_eq!(used(), 32 * 2);
        Ok(())
    });
}

/// One rank calls far ahead of its device; the others look at each result.
#[test]
fn calls_are_in_step_and_devices_need_not_be() {
    for schedule in schedules(10) {
        let _session = Session::new(schedule);
        let results = run(2, |rank| {
            let comm = rank.join()?;
            let data = rank.upload(Dtype::F32, &values(rank.rank(), 4))?;
            rank.hand_over()?;
            for step in 0..100 {
                comm.all_reduce(&*rank.side, tag(&step.to_string()), vec![(data.clone(), 0.5)])?;
                if rank.rank() == 1 {
                    rank.side.record().synchronize()?;
                }
            }
            rank.download(&data)
        });
        let expected: Vec<f32> = sum(2, 4).iter().map(|x| 0.5 * x).collect();
        assert_eq!(results, [expected.clone(), expected]);
    }
}

#[test]
fn launches_and_bytes_from_peers_are_counted() {
    let _session = Session::new(Schedule::Latest);
    let counters = run(4, |rank| {
        let comm = rank.join()?;
        let (whole, part) = (rank.zeros(Dtype::F32, 16)?, rank.zeros(Dtype::F32, 4)?);
        rank.hand_over()?;
        let gather = Gather { send: part.clone(), recv: whole.clone() };
        comm.all_gather(&*rank.side, tag("a"), vec![gather.clone()])?;
        comm.all_gather(&*rank.side, tag("b"), vec![gather])?;
        let reduce =
            Reduce { send: whole.clone(), recv: part, scale: 1.0, accumulate: Accumulate::Overwrite };
        comm.duplicate("reduce").reduce_scatter(&*rank.side, tag("a"), vec![reduce])?;
        comm.all_reduce(&*rank.side, tag("a"), vec![(whole.clone(), 1.0)])?;
        comm.broadcast(&*rank.side, tag("a"), whole.clone(), 1)?;
        let exchange = Exchange { send: whole.clone(), recv: rank.zeros(Dtype::F32, 16)? };
        rank.hand_over()?;
        comm.all_to_all(&*rank.side, tag("a"), vec![exchange])?;
        rank.download(&whole)?;
        Ok(comm.counters())
    });
    for (rank, counters) in counters.into_iter().enumerate() {
        let of = |name| {
            counters.iter().find(|(known, _)| *known == name).map(|(_, c)| (c.calls, c.bytes_from_peers))
        };
        assert_eq!(of("all-gather"), Some((2, 2 * 3 * 16)));
        assert_eq!(of("reduce-scatter"), Some((1, 3 * 16)));
        assert_eq!(of("all-reduce"), Some((1, 6 * 16)));
        assert_eq!(of("all-to-all"), Some((1, 3 * 16)));
        assert_eq!(of("broadcast"), Some((1, if rank == 1 { 0 } else { 64 })));
    }
}

/// Values whose sum depends on its order.
fn rough(rank: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((rank * 7919 + i * 104_729) % 1000) as f32 * 0.037 - 11.0 + rank as f32 * 300.0)
        .collect()
}

/// The same calls by ranks that share a device, which are summed in rank order.
#[test]
fn sums_in_rank_order_have_the_bits_of_ranks_that_are_threads() {
    const LEN: usize = 9;
    let reduce = |rank: &Rank, comm: &dyn Communicator| {
        let mut parts = Vec::new();
        for Way { dtype, recv, accumulate, scale, in_place } in ways(rank.size()) {
            let send = rank.upload(dtype, &rough(rank.rank(), LEN * rank.size()))?;
            let recv = match in_place {
                true => share(&send, rank.rank(), LEN),
                false => rank.upload(recv, &[100.0; LEN])?,
            };
            parts.push(Reduce { send, recv, scale, accumulate });
        }
        let mut data = Vec::new();
        for (dtype, len) in DTYPES.into_iter().zip([13, 3, 0]) {
            data.push((rank.upload(dtype, &rough(rank.rank(), len))?, 0.3));
        }
        rank.hand_over()?;
        comm.reduce_scatter(&*rank.side, tag("layers.0"), parts.clone())?;
        comm.all_reduce(&*rank.side, tag("norm"), data.clone())?;
        let slices = parts.into_iter().map(|part| part.recv).chain(data.into_iter().map(|(data, _)| data));
        download(rank, &slices.collect::<Vec<_>>())
    };
    for schedule in schedules(2) {
        for ranks in RANKS {
            let session = Session::new(schedule);
            let by_nccl = run(ranks, |rank| reduce(rank, &*rank.join_with(Sums::InRankOrder)?));
            drop(session);
            let _session = Session::new(schedule);
            let by_threads = run_on_one_device(ranks, |rank| reduce(rank, &**rank.world.communicator()));
            assert_eq!(by_nccl, by_threads);
        }
    }
}
