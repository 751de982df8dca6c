//! The files of a run.

use std::path::{Path, PathBuf};

use super::options::TrainError;

/// A file or directory by the option that names it, if it is given.
pub type Named<'a> = (&'static str, Option<&'a Path>);

/// Fails if what is to be written is also written otherwise, or read: it would be lost. Paths are compared by where they
/// lead to, whether there is something yet or not.
///
/// # Errors
/// [`TrainError::SameFile`].
pub fn check_distinct<'a>(
    inputs: impl IntoIterator<Item = Named<'a>>,
    outputs: impl IntoIterator<Item = Named<'a>>,
) -> Result<(), TrainError> {
    let given = |(option, path): Named<'a>| path.map(|path| (option, path));
    let mut taken: Vec<_> =
        inputs.into_iter().filter_map(given).map(|(option, path)| (option, real(path))).collect();
    for (option, path) in outputs.into_iter().filter_map(given) {
        let real = real(path);
        if let Some(&(other, _)) = taken.iter().find(|(_, taken)| *taken == real) {
            return Err(TrainError::SameFile { option, other, path: path.to_path_buf() });
        }
        taken.push((option, real));
    }
    Ok(())
}

/// The file a path leads to.
fn real(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let in_folder = || Some(folder.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(in_folder).unwrap_or_else(|| path.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_by_two_names_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        std::fs::write(&text, "").unwrap();
        let (again, new) = (dir.path().join(".").join("text"), dir.path().join("new"));
        let (text, again, new) = (Some(text.as_path()), Some(again.as_path()), Some(new.as_path()));
        let error = check_distinct([("--text", text)], [("--plot", again)]).unwrap_err();
        let path = again.unwrap().display();
        assert_eq!(error.to_string(), format!("--plot and --text are the same file, `{path}`"));
        assert!(check_distinct([], [("--plot", new), ("--metrics", new)]).is_err());
        assert!(
            check_distinct([("--text", text), ("--text", text)], [("--plot", new), ("--metrics", None)])
                .is_ok()
        );
    }
}
