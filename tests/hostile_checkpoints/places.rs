//! Files that are none, and links.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use crate::files::{self, Fate, INDEX, Mutant};
use crate::judge::{Judge, Seen};
use crate::memory;

/// Puts something in the place of a file.
type Change<'a> = &'a dyn Fn(&Path, &str);

#[test]
fn links_and_what_is_no_file() {
    let _alone = memory::alone();
    let sound = Judge::new();
    let outside = sound.outside();
    let changes: [(&str, Change<'_>); 8] = [
        ("a link to as good a file", &|path, name| symlink(outside.join(name), path).unwrap()),
        ("a link beside", &|path, name| symlink(Path::new("../../outside").join(name), path).unwrap()),
        ("a link to itself", &|path, name| symlink(name, path).unwrap()),
        ("a link to nothing", &|path, _| symlink("nothing", path).unwrap()),
        ("a link to a device", &|path, _| symlink("/dev/zero", path).unwrap()),
        ("a directory", &|path, _| fs::create_dir(path).unwrap()),
        ("a socket", &|path, _| drop(UnixListener::bind(path).unwrap())),
        ("a pipe that nobody writes to", &|path, _| {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
    ];
    for name in sound.files.keys() {
        for (label, change) in &changes {
            let mut files = sound.files.clone();
            files.remove(name);
            files::write(&sound.place(), &files);
            change(&sound.place().join(name), name);
            let fate = match name.as_str() {
                INDEX => Fate::Refused("it is not a regular file"),
                _ => Fate::Damaged,
            };
            let mutant = Mutant { label: format!("{name} is {label}"), files, fate };
            assert_eq!(sound.judge_place(&mutant), Seen::Refused);
        }
    }
}

#[test]
fn an_index_of_absurd_length() {
    let _alone = memory::alone();
    let sound = Judge::new();
    files::write(&sound.place(), &sound.files);
    let index = fs::File::options().write(true).open(sound.place().join(INDEX)).unwrap();
    index.set_len(1 << 40).unwrap();
    let (label, fate) = ("a TiB of nothing".to_owned(), Fate::Refused("it is larger than 1073741824 bytes"));
    let mutant = Mutant { label, files: sound.files.clone(), fate };
    assert_eq!(sound.judge_place(&mutant), Seen::Refused);
}
