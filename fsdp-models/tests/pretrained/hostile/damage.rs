//! Files that are not what was written.

use serde_json::{Map, Value, json};

pub struct Random(pub u64);

impl Random {
    /// Below `limit`. SplitMix64.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % limit.max(1) as u64) as usize
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// Damages bytes, those of the first `header` ones above all.
pub fn bytes(random: &mut Random, bytes: &mut Vec<u8>, header: usize) {
    for _ in 0..random.pick(&[1, 1, 1, 2, 4]) {
        let range = if random.below(8) > 0 { header.min(bytes.len()) } else { bytes.len() };
        let at = random.below(range);
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => {
                bytes.splice(at..at, (0..random.below(9)).map(|byte| byte as u8));
            }
            2 => {
                let end = (at + random.below(9)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
            3 => {
                let number: u64 = random.pick(&[
                    u64::MAX,
                    1 << 63,
                    i64::MAX as u64,
                    1 << 40,
                    1 << 31,
                    u64::from(u32::MAX),
                    0,
                    1 << 61,
                ]);
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            4 => {
                let digits =
                    random.pick(&["9999999999", "-1", "1e300", "null", "[]", "\"\"", "0", "4294967296"]);
                bytes.splice(at..at, digits.bytes());
            }
            5 if at < bytes.len() => bytes[at] = random.pick(b"0123456789\"{}[],:/.\\\0\xff"),
            _ if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
}

/// Changes values of a JSON file, or takes them out: what comes is JSON, of another meaning.
pub fn json(random: &mut Random, text: &[u8]) -> Vec<u8> {
    let mut value: Value = serde_json::from_slice(text).unwrap();
    for _ in 0..random.pick(&[1, 1, 2, 4]) {
        change(random, &mut value);
    }
    serde_json::to_vec(&value).unwrap()
}

/// Goes down into the value, and changes what it comes to.
fn change(random: &mut Random, value: &mut Value) {
    let deeper = random.below(5) > 0;
    match value {
        Value::Object(members) if !members.is_empty() => {
            let name = random.pick(&members.keys().cloned().collect::<Vec<_>>());
            match random.below(12) {
                0 => drop(members.remove(&name)),
                1 => {
                    let member = members.remove(&name).unwrap();
                    members.insert(hostile_text(random), member);
                }
                2 => {
                    members.insert(hostile_text(random), hostile(random));
                }
                _ => change(random, members.get_mut(&name).unwrap()),
            }
        }
        Value::Array(elements) if !elements.is_empty() && deeper => {
            let at = random.below(elements.len());
            match random.below(6) {
                0 => drop(elements.remove(at)),
                1 => {
                    let element = elements[at].clone();
                    elements.extend(vec![element; random.below(200)]);
                }
                _ => change(random, &mut elements[at]),
            }
        }
        // Many things differ by their kind alone.
        Value::String(text) if random.below(3) == 0 => {
            *text = random
                .pick(&[
                    "Replace",
                    "Prepend",
                    "Sequence",
                    "ByteLevel",
                    "TemplateProcessing",
                    "Strip",
                    "NFKD",
                    "Metaspace",
                    "WordPiece",
                    "Unigram",
                    "WordLevel",
                    "BPE",
                    "llama",
                    "LORA",
                    "silu",
                ])
                .to_owned();
        }
        _ => *value = hostile(random),
    }
}

fn hostile_text(random: &mut Random) -> String {
    match random.below(6) {
        0 => "x".repeat(300 + random.below(50_000)),
        1 => "\u{1b}[2J\0\u{202e}".repeat(1 + random.below(500)),
        2 => "../../etc/passwd".to_owned(),
        3 => String::new(),
        _ => random.pick(&["type", "id", "A", "B", "vocab", "truncation", "padding", "single"]).to_owned(),
    }
}

fn hostile(random: &mut Random) -> Value {
    match random.below(10) {
        0..4 => random.pick(&[
            json!(0),
            json!(1),
            json!(-1),
            json!(0.5),
            json!(1e300),
            json!(u64::MAX),
            json!(i64::MAX),
            json!(1u64 << 62),
            json!(1u64 << 40),
            json!(1u64 << 31),
            json!(u32::MAX),
            json!(65536),
        ]),
        4 | 5 => hostile_text(random).into(),
        6 => random.pick(&[
            json!(null),
            json!([]),
            json!({}),
            json!(true),
            json!(false),
            json!([[[]]]),
            json!({"": {}}),
        ]),
        7 => {
            let names = (0..random.below(300)).map(|name| (format!("{name:0>50}"), json!(name)));
            Value::Object(names.collect::<Map<_, _>>())
        }
        8 => {
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(random.below(3000))})
        }
        _ => (0..random.below(110)).fold(json!(0), |value, _| json!([value])),
    }
}
