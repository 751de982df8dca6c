//! Ranks that are processes of one machine have the collectives of ranks that are threads, to the bit, and leave nothing behind.

use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fsdp_comm::comm::{Accumulate, CommError, Communicator, Gather, Reduce};
use fsdp_comm::device::cpu::{ComputeStream, CpuStream};
use fsdp_comm::device::{Slice, Stream};
use fsdp_comm::launch::{LaunchError, World, distributed};

use super::processes::{command, text};
use super::world::{LATE, Outcome, SOON, free_port, launch};
use crate::shared_memory_collectives::TESTS;
use crate::{slice, tag, values};

/// The ranks that this process is one of, while it goes through the tests of threads.
static WORLD: Mutex<Option<World>> = Mutex::new(None);

/// In the place of `launch::local`: runs `body` on this process's rank, if there are so many.
pub fn local<T, E: Display>(ranks: usize, body: impl Fn(World) -> Result<T, E>) -> Result<(), LaunchError> {
    let world = WORLD.lock().expect("nobody has panicked").clone();
    let world = world.expect("it is called on ranks");
    if world.size() == ranks {
        body(world).unwrap_or_else(|error| panic!("{error}"));
    }
    Ok(())
}

/// This test's program as each of `size` ranks.
fn start(test: &str, size: usize, environment: &[(&str, &str)]) -> Vec<Child> {
    let port = free_port();
    let start = |rank: usize| {
        let mut command = command(&format!("shared_memory::{test}"), test, rank, size, port);
        command.envs(environment.iter().copied()).spawn().expect("it starts")
    };
    (0..size).map(start).collect()
}

fn is_rank_of(test: &str) -> bool {
    std::env::var("TCP_TEST").is_ok_and(|started| started == test)
}

/// Runs `main` if this process is a rank of the test, and says how it ended.
fn rank(test: &str, main: impl Fn(&World) -> Outcome<()> + Sync) -> bool {
    if !is_rank_of(test) {
        return false;
    }
    match distributed(|world| main(&world)) {
        Ok(()) => println!("rank ended well"),
        Err(error) => println!("rank ended so: {error}"),
    }
    true
}

#[test]
fn collectives_of_threads_are_those_of_processes() {
    let test = "collectives_of_threads_are_those_of_processes";
    let main = |world: &World| {
        *WORLD.lock().expect("nobody has panicked") = Some(world.clone());
        for (name, test) in TESTS {
            println!("{name}");
            test();
        }
        *WORLD.lock().expect("nobody has panicked") = None;
        Ok(())
    };
    if rank(test, main) {
        return;
    }
    for size in [1, 2, 3, 4] {
        for (rank, child) in start(test, size, &[]).into_iter().enumerate() {
            let said = text(child.wait_with_output().expect("it ends"));
            assert!(said.contains("rank ended well"), "rank {rank} of {size}: {said}");
        }
    }
}

/// Values whose sums round, and depend on their order.
fn x(rank: usize, i: usize) -> f32 {
    (((i * 37 + rank * 101) % 211) as f32 / 13.0 - 8.0) * [1.0, 1e3, 1e-2][(i + rank) % 3]
}

/// Parts of many rounds and of a fraction of one, side by side; a hash of all bits that come of it.
fn large(comm: &dyn Communicator) -> Result<u64, CommError> {
    use std::hash::Hasher;

    let (rank, size) = (comm.rank(), comm.size());
    let streams = ["gather", "reduce"].map(|name| (comm.duplicate(name), CpuStream::spawn(name)));
    let lengths = [1_000_003, 17, 300_000];
    let own = |len: usize| slice((0..len).map(|i| x(rank, i)));
    let gathers: Vec<_> =
        lengths.iter().map(|&len| Gather { send: own(len), recv: slice(vec![0f32; len * size]) }).collect();
    let reduces: Vec<_> = lengths
        .iter()
        .map(|&len| Reduce {
            send: own(len * size),
            recv: slice((0..len).map(|i| x(9, i))),
            scale: 0.3,
            accumulate: Accumulate::Add,
        })
        .collect();
    let reduced = own(999_999);
    for step in 0..3 {
        let (comm, stream) = &streams[0];
        comm.all_gather(&**stream, tag("large", step), gathers.clone())?;
        let (comm, stream) = &streams[1];
        comm.reduce_scatter(&**stream, tag("large", step), reduces.clone())?;
        comm.all_reduce(&**stream, tag("large", step), vec![(reduced.clone(), 0.5)])?;
    }
    for (_, stream) in &streams {
        stream.record().synchronize()?;
    }
    let mut hash = std::hash::DefaultHasher::new();
    let all =
        gathers.iter().map(|part| &part.recv).chain(reduces.iter().map(|part| &part.recv)).chain([&reduced]);
    let mut add =
        |slice: &Slice| values::<f32>(slice).iter().for_each(|value| hash.write_u32(value.to_bits()));
    all.for_each(&mut add);
    Ok(hash.finish())
}

#[test]
fn sums_of_any_length_have_the_bits_of_threads() {
    let test = "sums_of_any_length_have_the_bits_of_threads";
    let main = |world: &World| {
        println!("hash {:016x}.", large(&**world.communicator())?);
        Ok(())
    };
    if rank(test, main) {
        return;
    }
    for size in [2, 3, 4] {
        let threads = fsdp_comm::launch::local(size, |world| large(&**world.communicator())).unwrap();
        for (rank, child) in start(test, size, &[]).into_iter().enumerate() {
            let said = text(child.wait_with_output().expect("it ends"));
            let expected = format!("hash {:016x}.", threads[rank]);
            assert!(said.contains(&expected) && said.contains("rank ended well"), "rank {rank}: {said}");
        }
    }
}

/// An all-gather of `len` f32 a rank.
fn gather(comm: &dyn Communicator, stream: &dyn Stream, unit: &str, len: usize) -> Result<(), CommError> {
    let part = Gather { send: slice(vec![1f32; len]), recv: slice(vec![0f32; len * comm.size()]) };
    comm.all_gather(stream, tag(unit, 3), vec![part])
}

/// What each of the ranks, which are threads that are joined as processes are, says of a failure.
fn fails(size: usize, body: impl Fn(&World) -> Outcome<()> + Sync) -> Vec<String> {
    let ends = launch(size, SOON, body);
    ends.into_iter()
        .map(|end| end.map_or_else(|error| error.to_string(), |()| "ended well".to_owned()))
        .collect()
}

#[test]
fn calls_that_differ_move_nothing() {
    let errors = fails(2, |world| {
        let (comm, stream) = (world.communicator().duplicate("gather"), CpuStream::spawn("side"));
        gather(&*comm, &*stream, "B", 4)?;
        stream.record().synchronize()?;
        let (len, recv) = (4 + world.rank(), slice(vec![0f32; 2 * (4 + world.rank())]));
        let part = Gather { send: slice(vec![1f32; len]), recv: recv.clone() };
        comm.all_gather(&*stream, tag("A", 3), vec![part])?;
        let end = stream.record().synchronize();
        assert!(values::<f32>(&recv).iter().all(|value| *value == 0.0), "nothing has come");
        Ok(end?)
    });
    for error in errors {
        let words = "part 0 is 4 x f32 into 8 x f32 on rank 0, 5 x f32 into 10 x f32 on rank 1";
        assert!(
            error.contains("collective #2 of channel `gather` differs: ") && error.contains(words),
            "{error}"
        );
    }
}

#[test]
fn states_and_operations_that_differ_are_told() {
    let errors = fails(2, |world| {
        let comm = world.communicator();
        comm.note(["even", "odd"][world.rank()]);
        Ok(gather(&*comm.duplicate("gather"), &*ComputeStream::new("compute"), "A", 4)?)
    });
    assert!(errors.iter().all(|error| error.contains("rank 0 is even; rank 1 is odd")), "{errors:?}");
    let errors = fails(2, |world| {
        let (comm, stream) = (world.communicator(), ComputeStream::new("compute"));
        gather(&**comm, &*stream, "A", 4)?;
        match world.rank() {
            0 => gather(&**comm, &*stream, "A", 4)?,
            _ => comm.broadcast(&*stream, tag("A", 3), slice([0f32; 2]), 1)?,
        }
        Ok(())
    });
    for error in errors {
        assert!(
            error.contains("rank 1 in broadcast from rank 1 of unit `A` (forward, step 4, 8 B)"),
            "{error}"
        );
    }
}

#[test]
fn who_returns_or_is_late_or_cannot_go_on_is_named() {
    let errors = fails(3, |world| {
        let (comm, stream) = (world.communicator(), CpuStream::spawn("side"));
        gather(&**comm, &*stream, "A", 4)?;
        stream.record().synchronize()?;
        if world.rank() == 1 {
            return Ok(());
        }
        gather(&**comm, &*stream, "B", 4)?;
        Ok(stream.record().synchronize()?)
    });
    for error in [&errors[0], &errors[2]] {
        assert!(
            error.contains("rank 1 returned early") && error.contains("for it in all-gather of unit `B`"),
            "{errors:?}"
        );
    }

    let errors = fails(2, |world| {
        let (comm, stream) = (world.communicator(), CpuStream::spawn("side"));
        gather(&**comm, &*stream, "A", 4)?;
        stream.record().synchronize()?;
        if world.rank() == 1 {
            // On its stream, which does not come to what was called.
            stream.submit(Box::new(|| {
                std::thread::sleep(2 * SOON);
                Ok(())
            }))?;
        }
        gather(&**comm, &*stream, "B", 4)?;
        Ok(stream.record().synchronize()?)
    });
    let process = std::process::id();
    for error in errors {
        let words =
            ["timed out after 1s in all-gather of unit `B`", "the devices of [1] have not come to it"];
        assert!(words.iter().all(|words| error.contains(words)), "{error}");
        assert!(error.contains(&format!("; rank 1 is process {process} on `")), "{error}");
    }

    let errors = fails(2, |world| {
        let (comm, stream) = (world.communicator(), CpuStream::spawn("side"));
        gather(&**comm, &*stream, "A", 4)?;
        stream.record().synchronize()?;
        if world.rank() == 1 {
            stream.submit(Box::new(|| {
                Err(CommError::Stream { stream: "side".into(), message: "it is broken".into() })
            }))?;
        }
        gather(&**comm, &*stream, "B", 4)?;
        Ok(stream.record().synchronize()?)
    });
    assert!(errors[0].contains("it cannot run all-gather of unit `B`"), "{errors:?}");
}

/// Processor time of this process.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("the system tells");
    let fields: Vec<&str> = stat.rsplit(") ").next().expect("it has a name").split(' ').collect();
    let ticks: u64 =
        fields[11].parse::<u64>().expect("a number") + fields[12].parse::<u64>().expect("a number");
    Duration::from_millis(10 * ticks)
}

#[test]
fn a_rank_that_waits_takes_no_processor() {
    let test = "a_rank_that_waits_takes_no_processor";
    let main = |world: &World| {
        let (comm, stream) = (world.communicator(), CpuStream::spawn("side"));
        gather(&**comm, &*stream, "A", 4)?;
        stream.record().synchronize()?;
        if world.rank() == 1 {
            std::thread::sleep(2 * SOON);
        }
        let (start, time) = (Instant::now(), processor_time());
        gather(&**comm, &*stream, "B", 4)?;
        stream.record().synchronize()?;
        let (waited, worked) = (start.elapsed(), processor_time() - time);
        if world.rank() == 0 {
            println!("idle: {}", waited > SOON && worked * 20 < waited);
            println!("it waited {waited:?} and worked {worked:?}");
        }
        Ok(())
    };
    if rank(test, main) {
        return;
    }
    let said: Vec<String> = start(test, 2, &[])
        .into_iter()
        .map(|child| text(child.wait_with_output().expect("it ends")))
        .collect();
    assert!(said[0].contains("idle: true"), "{}", said[0]);
}

/// Sends a signal to a process.
fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().expect("there is `kill`");
    assert!(sent.success());
}

/// Files of this user in shared memory.
fn shared_files() -> Vec<std::ffi::OsString> {
    let files = std::fs::read_dir("/dev/shm").into_iter().flatten();
    files
        .filter_map(|file| Some(file.ok()?.file_name()))
        .filter(|name| name.to_string_lossy().contains("fsdp"))
        .collect()
}

/// Three ranks exchange without end; rank `hit` gets a signal, and the others are told within the time-out.
fn one_is_hit(test: &str, how: &str, hit: usize, timeout: &str, wait: impl FnOnce(&mut Child)) {
    let main = |world: &World| {
        let (comm, streams) = (world.communicator(), ["a", "b"].map(CpuStream::spawn));
        let comms = ["a", "b"].map(|name| comm.duplicate(name));
        for round in 0.. {
            for (comm, stream) in comms.iter().zip(&streams) {
                gather(&**comm, &**stream, "endless", 1 + (round * 7919) % 200_000)?;
            }
            comm.host_barrier(tag("round", round as u64))?;
            for stream in &streams {
                stream.record().synchronize()?;
            }
            if round == 2 {
                println!("they exchange");
            }
        }
        Ok(())
    };
    if rank(test, main) {
        return;
    }
    let mut children = start(test, 3, &[("FSDP_TIMEOUT_SECS", timeout)]);
    let mut struck = children.remove(hit);
    wait(&mut struck);
    signal(&struck, how);
    let begin = Instant::now();
    for child in children {
        let said = text(child.wait_with_output().expect("it ends"));
        assert!(said.contains("rank ended so: ") && !said.contains("panicked"), "{how} {hit}: {said}");
        let named = said.contains(&format!("rank {hit}")) || said.contains(&format!("[{hit}]"));
        assert!(named, "{how} {hit}: {said}");
    }
    // The time-out, how long rank 0 stays, and what all that takes on a busy machine.
    assert!(begin.elapsed() < LATE, "{:?}", begin.elapsed());
    let _ = struck.kill();
    let _ = struck.wait();
    assert!(shared_files().is_empty(), "{:?}", shared_files());
}

/// How many are hit: more in a deep tier.
fn times(variable: &str, few: u32) -> u32 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(few)
}

/// A number below `bound`, another one for each draw.
fn draw(draw: u32, bound: u32) -> u32 {
    (draw + 1).wrapping_mul(2_654_435_769) % bound
}

#[test]
fn a_process_that_is_killed_at_any_moment_is_named() {
    let test = "a_process_that_is_killed_at_any_moment_is_named";
    for kill in 0..times("FSDP_KILLS", 3) {
        let moment = Duration::from_micros(draw(kill, 700_000).into());
        one_is_hit(test, "-KILL", kill as usize % 3, "10", |_| std::thread::sleep(moment));
        if is_rank_of(test) {
            return;
        }
    }
}

#[test]
fn a_process_that_is_stopped_is_named() {
    let test = "a_process_that_is_stopped_is_named";
    for stop in 0..times("FSDP_STOPS", 1) {
        // Without rank 0 the others find out by its silence, which takes longer than a short time-out.
        one_is_hit(test, "-STOP", 1 + stop as usize % 2, "5", |struck| {
            let said = BufReader::new(struck.stdout.as_mut().expect("it is piped"));
            assert!(said.lines().any(|line| line.expect("it is text").contains("they exchange")));
            std::thread::sleep(Duration::from_micros(draw(stop, 20_000).into()));
        });
        if is_rank_of(test) {
            return;
        }
    }
}
