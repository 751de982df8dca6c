//! Kernels of whole rows: sorting.

use super::element::Element;
use super::for_dtypes;
use super::operand::{Input, written};
use crate::kernel::{Launch, register as register_kernel};

pub fn register() {
    for_dtypes!(all sort);
}

/// Input, output, columns, columns with padding; a block for each row.
fn sort<T: Element>() {
    let operands = |launch: &Launch<'_>| {
        let columns = launch.param::<i32>(2) as usize;
        let len = launch.grid()[0] as usize * columns;
        (columns, len, Input::<T>::flat(launch, 0, len))
    };
    for (name, descending) in [("asort_asc", false), ("asort_desc", true)] {
        register_kernel(
            &format!("{name}_{}", T::NAME),
            &[8, 8, 4, 4],
            move |launch| {
                let (_, len, input) = operands(launch);
                vec![input.access(), written::<u32>(launch, 1, len)]
            },
            move |launch| {
                let (columns, _, input) = operands(launch);
                let mut places = Vec::new();
                for row in input.values(launch).chunks_exact(columns.max(1)) {
                    let mut order = (0..columns as u32).collect::<Vec<_>>();
                    order.sort_by(|a, b| {
                        let order = row[*a as usize].partial_cmp(&row[*b as usize]);
                        let order = order.unwrap_or(std::cmp::Ordering::Equal);
                        if descending { order.reverse() } else { order }
                    });
                    places.extend(order);
                }
                launch.write(launch.param(1), &places);
            },
        );
    }
}
