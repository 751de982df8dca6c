//! Kernels of two and three tensors of one shape.

use super::element::{Element, Number};
use super::for_dtypes;
use super::operand::{Input, Layout, info_access, written};
use crate::kernel::{Launch, register as register_kernel};

pub fn register() {
    for_dtypes!(all binary);
    for_dtypes!(all select);
}

fn binary<T: Element>() {
    zip("badd", T::add);
    zip("bsub", T::sub);
    zip("bmul", T::mul);
    zip("bdiv", T::div);
    zip("bmaximum", T::max);
    zip("bminimum", T::min);
    zip("eq", |x: T, y: T| u8::from(x == y));
    zip("ne", |x: T, y: T| u8::from(x != y));
    zip("lt", |x: T, y: T| u8::from(x < y));
    zip("le", |x: T, y: T| u8::from(x <= y));
    zip("gt", |x: T, y: T| u8::from(x > y));
    zip("ge", |x: T, y: T| u8::from(x >= y));
}

/// Elements, rank, shape and two times strides, the inputs, output.
fn zip<T: Element, U: Element>(name: &str, f: impl Fn(T, T) -> U + Send + Sync + 'static) {
    let inputs = |launch: &Launch<'_>| {
        let (len, rank) = (launch.param::<usize>(0), launch.param::<usize>(1));
        let [x, y] = Layout::of(launch, len, rank, 2);
        (len, rank, [Input::<T>::new(launch, 3, x), Input::<T>::new(launch, 4, y)])
    };
    register_kernel(
        &format!("{name}_{}", T::NAME),
        &[8; 6],
        move |launch| {
            let (len, rank, [x, y]) = inputs(launch);
            let info = info_access(launch, 2, rank, 2);
            info.into_iter().chain([x.access(), y.access(), written::<U>(launch, 5, len)]).collect()
        },
        move |launch| {
            let [x, y] = inputs(launch).2.map(|input| input.values(launch));
            launch.write(launch.param(5), &x.into_iter().zip(y).map(|(x, y)| f(x, y)).collect::<Vec<_>>());
        },
    );
}

fn select<T: Element>() {
    select_by::<u8, T>();
    select_by::<u32, T>();
    select_by::<i64, T>();
}

/// Elements, rank, shape and three times strides, the conditions, the two inputs, output.
fn select_by<I: Element, T: Element>() {
    let layouts = |launch: &Launch<'_>| {
        let (len, rank) = (launch.param::<usize>(0), launch.param::<usize>(1));
        (len, rank, Layout::of::<3>(launch, len, rank, 2))
    };
    register_kernel(
        &format!("where_{}_{}", I::NAME, T::NAME),
        &[8; 7],
        move |launch| {
            let (len, rank, [conditions, yes, no]) = layouts(launch);
            let conditions = Input::<I>::new(launch, 3, conditions).access();
            let [yes, no] =
                [(4, yes), (5, no)].map(|(at, layout)| Input::<T>::new(launch, at, layout).access());
            let info = info_access(launch, 2, rank, 3);
            info.into_iter().chain([conditions, yes, no, written::<T>(launch, 6, len)]).collect()
        },
        move |launch| {
            let (_, _, [conditions, yes, no]) = layouts(launch);
            let conditions = Input::<I>::new(launch, 3, conditions).values(launch);
            let [yes, no] =
                [(4, yes), (5, no)].map(|(at, layout)| Input::<T>::new(launch, at, layout).values(launch));
            let chosen = conditions.into_iter().zip(yes.into_iter().zip(no));
            let chosen = chosen.map(|(condition, (yes, no))| match condition.number() {
                Number::Int(0) => no,
                _ => yes,
            });
            launch.write(launch.param(6), &chosen.collect::<Vec<_>>());
        },
    );
}
