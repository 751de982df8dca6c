//! Kernels that read and write where other tensors say. The largest id of its dtype means none.

use std::marker::PhantomData;

use super::element::{Element, Number};
use super::for_dtypes;
use super::operand::{Input, info_access, written};
use crate::kernel::{Access, Launch, register as register_kernel};

pub fn register() {
    for_dtypes!(all indexing);
}

fn indexing<T: Element>() {
    by::<u8, T>();
    by::<u32, T>();
    by::<i64, T>();
}

fn by<I: Element, T: Element>() {
    index_select::<I, T>();
    gather::<I, T>();
    index_add::<I, T>();
    scatter::<I, T>("s", |_, new| new);
    scatter::<I, T>("sa", T::add);
}

/// Where an id points, if it does. An id past `bound` is an error on a GPU that nobody hears of; here it is a panic.
fn place<I: Element>(id: I, bound: usize) -> Option<usize> {
    if id == I::HIGHEST {
        return None;
    }
    let Number::Int(place) = id.number() else { return None };
    let place = usize::try_from(place).ok().filter(|place| *place < bound);
    Some(place.unwrap_or_else(|| panic!("id {id:?} is not below {bound}")))
}

/// Sizes before and behind the dim that ids are for, of that dim, and how many ids there are.
#[derive(Clone, Copy)]
struct Sizes {
    left: usize,
    dim: usize,
    ids: usize,
    right: usize,
}

impl Sizes {
    fn of(launch: &Launch<'_>, first: usize) -> Self {
        let [left, dim, ids, right] = [0, 1, 2, 3].map(|i| launch.param::<usize>(first + i));
        Sizes { left, dim, ids, right }
    }
}

/// Elements, rank, shape and strides of the ids, ids, input, output, sizes. The ids lie without gaps.
fn index_select<I: Element, T: Element>() {
    let operands = |launch: &Launch<'_>| {
        let sizes = Sizes::of(launch, 6);
        let ids = Input::<I>::flat(launch, 3, sizes.ids);
        (sizes, ids, Input::<T>::flat(launch, 4, sizes.left * sizes.dim * sizes.right))
    };
    register_kernel(
        &format!("is_{}_{}", I::NAME, T::NAME),
        &[8; 10],
        move |launch| {
            let (_, ids, input) = operands(launch);
            let info = info_access(launch, 2, launch.param(1), 1);
            info.into_iter()
                .chain([ids.access(), input.access(), written::<T>(launch, 5, launch.param(0))])
                .collect()
        },
        move |launch| {
            let (sizes, ids, input) = operands(launch);
            let (ids, input) = (ids.values(launch), input.values(launch));
            let mut output = Vec::with_capacity(launch.param(0));
            for left in 0..sizes.left {
                for id in &ids {
                    match place(*id, sizes.dim) {
                        Some(place) => {
                            let start = (left * sizes.dim + place) * sizes.right;
                            output.extend_from_slice(&input[start..start + sizes.right]);
                        }
                        None => output.extend(std::iter::repeat_n(T::zero(), sizes.right)),
                    }
                }
            }
            launch.write(launch.param(5), &output);
        },
    );
}

/// Elements, ids, input, output, sizes.
fn gather<I: Element, T: Element>() {
    let operands = |launch: &Launch<'_>| {
        let sizes = Sizes::of(launch, 4);
        let ids = Input::<I>::flat(launch, 1, launch.param(0));
        (sizes, ids, Input::<T>::flat(launch, 2, sizes.left * sizes.dim * sizes.right))
    };
    register_kernel(
        &format!("gather_{}_{}", I::NAME, T::NAME),
        &[8; 8],
        move |launch| {
            let (_, ids, input) = operands(launch);
            vec![ids.access(), input.access(), written::<T>(launch, 3, launch.param(0))]
        },
        move |launch| {
            let (sizes, ids, input) = operands(launch);
            let input = input.values(launch);
            let value = |(i, id): (usize, I)| match place(id, sizes.dim) {
                Some(place) => {
                    let before = i / (sizes.right * sizes.ids);
                    input[(before * sizes.dim + place) * sizes.right + i % sizes.right]
                }
                None => T::zero(),
            };
            let output = ids.values(launch).into_iter().enumerate().map(value).collect::<Vec<_>>();
            launch.write(launch.param(3), &output);
        },
    );
}

/// A tensor that a kernel reads and writes, without gaps.
struct InPlace<T> {
    address: u64,
    len: usize,
    dtype: PhantomData<T>,
}

impl<T: Element> InPlace<T> {
    fn new(launch: &Launch<'_>, param: usize, len: usize) -> Self {
        InPlace { address: launch.param(param), len, dtype: PhantomData }
    }

    fn accesses(&self) -> [Access; 2] {
        let bytes = self.len * size_of::<T>();
        [Access::read(self.address, bytes), Access::write(self.address, bytes)]
    }

    fn change(&self, launch: &Launch<'_>, f: impl FnOnce(&mut Vec<T>)) {
        let mut values = launch.read::<T>(self.address, self.len);
        f(&mut values);
        launch.write(self.address, &values);
    }
}

/// Ids, their number, input, output, and the sizes: left, of the dim in the input, of the dim in the output, right.
fn index_add<I: Element, T: Element>() {
    let operands = |launch: &Launch<'_>| {
        let ids = launch.param::<usize>(1);
        let [left, dim, right] = [4, 6, 7].map(|param| launch.param::<usize>(param));
        let sizes = Sizes { left, dim, ids, right };
        let input = Input::<T>::flat(launch, 2, left * ids * right);
        (sizes, Input::<I>::flat(launch, 0, ids), input, InPlace::<T>::new(launch, 3, left * dim * right))
    };
    register_kernel(
        &format!("ia_{}_{}", I::NAME, T::NAME),
        &[8; 8],
        move |launch| {
            let (_, ids, input, output) = operands(launch);
            [ids.access(), input.access()].into_iter().chain(output.accesses()).collect()
        },
        move |launch| {
            let (sizes, ids, input, output) = operands(launch);
            let (ids, input) = (ids.values(launch), input.values(launch));
            output.change(launch, |values| {
                for left in 0..sizes.left {
                    for (j, id) in ids.iter().enumerate() {
                        let Some(place) = place(*id, sizes.dim) else { continue };
                        let from = &input[(left * sizes.ids + j) * sizes.right..][..sizes.right];
                        let to = &mut values[(left * sizes.dim + place) * sizes.right..][..sizes.right];
                        to.iter_mut().zip(from).for_each(|(to, from)| *to = to.add(*from));
                    }
                }
            });
        },
    );
}

/// Ids, input, output, and the sizes: left, of the dim in the input, of the dim in the output, right.
fn scatter<I: Element, T: Element>(name: &str, f: impl Fn(T, T) -> T + Send + Sync + 'static) {
    let operands = |launch: &Launch<'_>| {
        let [left, ids, dim, right] = [3, 4, 5, 6].map(|param| launch.param::<usize>(param));
        let sizes = Sizes { left, dim, ids, right };
        let len = left * ids * right;
        let output = InPlace::<T>::new(launch, 2, left * dim * right);
        (sizes, Input::<I>::flat(launch, 0, len), Input::<T>::flat(launch, 1, len), output)
    };
    register_kernel(
        &format!("{name}_{}_{}", I::NAME, T::NAME),
        &[8; 7],
        move |launch| {
            let (_, ids, input, output) = operands(launch);
            [ids.access(), input.access()].into_iter().chain(output.accesses()).collect()
        },
        move |launch| {
            let (sizes, ids, input, output) = operands(launch);
            let (ids, input) = (ids.values(launch), input.values(launch));
            output.change(launch, |values| {
                for (i, (id, new)) in ids.into_iter().zip(input).enumerate() {
                    let Some(place) = place(id, sizes.dim) else { continue };
                    let left = i / (sizes.right * sizes.ids);
                    let to = &mut values[(left * sizes.dim + place) * sizes.right + i % sizes.right];
                    *to = f(*to, new);
                }
            });
        },
    );
}
