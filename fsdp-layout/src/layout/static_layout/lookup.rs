//! Parameters by name and by ordinal, in constant expressions.

use super::descent::{Inherited, Leaf, Segment, count};
use super::message::Message;
use crate::spec::Tree;

/// Ordinal of the parameter whose name is `name`. Of the name, `read` bytes led to `tree`, whose first
/// parameter is `first`.
pub(super) const fn find(tree: &Tree, name: &[u8], read: usize, first: usize) -> Option<usize> {
    let mut first = first;
    match *tree {
        Tree::Param if read == name.len() => return Some(first),
        Tree::Param | Tree::Unknown(_) => {}
        Tree::Fields(fields) => {
            let mut i = 0;
            while i < fields.len() {
                if let Some(read) = read_segment(name, read, fields[i].name.as_bytes())
                    && let Some(found) = find(fields[i].tree, name, read, first)
                {
                    return Some(found);
                }
                first += count(fields[i].tree);
                i += 1;
            }
        }
        Tree::Unit(content) => return find(content, name, read, first),
        Tree::Array(len, element) => {
            if let Some((index, read)) = read_index(name, read)
                && index < len
            {
                return find(element, name, read, first + index * count(element));
            }
        }
        Tree::Tuple(elements) => {
            if let Some((index, read)) = read_index(name, read)
                && index < elements.len()
            {
                let mut i = 0;
                while i < index {
                    first += count(elements[i]);
                    i += 1;
                }
                return find(elements[index], name, read, first);
            }
        }
    }
    None
}

/// Where a segment begins after `read` bytes of `name`.
const fn segment_start(name: &[u8], read: usize) -> Option<usize> {
    if read == 0 {
        Some(0)
    } else if read < name.len() && name[read] == b'.' {
        Some(read + 1)
    } else {
        None
    }
}

/// Bytes read once `segment`, which may have dots inside or be empty, follows the first `read`.
const fn read_segment(name: &[u8], read: usize, segment: &[u8]) -> Option<usize> {
    if segment.is_empty() {
        return Some(read);
    }
    let Some(start) = segment_start(name, read) else { return None };
    let end = start + segment.len();
    if end > name.len() || (end < name.len() && name[end] != b'.') {
        return None;
    }
    let mut i = 0;
    while i < segment.len() {
        if name[start + i] != segment[i] {
            return None;
        }
        i += 1;
    }
    Some(end)
}

/// The index that follows, as it is written in names, and the bytes read after it.
const fn read_index(name: &[u8], read: usize) -> Option<(usize, usize)> {
    let Some(start) = segment_start(name, read) else { return None };
    let mut end = start;
    let mut index = 0usize;
    while end < name.len() && name[end] != b'.' {
        if !name[end].is_ascii_digit() || (end > start && name[start] == b'0') || index > usize::MAX / 10 - 1
        {
            return None;
        }
        index = index * 10 + (name[end] - b'0') as usize;
        end += 1;
    }
    if end == start { None } else { Some((index, end)) }
}

/// Which unit a parameter is in: no two units begin at the same parameter and depth, but for empty ones.
#[derive(Clone, Copy)]
pub(super) struct UnitId {
    first: usize,
    /// 0 for the root.
    pub(super) depth: usize,
}

impl UnitId {
    pub(super) const fn is(&self, other: &UnitId) -> bool {
        self.first == other.first && self.depth == other.depth
    }
}

/// The parameter `wanted` of `tree`, whose own first is `first`; its name is added to `name`.
pub(super) const fn leaf_at(tree: &Tree, wanted: usize, first: usize, name: &mut Message) -> (Leaf, UnitId) {
    let root = UnitId { first: 0, depth: 0 };
    let start = name.as_bytes().len();
    descend(tree, wanted, first, Inherited::NONE, root, name, start)
}

const fn descend(
    tree: &Tree,
    wanted: usize,
    first: usize,
    inherited: Inherited,
    unit: UnitId,
    name: &mut Message,
    start: usize,
) -> (Leaf, UnitId) {
    let mut first = first;
    match *tree {
        Tree::Param => match inherited.leaf() {
            Some(leaf) => return (leaf, unit),
            None => panic!("ties are resolved where all shapes are declared"),
        },
        Tree::Fields(fields) => {
            let mut i = 0;
            while i < fields.len() {
                let field = &fields[i];
                let each = count(field.tree);
                if wanted < first + each {
                    name.segment(Segment::Name(field.name), start);
                    return descend(field.tree, wanted, first, inherited.field(field), unit, name, start);
                }
                first += each;
                i += 1;
            }
        }
        Tree::Unit(content) => {
            let unit = UnitId { first, depth: unit.depth + 1 };
            return descend(content, wanted, first, inherited, unit, name, start);
        }
        Tree::Array(_, element) => {
            let each = count(element);
            let index = (wanted - first) / each;
            name.segment(Segment::Index(index), start);
            return descend(element, wanted, first + index * each, inherited, unit, name, start);
        }
        Tree::Tuple(elements) => {
            let mut i = 0;
            while i < elements.len() {
                let each = count(elements[i]);
                if wanted < first + each {
                    name.segment(Segment::Index(i), start);
                    return descend(elements[i], wanted, first, inherited, unit, name, start);
                }
                first += each;
                i += 1;
            }
        }
        Tree::Unknown(_) => {}
    }
    panic!("an ordinal is that of a parameter of the model")
}
