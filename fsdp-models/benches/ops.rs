//! What the fused ops cost in one thread, next to the bare matrix products inside them.
//!
//! `cargo bench -p fsdp-models --bench ops`. A backward time is that of `Tensor::backward` from the op's
//! result, the passes of candle's gradient store included. Times are medians of the thread's CPU clock where
//! there is one. By hand, as criterion's tables cannot show an op beside the products inside it.

use std::hint::black_box;

use candle_core::{Device, Result, Tensor, Var};
use fsdp::GradSink;
use fsdp_models::ops;

/// Seconds that this thread has computed: other load on the machine does not blur it.
#[cfg(target_os = "linux")]
fn now() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds since the first call.
#[cfg(not(target_os = "linux"))]
fn now() -> f64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}

/// Median seconds of a call of `f`.
fn median(mut f: impl FnMut()) -> f64 {
    f();
    let start = now();
    f();
    let repeats = (0.3 / (now() - start)).clamp(5.0, 400.0) as usize;
    let mut times: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = now();
            f();
            now() - start
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn variable(dims: &[usize]) -> Tensor {
    let numel: usize = dims.iter().product();
    let values: Vec<f32> = (0..numel).map(|i| ((i * 7919) % 2003) as f32 / 10000.0 - 0.1).collect();
    Var::from_tensor(&Tensor::from_vec(values, dims, &Device::Cpu).unwrap()).unwrap().into_inner()
}

/// A sink that stays open and is added to.
fn sink(weight: &Tensor) -> GradSink {
    GradSink::open_for_test(weight.elem_count()).0
}

/// Median seconds of forward and of backward.
fn both(f: impl Fn() -> Result<Tensor>) -> (f64, f64) {
    let forward = median(|| {
        black_box(f().unwrap());
    });
    let y = f().unwrap();
    let backward = median(|| {
        black_box(y.backward().unwrap());
    });
    (forward, backward)
}

/// Row-major `[m, k] [k, n]` with the given strides of both factors.
fn raw(m: usize, n: usize, k: usize, a_strides: [usize; 2], b_strides: [usize; 2]) -> f64 {
    let (a, b, mut c) = (vec![0.5f32; m * k], vec![0.25f32; k * n], vec![0f32; m * n]);
    median(|| {
        // SAFETY: the strides are those of dense matrices of these sizes.
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                c.as_mut_ptr(),
                1,
                n as isize,
                false,
                a.as_ptr(),
                a_strides[1] as isize,
                a_strides[0] as isize,
                b.as_ptr(),
                b_strides[1] as isize,
                b_strides[0] as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
        black_box(&c);
    })
}

fn linear(rows: usize, width: usize, out: usize) {
    let flops = 2.0 * (rows * width * out) as f64 / 1e9;
    let y = raw(rows, out, width, [width, 1], [1, width]);
    let dx = raw(rows, width, out, [out, 1], [width, 1]);
    let dw = raw(out, width, rows, [1, out], [width, 1]);
    let (x, weight) = (variable(&[rows, width]), variable(&[out, width]));
    let sink = sink(&weight);
    let (forward, backward) = both(|| ops::linear(&x, &weight, &sink));
    println!(
        "linear [{rows}, {width}] x [{out}, {width}]: forward {:.0} of {:.0} GFLOP/s, backward {:.0} of {:.0} (dx {:.0}, dw {:.0})",
        flops / forward,
        flops / y,
        2.0 * flops / backward,
        2.0 * flops / (dx + dw),
        flops / dx,
        flops / dw,
    );
}

fn attention(b: usize, t: usize, heads: usize, kv_heads: usize, d: usize) {
    // Two products forward and five backward, half of each below the diagonal.
    let flops = 2.0 * (b * heads * t * t * d) as f64 / 2.0 / 1e9;
    let q = variable(&[b, t, heads * d]);
    let (k, v) = (variable(&[b, t, kv_heads * d]), variable(&[b, t, kv_heads * d]));
    let (forward, backward) = both(|| ops::attention(&q, &k, &v, heads, kv_heads));
    println!(
        "attention b {b} t {t} h {heads}/{kv_heads} d {d}: forward {:.2} ms ({:.0} GFLOP/s of what is below the diagonal), backward {:.2} ms ({:.0})",
        forward * 1e3,
        2.0 * flops / forward,
        backward * 1e3,
        5.0 * flops / backward,
    );
}

fn elementwise(name: &str, numel: usize, f: impl Fn() -> Result<Tensor>) {
    let (forward, backward) = both(f);
    println!(
        "{name}: forward {:.3} ns, backward {:.3} ns an element",
        forward * 1e9 / numel as f64,
        backward * 1e9 / numel as f64
    );
}

fn mlp(rows: usize, dim: usize, hidden: usize) {
    let flops = 6.0 * (rows * dim * hidden) as f64 / 1e9;
    let x = variable(&[rows, dim]);
    let weights = [variable(&[hidden, dim]), variable(&[hidden, dim]), variable(&[dim, hidden])];
    let sinks = weights.each_ref().map(sink);
    let fused =
        both(|| ops::gated_mlp(&x, &weights[0], &weights[1], &weights[2], [&sinks[0], &sinks[1], &sinks[2]]));
    let composed = both(|| {
        let gate = ops::linear(&x, &weights[0], &sinks[0])?;
        let up = ops::linear(&x, &weights[1], &sinks[1])?;
        ops::linear(&ops::swiglu(&gate, &up)?, &weights[2], &sinks[2])
    });
    for (name, (forward, backward)) in [("fused", fused), ("composed", composed)] {
        println!(
            "mlp [{rows}, {dim}] x {hidden}, {name}: forward {:.2} ms ({:.0} GFLOP/s), backward {:.2} ms ({:.0})",
            forward * 1e3,
            flops / forward,
            backward * 1e3,
            2.0 * flops / backward
        );
    }
}

/// The projections too: `dim` is that of the model.
fn self_attention(b: usize, t: usize, dim: usize, heads: usize, kv_heads: usize, d: usize) {
    let x = variable(&[b, t, dim]);
    let [q, o] = [[heads * d, dim], [dim, heads * d]].map(|dims| variable(&dims));
    let [k, v] = [(); 2].map(|()| variable(&[kv_heads * d, dim]));
    let sinks = [&q, &k, &v, &o].map(sink);
    let angles = Tensor::rand(-1f32, 1.0, (t, d / 2), &Device::Cpu).unwrap();
    let fused = both(|| {
        let weights = ops::SelfAttentionWeights {
            q: (&q, &sinks[0]),
            k: (&k, &sinks[1]),
            v: (&v, &sinks[2]),
            o: (&o, &sinks[3]),
        };
        ops::self_attention(&x, weights, &angles, &angles, heads, kv_heads)
    });
    let composed = both(|| {
        let q = ops::rope(&ops::linear(&x, &q, &sinks[0])?, &angles, &angles, heads)?;
        let k = ops::rope(&ops::linear(&x, &k, &sinks[1])?, &angles, &angles, kv_heads)?;
        let v = ops::linear(&x, &v, &sinks[2])?;
        ops::linear(&ops::attention(&q, &k, &v, heads, kv_heads)?, &o, &sinks[3])
    });
    for (name, (forward, backward)) in [("fused", fused), ("composed", composed)] {
        println!(
            "self-attention b {b} t {t} dim {dim} h {heads}/{kv_heads}, {name}: forward {:.2} ms, backward {:.2} ms",
            forward * 1e3,
            backward * 1e3
        );
    }
}

fn main() {
    // candle splits its own element-wise operations over a pool of spinning threads, one pool for the
    // process. SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("CANDLE_NUM_THREADS", "1") };
    ops::retain_freed_memory();
    // An argument selects one group of measurements.
    let chosen = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let wanted = |group: &str| chosen.as_deref().is_none_or(|chosen| chosen == group);
    if wanted("linear") {
        linear(1024, 256, 704);
        linear(1024, 704, 256);
        linear(1024, 256, 256);
        linear(1024, 256, 128);
        linear(512, 768, 2048);
        linear(512, 2048, 768);
    }
    if wanted("attention") {
        attention(4, 256, 4, 2, 64);
        attention(2, 256, 12, 4, 64);
        self_attention(4, 256, 256, 4, 2, 64);
        self_attention(2, 256, 768, 12, 4, 64);
    }
    if wanted("mlp") {
        mlp(1024, 256, 704);
        mlp(512, 768, 2048);
    }
    if wanted("elementwise") {
        elementwise_ops(1024, 256);
    }
}

fn elementwise_ops(rows: usize, dim: usize) {
    let numel = rows * dim;
    let x = variable(&[rows, dim]);
    let weight = variable(&[dim]);
    let weight_sink = sink(&weight);
    elementwise("rms_norm", numel, || ops::rms_norm(&x, &weight, 1e-5, &weight_sink));
    let sequences = x.reshape((4, 256, 256)).unwrap();
    let angles = Tensor::rand(-1f32, 1.0, (256, 32), &Device::Cpu).unwrap();
    elementwise("rope", numel, || ops::rope(&sequences, &angles, &angles, 4));
    let up = variable(&[rows, dim]);
    elementwise("swiglu", numel, || ops::swiglu(&x, &up));
    elementwise("candle add", numel, || &x + &up);
    let targets =
        Tensor::from_vec((0..rows as u32).map(|i| i % 256).collect::<Vec<_>>(), rows, &Device::Cpu).unwrap();
    elementwise("cross_entropy", numel, || ops::cross_entropy(&x, &targets));
    let table = variable(&[256, 256]);
    let table_sink = sink(&table);
    elementwise("embedding", numel, || ops::embedding(&targets, &table, &table_sink));
}
