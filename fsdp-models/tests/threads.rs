//! The number of threads of a matrix product changes its speed only. A test program of its own: the number is
//! process-wide.

use candle_core::{Device, Tensor};
use fsdp::GradSink;
use fsdp_models::ops::{linear, set_threads, threads};

#[test]
fn more_threads_give_the_same_bits() {
    let matrix = |rows: usize, cols: usize| {
        let values: Vec<f32> = (0..rows * cols).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect();
        Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap()
    };
    let (x, weight) = (matrix(257, 200), matrix(300, 200));
    let product =
        || linear(&x, &weight, &GradSink::closed()).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(threads(), 1);
    let one = product();
    set_threads(3);
    assert_eq!(threads(), 3);
    assert_eq!(product(), one);
    set_threads(0);
    assert_eq!(threads(), 1);
}
