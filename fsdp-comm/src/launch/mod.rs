//! Starts ranks, as threads of this process or as processes of a launcher, and ends them together.
//!
//! Where ranks are threads, run the program with `CANDLE_NUM_THREADS=1` in the environment. candle computes element-wise ops of
//! 65,536 elements and more on one pool of spinning threads for the whole process, behind one lock: ranks would wait for each
//! other there. The variable is read at the first such op, so a program can set it at the start of `main`, while it has one
//! thread. A program without it gets one warning.

mod candle_threads;
mod failure;
mod rank;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use crate::comm::MAX_RANKS;
use crate::comm::local::{LocalOptions, LocalWorld};
use crate::comm::tcp::{Place, TcpComm};
use crate::comm::{CommError, Communicator, DeviceMesh};
use crate::mesh::MeshError;
use crate::sync::thread::{self, Builder, Scope, ScopedJoinHandle};

pub use self::failure::{LaunchError, RankEnd, RankFailure};

use self::failure::collect;
use self::rank::{join_rank, run_rank};

/// A rank's view of the ranks that were launched together.
#[derive(Clone)]
pub struct World {
    communicator: Arc<dyn Communicator>,
    local_rank: usize,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("local_rank", &self.local_rank)
            .finish_non_exhaustive()
    }
}

impl World {
    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// This rank's number among those of its machine, from 0: the GPU that it takes.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The communicator of all ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// The ranks along named dims, outermost first; the last one runs fastest. Known dims are `dp_outer`,
    /// `dp_shard`, `cp`, `tp` and `ep`.
    ///
    /// # Errors
    /// If a name is unknown or comes twice, a size is zero, or the product of the sizes is not the number of
    /// ranks.
    pub fn mesh(&self, dims: &[(&str, usize)]) -> Result<DeviceMesh, MeshError> {
        DeviceMesh::new(dims, self.communicator.clone())
    }

    /// All ranks along `dp_shard`.
    pub fn data_parallel_mesh(&self) -> DeviceMesh {
        self.mesh(&[("dp_shard", self.size())]).expect("all ranks along one dim are all ranks")
    }
}

/// Runs `rank_main` on `ranks` threads of this process with the default settings of [`Launcher`], and returns
/// what they returned, by rank. Any error that can be shown will do; a closure says which one it has by its return type,
/// `|world| -> fsdp::Result<()> { .. }`, or by how it ends, `Ok::<_, CommError>(..)`. Without that the compiler asks for it:
///
/// ```compile_fail,E0283
/// fsdp_comm::launch::local(2, |world| {
///     println!("rank {}", world.rank());
///     Ok(())
/// })
/// .unwrap();
/// ```
///
/// # Errors
/// [`LaunchError`], if a rank panicked or returned an error: its peers then get an error from the collective
/// they are in or come to, and all threads have ended when this returns.
///
/// ```
/// use fsdp_comm::comm::{CommError, HostOp, Phase, Tag};
///
/// let sums = fsdp_comm::launch::local(2, |world| {
///     let mut value = [world.rank() as f64 + 1.0];
///     let tag = Tag { unit: "sum".into(), phase: Phase::Setup, step: 0 };
///     world.communicator().host_reduce(tag, HostOp::Sum, &mut value)?;
///     Ok::<_, CommError>(value[0])
/// })?;
/// assert_eq!(sums, [3.0, 3.0]);
/// # Ok::<(), fsdp_comm::launch::LaunchError>(())
/// ```
pub fn local<T, E, F>(ranks: usize, rank_main: F) -> Result<Vec<T>, LaunchError>
where
    T: Send,
    E: fmt::Display + Send,
    F: Fn(World) -> Result<T, E> + Sync,
{
    Launcher::new().ranks(ranks).run(rank_main)
}

/// Runs `rank_main` as one rank of those that `fsdp launch`, `torchrun`, `srun` or `mpirun` has started, as the environment says
/// ([`Place::from_env`]), with the default settings of [`Launcher`].
///
/// Ranks of one machine have collectives on the CPU, in memory that they share
/// ([`comm::shared_memory`](crate::comm::shared_memory), on Linux). Collectives of devices need a communicator by NCCL that is
/// made on this one. On several machines there are only those of the host ([`TcpComm`]), and those of devices.
///
/// Rank 0 listens on `MASTER_ADDR`, or on the address `FSDP_LISTEN`. Ranks on several machines know each other by a secret:
/// set `FSDP_TOKEN` to the same random text for all; [`comm::tcp`](crate::comm::tcp) says what is done without it.
///
/// # Errors
/// [`LaunchError`], if this rank panicked or returned an error, or a collective failed.
pub fn distributed<T, E, F>(rank_main: F) -> Result<T, LaunchError>
where
    T: Send,
    E: fmt::Display + Send,
    F: Fn(World) -> Result<T, E> + Sync,
{
    let place = Place::from_env().map_err(|error| LaunchError::Setting(words(error)))?;
    Launcher::new().join(&place, rank_main)
}

/// Settings of a launch.
#[derive(Clone, Debug)]
pub struct Launcher {
    ranks: usize,
    timeout: Option<Duration>,
    stack_size: usize,
    trace: Option<bool>,
    shake: Option<u64>,
}

impl Default for Launcher {
    fn default() -> Self {
        Launcher::new()
    }
}

impl Launcher {
    /// One rank; a time-out of 300 seconds, or of `FSDP_TIMEOUT_SECS` where that is set; a stack of 256 MiB.
    pub fn new() -> Launcher {
        Launcher { ranks: 1, timeout: None, stack_size: 256 << 20, trace: None, shake: None }
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(mut self, ranks: usize) -> Launcher {
        self.ranks = ranks;
        self
    }

    /// How long a rank waits for its peers in a collective, whatever the environment says. A launch returns
    /// when all its threads have ended: a rank that is late comes to know of the time-out at its next
    /// collective. What ranks do on disks to save or restore a checkpoint may take longer.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Launcher {
        self.timeout = Some(timeout);
        self
    }

    /// Bytes of stack of a rank's thread. Virtual: only what is used is backed by memory. Graphs are walked
    /// and dropped recursively, which needs deep stacks.
    #[must_use]
    pub fn stack_size(mut self, bytes: usize) -> Launcher {
        self.stack_size = bytes;
        self
    }

    /// Whether errors carry the last collectives of every rank, whatever `FSDP_TRACE` says.
    #[must_use]
    pub fn trace(mut self, trace: bool) -> Launcher {
        self.trace = Some(trace);
        self
    }

    /// For tests: short random delays of this seed around every collective, on one rank or on all, as the seed has
    /// it. They change the schedule; what is computed must stay the same to the bit.
    #[must_use]
    pub fn shake(mut self, seed: u64) -> Launcher {
        self.shake = Some(seed);
        self
    }

    /// Runs `rank_main` on one thread a rank (`rank0`, `rank1`, ...) and returns what they returned, by rank.
    ///
    /// A rank's collectives must be finished when it returns: streams it drops are joined, others are to be
    /// synchronised.
    ///
    /// # Errors
    /// As for [`local`].
    pub fn run<T, E, F>(&self, rank_main: F) -> Result<Vec<T>, LaunchError>
    where
        T: Send,
        E: fmt::Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        if self.ranks == 0 {
            return Err(LaunchError::NoRanks);
        }
        if self.ranks > MAX_RANKS {
            return Err(LaunchError::TooManyRanks { ranks: self.ranks });
        }
        candle_threads::tell_of_shared_pool(self.ranks);
        let world = LocalWorld::new(self.ranks, self.options()?);
        let ends = thread::scope(|scope| {
            let mut threads: Vec<ScopedJoinHandle<'_, Result<T, RankEnd>>> = Vec::with_capacity(self.ranks);
            for rank in 0..self.ranks {
                match self.start(scope, &world, rank, &rank_main) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        world.fail(rank, &format!("could not be started: {error}"));
                        // The scope joins the others, which now fail at their next collective.
                        let (stack_size, message) = (self.stack_size, error.to_string());
                        return Err(LaunchError::Start { rank, stack_size, message });
                    }
                }
            }
            Ok(threads.into_iter().map(join_rank).collect::<Vec<_>>())
        })?;
        collect(ends, world.failure())
    }

    /// Runs `rank_main` wherever the program was started: on as many threads of this process as were set ([`Launcher::run`]), or, if a
    /// launcher has started this process as one rank of several ([`Place::launched`]), as that rank ([`Launcher::join`]).
    ///
    /// The result has the values of the ranks in this process, by rank: as a rank of several processes, its own only. The
    /// number of ranks that was set does not count then.
    ///
    /// # Errors
    /// Those of [`Launcher::run`] and [`distributed`].
    pub fn launch<T, E, F>(&self, rank_main: F) -> Result<Vec<T>, LaunchError>
    where
        T: Send,
        E: fmt::Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        match Place::launched().map_err(|error| LaunchError::Setting(words(error)))? {
            Some(place) => Ok(vec![self.join(&place, rank_main)?]),
            None => self.run(rank_main),
        }
    }

    /// Runs `rank_main` on a thread of this process, which is one rank of those that were started together: the one of this
    /// `place`. The number of ranks that was set does not count.
    ///
    /// # Errors
    /// As for [`distributed`].
    pub fn join<T, E, F>(&self, place: &Place, rank_main: F) -> Result<T, LaunchError>
    where
        T: Send,
        E: fmt::Display + Send,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let communicator = TcpComm::join(place, self.options()?)?;
        let Place { rank, local_rank, .. } = *place;
        let end = thread::scope(|scope| {
            let world = World { communicator: on_cpus(&communicator)?, local_rank };
            let thread = Builder::new().name(format!("rank{rank}")).stack_size(self.stack_size);
            let (main, ends) = (&rank_main, &communicator);
            let thread = thread.spawn_scoped(scope, move || run_rank(&**ends, rank, Ok(world), main));
            let thread = thread.map_err(|error| {
                let (stack_size, message) = (self.stack_size, error.to_string());
                LaunchError::Start { rank, stack_size, message }
            })?;
            Ok(join_rank(thread))
        });
        match end.inspect_err(|error: &LaunchError| communicator.leave(Some(&format!("failed: {error}"))))? {
            Ok(value) => match communicator.failure() {
                None => Ok(value),
                Some(error) => {
                    let first = RankFailure { rank, end: RankEnd::Returned(error.to_string()) };
                    Err(LaunchError::Ranks { first, others: Vec::new() })
                }
            },
            Err(end) => Err(LaunchError::Ranks { first: RankFailure { rank, end }, others: Vec::new() }),
        }
    }

    fn options(&self) -> Result<LocalOptions, LaunchError> {
        let mut options = match LocalOptions::from_env() {
            Ok(options) => options,
            Err(_) if self.timeout.is_some() => LocalOptions::default(),
            Err(error) => return Err(LaunchError::Setting(words(error))),
        };
        options.timeout = self.timeout.unwrap_or(options.timeout);
        options.trace = self.trace.unwrap_or(options.trace);
        options.shake = self.shake;
        Ok(options)
    }

    fn start<'scope, T, E, F>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        world: &Arc<LocalWorld>,
        rank: usize,
        rank_main: &'scope F,
    ) -> std::io::Result<ScopedJoinHandle<'scope, Result<T, RankEnd>>>
    where
        T: Send + 'scope,
        E: fmt::Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let world = world.clone();
        Builder::new().name(format!("rank{rank}")).stack_size(self.stack_size).spawn_scoped(
            scope,
            move || {
                let communicator = world.communicator(rank).map_err(|error| error.to_string());
                let own = communicator.map(|communicator| World { communicator, local_rank: rank });
                run_rank(&world, rank, own, rank_main)
            },
        )
    }
}

/// The communicator of ranks that are processes: with collectives on the CPU, where they can share memory.
#[cfg(target_os = "linux")]
fn on_cpus(control: &Arc<TcpComm>) -> Result<Arc<dyn Communicator>, CommError> {
    Ok(crate::comm::shared_memory::SharedMemoryComm::new(control.clone())?)
}

#[cfg(not(target_os = "linux"))]
fn on_cpus(control: &Arc<TcpComm>) -> Result<Arc<dyn Communicator>, CommError> {
    Ok(control.clone())
}

/// A setting that is wrong, without the rank that found it.
fn words(error: CommError) -> String {
    match error {
        CommError::Invalid { message, .. } => message,
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_by_rank() {
        let ranks = local(4, |world| Ok::<_, CommError>((world.rank(), world.size()))).unwrap();
        assert_eq!(ranks, [(0, 4), (1, 4), (2, 4), (3, 4)]);
    }

    #[test]
    fn no_ranks_is_an_error() {
        let error = local(0, |_| Ok::<_, CommError>(())).unwrap_err();
        assert_eq!(error.to_string(), "a launch needs at least one rank, 0 were asked for");
    }

    #[test]
    fn threads_are_named_after_their_rank() {
        let names = local(2, |_| Ok::<_, CommError>(std::thread::current().name().map(str::to_owned)));
        assert_eq!(names.unwrap(), [Some("rank0".to_owned()), Some("rank1".to_owned())]);
    }

    #[test]
    fn a_mesh_of_another_size_than_the_world_is_an_error() {
        let error = local(4, |world| world.mesh(&[("dp_outer", 3), ("dp_shard", 2)]).map(drop)).unwrap_err();
        let message = "mesh dp_outer=3 x dp_shard=2 needs 6 ranks, the world has 4";
        assert!(error.to_string().starts_with("rank "), "{error}");
        assert_eq!(error.to_string().matches(message).count(), 1, "{error}");
    }

    #[test]
    fn all_ranks_shard_by_default() {
        let meshes =
            local(3, |world| Ok::<_, CommError>(format!("{:?}", world.data_parallel_mesh()))).unwrap();
        assert_eq!(meshes[2], "DeviceMesh(dp_shard=3, rank 2 of 3)");
    }

    #[test]
    fn a_stack_that_cannot_be_had_is_an_error() {
        let launcher = Launcher::new().ranks(2).stack_size(1 << 50);
        let error = launcher.run(|_| Ok::<_, CommError>(())).unwrap_err();
        assert!(matches!(error, LaunchError::Start { rank: 0, .. }), "{error}");
    }
}
