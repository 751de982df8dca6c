//! Bytes that are not those that were written.

use crate::files::{Fate, Files, INDEX, Mutant, Random};

/// Damages bytes, those of the first `header` ones above all.
fn damage(random: &mut Random, bytes: &mut Vec<u8>, header: usize) {
    for _ in 0..random.pick(&[1, 1, 1, 2, 4]) {
        let range = if random.below(2) == 0 { header.min(bytes.len()) } else { bytes.len() };
        let at = random.below(range);
        let end = (at + random.below(64)).min(bytes.len());
        match random.below(14) {
            0 => bytes.truncate(at),
            1 => {
                bytes.splice(at..at, (0..random.below(9)).map(|byte| byte as u8));
            }
            2 => {
                bytes.drain(at..end);
            }
            3 => bytes[at..end].fill(0),
            4 => {
                let number: u64 = random.pick(&[u64::MAX, 1 << 63, i64::MAX as u64, 1 << 40, 1 << 31, 0]);
                let end = (at + 8).min(bytes.len());
                bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            }
            5 => {
                let text =
                    random.pick(&["9999999999", "-1", "1e300", "null", "[]", "\"\"", "../", "\u{feff}"]);
                bytes.splice(at..at, text.bytes());
            }
            6 => bytes.extend((0..random.below(3000)).map(|byte| byte as u8)),
            7 if at < bytes.len() => bytes[at] = random.pick(b"0123456789\"{}[],:/.\\\0\xff"),
            _ if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
}

/// `count` mutants of one file.
pub fn of_file<'a>(
    seed: u64,
    count: usize,
    sound: &'a Files,
    name: &'a str,
) -> impl Iterator<Item = Mutant> + 'a {
    let mut random = Random(seed);
    let bytes = &sound[name];
    let header = if name == INDEX { bytes.len() } else { 8 + bytes[0] as usize + 256 * bytes[1] as usize };
    (0..count).map(move |case| {
        let mut files = sound.clone();
        damage(&mut random, files.get_mut(name).unwrap(), header);
        Mutant { label: format!("{name}, case {case} of seed {seed}"), files, fate: Fate::Damaged }
    })
}

/// Files that are gone, empty, or in each other's place.
pub fn of_places(sound: &Files) -> Vec<Mutant> {
    let mut mutants = Vec::new();
    let mut add = |label: String, files: Files| {
        mutants.push(Mutant { label, files, fate: Fate::Damaged });
    };
    for name in sound.keys() {
        let mut files = sound.clone();
        files.remove(name);
        add(format!("without {name}"), files);
        for other in sound.keys() {
            let mut files = sound.clone();
            files.insert(name.clone(), sound[other].clone());
            add(format!("{other} as {name}"), files);
        }
        for length in [0, 1, 7, 8, sound[name].len() - 1] {
            let mut files = sound.clone();
            files.get_mut(name).unwrap().truncate(length);
            add(format!("{length} bytes of {name}"), files);
        }
        for byte in [0, b'[', b'{', 0xff] {
            let mut files = sound.clone();
            files.get_mut(name).unwrap().fill(byte);
            add(format!("{name} of bytes {byte}"), files);
        }
    }
    mutants
}
