//! The program's text.

macro_rules! program {
    ($($file:literal)*) => {
        /// The whole CUDA C++ program. Messages of a compiler name the files of `kernels/`.
        pub const SOURCE: &str =
            concat!($("#line 1 \"", $file, "\"\n", include_str!(concat!("../kernels/", $file))),*);

        #[cfg(test)]
        const FILES: &[&str] = &[$($file),*];
    };
}

program! {
    "platform.cuh"
    "element.cuh"
    "traverse.cuh"
    "reduce.cuh"
    "exp.cuh"
    "adamw.cuh"
    "accumulate.cuh"
    "cast.cuh"
    "norm.cuh"
    "sum_ranks.cuh"
    "rms_norm.cuh"
    "rope.cuh"
    "swiglu.cuh"
    "softmax.cuh"
    "cross_entropy.cuh"
    "dropout.cuh"
    "swap_dims.cuh"
    "embedding.cuh"
}

/// What NVRTC must be given, beside the architecture: the results promised need products and sums apart, and lambdas
/// are functions of the device. Faster division, square roots and flushed subnormal numbers must stay off, as they are
/// by default. `nvcc` takes the first two, and knows where a lambda belongs.
pub const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "--device-as-default-execution-space"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_what_nvcc_compiles() {
        let includes: Vec<&str> = include_str!("../kernels/kernels.cu")
            .lines()
            .filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'))
            .collect();
        assert_eq!(includes, FILES);
        assert!(!SOURCE.contains("#include"), "NVRTC would need an include path");
    }
}
