//! What the enums and options of a model are: parameters of the same names and shapes may be computed with in another way.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::engine::api::param::Param;
use crate::engine::build::module::{FsdpUnit, Fused, Tie, Visitor, Walker};
use crate::engine::unit::UnitCell;
use crate::spec::Attrs;

/// The live variant of every enum of `model` by its path, as `Act::Relu`. An option that has something is `Some`, one that
/// has nothing is not listed. What is inside another one at the same path is in its brackets: `Some(Act::Relu)`.
pub(crate) fn live_variants<M: FsdpUnit>(model: &M) -> BTreeMap<String, String> {
    struct Variants(BTreeMap<String, Vec<&'static str>>);

    impl<'a> Visitor<'a> for Variants {
        fn param(&mut self, _: &str, _: &Attrs, _: Option<&Tie>, _: Option<&Fused>, _: &'a Param) {}

        fn enter_unit(&mut self, _: &str, _: &'a UnitCell) {}

        fn leave_unit(&mut self) {}

        fn variant(&mut self, path: &str, name: &'static str) {
            match self.0.entry(path.into()) {
                Entry::Vacant(entry) => drop(entry.insert(vec![name])),
                Entry::Occupied(mut entry) => entry.get_mut().push(name),
            }
        }
    }

    let mut found = Variants(BTreeMap::new());
    model.walk(&mut Walker::new(&mut found));
    let nest = |names: Vec<&str>| {
        let inside = names.iter().rev().map(|name| (*name).to_owned());
        inside.reduce(|inner, outer| format!("{outer}({inner})")).unwrap_or_default()
    };
    let named = found.0.into_iter().map(|(path, names)| (path, nest(names)));
    named.filter(|(_, name)| name != "None").collect()
}
