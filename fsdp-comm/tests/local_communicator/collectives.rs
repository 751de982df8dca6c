//! Exact results of every collective, for many sizes, ranks, dtypes, in place and not.

use std::time::Duration;

use fsdp_comm::comm::{Accumulate, CommError, Communicator, Exchange, Gather, HostOp, Reduce};
use fsdp_comm::device::cpu::{ComputeStream, CpuStream};
use fsdp_comm::device::{Element, Slice, Stream};
use half::{bf16, f16};

use crate::{local, slice, tag, values};

const LENGTHS: [usize; 4] = [0, 1, 7, 1000];
const RANKS: [usize; 5] = [1, 2, 3, 5, 8];

/// A dtype with test values.
trait Value: Element + PartialEq + std::fmt::Debug {
    fn new(x: f32) -> Self;
    fn wide(self) -> f32;
}

impl Value for f32 {
    fn new(x: f32) -> f32 {
        x
    }
    fn wide(self) -> f32 {
        self
    }
}
impl Value for bf16 {
    fn new(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}
impl Value for f16 {
    fn new(x: f32) -> f16 {
        f16::from_f32(x)
    }
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

/// Values whose sums round, so that their order shows.
fn x<T: Value>(rank: usize, i: usize) -> T {
    let mantissa = ((i * 37 + rank * 101) % 211) as f32 / 13.0 - 8.0;
    T::new(mantissa * [1.0, 1e3, 1e-2][(i + rank) % 3])
}

fn vector<T: Value>(rank: usize, len: usize) -> Vec<T> {
    (0..len).map(|i| x(rank, i)).collect()
}

/// Element `i` of the sum over ranks, in rank order.
fn sum<T: Value>(ranks: usize, i: usize) -> f32 {
    (1..ranks).fold(x::<T>(0, i).wide(), |sum, rank| sum + x::<T>(rank, i).wide())
}

/// Runs `body` for every number of ranks, on every rank with a side stream.
fn on_all<F>(body: F)
where
    F: Fn(&dyn Communicator, &dyn Stream) -> Result<(), CommError> + Sync,
{
    for ranks in RANKS {
        let ends = local(ranks, |world| {
            let stream = CpuStream::spawn(format!("rank{}/side", world.rank()));
            body(&**world.communicator(), &*stream)?;
            stream.record().synchronize()
        });
        ends.unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
    }
}

fn gathers<T: Value>() {
    on_all(|comm, stream| {
        let (rank, ranks) = (comm.rank(), comm.size());
        for len in LENGTHS {
            let whole = |offset: usize| (0..ranks).flat_map(move |r| vector::<T>(r + offset, len));
            let apart =
                Gather { send: slice(vector::<T>(rank, len)), recv: slice(vec![T::new(0.0); ranks * len]) };
            let recv = slice((0..ranks * len).map(|_| T::new(-1.0)));
            let send = recv.range(rank * len..(rank + 1) * len);
            // SAFETY: the buffer is known to this thread only.
            unsafe { send.as_mut_slice::<T>() }.copy_from_slice(&vector::<T>(rank + 9, len));
            let in_place = Gather { send, recv };
            comm.all_gather(stream, tag("gather", 0), vec![apart.clone(), in_place.clone()])?;
            stream.record().synchronize()?;
            assert_eq!(values::<T>(&apart.recv), whole(0).collect::<Vec<_>>());
            assert_eq!(values::<T>(&in_place.recv), whole(9).collect::<Vec<_>>());
        }
        Ok(())
    });
}

fn all_gather_places_every_part_by_rank() {
    gathers::<f32>();
    gathers::<bf16>();
    gathers::<f16>();
}

fn reduces<S: Value, D: Value>() {
    let scale = 0.3;
    on_all(|comm, stream| {
        let (rank, ranks) = (comm.rank(), comm.size());
        for len in LENGTHS {
            let reduced = |i: usize| sum::<S>(ranks, rank * len + i) * scale;
            let part = |recv: Slice, accumulate| Reduce {
                send: slice(vector::<S>(rank, ranks * len)),
                recv,
                scale,
                accumulate,
            };
            let overwritten = part(slice(vec![D::new(f32::NAN); len]), Accumulate::Overwrite);
            let added = part(slice(vector::<D>(77, len)), Accumulate::Add);
            comm.reduce_scatter(stream, tag("reduce", 0), vec![overwritten.clone(), added.clone()])?;
            stream.record().synchronize()?;
            assert_eq!(
                values::<D>(&overwritten.recv),
                (0..len).map(|i| D::new(reduced(i))).collect::<Vec<_>>()
            );
            let expected: Vec<D> = (0..len).map(|i| D::new(x::<D>(77, i).wide() + reduced(i))).collect();
            assert_eq!(values::<D>(&added.recv), expected);
            assert_eq!(values::<S>(&added.send), vector::<S>(rank, ranks * len), "send is only read");
        }
        Ok(())
    });
}

fn reduce_scatter_sums_in_rank_order_scales_once_and_accumulates() {
    reduces::<f32, f32>();
    reduces::<bf16, bf16>();
    reduces::<f16, f16>();
}

fn reduce_scatter_of_a_narrow_dtype_may_go_to_f32() {
    reduces::<bf16, f32>();
    reduces::<f16, f32>();
}

fn reduces_in_place<T: Value>() {
    on_all(|comm, stream| {
        let (rank, ranks) = (comm.rank(), comm.size());
        for len in LENGTHS {
            let send = slice(vector::<T>(rank, ranks * len));
            let own = rank * len..(rank + 1) * len;
            let recv = send.range(own.clone());
            let part = Reduce { send: send.clone(), recv, scale: 0.5, accumulate: Accumulate::Overwrite };
            comm.reduce_scatter(stream, tag("reduce", 0), vec![part])?;
            stream.record().synchronize()?;
            let expected: Vec<T> = (0..ranks * len)
                .map(|i| if own.contains(&i) { T::new(sum::<T>(ranks, i) * 0.5) } else { x(rank, i) })
                .collect();
            assert_eq!(values::<T>(&send), expected);
        }
        Ok(())
    });
}

fn reduce_scatter_in_place_changes_its_part_only() {
    reduces_in_place::<f32>();
    reduces_in_place::<bf16>();
    reduces_in_place::<f16>();
}

fn all_reduces<T: Value>() {
    on_all(|comm, stream| {
        let (rank, ranks) = (comm.rank(), comm.size());
        for len in LENGTHS {
            let data = slice(vector::<T>(rank, ranks * len));
            let scattered = Reduce {
                send: slice(vector::<T>(rank, ranks * len)),
                recv: slice(vec![T::new(0.0); len]),
                scale: 0.3,
                accumulate: Accumulate::Overwrite,
            };
            comm.reduce_scatter(stream, tag("both", 0), vec![scattered.clone()])?;
            comm.all_reduce(stream, tag("both", 0), vec![(data.clone(), 0.3), (slice::<T>([]), 1.0)])?;
            stream.record().synchronize()?;
            let reduced = values::<T>(&data);
            let own = &reduced[rank * len..(rank + 1) * len];
            assert_eq!(
                bytemuck::cast_slice::<T, u8>(own),
                bytemuck::cast_slice::<T, u8>(&values::<T>(&scattered.recv))
            );
            let expected: Vec<T> = (0..ranks * len).map(|i| T::new(sum::<T>(ranks, i) * 0.3)).collect();
            assert_eq!(reduced, expected);
        }
        Ok(())
    });
}

fn all_reduce_has_the_bits_of_reduce_scatter_on_every_rank() {
    all_reduces::<f32>();
    all_reduces::<bf16>();
    all_reduces::<f16>();
}

fn broadcast_gives_all_the_roots_data() {
    on_all(|comm, stream| {
        for len in LENGTHS {
            for root in 0..comm.size() {
                let data = slice(vector::<f32>(comm.rank(), len));
                comm.broadcast(stream, tag("weights", 0), data.clone(), root)?;
                stream.record().synchronize()?;
                assert_eq!(values::<f32>(&data), vector::<f32>(root, len));
            }
        }
        Ok(())
    });
}

fn exchanges<T: Value>() {
    on_all(|comm, stream| {
        let (rank, ranks) = (comm.rank(), comm.size());
        let part = |len: usize| Exchange {
            send: slice(vector::<T>(rank, ranks * len)),
            recv: slice(vec![T::new(f32::NAN); ranks * len]),
        };
        let parts = LENGTHS.map(part);
        comm.all_to_all(stream, tag("tokens", 0), parts.to_vec())?;
        stream.record().synchronize()?;
        for (len, Exchange { send, recv }) in LENGTHS.into_iter().zip(&parts) {
            let chunk = |peer| (rank * len..(rank + 1) * len).map(move |i| x(peer, i));
            assert_eq!(values::<T>(recv), (0..ranks).flat_map(chunk).collect::<Vec<T>>());
            assert_eq!(values::<T>(send), vector::<T>(rank, ranks * len), "send is only read");
        }
        Ok(())
    });
}

fn all_to_all_transposes_chunks_and_ranks() {
    exchanges::<f32>();
    exchanges::<bf16>();
    exchanges::<f16>();
}

fn host_values_are_reduced_in_rank_order() {
    on_all(|comm, _| {
        let (rank, ranks) = (comm.rank(), comm.size());
        let own = |rank: usize| [0.1 * (rank as f64 + 1.0), -(rank as f64)];
        comm.host_barrier(tag("start", 0))?;
        let reduce = |op| {
            let mut values = own(rank);
            comm.host_reduce(tag("norm", 0), op, &mut values).map(|()| values)
        };
        let sum = (1..ranks).fold(own(0), |sum, r| [sum[0] + own(r)[0], sum[1] + own(r)[1]]);
        assert_eq!(reduce(HostOp::Sum)?, sum);
        assert_eq!(reduce(HostOp::Max)?, [own(ranks - 1)[0], 0.0]);
        assert_eq!(reduce(HostOp::Min)?, [own(0)[0], own(ranks - 1)[1]]);
        let mut nan =
            [if rank == 0 { f64::NAN } else { 1.0 }, if rank == ranks - 1 { f64::NAN } else { 1.0 }];
        comm.host_reduce(tag("norm", 0), HostOp::Max, &mut nan)?;
        assert!(nan[0].is_nan() && nan[1].is_nan(), "a NaN is not hidden: {nan:?}");
        Ok(())
    });
}

fn host_gather_takes_any_lengths() {
    on_all(|comm, _| {
        let gathered = comm.host_gather(tag("names", 0), vec![comm.rank() as u8; comm.rank()])?;
        assert_eq!(gathered, (0..comm.size()).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
        Ok(())
    });
}

fn counters_count_calls_and_bytes_from_peers() {
    let expected = |broadcast, gathered| {
        vec![
            ("all-gather", 1, 240),
            ("reduce-scatter", 1, 120),
            ("all-reduce", 1, 240),
            ("broadcast", 1, broadcast),
            ("all-to-all", 1, 120),
            ("host-barrier", 1, 0),
            ("host-reduce", 1, 48),
            ("host-gather", 1, gathered),
        ]
    };
    let expected = [expected(160, 6), expected(0, 5), expected(160, 4), expected(160, 3)];
    local(4, |world| {
        let comm = world.communicator();
        let before = comm.counters();
        let stream = ComputeStream::new("compute");
        let (shard, whole) = (slice([0f32; 10]), slice([0f32; 40]));
        let gather = Gather { send: shard.clone(), recv: whole.clone() };
        let reduce =
            Reduce { send: whole.clone(), recv: shard, scale: 1.0, accumulate: Accumulate::Overwrite };
        let duplicate = comm.duplicate("gather");
        let again = Gather { recv: slice([0f32; 40]), ..gather.clone() };
        duplicate.all_gather(&*stream, tag("u", 0), vec![gather, again])?;
        comm.reduce_scatter(&*stream, tag("u", 0), vec![reduce])?;
        comm.all_reduce(&*stream, tag("u", 0), vec![(whole.clone(), 1.0)])?;
        comm.broadcast(&*stream, tag("u", 0), whole.clone(), 1)?;
        comm.all_to_all(&*stream, tag("u", 0), vec![Exchange { send: whole, recv: slice([0f32; 40]) }])?;
        comm.host_reduce(tag("u", 0), HostOp::Sum, &mut [0.0; 2])?;
        comm.host_gather(tag("u", 0), vec![0; world.rank()])?;
        comm.host_barrier(tag("u", 0))?;
        let since = comm.counters().into_iter().zip(before);
        let counters: Vec<_> = since
            .map(|((op, now), (_, then))| {
                (op, now.calls - then.calls, now.bytes_from_peers - then.bytes_from_peers)
            })
            .collect();
        assert_eq!(counters, expected[world.rank()]);
        Ok::<_, CommError>(())
    })
    .unwrap();
}

/// One of five collectives on `len` elements a rank, checked against its exact result when it is done.
fn scheduled(
    comm: &dyn Communicator,
    stream: &dyn Stream,
    round: usize,
    kind: u64,
    len: usize,
) -> Result<Box<dyn FnOnce() + Send>, CommError> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let tag = tag(&format!("unit {round}"), round as u64);
    let whole = slice(vector::<f32>(rank, ranks * len));
    let sums = move |i: usize| sum::<f32>(ranks, i);
    Ok(match kind {
        0 => {
            let recv = slice(vec![0f32; ranks * len]);
            let send = slice(vector::<f32>(rank, len));
            comm.all_gather(stream, tag, vec![Gather { send, recv: recv.clone() }])?;
            let expected: Vec<f32> = (0..ranks).flat_map(|r| vector(r, len)).collect();
            Box::new(move || assert_eq!(values::<f32>(&recv), expected))
        }
        1 => {
            let recv = slice(vec![0f32; len]);
            let accumulate = Accumulate::Add;
            let part = Reduce { send: whole, recv: recv.clone(), scale: 1.0, accumulate };
            comm.reduce_scatter(stream, tag, vec![part])?;
            let expected: Vec<f32> = (0..len).map(|i| 0.0 + sums(rank * len + i)).collect();
            Box::new(move || assert_eq!(values::<f32>(&recv), expected))
        }
        2 => {
            comm.all_reduce(stream, tag, vec![(whole.clone(), 1.0)])?;
            let expected: Vec<f32> = (0..ranks * len).map(sums).collect();
            Box::new(move || assert_eq!(values::<f32>(&whole), expected))
        }
        3 => {
            let recv = slice(vec![0f32; ranks * len]);
            comm.all_to_all(stream, tag, vec![Exchange { send: whole, recv: recv.clone() }])?;
            let expected: Vec<f32> =
                (0..ranks).flat_map(|r| vector(r, ranks * len)[rank * len..][..len].to_vec()).collect();
            Box::new(move || assert_eq!(values::<f32>(&recv), expected))
        }
        _ => {
            let root = round % ranks;
            comm.broadcast(stream, tag, whole.clone(), root)?;
            Box::new(move || assert_eq!(values::<f32>(&whole), vector::<f32>(root, ranks * len)))
        }
    })
}

/// A generator for schedules, the same on all ranks.
struct SplitMix(u64);

impl SplitMix {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

fn random_schedules_with_a_sleepy_rank_are_exact() {
    for seed in 0..6 {
        let ranks = 2 + seed as usize % 3;
        local(ranks, |world| {
            let mut random = SplitMix(seed);
            let stream = CpuStream::spawn(format!("rank{}/side", world.rank()));
            let mut checks = Vec::new();
            for round in 0..60 {
                let (kind, len) = (random.below(5), random.below(300) as usize);
                let (sleeper, nap) = (random.below(ranks as u64) as usize, random.below(4) == 0);
                if nap && sleeper == world.rank() {
                    stream.submit(Box::new(|| {
                        std::thread::sleep(Duration::from_millis(1));
                        Ok(())
                    }))?;
                }
                checks.push(scheduled(&**world.communicator(), &*stream, round, kind, len)?);
            }
            stream.record().synchronize()?;
            checks.into_iter().for_each(|check| check());
            Ok::<_, CommError>(())
        })
        .unwrap();
    }
}

fn two_channels_run_on_two_streams_at_once() {
    local(3, |world| {
        let spawn = |name: &str| {
            let stream = CpuStream::spawn(format!("rank{}/{name}", world.rank()));
            (world.communicator().duplicate(name), stream)
        };
        let lanes = [spawn("gather"), spawn("reduce")];
        let mut checks = Vec::new();
        // Ranks enqueue on the lanes in different orders: only the order within a channel counts.
        let first = world.rank() % 2;
        for at in [first, 1 - first] {
            let (comm, stream) = &lanes[at];
            for round in 0..100 {
                checks.push(scheduled(&**comm, &**stream, round, at as u64, 50 + round)?);
            }
        }
        for (_, stream) in &lanes {
            stream.record().synchronize()?;
        }
        checks.into_iter().for_each(|check| check());
        Ok::<_, CommError>(())
    })
    .unwrap();
}

fn one_channel_keeps_the_order_of_calls_across_streams() {
    local(2, |world| {
        let comm = world.communicator();
        let side = CpuStream::spawn(format!("rank{}/side", world.rank()));
        for round in 0..50 {
            let check = scheduled(&**comm, &*side, round, 0, 100)?;
            // Called on the host while the gather is still under way on its stream.
            comm.host_barrier(tag("after", 0))?;
            side.record().synchronize()?;
            check();
        }
        Ok::<_, CommError>(())
    })
    .unwrap();
}

crate::on_ranks! {
    all_gather_places_every_part_by_rank,
    reduce_scatter_sums_in_rank_order_scales_once_and_accumulates,
    reduce_scatter_of_a_narrow_dtype_may_go_to_f32,
    reduce_scatter_in_place_changes_its_part_only,
    all_reduce_has_the_bits_of_reduce_scatter_on_every_rank,
    broadcast_gives_all_the_roots_data,
    all_to_all_transposes_chunks_and_ranks,
    host_values_are_reduced_in_rank_order,
    host_gather_takes_any_lengths,
    counters_count_calls_and_bytes_from_peers,
    random_schedules_with_a_sleepy_rank_are_exact,
    two_channels_run_on_two_streams_at_once,
    one_channel_keeps_the_order_of_calls_across_streams,
}
