//! Each collective against a plain loop, at one to eight ranks.

use cudarc::nccl::sys::{self, ncclRedOp_t};
use fake_cuda::{Schedule, Session};
use half::{bf16, f16};

use super::world::{Element, Rank, at, check, launch, values};

const N: usize = 37;

/// The sum in the order of the ranks, in f32.
fn summed<T: Element>(ranks: usize, len: usize, scale: impl Fn(usize) -> f32) -> Vec<f32> {
    let all = (0..ranks).map(|rank| values::<T>(rank, len)).collect::<Vec<_>>();
    let term = |rank: usize, i: usize| scale(rank) * all[rank][i].value();
    (0..len).map(|i| (0..ranks).map(|rank| term(rank, i)).reduce(|a, b| a + b).expect("a rank")).collect()
}

fn rounded<T: Element>(values: &[f32]) -> Vec<T> {
    values.iter().map(|x| T::of(*x)).collect()
}

fn at_all_sizes(test: impl Fn(usize)) {
    for (ranks, schedule) in (1..=8).flat_map(|ranks| Schedule::all(2).map(move |schedule| (ranks, schedule)))
    {
        let _session = Session::new(schedule);
        test(ranks);
    }
}

fn all_gather<T: Element>(rank: &Rank) {
    let send = rank.upload(&values::<T>(rank.rank, N));
    let receive = rank.upload(&vec![T::of(0.0); N * rank.ranks]);
    // SAFETY: the buffers have the lengths of an all-gather of N.
    check(unsafe { sys::ncclAllGather(at(&send), at(&receive), N, T::TYPE, rank.comm, rank.cu_stream()) });
    let expected = (0..rank.ranks).flat_map(|from| values::<T>(from, N)).collect::<Vec<_>>();
    assert_eq!(rank.download(&receive), expected);
}

#[test]
fn all_gather_concatenates() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            all_gather::<f32>(rank);
            all_gather::<bf16>(rank);
            all_gather::<i32>(rank);
        });
    });
}

#[test]
fn all_gather_in_place() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            let mut all = vec![f32::NAN; N * rank.ranks];
            all[rank.rank * N..][..N].copy_from_slice(&values::<f32>(rank.rank, N));
            let buffer = rank.upload(&all);
            let mine = at(&buffer).wrapping_byte_add(rank.rank * N * 4);
            // SAFETY: the buffer holds N values of each rank.
            check(unsafe {
                sys::ncclAllGather(mine, at(&buffer), N, f32::TYPE, rank.comm, rank.cu_stream())
            });
            let expected = (0..rank.ranks).flat_map(|from| values::<f32>(from, N)).collect::<Vec<_>>();
            assert_eq!(rank.download(&buffer), expected);
        });
    });
}

fn reduce_scatter<T: Element>(rank: &Rank) {
    let send = rank.upload(&values::<T>(rank.rank, N * rank.ranks));
    let receive = rank.upload(&[T::of(0.0); N]);
    let op = ncclRedOp_t::ncclSum;
    // SAFETY: the buffers have the lengths of a reduce-scatter to N.
    check(unsafe {
        sys::ncclReduceScatter(at(&send), at(&receive), N, T::TYPE, op, rank.comm, rank.cu_stream())
    });
    let sums = summed::<T>(rank.ranks, N * rank.ranks, |_| 1.0);
    assert_eq!(rank.download(&receive), rounded::<T>(&sums[rank.rank * N..][..N]));
}

#[test]
fn reduce_scatter_sums_in_rank_order() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            reduce_scatter::<f32>(rank);
            reduce_scatter::<bf16>(rank);
            reduce_scatter::<f16>(rank);
        });
    });
}

#[test]
fn reduce_scatter_in_place_averages() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            let buffer = rank.upload(&values::<f32>(rank.rank, N * rank.ranks));
            let mine = at(&buffer).wrapping_byte_add(rank.rank * N * 4);
            let (op, stream) = (ncclRedOp_t::ncclAvg, rank.cu_stream());
            // SAFETY: the buffer holds N values for each rank.
            check(unsafe { sys::ncclReduceScatter(at(&buffer), mine, N, f32::TYPE, op, rank.comm, stream) });
            let sums = summed::<f32>(ranks, N * ranks, |_| 1.0);
            let expected = sums[rank.rank * N..][..N].iter().map(|x| x / ranks as f32).collect::<Vec<_>>();
            assert_eq!(rank.download(&buffer)[rank.rank * N..][..N], expected);
        });
    });
}

fn all_reduce<T: Element>(rank: &Rank, op: ncclRedOp_t) -> Vec<T> {
    let buffer = rank.upload(&values::<T>(rank.rank, N));
    // SAFETY: in place, N values.
    check(unsafe {
        sys::ncclAllReduce(at(&buffer), at(&buffer), N, T::TYPE, op, rank.comm, rank.cu_stream())
    });
    rank.download(&buffer)
}

#[test]
fn all_reduce_sums_and_finds_the_extremes() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            let sums = summed::<f32>(ranks, N, |_| 1.0);
            assert_eq!(all_reduce::<f32>(rank, ncclRedOp_t::ncclSum), sums);
            assert_eq!(
                all_reduce::<bf16>(rank, ncclRedOp_t::ncclSum),
                rounded(&summed::<bf16>(ranks, N, |_| 1.0))
            );
            assert_eq!(all_reduce::<f32>(rank, ncclRedOp_t::ncclMax), values::<f32>(ranks - 1, N));
            let ordered = |i: usize| (0..ranks).map(|r| values::<i32>(r, N)[i]).min().expect("a rank");
            assert_eq!(
                all_reduce::<i32>(rank, ncclRedOp_t::ncclMin),
                (0..N).map(ordered).collect::<Vec<_>>()
            );
        });
    });
}

#[test]
fn a_sum_is_scaled_by_what_each_rank_has_said() {
    at_all_sizes(|ranks| {
        let scale = |rank: usize| 0.25 + rank as f32;
        launch(ranks, |rank| {
            let mut on_host = scale(rank.rank);
            let on_device = rank.upload(&[on_host]);
            let residences = [
                (sys::ncclScalarResidence_t::ncclScalarHostImmediate, (&raw mut on_host).cast()),
                (sys::ncclScalarResidence_t::ncclScalarDevice, at(&on_device)),
            ];
            for (residence, scalar) in residences {
                let mut op = ncclRedOp_t::ncclSum;
                // The operation is an integer beyond the built-in ones, so it is written to one.
                let out = (&raw mut op).cast();
                // SAFETY: the scalar is where its residence says.
                check(unsafe { sys::ncclRedOpCreatePreMulSum(out, scalar, f32::TYPE, residence, rank.comm) });
                assert_eq!(all_reduce::<f32>(rank, op), summed::<f32>(ranks, N, scale));
                // SAFETY: the operation is the communicator's.
                check(unsafe { sys::ncclRedOpDestroy(op, rank.comm) });
            }
        });
    });
}

#[test]
fn broadcast_and_reduce_have_a_root() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            for root in 0..ranks {
                let send = rank.upload(&values::<f16>(rank.rank, N));
                let receive = rank.upload(&[f16::ZERO; N]);
                let (from, to, stream) = (at(&send), at(&receive), rank.cu_stream());
                // SAFETY: N values each.
                check(unsafe { sys::ncclBroadcast(from, to, N, f16::TYPE, root as i32, rank.comm, stream) });
                assert_eq!(rank.download(&receive), values::<f16>(root, N));
                let op = ncclRedOp_t::ncclSum;
                // SAFETY: N values each.
                check(unsafe { sys::ncclReduce(from, to, N, f16::TYPE, op, root as i32, rank.comm, stream) });
                let sums = summed::<f16>(ranks, N, |_| 1.0);
                let expected = if rank.rank == root { rounded(&sums) } else { values::<f16>(root, N) };
                assert_eq!(rank.download(&receive), expected);
            }
        });
    });
}

#[test]
fn all_to_all_transposes() {
    at_all_sizes(|ranks| {
        launch(ranks, |rank| {
            let send = rank.upload(&values::<f32>(rank.rank, N * ranks));
            let receive = rank.upload(&vec![0.0f32; N * ranks]);
            // SAFETY: N values for each rank.
            check(unsafe {
                sys::ncclAlltoAll(at(&send), at(&receive), N, f32::TYPE, rank.comm, rank.cu_stream())
            });
            let block = |from| values::<f32>(from, N * ranks)[rank.rank * N..][..N].to_vec();
            assert_eq!(rank.download(&receive), (0..ranks).flat_map(block).collect::<Vec<_>>());
        });
    });
}
