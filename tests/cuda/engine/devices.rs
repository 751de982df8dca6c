//! Which devices a mesh takes, and what is reported of a model there.

use candle_core::{Device, Tensor};
use fake_cuda::Schedule;
use fsdp::memory::Usage;
use fsdp::prelude::*;
use fsdp_test_fake_cuda::session;

use super::{Model, batch};
use crate::support::{On, in_schedules, is_real};

const WIDTH: usize = 6;

#[test]
fn the_cpu_is_taken_as_it_is() {
    let mesh = DeviceMesh::single().on(&Device::Cpu).unwrap();
    assert!(mesh.device().is_cpu());
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    let session = (!is_real()).then(|| session(Schedule::Earliest));
    let error = fsdp::cuda::device(99).unwrap_err().to_string();
    assert!(error.starts_with("there is no device cuda:99: "), "{error}");
    drop(session);
}

#[test]
fn a_default_stream_is_refused() {
    let session = (!is_real()).then(|| session(Schedule::Earliest));
    let device = Device::new_cuda(0).unwrap();
    let error = DeviceMesh::single().on(&device).unwrap_err().to_string();
    assert_eq!(
        error,
        "cuda:0 works on a default stream, which is another one in every thread: make the device with \
         `fsdp::cuda::device(0)`, or candle's `Device::new_cuda_with_stream`"
    );
    drop(device);
    drop(session);
}

#[test]
fn ranks_that_share_some_devices_are_refused() {
    if is_real() {
        return;
    }
    let session = session(Schedule::Earliest);
    let outcome = launch::local(3, |world| -> fsdp::Result<()> {
        // Ranks 0 and 1 have one, rank 2 another.
        let device = fsdp::cuda::device(world.rank() / 2)?;
        world.data_parallel_mesh().on(&device).map(drop)
    });
    let error = outcome.unwrap_err().to_string();
    assert!(
        error.contains("ranks 0 and 1 have the same GPU, and not all ranks have it as threads"),
        "{error}"
    );
    drop(session);
}

/// What a rank's buffers came to, and its spans.
fn trained(on: On) -> Vec<(Vec<Usage>, Vec<fsdp::trace::Span>)> {
    let config = FsdpConfig { trace: true, ..FsdpConfig::default() };
    let outcome = launch::local(2, |world| -> fsdp::Result<_> {
        let device = on.device(&world)?;
        let mesh = world.data_parallel_mesh().on(&device)?;
        let mut model = Model::new(WIDTH, 3, &device)?.fully_shard_with(&mesh, &config)?;
        let mut optimizer = model.optimizer(AdamW::default())?;
        for step in 0..2 {
            let loss: Tensor = model.forward(&batch(WIDTH, step, &device)?)?;
            model.backward(&loss)?;
            optimizer.step(&mut model)?;
        }
        // Reading the weights waits for the device.
        model.visit_weights(|_, _| Ok(()))?;
        Ok((model.memory(2).iter().map(|report| report.usage).collect(), model.trace()))
    });
    outcome.unwrap_or_else(|error| panic!("{on:?}: {error}"))
}

#[test]
fn memory_is_that_of_the_cpu_and_spans_are_timed_on_the_device() {
    let expected = trained(On::Cpu);
    in_schedules(1, |schedule| {
        for ((usage, spans), (expected, expected_spans)) in trained(On::OneDevice).iter().zip(&expected) {
            assert_eq!(usage, expected, "{schedule}");
            let names = |spans: &[fsdp::trace::Span]| {
                let mut names: Vec<_> =
                    spans.iter().map(|span| (span.lane, span.name, span.unit.to_string())).collect();
                names.sort();
                names
            };
            assert_eq!(names(spans), names(expected_spans), "{schedule}");
            assert!(spans.iter().all(|span| span.start <= span.end), "{schedule}: {spans:?}");
        }
    });
}
