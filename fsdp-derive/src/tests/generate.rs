//! Makes items that `#[derive(FsdpUnit)]` must accept, as text: every kind of item, generics, field, type,
//! attribute and spelling that the documentation allows, mixed at random but the same on every run.
//!
//! Plain std and one file, because it is read twice: here, where the derive is a function of tokens, and by the
//! root package's `tests/ui.rs`, where rustc compiles what it makes.

use std::collections::BTreeSet;

/// splitmix64: enough to pick, the same on every run.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    /// True so many times in a hundred.
    pub fn percent(&mut self, chance: usize) -> bool {
        self.below(100) < chance
    }

    pub fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

/// What the items refer to; they reach it as `super::prelude`.
pub const PRELUDE: &str = "\
pub use std::{cell::RefCell, collections::{BTreeMap, HashMap}, marker::PhantomData, sync::{Arc, Mutex}};
pub use candle_core::Tensor;
pub use fsdp::{self, FsdpUnit, Param, Unit};
pub const DIM: usize = 8;
pub const RANKS: usize = 2;
pub const STD: f32 = 0.02;
pub const fn size(n: usize) -> usize { 2 * n }
#[derive(FsdpUnit)] pub struct Leaf { pub weight: Param }
#[derive(FsdpUnit)] pub struct Outer<M> { pub module: M }
pub trait Family { type Block; }
pub struct Leaves;
impl Family for Leaves { type Block = Leaf; }
";

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Named,
    Tuple,
    Unit,
}

/// A field, in the parts that make its text.
#[derive(Clone)]
pub struct Field {
    /// Attributes of others.
    pub foreign: String,
    /// The words of its `#[fsdp(..)]` lists, each with its value.
    pub words: Vec<String>,
    /// Attributes that are written as they are.
    pub malformed: String,
    pub vis: String,
    /// Ignored in a tuple.
    pub name: String,
    pub ty: String,
    /// Its content has a name in checkpoints.
    pub is_state: bool,
}

/// The fields of a struct or of a variant.
pub struct Fields {
    /// Of a variant; empty for a struct.
    pub variant: String,
    pub attrs: String,
    pub kind: Kind,
    pub list: Vec<Field>,
}

/// A struct or enum, in the parts that make its text.
pub struct Item {
    pub derive: String,
    pub foreign: String,
    pub words: Vec<String>,
    vis: String,
    name: String,
    parameters: String,
    clause: String,
    pub is_enum: bool,
    pub alternatives: Vec<Fields>,
    layout: Dice,
}

#[derive(Clone, Copy, PartialEq)]
enum Role {
    /// Walked, so that the derive must find its bound.
    Module,
    /// Only an argument of another module's type: the user declares the bound.
    Argument,
    /// Its associated type is walked.
    Family,
    /// No module.
    Other,
    Length,
    Flag,
    Letter,
}

struct Parameter {
    name: &'static str,
    role: Role,
}

/// A valid item. `tp_size` says whether items may use that attribute.
pub fn valid(seed: u64, tp_size: bool) -> Item {
    let mut maker = Maker { dice: Dice::new(seed), lifetimes: Vec::new(), parameters: Vec::new(), names: 0 };
    maker.item(seed, tp_size)
}

struct Maker {
    dice: Dice,
    lifetimes: Vec<&'static str>,
    parameters: Vec<Parameter>,
    /// Names given with `rename` so far.
    names: usize,
}

impl Maker {
    fn item(&mut self, seed: u64, tp_size: bool) -> Item {
        let is_enum = self.dice.percent(30);
        let kind = self.kind();
        let has_fields = is_enum || kind != Kind::Unit;
        let (parameters, clause, bound) = self.generics(has_fields);
        let mut words = Vec::new();
        if self.dice.percent(30) {
            let rules = "lowercase UPPERCASE PascalCase camelCase snake_case SCREAMING_SNAKE_CASE kebab-case \
                SCREAMING-KEBAB-CASE";
            let rules: Vec<&str> = rules.split_whitespace().collect();
            words.push(format!("rename_all = {:?}", self.dice.pick(&rules)));
        }
        if self.dice.percent(25) {
            let paths = ["\"fsdp\"", "\"::fsdp\"", "fsdp", "::fsdp", "\"super::prelude::fsdp\"", "r\"fsdp\""];
            words.push(format!("crate = {}", self.dice.pick(&paths)));
        }
        if tp_size && self.dice.percent(25) {
            words.push(format!(
                "tp_size = {}",
                self.dice.pick(&["1", "8usize", "RANKS", "{ 2 * 2 }", "size(2)"])
            ));
        }
        words.extend(bound);
        let mut alternatives = if is_enum {
            let count = self.dice.below(5);
            let names = ["Dense", "Some", "r#if", "None", "Experts", "Ok", "A", "r#loop", "Walker"];
            let first = self.dice.below(names.len() - count);
            names[first..first + count].iter().map(|name| self.variant(name)).collect()
        } else {
            vec![self.fields(kind, true)]
        };
        self.use_parameters(&mut alternatives, is_enum);
        let names = [
            "Block", "Mlp", "r#try", "Walker", "Field", "Attrs", "Tree", "Some", "Result", "walk", "Dtype",
            "walker", "field0", "r#fn",
        ];
        let derives = ["derive(FsdpUnit)", "derive(fsdp::FsdpUnit)", "cfg_attr(all(), derive(FsdpUnit))"];
        Item {
            derive: format!("#[{}]", self.dice.pick(&derives)),
            foreign: self.foreign(
                &["#[must_use]", "#[non_exhaustive]", "#[repr(align(8))]"][..if is_enum { 2 } else { 3 }],
            ),
            words,
            vis: self.vis(),
            name: self.dice.pick(&names).to_string(),
            parameters,
            clause,
            is_enum,
            alternatives,
            layout: Dice::new(!seed),
        }
    }

    fn kind(&mut self) -> Kind {
        [Kind::Named, Kind::Named, Kind::Named, Kind::Tuple, Kind::Tuple, Kind::Unit][self.dice.below(6)]
    }

    fn variant(&mut self, name: &str) -> Fields {
        let kind = self.kind();
        let foreign = self.foreign(&[]);
        Fields { variant: name.to_string(), attrs: foreign, ..self.fields(kind, false) }
    }

    fn fields(&mut self, kind: Kind, has_vis: bool) -> Fields {
        let count = if kind == Kind::Unit { 0 } else { self.dice.below(7) };
        let mut taken = BTreeSet::new();
        let list = (0..count).map(|_| self.field(&mut taken, has_vis)).collect();
        Fields { variant: String::new(), attrs: String::new(), kind, list }
    }

    fn field(&mut self, taken: &mut BTreeSet<String>, has_vis: bool) -> Field {
        let name = self.field_name(taken);
        let (ty, words, is_state) = match self.dice.below(10) {
            0 => (self.plain(), Vec::new(), false),
            1 => (self.skipped(), vec!["skip".to_string()], false),
            2 => {
                let ty =
                    self.dice.pick(&["Tensor", "candle_core::Tensor", "Option<Tensor>", "Vec<[Tensor; 2]>"]);
                let mut words = vec!["buffer".to_string()];
                words.extend(self.rename());
                (ty.to_string(), words, true)
            }
            3 | 4 => {
                let ty = self.nested(2, true);
                let words = self.words_of_a_parameter(true);
                (ty, words, true)
            }
            _ => {
                let ty = self.nested(3, false);
                let words = if self.dice.percent(50) { self.words_of_a_parameter(false) } else { Vec::new() };
                (ty, words, true)
            }
        };
        let foreign = self.foreign(&["#[doc(hidden)]", "#[rustfmt::skip]", "#[cfg(all())]"]);
        let vis = if has_vis { self.vis() } else { String::new() };
        Field { foreign, words, malformed: String::new(), vis, name, ty, is_state }
    }

    /// Names that stay different under every rule of `rename_all`.
    fn field_name(&mut self, taken: &mut BTreeSet<String>) -> String {
        let pool = "weight bias gate_proj up_proj_2 layout offset params mesh f path value buf i walker walk field0 \
            field1 fields name attrs tree visit shape dtype len result out this _0 _hidden __self __fsdp r#type r#match \
            r#fn r#in r#dyn r#normal größe TREE Some __";
        let pool: Vec<&str> = pool.split_whitespace().collect();
        loop {
            let name = self.dice.pick(&pool);
            if taken.insert(name.trim_start_matches("r#").replace('_', "").to_lowercase()) {
                return name.to_string();
            }
        }
    }

    fn rename(&mut self) -> Option<String> {
        self.names += 1;
        let name = format!("model.{}.x{}", self.dice.below(3), self.names);
        match self.dice.below(6) {
            0 => Some(format!("rename = \"{name}\"")),
            1 => Some(format!("rename = r#\"{name}\"#")),
            _ => None,
        }
    }

    /// Any of the words that a parameter or module may be given, once each, in any order.
    fn words_of_a_parameter(&mut self, shaped: bool) -> Vec<String> {
        let mut words: Vec<String> = self.rename().into_iter().collect();
        for word in ["frozen", "no_decay", "expert", "r#frozen"] {
            let said = words.iter().any(|said| said.starts_with("frozen"));
            if self.dice.percent(20) && !(word == "r#frozen" && (said || self.dice.percent(80))) {
                words.push(format!("{word}{}", self.dice.pick(&["", "", " = true", " = false"])));
            }
        }
        if self.dice.percent(20) {
            words.push(format!("dtype = {:?}", self.dice.pick(&["f32", "bf16", "f16"])));
        }
        let mut dims = 9;
        if shaped {
            let sizes: Vec<String> = (0..self.dice.below(4)).map(|_| self.size()).collect();
            dims = sizes.len();
            words.push(format!("shape = [{}]", self.list(&sizes)));
        }
        if self.dice.percent(30) {
            let placements =
                ["replicate", "column", "dim(0)", "dim(0x0)", "row", "dim(1)", "dim(1_usize)", "dim(2)"];
            let allowed = [1, 4, 7, 8][dims.min(3)];
            words.push(format!("tp = {}", self.dice.pick(&placements[..allowed])));
        }
        match self.dice.below(6) {
            0 => words
                .push(format!("tie_with = {:?}", self.dice.pick(&["embed.weight", "0", "a.b.c", "größe"]))),
            1 | 2 => words.push(self.init()),
            _ => {}
        }
        for last in (1..words.len()).rev() {
            words.swap(last, self.dice.below(last + 1));
        }
        words
    }

    fn init(&mut self) -> String {
        let mut number = || {
            let numbers =
                ["0.5", "-0.5", "STD", "2.0 * STD", "1e-2", "0.02f32", "{ STD }", "f32::EPSILON", "(-STD)"];
            self.dice.pick(&numbers).to_string()
        };
        let numbers = [number(), number()];
        match self.dice.below(5) {
            0 => "init = zeros".to_string(),
            1 => "init = ones".to_string(),
            2 => format!("init = constant({})", self.list(&numbers[..1])),
            3 => format!("init = normal({})", self.list(&numbers)),
            _ => format!("init = uniform({})", self.list(&numbers)),
        }
    }

    fn size(&mut self) -> String {
        let lengths = self.named(Role::Length);
        match lengths.as_slice() {
            [first, ..] if self.dice.percent(50) => match self.dice.below(3) {
                0 => first.to_string(),
                1 => format!("2 * {first}"),
                _ => format!("{{ {first} + DIM }}"),
            },
            _ => self
                .dice
                .pick(&["4", "DIM", "size(3)", "{ 1 + 2 }", "1 << 3", "3u8 as usize", "0x10"])
                .to_string(),
        }
    }

    /// Joined by commas, the last one too, perhaps.
    fn list(&mut self, items: &[String]) -> String {
        let trailing = if !items.is_empty() && self.dice.percent(20) { "," } else { "" };
        format!("{}{trailing}", items.join(", "))
    }

    /// A module or, if `shaped`, a parameter, in containers.
    fn nested(&mut self, depth: usize, shaped: bool) -> String {
        if depth == 0 || self.dice.percent(30) {
            return if shaped {
                self.dice.pick(&["Param", "fsdp::Param"]).to_string()
            } else {
                self.module()
            };
        }
        let elem = self.nested(depth - 1, shaped);
        let len = self.length();
        match self.dice.below(if shaped { 9 } else { 13 }) {
            0 | 1 => format!("Vec<{elem}>"),
            2 => format!("std::vec::Vec<{elem}>"),
            3 => format!("Option<{elem}>"),
            4 => format!("Box<{elem}>"),
            5 => format!("Arc<{elem}>"),
            6 => format!("[{elem}; {len}]"),
            7 => format!("BTreeMap<{}, {elem}>", self.dice.pick(&["String", "usize"])),
            8 => format!("({elem})"),
            9 => format!("({elem},)"),
            10 => format!("({elem}, {})", self.nested(depth - 1, shaped)),
            11 => format!("Box<[{elem}]>"),
            _ => format!("Unit<{elem}>"),
        }
    }

    fn length(&mut self) -> String {
        match self.named(Role::Length).as_slice() {
            [first, ..] if self.dice.percent(50) => first.to_string(),
            _ => self.dice.pick(&["2", "DIM", "{ size(1) }", "0"]).to_string(),
        }
    }

    fn module(&mut self) -> String {
        let roles = [Role::Module, Role::Argument, Role::Family];
        let parameters: Vec<(&str, Role)> =
            self.parameters.iter().filter(|p| roles.contains(&p.role)).map(|p| (p.name, p.role)).collect();
        if !parameters.is_empty() && self.dice.percent(60) {
            let (name, role) = parameters[self.dice.below(parameters.len())];
            return match role {
                Role::Module => name.to_string(),
                Role::Argument => format!("Outer<{name}>"),
                _ if self.dice.percent(50) => format!("{name}::Block"),
                _ => format!("<{name} as Family>::Block"),
            };
        }
        let modules = "Param Param Leaf Leaf Outer<Leaf> Outer<Outer<Param>> Unit<Leaf> super::prelude::Leaf () \
            Option<Box<Self>> Vec<Self> BTreeMap<u8,Self>";
        self.dice.pick(&modules.split_whitespace().collect::<Vec<_>>()).to_string()
    }

    fn plain(&mut self) -> String {
        let mut types =
            "f64 usize bool char String std::string::String Option<usize> Vec<u8> [f32;3] (u8,bool) \
            Vec<(String,u8)> Box<f32> PhantomData<fn()> i128"
                .split_whitespace()
                .collect::<Vec<_>>();
        types.push("&'static str");
        match self.lifetimes.first() {
            Some(lifetime) if self.dice.percent(40) => format!("&{lifetime} str"),
            _ => self.dice.pick(&types).to_string(),
        }
    }

    fn skipped(&mut self) -> String {
        if let (Some(parameter), true) = (self.parameters.first(), self.dice.percent(40))
            && ![Role::Length, Role::Flag, Role::Letter].contains(&parameter.role)
        {
            return format!("Option<{}>", parameter.name);
        }
        match self.lifetimes.first() {
            Some(lifetime) if self.dice.percent(50) => format!("&{lifetime} [f32]"),
            _ => {
                let types = [
                    "Mutex<Leaf>",
                    "HashMap<String, Leaf>",
                    "Box<dyn Fn(f32) -> f32>",
                    "for<'x> fn(&'x u8) -> &'x u8",
                    "*const u8",
                    "RefCell<Param>",
                    "std::rc::Rc<Leaf>",
                    "Tensor",
                    "f32",
                ];
                self.dice.pick(&types).to_string()
            }
        }
    }

    fn foreign(&mut self, more: &[&'static str]) -> String {
        let mut attrs = vec![
            "/// Documented with `code`, \"quotes\" and {braces}.\n",
            "#[doc = concat!(\"built\", \" doc\")]",
            "/** A block. */",
            "#[allow(dead_code)]",
            "#[cfg_attr(any(), fsdp(nonsense))]",
        ];
        attrs.extend(more);
        let count = [0, 0, 1, 2][self.dice.below(4)];
        let first = self.dice.below(attrs.len() - 1);
        attrs[first..(first + count).min(attrs.len())].concat()
    }

    fn vis(&mut self) -> String {
        let kinds =
            ["", "pub", "pub(crate)", "pub(super)", "pub(self)", "pub(in super::super)", "pub(in crate)"];
        self.dice.pick(&kinds).to_string()
    }

    fn named(&self, role: Role) -> Vec<&'static str> {
        self.parameters.iter().filter(|p| p.role == role).map(|p| p.name).collect()
    }

    /// The declaration of the parameters, the where-clause, and `bound = ".."` if that is to be said.
    fn generics(&mut self, has_fields: bool) -> (String, String, Option<String>) {
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
    fn use_parameters(&mut self, alternatives: &mut Vec<Fields>, is_enum: bool) {
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

impl Item {
    /// The item as the derive gets it.
    pub fn text(&mut self) -> String {
        let Item { foreign, vis, name, parameters, clause, alternatives, layout, .. } = self;
        let attrs = attributes(&self.words, layout);
        let keyword = if self.is_enum { "enum" } else { "struct" };
        let head = format!("{foreign}{attrs}\n{vis} {keyword} {name}{parameters}");
        let bodies: Vec<String> = alternatives.iter().map(|fields| fields.text(layout)).collect();
        if self.is_enum {
            let variant = |(fields, body): (&Fields, &String)| {
                format!("    {}{}{body},\n", fields.attrs, fields.variant)
            };
            let variants: String = alternatives.iter().zip(&bodies).map(variant).collect();
            return format!("{head} {clause} {{\n{variants}}}\n");
        }
        let body = &bodies[0];
        match alternatives[0].kind {
            Kind::Named => format!("{head} {clause} {body}\n"),
            Kind::Tuple => format!("{head}{body} {clause};\n"),
            Kind::Unit => format!("{head} {clause};\n"),
        }
    }

    /// The item as a user writes it, in a module of its own.
    #[allow(dead_code, reason = "only the root package compiles what is made")]
    pub fn module(&mut self, name: &str) -> String {
        format!(
            "mod {name} {{\n#[allow(unused)] use super::prelude::*;\n{}\n{}}}\n",
            self.derive.clone(),
            self.text()
        )
    }

    /// How many fields have a name in checkpoints.
    #[allow(dead_code, reason = "only the derive's own tests count")]
    pub fn states(&self) -> usize {
        self.alternatives.iter().flat_map(|fields| &fields.list).filter(|field| field.is_state).count()
    }
}

impl Fields {
    fn text(&self, layout: &mut Dice) -> String {
        let mut list = String::new();
        for field in &self.list {
            let name = if self.kind == Kind::Named { format!("{}: ", field.name) } else { String::new() };
            let attrs = attributes(&field.words, layout);
            list += &format!(
                "        {}{attrs}{}{} {name}{},\n",
                field.foreign, field.malformed, field.vis, field.ty
            );
        }
        match self.kind {
            Kind::Named => format!(" {{\n{list}    }}"),
            Kind::Tuple => format!("(\n{list}    )"),
            Kind::Unit => String::new(),
        }
    }
}

/// The words in one `#[fsdp(..)]` or in several.
fn attributes(words: &[String], layout: &mut Dice) -> String {
    let mut text = String::new();
    let mut open = false;
    for word in words {
        if open && layout.percent(70) {
            text += ", ";
        } else {
            text += if open { ")] #[fsdp(" } else { "#[fsdp(" };
        }
        text += word;
        open = true;
    }
    if open {
        text += layout.pick(&[")] ", ",)] ", ")]\n        "]);
    } else if layout.percent(3) {
        text += "#[fsdp()] ";
    }
    text
}
