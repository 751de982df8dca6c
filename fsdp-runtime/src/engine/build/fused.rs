//! Fused parameters: the tensors that checkpoints know each as, and that no name means two things.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::engine::{Fused, Param};
use crate::error::{Error, Result};
use crate::spec::FusedPart;

/// A parameter that may be declared to be fused.
pub(super) struct Declared<'a> {
    pub name: &'a str,
    pub fused: Option<&'a Fused>,
    pub param: &'a Param,
    /// Number of parts that tensor parallelism cuts dim 0 in; 1 if it does not.
    pub tp_parts: usize,
}

impl Declared<'_> {
    fn error<T>(&self, message: String) -> Result<T> {
        Err(Error::Param { param: self.name.into(), message })
    }

    /// The parts, none if it is not fused. `is_owner` says that it is tied to no other.
    ///
    /// # Errors
    /// If it is declared twice, has no dims, the rows that it was made with are not those of so many parts, or there
    /// are no such rows and dim 0 is not so many equal parts; or tensor parallelism cannot share each part evenly.
    pub(super) fn parts(&self, is_owner: bool) -> Result<Vec<FusedPart>> {
        let (shape, rows) = (self.param.dims(), self.param.fused_rows());
        let Some(Fused { field, parts, outer }) = self.fused else {
            return match rows {
                Some(rows) if is_owner => self.error(format!(
                    "was made of parts of {rows:?} rows, but nothing names them: write `#[fsdp(fused(..))]`"
                )),
                _ => Ok(Vec::new()),
            };
        };
        if let Some(outer) = outer {
            return self
                .error(format!("both `{outer}` and `{field}` inside it are declared `fused`: say it once"));
        }
        let Some(&size) = shape.first() else {
            return self.error(format!(
                "`{field}` is declared `fused` along dim 0, but its shape {shape:?} has no dims"
            ));
        };
        let rows = match rows {
            Some(rows) if rows.len() != parts.len() => {
                return self.error(format!(
                    "was made of {} parts, of {rows:?} rows, but `fused` names {}: {}",
                    rows.len(),
                    parts.len(),
                    list(parts)
                ));
            }
            Some(rows) if rows.iter().try_fold(0usize, |sum, &rows| sum.checked_add(rows)) != Some(size) => {
                return self.error(format!(
                    "was made of parts of {rows:?} rows, but dim 0 of its shape {shape:?} is {size}"
                ));
            }
            Some(rows) => rows.to_vec(),
            None if !size.is_multiple_of(parts.len()) => {
                return self.error(format!(
                    "dim 0 of its shape {shape:?} is not {} equal parts ({}): say the rows of each with \
                     `Param::with_fused_rows`",
                    parts.len(),
                    list(parts)
                ));
            }
            None => vec![size / parts.len(); parts.len()],
        };
        let mut all = Vec::with_capacity(parts.len());
        for (name, &rows) in parts.iter().zip(&rows) {
            if !rows.is_multiple_of(self.tp_parts) {
                return self.error(format!(
                    "its part `{name}` has {rows} rows, which {} tensor-parallel ranks cannot share evenly",
                    self.tp_parts
                ));
            }
            all.push(FusedPart { name: name.clone(), rows: rows / self.tp_parts, aliases: Vec::new() });
        }
        Ok(all)
    }
}

fn list(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// Makes the parts of a parameter that is tied to `target` other names of the target's `parts`.
///
/// # Errors
/// If it is fused, or was made to be, but not as the target is.
pub(super) fn tie(declared: &Declared<'_>, target: &str, parts: &mut [FusedPart]) -> Result<()> {
    let own = declared.parts(false)?;
    let ours = match declared.param.fused_rows() {
        Some(rows) => rows.to_vec(),
        None if own.is_empty() => return Ok(()),
        None => own.iter().map(|part| part.rows * declared.tp_parts).collect(),
    };
    let theirs: Vec<usize> = parts.iter().map(|part| part.rows * declared.tp_parts).collect();
    if ours != theirs {
        let target_is =
            if theirs.is_empty() { "not fused".into() } else { format!("fused of {theirs:?} rows") };
        return declared.error(format!(
            "(fused of {ours:?} rows) is tied to `{target}` ({target_is}): tied parameters must agree"
        ));
    }
    for (part, own) in parts.iter_mut().zip(own) {
        part.aliases.push(own.name);
    }
    Ok(())
}

/// What has a name.
#[derive(Clone, Copy)]
pub(super) enum Owner<'a> {
    Param,
    Buffer,
    PartOf(&'a str),
}

/// The names of a model.
#[derive(Default)]
pub(super) struct Names<'a>(HashMap<&'a str, Owner<'a>>);

impl<'a> Names<'a> {
    /// # Errors
    /// If something has the name already.
    pub(super) fn claim(&mut self, name: &'a str, ours: Owner<'a>) -> Result<()> {
        let theirs = match self.0.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(ours);
                return Ok(());
            }
            Entry::Occupied(entry) => *entry.get(),
        };
        let error = |param: &str, message: String| Err(Error::Param { param: param.into(), message });
        match (ours, theirs) {
            (Owner::Param, Owner::Param) => {
                error(name, "two parameters have this name; rename one of the fields".into())
            }
            (Owner::Param, Owner::Buffer) | (Owner::Buffer, Owner::Param) => {
                error(name, "a buffer has this name too; rename one of the fields".into())
            }
            (Owner::Buffer, Owner::Buffer) => {
                Err(Error::Usage(format!("two buffers are named `{name}`; rename one of the fields")))
            }
            (Owner::PartOf(param), Owner::Param) | (Owner::Param, Owner::PartOf(param)) => {
                error(param, format!("its part `{name}` has the name of a parameter; rename one of the two"))
            }
            (Owner::PartOf(param), Owner::Buffer) | (Owner::Buffer, Owner::PartOf(param)) => {
                error(param, format!("its part `{name}` has the name of a buffer; rename one of the two"))
            }
            (Owner::PartOf(param), Owner::PartOf(other)) => error(
                param,
                format!("its part `{name}` has the name of a part of `{other}`; rename one of the two"),
            ),
        }
    }
}
