//! Device memory and launches, on the host.

use std::cell::UnsafeCell;
use std::fmt::Debug;

use bytemuck::Pod;
use fsdp_kernels::{Args, DevicePtr, Dtype, Kernel, host};

use crate::number::{narrowed, widened};

/// What is around a buffer: nothing may change it.
const GUARD: u64 = 0xa5a5_a5a5_a5a5_a5a5;
const GUARD_WORDS: usize = 8;

/// A buffer in device memory, between guards.
pub struct Buffer {
    words: Vec<UnsafeCell<u64>>,
    first: usize,
    bytes: usize,
}

impl Buffer {
    /// A buffer that starts `offset` elements after an address that suits every pack.
    pub fn of<T: Pod>(values: &[T], offset: usize) -> Buffer {
        let content: &[u8] = bytemuck::cast_slice(values);
        let count = 2 * GUARD_WORDS + 8 + (content.len() + offset * size_of::<T>()).div_ceil(8);
        let words: Vec<UnsafeCell<u64>> = (0..count).map(|_| UnsafeCell::new(GUARD)).collect();
        let aligned =
            (words.as_ptr() as usize + 8 * GUARD_WORDS).next_multiple_of(64) - words.as_ptr() as usize;
        let first = aligned + offset * size_of::<T>();
        let buffer = Buffer { words, first, bytes: content.len() };
        // SAFETY: the allocation has room for the offset, the content and guards on both sides; no reference to it is
        // alive.
        let room = unsafe { std::slice::from_raw_parts_mut(buffer.at() as *mut u8, content.len()) };
        room.copy_from_slice(content);
        buffer
    }

    /// A buffer of this dtype with these values, rounded.
    pub fn real(dtype: Dtype, values: &[f32], offset: usize) -> Buffer {
        match dtype {
            Dtype::F32 => Buffer::of(values, offset),
            _ => Buffer::of(&values.iter().map(|&x| narrowed(dtype, x)).collect::<Vec<_>>(), offset),
        }
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        (self.words.as_ptr() as usize + self.first) as DevicePtr
    }

    fn all(&self) -> Vec<u8> {
        // SAFETY: no launch is running: launches end before they return.
        let words: Vec<u64> = self.words.iter().map(|word| unsafe { *word.get() }).collect();
        bytemuck::cast_slice(&words).to_vec()
    }

    /// What it holds.
    pub fn read<T: Pod>(&self) -> Vec<T> {
        let all = self.all();
        let (before, rest) = all.split_at(self.first);
        let (content, after) = rest.split_at(self.bytes);
        assert!(before.iter().chain(after).all(|&byte| byte == GUARD as u8), "a guard was overwritten");
        content.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// What it holds as elements of this dtype.
    pub fn reals(&self, dtype: Dtype) -> Vec<f32> {
        match dtype {
            Dtype::F32 => self.read(),
            _ => self.read::<u16>().into_iter().map(|bits| widened(dtype, bits)).collect(),
        }
    }

    /// Those of the values, so that NaN equals itself.
    pub fn bits(&self, dtype: Dtype) -> Vec<u32> {
        self.reals(dtype).into_iter().map(f32::to_bits).collect()
    }
}

/// How a device runs launches.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    max_blocks: u32,
    seed: u64,
}

impl Device {
    pub const WIDE: Device = Device { max_blocks: 16, seed: 0 };

    /// Runs a kernel on its declared memory, with all checks.
    pub fn launch<A: Args>(&self, kernel: &str, args: &A) {
        let Some(launch) = args.launch(self.max_blocks) else { return };
        let known = Kernel::find(kernel).expect("the name came from the crate");
        // SAFETY: the arguments are those of the kernel.
        let memory = unsafe { known.accesses(std::ptr::from_ref(args).cast()) };
        // SAFETY: the accesses are in buffers of the calling test, which has no references into them.
        if let Err(fault) = unsafe { host::launch(kernel, launch, args, &memory, self.seed) } {
            panic!("{fault} ({launch:?}, {self:?})");
        }
    }
}

/// What `run` returns, which must not depend on the number of blocks nor on the order of threads.
pub fn on_every_grid<R: PartialEq + Debug>(run: impl Fn(Device) -> R) -> R {
    let result = run(Device::WIDE);
    for (max_blocks, seed) in [(1, 1), (2, 2), (3, 3)] {
        let device = Device { max_blocks, seed };
        let other = run(device);
        assert!(other == result, "{device:?} gives {other:?}, others {result:?}");
    }
    result
}
