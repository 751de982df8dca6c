//! Opens regular files only. Anything else that a path leads to may block for ever, never end, or act when it is opened.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

use super::FileError;

/// Opens a regular file to read, through links too. A pipe, a device, a socket or a directory is refused, and never waited for.
///
/// # Errors
/// It cannot be opened, or is no regular file.
pub fn open(path: &Path) -> Result<File, FileError> {
    open_as(path, OpenOptions::new().read(true)).map_err(FileError::on("read", path))
}

/// Opens a regular file to read, and refuses a symbolic link, which may lead out of a directory.
pub(crate) fn open_no_link(path: &Path) -> io::Result<File> {
    regular(&fs::symlink_metadata(path)?)?;
    open_as(path, OpenOptions::new().read(true))
}

/// Opens a regular file to write, or makes it; what is in it stays.
///
/// # Errors
/// It cannot be opened or made, or there is something that is no regular file.
pub fn open_to_write(path: &Path) -> Result<File, FileError> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(false);
    open_as(path, options).map_err(FileError::on("write", path))
}

/// Reads a regular file of at most `most` bytes.
///
/// # Errors
/// It cannot be read, is no regular file, or is larger.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, FileError> {
    let on = FileError::on("read", path);
    let file = open(path)?;
    let mut bytes = Vec::new();
    let outcome = file.metadata().and_then(|metadata| {
        small(metadata.len(), most)?;
        bytes.try_reserve_exact(metadata.len() as usize).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // It may grow.
        file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
        small(bytes.len() as u64, most)
    });
    outcome.map(|()| bytes).map_err(on)
}

/// Reads a regular file of at most `most` bytes, as UTF-8.
///
/// # Errors
/// As for [`read`], and if it is not UTF-8.
pub fn read_to_string(path: &Path, most: u64) -> Result<String, FileError> {
    let text = String::from_utf8(read(path, most)?);
    text.map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let message = format!("it is not UTF-8: byte {at} begins no character");
        FileError::on("read", path)(io::Error::new(io::ErrorKind::InvalidData, message))
    })
}

fn small(bytes: u64, most: u64) -> io::Result<()> {
    if bytes <= most {
        return Ok(());
    }
    let message = format!("it is larger than {most} bytes");
    Err(io::Error::new(io::ErrorKind::FileTooLarge, message))
}

/// A file is looked at before it is opened, as some devices act when they are opened, and after it, as there may be another
/// one by then, which must not be waited for.
fn open_as(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    match fs::metadata(path) {
        // It can be made, or opening it says why not.
        Err(_) => {}
        Ok(metadata) => regular(&metadata)?,
    }
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

fn regular(metadata: &fs::Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        let message = read(&path, 3).unwrap_err().to_string();
        assert_eq!(message, format!("cannot read `{}`: it is larger than 3 bytes", path.display()));
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(read(&path, 1 << 20).unwrap_err().to_string().ends_with("it is larger than 1048576 bytes"));
        fs::write(&path, b"ab\xff").unwrap();
        let message = read_to_string(&path, 3).unwrap_err().to_string();
        assert!(message.ends_with(": it is not UTF-8: byte 2 begins no character"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_refused_and_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, link) = (dir.path().join("pipe"), dir.path().join("link"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        let (zero, full) = (Path::new("/dev/zero"), Path::new("/dev/full"));
        for path in [&pipe, &link, dir.path(), zero, full] {
            let message = open(path).unwrap_err().to_string();
            assert_eq!(message, format!("cannot read `{}`: it is not a regular file", path.display()));
            let message = open_to_write(path).unwrap_err().to_string();
            assert_eq!(message, format!("cannot write `{}`: it is not a regular file", path.display()));
        }
        assert!(open_no_link(&link).unwrap_err().to_string().contains("it is not a regular file"));
        // Should it become a pipe between the look and the opening, that does not wait either.
        let options = &mut OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::custom_flags(options.read(true), libc::O_NONBLOCK);
        assert!(!options.open(&pipe).unwrap().metadata().unwrap().is_file());
    }

    #[cfg(unix)]
    #[test]
    fn links_to_files_are_followed_where_they_may_be() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read(&link, 9).unwrap(), b"x");
        assert!(open_no_link(&link).is_err() && open_no_link(&file).is_ok());
    }
}
