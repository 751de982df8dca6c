//! One launch of each kernel that uses all of its memory and reaches all of its barriers.

use std::ffi::c_void;

use bytemuck::Pod;
use fsdp_kernels::host::{self, HostError};
use fsdp_kernels::*;

use crate::device::Buffer;
use crate::number::values;

/// A launch with its memory.
pub struct Case {
    pub kernel: Kernel,
    args: Vec<u8>,
    launch: Launch,
    buffers: Vec<Buffer>,
}

impl Case {
    fn new<A: Args>(kernel: &str, args: A, buffers: Vec<Buffer>) -> Case {
        // SAFETY: the bytes of a value; padding is copied as it is, and not looked at.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const args).cast::<u8>(), size_of::<A>()) };
        Case {
            kernel: Kernel::find(kernel).expect("the name came from the crate"),
            args: bytes.to_vec(),
            // One block does everything, in as many turns as there are.
            launch: args.launch(1).expect("there is work"),
            buffers,
        }
    }

    /// How many buffers it has.
    pub fn buffers(&self) -> usize {
        self.buffers.len()
    }

    fn bytes(&self) -> *const c_void {
        self.args.as_ptr().cast()
    }

    /// What the kernel says that the launch touches.
    pub fn accesses(&self) -> Vec<Access> {
        // SAFETY: the arguments are those of the kernel.
        unsafe { self.kernel.accesses(self.bytes()) }
    }

    /// Runs it when this is all its memory. Starting from other contents than the first time, if it ran before.
    pub fn run(&self, memory: &[Access]) -> Result<(), HostError> {
        // SAFETY: what the arguments point to is in the buffers; what is beyond the memory is found before it is
        // touched.
        unsafe { host::launch_raw(self.kernel.name(), self.launch, self.bytes(), memory, 9) }
    }
}

/// Buffers of a case, of which one may be an element away from where packs could be.
#[derive(Clone, Copy)]
struct Shift(Option<usize>);

struct Memory {
    buffers: Vec<Buffer>,
    shift: Shift,
}

impl Shift {
    fn memory(self) -> Memory {
        Memory { buffers: Vec::new(), shift: self }
    }
}

impl Memory {
    fn add(&mut self, buffer: impl FnOnce(usize) -> Buffer) -> DevicePtr {
        let offset = usize::from(self.shift.0 == Some(self.buffers.len()));
        self.buffers.push(buffer(offset));
        self.buffers[self.buffers.len() - 1].at()
    }

    fn of<T: Pod>(&mut self, values: &[T]) -> DevicePtr {
        self.add(|offset| Buffer::of(values, offset))
    }

    fn real(&mut self, dtype: Dtype, len: usize) -> DevicePtr {
        let salt = self.buffers.len() as u32;
        self.add(|offset| Buffer::real(dtype, &values(dtype, len, salt), offset))
    }

    fn f32s(&mut self, len: usize) -> DevicePtr {
        self.real(Dtype::F32, len)
    }

    fn f64s(&mut self, len: usize) -> DevicePtr {
        self.of(&vec![1f64; len])
    }
}

/// The cases, for each kernel at least one; with `shift`, each case's buffer of this number is misaligned.
pub fn cases(shift: Option<usize>) -> Vec<Case> {
    let shift = Shift(shift);
    let mut cases = Vec::new();
    for a in Dtype::ALL {
        for b in Dtype::ALL {
            cases.extend(of_two(a, b, shift));
        }
        cases.extend(of_one(a, shift));
    }
    cases.extend(of_none(shift));
    cases
}

const LEN: usize = 2050;

fn of_two(a: Dtype, b: Dtype, shift: Shift) -> Vec<Case> {
    let len = LEN as u64;
    let mut cases = Vec::new();

    let mut m = shift.memory();
    let step = AdamWStep { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0, step: 1 };
    let segments = [step.segment(0, 1001), step.segment(1001, len - 1001)];
    // SAFETY: a segment is 48 bytes without padding.
    let words = unsafe { std::slice::from_raw_parts(segments.as_ptr().cast::<u64>(), 12) };
    let args = AdamWArgs {
        main: m.f32s(LEN),
        model: m.real(b, LEN),
        grads: m.real(a, LEN),
        exp_avg: m.f32s(LEN),
        exp_avg_sq: m.f32s(LEN),
        segments: m.of(words),
        grad_scale: m.f32s(1),
        len,
        segment_count: 2,
        scale: 1.0,
    };
    cases.push(Case::new(adamw(a, b), args, m.buffers));

    let mut m = shift.memory();
    let args = AccumulateArgs { acc: m.real(b, LEN), values: m.real(a, LEN), len, beta: 1.0, scale: 0.5 };
    cases.push(Case::new(accumulate(a, b), args, m.buffers));

    let mut m = shift.memory();
    let args = CastArgs { from: m.real(a, LEN), to: m.real(b, LEN), len };
    cases.push(Case::new(cast(a, b), args, m.buffers));

    if let Some(kernel) = sum_ranks(a, b) {
        let mut m = shift.memory();
        let sources = [m.real(a, LEN), m.real(a, LEN), m.real(a, LEN)];
        let args = SumRanksArgs::new(&sources, m.real(b, LEN), len, 0.3, true);
        cases.push(Case::new(kernel, args, m.buffers));
    }
    cases
}

fn of_one(dtype: Dtype, shift: Shift) -> Vec<Case> {
    let mut cases = vec![];

    let mut m = shift.memory();
    cases.push(Case::new(
        fill(dtype),
        FillArgs { to: m.real(dtype, LEN), len: LEN as u64, value: 1.0 },
        m.buffers,
    ));

    let mut m = shift.memory();
    let args = SquaredNormArgs { values: m.real(dtype, 20_001), partials: m.f64s(3), len: 20_001 };
    cases.push(Case::new(squared_norm(dtype), args, m.buffers));

    // The rows of a warp, and those of a block.
    for width in [100, 1100] {
        let (rows, size) = (70, width as u64);
        let mut m = shift.memory();
        let args = RmsNormArgs {
            x: m.real(dtype, rows * width),
            weight: m.real(dtype, width),
            y: m.real(dtype, rows * width),
            scales: m.f32s(rows),
            rows: rows as u64,
            width: size,
            eps: 1e-5,
        };
        cases.push(Case::new(rms_norm(dtype), args, m.buffers));

        let mut m = shift.memory();
        let inputs =
            [m.real(dtype, rows * width), m.real(dtype, width), m.real(dtype, rows * width), m.f32s(rows)];
        let (dx, partials) = (m.real(dtype, rows * width), m.f32s(3 * width));
        let args = RmsNormBackwardArgs::new(inputs, dx, partials, rows as u64, size);
        cases.push(Case::new(rms_norm_backward(dtype), args, m.buffers));
    }

    let mut m = shift.memory();
    let args =
        ColumnSumsArgs { values: m.f32s(20 * 70), out: m.real(dtype, 70), rows: 20, width: 70, add: 1 };
    cases.push(Case::new(column_sums(dtype), args, m.buffers));

    let mut m = shift.memory();
    let args = RopeArgs {
        x: m.real(dtype, 6 * 48),
        out: m.real(dtype, 6 * 48),
        cos: m.f32s(3 * 8),
        sin: m.f32s(3 * 8),
        rows: 6,
        x_stride: 48,
        out_stride: 48,
        positions: 3,
        heads: 3,
        half: 8,
        sign: 1.0,
    };
    cases.push(Case::new(rope(dtype), args, m.buffers));

    // Rows with and without room for packs in either matrix.
    for (in_stride, out_stride) in [(50, 45), (52, 45), (50, 48), (52, 48)] {
        let mut m = shift.memory();
        let args = SwigluArgs {
            gate: m.real(dtype, 2 * in_stride + 41),
            up: m.real(dtype, 2 * in_stride + 41),
            y: m.real(dtype, 2 * out_stride + 41),
            rows: 3,
            width: 41,
            in_stride: in_stride as u64,
            out_stride: out_stride as u64,
        };
        cases.push(Case::new(swiglu(dtype), args, m.buffers));
    }

    let mut m = shift.memory();
    let args = SwigluBackwardArgs {
        gate: m.real(dtype, LEN),
        up: m.real(dtype, LEN),
        dy: m.real(dtype, LEN),
        dgate: m.real(dtype, LEN),
        dup: m.real(dtype, LEN),
        rows: 2,
        width: LEN as u64 / 2,
        in_stride: LEN as u64 / 2,
        out_stride: LEN as u64 / 2,
    };
    cases.push(Case::new(swiglu_backward(dtype), args, m.buffers));

    let mut m = shift.memory();
    let args = CrossEntropyArgs {
        logits: m.real(dtype, 5 * 301),
        targets: m.of(&[0u32, 300, 7, 7, 1]),
        losses: m.f64s(5),
        maxima: m.f32s(5),
        sums: m.f32s(5),
        rows: 5,
        vocab: 301,
        ignored: NO_IGNORED_TARGET,
    };
    cases.push(Case::new(cross_entropy(dtype), args, m.buffers));

    let mut m = shift.memory();
    let args = CrossEntropyBackwardArgs {
        logits: m.real(dtype, 5 * 301),
        targets: m.of(&[0u32, 300, 7, 7, 1]),
        maxima: m.f32s(5),
        sums: m.f32s(5),
        dlogits: m.real(dtype, 5 * 301),
        dloss: m.f32s(1),
        rows: 5,
        vocab: 301,
        ignored: NO_IGNORED_TARGET,
        divisor: 5.0,
    };
    cases.push(Case::new(cross_entropy_backward(dtype), args, m.buffers));

    // Rows of a warp, and those of a block; whole sequences.
    for (rows, positions) in [(70, 35), (514, 514)] {
        let (len, wide) = (rows * positions, [rows as u64, positions as u64]);
        let mut m = shift.memory();
        let args = CausalSoftmaxArgs {
            scores: m.f32s(len),
            weights: m.real(dtype, len),
            lse: m.f32s(rows),
            rows: wide[0],
            positions: wide[1],
        };
        cases.push(Case::new(causal_softmax(dtype), args, m.buffers));

        let mut m = shift.memory();
        let args = CausalSoftmaxBackwardArgs {
            scores: m.f32s(len),
            lse: m.f32s(rows),
            dweights: m.f32s(len),
            weights: m.real(dtype, len),
            dscores: m.real(dtype, len),
            rows: wide[0],
            positions: wide[1],
            scale: 0.5,
        };
        cases.push(Case::new(causal_softmax_backward(dtype), args, m.buffers));
    }

    let mut m = shift.memory();
    let args = DropoutArgs {
        x: m.real(dtype, 3 * 41),
        y: m.real(dtype, 3 * 41),
        samples: 3,
        width: 41,
        key: 7,
        first_sample: 5,
        threshold: 1 << 30,
        scale: 1.3,
    };
    cases.push(Case::new(dropout(dtype), args, m.buffers));

    let mut m = shift.memory();
    let args = SwapDimsArgs {
        from: m.real(dtype, 2 * 3 * 5 * 40),
        to: m.real(dtype, 2 * 3 * 5 * 40),
        batch: 2,
        first: 3,
        second: 5,
        width: 40,
    };
    cases.push(Case::new(swap_dims(dtype), args, m.buffers));

    let mut m = shift.memory();
    let args = EmbeddingArgs {
        ids: m.of(&[4u32, 0, 2, 4]),
        weight: m.real(dtype, 5 * 300),
        rows: m.real(dtype, 4 * 300),
        dim: 300,
        count: 4,
        vocab: 5,
    };
    cases.push(Case::new(embedding(dtype), args, m.buffers));

    // Three ids, all of which span several searches.
    let count = 900u32;
    let ids: Vec<u32> = (0..count).map(|at| at % 3).collect();
    let mut m = shift.memory();
    let args = EmbeddingBackwardArgs {
        ids: m.of(&ids),
        first: m.of(&[count, count - 1, count - 2]),
        end: m.of(&[count - 2, count - 1, count]),
        drows: m.real(dtype, 900 * 8),
        dweight: m.f32s(3 * 8),
        dim: 8,
        count,
        vocab: 3,
    };
    cases.push(Case::new(embedding_backward(dtype), args, m.buffers));
    cases
}

fn of_none(shift: Shift) -> Vec<Case> {
    let mut m = shift.memory();
    let args = SumArgs { values: m.f64s(700), total: m.f64s(1), rounded: m.f32s(1), len: 700, divisor: 2.0 };
    let sum = Case::new(sum_f64(), args, m.buffers);

    let mut m = shift.memory();
    let args = ClipScaleArgs { squared_norm: m.f64s(1), norm: m.f64s(1), scale: m.f32s(1), max_norm: 1.0 };
    let clip = Case::new(clip_scale(), args, m.buffers);

    let mut m = shift.memory();
    let args = EmbeddingSpansArgs {
        ids: m.of(&[0u32, 4, 2, 4, 0]),
        first: m.of(&[0u32; 5]),
        end: m.of(&[0u32; 5]),
        count: 5,
        vocab: 5,
    };
    let spans = Case::new(embedding_spans(), args, m.buffers);
    vec![sum, clip, spans]
}
