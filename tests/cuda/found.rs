//! What the session says of candle's tensors that are used wrongly.

use candle_core::cuda::CudaStorageSlice;
use candle_core::{DType, Device, Error, Result, Storage, Tensor};
use fake_cuda::{Finding, Kind, Schedule};
use fsdp_test_fake_cuda::session;
use fsdp_test_support::{assert_close, relative};

use crate::compare::values;

/// Copies a tensor to the host on a stream of its own, which waits for candle's if it is to, and returns the values.
fn read_beside(tensor: &Tensor, waits: bool) -> Result<Vec<f32>> {
    let stream = tensor.device().as_cuda_device()?.cuda_stream();
    let other = stream.context().new_stream().map_err(Error::wrap)?;
    if waits {
        other.join(&stream).map_err(Error::wrap)?;
    }
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        candle_core::bail!("the tensor is on {:?}", tensor.device())
    };
    let CudaStorageSlice::F32(slice) = &storage.slice else { candle_core::bail!("the tensor is no f32") };
    let values = other.clone_dtoh(slice).map_err(Error::wrap)?;
    other.synchronize().map_err(Error::wrap)?;
    stream.join(&other).map_err(Error::wrap)?;
    Ok(values)
}

#[test]
fn a_stream_that_does_not_wait_for_candle_races() -> Result<()> {
    let expected = {
        let x = values(&[4, 4], 1, DType::F32, &Device::Cpu)?;
        x.matmul(&x)?.exp()?.flatten_all()?.to_vec1::<f32>()?
    };
    for schedule in Schedule::all(3) {
        for waits in [true, false] {
            let session = session(schedule);
            let device = Device::new_cuda_with_stream(0)?;
            // SAFETY: what follows waits by itself, or is meant not to.
            unsafe { device.as_cuda_device()?.disable_event_tracking() };
            let x = values(&[4, 4], 1, DType::F32, &device)?;
            let got = read_beside(&x.matmul(&x)?.exp()?, waits)?;
            if waits {
                assert_close(&got, &expected, relative(1e-6), "waits");
                assert_eq!(session.findings(), []);
            } else {
                session.expect(Kind::Race, "uexp_f32");
                assert!(schedule != Schedule::Latest || got.iter().all(|x| x.is_nan()), "{got:?}");
            }
            drop((x, device));
        }
    }
    Ok(())
}

#[test]
fn a_product_of_what_was_not_waited_for_races() -> Result<()> {
    let session = session(Schedule::Latest);
    let [one, other] = [Device::new_cuda_with_stream(0)?, Device::new_cuda_with_stream(0)?];
    // SAFETY: it is meant not to wait.
    unsafe { one.as_cuda_device()?.disable_event_tracking() };
    let x = values(&[4, 4], 1, DType::F32, &one)?.exp()?;
    // The same memory, for a device with another stream.
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cuda(source) = &*storage else { candle_core::bail!("the tensor is on {:?}", x.device()) };
    let there = values(&[4, 4], 2, DType::F32, &other)?;
    {
        use candle_core::backend::BackendStorage;
        let (to, to_layout) = there.storage_and_layout();
        let Storage::Cuda(to) = &*to else { candle_core::bail!("the tensor is on {:?}", there.device()) };
        to.matmul(source, (1, 4, 4, 4), to_layout, layout)?;
    }
    let findings = session.take_findings();
    let said = |what: &str| {
        findings.iter().any(|finding| finding.kind == Kind::Race && finding.message.contains(what))
    };
    assert!(said("cublasGemmStridedBatchedEx") && said("uexp_f32"), "{findings:?}");
    one.synchronize()?;
    other.synchronize()
}

#[test]
fn a_tensor_that_outlives_the_session_is_a_leak() -> Result<()> {
    let session = session(Schedule::Latest);
    std::mem::forget(values(&[3], 1, DType::F32, &Device::new_cuda_with_stream(0)?)?);
    let findings = session.end();
    for leak in ["12 bytes of memory of device 0", "a cuBLAS handle", "a cuRAND generator"] {
        let is_it = |finding: &Finding| finding.kind == Kind::Leak && finding.message.contains(leak);
        assert!(findings.iter().any(is_it), "{leak} is not in {findings:?}");
    }
    Ok(())
}

#[test]
fn a_kernel_that_is_not_there_is_named() -> Result<()> {
    let session = session(Schedule::Latest);
    let device = Device::new_cuda_with_stream(0)?;
    let image = values(&[1, 1, 4, 4], 1, DType::F32, &device)?;
    assert!(image.avg_pool2d(2).is_err());
    session.expect(Kind::Unsupported, "avg_pool2d_f32");
    Ok(())
}
