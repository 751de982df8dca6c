//! Text of an error, put together in a constant expression, where there is no formatting.

use super::descent::{Path, Segment};
use crate::spec::TpPlacement;

const CAPACITY: usize = 1024;

/// A text under construction. What goes beyond its capacity is left out, piece by piece.
pub(super) struct Message {
    bytes: [u8; CAPACITY],
    len: usize,
}

impl Message {
    pub(super) const fn new() -> Message {
        Message { bytes: [0; CAPACITY], len: 0 }
    }

    pub(super) const fn as_bytes(&self) -> &[u8] {
        self.bytes.split_at(self.len).0
    }

    pub(super) const fn as_str(&self) -> &str {
        match std::str::from_utf8(self.as_bytes()) {
            Ok(text) => text,
            Err(_) => "",
        }
    }

    pub(super) const fn text(&mut self, text: &str) -> &mut Message {
        let text = text.as_bytes();
        if self.len + text.len() <= CAPACITY {
            let mut i = 0;
            while i < text.len() {
                self.bytes[self.len + i] = text[i];
                i += 1;
            }
            self.len += text.len();
        }
        self
    }

    pub(super) const fn number(&mut self, number: u64) -> &mut Message {
        const DIGITS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
        if number >= 10 {
            self.number(number / 10);
        }
        self.text(DIGITS[(number % 10) as usize])
    }

    pub(super) const fn shape(&mut self, shape: &[usize]) -> &mut Message {
        self.text("[");
        let mut i = 0;
        while i < shape.len() {
            self.text(if i == 0 { "" } else { ", " }).number(shape[i] as u64);
            i += 1;
        }
        self.text("]")
    }

    pub(super) const fn placement(&mut self, tp: TpPlacement) -> &mut Message {
        match tp {
            TpPlacement::Column => self.text("column"),
            TpPlacement::Row => self.text("row"),
            TpPlacement::Replicate => self.text("replicate"),
            TpPlacement::Dim(dim) => self.text("dim(").number(dim as u64).text(")"),
        }
    }

    /// A segment of a name that begins at `start`.
    pub(super) const fn segment(&mut self, segment: Segment, start: usize) -> &mut Message {
        let dot = if self.len > start { "." } else { "" };
        match segment {
            Segment::Name(name) if name.is_empty() => self,
            Segment::Name(name) => self.text(dot).text(name),
            Segment::Index(index) => self.text(dot).number(index as u64),
        }
    }

    /// The fully qualified name of what is at `path`.
    pub(super) const fn path(&mut self, path: &Path<'_>) -> &mut Message {
        let start = self.len;
        self.below(path, 0, start)
    }

    /// The segments of `path` after the first `depth`, in a name that begins at `start`.
    pub(super) const fn below(&mut self, path: &Path<'_>, depth: usize, start: usize) -> &mut Message {
        if path.depth > depth {
            if let Some(parent) = path.parent {
                self.below(parent, depth, start);
            }
            self.segment(path.segment, start);
        }
        self
    }

    /// Ends the evaluation with the text. All callers up to the public entry point track theirs, so that the
    /// compiler shows the user's line and none of ours.
    #[track_caller]
    pub(super) const fn fail(&self) -> ! {
        panic!("{}", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_a_constant_expression() {
        const LEN: usize = Message::new().text("of ").shape(&[10, 0, 1234567]).as_str().len();
        assert_eq!(LEN, "of [10, 0, 1234567]".len());
        assert_eq!(Message::new().placement(TpPlacement::Dim(12)).as_str(), "dim(12)");
        assert_eq!(Message::new().number(u64::MAX).as_str(), u64::MAX.to_string());
    }

    #[test]
    fn names_are_joined_by_dots_and_empty_ones_left_out() {
        let layers = Path::ROOT.field("model.layers");
        let third = layers.element(3);
        let transparent = third.field("");
        let weight = transparent.field("weight");
        assert_eq!(Message::new().text("`").path(&weight).text("`").as_str(), "`model.layers.3.weight`");
        assert_eq!(Message::new().path(&Path::ROOT).as_str(), "");
        let mut name = Message::new();
        name.text("other").below(&weight, layers.depth, 0);
        assert_eq!(name.as_str(), "other.3.weight");
    }

    #[test]
    fn what_is_too_long_is_cut_at_a_piece() {
        let mut message = Message::new();
        for _ in 0..300 {
            message.text("ä..!");
        }
        assert_eq!(message.as_str().len(), CAPACITY / 5 * 5);
    }
}
