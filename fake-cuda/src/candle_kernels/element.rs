//! The dtypes of tensors.

use std::fmt::Debug;

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};

/// A value of any dtype, without loss.
#[derive(Clone, Copy, Debug)]
pub enum Number {
    Int(i64),
    Float(f64),
}

/// What elementwise kernels compute with.
pub trait Element: AnyBitPattern + NoUninit + PartialOrd + Debug + Send + Sync + 'static {
    /// As kernels' names have it.
    const NAME: &'static str;
    /// Below all others: where a maximum begins.
    const LOWEST: Self;
    /// Above all others: where a minimum begins.
    const HIGHEST: Self;

    fn number(self) -> Number;
    /// Rounded to the nearest, or as an integer cut off.
    fn of(number: Number) -> Self;

    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn zero() -> Self {
        Self::of(Number::Int(0))
    }
}

/// Floats, with what unary kernels compute in.
pub trait Float: Element {
    fn wide(self) -> f64;
    fn narrow(value: f64) -> Self;
}

macro_rules! float {
    ($type:ty, $name:literal, $wide:expr, $round:expr, nan_wins: $nan_wins:literal) => {
        impl Element for $type {
            const NAME: &'static str = $name;
            const LOWEST: Self = <$type>::NEG_INFINITY;
            const HIGHEST: Self = <$type>::INFINITY;

            fn number(self) -> Number {
                Number::Float(self.wide())
            }

            fn of(number: Number) -> Self {
                match number {
                    Number::Int(value) => Self::narrow(value as f64),
                    Number::Float(value) => Self::narrow(value),
                }
            }

            fn add(self, other: Self) -> Self {
                Self::narrow(self.wide() + other.wide())
            }

            fn sub(self, other: Self) -> Self {
                Self::narrow(self.wide() - other.wide())
            }

            fn mul(self, other: Self) -> Self {
                Self::narrow(self.wide() * other.wide())
            }

            fn div(self, other: Self) -> Self {
                Self::narrow(self.wide() / other.wide())
            }

            fn max(self, other: Self) -> Self {
                match ($nan_wins && (self.is_nan() || other.is_nan()), self.wide().max(other.wide())) {
                    (true, _) => <$type>::NAN,
                    (false, max) => Self::narrow(max),
                }
            }

            fn min(self, other: Self) -> Self {
                match ($nan_wins && (self.is_nan() || other.is_nan()), self.wide().min(other.wide())) {
                    (true, _) => <$type>::NAN,
                    (false, min) => Self::narrow(min),
                }
            }
        }

        impl Float for $type {
            fn wide(self) -> f64 {
                $wide(self)
            }

            fn narrow(value: f64) -> Self {
                $round(value)
            }
        }
    };
}

float!(f32, "f32", f64::from, |value| value as f32, nan_wins: false);
float!(f64, "f64", |value| value, |value| value, nan_wins: false);
float!(bf16, "bf16", bf16::to_f64, bf16::from_f64, nan_wins: true);
float!(f16, "f16", f16::to_f64, f16::from_f64, nan_wins: true);

macro_rules! integer {
    ($($type:ident)*) => {$(
        impl Element for $type {
            const NAME: &'static str = stringify!($type);
            const LOWEST: Self = <$type>::MIN;
            const HIGHEST: Self = <$type>::MAX;

            fn number(self) -> Number {
                Number::Int(self as i64)
            }

            fn of(number: Number) -> Self {
                match number {
                    Number::Int(value) => value as $type,
                    Number::Float(value) => value as $type,
                }
            }

            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }

            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            /// By zero there is all ones, as on a GPU.
            fn div(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_div(other) }
            }

            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
        }
    )*};
}

integer! { u8 u32 i64 }
