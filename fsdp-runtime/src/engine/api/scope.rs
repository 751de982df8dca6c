//! The token that proves a unit is unsharded.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::engine::{Engine, Param, UnitId};
use crate::error::Error;
use crate::random::{RandomKey, RandomStream};

/// Proof that one unit's parameters are whole. Only the runtime makes one, for the duration of the unit's
/// forward (and of its recomputation); it cannot leave that call and cannot cross threads.
pub struct Scope<'a> {
    frame: &'a Frame,
    _not_send: PhantomData<*const ()>,
}

/// Where and how a module runs, the first time and again.
#[derive(Clone)]
pub(crate) struct Place {
    pub engine: Arc<Engine>,
    pub unit: UnitId,
    /// Units around this one, whose parameters are whole as well.
    pub enclosing: Vec<UnitId>,
    pub training: bool,
    /// It, or one around it, is run again in a backward.
    pub recomputing: bool,
    /// What random numbers depend on.
    pub random: RandomKey,
}

/// What the runtime knows about the forward that a scope stands for.
pub(crate) struct Frame {
    pub place: Place,
    /// Build the autograd graph.
    pub track: bool,
    /// Streams drawn from, and units called, so far.
    draws: AtomicU64,
    /// Parameters of enclosing units that were read: their gradients appear in this unit's graph.
    pub borrowed: Mutex<Vec<Param>>,
}

impl Frame {
    pub(crate) fn new(place: Place, track: bool) -> Frame {
        Frame { place, track, draws: Default::default(), borrowed: Default::default() }
    }

    pub(crate) fn scope(&self) -> Scope<'_> {
        Scope { frame: self, _not_send: PhantomData }
    }

    /// What the random numbers of the next thing that this forward does depend on.
    pub(crate) fn next_random(&self) -> RandomKey {
        self.place.random.of(self.draws.fetch_add(1, Ordering::Relaxed))
    }
}

impl Scope<'_> {
    /// True in training, false in evaluation.
    pub fn is_training(&self) -> bool {
        self.frame.place.training
    }

    /// True while a backward runs a forward again (see [`Recompute`](crate::engine::Recompute)), whose output is that of the first
    /// time. What the model knows of needs no care: buffers keep what they hold, and random streams begin anew. A module
    /// that counts or logs elsewhere asks here.
    pub fn is_recomputing(&self) -> bool {
        self.frame.place.recomputing
    }

    /// A stream of random numbers, another one at each call: the same when the forward is recomputed, and, for a
    /// sample of the global batch, on any number of ranks if [`set_first_sample`](crate::engine::Fsdp::set_first_sample)
    /// says which samples this rank has.
    pub fn random_stream(&self) -> RandomStream {
        let RandomKey { key, first_sample } = self.frame.next_random();
        RandomStream::new(key, first_sample)
    }

    /// Path of the unit this scope is for; empty for the root.
    pub fn unit(&self) -> &str {
        &self.frame.place.engine.ctx.unit(self.frame.place.unit).path
    }

    pub(crate) fn frame(&self) -> &Frame {
        self.frame
    }

    pub(crate) fn read(&self, param: &Param) -> candle_core::Result<Tensor> {
        let Frame { place: Place { engine, unit, enclosing, .. }, track, borrowed, .. } = self.frame;
        let (ctx, read_in) = (&engine.ctx, engine.ctx.unit_name(*unit));
        let Some(bound) = param.bound().filter(|bound| bound.engine == engine.id()) else {
            let message = format!(
                "has no place in the sharded model: it was not there (or was skipped) when the model was sharded; \
                 read in the forward of unit `{read_in}`"
            );
            let param = param.name().unwrap_or("(unnamed)").to_string();
            return Err(Error::Param { param, message }.into());
        };
        if bound.unit != *unit {
            if !enclosing.contains(&bound.unit) {
                let message = format!(
                    "belongs to unit `{}`, which is sharded; it was read in the forward of unit `{read_in}`",
                    ctx.unit_name(bound.unit)
                );
                return Err(Error::Param { param: bound.name.clone(), message }.into());
            }
            if bound.requires_grad && *track {
                borrowed.lock().push(param.clone());
            }
        }
        ctx.params[bound.param].read.store(true, Ordering::Relaxed);
        Ok(if *track { bound.variable.clone() } else { bound.variable.detach() })
    }
}

impl std::fmt::Debug for Scope<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Place { engine, unit, .. } = &self.frame.place;
        write!(f, "Scope({})", engine.ctx.unit_name(*unit))
    }
}
