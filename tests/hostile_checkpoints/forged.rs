//! Indices that were changed at random, with a true checksum.

use serde_json::{Map, Value, json};

use crate::files::{Fate, Files, INDEX, Mutant, Random, encode, index};

/// Names that lead elsewhere, or are none.
pub const NAMES: [&str; 16] = [
    "../outside/rank-00000.safetensors",
    "../../outside/rank-00000.safetensors",
    "./rank-00000.safetensors",
    "/etc/passwd",
    "/dev/zero",
    "sub/rank-00000.safetensors",
    "..\\outside\\rank-00000.safetensors",
    "C:\\rank-00000.safetensors",
    "rank-00000.safetensors:stream",
    "rank-00000.safetensors\0",
    "rank-00000.safetensors\n\u{1b}[2J",
    "",
    ".",
    "..",
    ".lock",
    "~",
];

const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "0.5",
    "1e300",
    "4294967295",
    "4294967296",
    "4611686018427387904",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1000000",
];

fn number(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn hostile_name(random: &mut Random) -> String {
    if random.below(8) == 0 { "x".repeat(300 + random.below(20_000)) } else { random.pick(&NAMES).to_owned() }
}

fn hostile_value(random: &mut Random) -> Value {
    match random.below(10) {
        0..5 => number(random.pick(&NUMBERS)),
        5 => hostile_name(random).into(),
        6 => random.pick(&["F32", "BF16", "F64", "I64", "U8", "Q4_0", "f32"]).into(),
        7 => random.pick(&[json!(null), json!([]), json!({}), json!(true), json!([[[]]]), json!({"": {}})]),
        8 => (0..random.below(40)).map(|_| number(random.pick(&NUMBERS))).collect(),
        _ => {
            let depth = random.below(110);
            (0..depth).fold(json!(0), |value, _| json!([value]))
        }
    }
}

/// JSON pointers of everything in `value`.
fn places(value: &Value, at: String, places: &mut Vec<String>) {
    match value {
        Value::Object(members) => members.iter().for_each(|(name, member)| {
            self::places(member, format!("{at}/{}", name.replace('~', "~0").replace('/', "~1")), places);
        }),
        Value::Array(elements) => elements.iter().enumerate().for_each(|(index, element)| {
            self::places(element, format!("{at}/{index}"), places);
        }),
        _ => {}
    }
    places.push(at);
}

fn change(random: &mut Random, index: &mut Value) {
    let mut all = Vec::new();
    places(index, String::new(), &mut all);
    // Most of it is tensors, in which little can be changed unnoticed.
    if random.below(2) == 0 {
        all.retain(|place| !place.starts_with("/tensors") && !place.starts_with("/files"));
    }
    let value = index.pointer_mut(&random.pick(&all)).unwrap();
    match (random.below(6), &mut *value) {
        (0, Value::Object(members)) if !members.is_empty() => {
            let name = random.pick(&members.keys().cloned().collect::<Vec<_>>());
            let member = members.remove(&name).unwrap();
            if random.below(2) == 0 {
                members.insert(hostile_name(random), member);
            }
        }
        (0 | 1, Value::Array(elements)) if !elements.is_empty() => {
            let at = random.below(elements.len());
            let element = elements[at].clone();
            match random.below(4) {
                0 => elements.insert(at, element),
                1 => elements.reverse(),
                2 => elements.extend(vec![element; random.below(2000)]),
                _ => drop(elements.remove(at)),
            }
        }
        (0..5, Value::Number(old)) => {
            let old = old.as_u64().unwrap_or_default();
            let near = [old.wrapping_add(1), old.wrapping_sub(1), old.wrapping_mul(2), old / 2, !old];
            *value =
                if random.below(2) == 0 { random.pick(&near).into() } else { number(random.pick(&NUMBERS)) };
        }
        (0..5, Value::String(_)) => *value = hostile_name(random).into(),
        // The whole of it, or of a section, less often.
        (_, Value::Object(_) | Value::Array(_)) if random.below(3) > 0 => change(random, index),
        _ => *value = hostile_value(random),
    }
}

/// `count` indices, each with one to three things changed.
pub fn at_random(seed: u64, count: usize, sound: &Files) -> impl Iterator<Item = Mutant> + '_ {
    let mut random = Random(seed);
    let sound_index = index(sound);
    (0..count).map(move |case| {
        let mut changed = sound_index.clone();
        for _ in 0..random.pick(&[1, 1, 1, 2, 3]) {
            change(&mut random, &mut changed);
        }
        // `null` and the like have no place for a checksum.
        if !changed.is_object() || changed.as_object().is_some_and(Map::is_empty) {
            changed = json!({ "format": changed });
        }
        let mut files = sound.clone();
        files.insert(INDEX.into(), encode(&changed));
        Mutant { label: format!("index {case} of seed {seed}"), files, fate: Fate::Forged }
    })
}
