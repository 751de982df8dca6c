//! Damaged and hostile checkpoints through everything that reads them: errors that name the place, no panics, no memory on
//! their word, nothing outside their directory, and never a wrong value.
//!
//! A program of its own, as it counts all memory.

mod by_hand;
mod damage;
mod files;
mod forged;
mod judge;
mod memory;
#[path = "../checkpoint/model.rs"]
mod model;
#[cfg(unix)]
mod places;
mod run;

use files::{INDEX, Mutant};
use judge::{Judge, Seen};

/// Of so many checkpoints a short run has a quarter, and others `FSDP_HOSTILE_FACTOR` times as many; see `tests/README.md`.
fn share(whole: usize) -> usize {
    std::env::var("FSDP_HOSTILE_FACTOR")
        .map_or(whole / 4, |factor| whole * factor.parse::<usize>().expect("FSDP_HOSTILE_FACTOR is a number"))
}

/// Judges all, and counts those that were refused, opened and restored.
fn judge(judge: &Judge, mutants: impl IntoIterator<Item = Mutant>) -> [usize; 3] {
    let mut seen = [0; 3];
    for mutant in mutants {
        match judge.judge(&mutant) {
            Seen::Refused => seen[0] += 1,
            Seen::Opened => seen[1] += 1,
            Seen::Restored => seen[2] += 1,
        }
    }
    seen
}

#[test]
fn damaged_indices() {
    let _alone = memory::alone();
    let sound = Judge::new();
    let [refused, opened, restored] = judge(&sound, damage::of_file(1, share(200), &sound.files, INDEX));
    assert!(refused * 20 > (refused + opened + restored) * 19, "{refused} {opened} {restored}");
}

#[test]
fn damaged_files() {
    let _alone = memory::alone();
    let sound = Judge::new();
    let ranks = (2..).zip(sound.files.keys().filter(|name| *name != INDEX));
    let mutants = ranks.flat_map(|(seed, name)| damage::of_file(seed, share(120), &sound.files, name));
    let [refused, opened, restored] = judge(&sound, mutants);
    // A header is not needed to restore.
    let percent = |part: usize| part * 100 / (refused + opened + restored);
    let enough = percent(refused) > 27 && percent(opened) > 8 && percent(restored) > 27;
    assert!(enough, "{refused} {opened} {restored}");
}

#[test]
fn files_that_are_missing_or_mixed_up() {
    let _alone = memory::alone();
    let sound = Judge::new();
    let mutants = damage::of_places(&sound.files);
    let [refused, ..] = judge(&sound, mutants);
    assert!(refused > 20, "{refused}");
}

#[test]
fn forged_indices() {
    let _alone = memory::alone();
    let sound = Judge::new();
    let [refused, opened, restored] = judge(&sound, forged::at_random(5, share(500), &sound.files));
    let percent = |part: usize| part * 100 / (refused + opened + restored);
    let enough = percent(refused) > 40 && percent(opened) > 6 && percent(restored) > 10;
    assert!(enough, "{refused} {opened} {restored}");
}

#[test]
fn indices_forged_by_hand() {
    let _alone = memory::alone();
    let sound = Judge::new();
    let [refused, opened, restored] = judge(&sound, by_hand::mutants(&sound.files));
    assert!(refused > 70 && opened > 10 && restored > 10, "{refused} {opened} {restored}");
}
