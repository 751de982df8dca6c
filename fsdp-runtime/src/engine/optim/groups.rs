//! Which parameter of a model is in which parameter group of its optimizer.

use std::fmt;

use crate::engine::{ParamId, Table};
use crate::error::{Error, Result};
use crate::layout::ModelLayout;
use crate::optim::ParamGroup;
use crate::spec::ParamSpec;

/// The parameter groups of an optimizer and their members. Frozen parameters are in none.
///
/// Its `Display` is a line a group, each followed by its parameters.
#[derive(Clone, Debug)]
pub struct ParamGroups {
    groups: Vec<ParamGroup>,
    /// Name of each trainable parameter and index of its group, in declaration order.
    members: Vec<(String, usize)>,
    /// Group of each physical parameter of the layout.
    of_param: Table<ParamId, Option<usize>>,
}

impl ParamGroups {
    /// Puts every trainable parameter of `layout` into the group that `assign` says.
    pub(crate) fn new(
        layout: &ModelLayout,
        mut assign: impl FnMut(&ParamSpec) -> ParamGroup,
    ) -> Result<Self> {
        let (mut groups, mut members, mut of_param) = (Vec::<ParamGroup>::new(), Vec::new(), Vec::new());
        for spec in &layout.params {
            if !spec.key.requires_grad {
                of_param.push(None);
                continue;
            }
            let group = assign(spec);
            let known = groups.iter().position(|known| known.name() == group.name());
            if let Some(known) = known.filter(|&known| groups[known] != group) {
                let first = members.iter().find(|(_, index): &&(String, usize)| *index == known);
                return Err(Error::Config(format!(
                    "two parameter groups have one name: `{}` is in {}, `{}` in {group}",
                    first.map_or("", |(name, _)| name),
                    groups[known],
                    spec.name,
                )));
            }
            let index = known.unwrap_or_else(|| {
                groups.push(group);
                groups.len() - 1
            });
            of_param.push(Some(index));
            members.push((spec.name.clone(), index));
        }
        Ok(ParamGroups { groups, members, of_param: of_param.into() })
    }

    /// The groups that have members, in the order of their first.
    pub fn groups(&self) -> &[ParamGroup] {
        &self.groups
    }

    /// Each trainable parameter and its group, in declaration order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ParamGroup)> {
        self.members.iter().map(|(name, group)| (name.as_str(), &self.groups[*group]))
    }

    /// The group of the parameter of this name; `None` if it is frozen or does not exist.
    pub fn group_of(&self, name: &str) -> Option<&ParamGroup> {
        self.iter().find(|(member, _)| *member == name).map(|(_, group)| group)
    }

    /// The group of a parameter of the layout, which must be trainable.
    pub(crate) fn of(&self, param: ParamId) -> &ParamGroup {
        &self.groups[self.of_param[param].expect("a trainable parameter is in a group")]
    }

    /// Whether a parameter of the layout is in a group: whether it is trainable.
    pub(crate) fn contains(&self, param: ParamId) -> bool {
        self.of_param[param].is_some()
    }

    /// A line a parameter, for comparison with the other ranks.
    pub(crate) fn fingerprint(&self) -> impl Iterator<Item = String> {
        self.iter().map(|(name, group)| format!("`{name}` in optimizer group {group}"))
    }
}

impl fmt::Display for ParamGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, group) in self.groups.iter().enumerate() {
            writeln!(f, "{group}:")?;
            for (name, _) in self.members.iter().filter(|(_, member)| *member == index) {
                writeln!(f, "  {name}")?;
            }
        }
        Ok(())
    }
}
