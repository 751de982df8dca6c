//! A generated item in the parts that make its text.

use super::Dice;

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
    pub vis: String,
    pub name: String,
    pub parameters: String,
    pub clause: String,
    pub is_enum: bool,
    pub alternatives: Vec<Fields>,
    pub layout: Dice,
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
