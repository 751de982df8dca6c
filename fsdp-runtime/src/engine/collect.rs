//! From a walk over the user's model to physical parameters: names, attributes, ties, owners.

use std::collections::HashMap;

use super::config::FsdpConfig;
use super::module::{Attrs, FsdpUnit, Tie, Visitor, Walker};
use super::param::Param;
use super::unit::UnitCell;
use crate::error::{Error, Result};
use crate::layout::UnitSpec;
use crate::spec::{GroupKey, ParamSpec};

/// A use of a parameter: one name, one handle.
pub(crate) struct Use<'a> {
    pub name: String,
    pub param: &'a Param,
    /// Index of the physical parameter.
    pub slot: usize,
}

/// What a model consists of.
pub(crate) struct Collected<'a> {
    pub units: Vec<UnitSpec>,
    /// One less than `units`: the root has no cell.
    pub cells: Vec<&'a UnitCell>,
    pub uses: Vec<Use<'a>>,
    pub specs: Vec<ParamSpec>,
}

struct Found<'a> {
    name: String,
    attrs: Attrs,
    tie: Option<Tie>,
    param: &'a Param,
    unit: usize,
}

struct Collector<'a> {
    units: Vec<UnitSpec>,
    cells: Vec<&'a UnitCell>,
    open: Vec<usize>,
    found: Vec<Found<'a>>,
}

impl<'a> Visitor<'a> for Collector<'a> {
    fn param(&mut self, name: &str, attrs: &Attrs, tie: Option<&Tie>, param: &'a Param) {
        let unit = self.open.last().copied().unwrap_or(0);
        self.found.push(Found { name: name.into(), attrs: *attrs, tie: tie.cloned(), param, unit });
    }

    fn enter_unit(&mut self, path: &str, cell: &'a UnitCell) {
        self.open.push(self.units.len());
        self.units.push(UnitSpec { path: path.into() });
        self.cells.push(cell);
    }

    fn leave_unit(&mut self) {
        self.open.pop();
    }
}

fn param_error(param: &str, message: impl Into<String>) -> Error {
    Error::Param { param: param.into(), message: message.into() }
}

/// Walks `model` and resolves what the walk finds.
///
/// # Errors
/// Two parameters of one name; a tie to a parameter that does not exist or differs in shape, dtype or
/// trainability; a parameter that is part of a sharded model already.
pub(crate) fn collect<'a, M: FsdpUnit>(model: &'a M, config: &FsdpConfig) -> Result<Collected<'a>> {
    let mut collector = Collector {
        units: vec![UnitSpec { path: String::new() }],
        cells: Vec::new(),
        open: Vec::new(),
        found: Vec::new(),
    };
    model.walk(&mut Walker::new(&mut collector));
    let Collector { units, cells, found, .. } = collector;
    for (index, cell) in cells.iter().enumerate() {
        if let Some(first) = cells[..index].iter().position(|other| std::ptr::eq(*other, *cell)) {
            return Err(Error::Usage(format!(
                "unit `{}` is the same `Unit` as `{}`: hold it once and call it twice",
                units[index + 1].path,
                units[first + 1].path
            )));
        }
    }

    let mut by_name = HashMap::new();
    for (index, item) in found.iter().enumerate() {
        if by_name.insert(item.name.as_str(), index).is_some() {
            return Err(param_error(&item.name, "two parameters have this name; rename one of the fields"));
        }
        if !item.param.init().is_finite() {
            let message = format!("its initial value {:?} is not finite", item.param.init());
            return Err(param_error(&item.name, message));
        }
        if let Some(bound) = item.param.bound() {
            let message = format!("is part of a sharded model already, as `{}`", bound.name);
            return Err(param_error(&item.name, message));
        }
    }

    let owners = owners(&found, &by_name)?;
    let key = |item: &Found<'_>| GroupKey {
        dtype: item.attrs.dtype.or(item.param.own_dtype()).unwrap_or(config.precision.param),
        expert: item.attrs.expert.unwrap_or(false),
        requires_grad: !item.attrs.frozen.unwrap_or(false),
        unit: item.unit,
    };
    let mut specs: Vec<ParamSpec> = Vec::new();
    let mut slot_of = vec![usize::MAX; found.len()];
    for (index, item) in found.iter().enumerate() {
        if owners[index] == index {
            slot_of[index] = specs.len();
            specs.push(ParamSpec {
                name: item.name.clone(),
                shape: item.param.dims().to_vec(),
                key: key(item),
                no_decay: item.attrs.no_decay.unwrap_or(false),
                tp: item.attrs.tp,
                shared: false,
            });
        }
    }
    for (index, item) in found.iter().enumerate() {
        let owner = owners[index];
        if owner == index {
            continue;
        }
        let slot = slot_of[owner];
        slot_of[index] = slot;
        let spec = &mut specs[slot];
        if spec.shape != item.param.dims() {
            return Err(param_error(
                &item.name,
                format!(
                    "is tied to `{}`, whose shape is {:?}, not {:?}",
                    spec.name,
                    spec.shape,
                    item.param.dims()
                ),
            ));
        }
        let (ours, theirs) = (key(item), spec.key);
        if (ours.dtype, ours.requires_grad, ours.expert)
            != (theirs.dtype, theirs.requires_grad, theirs.expert)
        {
            let describe = |key: GroupKey| {
                format!(
                    "{}{}{}",
                    key.dtype,
                    if key.requires_grad { "" } else { ", frozen" },
                    if key.expert { ", expert" } else { "" }
                )
            };
            return Err(param_error(
                &item.name,
                format!(
                    "({}) is tied to `{}` ({}): tied parameters must agree",
                    describe(ours),
                    spec.name,
                    describe(theirs)
                ),
            ));
        }
        // Used in two units, it must be whole whenever either runs: the root is.
        if item.unit != spec.key.unit {
            spec.key.unit = 0;
        }
        spec.shared = spec.key.unit == 0;
    }
    let uses = found.iter().zip(&slot_of).map(|(item, &slot)| Use {
        name: item.name.clone(),
        param: item.param,
        slot,
    });
    Ok(Collected { units, cells, uses: uses.collect(), specs })
}

/// For each parameter found, the one whose storage it shares: itself, the first clone of it, or the target of
/// its tie.
fn owners(found: &[Found<'_>], by_name: &HashMap<&str, usize>) -> Result<Vec<usize>> {
    let mut first_of = HashMap::new();
    let mut target_of = Vec::with_capacity(found.len());
    for (index, item) in found.iter().enumerate() {
        let clone_of = *first_of.entry(item.param.id()).or_insert(index);
        let target = match &item.tie {
            None => clone_of,
            Some(tie) => {
                let target =
                    by_name.get(tie.relative.as_str()).or_else(|| by_name.get(tie.absolute.as_str()));
                *target.ok_or_else(|| {
                    let names = if tie.relative == tie.absolute {
                        format!("`{}`", tie.relative)
                    } else {
                        format!("`{}` nor `{}`", tie.relative, tie.absolute)
                    };
                    param_error(&item.name, format!("is tied to a parameter that does not exist: no {names}"))
                })?
            }
        };
        target_of.push(target);
    }
    let mut owners = Vec::with_capacity(found.len());
    for start in 0..found.len() {
        let mut at = start;
        // A chain longer than the list is a cycle.
        for _ in 0..=found.len() {
            if target_of[at] == at {
                break;
            }
            at = target_of[at];
        }
        if target_of[at] != at {
            let message = format!("is tied in a circle through `{}`", found[target_of[start]].name);
            return Err(param_error(&found[start].name, message));
        }
        owners.push(at);
    }
    Ok(owners)
}
