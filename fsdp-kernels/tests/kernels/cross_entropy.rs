use fsdp_kernels::{
    CrossEntropyArgs, CrossEntropyBackwardArgs, Dtype, NO_IGNORED_TARGET, cross_entropy,
    cross_entropy_backward,
};

use crate::device::{Buffer, Device, on_every_grid};
use crate::number::{assert_close, rounded, values, wide};

const VOCABS: [usize; 10] = [1, 3, 4, 5, 255, 256, 1023, 1025, 1028, 5003];

struct Inputs {
    dtype: Dtype,
    logits: Vec<f32>,
    targets: Vec<u32>,
    ignored: i64,
}

impl Inputs {
    fn new(dtype: Dtype, rows: usize, vocab: usize) -> Inputs {
        let logits = values(dtype, rows * vocab, 1).iter().map(|x| rounded(dtype, x * 3.0)).collect();
        let targets = (0..rows).map(|row| (row * 7919 % vocab) as u32).collect();
        Inputs { dtype, logits, targets, ignored: NO_IGNORED_TARGET }
    }

    fn vocab(&self) -> usize {
        self.logits.len() / self.targets.len()
    }

    /// The softmax of a row.
    fn softmax(&self, row: usize) -> Vec<f64> {
        let logits = wide(&self.logits[row * self.vocab()..][..self.vocab()]);
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
        logits.iter().map(|x| (x - max).exp() / sum).collect()
    }
}

struct Forward {
    losses: Vec<f64>,
    maxima: Vec<f32>,
    sums: Vec<f32>,
}

fn forward(device: Device, i: &Inputs, offset: usize) -> Forward {
    let rows = i.targets.len();
    let (logits, targets) = (Buffer::real(i.dtype, &i.logits, offset), Buffer::of(&i.targets, 0));
    let losses = Buffer::of(&vec![-1f64; rows], 0);
    let [maxima, sums] = [(); 2].map(|()| Buffer::of(&vec![-1f32; rows], 0));
    let args = CrossEntropyArgs {
        logits: logits.at(),
        targets: targets.at(),
        losses: losses.at(),
        maxima: maxima.at(),
        sums: sums.at(),
        rows: rows as u64,
        vocab: i.vocab() as u64,
        ignored: i.ignored,
    };
    device.launch(cross_entropy(i.dtype), &args);
    Forward { losses: losses.read(), maxima: maxima.read(), sums: sums.read() }
}

/// The gradient of the logits, in their place or elsewhere.
fn backward(
    device: Device,
    i: &Inputs,
    f: &Forward,
    dloss: Option<f32>,
    divisor: f64,
    in_place: bool,
) -> Vec<f32> {
    let (logits, targets) = (Buffer::real(i.dtype, &i.logits, 0), Buffer::of(&i.targets, 0));
    let (maxima, sums) = (Buffer::of(&f.maxima, 0), Buffer::of(&f.sums, 0));
    let elsewhere = Buffer::real(i.dtype, &vec![7.0; i.logits.len()], 1);
    let out = if in_place { &logits } else { &elsewhere };
    let grad = Buffer::of(&[dloss.unwrap_or(f32::NAN)], 0);
    let args = CrossEntropyBackwardArgs {
        logits: logits.at(),
        targets: targets.at(),
        maxima: maxima.at(),
        sums: sums.at(),
        dlogits: out.at(),
        dloss: if dloss.is_some() { grad.at() } else { 0 },
        rows: i.targets.len() as u64,
        vocab: i.vocab() as u64,
        ignored: i.ignored,
        divisor,
    };
    device.launch(cross_entropy_backward(i.dtype), &args);
    out.reals(i.dtype)
}

#[test]
fn losses_follow_the_formula_in_f64() {
    for dtype in Dtype::ALL {
        for vocab in VOCABS {
            let i = Inputs::new(dtype, 5, vocab);
            for offset in [0, 1] {
                let f = forward(Device::WIDE, &i, offset);
                for (row, &target) in i.targets.iter().enumerate() {
                    let logits = &i.logits[row * vocab..][..vocab];
                    assert_eq!(f.maxima[row], logits.iter().copied().fold(f32::MIN, f32::max));
                    let want = -i.softmax(row)[target as usize].ln();
                    // Exponents of differences are off by what the differences are, which are below 20.
                    assert!((f.losses[row] - want).abs() < 1e-5, "{} is not {want}", f.losses[row]);
                    let sum: f64 = wide(logits).iter().map(|x| (x - f64::from(f.maxima[row])).exp()).sum();
                    assert_close(f.sums[row], sum, Dtype::F32, 1.0, 60.0, sum);
                }
            }
        }
    }
}

#[test]
fn gradients_follow_the_formula_in_f64() {
    for dtype in Dtype::ALL {
        for vocab in VOCABS {
            let i = Inputs::new(dtype, 5, vocab);
            let f = forward(Device::WIDE, &i, 0);
            for (dloss, divisor, in_place) in
                [(None, 1.0, false), (Some(0.3), 5.0, false), (Some(2.0), 4.0, true)]
            {
                let dlogits = backward(Device::WIDE, &i, &f, dloss, divisor, in_place);
                for (row, &target) in i.targets.iter().enumerate() {
                    let scale = f64::from(dloss.unwrap_or(1.0)) / divisor;
                    for (k, p) in i.softmax(row).into_iter().enumerate() {
                        let hit = k == target as usize;
                        let want = (p - f64::from(u8::from(hit))) * scale;
                        let magnitude = (p + f64::from(u8::from(hit))) * scale;
                        assert_close(dlogits[row * vocab + k], want, dtype, 1.01, 80.0, magnitude);
                    }
                }
            }
        }
    }
}

#[test]
fn results_do_not_depend_on_the_grid() {
    for vocab in [5, 1300] {
        let mut i = Inputs::new(Dtype::BF16, 11, vocab);
        i.ignored = i64::from(i.targets[4]);
        on_every_grid(|device| {
            let f = forward(device, &i, 0);
            let dlogits = backward(device, &i, &f, None, 3.0, true);
            (f.losses, f.maxima, f.sums, dlogits)
        });
    }
}

#[test]
fn ignored_rows_count_for_nothing() {
    // Also one that no vocabulary has, as -100 is made.
    for ignored in [2, u32::MAX - 99] {
        let mut i = Inputs::new(Dtype::F32, 6, 300);
        (i.targets[1], i.targets[4], i.ignored) = (ignored, ignored, ignored.into());
        let f = forward(Device::WIDE, &i, 0);
        let dlogits = backward(Device::WIDE, &i, &f, None, 4.0, false);
        for row in 0..6 {
            let grads = &dlogits[row * 300..][..300];
            if i.targets[row] == ignored {
                assert_eq!(f.losses[row], 0.0);
                assert!(grads.iter().all(|&g| g == 0.0));
            } else {
                assert!(f.losses[row] > 0.0);
                assert!(grads.iter().all(|&g| g != 0.0 && g.is_finite()));
            }
        }
    }
}

#[test]
fn targets_out_of_range_make_nan_of_their_row() {
    let mut i = Inputs::new(Dtype::BF16, 3, 300);
    i.targets[1] = 300;
    let f = forward(Device::WIDE, &i, 0);
    assert_eq!(f.losses.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), [false, true, false]);
    let dlogits = backward(Device::WIDE, &i, &f, None, 1.0, false);
    let nan = dlogits.iter().enumerate().all(|(at, x)| x.is_nan() == (at / 300 == 1));
    assert!(nan);
}

#[test]
fn extreme_logits() {
    let row = |values: &[f32], target: u32| {
        let i = Inputs { dtype: Dtype::F32, logits: values.to_vec(), targets: vec![target], ignored: -1 };
        let f = forward(Device::WIDE, &i, 0);
        let dlogits = backward(Device::WIDE, &i, &f, None, 1.0, false);
        (f.losses[0], dlogits)
    };
    // Masked logits have weight 0.
    let (loss, grads) = row(&[f32::NEG_INFINITY, 1.0, 1.0, f32::NEG_INFINITY], 1);
    assert!((loss - 2f64.ln()).abs() < 1e-7);
    assert_eq!(grads, [0.0, -0.5, 0.5, 0.0]);
    let (loss, _) = row(&[f32::NEG_INFINITY, 1.0], 0);
    assert_eq!(loss, f64::INFINITY);
    let (loss, grads) = row(&[-1e30, -1e30], 0);
    assert!((loss - 2f64.ln()).abs() < 1e-7);
    assert_eq!(grads, [-0.5, 0.5]);
    // Differences beyond any exponent.
    let (loss, grads) = row(&[f32::MAX, -f32::MAX, 0.0], 1);
    assert_eq!(loss, 2.0 * f64::from(f32::MAX));
    assert_eq!(grads, [1.0, -1.0, 0.0]);
    let (loss, grads) = row(&[1e4, 0.0], 0);
    assert_eq!((loss, grads), (0.0, vec![0.0, 0.0]));
    for poison in [f32::NAN, f32::INFINITY] {
        let (loss, grads) = row(&[0.0, poison, 1.0], 0);
        assert!(loss.is_nan() && grads.iter().any(|g| g.is_nan()), "{poison}: {loss} {grads:?}");
    }
    let (loss, _) = row(&[f32::NEG_INFINITY; 3], 0);
    assert!(loss.is_nan());
}
