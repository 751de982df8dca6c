//! Ways to diverge, and the error that every rank gets: at once where a disagreement or a failure can be known, else
//! within the time-out. Each names the operation, the unit or what is exchanged, and the ranks.

mod alone;
mod calls;
mod failing;
mod groups;
mod late;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use fsdp::launch::{Launcher, World};
use fsdp::prelude::*;

use crate::fixtures::full;

/// What happens to a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mishap {
    Error,
    Panic,
    Sleep,
}

/// Longer than [`PATIENCE`].
const SLEEP: Duration = Duration::from_millis(1600);

impl Mishap {
    fn strike(self) -> Result<()> {
        match self {
            Mishap::Error => candle_core::bail!("bang"),
            Mishap::Panic => panic!("boom"),
            Mishap::Sleep => std::thread::sleep(SLEEP),
        }
        Ok(())
    }
}

/// Where in the life of a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Forward,
    Backward,
    /// The second run of its forward.
    Recompute,
}

/// What a unit is in for, and how often its forward has run.
#[derive(Clone, Default)]
struct Fate {
    mishap: Option<(Place, Mishap)>,
    runs: Arc<AtomicUsize>,
}

impl Fate {
    fn meet(&self, place: Place) -> Result<()> {
        match self.mishap {
            Some((at, mishap)) if at == place => mishap.strike(),
            _ => Ok(()),
        }
    }
}

/// Elements of a weight: every rank has some.
const WIDTH: usize = 40;

/// Multiplies by its weight.
#[derive(FsdpUnit)]
struct Layer {
    w: Param,
}

impl Forward<Fate> for Layer {
    fn forward(&self, x: &Tensor, fate: &Fate, scope: &Scope<'_>) -> Result<Tensor> {
        let first = fate.runs.fetch_add(1, Ordering::Relaxed) == 0;
        fate.meet(if first { Place::Forward } else { Place::Recompute })?;
        (x * self.w.tensor(scope)?)?.apply_op1(Trap(fate.clone()))
    }
}

/// The identity, with a backward that meets the fate.
struct Trap(Fate);

impl CustomOp1 for Trap {
    fn name(&self) -> &'static str {
        "trap"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let start = layout.start_offset();
        let values = x.as_slice::<f32>()?[start..start + layout.shape().elem_count()].to_vec();
        Ok((CpuStorage::F32(values), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.0.meet(Place::Backward)?;
        Ok(Some(grad.clone()))
    }
}

/// Layers that are called in any order.
#[derive(FsdpUnit)]
struct Layers {
    layers: Vec<Unit<Layer>>,
}

/// Which layers to call, and what happens in one of them.
#[derive(Clone)]
struct Plan {
    order: Vec<usize>,
    mishap: Option<(usize, Place, Mishap)>,
}

impl Plan {
    fn order(order: impl Into<Vec<usize>>) -> Plan {
        Plan { order: order.into(), mishap: None }
    }

    /// The four layers, with a mishap in `layers.2` if `armed`.
    fn with(armed: bool, place: Place, mishap: Mishap) -> Plan {
        Plan { mishap: armed.then_some((2, place, mishap)), ..Plan::default() }
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::order([0, 1, 2, 3])
    }
}

impl Forward<(), Plan> for Layers {
    fn forward(&self, plan: &Plan, _: &(), scope: &Scope<'_>) -> Result<Tensor> {
        let mut x = full(WIDTH, 1.0);
        for &layer in &plan.order {
            let mishap = plan.mishap.filter(|(at, ..)| *at == layer).map(|(_, place, what)| (place, what));
            x = self.layers[layer].forward(&x, &Fate { mishap, ..Fate::default() }, scope)?;
        }
        x.sum_all()
    }
}

fn layers(count: usize) -> Layers {
    let layer = || Unit::new(Layer { w: Param::new(WIDTH).with_init(Init::Ones) });
    Layers { layers: (0..count).map(|_| layer()).collect() }
}

/// A model and its optimizer.
struct Training {
    model: Fsdp<Layers>,
    optimizer: ShardedOptimizer<Sgd>,
}

impl Training {
    fn of(model: Fsdp<Layers>) -> fsdp::Result<Training> {
        let optimizer = model.optimizer(Sgd::default())?;
        Ok(Training { model, optimizer })
    }

    /// Layers on `mesh` of which the last one is not used, two steps trained: orders are learnt, and what is compared in the first step is.
    fn begun(mesh: &DeviceMesh, config: &FsdpConfig) -> fsdp::Result<Training> {
        let mut training = Training::of(layers(5).fully_shard_with(mesh, config)?)?;
        training.step(&Plan::default())?;
        training.step(&Plan::default())?;
        Ok(training)
    }

    fn microbatch(&self, plan: &Plan) -> fsdp::Result<()> {
        let loss: Tensor = self.model.forward(plan)?;
        self.model.backward(&loss)
    }

    fn optimize(&mut self) -> fsdp::Result<()> {
        self.optimizer.step(&mut self.model)?;
        Ok(())
    }

    fn step(&mut self, plan: &Plan) -> fsdp::Result<()> {
        self.microbatch(plan)?;
        self.optimize()
    }

    /// Steps as all others, for ranks that do not know yet.
    fn go_on(&mut self) -> fsdp::Result<()> {
        (0..3).try_for_each(|_| self.step(&Plan::default()))
    }
}

/// How a launch ended.
struct Ends {
    /// Each rank's error.
    errors: Vec<Option<String>>,
    launch: String,
    took: Duration,
}

/// The time-out where nothing else ends a divergence.
const PATIENCE: Duration = Duration::from_secs(1);

/// The time-out of runs that must end long before it.
const LONG: Duration = Duration::from_secs(60);

fn launch(
    launcher: &Launcher,
    ranks: usize,
    main: impl Fn(&World) -> fsdp::Result<()> + Send + Sync,
) -> Ends {
    let errors = Mutex::new(vec![None; ranks]);
    let start = Instant::now();
    let launch = launcher.clone().ranks(ranks).run(|world| {
        main(&world).inspect_err(|error| errors.lock().unwrap()[world.rank()] = Some(error.to_string()))
    });
    let took = start.elapsed();
    let launch = launch.expect_err("the ranks should have failed").to_string();
    Ends { errors: errors.into_inner().unwrap(), launch, took }
}

/// A run whose end does not take a time-out.
fn at_once(ranks: usize, main: impl Fn(&World) -> fsdp::Result<()> + Send + Sync) -> Ends {
    let ends = launch(&Launcher::new().timeout(LONG), ranks, main);
    assert!(ends.took < LONG / 2, "{:?}: {}", ends.took, ends.launch);
    ends
}

/// A run that only a time-out ends.
fn in_time(ranks: usize, main: impl Fn(&World) -> fsdp::Result<()> + Send + Sync) -> Ends {
    let ends = launch(&Launcher::new().timeout(PATIENCE), ranks, main);
    assert!(ends.took < LONG / 2, "{:?}: {}", ends.took, ends.launch);
    ends.every_rank_says(&["timed out after 1s", "missing: ["])
}

impl Ends {
    /// Every rank has an error, and all of them say `parts`.
    #[track_caller]
    fn every_rank_says(self, parts: &[&str]) -> Ends {
        let ranks: Vec<usize> = (0..self.errors.len()).collect();
        self.ranks_say(&ranks, parts)
    }

    /// The same for all ranks but one, which has panicked or returned.
    #[track_caller]
    fn all_but(self, rank: usize, parts: &[&str]) -> Ends {
        assert_eq!(self.errors[rank], None);
        let others: Vec<usize> = (0..self.errors.len()).filter(|other| *other != rank).collect();
        self.ranks_say(&others, parts)
    }

    #[track_caller]
    fn ranks_say(self, ranks: &[usize], parts: &[&str]) -> Ends {
        for &rank in ranks {
            let error = self.errors[rank].as_ref();
            let error = error.unwrap_or_else(|| panic!("rank {rank} has no error: {}", self.launch));
            for part in parts {
                assert!(error.contains(part), "rank {rank} should say `{part}`: {error}");
            }
        }
        self
    }
}
