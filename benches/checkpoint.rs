//! Saving and restoring a training state of 768 MiB on two ranks, beside plain writing and reading of the same bytes.
//!
//! `cargo bench --bench checkpoint [-- DIRECTORY]`; without a directory, under `target/`. "Plain" is two threads at once,
//! each of which writes its half of the bytes to a file of its own, a MiB at a time, and waits for the disk, or reads its
//! half into memory that is there. The cases take turns, so that a change of the disk's speed meets all of them.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use fsdp::checkpoint::{Checkpoints, Contents, Restore};
use fsdp::comm::{Communicator, HostOp, Phase, Tag};
use fsdp::launch::{self, World};
use fsdp::prelude::*;

const RANKS: usize = 2;
const PARAMS: usize = 16;
const SHAPE: (usize, usize) = (1024, 4096);
const ROUNDS: usize = 5;
/// Weights and the two moments of AdamW.
const BYTES: usize = 3 * 4 * PARAMS * SHAPE.0 * SHAPE.1;
const MIB: usize = 1 << 20;

const CASES: [&str; 4] = ["plain write", "save", "plain read", "restore"];

/// Seconds of `work` from a common start to the end of the slowest rank, the same on every rank.
fn timed(comm: &dyn Communicator, work: impl FnOnce() -> fsdp::Result<()>) -> fsdp::Result<f64> {
    let tag = || Tag { unit: "bench".into(), phase: Phase::Setup, step: 0 };
    comm.host_barrier(tag())?;
    let start = Instant::now();
    work()?;
    let mut seconds = [start.elapsed().as_secs_f64()];
    comm.host_reduce(tag(), HostOp::Max, &mut seconds)?;
    Ok(seconds[0])
}

fn io<T>(result: std::io::Result<T>) -> fsdp::Result<T> {
    result.map_err(|error| fsdp::Error::Usage(error.to_string()))
}

fn plain_write(path: &Path, block: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    for _ in 0..BYTES / RANKS / block.len() {
        file.write_all(block)?;
    }
    file.sync_all()
}

fn plain_read(path: &Path, place: &mut [u8]) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    place.chunks_mut(MIB).try_for_each(|block| file.read_exact(block))
}

fn rank_main(world: &World, directory: &Path) -> fsdp::Result<Vec<Vec<f64>>> {
    let comm = &**world.communicator();
    let params: Vec<Param> = (0..PARAMS).map(|_| Param::new(SHAPE)).collect();
    let mut model = params.fully_shard(&world.data_parallel_mesh())?;
    let mut optimizer = model.optimizer(AdamW::default())?;
    let store = Checkpoints::new(directory.join("store")).keep(1);
    let file = directory.join(format!("plain-{}", world.rank()));
    let block: Vec<u8> = (0..MIB).map(|i| (i * 7 % 251) as u8).collect();
    // Touched already, as the memory of the state is.
    let mut place = vec![1u8; BYTES / RANKS];
    let mut seconds = vec![Vec::new(); CASES.len()];
    // The first round only warms up.
    for round in 0..=ROUNDS {
        let times = [
            timed(comm, || io(plain_write(&file, &block)))?,
            timed(comm, || store.save(Contents::of(&model).optimizer(&optimizer)).map(drop))?,
            timed(comm, || io(plain_read(&file, &mut place)))?,
            timed(comm, || {
                store.restore_latest(Restore::new(&mut model).optimizer(&mut optimizer)).map(drop)
            })?,
        ];
        if round > 0 {
            seconds.iter_mut().zip(times).for_each(|(seconds, time)| seconds.push(time));
        }
    }
    Ok(seconds)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let directory = given.map_or_else(|| PathBuf::from("target/checkpoint-bench"), PathBuf::from);
    fs::create_dir_all(&directory)?;
    let ranks = launch::local(RANKS, |world| rank_main(&world, &directory))?;
    fs::remove_dir_all(&directory)?;
    let median = |times: &Vec<f64>| {
        let mut times = times.clone();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    println!("{} MiB, {RANKS} ranks, medians of {ROUNDS} rounds", BYTES / MIB);
    let medians: Vec<f64> = ranks[0].iter().map(median).collect();
    for (index, (name, seconds)) in CASES.iter().zip(&medians).enumerate() {
        let rate = BYTES as f64 / seconds / 1e9;
        let plain = medians[index / 2 * 2];
        println!("{name:<12}{seconds:>8.3} s{rate:>8.2} GB/s{:>7.0} % of plain", 100.0 * plain / seconds);
    }
    Ok(())
}
