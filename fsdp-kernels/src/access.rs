//! What a launch reads and writes.

use crate::DevicePtr;

/// A range of device memory that a launch may touch.
///
/// Layout of C: the emulation in `host/` takes arrays of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Access {
    /// Its first byte.
    pub begin: DevicePtr,
    /// Bytes.
    pub bytes: u64,
    /// Whether it is written, and perhaps read too; otherwise it is only read.
    pub writes: bool,
}

impl Access {
    /// `len` elements of `size` bytes, read.
    pub(crate) fn read(begin: DevicePtr, len: u64, size: usize) -> Access {
        Access { begin, bytes: len.saturating_mul(size as u64), writes: false }
    }

    /// `len` elements of `size` bytes, written.
    pub(crate) fn write(begin: DevicePtr, len: u64, size: usize) -> Access {
        Access { writes: true, ..Access::read(begin, len, size) }
    }

    fn end(&self) -> u64 {
        self.begin.saturating_add(self.bytes)
    }
}

/// Elements from the first of `rows` rows of `width` to the last, if rows start `stride` elements apart.
pub(crate) fn span(rows: u64, width: u64, stride: u64) -> u64 {
    if rows == 0 || width == 0 { 0 } else { (rows - 1).saturating_mul(stride).saturating_add(width) }
}

/// The same memory as ranges in ascending order that do not overlap: null and empty ones go, of those that overlap
/// (outputs in place of inputs) the union stays.
pub(crate) fn merged(mut all: Vec<Access>) -> Vec<Access> {
    all.retain(|access| access.begin != 0 && access.bytes != 0);
    all.sort_by_key(|access| access.begin);
    let mut merged: Vec<Access> = Vec::with_capacity(all.len());
    for access in all {
        match merged.last_mut() {
            Some(last) if access.begin < last.end() => {
                last.bytes = last.end().max(access.end()) - last.begin;
                last.writes |= access.writes;
            }
            _ => merged.push(access),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_overlap_become_one() {
        let all = vec![
            Access::read(100, 4, 4),
            Access::write(0, 4, 4),
            Access::read(50, 0, 4),
            Access::write(96, 3, 4),
            Access::read(116, 1, 2),
        ];
        let expected =
            [Access { begin: 96, bytes: 20, writes: true }, Access { begin: 116, bytes: 2, writes: false }];
        assert_eq!(merged(all), expected);
    }

    #[test]
    fn spans_reach_from_first_to_last_row() {
        assert_eq!(span(3, 5, 10), 25);
        assert_eq!(span(1, 5, u64::MAX), 5);
        assert_eq!((span(0, 5, 10), span(3, 0, 10)), (0, 0));
        assert_eq!(span(u64::MAX, 5, 10), u64::MAX);
    }
}
