//! Indices that were written on purpose: their checksum is true.

use serde_json::{Map, Value, json};

use crate::files::{Fate, Files, INDEX, Mutant, Random, encode, index, with_checksum};

/// Names that lead elsewhere, or are none.
const NAMES: [&str; 16] = [
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

/// The index as text, changed as text.
fn of_text(mutants: &mut Vec<Mutant>, sound: &Files) {
    let text = serde_json::to_string_pretty(&index(sound)).unwrap();
    let mut add = |label: &str, bytes: Vec<u8>, fate| {
        let mut files = sound.clone();
        files.insert(INDEX.into(), bytes);
        mutants.push(Mutant { label: label.into(), files, fate });
    };
    let nested = |depth: usize| format!("\"deep\": {}{},", "[".repeat(depth), "]".repeat(depth));
    let first = |what: &str| with_checksum(&text.replacen('{', &format!("{{{what}"), 1));
    let value =
        |what: &str| with_checksum(&text.replacen("\"values\": {", &format!("\"values\": {{{what}"), 1));
    add("as it was", with_checksum(&text), Fate::Sound);
    add("in one line", with_checksum(&index(sound).to_string()), Fate::Sound);
    add("something more", first("\"new\": [1, {\"a\": 2.5}],"), Fate::Sound);
    add("deep, not read", first(&nested(100)), Fate::Sound);
    add("deep", value(&nested(100)), Fate::Sound);
    add("very deep, not read", first(&nested(100_000)), Fate::Sound);
    for depth in [128, 100_000] {
        add("too deep", value(&nested(depth)), Fate::Refused("recursion limit exceeded"));
    }
    add("two steps", first("\"step\": 7,"), Fate::Refused("duplicate field `step`"));
    add("two versions", first("\"version\": 1,"), Fate::Refused("duplicate field `version`"));
    add("a version beyond numbers", first("\"version\": 1e999,"), Fate::Refused("number out of range"));
    add("half a pair", value("\"a\": \"\\ud800\","), Fate::Refused("hex escape"));
    let crlf = text.replace('\n', "\r\n");
    add("lines of another system", with_checksum(&crlf), Fate::Sound);
    add("no text", [b"\xff\xfe".to_vec(), with_checksum(&text)].concat(), Fate::Refused("invalid utf-8"));
    add(
        "marked as text",
        [b"\xef\xbb\xbf".to_vec(), with_checksum(&text)].concat(),
        Fate::Refused("expected value"),
    );
    add(
        "an end and more",
        [with_checksum(&text), b"{}".to_vec()].concat(),
        Fate::Refused("trailing characters"),
    );
    add("no checksum", text.clone().into_bytes(), Fate::Refused("it has no checksum"));
    add("two checksums", with_checksum(std::str::from_utf8(&with_checksum(&text)).unwrap()), Fate::Sound);
    let long = "x".repeat(100_000);
    add("one long name, many values", value(&format!("\"{long}\": 0,{}", many_values(20_000))), Fate::Sound);
    add(
        "many values in one of a long name",
        value(&format!("\"{long}\": {{{}\"\": 0}},", many_values(20_000))),
        Fate::Sound,
    );
    add("lists of nothing", value(&format!("\"a\": [{}[]],", "[],".repeat(100_000))), Fate::Sound);
    add("objects of nothing", value(&format!("\"a\": [{}[]],", "{\"\":0},".repeat(30_000))), Fate::Sound);
}

fn many_values(count: usize) -> String {
    (0..count).map(|at| format!("\"{at:x}\":0,")).collect()
}

/// What else there is to try, each by itself.
pub fn by_hand(sound: &Files) -> Vec<Mutant> {
    let mut mutants = Vec::new();
    of_text(&mut mutants, sound);
    let mut add = |label: String, fate, change: &dyn Fn(&mut Value)| {
        let mut changed = index(sound);
        change(&mut changed);
        let mut files = sound.clone();
        files.insert(INDEX.into(), encode(&changed));
        mutants.push(Mutant { label, files, fate });
    };
    use Fate::{Forged, Refused, Sound, Unfit};

    for name in NAMES {
        let fate = if name == "~" { Refused("cannot open") } else { Refused("is not a plain name") };
        add(format!("file {name:?}"), fate, &|index| index["files"][0]["name"] = name.into());
    }
    for length in [256, 5000, 1 << 20] {
        let name = "x".repeat(length);
        add(format!("a file name of {length}"), Refused("cannot open"), &|index| {
            index["files"][0]["name"] = name.clone().into();
        });
    }
    add("the index as a file".into(), Refused("were written"), &|index| {
        index["files"][0]["name"] = INDEX.into();
    });
    add("a file twice".into(), Refused("is listed twice"), &|index| {
        index["files"][1] = index["files"][0].clone();
    });
    add("files in another order".into(), Forged, &|index| {
        index["files"].as_array_mut().unwrap().swap(0, 1);
    });
    add("a file that nothing is in".into(), Refused("no tensor is in file"), &|index| {
        let more = json!({"name": "more", "bytes": 0, "header_crc32": 0});
        index["files"].as_array_mut().unwrap().push(more);
    });
    add("a hundred thousand files".into(), Refused("no tensor is in file"), &|index| {
        let more = (0..100_000).map(|at| json!({"name": format!("f{at}"), "bytes": 1, "header_crc32": 0}));
        index["files"].as_array_mut().unwrap().extend(more);
    });
    for bytes in [0, 8, u64::MAX, 1 << 40] {
        let words = if bytes > 1 << 30 { "belong to no tensor" } else { "but the file has" };
        add(format!("a file of {bytes}"), Refused(words), &|index| index["files"][0]["bytes"] = bytes.into());
    }
    add("no files".into(), Refused("but there are 0"), &|index| index["files"] = json!([]));
    add("a header of another checksum".into(), Forged, &|index| index["files"][0]["header_crc32"] = 1.into());

    type Change = fn(&mut Value);
    let parts: [(&str, Fate, Change); 22] = [
        ("no parts", Refused("has parts for 0 of its 25 elements"), |t| t["parts"] = json!([])),
        ("a part twice", Refused("has a part of"), |t| {
            let part = t["parts"][0].clone();
            t["parts"].as_array_mut().unwrap().insert(0, part);
        }),
        ("parts in another order", Refused("has a part of"), |t| {
            t["parts"].as_array_mut().unwrap().reverse()
        }),
        ("a gap", Refused("expected one from 0"), |t| t["parts"][0]["start"] = 1.into()),
        ("an overlap", Refused("has a part of"), |t| t["parts"][1]["start"] = 1.into()),
        ("a part too long", Refused("within 25"), |t| t["parts"][1]["len"] = 26.into()),
        ("a part of nothing", Refused("has a part of 0 elements"), |t| t["parts"][0]["len"] = 0.into()),
        ("a part beyond numbers", Refused("has a part of"), |t| t["parts"][0]["len"] = u64::MAX.into()),
        ("a start beyond numbers", Refused("has a part of"), |t| t["parts"][1]["start"] = u64::MAX.into()),
        ("an offset beyond numbers", Refused("but the file has"), |t| {
            t["parts"][0]["offset"] = u64::MAX.into()
        }),
        ("an offset behind the end", Refused("but the file has"), |t| {
            t["parts"][0]["offset"] = 1_000_000.into()
        }),
        ("bytes of another tensor", Refused("share bytes of"), |t| {
            t["parts"][0]["offset"] = (t["parts"][0]["offset"].as_u64().unwrap() + 4).into();
        }),
        ("bytes of the header", Refused("belong to no tensor"), |t| t["parts"][0]["offset"] = 0.into()),
        ("a file that is not", Refused("is in file 3, but there are 3"), |t| {
            t["parts"][0]["file"] = 3.into()
        }),
        ("a file beyond numbers", Refused("is in file"), |t| t["parts"][0]["file"] = u64::MAX.into()),
        ("no checksums", Refused("has 0 checksums"), |t| t["parts"][0]["crc32"] = json!([])),
        ("many checksums", Refused("has 300000 checksums"), |t| {
            t["parts"][0]["crc32"] = vec![7; 300_000].into()
        }),
        ("a checksum beyond numbers", Refused("invalid value"), |t| {
            t["parts"][0]["crc32"][0] = (1u64 << 32).into()
        }),
        ("a shape beyond numbers", Refused("is too large"), |t| t["shape"] = json!([1u64 << 32, 1u64 << 32])),
        ("bytes beyond numbers", Refused("is too large"), |t| t["shape"] = json!([u64::MAX])),
        ("an unknown dtype", Refused("unknown variant `Q4_0`"), |t| t["dtype"] = "Q4_0".into()),
        ("a wider dtype", Refused("share bytes of"), |t| t["dtype"] = "F64".into()),
    ];
    for (label, fate, change) in parts {
        add(label.into(), fate, &|index| change(&mut index["tensors"]["model"]["layers.0.weight"]));
    }
    // What nothing says is wrong, but which does not fit the model.
    let others: [(&str, Fate, Change); 12] = [
        ("another checksum", Unfit("is corrupted: bytes "), |t| t["parts"][0]["crc32"][0] = 0.into()),
        ("another shape", Unfit("of another shape: layers.0.weight"), |t| t["shape"] = json!([25])),
        ("many dims", Unfit("of another shape: layers.0.weight"), |t| {
            t["shape"] = [vec![25], vec![1; 50_000]].concat().into()
        }),
        ("integers", Unfit("of another dtype: layers.0.weight (model F32, file I32)"), |t| {
            t["dtype"] = "I32".into()
        }),
        ("a shape of nothing", Refused("within 0"), |t| t["shape"] = json!([0, u64::MAX])),
        ("no dims", Refused("within 1"), |t| t["shape"] = json!([])),
        ("a dim below 0", Refused("invalid value"), |t| t["shape"] = json!([-5, 5])),
        ("a half dim", Refused("invalid type"), |t| t["shape"] = json!([2.5, 10])),
        ("a dim as text", Refused("invalid type"), |t| t["shape"] = json!(["5", "5"])),
        ("a dtype as number", Refused("expected value"), |t| t["dtype"] = 1.into()),
        ("nothing", Refused("missing field"), |t| *t = json!({})),
        ("null", Refused("invalid type"), |t| *t = json!(null)),
    ];
    for (label, fate, change) in others {
        add(label.into(), fate, &|index| change(&mut index["tensors"]["model"]["layers.0.weight"]));
    }

    let empty = |shape: Value| json!({"dtype": "F32", "shape": shape, "parts": []});
    for name in
        ["../../outside", "/etc/passwd", "a\0b", "", "__metadata__", "\u{1b}[2J\n", ":", &"x".repeat(100_000)]
    {
        let label: String = name.escape_debug().take(20).collect();
        let fate = match name {
            _ if name.len() > 1024 => Refused("bytes, more than 1024"),
            _ if name.contains(char::is_control) => Refused("has control characters"),
            _ => Forged,
        };
        add(format!("a tensor `{label}`"), fate, &|index| {
            let weight = index["tensors"]["model"]["head"].take();
            index["tensors"]["model"].as_object_mut().unwrap().remove("head");
            index["tensors"]["model"][name] = weight;
        });
        add(format!("a tensor of nothing `{label}`"), fate, &|index| {
            index["tensors"]["model"][name] = empty(json!([0, u64::MAX]));
        });
        add(format!("a section `{label}`"), fate, &|index| {
            index["tensors"][name] = json!({ name: empty(json!([0])) });
        });
        add(format!("a value `{label}`"), Sound, &|index| index["values"][name] = name.into());
    }
    add("no sections".into(), Refused("no tensor is in file"), &|index| index["tensors"] = json!({}));
    add("many tensors and a long name".into(), Forged, &|index| {
        let model = index["tensors"]["model"].as_object_mut().unwrap();
        model.extend((0..3000).map(|at| (format!("t{at}"), empty(json!([0])))));
        model.insert("x".repeat(1024), empty(json!([0])));
    });
    add("many tensors and a long shape".into(), Forged, &|index| {
        let model = index["tensors"]["model"].as_object_mut().unwrap();
        model.extend((0..3000).map(|at| (format!("t{at}"), empty(json!([0])))));
        model.insert("s".into(), empty(vec![0; 50_000].into()));
    });
    add("many tensors in a section of a long name".into(), Forged, &|index| {
        let many = (0..3000).map(|at| (format!("t{at}"), empty(json!([0]))));
        index["tensors"]["x".repeat(1024)] = Value::Object(many.collect());
    });
    add("many sections and a long name".into(), Forged, &|index| {
        let sections = index["tensors"].as_object_mut().unwrap();
        sections.extend((0..10_000).map(|at| (format!("s{at}"), json!({}))));
        sections.insert("x".repeat(1024), json!({}));
    });

    for (version, fate) in [
        (json!(2), Refused("has format version 2: this program knows versions up to 1")),
        (json!(u64::MAX), Refused("knows versions up to 1")),
        (json!(-1), Refused("invalid value")),
        (json!("1"), Refused("invalid type")),
        (json!(1.0), Refused("invalid type")),
    ] {
        add(format!("version {version}"), fate, &|index| index["version"] = version.clone());
    }
    add("another format".into(), Refused("its format is `zip`"), &|index| index["format"] = "zip".into());
    for step in [0, 1, i64::MAX as u64] {
        add(format!("step {step}"), Forged, &|index| index["step"] = step.into());
    }
    for step in [1u64 << 63, u64::MAX] {
        add(format!("step {step}"), Refused("is more than 9223372036854775807"), &|index| {
            index["step"] = step.into()
        });
    }
    add("the largest seed".into(), Forged, &|index| index["seed"] = u64::MAX.into());
    for ranks in [0, u64::MAX] {
        add(format!("{ranks} ranks"), Sound, &|index| index["written_by"]["ranks"] = ranks.into());
    }
    add("a writer of many words".into(), Sound, &|index| {
        index["written_by"]["mesh"] = "dp_shard \u{1b}[31m".repeat(10_000).into();
    });
    add("no writer".into(), Refused("missing field `written_by`"), &|index| {
        index.as_object_mut().unwrap().remove("written_by");
    });

    let no_optimizer = "its value `optimizer` is not an optimizer's";
    for (name, value, words) in [
        ("rule", json!("sgd"), "its optimizer is sgd, expected adamw"),
        ("rule", json!("\u{1b}[2J"), "its optimizer is \\u{1b}[2J, expected adamw"),
        ("rule", json!(1), no_optimizer),
        ("steps", json!(u64::MAX), "has taken 18446744073709551615 steps, more than"),
        ("steps", json!(-1), no_optimizer),
        ("steps", json!("3"), no_optimizer),
        ("learning_rate", json!(-1.0), "a learning rate of -1, expected"),
        ("learning_rate", json!(null), no_optimizer),
        ("learning_rate", json!("NaN"), no_optimizer),
        ("param_steps", json!([]), no_optimizer),
        ("param_steps", json!({"gain": u64::MAX}), "has taken 18446744073709551615 steps, more than"),
    ] {
        add(format!("optimizer with {name} {value}"), Unfit(words), &|index| {
            index["values"]["optimizer"][name] = value.clone();
        });
    }
    for (name, value) in [
        ("steps", json!(i64::MAX)),
        ("learning_rate", json!(1e300)),
        ("learning_rate", json!(0)),
        ("param_steps", json!({"gain": 0, "no such": 5, "head": i64::MAX})),
        ("settings", json!("x".repeat(100_000))),
        ("more", json!([{}])),
    ] {
        add(format!("optimizer with {name} {}", value.to_string().len()), Forged, &|index| {
            index["values"]["optimizer"][name] = value.clone();
        });
    }
    for value in [json!(null), json!(-1), json!(1.5), json!("3"), json!({})] {
        let fate = Unfit("its value `ema` is not what is expected");
        add(format!("average of {value} updates"), fate, &|index| index["values"]["ema"] = value.clone());
    }
    add(
        "average of many updates".into(),
        Unfit("`ema` has 18446744073709551615 updates, more than"),
        &|index| {
            index["values"]["ema"] = u64::MAX.into();
        },
    );
    for (name, words) in [("optimizer", "has no value `optimizer`"), ("ema", "has no value `ema`")] {
        add(format!("no value {name}"), Unfit(words), &|index| {
            index["values"].as_object_mut().unwrap().remove(name);
        });
    }
    mutants
}
