//! Makes all ranks agree on success or failure.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::comm::{Communicator, Phase, Tag, panic_text};
use crate::engine::Engine;
use crate::error::{CheckpointError, Error, Result};
use crate::files::FileLocks;
use crate::files::{Turn, Turns};

/// A group that saves or loads together.
#[derive(Clone)]
pub(super) struct Group {
    pub comm: Arc<dyn Communicator>,
    pub step: u64,
    /// Of the directories that the run saves into.
    pub locks: Arc<FileLocks>,
    turns: Arc<Turns>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group(rank {} of {})", self.comm.rank(), self.comm.size())
    }
}

const FAILED: u8 = 0;
const DONE: u8 = 1;

/// A panic of `work` is an error: peers that wait for this rank are told, and no panic leaves a save.
pub(super) fn caught<T, E: Into<Error>>(work: impl FnOnce() -> Result<T, E>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).map_or_else(
        |panic| Err(CheckpointError::Usage(format!("panicked: {}", panic_text(&*panic))).into()),
        |outcome| outcome.map_err(Into::into),
    )
}

impl Group {
    /// All ranks of the model, at its present step.
    pub fn of(engine: &Engine) -> Group {
        Group {
            comm: engine.ctx.saves.comm.clone(),
            step: engine.step().number,
            locks: engine.ctx.saves.locks.clone(),
            turns: engine.ctx.saves.turns.clone(),
        }
    }

    /// The place of a call among the saves and restores of the model, which come one after the other.
    pub fn turn(&self) -> Turn {
        self.turns.take()
    }

    pub fn is_first(&self) -> bool {
        self.comm.rank() == 0
    }

    /// All ranks are in `what`, or it fails after the time-out. From here on each of them comes to every
    /// [`Group::gather`], and is waited for as long as its disk takes.
    pub fn meet(&self, what: &str) -> Result<()> {
        Ok(self.comm.host_barrier(self.tag(what))?)
    }

    fn tag(&self, what: &str) -> Tag {
        Tag { unit: what.into(), phase: Phase::Checkpoint, step: self.step }
    }

    /// Every rank's bytes, if all ranks come with some; if any comes with an error, the error of the first that does,
    /// on all ranks.
    pub fn gather<E: Into<Error>>(&self, what: &str, own: Result<Vec<u8>, E>) -> Result<Vec<Vec<u8>>> {
        let own = own.map_err(Into::into);
        let bytes = match &own {
            Ok(bytes) => [&[DONE][..], bytes].concat(),
            Err(error) => [&[FAILED][..], error.to_string().as_bytes()].concat(),
        };
        let all = self.comm.host_gather_patiently(self.tag(what), bytes)?;
        let failed = all.iter().position(|bytes| bytes.first() == Some(&FAILED));
        let Some(rank) = failed else {
            return Ok(all.into_iter().map(|mut bytes| bytes.split_off(1)).collect());
        };
        // Where all say the same, no rank is to blame: the error is the typed one.
        match own {
            Err(error) if all.iter().all(|bytes| *bytes == all[rank]) => Err(error),
            _ => {
                let message = String::from_utf8_lossy(&all[rank][1..]).into_owned();
                Err(CheckpointError::OnRank { rank, message }.into())
            }
        }
    }

    /// Fails on all ranks if they are not about to do the same, or one of them cannot. `own` has the parts of what this
    /// rank is to do, by name, and in words that follow `to_do`, which is as "to save".
    pub fn agree(&self, to_do: &str, own: Result<BTreeMap<String, String>, CheckpointError>) -> Result<()> {
        let encoded = own.map(|own| serde_json::to_vec(&own).expect("a map of strings is JSON"));
        let all = self.gather(&format!("what {to_do}"), encoded)?;
        let rank = self.comm.rank();
        let Some(other) = all.iter().position(|theirs| *theirs != all[rank]) else { return Ok(()) };
        let decode =
            |bytes: &[u8]| -> BTreeMap<String, String> { serde_json::from_slice(bytes).unwrap_or_default() };
        let (ours, theirs) = (decode(&all[rank]), decode(&all[other]));
        let differing = ours.keys().chain(theirs.keys()).filter(|name| ours.get(*name) != theirs.get(*name));
        let name = differing.min().map_or("", String::as_str);
        let say = |parts: &BTreeMap<String, String>| match parts.get(name) {
            Some(words) => format!("{to_do} {words}"),
            None => format!("{to_do} no {name}"),
        };
        Err(Error::RanksDiffer { rank, ours: say(&ours), other, theirs: say(&theirs) })
    }

    /// Fails on all ranks if it failed on one.
    pub fn all_done<T, E: Into<Error>>(&self, what: &str, own: Result<T, E>) -> Result<T> {
        let mut value = None;
        let outcome = own.map(|own| value = Some(own)).map(|()| Vec::new());
        self.gather(what, outcome)?;
        Ok(value.expect("all ranks are done"))
    }

    /// What the first rank says; the others' `first` is not called.
    pub fn by_first<E: Into<Error>>(
        &self,
        what: &str,
        first: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>> {
        let own = if self.is_first() { caught(first) } else { Ok(Vec::new()) };
        Ok(self.gather(what, own)?.swap_remove(0))
    }
}
