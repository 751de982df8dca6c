//! Which values a setting may have that is read.

use candle_core::quantized::gguf_file;
use serde_json::Value;

use super::Setting;

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Its reader says what it may be.
    Any,
    Bool,
    /// A whole number from 0 on.
    Size,
    Number,
    Text,
    /// The id of a token.
    Id,
    /// The id of a token, or a list of ids.
    Ids,
    /// A token by its text, or a map that has it as `content`.
    Token,
    List,
    Map,
    /// A map of texts.
    Texts,
}

impl Kind {
    /// For a message.
    pub fn expected(self) -> &'static str {
        match self {
            Kind::Any => "a value",
            Kind::Bool => "true or false",
            Kind::Size => "a whole number from 0 on",
            Kind::Number => "a number",
            Kind::Text => "a text",
            Kind::Id => "the id of a token",
            Kind::Ids => "the id of a token or a list of ids",
            Kind::Token => "the text of a token, or a map with it as `content`",
            Kind::List => "a list",
            Kind::Map => "a map",
            Kind::Texts => "a map of texts",
        }
    }

    /// What a JSON value is or holds, in words that follow its name, if it is none of this kind.
    pub(super) fn misfit(self, value: &Value) -> Option<String> {
        let is_id = |value: &Value| value.as_u64().is_some_and(|id| u32::try_from(id).is_ok());
        let holds = |inner: Option<&Value>| inner.map(|inner| format!("holds {}", inner.shown()));
        let fits = match (self, value) {
            (_, Value::Null) => true,
            (Kind::Ids, Value::Array(ids)) => return holds(ids.iter().find(|id| !is_id(id))),
            (Kind::Texts, Value::Object(texts)) => {
                return holds(texts.values().find(|text| !text.is_string()));
            }
            (Kind::Any, _) => true,
            (Kind::Bool, value) => value.is_boolean(),
            (Kind::Size, value) => value.as_u64().is_some_and(|size| usize::try_from(size).is_ok()),
            (Kind::Number, value) => value.is_number(),
            (Kind::Text, value) => value.is_string(),
            (Kind::Id | Kind::Ids, value) => is_id(value),
            (Kind::Token, value) => value.is_string() || value.get("content").is_some_and(Value::is_string),
            (Kind::List, value) => value.is_array(),
            (Kind::Map | Kind::Texts, value) => value.is_object(),
        };
        (!fits).then(|| format!("is {}", value.shown()))
    }

    /// What a value of a GGUF file is, if it is not of this kind. GGUF has no maps.
    pub(super) fn misfit_gguf(self, value: &gguf_file::Value) -> Option<String> {
        use gguf_file::Value as V;
        let whole = match *value {
            V::U8(value) => Some(u64::from(value)),
            V::U16(value) => Some(value.into()),
            V::U32(value) => Some(value.into()),
            V::U64(value) => Some(value),
            V::I8(value) => value.try_into().ok(),
            V::I16(value) => value.try_into().ok(),
            V::I32(value) => value.try_into().ok(),
            V::I64(value) => value.try_into().ok(),
            _ => None,
        };
        let fits = match self {
            Kind::Any => true,
            Kind::Bool => matches!(value, V::Bool(_)),
            Kind::Size => whole.is_some_and(|size| usize::try_from(size).is_ok()),
            Kind::Number => !matches!(value, V::Bool(_) | V::String(_) | V::Array(_)),
            Kind::Text | Kind::Token => matches!(value, V::String(_)),
            Kind::Id | Kind::Ids => whole.is_some_and(|id| u32::try_from(id).is_ok()),
            Kind::List => matches!(value, V::Array(_)),
            Kind::Map | Kind::Texts => false,
        };
        (!fits).then(|| format!("is {}", value.shown()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_of_another_kind_are_told() {
        for (kind, good, bad) in [
            (Kind::Bool, json!(false), vec![(json!("false"), "is `false`"), (json!(0), "is 0")]),
            (
                Kind::Size,
                json!(0),
                vec![
                    (json!(-1), "is -1"),
                    (json!(2.0), "is 2.0"),
                    (json!([]), "is a list of 0"),
                    (json!(1e30), "is 1e+30"),
                ],
            ),
            (Kind::Number, json!(-0.5), vec![(json!("1"), "is `1`"), (json!(true), "is true")]),
            (Kind::Text, json!(""), vec![(json!(1), "is 1")]),
            (Kind::Id, json!(4_294_967_295u32), vec![(json!(4_294_967_296u64), "is 4294967296")]),
            (
                Kind::Ids,
                json!([1, 2]),
                vec![
                    (json!(["a"]), "holds `a`"),
                    (json!([1, null]), "holds null"),
                    (json!(-1), "is -1"),
                    (json!([1, [2]]), "holds a list of 1"),
                    (json!({}), "is a map of 0"),
                ],
            ),
            (
                Kind::Token,
                json!({"content": "</s>", "special": true}),
                vec![(json!(2), "is 2"), (json!({"content": 2}), "is a map of 1")],
            ),
            (Kind::List, json!([]), vec![(json!({}), "is a map of 0")]),
            (Kind::Map, json!({}), vec![(json!([1]), "is a list of 1")]),
            (
                Kind::Texts,
                json!({"a": "b"}),
                vec![(json!({"a": "b", "c": 3}), "holds 3"), (json!(3), "is 3")],
            ),
        ] {
            assert_eq!(kind.misfit(&good), None, "{kind:?} {good}");
            assert_eq!(kind.misfit(&Value::Null), None, "{kind:?}");
            for (bad, expected) in bad {
                assert_eq!(kind.misfit(&bad).as_deref(), Some(expected), "{kind:?} {bad}");
                assert_eq!(Kind::Any.misfit(&bad), None);
            }
        }
    }

    #[test]
    fn values_of_gguf_files_are_held_to_the_same_kinds() {
        use gguf_file::Value as V;
        let text = || V::String("a".into());
        for (kind, good, bad, expected) in [
            (Kind::Id, V::U32(u32::MAX), V::I32(-1), "is -1"),
            (Kind::Id, V::I64(7), V::U64(1 << 32), "is 4294967296"),
            (Kind::Id, V::U8(7), text(), "is `a`"),
            (Kind::Bool, V::Bool(true), V::U8(1), "is 1"),
            (Kind::Text, text(), V::F32(0.5), "is 0.5"),
            (Kind::List, V::Array(vec![]), text(), "is `a`"),
            (Kind::Number, V::F64(0.5), V::Bool(true), "is true"),
            (Kind::Size, V::U64(1 << 40), V::F32(1.0), "is 1"),
        ] {
            assert_eq!(kind.misfit_gguf(&good), None, "{kind:?}");
            assert_eq!(kind.misfit_gguf(&bad).as_deref(), Some(expected), "{kind:?}");
        }
    }
}
