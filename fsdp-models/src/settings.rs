//! Settings in files of other programs. Each reader has a table of the settings that it knows. A setting that is not in the table
//! is refused by name. (A table of refused settings would let new ones through, and silently train another model.)

mod kind;

use std::fmt;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file;
use fsdp::files::{self, FileError, brief_to};
use serde_json::{Map, Value};

pub(crate) use kind::Kind;

/// Settings of one kind that a message lists: the rest is counted.
const LISTED: usize = 8;

/// Characters of a name in a message.
const NAME: usize = 60;

/// Characters of a value in a message.
const TEXT: usize = 40;

/// What a reader does with settings of these names. A name that ends in `*` stands for all that begin so.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Known {
    /// They are read, and have values of this kind.
    Read(Kind, &'static [&'static str]),
    /// Whatever they are, they say nothing of what is done here. The table says in a comment why.
    Ignored(&'static [&'static str]),
    /// Implemented for these values alone.
    Only(&'static str, &'static [Plain]),
}

/// A value that a table can name.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plain {
    /// Not set: `null`, or an empty list or map.
    Unset,
    Bool(bool),
    Number(f64),
    Text(&'static str),
}

impl fmt::Display for Plain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Plain::Unset => f.write_str("null"),
            Plain::Bool(value) => write!(f, "{value}"),
            Plain::Number(value) => write!(f, "{value}"),
            Plain::Text(text) => write!(f, "`{text}`"),
        }
    }
}

/// All that a reader knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    /// The first entry that has the name counts.
    pub known: &'static [Known],
    /// Whether an unknown setting that is `false` is one that is not set: so in files whose writer writes every switch that there
    /// is.
    pub off_is_unset: bool,
}

impl Table {
    /// What is wrong with these settings, sorted by name.
    pub fn check<'a, V: Setting + 'a>(
        &self,
        settings: impl Iterator<Item = (&'a String, &'a V)>,
    ) -> Refusals {
        let mut settings: Vec<_> = settings.collect();
        settings.sort_by_key(|(name, _)| *name);
        let mut refusals = Refusals::default();
        for (name, value) in settings {
            let known = self.known.iter().find(|known| known.names().any(|known| stands_for(known, name)));
            match known {
                Some(Known::Read(kind, _)) => {
                    if let Some(misfit) = value.misfit(*kind) {
                        refusals.wrong(name, &misfit, *kind);
                    }
                }
                _ if value.is_unset() => {}
                Some(Known::Only(_, values)) if !values.iter().any(|plain| value.is(plain)) => {
                    refusals.only(name, &value.shown(), values);
                }
                Some(_) => {}
                None if self.off_is_unset && value.is(&Plain::Bool(false)) => {}
                None => refusals.unknown.push(format!("`{}` ({})", brief_to(name, NAME), value.shown())),
            }
        }
        refusals
    }
}

impl Known {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let (one, many) = match *self {
            Known::Read(_, names) | Known::Ignored(names) => (None, names),
            Known::Only(name, _) => (Some(name), [].as_slice()),
        };
        one.into_iter().chain(many.iter().copied())
    }
}

fn stands_for(known: &str, name: &str) -> bool {
    match known.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => known == name,
    }
}

/// A value of a setting, in whatever format.
pub(crate) trait Setting {
    /// `null`, or an empty list or map.
    fn is_unset(&self) -> bool;
    fn is(&self, plain: &Plain) -> bool;
    /// What it is or holds, in words that follow its name, if it is not of this kind. `null` is of every kind.
    fn misfit(&self, kind: Kind) -> Option<String>;
    /// For a message.
    fn shown(&self) -> String;
}

impl Setting for Value {
    fn is_unset(&self) -> bool {
        match self {
            Value::Null => true,
            Value::Array(values) => values.is_empty(),
            Value::Object(values) => values.is_empty(),
            _ => false,
        }
    }

    fn is(&self, plain: &Plain) -> bool {
        match plain {
            Plain::Unset => self.is_unset(),
            Plain::Bool(value) => self.as_bool() == Some(*value),
            Plain::Number(value) => self.as_f64() == Some(*value),
            Plain::Text(text) => self.as_str() == Some(text),
        }
    }

    fn misfit(&self, kind: Kind) -> Option<String> {
        kind.misfit(self)
    }

    fn shown(&self) -> String {
        match self {
            Value::Array(values) => format!("a list of {}", values.len()),
            Value::Object(values) => format!("a map of {}", values.len()),
            Value::String(text) => shown_text(text),
            other => other.to_string(),
        }
    }
}

impl Setting for gguf_file::Value {
    fn is_unset(&self) -> bool {
        matches!(self, gguf_file::Value::Array(values) if values.is_empty())
    }

    fn is(&self, plain: &Plain) -> bool {
        use gguf_file::Value as V;
        let number = match *self {
            V::U8(value) => f64::from(value),
            V::I8(value) => f64::from(value),
            V::U16(value) => f64::from(value),
            V::I16(value) => f64::from(value),
            V::U32(value) => f64::from(value),
            V::I32(value) => f64::from(value),
            V::U64(value) => value as f64,
            V::I64(value) => value as f64,
            V::F32(value) => f64::from(value),
            V::F64(value) => value,
            V::Bool(_) | V::String(_) | V::Array(_) => f64::NAN,
        };
        match plain {
            Plain::Unset => self.is_unset(),
            Plain::Bool(value) => matches!(self, V::Bool(found) if found == value),
            Plain::Number(value) => number == *value,
            Plain::Text(text) => matches!(self, V::String(found) if found == text),
        }
    }

    fn misfit(&self, kind: Kind) -> Option<String> {
        kind.misfit_gguf(self)
    }

    fn shown(&self) -> String {
        match self {
            gguf_file::Value::Array(values) => format!("a list of {}", values.len()),
            gguf_file::Value::String(text) => shown_text(text),
            gguf_file::Value::Bool(value) => value.to_string(),
            gguf_file::Value::U8(value) => value.to_string(),
            gguf_file::Value::I8(value) => value.to_string(),
            gguf_file::Value::U16(value) => value.to_string(),
            gguf_file::Value::I16(value) => value.to_string(),
            gguf_file::Value::U32(value) => value.to_string(),
            gguf_file::Value::I32(value) => value.to_string(),
            gguf_file::Value::U64(value) => value.to_string(),
            gguf_file::Value::I64(value) => value.to_string(),
            gguf_file::Value::F32(value) => value.to_string(),
            gguf_file::Value::F64(value) => value.to_string(),
        }
    }
}

fn shown_text(text: &str) -> String {
    format!("`{}`", brief_to(text, TEXT))
}

/// Settings that a reader refuses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Refusals {
    known: Vec<String>,
    unknown: Vec<String>,
}

impl Refusals {
    /// A setting that has a value that is not implemented.
    pub fn only(&mut self, name: &str, value: &str, values: &[Plain]) {
        let values: Vec<String> = values.iter().map(ToString::to_string).collect();
        let verb = if values.len() == 1 { "is" } else { "are" };
        let name = brief_to(name, NAME);
        self.known.push(format!("{name} is {value}: only {} {verb} supported", values.join(", ")));
    }

    /// A setting that has a value of another kind; `misfit` says what it is or holds.
    pub fn wrong(&mut self, name: &str, misfit: &str, kind: Kind) {
        self.known.push(format!("{} {misfit}: expected {}", brief_to(name, NAME), kind.expected()));
    }

    /// A setting that must be there.
    pub fn missing(&mut self, name: &str) {
        self.known.push(format!("{} is missing", brief_to(name, NAME)));
    }

    /// Those of settings within the one of this name.
    pub fn add_within(&mut self, name: &str, inner: Refusals) {
        self.known.extend(inner.known.into_iter().map(|line| format!("{name}.{line}")));
        let inside = |line: String| format!("`{name}.{}", line.trim_start_matches('`'));
        self.unknown.extend(inner.unknown.into_iter().map(inside));
    }

    /// An error if there is one. `path` is that of the file, where there is a file.
    pub fn into_result(self, path: Option<&Path>) -> Result<(), SettingsError> {
        if self.known.is_empty() && self.unknown.is_empty() {
            return Ok(());
        }
        Err(SettingsError { path: path.map(Path::to_path_buf), refusals: self })
    }
}

/// A file with settings that would change what it means, and that are not implemented or not known here. All of them are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    path: Option<PathBuf>,
    refusals: Refusals,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = |lines: &[String], separator: &str| {
            let more = lines.len().saturating_sub(LISTED);
            let rest = if more > 0 { format!("{separator}and {more} more") } else { String::new() };
            format!("{}{rest}", lines[..lines.len() - more].join(separator))
        };
        if let Some(path) = &self.path {
            write!(f, "`{}`: ", path.display())?;
        }
        let Refusals { known, unknown } = &self.refusals;
        f.write_str(&listed(known, "; "))?;
        if !unknown.is_empty() {
            let start = if known.is_empty() { "" } else { "; " };
            let (settings, they, do_not) = match unknown.len() {
                1 => ("setting", "it", "it does not"),
                _ => ("settings", "they", "they do not"),
            };
            write!(
                f,
                "{start}unknown {settings} {}: {they} may change what the file means; if {do_not}, remove {}",
                listed(unknown, ", "),
                if unknown.len() == 1 { "it" } else { "them" }
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for SettingsError {}

/// Reads a file of at most `most` bytes that is one JSON object. The inner error is that of a text that is none.
pub(crate) fn read_object(
    path: &Path,
    most: u64,
) -> Result<Result<Map<String, Value>, serde_json::Error>, FileError> {
    Ok(serde_json::from_slice(&files::read(path, most)?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TABLE: Table = Table {
        known: &[
            Known::Read(Kind::Size, &["size"]),
            Known::Read(Kind::Ids, &["ends"]),
            Known::Ignored(&["name", "made.*"]),
            Known::Only("made", &[Plain::Text("here"), Plain::Unset]),
            Known::Only("scale", &[Plain::Number(1.0)]),
        ],
        off_is_unset: false,
    };

    fn message(table: Table, json: Value) -> String {
        let refusals = table.check(json.as_object().unwrap().iter());
        refusals.into_result(None).map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn what_is_known_or_not_set_passes() {
        for json in [
            json!({"size": 3, "name": {"x": 1}, "made.by": true, "made": "here", "scale": 1}),
            json!({"scale": 1.0, "other": null, "more": [], "still": {}, "made": null}),
        ] {
            assert_eq!(message(TABLE, json), "");
        }
    }

    #[test]
    fn what_is_set_and_unknown_is_named() {
        assert_eq!(
            message(TABLE, json!({"window": 4096})),
            "unknown setting `window` (4096): it may change what the file means; if it does not, remove it"
        );
        let message =
            message(TABLE, json!({"made": "there", "scale": 2, "zeta": "x", "on": false, "made_": [1, 2]}));
        assert_eq!(
            message,
            "made is `there`: only `here`, null are supported; scale is 2: only 1 is supported; unknown settings `made_` (a list of \
             2), `on` (false), `zeta` (`x`): they may change what the file means; if they do not, remove them"
        );
    }

    #[test]
    fn a_value_of_another_kind_is_refused_by_the_name_of_its_setting() {
        assert_eq!(
            message(TABLE, json!({"size": "3", "ends": [1, "a"], "made": "there"})),
            "ends holds `a`: expected the id of a token or a list of ids; made is `there`: only `here`, null are supported; size is \
             `3`: expected a whole number from 0 on"
        );
        // What is not set has no value; an empty list is one.
        assert_eq!(message(TABLE, json!({"size": null, "ends": []})), "");
        assert_eq!(
            message(TABLE, json!({"size": []})),
            "size is a list of 0: expected a whole number from 0 on"
        );
    }

    #[test]
    fn a_switch_that_is_off_is_not_set_where_every_switch_is_written() {
        let table = Table { off_is_unset: true, ..TABLE };
        assert_eq!(message(table, json!({"on": false})), "");
        assert!(message(table, json!({"on": true})).starts_with("unknown setting `on` (true)"));
        // A known one has its own rule.
        assert_eq!(message(table, json!({"scale": false})), "scale is false: only 1 is supported");
    }

    #[test]
    fn a_message_is_short_whatever_the_file_holds() {
        let settings =
            (0..1000).map(|at| (format!("{at}{}", "\u{7}long".repeat(500)), json!("text\n".repeat(500))));
        let message = message(TABLE, Value::Object(settings.collect()));
        assert!(message.len() < 2000 && message.contains("and 992 more"), "{} {message}", message.len());
        assert!(!message.contains(['\u{7}', '\n']), "{message}");
    }

    #[test]
    fn the_values_of_both_formats_are_compared_alike() {
        use gguf_file::Value as V;
        for (plain, json, gguf) in [
            (Plain::Number(1.0), json!(1.0), V::F32(1.0)),
            (Plain::Number(0.0), json!(0), V::U64(0)),
            (Plain::Bool(true), json!(true), V::Bool(true)),
            (Plain::Text("none"), json!("none"), V::String("none".into())),
            (Plain::Unset, json!([]), V::Array(vec![])),
        ] {
            assert!(json.is(&plain) && gguf.is(&plain), "{plain}");
            for other in [Plain::Number(7.0), Plain::Bool(false), Plain::Text("7")] {
                assert!(!json.is(&other) && !gguf.is(&other), "{plain} {other}");
            }
        }
    }

    #[test]
    fn settings_within_settings_are_named_in_full() {
        let mut outer = Refusals::default();
        let inner = json!({"scale": 3, "rate": 4});
        outer.add_within("rope", TABLE.check(inner.as_object().unwrap().iter()));
        let message = outer.into_result(Some(Path::new("a/b"))).unwrap_err().to_string();
        assert!(
            message.starts_with(
                "`a/b`: rope.scale is 3: only 1 is supported; unknown setting `rope.rate` (4): "
            ),
            "{message}"
        );
    }
}
