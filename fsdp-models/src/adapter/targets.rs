//! Chooses the projections that get adapters, by PEFT's names.

use std::fmt;
use std::str::FromStr;

use fancy_regex::Regex;

use crate::error::{LoraError, PROJECTIONS};

/// The output projection, which is adapted only if it is named.
pub const HEAD: &str = "lm_head";

/// Projections by their names, which are whole so: `model.layers.3.self_attn.q_proj`, `model.layers.3.mlp.up_proj`, [`HEAD`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// Every projection of every block: [`PROJECTIONS`].
    AllLinear,
    /// Those whose name is one of these, or ends in one after a dot: `q_proj` and `self_attn.q_proj` are in every block,
    /// `3.self_attn.q_proj` is in one. [`HEAD`] is one where it is not the embedding.
    Named(Vec<String>),
    /// Those whose whole name a regular expression matches, in Python's syntax.
    Pattern(String),
}

impl Default for Targets {
    /// `q_proj` and `v_proj`.
    fn default() -> Self {
        Targets::Named(["q_proj", "v_proj"].map(str::to_owned).to_vec())
    }
}

/// The whole name of a projection.
pub(crate) fn module(block: usize, projection: &str) -> String {
    let part = match projection {
        "gate_proj" | "up_proj" | "down_proj" => "mlp",
        _ => "self_attn",
    };
    format!("model.layers.{block}.{part}.{projection}")
}

impl Targets {
    /// Which of the modules of a model are meant.
    pub(crate) fn among(&self, modules: &[String]) -> Result<Vec<bool>, LoraError> {
        match self {
            Targets::AllLinear => Ok(modules.iter().map(|module| module != HEAD).collect()),
            Targets::Named(names) => {
                let named = |name: &str, module: &str| {
                    let before = module.strip_suffix(name);
                    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
                };
                let head = modules.iter().any(|module| module == HEAD);
                check_names(names, head, |name| modules.iter().any(|module| named(name, module)))?;
                Ok(modules.iter().map(|module| names.iter().any(|name| named(name, module))).collect())
            }
            Targets::Pattern(pattern) => matches(pattern, modules),
        }
    }
}

fn matches(pattern: &str, modules: &[String]) -> Result<Vec<bool>, LoraError> {
    let refused = |reason: String| LoraError::Pattern { pattern: pattern.to_owned(), reason };
    let invalid = |error: fancy_regex::Error| {
        // Its own words repeat the pattern, in several lines.
        let words = error.to_string();
        refused(format!("is no regular expression: {}", words.lines().last().unwrap_or_default()))
    };
    // By itself it must be one too: what only the parentheses around it make whole is none.
    Regex::new(pattern).map_err(invalid)?;
    let whole = Regex::new(&format!(r"\A(?:{pattern})\z")).map_err(invalid)?;
    let matched = modules.iter().map(|module| whole.is_match(module)).collect::<Result<Vec<_>, _>>();
    let matched = matched.map_err(|error| refused(format!("takes too long: {error}")))?;
    if matched.contains(&true) {
        Ok(matched)
    } else {
        Err(refused("matches no projection of the model".into()))
    }
}

fn check_names(names: &[String], head: bool, known: impl Fn(&str) -> bool) -> Result<(), LoraError> {
    if names.is_empty() {
        return Err(LoraError::NoTargets);
    }
    let unknown: Vec<String> = names.iter().filter(|name| !known(name)).cloned().collect();
    if unknown.is_empty() { Ok(()) } else { Err(LoraError::UnknownTargets { unknown, head }) }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Targets::AllLinear => f.write_str("all-linear"),
            Targets::Named(names) => f.write_str(&names.join(",")),
            Targets::Pattern(pattern) => f.write_str(pattern),
        }
    }
}

impl FromStr for Targets {
    type Err = LoraError;

    /// `all-linear`, or names with commas between them.
    fn from_str(text: &str) -> Result<Self, LoraError> {
        if text == "all-linear" {
            return Ok(Targets::AllLinear);
        }
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
        check_names(&names, true, |name| PROJECTIONS.contains(&last(name).as_str()) || last(name) == HEAD)?;
        Ok(Targets::Named(names))
    }
}
