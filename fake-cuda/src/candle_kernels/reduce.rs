//! Sums, extrema and their places over the last dims.

use super::element::{Element, Number};
use super::for_dtypes;
use super::operand::{Input, Layout, info_access, written};
use crate::kernel::{Access, Launch, register as register_kernel};

pub fn register() {
    for_dtypes!(all reduce);
}

/// What a kernel reduces: the input, whose last dims go, how many elements of it make one of the output, and how many
/// of these there are.
struct Reduction<T> {
    input: Input<T>,
    rank: usize,
    run: usize,
    outputs: usize,
}

impl<T: Element> Reduction<T> {
    /// Elements, elements that make one, rank, shape and strides, input, output. There is a block for each output;
    /// `small`, the elements are those of the output.
    fn new(launch: &Launch<'_>, small: bool) -> Self {
        let [elements, run, rank] = [0, 1, 2].map(|param| launch.param::<usize>(param));
        let [layout] = Layout::of(launch, elements, rank, 3);
        let outputs = if small { elements } else { launch.grid()[0] as usize };
        Reduction { input: Input::new(launch, 4, layout), rank, run, outputs }
    }

    fn accesses<U>(&self, launch: &Launch<'_>) -> Vec<Access> {
        let info = info_access(launch, 3, self.rank, 1);
        info.into_iter().chain([self.input.access(), written::<U>(launch, 5, self.outputs)]).collect()
    }

    fn run<U: Element>(&self, launch: &Launch<'_>, f: impl Fn(&[T], usize) -> U) {
        let values = self.input.values(launch);
        let last = self.input.layout().last();
        let run =
            |i: usize| &values[(i * self.run).min(values.len())..((i + 1) * self.run).min(values.len())];
        launch.write(launch.param(5), &(0..self.outputs).map(|i| f(run(i), last)).collect::<Vec<_>>());
    }
}

fn add<T: Element, U: Element>(
    name: &str,
    small: bool,
    f: impl Fn(&[T], usize) -> U + Send + Sync + 'static,
) {
    register_kernel(
        &format!("fast_{name}_{}", T::NAME),
        &[8; 6],
        move |launch| Reduction::<T>::new(launch, small).accesses::<U>(launch),
        move |launch| Reduction::<T>::new(launch, small).run(launch, &f),
    );
}

fn reduce<T: Element>() {
    add("sum", false, |values: &[T], _| sum(values));
    add("sum_small", true, |values: &[T], _| sum(values));
    add("max", false, |values: &[T], _| values.iter().fold(T::LOWEST, |max, x| max.max(*x)));
    add("min", false, |values: &[T], _| values.iter().fold(T::HIGHEST, |min, x| min.min(*x)));
    add("argmax", false, |values: &[T], last| place(values, last, |x, best| x > best));
    add("argmin", false, |values: &[T], last| place(values, last, |x, best| x < best));
}

fn sum<T: Element>(values: &[T]) -> T {
    let sum = values.iter().fold(T::zero().number(), |sum, x| match (sum, x.number()) {
        (Number::Int(sum), Number::Int(x)) => Number::Int(sum.wrapping_add(x)),
        (Number::Float(sum), Number::Float(x)) => Number::Float(sum + x),
        (sum, _) => sum,
    });
    T::of(sum)
}

/// The place in the last dim of the first of the best.
fn place<T: Element>(values: &[T], last: usize, better: impl Fn(&T, &T) -> bool) -> u32 {
    let best = (1..values.len()).fold(0, |best, i| if better(&values[i], &values[best]) { i } else { best });
    (best % last.max(1)) as u32
}
