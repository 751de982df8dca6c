//! Kernels that set and copy.

use super::element::Element;
use super::for_dtypes;
use super::operand::{Layout, info_access, written};
use crate::kernel::{Access, Launch, register as register_kernel};

pub fn register() {
    for_dtypes!(all fill);
    for_dtypes!(all set);
    for_dtypes!(all copy_rows);
}

/// Output, value, elements.
fn fill<T: Element>() {
    register_kernel(
        &format!("fill_{}", T::NAME),
        &[8, size_of::<T>(), 8],
        |launch| vec![written::<T>(launch, 0, launch.param(2))],
        |launch| launch.write(launch.param(0), &vec![launch.param::<T>(1); launch.param::<usize>(2)]),
    );
}

/// Elements, rank, shape and strides of the output, value, output.
fn set<T: Element>() {
    let layout = |launch: &Launch<'_>| {
        let (len, rank) = (launch.param::<usize>(0), launch.param::<usize>(1));
        let [layout] = Layout::of(launch, len, rank, 2);
        (rank, layout)
    };
    register_kernel(
        &format!("const_set_{}", T::NAME),
        &[8, 8, 8, size_of::<T>(), 8],
        move |launch| {
            let (rank, layout) = layout(launch);
            let info = info_access(launch, 2, rank, 1);
            info.into_iter().chain([written::<T>(launch, 4, layout.extent())]).collect()
        },
        move |launch| {
            let (value, start) = (launch.param::<T>(3), launch.param::<u64>(4));
            for offset in layout(launch).1.offsets() {
                launch.write(start + (offset * size_of::<T>()) as u64, &[value]);
            }
        },
    );
}

/// Input, output, rows, elements of a row, elements from a row of the input to the next, and of the output.
fn copy_rows<T: Element>() {
    let extent = |launch: &Launch<'_>, stride: usize| {
        let [rows, width, stride] = [2, 3, stride].map(|param| launch.param::<u32>(param) as usize);
        if rows * width == 0 { 0 } else { ((rows - 1) * stride + width) * size_of::<T>() }
    };
    register_kernel(
        &format!("copy2d_{}", T::NAME),
        &[8, 8, 4, 4, 4, 4],
        move |launch| {
            vec![
                Access::read(launch.param(0), extent(launch, 4)),
                Access::write(launch.param(1), extent(launch, 5)),
            ]
        },
        |launch| {
            let [rows, width, from, to] = [2, 3, 4, 5].map(|param| u64::from(launch.param::<u32>(param)));
            let size = size_of::<T>() as u64;
            for row in 0..rows {
                let values = launch.read::<T>(launch.param::<u64>(0) + row * from * size, width as usize);
                launch.write(launch.param::<u64>(1) + row * to * size, &values);
            }
        },
    );
}
