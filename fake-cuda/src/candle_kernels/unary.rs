//! Kernels of one tensor, and those with a parameter beside it.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use super::element::{Element, Float};
use super::for_dtypes;
use super::operand::{Input, Layout, info_access, written};
use crate::kernel::{Launch, register as register_kernel};

pub fn register() {
    for_dtypes!(floats unary);
    for_dtypes!(floats with_parameter);
    for_dtypes!(all copy);
    for_dtypes!(all affine);
    for_dtypes!(all casts_from);
}

/// Elements, rank, shape and strides, input, output.
const MAP: [usize; 5] = [8; 5];

fn map<S: Element, T: Element>(name: &str, f: impl Fn(S) -> T + Send + Sync + 'static) {
    let input = |launch: &Launch<'_>| {
        let (len, rank) = (launch.param::<usize>(0), launch.param::<usize>(1));
        let [layout] = Layout::of(launch, len, rank, 2);
        (len, rank, Input::<S>::new(launch, 3, layout))
    };
    register_kernel(
        name,
        &MAP,
        move |launch| {
            let (len, rank, input) = input(launch);
            let info = info_access(launch, 2, rank, 1);
            info.into_iter().chain([input.access(), written::<T>(launch, 4, len)]).collect()
        },
        move |launch| {
            let values = input(launch).2.values(launch).into_iter().map(&f).collect::<Vec<T>>();
            launch.write(launch.param(4), &values);
        },
    );
}

fn copy<T: Element>() {
    map(&format!("ucopy_{}", T::NAME), |x: T| x);
}

fn casts_from<S: Element>() {
    fn cast<S: Element, T: Element>() {
        map(&format!("cast_{}_{}", S::NAME, T::NAME), |x: S| T::of(x.number()));
    }
    cast::<S, f32>();
    cast::<S, f64>();
    cast::<S, half::bf16>();
    cast::<S, half::f16>();
    cast::<S, u8>();
    cast::<S, u32>();
    cast::<S, i64>();
}

/// The error function, to the last places of f64: its series with positive terms.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// The share of a normal distribution below `x`.
fn normal_below(x: f64) -> f64 {
    0.5 * (1.0 + erf(x * FRAC_1_SQRT_2))
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * (x + 0.044715 * x.powi(3))).tanh())
}

fn sign(x: f64) -> f64 {
    f64::from(u8::from(x > 0.0)) - f64::from(u8::from(x < 0.0))
}

fn unary<T: Float>() {
    of::<T>("neg", |x| -x);
    of::<T>("recip", f64::recip);
    of::<T>("exp", f64::exp);
    of::<T>("log", f64::ln);
    of::<T>("sin", f64::sin);
    of::<T>("cos", f64::cos);
    of::<T>("tanh", f64::tanh);
    of::<T>("erf", erf);
    of::<T>("ceil", f64::ceil);
    of::<T>("floor", f64::floor);
    of::<T>("round", f64::round);
    of::<T>("normcdf", normal_below);
    of::<T>("abs", f64::abs);
    of::<T>("sqr", |x| x * x);
    of::<T>("sqrt", f64::sqrt);
    of::<T>("gelu", gelu);
    of::<T>("gelu_erf", |x| x * normal_below(x));
    of::<T>("relu", |x| x.max(0.0));
    of::<T>("silu", |x| x / (1.0 + (-x).exp()));
    of::<T>("sigmoid", |x| (1.0 + (-x).exp()).recip());
    of::<T>("sign", sign);

    fn of<T: Float>(name: &str, f: fn(f64) -> f64) {
        map(&format!("u{name}_{}", T::NAME), move |x: T| T::narrow(f(x.wide())));
    }
}

fn with_parameter<T: Float>() {
    parametric::<T>("powf", f64::powf);
    parametric::<T>("elu", |x, alpha| if x > 0.0 { x } else { alpha * (x.exp() - 1.0) });
}

/// Elements, rank, shape and strides, the parameter, input, output.
fn parametric<T: Float>(name: &str, f: fn(f64, f64) -> f64) {
    let input = |launch: &Launch<'_>| {
        let (len, rank) = (launch.param::<usize>(0), launch.param::<usize>(1));
        let [layout] = Layout::of(launch, len, rank, 2);
        (len, rank, Input::<T>::new(launch, 4, layout))
    };
    register_kernel(
        &format!("u{name}_{}", T::NAME),
        &[8, 8, 8, size_of::<T>(), 8, 8],
        move |launch| {
            let (len, rank, input) = input(launch);
            let info = info_access(launch, 2, rank, 1);
            info.into_iter().chain([input.access(), written::<T>(launch, 5, len)]).collect()
        },
        move |launch| {
            let parameter = launch.param::<T>(3).wide();
            let values = input(launch).2.values(launch);
            let values = values.iter().map(|x| T::narrow(f(x.wide(), parameter))).collect::<Vec<_>>();
            launch.write(launch.param(5), &values);
        },
    );
}

/// Elements, rank, shape and strides, input, output, factor, summand.
fn affine<T: Element>() {
    let input = |launch: &Launch<'_>| {
        let (len, rank) = (launch.param::<usize>(0), launch.param::<usize>(1));
        let [layout] = Layout::of(launch, len, rank, 2);
        (len, rank, Input::<T>::new(launch, 3, layout))
    };
    register_kernel(
        &format!("affine_{}", T::NAME),
        &[8, 8, 8, 8, 8, size_of::<T>(), size_of::<T>()],
        move |launch| {
            let (len, rank, input) = input(launch);
            let info = info_access(launch, 2, rank, 1);
            info.into_iter().chain([input.access(), written::<T>(launch, 4, len)]).collect()
        },
        move |launch| {
            let (factor, summand) = (launch.param::<T>(5), launch.param::<T>(6));
            let values = input(launch).2.values(launch);
            let values = values.iter().map(|x| x.mul(factor).add(summand)).collect::<Vec<_>>();
            launch.write(launch.param(4), &values);
        },
    );
}
