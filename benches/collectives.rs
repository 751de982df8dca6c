//! All-gather and reduce-scatter of 16 MiB between two ranks, beside what two threads copy in the same time.
//!
//! `cargo bench --bench collectives`. Rates are 16 MiB, the whole buffer, per time of one round; the memory copies are
//! 16 MiB by each of two threads at once, between the same barriers. The three take turns, so that a change of the
//! machine's load meets all of them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use fsdp_runtime::comm::{Accumulate, CommError, Communicator, Gather, HostOp, Phase, Reduce, Tag};
use fsdp_runtime::device::cpu::ComputeStream;
use fsdp_runtime::device::{Slice, Stream};
use fsdp_runtime::launch::{self, World};
use fsdp_runtime::spec::Dtype;

const RANKS: usize = 2;
const BYTES: usize = 16 << 20;
const ROUNDS: usize = 60;
const WARM_UP: usize = 10;

fn tag() -> Tag {
    Tag { unit: "bench".into(), phase: Phase::Setup, step: 0 }
}

/// Seconds of `work` from a common start to the end of the slowest rank, the same on every rank.
fn timed(comm: &dyn Communicator, work: &mut dyn FnMut() -> Result<(), CommError>) -> Result<f64, CommError> {
    comm.host_barrier(tag())?;
    let start = Instant::now();
    work()?;
    let mut seconds = [start.elapsed().as_secs_f64()];
    comm.host_reduce(tag(), HostOp::Max, &mut seconds)?;
    Ok(seconds[0])
}

fn rank_main(world: World) -> Result<Vec<(&'static str, Duration)>, CommError> {
    let comm = &**world.communicator();
    let stream = ComputeStream::new("compute");
    let elements = BYTES / Dtype::F32.size();
    let zeros = |len| Slice::zeros(Dtype::F32, len, None);

    let (source, mut target) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let apart = Gather { send: zeros(elements / RANKS), recv: zeros(elements) };
    let whole = zeros(elements);
    let own = world.rank() * (elements / RANKS)..(world.rank() + 1) * (elements / RANKS);
    let in_place = Gather { send: whole.range(own), recv: whole };
    let reduce =
        |accumulate| Reduce { send: zeros(elements), recv: zeros(elements / RANKS), scale: 0.5, accumulate };
    let (overwrite, add) = (reduce(Accumulate::Overwrite), reduce(Accumulate::Add));
    let narrow = Reduce { send: Slice::zeros(Dtype::BF16, BYTES / 2, None), ..add.clone() };
    let narrow = Reduce { recv: Slice::zeros(Dtype::F32, BYTES / 2 / RANKS, None), ..narrow };

    let gather = |part: &Gather| comm.all_gather(&*stream, tag(), vec![part.clone()]);
    let scatter = |part: &Reduce| comm.reduce_scatter(&*stream, tag(), vec![part.clone()]);
    let mut cases: Vec<(&'static str, Box<dyn FnMut() -> Result<(), CommError> + '_>)> = vec![
        (
            "memcpy by each of 2 threads",
            Box::new(|| {
                target.copy_from_slice(black_box(&source));
                black_box(&target);
                Ok(())
            }),
        ),
        ("all-gather", Box::new(|| gather(&apart))),
        ("all-gather in place", Box::new(|| gather(&in_place))),
        ("reduce-scatter f32", Box::new(|| scatter(&overwrite))),
        ("reduce-scatter f32, adding", Box::new(|| scatter(&add))),
        ("reduce-scatter bf16 to f32, adding", Box::new(|| scatter(&narrow))),
    ];
    let mut seconds = vec![Vec::with_capacity(ROUNDS); cases.len()];
    for round in 0..WARM_UP + ROUNDS {
        for ((_, work), seconds) in cases.iter_mut().zip(&mut seconds) {
            let time = timed(comm, &mut **work)?;
            if round >= WARM_UP {
                seconds.push(time);
            }
        }
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        Duration::from_secs_f64(times[times.len() / 2])
    };
    stream.record().synchronize()?;
    Ok(cases.iter().zip(seconds).map(|((name, _), times)| (*name, median(times))).collect())
}

fn main() -> Result<(), launch::LaunchError> {
    let ranks = launch::local(RANKS, rank_main)?;
    let reference = ranks[0][0].1;
    println!("{:<36} {:>10} {:>10} {:>12}", "16 MiB, 2 ranks", "median ms", "GB/s", "of memcpy");
    for (name, time) in &ranks[0] {
        let rate = BYTES as f64 / time.as_secs_f64();
        let share = 100.0 * reference.as_secs_f64() / time.as_secs_f64();
        println!("{name:<36} {:>10.3} {:>10.2} {share:>10.0} %", time.as_secs_f64() * 1e3, rate / 1e9);
    }
    Ok(())
}
