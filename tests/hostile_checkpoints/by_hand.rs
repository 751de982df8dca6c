//! Indices that were written by hand to mislead, with a true checksum.

use serde_json::{Value, json};

use crate::files::{Fate, Files, INDEX, Mutant, encode, index, with_checksum};
use crate::forged::NAMES;

use Fate::{Forged, Refused, Sound, Unfit};

type Change = fn(&mut Value);

/// Mutants of one checkpoint, in the making.
struct List<'a> {
    sound: &'a Files,
    mutants: Vec<Mutant>,
}

impl List<'_> {
    fn add(&mut self, label: impl Into<String>, fate: Fate, change: impl FnOnce(&mut Value)) {
        let mut changed = index(self.sound);
        change(&mut changed);
        self.add_text(label, encode(&changed), fate);
    }

    fn add_text(&mut self, label: impl Into<String>, text: Vec<u8>, fate: Fate) {
        let mut files = self.sound.clone();
        files.insert(INDEX.into(), text);
        self.mutants.push(Mutant { label: label.into(), files, fate });
    }
}

/// All of them.
pub fn mutants(sound: &Files) -> Vec<Mutant> {
    let mut list = List { sound, mutants: Vec::new() };
    texts(&mut list);
    files(&mut list);
    parts(&mut list);
    names(&mut list);
    sizes(&mut list);
    facts(&mut list);
    counters(&mut list);
    list.mutants
}

/// The index as text, changed as text.
fn texts(list: &mut List<'_>) {
    let sound = index(list.sound);
    let text = serde_json::to_string_pretty(&sound).unwrap();
    let mut add = |label: &str, text, fate| list.add_text(label, text, fate);
    let nested = |depth: usize| format!("\"deep\": {}{},", "[".repeat(depth), "]".repeat(depth));
    let first = |what: &str| with_checksum(&text.replacen('{', &format!("{{{what}"), 1));
    let value =
        |what: &str| with_checksum(&text.replacen("\"values\": {", &format!("\"values\": {{{what}"), 1));
    add("as it was", with_checksum(&text), Sound);
    add("in one line", with_checksum(&sound.to_string()), Sound);
    add("something more", first("\"new\": [1, {\"a\": 2.5}],"), Refused("unknown field `new`"));
    add("deep, not read", first(&nested(100)), Refused("unknown field `deep`"));
    add("deep", value(&nested(100)), Sound);
    add("very deep, not read", first(&nested(100_000)), Refused("unknown field `deep`"));
    for depth in [128, 100_000] {
        add("too deep", value(&nested(depth)), Refused("recursion limit exceeded"));
    }
    add("two steps", first("\"step\": 7,"), Refused("duplicate field `step`"));
    add("two versions", first("\"version\": 2,"), Refused("duplicate field `version`"));
    add("a version beyond numbers", first("\"version\": 1e999,"), Refused("number out of range"));
    add("half a pair", value("\"a\": \"\\ud800\","), Refused("hex escape"));
    let crlf = text.replace('\n', "\r\n");
    add("lines of another system", with_checksum(&crlf), Sound);
    add("no text", [b"\xff\xfe".to_vec(), with_checksum(&text)].concat(), Refused("invalid utf-8"));
    add(
        "marked as text",
        [b"\xef\xbb\xbf".to_vec(), with_checksum(&text)].concat(),
        Refused("expected value"),
    );
    add("an end and more", [with_checksum(&text), b"{}".to_vec()].concat(), Refused("trailing characters"));
    add("no checksum", text.clone().into_bytes(), Refused("it has no checksum"));
    let twice = with_checksum(std::str::from_utf8(&with_checksum(&text)).unwrap());
    add("two checksums", twice, Refused("duplicate field `crc32`"));
    let long = "x".repeat(100_000);
    add("one long name, many values", value(&format!("\"{long}\": 0,{}", many_values(20_000))), Sound);
    add(
        "many values in one of a long name",
        value(&format!("\"{long}\": {{{}\"\": 0}},", many_values(20_000))),
        Sound,
    );
    add("lists of nothing", value(&format!("\"a\": [{}[]],", "[],".repeat(100_000))), Sound);
    add("objects of nothing", value(&format!("\"a\": [{}[]],", "{\"\":0},".repeat(30_000))), Sound);
}

fn many_values(count: usize) -> String {
    (0..count).map(|at| format!("\"{at:x}\":0,")).collect()
}

/// The files that the index names.
fn files(list: &mut List<'_>) {
    for name in NAMES {
        let fate = if name == "~" { Refused("cannot open") } else { Refused("is not a plain name") };
        list.add(format!("file {name:?}"), fate, |index| index["files"][0]["name"] = name.into());
    }
    for length in [256, 5000, 1 << 20] {
        let name = "x".repeat(length);
        list.add(format!("a file name of {length}"), Refused("cannot open"), |index| {
            index["files"][0]["name"] = name.clone().into();
        });
    }
    list.add("the index as a file", Refused("were written"), |index| {
        index["files"][0]["name"] = INDEX.into();
    });
    list.add("a file twice", Refused("is listed twice"), |index| {
        index["files"][1] = index["files"][0].clone();
    });
    list.add("files in another order", Forged, |index| {
        index["files"].as_array_mut().unwrap().swap(0, 1);
    });
    list.add("a file that nothing is in", Refused("no tensor is in file"), |index| {
        let more = json!({"name": "more", "bytes": 0, "header_crc32": 0});
        index["files"].as_array_mut().unwrap().push(more);
    });
    list.add("a hundred thousand files", Refused("no tensor is in file"), |index| {
        let more = (0..100_000).map(|at| json!({"name": format!("f{at}"), "bytes": 1, "header_crc32": 0}));
        index["files"].as_array_mut().unwrap().extend(more);
    });
    for bytes in [0, 8, u64::MAX, 1 << 40] {
        let words = if bytes > 1 << 30 { "belong to no tensor" } else { "but the file has" };
        list.add(format!("a file of {bytes}"), Refused(words), |index| {
            index["files"][0]["bytes"] = bytes.into()
        });
    }
    list.add("no files", Refused("but there are 0"), |index| index["files"] = json!([]));
    list.add("a header of another checksum", Forged, |index| index["files"][0]["header_crc32"] = 1.into());
}

/// One tensor: its parts, which must tile it and its files, its shape and its dtype.
fn parts(list: &mut List<'_>) {
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
        list.add(label, fate, |index| change(&mut index["tensors"]["model"]["layers.0.weight"]));
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
        list.add(label, fate, |index| change(&mut index["tensors"]["model"]["layers.0.weight"]));
    }
}

/// A tensor without elements.
fn empty(shape: Value) -> Value {
    json!({"dtype": "F32", "shape": shape, "parts": []})
}

/// Names of sections, tensors and values.
fn names(list: &mut List<'_>) {
    for name in
        ["../../outside", "/etc/passwd", "a\0b", "", "__metadata__", "\u{1b}[2J\n", ":", &"x".repeat(100_000)]
    {
        let label: String = name.escape_debug().take(20).collect();
        let fate = match name {
            _ if name.len() > 1024 => Refused("bytes, more than 1024"),
            _ if name.contains(char::is_control) => Refused("has control characters"),
            _ => Forged,
        };
        list.add(format!("a tensor `{label}`"), fate, |index| {
            let weight = index["tensors"]["model"]["head"].take();
            index["tensors"]["model"].as_object_mut().unwrap().remove("head");
            index["tensors"]["model"][name] = weight;
        });
        list.add(format!("a tensor of nothing `{label}`"), fate, |index| {
            index["tensors"]["model"][name] = empty(json!([0, u64::MAX]));
        });
        list.add(format!("a section `{label}`"), fate, |index| {
            index["tensors"][name] = json!({ name: empty(json!([0])) });
        });
        list.add(format!("a value `{label}`"), Sound, |index| index["values"][name] = name.into());
    }
}

/// Much of one thing, which meets something long in tables and messages.
fn sizes(list: &mut List<'_>) {
    list.add("no sections", Refused("no tensor is in file"), |index| index["tensors"] = json!({}));
    list.add("many tensors and a long name", Forged, |index| {
        let model = index["tensors"]["model"].as_object_mut().unwrap();
        model.extend((0..3000).map(|at| (format!("t{at}"), empty(json!([0])))));
        model.insert("x".repeat(1024), empty(json!([0])));
    });
    list.add("many tensors and a long shape", Forged, |index| {
        let model = index["tensors"]["model"].as_object_mut().unwrap();
        model.extend((0..3000).map(|at| (format!("t{at}"), empty(json!([0])))));
        model.insert("s".into(), empty(vec![0; 50_000].into()));
    });
    list.add("many tensors in a section of a long name", Forged, |index| {
        let many = (0..3000).map(|at| (format!("t{at}"), empty(json!([0]))));
        index["tensors"]["x".repeat(1024)] = Value::Object(many.collect());
    });
    list.add("many sections and a long name", Forged, |index| {
        let sections = index["tensors"].as_object_mut().unwrap();
        sections.extend((0..10_000).map(|at| (format!("s{at}"), json!({}))));
        sections.insert("x".repeat(1024), json!({}));
    });
}

/// Version, step, seed, who wrote it.
fn facts(list: &mut List<'_>) {
    for (version, fate) in [
        (json!(3), Refused("has format version 3: this program knows versions up to 2")),
        (json!(u64::MAX), Refused("knows versions up to 2")),
        (json!(-1), Refused("invalid value")),
        (json!("1"), Refused("invalid type")),
        (json!(1.0), Refused("invalid type")),
    ] {
        list.add(format!("version {version}"), fate, |index| index["version"] = version.clone());
    }
    list.add("another format", Refused("its format is `zip`"), |index| index["format"] = "zip".into());
    for step in [0, 1, i64::MAX as u64] {
        list.add(format!("step {step}"), Forged, |index| index["step"] = step.into());
    }
    for step in [1u64 << 63, u64::MAX] {
        list.add(format!("step {step}"), Refused("is more than 9223372036854775807"), |index| {
            index["step"] = step.into()
        });
    }
    list.add("the largest seed", Forged, |index| index["seed"] = u64::MAX.into());
    for ranks in [0, u64::MAX] {
        list.add(format!("{ranks} ranks"), Sound, |index| index["written_by"]["ranks"] = ranks.into());
    }
    list.add("a writer of many words", Sound, |index| {
        index["written_by"]["mesh"] = "dp_shard \u{1b}[31m".repeat(10_000).into();
    });
    list.add("no writer", Refused("missing field `written_by`"), |index| {
        index.as_object_mut().unwrap().remove("written_by");
    });
}

/// What the optimizer and the average have counted.
fn counters(list: &mut List<'_>) {
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
        list.add(format!("optimizer with {name} {value}"), Unfit(words), |index| {
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
        list.add(format!("optimizer with {name} {}", value.to_string().len()), Forged, |index| {
            index["values"]["optimizer"][name] = value.clone();
        });
    }
    for value in [json!(null), json!(-1), json!(1.5), json!("3"), json!({})] {
        let fate = Unfit("its value `ema` is not what is expected");
        list.add(format!("average of {value} updates"), fate, |index| index["values"]["ema"] = value.clone());
    }
    list.add(
        "average of many updates",
        Unfit("`ema` has 18446744073709551615 updates, more than"),
        |index| {
            index["values"]["ema"] = u64::MAX.into();
        },
    );
    for (name, words) in [("optimizer", "has no value `optimizer`"), ("ema", "has no value `ema`")] {
        list.add(format!("no value {name}"), Unfit(words), |index| {
            index["values"].as_object_mut().unwrap().remove(name);
        });
    }
}
