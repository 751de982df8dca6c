//! Sharded training in small: parameters gathered ahead on one stream, gradients reduced behind on another.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DriverError};
use cudarc::nccl::sys::{self, ncclRedOp_t};
use fake_cuda::{Of, Schedule, Session, Step, survivors};

use super::world::{Element, Rank, at, check, launch};

const N: usize = 4;
const UNITS: usize = 4;
const STEPS: usize = 2;

/// Two buffers in turn, and the event after which each may be written again in this step.
struct Buffers {
    memory: Vec<CudaSlice<f32>>,
    released: [Option<CudaEvent>; 2],
}

impl Buffers {
    fn new(stream: &Arc<CudaStream>, len: usize) -> Result<Self, DriverError> {
        Ok(Buffers {
            memory: vec![stream.alloc_zeros(len)?, stream.alloc_zeros(len)?],
            released: [None, None],
        })
    }

    /// Makes `stream` wait until a buffer may be written.
    fn claim(&self, slot: usize, stream: &CudaStream) -> Result<(), DriverError> {
        self.released[slot].as_ref().map_or(Ok(()), |event| stream.wait(event))
    }
}

/// The gradient of a unit is its gathered weights; a weight becomes the sum of what the ranks have for it.
fn train(rank: &Rank) -> Result<Vec<Vec<f32>>, DriverError> {
    let compute = &rank.stream;
    let gather = rank.context.new_stream_with_priority(-5)?;
    let reduce = rank.context.new_stream_with_priority(-5)?;
    let weight = |unit: usize| (1 + rank.rank + 10 * unit) as f32;
    let mut shards =
        (0..UNITS).map(|unit| compute.clone_htod(&[weight(unit); N])).collect::<Result<Vec<_>, _>>()?;
    let grads = (0..UNITS).map(|_| compute.alloc_zeros::<f32>(N)).collect::<Result<Vec<_>, _>>()?;
    let mut full = Buffers::new(compute, N * rank.ranks)?;
    let mut buckets = Buffers::new(compute, N * rank.ranks)?;
    let mut updated = compute.record_event(None)?;
    for _ in 0..STEPS {
        // What the last step used is free, as all of it comes before the update.
        gather.wait(&updated)?;
        (full.released, buckets.released) = ([None, None], [None, None]);
        for (unit, (shard, grad)) in shards.iter().zip(&grads).enumerate() {
            let slot = unit % 2;
            full.claim(slot, &gather)?;
            let (from, to) = (at(shard), at(&full.memory[slot]));
            // SAFETY: the buffers have the lengths of an all-gather of N.
            check(unsafe {
                sys::ncclAllGather(from, to, N, f32::TYPE, rank.comm, gather.cu_stream().cast())
            });
            compute.wait(&gather.record_event(None)?)?;
            buckets.claim(slot, compute)?;
            compute.memcpy_dtod(&full.memory[slot], &mut buckets.memory[slot])?;
            let computed = compute.record_event(None)?;
            reduce.wait(&computed)?;
            full.released[slot] = Some(computed);
            let (from, to, op) = (at(&buckets.memory[slot]), at(grad), ncclRedOp_t::ncclSum);
            // SAFETY: the buffers have the lengths of a reduce-scatter to N.
            check(unsafe {
                sys::ncclReduceScatter(from, to, N, f32::TYPE, op, rank.comm, reduce.cu_stream().cast())
            });
            buckets.released[slot] = Some(reduce.record_event(None)?);
        }
        // The reduce stream runs in order, so its last event stands for all.
        buckets.claim((UNITS - 1) % 2, compute)?;
        for (shard, grad) in shards.iter_mut().zip(&grads) {
            compute.memcpy_dtod(grad, shard)?;
        }
        updated = compute.record_event(None)?;
    }
    let results = shards.iter().map(|shard| compute.clone_dtoh(shard)).collect::<Result<Vec<_>, _>>()?;
    rank.context.synchronize()?;
    Ok(results)
}

fn is_right(ranks: usize, rank: usize, results: &[Vec<f32>]) -> bool {
    let factor = (ranks as f32).powi(STEPS as i32);
    (0..UNITS).all(|unit| results[unit] == [(1 + rank + 10 * unit) as f32 * factor; N])
}

#[test]
fn every_schedule_trains_alike() {
    for schedule in Schedule::all(60) {
        let _session = Session::new(schedule);
        for (rank, results) in launch(3, |rank| train(rank).expect("no error")).iter().enumerate() {
            assert!(is_right(3, rank, results), "{schedule:?}: rank {rank} has {results:?}");
        }
    }
}

#[test]
fn each_wait_and_record_is_missed() {
    for of in [Of::Device(0), Of::Thread("rank1")] {
        let found = survivors(of, |_| {
            let results = launch(2, train);
            let right = |(rank, result): (usize, &Result<_, _>)| {
                result.as_ref().is_ok_and(|results: &Vec<Vec<f32>>| is_right(2, rank, results))
            };
            results.iter().enumerate().all(right)
        });
        let found = found.iter().map(|s| (s.step, s.nth, s.redundant)).collect::<Vec<_>>();
        // A step records once before it and thirteen times; nobody waits for the last release but one of a bucket, nor
        // for the last update.
        assert_eq!(found, [9, 22, 26].map(|nth| (Step::Record, nth, false)));
    }
}
