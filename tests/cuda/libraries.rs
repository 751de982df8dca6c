//! What stands for cuRAND and NVRTC; cuBLAS is in `ops` and `found`.

use candle_core::cuda::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::cuda::cudarc::nvrtc::{CompileError, compile_ptx};
use candle_core::{DType, Device, Error, Result, Tensor};
use fake_cuda::{Access, Schedule};
use fsdp_test_fake_cuda::session;
use fsdp_test_support::{absolute, assert_close};

#[test]
fn random_numbers_are_those_of_their_seed() -> Result<()> {
    let mut of_all = Vec::new();
    for schedule in Schedule::all(3) {
        let session = session(schedule);
        let draw = |seed| -> Result<Vec<Vec<f64>>> {
            let device = Device::new_cuda_with_stream(0)?;
            device.set_seed(seed)?;
            let uniform = Tensor::rand(-1f32, 1.0, 4001, &device)?;
            let normal = Tensor::randn(2f32, 0.5, 4001, &device)?;
            let double = Tensor::randn(0f64, 1.0, 4000, &device)?;
            let values = |x: &Tensor| x.to_dtype(DType::F64)?.to_vec1::<f64>();
            Ok(vec![values(&uniform)?, values(&normal)?, values(&double)?])
        };
        let drawn = draw(7)?;
        assert_eq!(drawn, draw(7)?);
        assert_ne!(drawn, draw(8)?);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let deviation = |values: &[f64]| {
            let mean = mean(values);
            (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
        };
        assert!(drawn[0].iter().all(|x| (-1.0..=1.0).contains(x)));
        let expected = [(0.0, 1.0 / 3f64.sqrt()), (2.0, 0.5), (0.0, 1.0)];
        let found: Vec<(f64, f64)> = drawn.iter().map(|values| (mean(values), deviation(values))).collect();
        for ((mean, deviation), (expected_mean, expected_deviation)) in found.into_iter().zip(expected) {
            assert_close(&mean, &expected_mean, absolute(0.05), "mean");
            assert_close(&deviation, &expected_deviation, absolute(0.05), "deviation");
        }
        of_all.push(drawn);
        drop(session);
    }
    assert!(of_all.windows(2).all(|two| two[0] == two[1]));
    Ok(())
}

const PROGRAM: &str = "
#define KERNEL(name, T) \\
    extern \"C\" __global__ void __launch_bounds__(256) name(T* to, T value) { *to = value; }
KERNEL(store_float, float);
KERNEL(store_int, int);
extern \"C\" __global__ void plain(float* to) { *to = 1.0f; }
";

#[test]
fn a_program_has_the_kernels_that_it_defines() -> Result<()> {
    let session = session(Schedule::Latest);
    for name in ["store_float", "store_int", "plain", "elsewhere"] {
        session.kernel(
            name,
            &[8, 4],
            |launch| vec![Access::write(launch.param(0), 4)],
            |launch| launch.write(launch.param(0), &[launch.param::<f32>(1)]),
        );
    }
    let device = Device::new_cuda_with_stream(0)?;
    let cuda = device.as_cuda_device()?;
    let program = compile_ptx(PROGRAM).map_err(Error::wrap)?.to_src();
    let function = |name| cuda.get_or_load_custom_func(name, "program", &program);
    for name in ["store_int", "plain"] {
        function(name)?;
    }
    assert!(function("elsewhere").is_err());

    let mut target = cuda.alloc_zeros::<f32>(1)?;
    let store = function("store_float")?;
    let mut launch = store.builder();
    launch.arg(&mut target).arg(&2.5f32);
    // SAFETY: the arguments are those of the kernel.
    unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.map_err(Error::wrap)?;
    assert_eq!(cuda.clone_dtoh(&target)?, [2.5]);
    Ok(())
}

#[test]
fn a_program_without_kernels_is_refused_with_a_log() {
    let _session = session(Schedule::Latest);
    let error = compile_ptx("int nothing;").expect_err("there is no kernel");
    let CompileError::CompileError { log, .. } = error else { panic!("{error:?}") };
    assert!(log.to_string_lossy().contains("no kernel"), "{log:?}");
}
