//! What the ranks must have alike, compared before any of their bytes meet.

use crate::comm::{CommError, Communicator, Phase, Tag};
use crate::engine::build::collect::Collected;
use crate::engine::build::settings::reshard_modes;
use crate::engine::{Ctx, Engine, Fsdp, FsdpConfig, Locked};
use crate::error::{Error, Result};
use crate::layout::ModelLayout;
use crate::mesh::Topology;
use crate::spec::{MixedPrecision, ParamSpec};

/// What a rank's model and configuration are, for comparison with the other ranks'.
pub(crate) fn fingerprint(
    config: &FsdpConfig,
    mesh: &Topology,
    agreed: Result<&(Collected<'_>, ModelLayout), &Error>,
) -> Vec<String> {
    let (collected, layout) = match agreed {
        Ok(agreed) => (&agreed.0, &agreed.1),
        Err(error) => return vec![format!("{FAILED}{error}")],
    };
    // All by name: a setting that is new must say here whether ranks may differ in it. What the precision says of weights is
    // in the line of each parameter, too.
    let FsdpConfig {
        strategy,
        outer,
        alignment,
        precision: MixedPrecision { param, reduce, main_weights, main_grads, cast_inputs, output },
        scaling,
        recompute,
        reshard_after_forward,
        reshard_after_backward,
        prefetch,
        gather_budget,
        reduce_budget,
        double_buffer,
        registration,
        bucket_size,
        seed,
        check_finite,
        non_finite,
        strict_gradients,
        // What a rank looks at and records by itself.
        poison: _,
        step_in_backward,
        trace: _,
    } = config;
    let mut lines = vec![
        format!("mesh {mesh}"),
        format!("strategy {strategy}"),
        format!("outer strategy {outer}"),
        format!("reshard after forward {reshard_after_forward:?}"),
        format!("reshard after backward {reshard_after_backward}"),
        format!("{alignment:?} alignment"),
        format!("reduce dtype {reduce}"),
        format!("main weights {main_weights}, main gradients {main_grads}"),
        format!("cast of inputs {cast_inputs}, output dtype {output:?}"),
        format!("{scaling:?} scaling"),
        format!("prefetch {prefetch}, gather budget {gather_budget:?}, reduce budget {reduce_budget:?}"),
        format!("double buffer {double_buffer}, registration {registration:?}"),
        format!("bucket size {bucket_size:?}"),
        format!("{recompute:?} recomputation"),
        format!("seed {seed}"),
        format!("gradients that are not finite: {non_finite:?}"),
        format!("check finite {check_finite}, strict gradients {strict_gradients}"),
        format!("step in backward {step_in_backward}"),
    ];
    let modes = || collected.units.iter().zip(reshard_modes(&collected.cells, config)).skip(1);
    lines
        .extend(modes().map(|(unit, mode)| format!("unit `{}` resharded after forward {mode:?}", unit.path)));
    lines.extend(collected.variants.iter().map(|(path, name)| {
        let path = if path.is_empty() { "(root)" } else { path };
        format!("`{path}` is the variant `{name}`")
    }));
    // What the parameters are, before where they are: a difference moves all that follows it.
    let shape = |spec: &ParamSpec| {
        let parts = spec.fused.iter().map(|part| format!("{} rows of `{}`", part.rows, part.name));
        let parts = parts.collect::<Vec<_>>().join(", ");
        let fused = if parts.is_empty() { parts } else { format!(", fused of {parts}") };
        format!("`{}` {:?} {}{fused}", spec.name, spec.full_shape(), spec.key.dtype)
    };
    lines.extend(layout.params.iter().map(shape));
    let ties =
        layout.params.iter().flat_map(|spec| spec.aliases.iter().map(move |alias| (alias, &spec.name)));
    lines.extend(ties.map(|(alias, name)| format!("`{alias}` is tied to `{name}`")));
    lines.extend(layout.fingerprint());
    lines.extend(modes().zip(&collected.cells).map(|((unit, reshard), cell)| {
        let recompute = cell.recompute.unwrap_or(config.recompute);
        format!("unit `{}`: reshard after forward {reshard:?}, {recompute:?} recomputation", unit.path)
    }));
    lines.push(format!("weights {param} where nothing else is said"));
    let starts = layout.params.iter().zip(&collected.inits);
    lines.extend(starts.map(|(spec, init)| format!("`{}` starts as {init:?}", spec.name)));
    lines
}

/// Before the message of a rank that has nothing to compare.
const FAILED: char = '\u{1}';

/// Compares `lines` over the ranks, before any of their bytes meet.
///
/// # Errors
/// The first line that differs, with what each of two ranks has.
pub(crate) fn compare(comm: &dyn Communicator, tag: Tag, lines: &[String]) -> Result<()> {
    let ours = lines.join("\n");
    let all = comm.host_gather(tag, ours.clone().into_bytes())?;
    if ours.starts_with(FAILED) {
        // This rank has an error of its own, which says more.
        return Ok(());
    }
    let rank = comm.rank();
    for (other, bytes) in all.iter().enumerate() {
        let theirs = String::from_utf8_lossy(bytes);
        if let Some(message) = theirs.strip_prefix(FAILED) {
            let message = format!("rank {other} failed: {message}");
            return Err(CommError::RankFailed { rank, failed: other, message }.into());
        }
        if theirs == ours {
            continue;
        }
        let (mut ours, mut theirs) = (ours.split('\n'), theirs.split('\n'));
        let mut pair = (ours.next(), theirs.next());
        while pair.0 == pair.1 {
            pair = (ours.next(), theirs.next());
        }
        let describe = |line: Option<&str>| line.unwrap_or("nothing more").to_string();
        return Err(Error::RanksDiffer { rank, ours: describe(pair.0), other, theirs: describe(pair.1) });
    }
    Ok(())
}

/// What each rank brings to the others, and this rank's `T`; or the error of the first rank that has one instead. Who has
/// that very error gets its own, others get [`Error::OnRank`].
///
/// # Errors
/// That error; those of the exchange.
pub(crate) fn exchange<T, E>(
    engine: &Engine,
    what: &str,
    own: Result<(T, Vec<u8>), E>,
) -> Result<(T, Vec<Vec<u8>>), E>
where
    E: From<Error> + std::fmt::Display,
{
    // The first byte tells the two apart.
    let said = match &own {
        Ok((_, bytes)) => [b"\0", bytes.as_slice()].concat(),
        Err(error) => format!("{FAILED}{error}").into_bytes(),
    };
    let all = engine.ctx.host_gather(&mut engine.step(), (what, Phase::Setup), said.clone());
    let mut all = all.map_err(|error| E::from(error.into()))?;
    let failed = all.iter().position(|said| said.starts_with(&[FAILED as u8]));
    if let Some(failed) = failed.filter(|&failed| all[failed] != said) {
        let message = String::from_utf8_lossy(&all[failed][1..]).into_owned();
        return Err(Error::OnRank { failed, message }.into());
    }
    let (value, _) = own?;
    all.iter_mut().for_each(|said| drop(said.drain(..1)));
    Ok((value, all))
}

/// Makes sure that all ranks have the same `lines`. They are waited for without the lock.
pub(crate) fn agree(
    ctx: &Ctx,
    step: &mut Locked<'_>,
    (what, phase): (&str, Phase),
    lines: &[String],
) -> Result<()> {
    let tag = step.tag(what, phase);
    Locked::unlocked(step, || compare(&*ctx.comm, tag, lines))
}

impl<M> Fsdp<M> {
    /// Ends what each rank did by itself, in one way for all: with this rank's value if every rank has one, else with the
    /// error of the first rank that has one. `what` names it if a rank does not come.
    ///
    /// ```
    /// # use fsdp_runtime::{Error, FullyShard, Param, Result};
    /// fsdp_runtime::launch::local(2, |world| -> Result<()> {
    ///     let model = Param::new(3).fully_shard(&world.data_parallel_mesh())?;
    ///     let read = if world.rank() == 1 { Err(Error::Usage("the file is gone".into())) } else { Ok(7) };
    ///     let error = model.agree_on("reading", read).unwrap_err();
    ///     assert_eq!(error.to_string(), "the file is gone");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), fsdp_runtime::launch::LaunchError>(())
    /// ```
    ///
    /// # Errors
    /// The first failed rank's, which other ranks get as [`Error::OnRank`]; those of the exchange.
    pub fn agree_on<T, E>(&self, what: &str, outcome: Result<T, E>) -> Result<T, E>
    where
        E: From<Error> + std::fmt::Display,
    {
        let own = outcome.map(|value| (value, Vec::new()));
        exchange(self.engine(), what, own).map(|(value, _)| value)
    }
}
