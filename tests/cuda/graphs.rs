//! candle's operations in a graph: captured once, launched on other values.

use candle_core::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::{DType, Device, Error, Result, Tensor};
use fake_cuda::{Kind, Schedule};
use fsdp_test_fake_cuda::session;

use crate::compare::{assert_close, named, values};

const INPUT: [usize; 2] = [3, 4];

/// Operations with strides and products, whose result lands in `out`.
fn step(x: &Tensor, w: &Tensor, bias: &Tensor, out: &Tensor) -> Result<()> {
    let y = x.t()?.matmul(w)?.broadcast_add(bias)?.silu()?;
    let y = y.broadcast_div(&y.sqr()?.sum_keepdim(1)?)?;
    out.slice_set(&y.t()?.contiguous()?, 0, 0)
}

fn run(device: &Device) -> Result<Vec<Tensor>> {
    let w = values(&[3, 5], 2, DType::F32, device)?;
    let bias = values(&[5], 3, DType::F32, device)?;
    let x = Tensor::zeros(&INPUT, DType::F32, device)?;
    let out = Tensor::zeros((5, 4), DType::F32, device)?;
    let inputs = (4..7).map(|seed| values(&INPUT, seed, DType::F32, device)).collect::<Result<Vec<_>>>()?;

    let mut graph = None;
    if let Device::Cuda(cuda) = device {
        let stream = cuda.cuda_stream();
        // Shapes and strides are copied to the device once, before the capture.
        let _cache = cuda.enable_cuda_graph_htod_cache();
        step(&x, &w, &bias, &out)?;
        stream
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(Error::wrap)?;
        step(&x, &w, &bias, &out)?;
        graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(Error::wrap)?;
    }
    let outputs = inputs.iter().map(|input| {
        x.slice_set(input, 0, 0)?;
        match &graph {
            Some(graph) => graph.launch().map_err(Error::wrap)?,
            None => step(&x, &w, &bias, &out)?,
        }
        out.copy()
    });
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    device.synchronize()?;
    Ok(outputs)
}

#[test]
fn a_captured_step_computes_on_what_is_there_when_it_is_launched() -> Result<()> {
    let read = |outputs: Vec<Tensor>| {
        outputs.iter().map(|output| named("output", output)).collect::<Result<Vec<_>>>()
    };
    let expected = read(run(&Device::Cpu)?)?;
    for schedule in Schedule::all(3) {
        let session = session(schedule);
        let device = Device::new_cuda_with_stream(0)?;
        // SAFETY: there is one stream. What is captured cannot wait for events from before the capture.
        unsafe { device.as_cuda_device()?.disable_event_tracking() };
        assert_close(&expected, &read(run(&device)?)?, 1e-6);
        assert_eq!(session.findings(), []);
        drop(device);
        // candle keeps the shapes and strides of captured operations as long as the process lives.
        let kept = session.end();
        assert!(!kept.is_empty() && kept.iter().all(|finding| finding.kind == Kind::Leak), "{kept:?}");
    }
    Ok(())
}
