use bytemuck::cast_slice;
use fsdp_kernels::{AdamWArgs, AdamWSegment, AdamWStep, Args, Dtype, Launch, THREADS, adamw, host};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{LENGTHS, assert_close, rounded, values, wide};

const STEP: AdamWStep =
    AdamWStep { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 7 };

/// Weights, gradients and moments of a shard.
#[derive(Clone, Debug, PartialEq)]
struct State {
    w: Vec<f32>,
    g: Vec<f32>,
    m: Vec<f32>,
    v: Vec<f32>,
}

impl State {
    fn new(len: usize, grads: Dtype, weights: Dtype) -> State {
        State {
            w: values(weights, len, 1),
            g: values(grads, len, 2),
            m: values(Dtype::F32, len, 3),
            v: values(Dtype::F32, len, 4).iter().map(|x| x * x).collect(),
        }
    }

    /// The loop of fsdp-runtime/src/optim/adamw.rs.
    fn step(&mut self, s: &AdamWSegment, grad_scale: f32) {
        for i in s.begin as usize..(s.begin + s.len) as usize {
            let g = self.g[i] * grad_scale;
            let m1 = s.beta1 * self.m[i] + s.one_minus_beta1 * g;
            let v1 = s.beta2 * self.v[i] + s.one_minus_beta2 * g * g;
            let denominator = v1.sqrt() / s.correction2 + s.eps;
            self.w[i] = self.w[i] * s.decay - s.step_size * m1 / denominator;
            self.m[i] = m1;
            self.v[i] = v1;
        }
    }
}

/// Which weights there are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Weights {
    Main,
    Model,
    Both,
}

fn bytes(segments: &[AdamWSegment]) -> Vec<u64> {
    // SAFETY: a segment is 48 bytes without padding.
    let words = unsafe { std::slice::from_raw_parts(segments.as_ptr().cast::<u64>(), segments.len() * 6) };
    words.to_vec()
}

/// What the kernel makes of a state: weights, moments, and the model's weights.
fn run(
    device: Device,
    state: &State,
    [grads, model]: [Dtype; 2],
    weights: Weights,
    segments: &[AdamWSegment],
    (scale, from_memory): (f32, bool),
    offset: usize,
) -> (State, Option<Vec<f32>>) {
    let len = state.w.len();
    let main_buffer = Buffer::real(Dtype::F32, &state.w, offset);
    let model_buffer = if weights == Weights::Both {
        Buffer::real(model, &vec![f32::NAN; len], 3 * offset)
    } else {
        Buffer::real(model, &state.w, 3 * offset)
    };
    let (m, v) = (Buffer::of(&state.m, 2 * offset), Buffer::of(&state.v, offset));
    let (g, table) = (Buffer::real(grads, &state.g, offset), Buffer::of(&bytes(segments), 0));
    let grad_scale = Buffer::of(&[scale], 0);
    let args = AdamWArgs {
        main: if weights == Weights::Model { 0 } else { main_buffer.at() },
        model: if weights == Weights::Main { 0 } else { model_buffer.at() },
        grads: g.at(),
        exp_avg: m.at(),
        exp_avg_sq: v.at(),
        segments: table.at(),
        grad_scale: if from_memory { grad_scale.at() } else { 0 },
        len: len as u64,
        segment_count: segments.len() as u32,
        scale: if from_memory { f32::NAN } else { scale },
    };
    device.launch(adamw(grads, model), &args);
    let (w, narrow) = match weights {
        Weights::Main => (main_buffer.read(), None),
        Weights::Model => (model_buffer.reals(model), None),
        Weights::Both => (main_buffer.read(), Some(model_buffer.reals(model))),
    };
    assert_eq!(cast_slice::<_, u8>(&table.read::<u64>()), cast_slice::<_, u8>(&bytes(segments)));
    (State { w, g: g.reals(grads), m: m.read(), v: v.read() }, narrow)
}

#[test]
fn gives_the_bits_of_the_cpu_optimizer() {
    for len in LENGTHS {
        let dtypes: &[Dtype] = if matches!(len, 5 | 257 | 1025) { &Dtype::ALL } else { &Dtype::ALL[..2] };
        for (&grads, &model) in dtypes.iter().flat_map(|a| dtypes.iter().map(move |b| (a, b))) {
            for weights in [Weights::Main, Weights::Model, Weights::Both] {
                let start =
                    State::new(len, grads, if weights == Weights::Model { model } else { Dtype::F32 });
                let segments = [STEP.segment(0, len as u64)];
                let mut expected = start.clone();
                expected.step(&segments[0], 0.7);
                let narrow: Vec<f32> = expected.w.iter().map(|&w| rounded(model, w)).collect();
                if weights == Weights::Model {
                    expected.w.clone_from(&narrow);
                }
                for offset in [0, 1] {
                    let scale = (0.7, offset == 1);
                    let run = run(Device::WIDE, &start, [grads, model], weights, &segments, scale, offset);
                    let narrow = (weights == Weights::Both).then(|| narrow.clone());
                    assert!(
                        run == (expected.clone(), narrow),
                        "{len} {grads:?} {model:?} {weights:?} {offset}"
                    );
                }
            }
        }
    }
}

#[test]
fn segments_have_their_own_scalars_and_leave_the_rest() {
    let start = State::new(5000, Dtype::BF16, Dtype::F32);
    let other = AdamWStep { lr: 1e-2, beta1: 0.8, beta2: 0.99, weight_decay: 0.0, step: 1, ..STEP };
    // Empty, one element, on a pack, off a pack; a gap before and after.
    let cuts = [(2, 0), (2, 1), (3, 1), (4, 1024), (1029, 2049), (3500, 1499)];
    let segments: Vec<AdamWSegment> = cuts
        .iter()
        .enumerate()
        .map(|(i, &(begin, len))| if i % 2 == 0 { STEP } else { other }.segment(begin, len))
        .collect();
    let mut expected = start.clone();
    segments.iter().for_each(|segment| expected.step(segment, 1.0));
    let narrow: Vec<f32> = expected.w.iter().map(|&w| rounded(Dtype::BF16, w)).collect();
    let dtypes = [Dtype::BF16; 2];
    let (state, model) = on_every_grid(|device| {
        let (state, model) = run(device, &start, dtypes, Weights::Both, &segments, (1.0, false), 0);
        (state, model.map(|model| model.into_iter().map(f32::to_bits).collect::<Vec<_>>()))
    });
    assert!(state == expected);
    for (i, bits) in model.expect("both weights were given").into_iter().enumerate() {
        let covered = cuts.iter().any(|&(begin, len)| (begin..begin + len).contains(&(i as u64)));
        let model = f32::from_bits(bits);
        assert!(if covered { model == narrow[i] } else { model.is_nan() }, "{i}");
    }
}

#[test]
fn more_segments_than_rows_of_blocks() {
    // The grid has a row of blocks for each segment up to 65,535, here up to the limit that the launch below sets.
    let start = State::new(40, Dtype::F32, Dtype::F32);
    let segments: Vec<AdamWSegment> = (0..40).map(|i| STEP.segment(i, 1)).collect();
    let mut expected = start.clone();
    expected.step(&STEP.segment(0, 40), 1.0);
    let [w, g, m, v] = [&start.w, &start.g, &start.m, &start.v].map(|x| Buffer::of(x, 0));
    let table = Buffer::of(&bytes(&segments), 0);
    let args = AdamWArgs {
        main: w.at(),
        model: 0,
        grads: g.at(),
        exp_avg: m.at(),
        exp_avg_sq: v.at(),
        segments: table.at(),
        grad_scale: 0,
        len: 40,
        segment_count: 40,
        scale: 1.0,
    };
    let launch = Launch { grid: [2, 7], threads: THREADS, shared_bytes: 0 };
    let memory = args.accesses([Dtype::F32; 2]);
    // SAFETY: the accesses are in the buffers.
    unsafe { host::launch(adamw(Dtype::F32, Dtype::F32), launch, &args, &memory, 1) }.unwrap();
    assert_eq!((w.read(), m.read(), v.read()), (expected.w, expected.m, expected.v));
}

#[test]
fn five_steps_follow_the_formula_in_f64() {
    for grads in Dtype::ALL {
        let mut state = State::new(1027, grads, Dtype::F32);
        (state.m, state.v) = (vec![0.0; 1027], vec![0.0; 1027]);
        let (mut w, mut m, mut v) = (wide(&state.w), vec![0f64; 1027], vec![0f64; 1027]);
        for t in 1..=5 {
            state.g = values(grads, 1027, 100 + t);
            let segments = [AdamWStep { step: t.into(), ..STEP }.segment(0, 1027)];
            (state, _) =
                run(Device::WIDE, &state, [grads, Dtype::F32], Weights::Main, &segments, (0.5, true), 0);
            for i in 0..1027 {
                let g = f64::from(state.g[i]) * 0.5;
                m[i] = 0.9 * m[i] + 0.1 * g;
                v[i] = 0.95 * v[i] + 0.05 * g * g;
                let denominator = v[i].sqrt() / (1.0 - 0.95f64.powi(t as i32)).sqrt() + 1e-8;
                w[i] = w[i] * (1.0 - 3e-3 * 0.1) - 3e-3 / (1.0 - 0.9f64.powi(t as i32)) * m[i] / denominator;
            }
        }
        for i in 0..1027 {
            assert_close(state.w[i], w[i], Dtype::F32, 1.0, 5.0, w[i].abs().max(0.02));
            assert_close(state.v[i], v[i], Dtype::F32, 1.0, 12.0, v[i]);
        }
    }
}
