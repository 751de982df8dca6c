//! Lifetimes, type and const parameters, their bounds and defaults.

use super::maker::{Maker, Parameter, Role};
use super::{Dice, Field, Fields, Kind};

impl Maker {
    /// The declaration of the parameters, the where-clause, and `bound = ".."` if that is to be said.
    pub fn generics(&mut self, has_fields: bool) -> (String, String, Option<String>) {
        let mut declared = Vec::new();
        let (mut clause, mut bound) = (Vec::new(), Vec::new());
        if has_fields && self.dice.percent(20) {
            self.lifetimes = vec!["'a", "'walk"][..1 + self.dice.below(2)].to_vec();
            declared.extend(self.lifetimes.iter().map(ToString::to_string));
            if self.lifetimes.len() == 2 && self.dice.percent(50) {
                clause.push("'walk: 'a".to_string());
            }
        }
        let explicit = self.dice.percent(20);
        let count = if self.dice.percent(40) { 1 + self.dice.below(4) } else { 0 };
        let defaults_from = self.dice.below(count + 1);
        for (position, name) in ["T", "Init", "r#dyn", "N"].into_iter().take(count).enumerate() {
            let all = [
                Role::Module,
                Role::Argument,
                Role::Family,
                Role::Other,
                Role::Length,
                Role::Flag,
                Role::Letter,
            ];
            let first = if has_fields { 0 } else { 4 };
            let role = all[first + self.dice.below(all.len() - first)];
            self.parameters.push(Parameter { name, role });
            let (lead, default) = match role {
                Role::Module | Role::Argument => ("", "Leaf"),
                Role::Family => ("", "Leaves"),
                Role::Other => ("", "u8"),
                Role::Length => ("const ", self.dice.pick(&["4", "{ 1 + 1 }", "DIM"])),
                Role::Flag => ("const ", "{ 1 + 1 == 2 }"),
                Role::Letter => ("const ", "'x'"),
            };
            let mut inline = match role {
                Role::Length => ": usize".to_string(),
                Role::Flag => ": bool".to_string(),
                Role::Letter => ": char".to_string(),
                Role::Family => ": Family".to_string(),
                _ if self.dice.percent(20) => ": Sized".to_string(),
                _ => String::new(),
            };
            match role {
                // Inferred, unless the user says all the bounds.
                Role::Module if explicit => bound.push(format!("{name}: FsdpUnit")),
                Role::Family if explicit => bound.push(format!("{name}::Block: FsdpUnit")),
                Role::Argument if explicit => bound.push(format!("{name}: super::prelude::FsdpUnit")),
                Role::Argument if self.dice.percent(50) => clause.push(format!("{name}: FsdpUnit")),
                Role::Argument => inline = ": fsdp::FsdpUnit + Sized".to_string(),
                Role::Other if self.dice.percent(30) => clause.push(format!("for<'x> fn(&'x {name}): Sized")),
                _ => {}
            }
            let default = if position >= defaults_from { format!(" = {default}") } else { String::new() };
            declared.push(format!("{lead}{name}{inline}{default}"));
        }
        let trailing =
            |list: &[String], dice: &mut Dice| if !list.is_empty() && dice.percent(30) { "," } else { "" };
        let parameters = match declared.as_slice() {
            [] => self.dice.pick(&["", "", "<>"]).to_string(),
            some => format!("<{}{}>", some.join(", "), trailing(some, &mut self.dice)),
        };
        let bound =
            explicit.then(|| format!("bound = \"{}{}\"", bound.join(", "), trailing(&bound, &mut self.dice)));
        let clause = match clause.as_slice() {
            [] => self.dice.pick(&["", "", "", "where"]).to_string(),
            some => format!("where {}{}", some.join(", "), trailing(some, &mut self.dice)),
        };
        (parameters, clause, bound)
    }

    /// Lifetimes and types that no field mentions must be in a phantom one.
    pub fn use_parameters(&mut self, alternatives: &mut Vec<Fields>, is_enum: bool) {
        let mentioned = |name: &str| {
            let words = |ty: &str| {
                ty.split(|c: char| !c.is_alphanumeric() && !"_'#".contains(c)).any(|word| word == name)
            };
            alternatives.iter().flat_map(|fields| &fields.list).any(|field| words(&field.ty))
        };
        let consts = [Role::Length, Role::Flag, Role::Letter];
        let mut unused: Vec<String> = Vec::new();
        unused
            .extend(self.lifetimes.iter().filter(|name| !mentioned(name)).map(|name| format!("&{name} ()")));
        let types = self.parameters.iter().filter(|p| !consts.contains(&p.role) && !mentioned(p.name));
        unused.extend(types.map(|p| format!("*const {}", p.name)));
        if unused.is_empty() {
            return;
        }
        if is_enum {
            alternatives.push(Fields {
                variant: "Phantom".to_string(),
                attrs: String::new(),
                kind: Kind::Tuple,
                list: Vec::new(),
            });
        }
        let vis = if is_enum { String::new() } else { self.vis() };
        let field = Field {
            foreign: String::new(),
            words: Vec::new(),
            malformed: String::new(),
            vis,
            name: "phantom".to_string(),
            ty: format!("PhantomData<({},)>", unused.join(", ")),
            is_state: false,
        };
        alternatives.last_mut().expect("a struct has its fields").list.push(field);
    }
}
