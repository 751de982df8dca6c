//! Shows the values and names of a checkpoint to a person.

use std::collections::BTreeMap;

use fsdp::checkpoint::ModelDescription;
use fsdp::files::brief_to;
use serde_json::Value;

/// Longest name of an object whose members are told apart, in bytes: they all repeat it.
const PREFIX: usize = 200;

/// The values of a checkpoint, each member of an object by itself: `optimizer.steps` = 100.
pub(super) fn flatten(values: &BTreeMap<String, Value>) -> BTreeMap<String, Value> {
    fn insert(flat: &mut BTreeMap<String, Value>, name: String, value: &Value) {
        match value {
            Value::Object(members) if !members.is_empty() && name.len() <= PREFIX => {
                members.iter().for_each(|(member, value)| insert(flat, format!("{name}.{member}"), value));
            }
            _ => {
                flat.insert(name, value.clone());
            }
        }
    }
    let mut flat = BTreeMap::new();
    values.iter().for_each(|(name, value)| insert(&mut flat, name.clone(), value));
    flat
}

/// Longest text of a value that is shown whole, in characters.
const SHOWN: usize = 72;

/// Longest text of a cell of a table, in characters: every row is as wide as the widest.
const CELL: usize = 200;

/// A value in a line.
pub(super) fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| brief_to(&value.to_string(), SHOWN), |text| brief_to(text, SHOWN))
}

/// A name from a file, in a line or a cell.
pub(super) fn printable(text: &str) -> String {
    brief_to(text, CELL)
}

/// The enums of a model by their paths, and which variant each is. Options are left out: their tensors say whether they have
/// something.
pub(super) fn variants(model: &ModelDescription) -> Vec<(&str, &str)> {
    let variants = model.variants.iter().filter(|(_, variant)| *variant != "Some");
    variants
        .map(|(path, variant)| (if path.is_empty() { "(root)" } else { path }, variant.as_str()))
        .collect()
}

/// The further names of tied tensors, and the name that each is saved under.
pub(super) fn ties(model: &ModelDescription) -> Vec<(&str, &str)> {
    model.ties.iter().map(|(name, first)| (name.as_str(), first.as_str())).collect()
}

/// `1 rank`, `2 ranks`.
pub(super) fn ranks_text(ranks: usize) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}

/// `[2, 3]`.
pub(super) fn dims(shape: &[usize]) -> String {
    printable(&format!("{shape:?}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn members_are_values_of_their_own() {
        let values = BTreeMap::from([
            ("cursor".to_owned(), json!(7)),
            ("optimizer".to_owned(), json!({"rule": "adamw", "param_steps": {"a.b": 1}, "none": {}})),
        ]);
        let flat = flatten(&values);
        let expected = [
            ("cursor", json!(7)),
            ("optimizer.none", json!({})),
            ("optimizer.param_steps.a.b", json!(1)),
            ("optimizer.rule", json!("adamw")),
        ];
        assert_eq!(
            flat.iter().map(|(name, value)| (name.as_str(), value.clone())).collect::<Vec<_>>(),
            expected
        );
    }

    #[test]
    fn long_values_are_cut_and_control_characters_are_escaped() {
        assert_eq!(shown(&json!([1, 2])), "[1,2]");
        assert_eq!(shown(&json!("a\u{1b}[2Jé")), "a\\u{1b}[2Jé");
        assert_eq!(shown(&json!("é".repeat(80))), format!("{}.. (80 characters)", "é".repeat(72)));
    }
}
