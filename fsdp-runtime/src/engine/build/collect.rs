//! From a walk over the user's model to physical parameters: names, attributes, ties, owners.

use std::collections::HashMap;

use candle_core::Tensor;

use crate::engine::build::fused::{self, Declared, Names, Owner};
use crate::engine::{FsdpConfig, FsdpUnit, Fused, Id, Param, ParamId, Tie, UnitCell, Visitor, Walker};
use crate::error::{Error, Result};
use crate::init::Init;
use crate::layout::UnitSpec;
use crate::mesh::{MeshDim, Topology};
use crate::spec::{Attrs, GroupKey, ParamSpec, TpPlacement};

/// A use of a parameter: one name, one handle.
pub(crate) struct Use<'a> {
    pub name: String,
    pub param: &'a Param,
    pub param_id: ParamId,
}

/// What a model consists of.
pub(crate) struct Collected<'a> {
    pub units: Vec<UnitSpec>,
    /// One less than `units`: the root has no cell.
    pub cells: Vec<&'a UnitCell>,
    pub uses: Vec<Use<'a>>,
    pub specs: Vec<ParamSpec>,
    /// Initial value of each physical parameter: that of its first use.
    pub inits: Vec<Init>,
    /// All buffers, in declaration order.
    pub buffers: Vec<Tensor>,
    /// Paths of enums, and the variants they are.
    pub variants: Vec<(String, &'static str)>,
}

struct Found<'a> {
    name: String,
    attrs: Attrs,
    tie: Option<Tie>,
    fused: Option<Fused>,
    param: &'a Param,
    unit: usize,
}

struct Collector<'a> {
    units: Vec<UnitSpec>,
    cells: Vec<&'a UnitCell>,
    open: Vec<usize>,
    found: Vec<Found<'a>>,
    buffers: Vec<(String, Tensor)>,
    variants: Vec<(String, &'static str)>,
}

impl<'a> Visitor<'a> for Collector<'a> {
    fn param(
        &mut self,
        name: &str,
        attrs: &Attrs,
        tie: Option<&Tie>,
        fused: Option<&Fused>,
        param: &'a Param,
    ) {
        let unit = self.open.last().copied().unwrap_or(0);
        let (name, tie, fused) = (name.into(), tie.cloned(), fused.cloned());
        self.found.push(Found { name, attrs: *attrs, tie, fused, param, unit });
    }

    fn enter_unit(&mut self, path: &str, cell: &'a UnitCell) {
        let unit = UnitSpec { enclosing: self.open.last().copied(), ..UnitSpec::new(path) };
        self.open.push(self.units.len());
        self.units.push(unit);
        self.cells.push(cell);
    }

    fn leave_unit(&mut self) {
        self.open.pop();
    }

    fn buffer(&mut self, name: &str, tensor: &'a Tensor) {
        self.buffers.push((name.into(), tensor.clone()));
    }

    fn variant(&mut self, path: &str, name: &'static str) {
        self.variants.push((path.into(), name));
    }
}

impl Found<'_> {
    fn init(&self) -> Init {
        self.attrs.init.unwrap_or(*self.param.init())
    }

    fn requires_grad(&self) -> bool {
        self.param.own_requires_grad().unwrap_or(!self.attrs.frozen.unwrap_or(false))
    }

    /// What is wrong with the parameter by itself.
    fn check(&self) -> Result<()> {
        let error = |message| Err(param_error(&self.name, message));
        if let Some(wrong) = self.init().check() {
            return error(format!("its initial value {:?} {wrong}", self.init()));
        }
        if let Some(bound) = self.param.bound() {
            return error(format!("is part of a sharded model already, as `{}`", bound.name));
        }
        if let Some(declared) = self.attrs.shape
            && declared != self.param.dims()
        {
            let made = self.param.dims();
            return error(format!("its declared shape is {declared:?}, but it was made with {made:?}"));
        }
        Ok(())
    }

    /// The shape of the part that one tensor-parallel rank holds, and the number of parts.
    fn tp_part(&self, mesh: &Topology) -> Result<(Vec<usize>, usize)> {
        let mut shape = self.param.dims().to_vec();
        let Some((placement, dim)) = self.attrs.tp.and_then(|tp| Some((tp, tp.dim()?))) else {
            return Ok((shape, 1));
        };
        let Some(&size) = shape.get(dim) else {
            let message =
                format!("`tp = {placement}` cuts dim {dim}, which its shape {shape:?} does not have");
            return Err(param_error(&self.name, message));
        };
        let parts = mesh.size(MeshDim::Tp);
        if !size.is_multiple_of(parts) {
            let message = format!(
                "`tp = {placement}` cuts dim {dim} of its shape {shape:?}, but {size} cannot be shared evenly by the \
                 {parts} tensor-parallel ranks of mesh {mesh}"
            );
            return Err(param_error(&self.name, message));
        }
        shape[dim] /= parts;
        Ok((shape, parts))
    }

    fn declared(&self, mesh: &Topology) -> Declared<'_> {
        let cut = self.attrs.tp.and_then(TpPlacement::dim) == Some(0);
        let tp_parts = if cut { mesh.size(MeshDim::Tp) } else { 1 };
        Declared { name: &self.name, fused: self.fused.as_ref(), param: self.param, tp_parts }
    }
}

fn param_error(param: &str, message: impl Into<String>) -> Error {
    Error::Param { param: param.into(), message: message.into() }
}

/// Walks `model` and resolves what the walk finds.
///
/// # Errors
/// A name that two parameters, buffers or parts of fused parameters have; a tie to a parameter that does not exist or differs in shape, dtype or
/// trainability; a fused parameter that is not the parts it is declared to be; a parameter that is part of a sharded model already, that has not the shape declared for it,
/// or whose tensor-parallel dim does not exist or cannot be shared evenly.
pub(crate) fn collect<'a, M: FsdpUnit>(
    model: &'a M,
    config: &FsdpConfig,
    mesh: &Topology,
) -> Result<Collected<'a>> {
    let mut collector = Collector {
        units: vec![UnitSpec::new("")],
        cells: Vec::new(),
        open: Vec::new(),
        found: Vec::new(),
        buffers: Vec::new(),
        variants: Vec::new(),
    };
    model.walk(&mut Walker::new(&mut collector));
    let Collector { units, cells, found, buffers, variants, .. } = collector;
    for (index, cell) in cells.iter().enumerate() {
        if let Some(first) = cells[..index].iter().position(|other| std::ptr::eq(*other, *cell)) {
            return Err(Error::Usage(format!(
                "unit `{}` is the same `Unit` as `{}`: hold it once and call it twice",
                units[index + 1].path,
                units[first + 1].path
            )));
        }
    }

    let mut names = Names::default();
    for item in &found {
        names.claim(&item.name, Owner::Param)?;
        item.check()?;
    }
    for (name, _) in &buffers {
        names.claim(name, Owner::Buffer)?;
    }
    for (item, fused) in found.iter().filter_map(|item| Some((item, item.fused.as_ref()?))) {
        fused.parts.iter().try_for_each(|part| names.claim(part, Owner::PartOf(&item.name)))?;
    }

    let by_name: HashMap<&str, usize> =
        found.iter().enumerate().map(|(index, item)| (item.name.as_str(), index)).collect();
    let owners = owners(&found, &by_name)?;
    let key = |item: &Found<'_>| GroupKey {
        dtype: item.attrs.dtype.or(item.param.own_dtype()).unwrap_or(config.precision.param),
        expert: item.attrs.expert.unwrap_or(false),
        requires_grad: item.requires_grad(),
        unit: item.unit,
    };
    let mut specs: Vec<ParamSpec> = Vec::new();
    let mut inits = Vec::new();
    let mut slot_of = vec![usize::MAX; found.len()];
    for (index, item) in found.iter().enumerate() {
        if owners[index] == index {
            slot_of[index] = specs.len();
            inits.push(item.init());
            let (shape, tp_parts) = item.tp_part(mesh)?;
            specs.push(ParamSpec {
                name: item.name.clone(),
                shape,
                key: key(item),
                no_decay: item.attrs.no_decay.unwrap_or(false),
                tp: item.attrs.tp,
                tp_parts,
                shared: false,
                aliases: Vec::new(),
                fused: item.declared(mesh).parts(true)?,
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
        let (theirs, ours) = (spec.full_shape(), item.param.dims());
        if theirs != ours {
            let message = format!("is tied to `{}`, whose shape is {theirs:?}, not {ours:?}", spec.name);
            return Err(param_error(&item.name, message));
        }
        let (ours, theirs) = (key(item), spec.key);
        let dim = item.attrs.tp.and_then(TpPlacement::dim);
        if (ours.dtype, ours.requires_grad, ours.expert, dim)
            != (theirs.dtype, theirs.requires_grad, theirs.expert, spec.partition_dim())
        {
            let describe = |key: GroupKey, tp: Option<TpPlacement>| {
                format!(
                    "{}{}{}{}",
                    key.dtype,
                    if key.requires_grad { "" } else { ", frozen" },
                    if key.expert { ", expert" } else { "" },
                    tp.map(|tp| format!(", tp = {tp}")).unwrap_or_default(),
                )
            };
            return Err(param_error(
                &item.name,
                format!(
                    "({}) is tied to `{}` ({}): tied parameters must agree",
                    describe(ours, item.attrs.tp),
                    spec.name,
                    describe(theirs, spec.tp)
                ),
            ));
        }
        fused::tie(&item.declared(mesh), &spec.name, &mut spec.fused)?;
        // A clone at the same place has the same name.
        if item.name != spec.name {
            spec.aliases.push(item.name.clone());
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
        param_id: ParamId::new(slot),
    });
    let buffers = buffers.into_iter().map(|(_, tensor)| tensor).collect();
    Ok(Collected { units, cells, uses: uses.collect(), specs, inits, buffers, variants })
}

/// Every parameter of `model`, one entry a name.
pub(crate) fn collect_params<M: FsdpUnit>(model: &M) -> Vec<&Param> {
    struct Params<'a>(Vec<&'a Param>);

    impl<'a> Visitor<'a> for Params<'a> {
        fn param(&mut self, _: &str, _: &Attrs, _: Option<&Tie>, _: Option<&Fused>, param: &'a Param) {
            self.0.push(param);
        }
    }

    let mut params = Params(Vec::new());
    model.walk(&mut Walker::new(&mut params));
    params.0
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
                let target = *target.ok_or_else(|| {
                    let names = if tie.relative == tie.absolute {
                        format!("`{}`", tie.relative)
                    } else {
                        format!("`{}` nor `{}`", tie.relative, tie.absolute)
                    };
                    param_error(&item.name, format!("is tied to a parameter that does not exist: no {names}"))
                })?;
                // A clone of its target need not be told so. Of the elements of a list that are all tied to one of
                // them, that one is tied to itself.
                if found[target].param.id() == item.param.id() { clone_of } else { target }
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
