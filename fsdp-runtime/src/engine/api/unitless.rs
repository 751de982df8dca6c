//! Training forwards that ran no unit. Nothing of theirs notices a backward: candle's own `loss.backward()`, which trains
//! nothing, would go unseen where it comes to no unit. So a backward of the model looks which of them are in the graph of its
//! loss, and a step tells of those that were in none.
//!
//! candle numbers tensors in the order in which they are made. Those of a forward are numbered between two that are made
//! before and after it, and so are those of other threads, which are in no graph of this one.

use std::ops::Range;

use candle_core::{DType, Device, Tensor, TensorId};

use crate::engine::{Ctx, Engine, Fsdp, Step};
use crate::error::{Error, Result};

/// Training forwards that ran no unit and had no backward.
#[derive(Default)]
pub(crate) struct Unitless {
    /// The version of the weights that they saw.
    version: u64,
    /// Numbers of their tensors.
    forwards: Vec<Range<u64>>,
    /// The number before those of the forward that runs.
    began: Option<u64>,
    /// The program was told of some.
    told: bool,
}

impl Unitless {
    /// A forward begins.
    pub(crate) fn begin(&mut self) {
        self.began = next_number();
    }

    /// The training forward that began last has ended, has run no unit, and saw the weights of this version.
    pub(crate) fn end(&mut self, version: u64) {
        if self.version != version {
            self.forwards.clear();
            self.version = version;
        }
        if let (Some(began), Some(ended)) = (self.began.take(), next_number()) {
            self.forwards.push(began..ended);
        }
    }

    /// None of them counts any more.
    pub(crate) fn forget(&mut self) {
        self.forwards.clear();
    }
}

/// The number of a tensor that is made now; `None` if candle shows none.
fn next_number() -> Option<u64> {
    number(Tensor::zeros((), DType::U8, &Device::Cpu).ok()?.id())
}

/// candle shows the number of a tensor nowhere else: `TensorId(7)`.
fn number(id: TensorId) -> Option<u64> {
    let shown = format!("{id:?}");
    let digits = shown.trim_matches(|c: char| !c.is_ascii_digit());
    digits.parse().ok()
}

/// `loss` has had a backward of this model: the forwards in its graph had theirs.
pub(super) fn note_backward_of(engine: &Engine, loss: &Tensor) {
    if engine.step().unitless.forwards.is_empty() {
        return;
    }
    let mut nodes: Vec<u64> = loss.sorted_nodes().into_iter().filter_map(|node| number(node.id())).collect();
    nodes.sort_unstable();
    let is_in = |forward: &Range<u64>| {
        let first = nodes.partition_point(|node| *node < forward.start);
        nodes.get(first).is_some_and(|node| *node < forward.end)
    };
    engine.step().unitless.forwards.retain(|forward| !is_in(forward));
}

/// Before a step: tells of the training forwards of this rank that ran no unit, saw the present weights and had no
/// backward.
///
/// # Errors
/// If there are some, with `strict_gradients`; else it warns of them, once.
pub(crate) fn report(ctx: &Ctx, step: &mut Step) -> Result<()> {
    let forwards = without_backward(step);
    if forwards == 0 || (step.unitless.told && !ctx.config.strict_gradients) {
        return Ok(());
    }
    step.unitless.told = true;
    let (forwards, were) = if forwards == 1 {
        ("1 training forward".to_owned(), "was")
    } else {
        (format!("{forwards} training forwards"), "were")
    };
    let message = format!(
        "{forwards} of model `{}` {were} followed by no backward before this optimizer step, which gets nothing from \
         them: call `model.backward(&loss)` for each (candle's own `loss.backward()` trains nothing here). Where no \
         gradients are wanted, call `model.evaluate(..)`",
        ctx.name
    );
    if ctx.config.strict_gradients {
        return Err(Error::Usage(message));
    }
    fsdp_layout::warning::warn(format_args!("rank {}: {message}", ctx.comm.rank()));
    Ok(())
}

fn without_backward(step: &Step) -> usize {
    if step.unitless.version == step.weights_version { step.unitless.forwards.len() } else { 0 }
}

impl<M> Fsdp<M> {
    /// Number of training forwards since the last change of the weights that ran no [`Unit`](crate::engine::Unit) and are in the
    /// graph of no loss that had its [`backward`](Fsdp::backward). An optimizer step gets nothing from such forwards: it
    /// warns, or fails with [`strict_gradients`](crate::engine::FsdpConfig::strict_gradients). That finds candle's own
    /// `loss.backward()`, which trains nothing; where it comes to a unit it is an error by itself. Local.
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fsdp_runtime::{Forward, FsdpUnit, FullyShard, Param, Scope, comm::DeviceMesh, engine::Walker};
    /// # struct Dot(Param);
    /// # impl FsdpUnit for Dot {
    /// #     fn walk<'a>(&'a self, walker: &mut Walker<'_, 'a>) {
    /// #         self.0.walk(walker);
    /// #     }
    /// # }
    /// # impl Forward for Dot {
    /// #     fn forward(&self, x: &Tensor, _: &(), scope: &Scope<'_>) -> candle_core::Result<Tensor> {
    /// #         (x * self.0.tensor(scope)?)?.sum_all()
    /// #     }
    /// # }
    /// # let model = Dot(Param::new(3)).fully_shard(&DeviceMesh::single())?;
    /// # let x = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
    /// let loss: Tensor = model.forward(&x)?;
    /// loss.backward()?; // candle's
    /// assert_eq!(model.forwards_without_backward(), 1);
    /// model.backward(&loss)?;
    /// assert_eq!(model.forwards_without_backward(), 0);
    /// # Ok::<(), fsdp_runtime::Error>(())
    /// ```
    pub fn forwards_without_backward(&self) -> usize {
        without_backward(&self.engine().step())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_numbered_in_the_order_in_which_they_are_made() {
        let first = next_number().unwrap();
        let between = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let last = next_number().unwrap();
        assert!((first + 1..last).contains(&number(between.id()).unwrap()));
    }
}
