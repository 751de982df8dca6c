//! A corpus that is always available: the sources and documents of a repository.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::DataError;
use fsdp::files::FileError;

const EXTENSIONS: [&str; 3] = ["rs", "md", "toml"];

/// The `*.rs`, `*.md` and `*.toml` files below `directory`, sorted by path.
///
/// Directories named `target`, hidden files and directories, and symbolic links are passed over.
///
/// # Errors
/// A directory cannot be read, or there is no such file.
pub fn source_files(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    let mut pending = vec![directory.to_path_buf()];
    while let Some(current) = pending.pop() {
        for entry in fs::read_dir(&current).map_err(FileError::on("read", &current))? {
            let entry = entry.map_err(FileError::on("read", &current))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(FileError::on("read", &path))?;
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if kind.is_dir() && name != "target" {
                pending.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|e| EXTENSIONS.iter().any(|x| e == *x)) {
                files.push(path);
            }
        }
    }
    if files.is_empty() {
        return Err(DataError::EmptyCorpus { directory: directory.to_path_buf() });
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_and_documents_are_found_in_order() {
        let dir = tempfile::tempdir().unwrap();
        for path in [
            "README.md",
            "src/lib.rs",
            "src/b/mod.rs",
            "src/notes.txt",
            "a/Cargo.toml",
            "target/debug/x.rs",
            "src/target/y.rs",
            ".git/config.toml",
            "src/.hidden.rs",
            "a/target.md",
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        #[cfg(unix)]
        std::os::unix::fs::symlink(dir.path(), dir.path().join("loop")).unwrap();
        let found = source_files(dir.path()).unwrap();
        let relative: Vec<_> = found.iter().map(|path| path.strip_prefix(dir.path()).unwrap()).collect();
        let expected = ["README.md", "a/Cargo.toml", "a/target.md", "src/b/mod.rs", "src/lib.rs"];
        assert_eq!(relative, expected.map(Path::new));
    }

    #[test]
    fn nothing_found_and_nowhere_to_look_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(
            source_files(dir.path()).unwrap_err().to_string(),
            format!("no *.rs, *.md or *.toml file under `{}`", dir.path().display())
        );
        let absent = dir.path().join("absent");
        let message = source_files(&absent).unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot read `{}`: ", absent.display())), "{message}");
    }
}
