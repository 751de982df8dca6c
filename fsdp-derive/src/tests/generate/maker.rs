//! Rolls the dice: which item, which fields, of which types, with which attributes.

use std::collections::BTreeSet;

use super::{Dice, Field, Fields, Item, Kind};

#[derive(Clone, Copy, PartialEq)]
pub enum Role {
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

pub struct Parameter {
    pub name: &'static str,
    pub role: Role,
}

/// A valid item. `tp_size` says whether items may use that attribute.
pub fn valid(seed: u64, tp_size: bool) -> Item {
    let mut maker = Maker { dice: Dice::new(seed), lifetimes: Vec::new(), parameters: Vec::new(), names: 0 };
    maker.item(seed, tp_size)
}

pub struct Maker {
    pub dice: Dice,
    pub lifetimes: Vec<&'static str>,
    pub parameters: Vec<Parameter>,
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
            words.push(format!("tp_size = {}", self.dice.pick(&["1", "1usize", "{ 2 - 1 }", "RANKS - 1"])));
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
        let renamed = words.iter().any(|word| word.starts_with("rename"));
        let fused = !renamed && dims > 0 && self.dice.percent(25);
        if fused {
            words.push(self.fused());
        }
        match self.dice.below(6) {
            0 if !fused => words.push(format!(
                "tie_with = {:?}",
                self.dice.pick(&["embed.weight", "0.w", "a.b.c", "größe.w"])
            )),
            1 | 2 => words.push(self.init()),
            _ => {}
        }
        for last in (1..words.len()).rev() {
            words.swap(last, self.dice.below(last + 1));
        }
        words
    }

    fn fused(&mut self) -> String {
        let mut names: Vec<String> = Vec::new();
        for _ in 0..2 + self.dice.below(3) {
            self.names += 1;
            let quoted = [("\"", "\""), ("r#\"", "\"#")][self.dice.below(2)];
            names.push(format!("{}attn.y{}{}", quoted.0, self.names, quoted.1));
        }
        format!("fused({})", self.list(&names))
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

    pub fn vis(&mut self) -> String {
        let kinds =
            ["", "pub", "pub(crate)", "pub(super)", "pub(self)", "pub(in super::super)", "pub(in crate)"];
        self.dice.pick(&kinds).to_string()
    }

    fn named(&self, role: Role) -> Vec<&'static str> {
        self.parameters.iter().filter(|p| p.role == role).map(|p| p.name).collect()
    }
}
