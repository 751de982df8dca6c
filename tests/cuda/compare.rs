//! The same computation on the CPU and on the fake driver.

use candle_core::{DType, Device, Result, Tensor};
use fake_cuda::Schedule;
use fsdp_test_fake_cuda::session;
use fsdp_test_support::relative;

/// What a computation gave, by name.
pub type Values = Vec<(String, Vec<f64>)>;

/// Values between -1 and 1 that look like none in particular.
pub fn values(shape: &[usize], seed: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let len = shape.iter().product::<usize>();
    let value = |i| ((i * 7919 + seed * 104_729 + 13) % 2003) as f32 / 1001.5 - 1.0;
    Tensor::from_vec((0..len).map(value).collect::<Vec<f32>>(), shape, device)?.to_dtype(dtype)
}

/// A tensor's values under a name.
pub fn named(name: &str, tensor: &Tensor) -> Result<(String, Vec<f64>)> {
    let flat = tensor.flatten_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    Ok((name.to_owned(), flat.to_vec1()?))
}

/// How far a result of a dtype may be from the CPU's, of values around 1.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-6,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 0.0,
    }
}

/// Compares in the latest schedule, the earliest and as many random ones; the devices are gone when a session ends.
pub fn compare(random: u64, tolerance: f64, compute: impl Fn(&Device) -> Result<Values>) -> Result<()> {
    let expected = compute(&Device::Cpu)?;
    for schedule in Schedule::all(random) {
        let session = session(schedule);
        let got = compute(&Device::new_cuda_with_stream(0)?)?;
        assert_close(&expected, &got, tolerance);
        drop(session);
    }
    Ok(())
}

/// Panics unless the values of the same names are close, those that are not numbers in the same places.
pub fn assert_close(expected: &Values, got: &Values, tolerance: f64) {
    assert_eq!(expected.len(), got.len());
    for ((name, expected), (found, got)) in expected.iter().zip(got) {
        assert_eq!(found, name);
        let are_nan = |values: &[f64]| values.iter().map(|value| value.is_nan()).collect::<Vec<_>>();
        assert_eq!(are_nan(got), are_nan(expected), "{name}");
        let numbers =
            |values: &[f64]| values.iter().copied().filter(|value| !value.is_nan()).collect::<Vec<_>>();
        let within = relative(tolerance).plus(tolerance);
        fsdp_test_support::assert_close(
            &numbers(got),
            &numbers(expected),
            within,
            format!("{name}, numbers"),
        );
    }
}
