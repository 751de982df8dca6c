//! The runtime's CUDA devices on the fake driver: order, memory, time, failures.

use std::sync::Arc;

use fake_cuda::{Schedule, Session};
use fsdp_runtime::device::cuda::{CudaDevice, CudaError, CudaOptions, KernelImage, Priority};
use fsdp_runtime::device::{Fill, HostMemory, Memory, Slice, Stream, cast, fill, scale};
use fsdp_runtime::memory::{Account, Category};
use fsdp_runtime::spec::Dtype;
use fsdp_runtime::trace::Tracer;
use fsdp_test_fake_cuda::register_fsdp_kernels;
use fsdp_test_support::{assert_close, relative};

fn options() -> CudaOptions {
    CudaOptions { kernels: KernelImage::Ptx(register_fsdp_kernels()) }
}

fn open() -> CudaDevice {
    CudaDevice::open(0, &options()).unwrap()
}

fn zeros(memory: &dyn Memory, dtype: Dtype, len: usize) -> Slice {
    // SAFETY: the fake driver reports uses that are not ordered, and the tests read memory of the host after an event.
    unsafe { Slice::zeros_in(memory, dtype, len, None) }.unwrap()
}

/// Values on the device, by way of pinned memory.
fn upload(device: &CudaDevice, values: &[f32]) -> Slice {
    let pinned = zeros(&device.pinned(), Dtype::F32, values.len());
    // SAFETY: the memory is new.
    unsafe { pinned.as_mut_slice::<f32>() }.copy_from_slice(values);
    let slice = zeros(&device.memory(), Dtype::F32, values.len());
    device.compute("compute").copy(&pinned, &slice).unwrap();
    slice
}

fn download(device: &CudaDevice, slice: &Slice) -> Vec<f32> {
    let compute = device.compute("compute");
    let wide = zeros(&device.memory(), Dtype::F32, slice.len());
    cast(&*compute, slice, &wide).unwrap();
    let pinned = zeros(&device.pinned(), Dtype::F32, slice.len());
    compute.copy(&wide, &pinned).unwrap();
    compute.record().synchronize().unwrap();
    // SAFETY: the copy is done.
    unsafe { pinned.as_slice::<f32>() }.to_vec()
}

#[test]
fn elementwise_work_is_done_in_order_by_the_device() {
    for schedule in Schedule::all(5) {
        let _session = Session::new(schedule);
        let device = open();
        let compute = device.compute("compute");
        let slice = upload(&device, &[1.0, -2.5, 1e-3]);
        scale(&*compute, &slice, 2.0).unwrap();
        for dtype in [Dtype::BF16, Dtype::F16] {
            let narrow = zeros(&device.memory(), dtype, 3);
            cast(&*compute, &slice, &narrow).unwrap();
            let back = download(&device, &narrow);
            assert_eq!(back[..2], [2.0, -5.0]);
            // A rounding of 2^-8 at most.
            assert_close(&back[2..], &[2e-3][..], relative(3.9e-3), dtype);
            fill(&*compute, &narrow, Fill::Poison).unwrap();
            assert!(download(&device, &narrow).iter().all(|x| x.is_nan()));
            fill(&*compute, &narrow, Fill::Zero).unwrap();
            assert_eq!(download(&device, &narrow), [0.0; 3]);
        }
        assert_eq!(download(&device, &slice), [2.0, -5.0, 2e-3]);
    }
}

#[test]
fn side_streams_wait_for_events_and_memory_for_side_streams() {
    for schedule in Schedule::all(20) {
        let session = Session::new(schedule);
        let device = open();
        let (compute, side) = (device.compute("compute"), device.stream("side", Priority::High).unwrap());
        let before = session.usage(0).now;
        for step in 0..4 {
            let slice = upload(&device, &[step as f32; 8]);
            side.wait(&compute.record()).unwrap();
            scale(&*side, &slice, 3.0).unwrap();
            if step % 2 == 0 {
                compute.wait(&side.record()).unwrap();
                assert_eq!(download(&device, &slice), [3.0 * step as f32; 8]);
            }
            // Otherwise it is dropped while the side stream works on it.
        }
        device.compute("compute").record().synchronize().unwrap();
        assert_eq!(session.usage(0).now, before, "{schedule:?}");
    }
}

#[test]
fn retired_memory_is_freed_in_the_order_of_its_stream() {
    for schedule in Schedule::all(20) {
        let session = Session::new(schedule);
        let device = open();
        let (compute, side) = (device.compute("compute"), device.stream("side", Priority::High).unwrap());
        let slice = upload(&device, &[1.0; 8]);
        side.wait(&compute.record()).unwrap();
        scale(&*side, &slice, 3.0).unwrap();
        // SAFETY: nothing is done with it but what the side stream does.
        unsafe { side.retire(std::slice::from_ref(&slice)) };
        drop(slice);
        // The compute stream does not wait for the side stream.
        compute.record().synchronize().unwrap();
        if schedule == Schedule::Latest {
            assert!(session.pending() > 0);
        }
        side.record().synchronize().unwrap();
    }
}

/// It is freed at once, not in the order of a stream.
#[test]
fn pinned_memory_is_freed_when_no_stream_uses_it_any_more() {
    for schedule in Schedule::all(5) {
        let _session = Session::new(schedule);
        let device = open();
        let compute = device.compute("compute");
        let side = device.stream("side", Priority::High).unwrap();
        for stream in [&side, &compute] {
            let slice = zeros(&device.memory(), Dtype::F32, 3);
            stream.wait(&compute.record()).unwrap();
            let pinned = zeros(&device.pinned(), Dtype::F32, 3);
            // SAFETY: the memory is new.
            unsafe { pinned.as_mut_slice::<f32>() }.copy_from_slice(&[1.0, 2.0, 3.0]);
            stream.copy(&pinned, &slice).unwrap();
            drop(pinned);
            compute.wait(&stream.record()).unwrap();
            assert_eq!(download(&device, &slice), [1.0, 2.0, 3.0]);
        }
    }
}

#[test]
fn host_work_runs_in_order_and_its_failure_is_the_devices() {
    let _session = Session::new(Schedule::Latest);
    let device = open();
    let side = device.stream("rank0/side", Priority::Normal).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    side.submit(Box::new(move || tell.send(1).map_err(|_| unreachable!()))).unwrap();
    side.record().synchronize().unwrap();
    assert_eq!(told.recv(), Ok(1));
    side.submit(Box::new(|| panic!("boom {}", 7))).unwrap();
    let error = side.record().synchronize().unwrap_err();
    assert_eq!(error.to_string(), "stream `rank0/side`: work panicked: boom 7");
    // For good, and on every stream.
    assert_eq!(device.compute("compute").submit(Box::new(|| Ok(()))), Err(error.clone()));
    assert_eq!(device.compute("compute").record().synchronize(), Err(error.clone()));
    assert_eq!(device.check(), Err(error));
}

#[test]
fn memory_that_is_not_there_is_said_with_what_is_held() {
    let session = Session::new(Schedule::Earliest);
    session.set_devices(1, 1 << 20);
    let device = open();
    let account = Account::new(Arc::new(device.memory()));
    // SAFETY: nothing uses what is allocated.
    let allocate = |category, len| unsafe { account.allocate(category, Dtype::F32, len) };
    let _weights = allocate(Category::ModelWeights, 1000).unwrap();
    let error = allocate(Category::GatherPool, 1 << 20).unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("cuda:0: 4194304 bytes cannot be allocated: "), "{message}");
    assert!(message.ends_with(", for gather_pool; held are: model_weights 4000 bytes"), "{message}");
    // The next one that fits is there.
    allocate(Category::GatherPool, 10).unwrap();
}

#[test]
fn a_device_that_is_not_there_is_said() {
    let session = Session::new(Schedule::Earliest);
    session.set_devices(2, 1 << 30);
    let error = CudaDevice::open(2, &options()).unwrap_err();
    assert_eq!(error, CudaError::NoDevice { ordinal: 2, count: 2 });
    assert!(error.to_string().contains("there is no device cuda:2: 2 are visible"));
}

#[test]
fn memory_of_the_host_is_refused() {
    let _session = Session::new(Schedule::Earliest);
    let device = open();
    let compute = device.compute("compute");
    let (host, own) = (zeros(&HostMemory, Dtype::F32, 4), upload(&device, &[0.0; 4]));
    let refused = compute.copy(&host, &own).unwrap_err().to_string();
    assert_eq!(refused, "stream `compute`: a copy of Host memory to Device memory");
}

#[test]
fn spans_are_timed_by_events_of_their_stream() {
    let _session = Session::new(Schedule::Latest);
    let device = open();
    let side = device.stream("side", Priority::Normal).unwrap();
    let slice = upload(&device, &[1.0; 4]);
    side.wait(&device.compute("compute").record()).unwrap();
    let tracer = Tracer::new(true);
    for name in ["first", "second"] {
        let work = || scale(&*side, &slice, 2.0);
        tracer.enqueue(&*side, "all-gather", name, &"unit".into(), work).unwrap();
    }
    assert!(tracer.spans().is_empty(), "nothing has run");
    side.record().synchronize().unwrap();
    let spans = tracer.spans();
    assert_eq!(spans.iter().map(|span| span.name).collect::<Vec<_>>(), ["first", "second"]);
    assert!(spans.iter().all(|span| span.start <= span.end) && spans[0].end <= spans[1].start);
}
