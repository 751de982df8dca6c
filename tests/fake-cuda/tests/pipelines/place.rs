//! A device that the ranks share, and kernels that read and change what is on it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use fake_cuda::{Access, Launch, Session};
use fsdp_runtime::device::cuda::{CudaDevice, CudaStream, Priority};
use half::bf16;
use parking_lot::Mutex;

use crate::comm::CommError;
use crate::device::{Slice, Stream};
use crate::memory::Account;
use crate::rank::{Change32, Check, Place};
use crate::spec::Dtype;

/// What a launch does with its values. Kernels get a number: closures are no parameters.
enum Body {
    Read(Check),
    Update(Change32),
}

#[derive(Default)]
struct Bodies {
    next: u64,
    waiting: HashMap<u64, Body>,
    /// The first check that failed.
    wrong: Option<String>,
}

static BODIES: Mutex<Option<Bodies>> = Mutex::new(None);

/// The first value that was not the expected one since the last call.
pub(crate) fn take_wrong() -> Option<String> {
    BODIES.lock().take().unwrap_or_default().wrong
}

/// `test_read` and `test_update`: pointer, elements, whether they are bf16, number of the body.
pub(crate) fn register(session: &Session) {
    let bytes = |launch: &Launch<'_>| {
        let size = if launch.param::<u64>(2) == 1 { 2 } else { 4 };
        launch.param::<u64>(1) as usize * size
    };
    let reads = move |launch: &Launch<'_>| vec![Access::read(launch.param(0), bytes(launch))];
    let updates = move |launch: &Launch<'_>| {
        vec![Access::read(launch.param(0), bytes(launch)), Access::write(launch.param(0), bytes(launch))]
    };
    session.kernel("test_read", &[8; 4], reads, run);
    session.kernel("test_update", &[8; 4], updates, run);
}

fn run(launch: &Launch<'_>) {
    let (at, len, narrow) = (launch.param::<u64>(0), launch.param::<u64>(1) as usize, launch.param::<u64>(2));
    let mut values = match narrow {
        1 => launch.read::<u16>(at, len).into_iter().map(|x| bf16::from_bits(x).to_f32()).collect(),
        _ => launch.read::<f32>(at, len),
    };
    let body = BODIES.lock().as_mut().and_then(|bodies| bodies.waiting.remove(&launch.param(3)));
    match body.expect("each launch has a body") {
        Body::Read(check) => {
            let checked = catch_unwind(AssertUnwindSafe(|| check(&values)));
            if let Err(panic) = checked {
                let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                BODIES.lock().get_or_insert_default().wrong.get_or_insert(text);
            }
        }
        Body::Update(update) => {
            update(&mut values);
            match narrow {
                1 => {
                    let narrow: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
                    launch.write(at, &narrow);
                }
                _ => launch.write(at, &values),
            }
        }
    }
}

pub(crate) struct Shared {
    device: CudaDevice,
    read: CudaFunction,
    update: CudaFunction,
}

impl Shared {
    pub(crate) fn new(device: CudaDevice) -> Shared {
        let compute = device.compute("compute");
        let image = Ptx::from_src(Session::image(["test_read", "test_update"]));
        let module = compute.cuda_stream().context().load_module(image).expect("the image is one");
        let function = |name| module.load_function(name).expect("the image has it");
        Shared { read: function("test_read"), update: function("test_update"), device }
    }

    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    fn launch(
        &self,
        compute: &dyn Stream,
        function: &CudaFunction,
        slice: &Slice,
        body: Body,
    ) -> Result<(), CommError> {
        if slice.is_empty() {
            return Ok(());
        }
        let stream: &CudaStream = compute.as_any().downcast_ref().expect("it is of the device");
        let number = {
            let mut bodies = BODIES.lock();
            let bodies = bodies.get_or_insert_default();
            bodies.next += 1;
            bodies.waiting.insert(bodies.next, body);
            bodies.next
        };
        let (at, len) = (slice.as_ptr().addr() as u64, slice.len() as u64);
        let narrow = u64::from(slice.dtype() == Dtype::BF16);
        stream.enqueue("test", &[slice], |stream| {
            // SAFETY: the parameters are those that both kernels were registered with.
            unsafe {
                stream
                    .launch_builder(function)
                    .arg(&at)
                    .arg(&len)
                    .arg(&narrow)
                    .arg(&number)
                    .launch(LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 })
            }
            .map(drop)
        })
    }
}

impl Place for Shared {
    fn account(&self) -> Account {
        Account::new(Arc::new(self.device.memory()))
    }

    fn compute(&self, _apart: bool) -> Arc<dyn Stream> {
        self.device.compute("compute")
    }

    fn side(&self, name: &str) -> Result<Arc<dyn Stream>, CommError> {
        let stream = self.device.stream(name, Priority::High);
        Ok(stream
            .map_err(|error| CommError::Stream { stream: name.to_owned(), message: error.to_string() })?)
    }

    fn read(&self, compute: &dyn Stream, slice: Slice, check: Check) -> Result<(), CommError> {
        self.launch(compute, &self.read, &slice, Body::Read(check))
    }

    fn update(&self, compute: &dyn Stream, slice: Slice, update: Change32) -> Result<(), CommError> {
        self.launch(compute, &self.update, &slice, Body::Update(update))
    }
}
