//! What units, buckets and parameters are called: three numbers that cannot be mixed up, and tables that only their own
//! kind indexes.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use crate::layout::BucketLayout;

/// A number that names a place in a [`Table`].
pub(crate) trait Id: Copy {
    fn new(index: usize) -> Self;
    fn index(self) -> usize;
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) struct $name(usize);

        impl Id for $name {
            fn new(index: usize) -> Self {
                $name(index)
            }

            fn index(self) -> usize {
                self.0
            }
        }
    )+};
}

ids! {
    /// A communication unit. The root is the first; then come the others as the walk over the model finds them.
    UnitId
    /// A flat buffer of parameters that have their unit, dtype and trainability in common: an index of
    /// [`ModelLayout::buckets`](crate::layout::ModelLayout::buckets).
    BucketId
    /// A physical parameter, which tied ones share: an index of
    /// [`ModelLayout::params`](crate::layout::ModelLayout::params).
    ParamId
}

impl UnitId {
    /// The unit of all parameters that are in no other.
    pub(crate) const ROOT: UnitId = UnitId(0);

    /// The unit of a bucket's parameters.
    pub(crate) fn of(bucket: &BucketLayout) -> UnitId {
        UnitId(bucket.key.unit)
    }
}

/// One value for each unit, bucket or parameter.
#[derive(Clone, PartialEq)]
pub(crate) struct Table<I, T> {
    values: Vec<T>,
    by: PhantomData<fn(I)>,
}

impl<I: Id, T> Table<I, T> {
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = I> + use<I, T> {
        (0..self.values.len()).map(I::new)
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, T> {
        self.values.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.values.iter_mut()
    }

    /// The values with what they are of.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (I, &T)> {
        self.ids().zip(&self.values)
    }
}

impl<I: Id, T> Index<I> for Table<I, T> {
    type Output = T;

    fn index(&self, id: I) -> &T {
        &self.values[id.index()]
    }
}

impl<I: Id, T> IndexMut<I> for Table<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        &mut self.values[id.index()]
    }
}

impl<I, T> From<Vec<T>> for Table<I, T> {
    fn from(values: Vec<T>) -> Self {
        Table { values, by: PhantomData }
    }
}

impl<I, T> FromIterator<T> for Table<I, T> {
    fn from_iter<S: IntoIterator<Item = T>>(values: S) -> Self {
        Vec::from_iter(values).into()
    }
}

impl<'a, I, T> IntoIterator for &'a Table<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.values.iter()
    }
}

impl<I, T: fmt::Debug> fmt::Debug for Table<I, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.values).finish()
    }
}
