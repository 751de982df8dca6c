//! Memory that processes of one machine share. One process makes it and writes it; the others map it for reading.
//!
//! It is a file without a name (`memfd_create`): it ends with the last process that has it, however that ends, and nothing of it
//! is ever in `/dev/shm`. Others open it as `/proc/PID/fd/N`, which the system allows to the same user. It is sealed, so that
//! no process can shorten it under the others.
//!
//! # Safety
//! A [`Segment`] owns a mapping of `len` bytes from `ptr` on, which lasts until it is dropped. The bytes are changed by the process
//! that made it, through its own mapping. Who reads them in another process must know, by the words of the segment, that
//! they are not being written.

use std::fs::{File, OpenOptions};
use std::io::{self, Error};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Bytes between two words: a cache line each.
const WORD: usize = 64;

/// Neither shorter nor longer, for good.
const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// Written through no other mapping than those that there are. Systems before Linux 5.1 do not know it.
const READ_ONLY: i32 = libc::F_SEAL_FUTURE_WRITE;

/// A mapping, and the file that it is of.
pub(super) struct Segment {
    ptr: NonNull<u8>,
    len: usize,
    /// Others open it by its number in this process.
    file: File,
}

// SAFETY: the mapping is the process's, not a thread's, and is unmapped once, by `drop`.
unsafe impl Send for Segment {}
// SAFETY: `&Segment` gives addresses, and words that are atomic.
unsafe impl Sync for Segment {}

/// Where a segment is to be found by other processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Place {
    process: u32,
    descriptor: RawFd,
    /// The file itself: a process of the same number has another one.
    device: u64,
    inode: u64,
}

impl Segment {
    /// Makes one of `len` zero bytes.
    pub(super) fn create(len: usize) -> io::Result<Segment> {
        // SAFETY: the name is a C string; the call touches no other memory.
        let descriptor =
            unsafe { libc::memfd_create(c"fsdp".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if descriptor < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: a descriptor that was just opened, and that nobody else knows.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(len as u64)?;
        let segment = Segment::map(file, len, libc::PROT_READ | libc::PROT_WRITE)?;
        // SAFETY: a call on the file's own descriptor, with a number.
        let seal = |seals: i32| unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) } == 0;
        if seal(SEALS | READ_ONLY) || seal(SEALS) { Ok(segment) } else { Err(Error::last_os_error()) }
    }

    /// Opens what another process has made, for reading.
    ///
    /// # Errors
    /// The system's; one that says so if the file is another, or could be shortened.
    pub(super) fn open(place: &Place, len: usize) -> io::Result<Segment> {
        let path = format!("/proc/{}/fd/{}", place.process, place.descriptor);
        // Whatever else may be there is not waited for.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path)?;
        let found = file.metadata()?;
        // SAFETY: a call on the file's own descriptor, which returns a number.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        let is_that = (found.dev(), found.ino()) == (place.device, place.inode);
        if !is_that || seals & SEALS != SEALS || found.len() != len as u64 {
            return Err(Error::other(format!("{path} is not the memory that was offered")));
        }
        Segment::map(file, len, libc::PROT_READ)
    }

    fn map(file: File, len: usize, access: i32) -> io::Result<Segment> {
        // SAFETY: a new mapping, at an address of the system's choice, of a file that has `len` bytes and that no process shortens: it
        // is sealed, or new and about to be.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match NonNull::new(address.cast::<u8>()) {
            Some(ptr) if address != libc::MAP_FAILED => Ok(Segment { ptr, len, file }),
            _ => Err(Error::last_os_error()),
        }
    }

    /// Where others find it.
    pub(super) fn place(&self) -> io::Result<Place> {
        let file = self.file.metadata()?;
        let (process, descriptor) = (std::process::id(), self.file.as_raw_fd());
        Ok(Place { process, descriptor, device: file.dev(), inode: file.ino() })
    }

    /// Address of the byte `at`, which is inside.
    pub(super) fn address(&self, at: usize) -> NonNull<u8> {
        assert!(at < self.len, "byte {at} of {}", self.len);
        // SAFETY: inside of the mapping, as was checked.
        unsafe { self.ptr.add(at) }
    }

    /// The word of this number, for the process that made it to change and for all to read.
    pub(super) fn word(&self, number: usize) -> &AtomicU32 {
        assert!((number + 1) * WORD <= self.len, "word {number}");
        // SAFETY: inside of the mapping and aligned; every process uses it as an atomic only, and those that may not write it
        // only load it.
        unsafe { AtomicU32::from_ptr(self.ptr.as_ptr().add(number * WORD).cast()) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping is this segment's own, and whoever has an address of it keeps the segment.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// Waits until a word is changed from `seen` and its process has called [`wake`], for as long as `time`. It may return for no
/// reason.
pub(super) fn wait(word: &AtomicU32, seen: u32, time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs() as libc::time_t,
        tv_nsec: time.subsec_nanos() as libc::c_long,
    };
    // SAFETY: the word and the time are there while the call lasts. It reads them, no more: the word may be mapped for reading only.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const time) };
}

/// Wakes the threads of all processes that wait for a word.
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: the call uses the word's address to find who waits there, and touches no memory.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn what_one_writes_the_other_reads() {
        let own = Segment::create(1 << 16).unwrap();
        let other = Segment::open(&own.place().unwrap(), 1 << 16).unwrap();
        own.word(3).store(7, Ordering::Release);
        assert_eq!(other.word(3).load(Ordering::Acquire), 7);
        assert_ne!(own.address(0), other.address(0));
    }

    #[test]
    fn another_file_is_refused() {
        let own = Segment::create(4096).unwrap();
        let place = own.place().unwrap();
        for other in [
            Place { inode: place.inode + 1, ..place.clone() },
            Place { descriptor: 0, ..place.clone() },
            Place { process: u32::MAX, ..place.clone() },
        ] {
            assert!(Segment::open(&other, 4096).is_err(), "{other:?}");
        }
        assert!(Segment::open(&place, 8192).is_err());
        assert!(own.file.set_len(0).is_err(), "it cannot be shortened");
        let path = format!("/proc/{}/fd/{}", place.process, place.descriptor);
        let written = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write(b"x"));
        assert!(written.is_err(), "nobody else writes it");
    }

    #[test]
    fn a_thread_that_waits_is_woken() {
        let own = Segment::create(4096).unwrap();
        let other = Segment::open(&own.place().unwrap(), 4096).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let word = other.word(0);
                while word.load(Ordering::Acquire) == 0 {
                    wait(word, 0, Duration::from_secs(60));
                }
            });
            own.word(0).store(1, Ordering::Release);
            wake(own.word(0));
        });
    }
}
