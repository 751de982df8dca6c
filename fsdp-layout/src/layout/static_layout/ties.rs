//! Which parameter holds a tied one's elements: `tie_with` resolved in constant expressions, as `collect`
//! does at run time.
//!
//! A parameter is known by its ordinal in declaration order. Names are only spelled out to find a target.

use super::descent::{Leaf, Path, count};
use super::lookup::{find, leaf_at};
use super::message::Message;
use crate::spec::{Dtype, Tree};

/// Most ties of a model. Those inside an array's elements, alike in all of them, count once.
const MAX_TIES: usize = 64;

/// One tied parameter, or one in each element of an array.
#[derive(Clone, Copy)]
struct Tie {
    source: usize,
    /// What it is tied to, then the end of the chain from there.
    target: usize,
    /// How many there are: source `k` is `source + k * step`.
    times: usize,
    step: usize,
    /// Target `k` is `target + k * target_step`.
    target_step: usize,
    /// The target has a bucket of its own in the root.
    shared: bool,
    /// Depth of the path of the struct that declares it.
    declared_at: usize,
    /// Its target was found relative to that struct.
    relative: bool,
}

/// All ties of a model.
pub(super) struct Ties {
    list: [Tie; MAX_TIES],
    len: usize,
}

/// Where the elements of a parameter are.
pub(super) enum Place {
    /// In the bucket of its group.
    Group,
    /// In a bucket of its own in the root: it is tied to from elsewhere.
    Alone,
    /// In that of the parameter it is tied to.
    Elsewhere,
}

impl Tie {
    const fn source(&self, k: usize) -> usize {
        self.source + k * self.step
    }

    const fn target(&self, k: usize) -> usize {
        self.target + k * self.target_step
    }
}

/// The `k` for which `first + k * step` is `at`, of `times`.
const fn index_of(at: usize, first: usize, step: usize, times: usize) -> Option<usize> {
    if at < first {
        return None;
    }
    let ahead = at - first;
    match (ahead, step) {
        (0, _) => Some(0),
        (_, 0) => None,
        _ if ahead.is_multiple_of(step) && ahead / step < times => Some(ahead / step),
        _ => None,
    }
}

impl Ties {
    /// Those of a model all of whose shapes are declared.
    #[track_caller]
    pub(super) const fn of(tree: &Tree, param: Dtype) -> Ties {
        let none = Tie {
            source: 0,
            target: 0,
            times: 1,
            step: 0,
            target_step: 0,
            shared: false,
            declared_at: 0,
            relative: false,
        };
        let mut ties = Ties { list: [none; MAX_TIES], len: 0 };
        ties.collect(tree, tree, &Path::ROOT, None, 0);
        ties.follow_chains(tree);
        let mut i = 0;
        while i < ties.len {
            ties.list[i].shared = ties.is_shared(i, tree, param);
            i += 1;
        }
        ties
    }

    /// Where the elements of the parameter of this ordinal are.
    pub(super) const fn place(&self, ordinal: usize) -> Place {
        let mut place = Place::Group;
        let mut i = 0;
        while i < self.len {
            let tie = &self.list[i];
            if let Some(k) = index_of(ordinal, tie.source, tie.step, tie.times)
                && tie.target(k) != ordinal
            {
                return Place::Elsewhere;
            }
            if tie.shared && index_of(ordinal, tie.target, tie.target_step, tie.times).is_some() {
                place = Place::Alone;
            }
            i += 1;
        }
        place
    }

    /// No tie tells the elements of an array apart: `len` of them, `each` so many parameters, the first at
    /// `start`. All then have the layout of the first.
    pub(super) const fn elements_are_alike(&self, start: usize, each: usize, len: usize) -> bool {
        let end = start + each * len;
        let mut i = 0;
        while i < self.len {
            let tie = &self.list[i];
            let in_each =
                tie.step == each && tie.times == len && tie.source >= start && tie.source < start + each;
            let sources_meet = tie.source < end && tie.source(tie.times - 1) >= start;
            let targets_meet = tie.target < end && tie.target(tie.times - 1) >= start;
            if sources_meet && !in_each {
                return false;
            }
            if targets_meet && !(in_each && tie.target_step == each && !tie.shared) {
                return false;
            }
            i += 1;
        }
        true
    }

    /// Adds the ties of `tree`, whose first parameter is `first`.
    #[track_caller]
    const fn collect(
        &mut self,
        model: &Tree,
        tree: &Tree,
        path: &Path<'_>,
        open: Option<&Open<'_>>,
        first: usize,
    ) {
        if open.is_none() && !has_ties(tree) {
            return;
        }
        match *tree {
            Tree::Param => {
                if let Some(open) = open {
                    self.add(open.resolve(model, path, first));
                }
            }
            Tree::Fields(fields) => {
                let mut first = first;
                let mut i = 0;
                while i < fields.len() {
                    let inside = path.field(fields[i].name);
                    match fields[i].attrs.tie_with {
                        Some(target) => {
                            let open = Open { target, declared_by: path, depth: inside.depth };
                            self.collect(model, fields[i].tree, &inside, Some(&open), first);
                        }
                        None => self.collect(model, fields[i].tree, &inside, open, first),
                    }
                    first += count(fields[i].tree);
                    i += 1;
                }
            }
            Tree::Unit(content) => self.collect(model, content, path, open, first),
            Tree::Array(len, element) => {
                let each = count(element);
                let before = self.len;
                let mut i = 0;
                while i < len {
                    self.collect(model, element, &path.element(i), open, first + i * each);
                    if i == 0 && self.repeat(before, path.depth + 1, first, each, len) {
                        return;
                    }
                    i += 1;
                }
            }
            Tree::Tuple(elements) => {
                let mut first = first;
                let mut i = 0;
                while i < elements.len() {
                    self.collect(model, elements[i], &path.element(i), open, first);
                    first += count(elements[i]);
                    i += 1;
                }
            }
            Tree::Unknown(_) => {}
        }
    }

    #[track_caller]
    const fn add(&mut self, tie: Tie) {
        if self.len == MAX_TIES {
            let mut message = Message::new();
            message.text("the compile-time layout has room for ").number(MAX_TIES as u64);
            message.text(" tied parameters, and the model has more").fail()
        }
        self.list[self.len] = tie;
        self.len += 1;
    }

    /// Makes the ties from `before` on, those of an array's first element, stand for all elements, if those
    /// of the others are alike.
    const fn repeat(&mut self, before: usize, depth: usize, first: usize, each: usize, len: usize) -> bool {
        let mut i = before;
        while i < self.len {
            let tie = &self.list[i];
            let inside = tie.target >= first && tie.target < first + each;
            if tie.times != 1 || tie.declared_at < depth || (tie.relative && !inside) {
                return false;
            }
            i += 1;
        }
        let mut i = before;
        while i < self.len {
            let tie = &mut self.list[i];
            tie.times = len;
            tie.step = each;
            tie.target_step = if tie.relative { each } else { 0 };
            i += 1;
        }
        true
    }

    /// What the parameter at `at` is tied to, and by how much that moves from one source to the next.
    const fn next(&self, at: usize) -> Option<(usize, usize)> {
        let mut i = 0;
        while i < self.len {
            let tie = &self.list[i];
            if let Some(k) = index_of(at, tie.source, tie.step, tie.times) {
                return Some((tie.target(k), tie.target_step));
            }
            i += 1;
        }
        None
    }

    /// Makes each target the end of its chain.
    #[track_caller]
    const fn follow_chains(&mut self, tree: &Tree) {
        let mut ends = [(0, 0); MAX_TIES];
        let mut i = 0;
        while i < self.len {
            let Tie { source, target, target_step, .. } = self.list[i];
            let (mut end, mut step) = (target, target_step);
            let mut links = 0;
            while let Some((next, next_step)) = self.next(end)
                && next != end
            {
                end = next;
                // From a parameter outside the array on, all elements have the same chain.
                step = if next_step == 0 { 0 } else { step };
                links += 1;
                if links > 2 * MAX_TIES {
                    let mut message = Message::new();
                    message.text("parameter `");
                    leaf_at(tree, source, 0, &mut message);
                    message.text("` is tied in a circle through `");
                    leaf_at(tree, target, 0, &mut message);
                    message.text("`").fail()
                }
            }
            ends[i] = (end, step);
            i += 1;
        }
        let mut i = 0;
        while i < self.len {
            (self.list[i].target, self.list[i].target_step) = ends[i];
            i += 1;
        }
    }

    /// The target must be whole when something outside its unit runs. Fails if the parameters differ.
    #[track_caller]
    const fn is_shared(&self, index: usize, tree: &Tree, param: Dtype) -> bool {
        let tie = &self.list[index];
        let mut shared = false;
        let mut k = 0;
        // The sources are all in one unit or each in its own: the first two show which.
        while k < tie.times && k < 2 {
            if tie.source(k) != tie.target(k) {
                let (mut source_name, mut target_name) = (Message::new(), Message::new());
                let (source, source_unit) = leaf_at(tree, tie.source(k), 0, &mut source_name);
                let (target, target_unit) = leaf_at(tree, tie.target(k), 0, &mut target_name);
                require_agreement((&source, &source_name), (&target, &target_name), param);
                let in_root = target_unit.depth == 0;
                shared = shared || in_root || !target_unit.is(&source_unit);
            }
            k += 1;
        }
        shared
    }
}

/// A `tie_with` that holds for all that is inside its field.
struct Open<'a> {
    target: &'static str,
    /// Path of the struct.
    declared_by: &'a Path<'a>,
    /// Depth of the field's path.
    depth: usize,
}

impl Open<'_> {
    /// The tie of the parameter at `path`, whose ordinal is `source`.
    #[track_caller]
    const fn resolve(&self, model: &Tree, path: &Path<'_>, source: usize) -> Tie {
        let mut relative = Message::new();
        relative.path(self.declared_by);
        let dot = if relative.as_bytes().is_empty() { "" } else { "." };
        relative.text(dot).text(self.target).below(path, self.depth, 0);
        let mut absolute = Message::new();
        absolute.text(self.target).below(path, self.depth, 0);
        let tie = Tie {
            source,
            target: 0,
            times: 1,
            step: 0,
            target_step: 0,
            shared: false,
            declared_at: self.declared_by.depth,
            relative: true,
        };
        if let Some(target) = find(model, relative.as_bytes(), 0, 0) {
            return Tie { target, ..tie };
        }
        if let Some(target) = find(model, absolute.as_bytes(), 0, 0) {
            return Tie { target, relative: false, ..tie };
        }
        let mut message = Message::new();
        message.text("parameter `").path(path).text("` is tied to a parameter that does not exist: no `");
        message.text(relative.as_str()).text("`");
        if !dot.is_empty() {
            message.text(" nor `").text(absolute.as_str()).text("`");
        }
        message.fail()
    }
}

const fn has_ties(tree: &Tree) -> bool {
    match *tree {
        Tree::Param | Tree::Unknown(_) | Tree::Array(0, _) => false,
        Tree::Fields(fields) => {
            let mut i = 0;
            while i < fields.len() {
                if fields[i].attrs.tie_with.is_some() || has_ties(fields[i].tree) {
                    return true;
                }
                i += 1;
            }
            false
        }
        Tree::Unit(content) => has_ties(content),
        Tree::Array(_, element) => has_ties(element),
        Tree::Tuple(elements) => {
            let mut i = 0;
            while i < elements.len() {
                if has_ties(elements[i]) {
                    return true;
                }
                i += 1;
            }
            false
        }
    }
}

/// Tied parameters have one shape and one group.
#[track_caller]
const fn require_agreement(ours: (&Leaf, &Message), theirs: (&Leaf, &Message), param: Dtype) {
    let mut message = Message::new();
    message.text("parameter `").text(ours.1.as_str());
    let (ours, theirs, target) = (ours.0, theirs.0, theirs.1.as_str());
    if !is_same_shape(ours.shape, theirs.shape) {
        message.text("` is tied to `").text(target).text("`, whose shape is ").shape(theirs.shape);
        message.text(", not ").shape(ours.shape).fail()
    }
    let same_cut = match (ours.cut(), theirs.cut()) {
        (Some(ours), Some(theirs)) => ours == theirs,
        (ours, theirs) => ours.is_none() && theirs.is_none(),
    };
    let same_dtype = dtype_of(ours, param) as u8 == dtype_of(theirs, param) as u8;
    if same_cut && same_dtype && ours.requires_grad == theirs.requires_grad && ours.expert == theirs.expert {
        return;
    }
    message.text("` (");
    describe(ours, param, &mut message);
    message.text(") is tied to `").text(target).text("` (");
    describe(theirs, param, &mut message);
    message.text("): tied parameters must agree").fail()
}

const fn is_same_shape(left: &[usize], right: &[usize]) -> bool {
    if left.len() != right.len() {
        return false;
    }
    let mut i = 0;
    while i < left.len() {
        if left[i] != right[i] {
            return false;
        }
        i += 1;
    }
    true
}

const fn describe(leaf: &Leaf, param: Dtype, message: &mut Message) {
    message.text(dtype_of(leaf, param).name());
    message.text(if leaf.requires_grad { "" } else { ", frozen" });
    message.text(if leaf.expert { ", expert" } else { "" });
    if let Some(tp) = leaf.tp {
        message.text(", tp = ").placement(tp);
    }
}

const fn dtype_of(leaf: &Leaf, param: Dtype) -> Dtype {
    match leaf.dtype {
        Some(dtype) => dtype,
        None => param,
    }
}
