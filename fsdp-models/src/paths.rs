//! The paths of a run. An output never overwrites an input, and never lies where a reader would take it for something else.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Component, Path, PathBuf};

use fsdp::checkpoint::{Checkpoints, INDEX_FILE};

pub use crate::error::PathError;

/// What a program reads and writes, by the options that say so. It is checked before anything is opened to be written.
///
/// Paths are compared by where they lead to, whether there is something yet or not: through links, and by the identity of files.
///
/// ```
/// use std::path::Path;
/// use fsdp_models::paths::Paths;
///
/// let dir = tempfile::tempdir()?;
/// let text = dir.path().join("text");
/// std::fs::write(&text, "some words")?;
/// let mut paths = Paths::new();
/// paths.read("--text", [text.as_path()]);
/// paths.write_file("--metrics", Some(dir.path().join("./text").as_path()));
/// let error = paths.check().unwrap_err().to_string();
/// assert!(error.starts_with("--metrics and --text are the same file, "));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Paths(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    option: &'static str,
    path: PathBuf,
    place: Place,
    role: Role,
}

/// What a path is to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A file that is read, or a directory in which all may be.
    Read,
    /// A file that is written.
    File,
    /// A directory that is written, with files of fixed names in it: a model, or adapters.
    Model,
    /// A directory in which checkpoints come and go.
    Run,
}

/// Names of the files that belong to a model or its tokenizer: whoever reads one reads those beside it too.
const OF_A_MODEL: [&str; 9] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "special_tokens_map.json",
];

/// Directories below one that is read in which files are looked for that a path may be another name of.
const DEPTH: usize = 2;

impl Paths {
    /// None yet.
    pub fn new() -> Self {
        Paths::default()
    }

    /// Files that are read, or directories of which any file may be.
    pub fn read<'a>(&mut self, option: &'static str, paths: impl IntoIterator<Item = &'a Path>) -> &mut Self {
        self.add(option, paths, Role::Read)
    }

    /// A model or a tokenizer that is read: a directory, or a file and those that belong to it beside it.
    pub fn read_model<'a>(
        &mut self,
        option: &'static str,
        paths: impl IntoIterator<Item = &'a Path>,
    ) -> &mut Self {
        for path in paths {
            self.read(option, [path]);
            if !path.is_dir() {
                OF_A_MODEL.iter().for_each(|name| {
                    self.read(option, [path.with_file_name(name).as_path()]);
                });
            }
        }
        self
    }

    /// Files that are written.
    pub fn write_file<'a>(
        &mut self,
        option: &'static str,
        paths: impl IntoIterator<Item = &'a Path>,
    ) -> &mut Self {
        self.add(option, paths, Role::File)
    }

    /// Directories into which a model or adapters are written. They need one of their own.
    pub fn write_model<'a>(
        &mut self,
        option: &'static str,
        paths: impl IntoIterator<Item = &'a Path>,
    ) -> &mut Self {
        self.add(option, paths, Role::Model)
    }

    /// Directories into which checkpoints are written, and from which they are read. Under names that no save uses, other
    /// things may lie in them.
    pub fn write_run<'a>(
        &mut self,
        option: &'static str,
        paths: impl IntoIterator<Item = &'a Path>,
    ) -> &mut Self {
        self.add(option, paths, Role::Run)
    }

    fn add<'a>(
        &mut self,
        option: &'static str,
        paths: impl IntoIterator<Item = &'a Path>,
        role: Role,
    ) -> &mut Self {
        let entry = |path: &Path| Entry { option, path: path.to_path_buf(), place: Place::of(path), role };
        self.0.extend(paths.into_iter().map(entry));
        self
    }

    /// Fails if what is to be written is also read, is written otherwise, or lies where it does not belong: in a checkpoint, in
    /// the directory of a model, or where a run saves.
    ///
    /// # Errors
    /// The first such path, with the option that names it and what it collides with.
    pub fn check(&self) -> Result<(), PathError> {
        for (at, entry) in self.0.iter().enumerate().filter(|(_, entry)| entry.role != Role::Read) {
            // What is where a run saves is said to be, whatever else is read from there.
            if entry.role == Role::Model {
                entry.alone()?;
            }
            for (_, other) in self.0.iter().enumerate().filter(|&(other_at, other)| {
                // Of two that are written, the later one is told of.
                other.role == Role::Read
                    || other_at < at
                    || (entry.role == Role::File && other.role == Role::Run)
            }) {
                entry.beside(other)?;
            }
            if entry.role != Role::Model {
                entry.alone()?;
            }
        }
        Ok(())
    }
}

/// Fails if `dir` is no place to write a model or adapters into: it is or is in a checkpoint, or is where a run saves.
pub(crate) fn check_model_dir(dir: &Path) -> Result<(), PathError> {
    let entry =
        Entry { option: "the directory", path: dir.to_path_buf(), place: Place::of(dir), role: Role::Model };
    entry.alone()
}

impl Entry {
    /// Whether both can be.
    fn beside(&self, other: &Entry) -> Result<(), PathError> {
        let another = self.role == Role::File
            && matches!(other.role, Role::Read | Role::Run)
            && other.place.has(&self.place, DEPTH);
        if self.place.same(&other.place) || another {
            let (option, other) = (self.option, other.option);
            return Err(PathError::Same { option, other, path: self.path.clone() });
        }
        // Either may be inside of the other.
        for (inner, outer) in [(self, other), (other, self)] {
            let Some(child) = inner.place.child_of(&outer.place) else { continue };
            let taken = match outer.role {
                Role::Read | Role::Model => true,
                Role::Run => Checkpoints::uses_name(&child),
                Role::File => false,
            };
            if taken {
                return Err(PathError::Inside {
                    option: inner.option,
                    path: inner.path.clone(),
                    outer: outer.path.clone(),
                    other: outer.option,
                    what: match outer.role {
                        Role::Read => "is read from",
                        Role::Model => "needs for itself",
                        Role::File | Role::Run => "saves to",
                    },
                });
            }
        }
        Ok(())
    }

    /// Whether it may be where it is, whatever else there is.
    fn alone(&self) -> Result<(), PathError> {
        let Entry { option, path, place, role } = self;
        let option = *option;
        let wrong = match fs::metadata(path) {
            Ok(found) if *role == Role::File => (!found.is_file()).then_some("it is not a regular file"),
            Ok(found) => (!found.is_dir()).then_some("it is not a directory"),
            Err(_) => None,
        };
        if let Some(reason) = wrong {
            return Err(PathError::Kind { option, path: path.clone(), reason });
        }
        let above = place.above.iter().map(|(path, _)| path);
        let itself = (*role != Role::File).then_some(&place.real);
        if let Some(checkpoint) = itself.into_iter().chain(above).find(|dir| is_checkpoint(dir)) {
            let checkpoint = checkpoint.clone();
            return Err(PathError::InCheckpoint { option, path: path.clone(), checkpoint });
        }
        if *role == Role::Model && has_checkpoints(&place.real) {
            return Err(PathError::OfARun { option, path: path.clone() });
        }
        if let Some((dir, _)) = place.above.first() {
            if place.real.file_name().is_some_and(Checkpoints::uses_name) && has_checkpoints(dir) {
                return Err(PathError::OfARun { option, path: path.clone() });
            }
            if *role == Role::File && is_model(dir) {
                return Err(PathError::InModel { option, path: path.clone(), model: dir.clone() });
            }
        }
        Ok(())
    }
}

/// It has the files of a checkpoint, sound or not.
fn is_checkpoint(dir: &Path) -> bool {
    let of_a_rank = |name: OsString| {
        let name = name.to_string_lossy();
        name.starts_with("rank-") && name.ends_with(".safetensors")
    };
    let named = dir.file_name().is_some_and(Checkpoints::uses_name);
    dir.join(INDEX_FILE).is_file() && (named || names(dir).into_iter().any(of_a_rank))
}

/// Runs have saved into it.
fn has_checkpoints(dir: &Path) -> bool {
    Checkpoints::new(dir).list().is_ok_and(|checkpoints| !checkpoints.is_empty())
}

/// It has the files of a model, or of adapters.
fn is_model(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    (has("config.json") || has("adapter_config.json"))
        && (has("model.safetensors")
            || has("model.safetensors.index.json")
            || has("adapter_model.safetensors"))
}

fn names(dir: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect()
}

/// Where a path leads to.
#[derive(Debug)]
struct Place {
    real: PathBuf,
    /// `None` where there is nothing yet.
    id: Option<FileId>,
    /// The directories that it is in, the nearest first.
    above: Vec<(PathBuf, Option<FileId>)>,
}

impl Place {
    fn of(path: &Path) -> Self {
        let real = real(path);
        let above = real.ancestors().skip(1).map(|dir| (dir.to_path_buf(), FileId::of(dir))).collect();
        Place { id: FileId::of(&real), real, above }
    }

    fn is(&self, path: &Path, id: Option<FileId>) -> bool {
        self.real == path || (self.id.is_some() && self.id == id)
    }

    fn same(&self, other: &Place) -> bool {
        self.is(&other.real, other.id)
    }

    /// The name in `dir` of what leads to this.
    fn child_of(&self, dir: &Place) -> Option<OsString> {
        let at = self.above.iter().position(|(path, id)| dir.is(path, *id))?;
        let child = if at == 0 { &self.real } else { &self.above[at - 1].0 };
        child.file_name().map(OsStr::to_owned)
    }

    /// Whether a file in this directory, or one that a link in it leads to, is `file`.
    fn has(&self, file: &Place, depth: usize) -> bool {
        fn look(dir: &Path, file: FileId, depth: usize) -> bool {
            names(dir).iter().any(|name| {
                let path = dir.join(name);
                let Ok(found) = fs::symlink_metadata(&path) else { return false };
                FileId::of(&path) == Some(file)
                    || (found.is_dir() && depth > 0 && look(&path, file, depth - 1))
            })
        }
        file.id.is_some_and(|id| look(&self.real, id, depth))
    }
}

/// What tells a file apart from all others, by whatever path it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileId(u64, u64);

impl FileId {
    #[cfg(unix)]
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(path).ok().map(|found| FileId(found.dev(), found.ino()))
    }

    /// Elsewhere paths are compared alone.
    #[cfg(not(unix))]
    fn of(_: &Path) -> Option<Self> {
        None
    }
}

/// Links that are followed, as many as the system does.
const LINKS: usize = 40;

/// The path without links and dots, whether there is something there or not: `..` and links that lead to nothing yet included,
/// as whoever writes there makes it.
fn real(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let mut real = PathBuf::new();
    let mut links = 0;
    let mut rest: Vec<PathBuf> =
        path.components().rev().map(|part| PathBuf::from(part.as_os_str())).collect();
    while let Some(part) = rest.pop() {
        match part.components().next() {
            None | Some(Component::CurDir) => {}
            Some(Component::ParentDir) => {
                real.pop();
            }
            Some(Component::Prefix(_) | Component::RootDir) => real.push(&part),
            Some(Component::Normal(_)) => {
                let there = real.join(&part);
                match fs::read_link(&there) {
                    Ok(target) if links < LINKS => {
                        links += 1;
                        // An absolute one replaces what there is by its root, which is pushed first.
                        rest.extend(target.components().rev().map(|part| PathBuf::from(part.as_os_str())));
                    }
                    _ => real = there,
                }
            }
        }
    }
    real
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A text, a model, a run with a checkpoint; and paths in their directory.
    struct Files(tempfile::TempDir);

    impl Files {
        fn new() -> Self {
            let files = Files(tempfile::tempdir().unwrap());
            for name in ["text", "model/config.json", "model/model.safetensors", "blobs/weights"] {
                files.make(name);
            }
            for name in ["index.json", "rank-00000.safetensors"] {
                files.make(&format!("run/step-00000003/{name}"));
                files.make(&format!("copied/{name}"));
            }
            files
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn make(&self, name: &str) {
            fs::create_dir_all(self.at(name).parent().unwrap()).unwrap();
            fs::write(self.at(name), name).unwrap();
        }

        /// With a text and a model that are read, and checkpoints that are written.
        fn check(&self, write: impl FnOnce(&mut Paths)) -> Option<String> {
            let mut paths = Paths::new();
            paths.read("--text", [self.at("text").as_path()]);
            paths.read_model("--model", [self.at("model").as_path()]);
            paths.write_run("--checkpoints", [self.at("run").as_path()]);
            write(&mut paths);
            let dir = self.0.path().canonicalize().unwrap();
            paths.check().err().map(|error| {
                let given = error.to_string().replace(self.0.path().to_str().unwrap(), "");
                given.replace(dir.to_str().unwrap(), "")
            })
        }

        fn file(&self, name: &str) -> Option<String> {
            self.check(|paths| {
                paths.write_file("--metrics", [self.at(name).as_path()]);
            })
        }

        fn model(&self, name: &str) -> Option<String> {
            self.check(|paths| {
                paths.write_model("--export", [self.at(name).as_path()]);
            })
        }
    }

    #[test]
    fn what_is_read_is_not_written_by_any_name() {
        let files = Files::new();
        let same = |name: &str| Some(format!("--metrics and --text are the same file, `/{name}`"));
        symlink("text", files.at("link")).unwrap();
        symlink("link", files.at("link-to-link")).unwrap();
        symlink(files.0.path(), files.at("loop")).unwrap();
        fs::hard_link(files.at("text"), files.at("hard")).unwrap();
        for name in ["text", "./text", "model/../text", "link", "link-to-link", "loop/loop/text", "hard"] {
            assert_eq!(files.file(name), same(name), "{name}");
        }
        // Whoever makes the directory on the way arrives at the file.
        assert_eq!(files.file("new/../text"), same("new/../text"));
        for name in ["new", "new/file", "run/metrics", "blobs/weights", "texts"] {
            assert_eq!(files.file(name), None, "{name}");
        }
    }

    #[test]
    fn nothing_is_written_into_a_model_that_is_read() {
        let files = Files::new();
        let inside = |name: &str| {
            Some(format!(
                "--metrics is `/{name}`, which is in `/model`, a directory that --model is read from: give another place"
            ))
        };
        symlink("model/new", files.at("into")).unwrap();
        for name in ["model/metrics", "model/deeper/metrics", "into"] {
            assert_eq!(files.file(name), inside(name));
        }
        // As a cache of Hugging Face's is: files are links to blobs, of which one is another name.
        fs::remove_file(files.at("model/model.safetensors")).unwrap();
        symlink("../blobs/weights", files.at("model/model.safetensors")).unwrap();
        let same = |name: &str| Some(format!("--metrics and --model are the same file, `/{name}`"));
        assert_eq!(files.file("model/config.json"), same("model/config.json"));
        assert_eq!(files.file("blobs/weights"), same("blobs/weights"));
        // A model by one of its files, and one that no option names.
        let mut paths = Paths::new();
        paths.read_model("--model", [files.at("model/model.safetensors").as_path()]);
        paths.write_file("--plot", [files.at("model/config.json").as_path()]);
        assert!(matches!(paths.check(), Err(PathError::Same { other: "--model", .. })));
        let mut paths = Paths::new();
        paths.write_file("--plot", [files.at("model/plot.svg").as_path()]);
        assert!(matches!(paths.check(), Err(PathError::InModel { .. })));
    }

    #[test]
    fn nothing_is_written_into_a_checkpoint_or_in_place_of_one() {
        let files = Files::new();
        let index = "run/step-00000003/index.json";
        let same = format!("--metrics and --checkpoints are the same file, `/{index}`");
        assert_eq!(files.file(index), Some(same));
        let message = files.file("run/step-00000003/a/b").unwrap();
        assert!(message.contains("`/run`, a directory that --checkpoints saves to"), "{message}");
        for name in ["run/step-00000009", "run/.lock", "run/.unfinished-step-00000004-1/x"] {
            assert!(files.file(name).is_some() && files.model(name).is_some(), "{name}");
        }
        let expected = "is a checkpoint, which nothing else is written to: give another place";
        for name in ["copied", "copied/model"] {
            assert!(files.model(name).unwrap().ends_with(expected), "{name}");
        }
        assert!(files.file("copied/index.json").unwrap().ends_with(expected));
        // A run that no option names.
        let model = |name: &str| check_model_dir(&files.at(name));
        assert!(matches!(model("run"), Err(PathError::OfARun { .. })));
        assert!(matches!(model("run/step-00000004"), Err(PathError::OfARun { .. })));
        assert!(matches!(model("run/step-00000003/model"), Err(PathError::InCheckpoint { .. })));
        assert_eq!((model("run/model"), model("model"), model("new/model")), (Ok(()), Ok(()), Ok(())));
    }

    #[test]
    fn two_outputs_are_in_two_places() {
        let files = Files::new();
        let both = |a: &str, b: &str| {
            files.check(|paths| {
                paths.write_model("--export", [files.at(a).as_path()]);
                paths.write_file("--plot", [files.at(b).as_path()]);
            })
        };
        assert!(both("new", "new").unwrap().starts_with("--plot and --export are the same file"));
        assert!(
            both("new", "new/config.json").unwrap().contains("a directory that --export needs for itself")
        );
        assert!(files.model("model").unwrap().starts_with("--export and --model are the same file"));
        // The text would be among the files of the model.
        let message = files.model("").unwrap();
        assert!(message.starts_with("--text is `/text`, which is in `/`"), "{message}");
        assert_eq!(both("new", "other/new"), None);
    }

    #[test]
    fn outputs_are_files_or_directories_as_they_should_be() {
        let files = Files::new();
        let of = |path: &str| {
            files.check(|paths| {
                paths.write_file("--metrics", [Path::new(path)]);
            })
        };
        assert_eq!(
            of("/dev/full").unwrap(),
            "cannot write --metrics to `/dev/full`: it is not a regular file"
        );
        let message = files.file("blobs").unwrap();
        assert_eq!(message, "cannot write --metrics to `/blobs`: it is not a regular file");
        let message = files.model("blobs/weights").unwrap();
        assert_eq!(message, "cannot write --export to `/blobs/weights`: it is not a directory");
    }
}
