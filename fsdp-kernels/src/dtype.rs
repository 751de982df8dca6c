//! Element types, and names of kernels by them.

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// IEEE binary16.
    F16,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
        }
    }
}

/// The kernels of a stem with one dtype, in the order of [`Dtype::ALL`].
macro_rules! by_dtype {
    ($stem:literal) => {
        &[concat!("fsdp_", $stem, "_f32"), concat!("fsdp_", $stem, "_bf16"), concat!("fsdp_", $stem, "_f16")]
    };
}
pub(crate) use by_dtype;

/// The kernels of a stem with two dtypes, the second of which runs faster.
macro_rules! by_dtypes {
    ($stem:literal) => {
        &[
            concat!("fsdp_", $stem, "_f32_f32"),
            concat!("fsdp_", $stem, "_f32_bf16"),
            concat!("fsdp_", $stem, "_f32_f16"),
            concat!("fsdp_", $stem, "_bf16_f32"),
            concat!("fsdp_", $stem, "_bf16_bf16"),
            concat!("fsdp_", $stem, "_bf16_f16"),
            concat!("fsdp_", $stem, "_f16_f32"),
            concat!("fsdp_", $stem, "_f16_bf16"),
            concat!("fsdp_", $stem, "_f16_f16"),
        ]
    };
}
pub(crate) use by_dtypes;

/// The one of `names`, made by [`by_dtype!`], for a dtype.
pub(crate) fn pick(names: &[&'static str], dtype: Dtype) -> &'static str {
    names[dtype as usize]
}

/// The one of `names`, made by [`by_dtypes!`], for two dtypes.
pub(crate) fn pick_two(names: &[&'static str], first: Dtype, second: Dtype) -> &'static str {
    names[first as usize * Dtype::ALL.len() + second as usize]
}
