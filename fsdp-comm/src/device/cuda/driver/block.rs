//! Device memory and pinned host memory.

use std::any::Any;
use std::fmt;
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver as cuda;
use parking_lot::Mutex;

use super::device::CudaDevice;
use super::error::{is_out_of_memory, on_stream, words};
use crate::device::{ALIGN, Block, Memory, Slice};
use crate::error::CommError;

/// Memory of a device, allocated and freed in the order of its compute stream.
#[derive(Clone)]
pub struct CudaMemory(CudaDevice);

/// Page-locked memory of the host, which a device copies from and to while the host goes on.
#[derive(Clone)]
pub struct PinnedMemory(CudaDevice);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Device,
    Pinned,
}

/// An allocation, and what streams other than the compute stream have done with it last.
pub(super) struct CudaBlock {
    ptr: NonNull<u8>,
    bytes: usize,
    kind: Kind,
    device: CudaDevice,
    uses: Mutex<Vec<Use>>,
    /// Gives memory back that is of another allocator.
    give_back: Mutex<Option<GiveBack>>,
    /// It was allocated in a capture: its memory is there when the graph runs.
    captured: bool,
    /// In whose order it is freed, if not the compute stream's.
    retired_on: Mutex<Option<Arc<cuda::CudaStream>>>,
}

/// Called with an address once no stream uses the memory there any more.
pub(crate) type GiveBack = Box<dyn FnOnce(NonNull<u8>) -> Result<(), cuda::DriverError> + Send>;

struct Use {
    stream: Arc<cuda::CudaStream>,
    event: Arc<cuda::CudaEvent>,
}

// SAFETY: an owned allocation; the pointer is an address that this type does not read or write, and the driver's calls
// may be made from any thread.
unsafe impl Send for CudaBlock {}
// SAFETY: as above.
unsafe impl Sync for CudaBlock {}

impl CudaMemory {
    pub(super) fn new(device: CudaDevice) -> Self {
        CudaMemory(device)
    }
}

impl PinnedMemory {
    pub(super) fn new(device: CudaDevice) -> Self {
        PinnedMemory(device)
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaMemory({})", self.0.name())
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedMemory({})", self.0.name())
    }
}

/// Bytes of an allocation before its first slice: no tensor has the address that the driver frees, so that safe code which
/// takes a parameter's alias out of its tensor and drops it cannot have the block freed. It keeps the driver's alignment.
const BEFORE: usize = 256;

/// The address of empty memory: aligned, and never used.
const EMPTY: NonNull<u8> = NonNull::without_provenance(NonZero::new(ALIGN).unwrap());

impl CudaBlock {
    fn new(device: &CudaDevice, kind: Kind, bytes: usize, ptr: NonNull<u8>) -> CudaBlock {
        CudaBlock {
            ptr,
            bytes,
            kind,
            device: device.clone(),
            captured: false,
            uses: Mutex::default(),
            give_back: Mutex::default(),
            retired_on: Mutex::default(),
        }
    }

    fn boxed(device: &CudaDevice, kind: Kind, bytes: usize, ptr: NonNull<u8>) -> Box<dyn Block> {
        Box::new(CudaBlock::new(device, kind, bytes, ptr))
    }

    /// Gives the memory back once every use that was noted is over.
    fn free(&mut self) -> Result<(), cuda::DriverError> {
        let device = self.device.state();
        device.context.bind_to_thread()?;
        let uses = std::mem::take(self.uses.get_mut());
        let give_back = self.give_back.get_mut().take();
        if give_back.is_some() || self.kind == Kind::Pinned {
            uses.iter().try_for_each(|used| used.event.synchronize())?;
            device.compute.synchronize()?;
        }
        if let Some(give_back) = give_back {
            return give_back(self.ptr);
        }
        if self.captured && self.device.is_capturing() {
            device.capture.blocks.fetch_sub(1, Ordering::Relaxed);
        }
        match self.kind {
            Kind::Device => {
                let retired_on = self.retired_on.get_mut().take();
                let stream = retired_on.as_ref().unwrap_or(&device.compute);
                for used in uses.iter().filter(|used| !Arc::ptr_eq(&used.stream, stream)) {
                    stream.wait(&used.event)?;
                }
                let ptr = (self.ptr.addr().get() - BEFORE) as u64;
                // SAFETY: it was allocated by `allocate` and is freed once. Uses of other streams come before by the
                // waits above; those of the compute stream by its own order, or by the word of who has retired it.
                unsafe { cuda::result::free_async(ptr, stream.cu_stream()) }
            }
            // SAFETY: allocated by `malloc_host`, freed once, and no stream uses it any more.
            Kind::Pinned => unsafe { cuda::result::free_host(self.ptr.as_ptr().cast()) },
        }
    }
}

impl Drop for CudaBlock {
    fn drop(&mut self) {
        // Memory of a device that has failed may be in use for ever: it goes with the context.
        if self.bytes == 0 || self.device.check().is_err() {
            return;
        }
        if self.captured && !self.device.is_capturing() {
            // It is the graph's.
            return;
        }
        if self.device.is_capturing() && !self.captured {
            // It is freed when the capture has ended.
            let block = CudaBlock {
                ptr: self.ptr,
                bytes: std::mem::take(&mut self.bytes),
                kind: self.kind,
                device: self.device.clone(),
                captured: false,
                uses: std::mem::take(&mut self.uses),
                give_back: std::mem::take(&mut self.give_back),
                retired_on: std::mem::take(&mut self.retired_on),
            };
            self.device.state().capture.kept.lock().push(block);
            return;
        }
        if let Err(error) = self.free() {
            self.device.fail(on_stream(self.device.name(), "freeing memory")(error));
        }
    }
}

// SAFETY: address and kind are fields that nothing changes while it lives. The memory is freed when it is dropped, after the
// uses that streams have noted; page-locked memory alone is the host's.
unsafe impl Block for CudaBlock {
    fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    fn is_host(&self) -> bool {
        self.kind == Kind::Pinned
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: the driver gives `bytes` bytes, aligned to 256, which are set to zero in the order of the compute stream, as it is
// said of devices; nobody else knows the address.
unsafe impl Memory for CudaMemory {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError> {
        let CudaMemory(device) = self;
        device.check()?;
        if bytes == 0 {
            return Ok(CudaBlock::boxed(device, Kind::Device, 0, EMPTY));
        }
        let state = device.state();
        let stream = state.compute.cu_stream();
        let allocated = state.context.bind_to_thread().and_then(|()| {
            // SAFETY: the stream is alive; the memory is set below, in its order.
            let ptr = unsafe { cuda::result::malloc_async(stream, BEFORE + bytes) }? + BEFORE as u64;
            // SAFETY: `bytes` bytes were allocated at `ptr`, in the order of this stream.
            unsafe { cuda::result::memset_d8_async(ptr, 0, bytes, stream) }?;
            Ok(ptr)
        });
        match allocated.map(|ptr| NonZero::new(ptr as usize)) {
            Ok(Some(ptr)) => {
                let mut block = CudaBlock::new(device, Kind::Device, bytes, NonNull::without_provenance(ptr));
                block.captured = device.is_capturing();
                if block.captured {
                    state.capture.blocks.fetch_add(1, Ordering::Relaxed);
                }
                Ok(Box::new(block))
            }
            Ok(None) => Err(exhausted(device, bytes, "the driver gave no address".into())),
            Err(error) if is_out_of_memory(error) => Err(exhausted(device, bytes, free_memory(device))),
            Err(error) => Err(exhausted(device, bytes, words(error))),
        }
    }
}

#[cfg(feature = "nccl")]
impl CudaDevice {
    /// Memory of this device that another allocator has made, `bytes` at `ptr`; it is set to zero in the order of the
    /// compute stream.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Safety
    /// Nobody else uses the memory, until it is given back.
    pub(crate) unsafe fn adopt(
        &self,
        ptr: NonNull<u8>,
        bytes: usize,
        give_back: GiveBack,
    ) -> Result<Box<dyn Block>, CommError> {
        let (address, stream) = (ptr.addr().get() as u64, &self.state().compute);
        // SAFETY: the caller's promise.
        let set = unsafe { cuda::result::memset_d8_async(address, 0, bytes, stream.cu_stream()) };
        set.map_err(on_stream(self.name(), "filling memory"))?;
        let mut block = CudaBlock::new(self, Kind::Device, bytes, ptr);
        *block.give_back.get_mut() = Some(give_back);
        Ok(Box::new(block))
    }

    /// Whether `slice` is memory of another allocator, which stays where it is and is not of a pool.
    pub(crate) fn has_adopted(&self, slice: &Slice) -> bool {
        let block = cuda_block(slice);
        block.is_some_and(|block| place(self, slice) == Place::Device && block.give_back.lock().is_some())
    }
}

fn exhausted(device: &CudaDevice, bytes: usize, why: String) -> CommError {
    let message = format!("{bytes} bytes cannot be allocated: {why}");
    CommError::Memory { device: device.name().to_owned(), message }
}

fn free_memory(device: &CudaDevice) -> String {
    match device.state().context.mem_get_info() {
        Ok((free, total)) => format!("{free} of {total} bytes are free"),
        Err(error) => words(error),
    }
}

// SAFETY: the driver gives `bytes` bytes at the start of a page, which are set to zero here; nobody else knows the address.
unsafe impl Memory for PinnedMemory {
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Block>, CommError> {
        let PinnedMemory(device) = self;
        device.check()?;
        if bytes == 0 {
            return Ok(CudaBlock::boxed(device, Kind::Pinned, 0, EMPTY));
        }
        let bound = device.state().context.bind_to_thread();
        // SAFETY: the flags are those of plain page-locked memory; it is set below.
        let allocated = bound.and_then(|()| unsafe { cuda::result::malloc_host(bytes, 0) });
        match allocated.map(|ptr| NonNull::new(ptr.cast::<u8>())) {
            Ok(Some(ptr)) => {
                // SAFETY: `bytes` bytes of host memory were allocated at `ptr`, and are ours alone.
                unsafe { ptr.write_bytes(0, bytes) };
                Ok(CudaBlock::boxed(device, Kind::Pinned, bytes, ptr))
            }
            Ok(None) => Err(exhausted(device, bytes, "the driver gave no address".into())),
            Err(error) => Err(exhausted(device, bytes, format!("page-locked: {}", words(error)))),
        }
    }
}

/// Notes that `stream` uses `slices` until its present end. Of a graph that is being captured it is not noted: who
/// launches it keeps the memory.
pub(super) fn note_use(stream: &Arc<cuda::CudaStream>, slices: &[&Slice]) -> Result<(), cuda::DriverError> {
    let blocks = slices.iter().filter_map(|slice| cuda_block(slice));
    // What is done on the stream that they are freed on is in order as it is.
    let blocks: Vec<_> = blocks.filter(|block| !Arc::ptr_eq(&block.device.state().compute, stream)).collect();
    const NO_CAPTURE: cuda::sys::CUstreamCaptureStatus =
        cuda::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    if blocks.is_empty() || stream.capture_status()? != NO_CAPTURE {
        return Ok(());
    }
    let event = Arc::new(stream.record_event(None)?);
    for block in blocks {
        let mut uses = block.uses.lock();
        // The later event of a stream says what the earlier one did.
        match uses.iter_mut().find(|used| Arc::ptr_eq(&used.stream, stream)) {
            Some(used) => used.event = event.clone(),
            None => uses.push(Use { stream: stream.clone(), event: event.clone() }),
        }
    }
    Ok(())
}

/// Has `slices` freed in the order of `stream`.
///
/// # Safety
/// That of [`Stream::retire`](crate::device::Stream::retire).
pub(super) unsafe fn retire(stream: &Arc<cuda::CudaStream>, slices: &[Slice]) {
    for block in slices.iter().filter_map(|slice| cuda_block(slice)) {
        *block.retired_on.lock() = Some(stream.clone());
    }
}

/// Where a slice's memory is, for the streams of `device`.
pub(super) fn place(device: &CudaDevice, slice: &Slice) -> Place {
    match cuda_block(slice) {
        Some(block) if block.kind == Kind::Pinned => Place::Pinned,
        Some(block) if block.device.ordinal() == device.ordinal() => Place::Device,
        Some(_) => Place::OtherDevice,
        None => Place::Host,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Of the device, whichever rank allocated it.
    Device,
    Pinned,
    OtherDevice,
    /// Which the device does not reach.
    Host,
}

/// The block of a slice of a CUDA device.
fn cuda_block(slice: &Slice) -> Option<&CudaBlock> {
    slice.block()?.as_any().downcast_ref()
}
