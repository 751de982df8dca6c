//! Host memory whose parts can be lent out as `Vec`s.
//!
//! The tensor of a parameter has a `Vec` behind it, and safe code that has the tensor can reach the `Vec`: an in-place op may
//! make it longer, take it, drop it. Memory that stands there must be what a `Vec` thinks it is, an allocation of the
//! global allocator that nothing else owns. So the whole weights of a bucket are pieces, one for each parameter, each
//! allocated as a `Vec` allocates; while a tensor has a piece, it *is* the tensor's: nobody here reads, writes or frees it.
//!
//! # Safety invariant
//! A [`Piece`] that is not lent owns an allocation of the global allocator at `ptr`, of layout `layout`, all of whose bytes
//! are initialised. One that is lent owns nothing. `lent` changes only in [`Pieces::lend`], which makes the `Vec` that owns
//! the memory from then on, and in [`Pieces::take_back`], which makes the piece the owner of what a `Vec` owned, or of
//! something new. No address of a piece that is lent is given out.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use super::{ALIGN, Element};
use crate::spec::Dtype;

/// The elements of a buffer, in pieces that follow each other without a gap.
pub(super) struct Pieces {
    dtype: Dtype,
    /// In order of `start`; the first begins with 0.
    pieces: Box<[Piece]>,
}

struct Piece {
    /// First byte of the buffer that is in it.
    start: usize,
    /// That of a `Vec` of the dtype whose capacity is the piece. Not empty.
    layout: Layout,
    /// Length of the `Vec`, in elements; the rest of its capacity is padding.
    len: usize,
    ptr: AtomicPtr<u8>,
    lent: AtomicBool,
}

impl Pieces {
    /// Zeros for `len` elements, in pieces that begin where `parts` begin: ranges of elements in order that do not overlap.
    /// `None` if there is no such memory, or so many bytes cannot be counted.
    pub(super) fn zeros(dtype: Dtype, len: usize, parts: &[Range<usize>]) -> Option<Pieces> {
        let parts = parts.iter().filter(|part| !part.is_empty());
        let before = parts.clone().next().map_or(0..len, |first| 0..first.start);
        let mut starts: Vec<Range<usize>> =
            Some(before).filter(|before| !before.is_empty()).into_iter().collect();
        starts.extend(parts.cloned());
        let ends = starts.iter().skip(1).map(|next| next.start).chain([len]).collect::<Vec<_>>();
        let pieces = starts.iter().zip(ends).map(|(part, end)| {
            assert!(part.end <= end, "pieces {starts:?} of {len} elements");
            let layout = match dtype {
                Dtype::F32 => Layout::array::<f32>(end - part.start),
                Dtype::BF16 => Layout::array::<half::bf16>(end - part.start),
                Dtype::F16 => Layout::array::<half::f16>(end - part.start),
            };
            let start = part.start.checked_mul(dtype.size())?;
            Piece::new(start, layout.ok()?, part.len())
        });
        Some(Pieces { dtype, pieces: pieces.collect::<Option<_>>()? })
    }

    /// The piece that has this byte of the buffer.
    fn at(&self, byte: usize) -> &Piece {
        let after = self.pieces.partition_point(|piece| piece.start <= byte);
        &self.pieces[after - 1]
    }

    /// Address of the bytes `range` of the buffer.
    ///
    /// # Panics
    /// If they are in several pieces, or in one that is lent: code that orders the uses of the memory does not ask.
    pub(super) fn ptr(&self, range: Range<usize>) -> *mut u8 {
        if range.is_empty() {
            return std::ptr::without_provenance_mut(ALIGN);
        }
        let piece = self.at(range.start);
        assert!(range.end <= piece.end(), "bytes {range:?} of a buffer are in several pieces");
        assert!(!piece.lent.load(Ordering::Acquire), "memory was used that is a tensor's at present");
        // SAFETY: inside the allocation by the first assertion.
        unsafe { piece.ptr.load(Ordering::Acquire).add(range.start - piece.start) }
    }

    /// The parts of the bytes `range` that are in one piece each.
    pub(super) fn cut(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let pieces =
            self.pieces.iter().map(move |piece| piece.start.max(range.start)..piece.end().min(range.end));
        pieces.filter(|part| !part.is_empty())
    }

    /// Hands out a piece whose `Vec` has `len` elements and begins with byte `start`. `None` if there is no such piece, it is
    /// of another dtype, or is lent already.
    ///
    /// # Safety
    /// No use of the piece that began before is still under way.
    pub(super) unsafe fn lend<T: Element>(&self, start: usize, len: usize) -> Option<Vec<T>> {
        let piece = self.at(start);
        if (piece.start, piece.len, self.dtype) != (start, len, T::DTYPE) || len == 0 {
            return None;
        }
        if piece.lent.swap(true, Ordering::AcqRel) {
            return None;
        }
        let ptr = piece.ptr.load(Ordering::Acquire).cast::<T>();
        // SAFETY: an allocation of the global allocator whose layout is that of an array of `capacity` of `T`, which has the
        // dtype's size and alignment; `len` is at most that, and all are initialised, any bits being a `T`. The piece owned
        // it and, being lent from now on, has given it away; nothing that began before uses it by the caller's promise, and
        // nothing can begin, as no address of it is given out.
        Some(unsafe { Vec::from_raw_parts(ptr, len, piece.capacity::<T>()) })
    }

    /// Takes back what was lent of the piece that begins with byte `start`. If `returned` is not the very `Vec` that was lent,
    /// at its address, of its length and capacity, it is dropped, the piece gets new memory, all zeros, and the answer is
    /// false.
    ///
    /// # Panics
    /// If the piece is not lent, or of another dtype.
    pub(super) fn take_back<T: Element>(&self, start: usize, returned: Option<Vec<T>>) -> bool {
        let piece = self.at(start);
        assert!(piece.lent.load(Ordering::Acquire), "memory that was not lent was taken back");
        assert_eq!(T::DTYPE, self.dtype, "a {} buffer taken back as {}", self.dtype, T::DTYPE);
        let lent =
            (piece.ptr.load(Ordering::Acquire).cast::<T>().cast_const(), piece.len, piece.capacity::<T>());
        let same = returned.filter(|vec| (vec.as_ptr(), vec.len(), vec.capacity()) == lent);
        let unchanged = same.is_some();
        let ptr = match same {
            // As large, and allocated as the piece's layout says, by what a `Vec` is.
            Some(vec) => ManuallyDrop::new(vec).as_mut_ptr().cast(),
            None => allocate(piece.layout).unwrap_or_else(|| handle_alloc_error(piece.layout)).as_ptr(),
        };
        piece.ptr.store(ptr, Ordering::Release);
        piece.lent.store(false, Ordering::Release);
        unchanged
    }
}

impl Piece {
    fn new(start: usize, layout: Layout, len: usize) -> Option<Piece> {
        let ptr = AtomicPtr::new(allocate(layout)?.as_ptr());
        Some(Piece { start, layout, len, ptr, lent: AtomicBool::new(false) })
    }

    fn end(&self) -> usize {
        self.start + self.layout.size()
    }

    fn capacity<T>(&self) -> usize {
        self.layout.size() / size_of::<T>()
    }
}

/// Zeros of the global allocator, as a `Vec` allocates them. `layout` is not empty.
fn allocate(layout: Layout) -> Option<NonNull<u8>> {
    assert_ne!(layout.size(), 0, "a piece of a buffer has elements");
    // SAFETY: the size is not zero.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

impl Drop for Piece {
    fn drop(&mut self) {
        if !*self.lent.get_mut() {
            // SAFETY: a piece that is not lent owns this allocation, of this layout.
            unsafe { dealloc(*self.ptr.get_mut(), self.layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 4 and 8 elements with paddings of 4 and 8: bytes 0..32 and 32..96.
    fn pieces() -> Pieces {
        Pieces::zeros(Dtype::F32, 24, &[0..4, 6..6, 8..16]).unwrap()
    }

    fn lend(pieces: &Pieces, start: usize, len: usize) -> Option<Vec<f32>> {
        // SAFETY: the pieces are the test's alone.
        unsafe { pieces.lend(start, len) }
    }

    #[test]
    fn a_buffer_is_cut_where_its_parts_begin() {
        let cut = |range| pieces().cut(range).collect::<Vec<_>>();
        assert_eq!(cut(0..96), [0..32, 32..96]);
        assert_eq!(cut(16..40), [16..32, 32..40]);
        assert_eq!(cut(40..44), std::slice::from_ref(&(40..44)));
        assert!(cut(32..32).is_empty());
        let late = Pieces::zeros(Dtype::BF16, 8, &[2..4, 4..7]).unwrap();
        assert_eq!(late.cut(0..16).collect::<Vec<_>>(), [0..4, 4..8, 8..16]);
        let none = Pieces::zeros(Dtype::F16, 8, &[]).unwrap();
        assert_eq!(none.cut(2..16).collect::<Vec<_>>(), std::slice::from_ref(&(2..16)));
        assert_eq!(Pieces::zeros(Dtype::F16, 0, std::slice::from_ref(&(0..0))).unwrap().cut(0..0).count(), 0);
    }

    #[test]
    fn a_piece_is_lent_once_and_comes_back_with_its_values() {
        let pieces = pieces();
        let mut lent = lend(&pieces, 32, 8).unwrap();
        assert_eq!((lent.as_slice(), lent.capacity()), (&[0.0; 8][..], 16));
        assert!(lend(&pieces, 32, 8).is_none(), "lent twice");
        lent[7] = 5.0;
        let address = lent.as_ptr();
        assert!(pieces.take_back(32, Some(lent)));
        assert_eq!(pieces.ptr(32..96).cast_const().cast(), address);
        assert_eq!(lend(&pieces, 32, 8).unwrap()[7], 5.0);
    }

    #[test]
    fn only_a_whole_piece_is_lent() {
        let pieces = pieces();
        for (start, len) in [(0, 3), (0, 8), (4, 4), (32, 16), (0, 0)] {
            assert!(lend(&pieces, start, len).is_none(), "{start}, {len}");
        }
        // SAFETY: the pieces are the test's alone.
        assert!(unsafe { pieces.lend::<half::bf16>(0, 4) }.is_none());
    }

    #[test]
    fn another_vec_is_dropped_and_new_memory_takes_its_place() {
        type Change = fn(Vec<f32>) -> Option<Vec<f32>>;
        let changes: [Change; 6] = [
            |mut vec| {
                vec.extend([1.0; 100]);
                Some(vec)
            },
            |mut vec| {
                vec.push(1.0);
                Some(vec)
            },
            |mut vec| {
                vec.clear();
                Some(vec)
            },
            |mut vec| {
                vec.shrink_to_fit();
                Some(vec)
            },
            |vec| Some(vec.iter().map(|x| x + 1.0).collect()),
            |_| None,
        ];
        for (index, change) in changes.into_iter().enumerate() {
            let pieces = pieces();
            let lent = lend(&pieces, 0, 4).unwrap();
            assert!(!pieces.take_back(0, change(lent)), "change {index}");
            assert_eq!(lend(&pieces, 0, 4).unwrap(), [0.0; 4]);
        }
    }

    #[test]
    #[should_panic(expected = "that is a tensor's at present")]
    fn no_address_of_what_is_lent_is_given_out() {
        let pieces = pieces();
        let _lent = lend(&pieces, 0, 4);
        pieces.ptr(0..16);
    }

    #[test]
    fn what_is_lent_outlives_its_buffer() {
        let pieces = pieces();
        let lent = lend(&pieces, 0, 4).unwrap();
        drop(pieces);
        assert_eq!(lent, [0.0; 4]);
    }
}
