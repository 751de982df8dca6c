//! A unit's parameters whole, on every rank, to look at or to change.

use crate::engine::build::agreement::exchange;
use crate::engine::io::load;
use crate::engine::io::replicas::checksum;
use crate::engine::io::whole::{self, Shown};
use crate::engine::{Ctx, Engine, Fsdp, UnitId};
use crate::error::{Error, Result};
use crate::spec::ParamSpec;

/// One whole parameter.
#[derive(Clone, Debug)]
pub struct FullParam {
    /// Name, shape, group.
    pub spec: ParamSpec,
    /// Its elements in row-major order: the main weights where there are any, else the model weights, in f32.
    pub values: Vec<f32>,
}

impl<M> Fsdp<M> {
    /// Gathers the parameters of one unit (`(root)` is the root) and returns them, whole, on every rank.
    ///
    /// # Errors
    /// If there is no unit of this path, and those of the gathers.
    pub fn full_params(&self, unit: &str) -> Result<Vec<FullParam>> {
        let engine = self.engine();
        full_params(engine, engine.ctx.unit_named(unit)?)
    }

    /// Gathers the parameters of one unit (`(root)` is the root), hands them, whole, to `change` on every rank, and
    /// writes their values back, each rank keeping its shard: main weights take them as they are, 16-bit model weights
    /// round them. The optimizer's state stays.
    ///
    /// ```
    /// # use fsdp_runtime::{FullyShard, Init, Param, comm::DeviceMesh};
    /// let mut model = Param::new(3).with_init(Init::Ones).fully_shard(&DeviceMesh::single())?;
    /// let sum = model.with_full_params("", |params| {
    ///     params[0].values[1] = 5.0;
    ///     Ok(params[0].values.iter().sum::<f32>())
    /// })?;
    /// assert_eq!(sum, 7.0);
    /// # Ok::<(), fsdp_runtime::Error>(())
    /// ```
    ///
    /// # Errors
    /// If there is no unit of this path; those of `change`, on any rank, and those of the gathers; if a parameter changes
    /// its number of elements, or the ranks' values differ, naming the parameter and the ranks. Nothing is written if any
    /// rank has an error.
    pub fn with_full_params<T>(
        &mut self,
        unit: &str,
        change: impl FnOnce(&mut [FullParam]) -> Result<T>,
    ) -> Result<T> {
        let engine = self.engine();
        let unit = engine.ctx.unit_named(unit)?;
        let mut params = full_params(engine, unit)?;
        let outcome = change(&mut params);
        let outcome = outcome.and_then(|value| check(&engine.ctx, unit, &params).map(|()| value));
        let value = agree_on_values(engine, unit, outcome, &params)?;
        load::fill_weights(engine, Some(unit), |_, spec, range, out| {
            let param = params.iter().find(|param| param.spec.name == spec.name);
            let param = param.expect("all parameters of the unit were gathered");
            out.copy_from_slice(&param.values[range]);
            Ok(())
        })?;
        Ok(value)
    }
}

/// Checks that the parameters are those of the unit, each once and whole.
fn check(ctx: &Ctx, unit: UnitId, params: &[FullParam]) -> Result<()> {
    for &param in &ctx.unit(unit).params {
        let spec = ctx.spec(param);
        let given = params.iter().filter(|given| given.spec.name == spec.name);
        let given: Vec<usize> = given.map(|given| given.values.len()).collect();
        let message = match given[..] {
            [len] if len == spec.numel() => continue,
            [len] => format!("was given {len} values for its shape {:?}", spec.shape),
            _ => format!("was given {} times, expected once: leave the names as they are", given.len()),
        };
        return Err(Error::Param { param: spec.name.clone(), message });
    }
    Ok(())
}

fn full_params(engine: &Engine, unit: UnitId) -> Result<Vec<FullParam>> {
    let mut params = Vec::new();
    whole::visit(engine, Shown::Weights, Some(unit), |spec, values| {
        params.push(FullParam { spec: spec.clone(), values: values.to_vec() });
        Ok(())
    })?;
    Ok(params)
}

/// Makes sure that no rank has an error, and that all have the same values, to the bit.
fn agree_on_values<T>(engine: &Engine, unit: UnitId, outcome: Result<T>, params: &[FullParam]) -> Result<T> {
    let checksums = |value: T| {
        let checksums = params.iter().flat_map(|param| checksum(&param.values).to_le_bytes());
        (value, checksums.collect())
    };
    let exchanged = exchange(engine, engine.ctx.unit_name(unit), outcome.map(checksums));
    let (value, all) = exchanged.map_err(|error| match error {
        Error::OnRank { failed, message } => {
            let message =
                format!("rank {failed} failed in `with_full_params`, nothing was written: {message}");
            Error::OnRank { failed, message }
        }
        own => own,
    })?;
    for (index, param) in params.iter().enumerate() {
        let of = |said: &[u8]| said.as_chunks::<8>().0.get(index).copied();
        if let Some(other) = all.iter().position(|said| of(said) != of(&all[0])) {
            let message = format!(
                "ranks 0 and {other} have different values for it after `with_full_params`: nothing was written"
            );
            return Err(Error::Param { param: param.spec.name.clone(), message });
        }
    }
    Ok(value)
}
