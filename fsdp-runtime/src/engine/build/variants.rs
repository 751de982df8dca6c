//! What the enums and options of a model are: parameters of the same names and shapes may be computed with in another way.

use std::collections::BTreeMap;

use crate::engine::{FsdpUnit, Visitor, Walker};

/// The live variant of every enum of `model` by its path, as `Act::Relu`. An option that has something is `Some`, one that
/// has nothing is not listed. What is inside another one at the same path is in its brackets: `Some(Act::Relu)`.
pub(crate) fn live_variants<M: FsdpUnit>(model: &M) -> BTreeMap<String, String> {
    struct Variants(BTreeMap<String, Vec<&'static str>>);

    impl Visitor<'_> for Variants {
        fn variant(&mut self, path: &str, name: &'static str) {
            self.0.entry(path.into()).or_default().push(name);
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
