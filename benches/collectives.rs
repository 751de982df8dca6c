//! All-gather and reduce-scatter of 16 MiB between two ranks, beside what two threads copy in the same time.
//!
//! `cargo bench --bench collectives`: ranks that are threads. Under `fsdp launch -n 2 --` the program's ranks are processes. Rates are 16 MiB, the whole buffer, per time of one call; the memory
//! copies are 16 MiB by each of two threads at once, between the same barriers. The three take turns, so that
//! a change of the machine's load meets all of them. Both cores must be free: a rank that waits for its peer
//! gives its core away. Timed by hand: criterion measures one case after the other, in one thread.

use std::hint::black_box;
use std::time::{Duration, Instant};

use fsdp_runtime::comm::{Accumulate, CommError, Communicator, Gather, HostOp, Phase, Reduce, Tag};
use fsdp_runtime::device::cpu::ComputeStream;
use fsdp_runtime::device::{Slice, Stream};
use fsdp_runtime::launch::{self, Launcher, World};
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

/// What is timed: one call on this rank.
type Case<'a> = Box<dyn FnMut() -> Result<(), CommError> + 'a>;

/// Best and median time of a case.
type Times = (&'static str, [Duration; 2]);

fn rank_main(world: World) -> Result<Vec<Times>, CommError> {
    let comm = &**world.communicator();
    let stream = ComputeStream::new("compute");
    let elements = BYTES / Dtype::F32.size();
    // SAFETY: the rank's thread and the collectives that it calls use them, one call after the other.
    let zeros_of = |dtype, len| unsafe { Slice::zeros(dtype, len, None) };
    let zeros = |len| zeros_of(Dtype::F32, len);

    let (source, mut target) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let apart = Gather { send: zeros(elements / RANKS), recv: zeros(elements) };
    let whole = zeros(elements);
    let own = world.rank() * (elements / RANKS)..(world.rank() + 1) * (elements / RANKS);
    let in_place = Gather { send: whole.range(own), recv: whole };
    let reduce =
        |accumulate| Reduce { send: zeros(elements), recv: zeros(elements / RANKS), scale: 0.5, accumulate };
    let (overwrite, add) = (reduce(Accumulate::Overwrite), reduce(Accumulate::Add));
    let narrow = Reduce { send: zeros_of(Dtype::BF16, BYTES / 2), ..add.clone() };
    let narrow = Reduce { recv: zeros(BYTES / 2 / RANKS), ..narrow };

    let gather = |part: &Gather| comm.all_gather(&*stream, tag(), vec![part.clone()]);
    let scatter = |part: &Reduce| comm.reduce_scatter(&*stream, tag(), vec![part.clone()]);
    let mut cases: Vec<(&'static str, Case<'_>)> = vec![
        (
            "memcpy by each of 2 ranks",
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
    let summary = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        [times[0], times[times.len() / 2]].map(Duration::from_secs_f64)
    };
    stream.record().synchronize()?;
    Ok(cases.iter().zip(seconds).map(|((name, _), times)| (*name, summary(times))).collect())
}

fn main() -> Result<(), launch::LaunchError> {
    let ranks = Launcher::new().ranks(RANKS).launch(|world| match (world.rank(), world.size()) {
        (0, RANKS) => rank_main(world).map(Some),
        (_, RANKS) => rank_main(world).map(|_| None),
        (rank, size) => {
            Err(CommError::Invalid { rank, message: format!("this measures {RANKS} ranks, not {size}") })
        }
    })?;
    let Some(times) = &ranks[0] else { return Ok(()) };
    let memcpy = times[0].1;
    println!("{:<36}{:>27}{:>27}", "16 MiB, 2 ranks", "best", "median");
    let columns = format!("{:>11}{:>8}{:>8}", "ms", "GB/s", "memcpy");
    println!("{:<36}{columns}{columns}", "");
    for (name, times) in times {
        print!("{name:<36}");
        for (time, memcpy) in times.iter().zip(&memcpy) {
            let seconds = time.as_secs_f64();
            let share = 100.0 * memcpy.as_secs_f64() / seconds;
            print!("{:>11.3}{:>8.2}{share:>6.0} %", seconds * 1e3, BYTES as f64 / seconds / 1e9);
        }
        println!();
    }
    Ok(())
}
