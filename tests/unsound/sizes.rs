//! Sizes near the end of what can be counted.

use candle_core::Tensor;
use fsdp::files::{StoredDtype, TensorFileWriter};
use fsdp::prelude::*;

use crate::apart::apart;
use crate::models::{Dot, Dots, full, gradients};

/// Their bytes or elements, multiplied without care, are few or none.
const SHAPES: [&[usize]; 6] = [
    &[(1 << 62) + 1],
    &[1 << 32, 1 << 32],
    &[usize::MAX],
    &[usize::MAX, 2],
    &[1 << 63, 2, 1],
    &[(1 << 33) + 1, 1 << 31],
];

#[test]
fn parameters_of_sizes_that_cannot_be_counted() {
    for strategy in Strategy::ALL {
        for dtype in [Dtype::F32, Dtype::BF16] {
            for shape in SHAPES {
                let config = FsdpConfig { strategy, ..FsdpConfig::default() };
                let model = Dot { w: Param::new(shape).with_dtype(dtype) };
                assert!(model.w.numel() > 1 << 62, "{}", model.w.numel());
                let error = model.fully_shard_with(&DeviceMesh::single(), &config).unwrap_err().to_string();
                assert_eq!(
                    error,
                    format!("parameter `w` of shape {shape:?} makes a bucket of more than 2^63 bytes"),
                );
            }
        }
    }
}

#[test]
fn parameters_without_elements_whatever_their_other_sizes() {
    let model = Dot { w: Param::new(vec![usize::MAX, 2, 0]) };
    assert_eq!(model.w.numel(), 0);
    let model = model.fully_shard(&DeviceMesh::single()).unwrap();
    assert_eq!(model.layout().params[0].numel(), 0);
}

/// They can be counted, and are not to be had.
#[test]
fn parameters_larger_than_any_memory() {
    apart("sizes::parameters_larger_than_any_memory", || {
        for (count, len) in [(1, 1usize << 58), (3, 1 << 59)] {
            let error = Dots::new(count, len).fully_shard(&DeviceMesh::single()).unwrap_err().to_string();
            let expected = format!("host: {len} elements of f32 cannot be allocated, for model_weights");
            assert!(error.contains(&expected), "{error}");
        }
    });
}

#[test]
fn settings_at_their_ends() {
    let config = FsdpConfig { bucket_size: Some(usize::MAX), ..FsdpConfig::default() };
    let model = Dots::new(3, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap();
    model.set_first_sample(u64::MAX);
    let loss: Tensor = model.forward(&full(5, 1.0)).unwrap();
    model.backward(&loss).unwrap();
    assert_eq!(gradients(&model).unwrap(), [[1.0; 5]; 3]);
    let config =
        FsdpConfig { reshard_after_forward: ReshardAfterForward::Ranks(usize::MAX), ..FsdpConfig::default() };
    let error = Dots::new(3, 5).fully_shard_with(&DeviceMesh::single(), &config).unwrap_err().to_string();
    assert!(error.contains("18446744073709551615"), "{error}");
}

#[test]
fn meshes_and_groups_of_ranks_that_do_not_exist() {
    let one = DeviceMesh::single();
    for sizes in [[usize::MAX, 2], [1 << 32, 1 << 32], [usize::MAX, usize::MAX]] {
        let dims = [("dp_outer", sizes[0]), ("dp_shard", sizes[1])];
        let error = DeviceMesh::new(&dims, one.communicator().clone()).unwrap_err().to_string();
        assert!(error.contains(&sizes[0].to_string()), "{error}");
    }
    for ranks in [&[usize::MAX][..], &[0, usize::MAX], &[0, 0], &[]] {
        let error = one.communicator().split("apart", ranks).err().expect("no such group").to_string();
        assert!(error.contains("`apart` cannot be a group"), "{error}");
    }
}

#[test]
fn files_of_tensors_that_cannot_be_counted() {
    let dir = tempfile::tempdir().unwrap();
    for shape in SHAPES {
        let path = dir.path().join("w.safetensors");
        let tensors = [("small", &[4][..]), ("large", shape)];
        let error = TensorFileWriter::create(&path, tensors, StoredDtype::F32).expect_err("it is refused");
        let expected = format!("tensor `large` of shape {shape:?} makes it longer than can be counted");
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(!path.exists());
    }
}
