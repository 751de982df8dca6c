//! Elements more than 2³² away from where a buffer begins. Of such a buffer only the part exists that is touched: its
//! address is taken so far below.

use bytemuck::cast_slice;
use fsdp_kernels::{
    Access, AdamWArgs, AdamWStep, Args, DevicePtr, Dtype, EmbeddingBackwardArgs, EmbeddingSpansArgs,
    RopeArgs, SwigluArgs, adamw, embedding_backward, embedding_spans, host, rope, swiglu,
};

use crate::device::Buffer;
use crate::exp::sigmoid;

const FAR: u64 = (1 << 33) + 4;

/// Where a buffer would begin whose element `index`, of 4 bytes, is at `at`.
fn base(at: DevicePtr, index: u64) -> DevicePtr {
    at.wrapping_sub(4 * index)
}

fn launch<A: Args>(kernel: &str, args: &A, buffers: &[&Buffer]) {
    let memory: Vec<Access> = buffers
        .iter()
        .map(|buffer| Access {
            begin: buffer.at(),
            bytes: size_of_val(buffer.read::<u32>().as_slice()) as u64,
            writes: true,
        })
        .collect();
    let launch = args.launch(2).expect("there is work");
    // SAFETY: the accesses are in the buffers.
    unsafe { host::launch(kernel, launch, args, &memory, 0) }.unwrap();
}

#[test]
fn segments_far_into_a_shard() {
    let [w, m, v] = [(); 3].map(|()| Buffer::of(&[0.5f32; 5], 0));
    let g = Buffer::of(&[1f32; 5], 0);
    let step = AdamWStep { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0, step: 1 };
    let segment = [step.segment(FAR, 5)];
    // SAFETY: a segment is 48 bytes without padding.
    let words = unsafe { std::slice::from_raw_parts(segment.as_ptr().cast::<u64>(), 6) };
    let segments = Buffer::of(words, 0);
    let args = AdamWArgs {
        main: base(w.at(), FAR),
        model: 0,
        grads: base(g.at(), FAR),
        exp_avg: base(m.at(), FAR),
        exp_avg_sq: base(v.at(), FAR),
        segments: segments.at(),
        grad_scale: 0,
        len: FAR + 5,
        segment_count: 1,
        scale: 1.0,
    };
    launch(adamw(Dtype::F32, Dtype::F32), &args, &[&w, &m, &v, &g, &segments]);
    assert!(w.read::<f32>().iter().all(|&w| w < 0.45));
    assert!(m.read::<f32>().iter().all(|&m| (m - 0.55).abs() < 1e-6));
}

#[test]
fn rows_far_down_a_table() {
    let (id, dim) = (3_000_000_000, 8);
    let (ids, drows) = (Buffer::of(&[id, id], 0), Buffer::of(&[1f32; 16], 0));
    let [first, end] = [(); 2].map(|()| Buffer::of(&[0u32], 0));
    let dweight = Buffer::of(&[1f32; 8], 0);
    let [first_base, end_base] = [&first, &end].map(|buffer| base(buffer.at(), id.into()));
    let args =
        EmbeddingSpansArgs { ids: ids.at(), first: first_base, end: end_base, count: 2, vocab: id + 1 };
    launch(embedding_spans(), &args, &[&ids, &first, &end]);
    let args = EmbeddingBackwardArgs {
        ids: ids.at(),
        first: first_base,
        end: end_base,
        drows: drows.at(),
        dweight: base(dweight.at(), u64::from(id) * dim),
        dim,
        count: 2,
        vocab: id + 1,
    };
    launch(embedding_backward(Dtype::F32), &args, &[&ids, &first, &end, &drows, &dweight]);
    assert_eq!(dweight.read::<f32>(), [3.0; 8]);
}

/// Two rows whose distance in elements, modulo what 64 bits hold of bytes, is more than 32 bits.
fn far_rows(values: [f32; 4]) -> ([Buffer; 2], u64) {
    // Rounds to a distance that elements of 4 bytes have; one turn around the address space is 2⁶² of them.
    let rows = [(); 2].map(|()| Buffer::of(&values, 0));
    let distance = rows[1].at().wrapping_sub(rows[0].at()) / 4;
    (rows, distance | 1 << 62)
}

#[test]
fn strides_beyond_32_bits() {
    let (gates, in_stride) = far_rows([1.0, 2.0, 3.0, 4.0]);
    let (ys, out_stride) = far_rows([0.0; 4]);
    let args = SwigluArgs {
        gate: gates[0].at(),
        up: gates[0].at(),
        y: ys[0].at(),
        rows: 2,
        width: 4,
        in_stride,
        out_stride,
    };
    launch(swiglu(Dtype::F32), &args, &[&gates[0], &gates[1], &ys[0], &ys[1]]);
    let expected = [1f32, 2.0, 3.0, 4.0].map(|x| x * sigmoid(x) * x);
    assert_eq!(ys.each_ref().map(|y| y.read::<f32>()), [expected, expected]);

    let (xs, x_stride) = far_rows([1.0, 2.0, 3.0, 4.0]);
    let (outs, out_stride) = far_rows([0.0; 4]);
    let (cos, sin) = (Buffer::of(&[0f32, 0.0], 0), Buffer::of(&[1f32, 1.0], 0));
    let args = RopeArgs {
        x: xs[0].at(),
        out: outs[0].at(),
        cos: cos.at(),
        sin: sin.at(),
        rows: 2,
        x_stride,
        out_stride,
        positions: 1,
        heads: 1,
        half: 2,
        sign: 1.0,
    };
    launch(rope(Dtype::F32), &args, &[&xs[0], &xs[1], &outs[0], &outs[1], &cos, &sin]);
    let turned = [-3f32, -4.0, 1.0, 2.0];
    assert_eq!(
        outs.each_ref().map(|out| cast_slice::<_, f32>(&out.read::<f32>()).to_vec()),
        [turned, turned]
    );
}
