//! Limits on a `tokenizer.json`: its rules expand a text by a bounded factor, and every token that they name exists.

use std::collections::BTreeSet;

use fsdp::files::brief;
use serde_json::{Map, Value};

/// Most that a chain of normalizers, of pre-tokenizers or of decoders may make of one byte, in bytes. Each replaces what the
/// one before has made: a few lines could make more of a letter than fits any memory.
const GROWTH: u64 = 4096;

/// Most tokens that are put around a text.
const AROUND: usize = 1024;

/// Ids are counted up to the largest one where a tokenizer is saved.
const MAX_ID: u64 = 1 << 24;

/// Fails if the tokenizer in a `tokenizer.json` could make more of a text than it should, or would end the program.
pub(super) fn check(json: &Value) -> Result<(), String> {
    for part in ["normalizer", "pre_tokenizer", "decoder"] {
        let growth = json.get(part).map_or(1, growth);
        if growth > GROWTH {
            return Err(format!(
                "its {part} may make more than {GROWTH} bytes of one, as what it replaces is replaced again"
            ));
        }
    }
    let templates = json.get("post_processor").map(templates).unwrap_or_default();
    if templates.len() > 1 {
        return Err(format!(
            "its post_processor has {} templates, one of another's outcome",
            templates.len()
        ));
    }
    templates.into_iter().try_for_each(template)?;
    let added = json.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added = added.filter_map(|token| Some((token.get("content")?.as_str()?, token.get("id")?.as_u64()?)));
    let vocab = json.pointer("/model/vocab").and_then(Value::as_object).into_iter().flatten();
    let vocab = vocab.filter_map(|(token, id)| Some((token.as_str(), id.as_u64()?)));
    match vocab.chain(added).find(|(_, id)| *id >= MAX_ID) {
        Some((token, id)) => {
            Err(format!("its token `{}` has the id {id}: expected one below {MAX_ID}", brief(token)))
        }
        None => Ok(()),
    }
}

/// What may come of a byte, in bytes, at most.
fn growth(part: &Value) -> u64 {
    let Some(fields) = part.as_object() else { return 1 };
    let length = |field: &str| fields.get(field).and_then(Value::as_str).map_or(0, |text| text.len() as u64);
    let own = match fields.get("type").and_then(Value::as_str) {
        Some("Replace") => {
            let replaced = match fields.get("pattern") {
                Some(Value::String(text)) => text.len() as u64,
                Some(pattern) => {
                    pattern.get("String").and_then(Value::as_str).map_or(0, |text| text.len() as u64)
                }
                None => 0,
            };
            match replaced {
                // An expression may match nothing, before every byte.
                0 => 1 + length("content"),
                replaced => length("content").div_ceil(replaced).max(1),
            }
        }
        Some("Prepend") => 1 + length("prepend"),
        // Every byte that is not ASCII becomes a letter of two bytes.
        Some("ByteLevel") => 2,
        _ => 1,
    };
    let chain = ["normalizers", "pretokenizers", "decoders"].iter().filter_map(|field| fields.get(*field));
    chain.flat_map(|chain| chain.as_array().into_iter().flatten()).map(growth).fold(own, u64::saturating_mul)
}

/// The templates in a post-processor.
fn templates(part: &Value) -> Vec<&Map<String, Value>> {
    let Some(fields) = part.as_object() else { return Vec::new() };
    let chain = fields.get("processors").and_then(Value::as_array).into_iter().flatten();
    let own = (fields.get("type").and_then(Value::as_str) == Some("TemplateProcessing")).then_some(fields);
    own.into_iter().chain(chain.flat_map(templates)).collect()
}

fn template(fields: &Map<String, Value>) -> Result<(), String> {
    let defined = fields.get("special_tokens").and_then(Value::as_object);
    let ids = |token: &str| Some(defined?.get(token)?.get("ids")?.as_array()?.len());
    for (kind, texts) in [("single", &["A"][..]), ("pair", &["A", "B"])] {
        let pieces = fields.get(kind).and_then(Value::as_array).into_iter().flatten();
        let (mut seen, mut around) = (BTreeSet::new(), 0usize);
        for piece in pieces {
            let id = |of: &str| piece.get(of).and_then(|piece| piece.get("id")).and_then(Value::as_str);
            if let Some(text) = id("Sequence")
                && (!texts.contains(&text) || !seen.insert(text))
            {
                let expected = texts.join(" and ");
                let text = brief(text);
                return Err(format!(
                    "its template `{kind}` has the text `{text}`: expected {expected}, once each"
                ));
            }
            if let Some(token) = id("SpecialToken") {
                let Some(ids) = ids(token) else {
                    let token = brief(token);
                    return Err(format!(
                        "its template `{kind}` names the token `{token}`, which it does not define"
                    ));
                };
                around = around.saturating_add(ids);
            }
        }
        if around > AROUND {
            return Err(format!(
                "its template `{kind}` puts {around} tokens around a text: expected at most {AROUND}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(json: Value) -> String {
        check(&json).unwrap_err()
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[test]
    fn what_real_tokenizers_do_is_fine() {
        let sentencepiece = json!({
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                replace(json!({"String": " "}), "▁"),
            ]},
            "decoder": {"type": "Sequence", "decoders": [
                replace(json!({"String": "▁"}), " "),
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "post_processor": {"type": "Sequence", "processors": [
                {"type": "ByteLevel", "add_prefix_space": true},
                {"type": "TemplateProcessing",
                 "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                 "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                 "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            ]},
            "added_tokens": [{"id": 1, "content": "<s>"}],
            "model": {"vocab": {"a": 0, "b": 262_143}},
        });
        assert_eq!(check(&sentencepiece), Ok(()));
        assert_eq!(
            check(&json!({"normalizer": null, "post_processor": null, "decoder": {"type": "ByteLevel"}})),
            Ok(())
        );
    }

    #[test]
    fn what_grows_without_bound_is_refused() {
        let chain = |part: &str, list: &str, each: Value, times: usize| {
            let mut json = json!({});
            json[part] = json!({"type": "Sequence"});
            json[part][list] = Value::Array(vec![each; times]);
            json
        };
        let expected = |part: &str| {
            format!("its {part} may make more than 4096 bytes of one, as what it replaces is replaced again")
        };
        let doubled = || replace(json!({"String": "a"}), "aa");
        assert_eq!(check(&chain("normalizer", "normalizers", doubled(), 12)), Ok(()));
        assert_eq!(refusal(chain("normalizer", "normalizers", doubled(), 13)), expected("normalizer"));
        assert_eq!(
            refusal(chain("decoder", "decoders", replace(json!({"Regex": "."}), "aa"), 60)),
            expected("decoder")
        );
        let bytes = json!({"type": "ByteLevel"});
        assert_eq!(refusal(chain("pre_tokenizer", "pretokenizers", bytes, 40)), expected("pre_tokenizer"));
        let long = replace(json!({"String": ""}), &"x".repeat(5000));
        assert_eq!(refusal(json!({ "normalizer": long })), expected("normalizer"));
    }

    #[test]
    fn templates_have_what_they_name() {
        let template = |single: Value, ids: usize| {
            let ids: Vec<usize> = (0..ids).collect();
            json!({"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [],
                                      "special_tokens": {"<s>": {"id": "<s>", "ids": ids}}}})
        };
        let (text, start) = (json!({"Sequence": {"id": "A"}}), json!({"SpecialToken": {"id": "<s>"}}));
        assert_eq!(check(&template(json!([start, text]), 1)), Ok(()));
        assert_eq!(
            refusal(template(json!([{"SpecialToken": {"id": "[CLS]"}}, text]), 1)),
            "its template `single` names the token `[CLS]`, which it does not define"
        );
        let twice = "its template `single` has the text `A`: expected A, once each";
        assert_eq!(refusal(template(json!([text, text]), 1)), twice);
        let other = "its template `single` has the text `B`: expected A, once each";
        assert_eq!(refusal(template(json!([{"Sequence": {"id": "B"}}]), 1)), other);
        assert_eq!(
            refusal(template(json!([start, start, text]), 600)),
            "its template `single` puts 1200 tokens around a text: expected at most 1024"
        );
        let one = template(json!([text]), 1)["post_processor"].clone();
        let two = json!({"post_processor": {"type": "Sequence", "processors": [one, one]}});
        assert!(refusal(two).contains("has 2 templates"));
    }

    #[test]
    fn ids_can_be_counted_to() {
        let expected = "its token `x` has the id 4294967295: expected one below 16777216";
        assert_eq!(refusal(json!({"model": {"vocab": {"x": u32::MAX}}})), expected);
        assert_eq!(refusal(json!({"added_tokens": [{"content": "x", "id": u32::MAX}]})), expected);
    }
}
