//! Cross-entropy of logits against target ids.

use std::mem::MaybeUninit;

use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

use super::cuda::ids_beside;
use super::cuda::table::{CudaBackward, CudaForward};
use super::element::{Element, with_element};
use super::exp::exp;
use super::kept::Kept;
use super::simd::{filled_by, max, sum, vectorise};
use super::storage::{check_ids_device, dtype, elements, ids, with_elements};
use super::weight_grad::tensor;

pub(super) const OP: &str = "cross-entropy";

/// What [`cross_entropy_with`] counts and how it sums.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropyOptions {
    /// Rows with this target count for nothing: no loss, no gradient. It need not be an id of the vocabulary.
    pub ignore_index: Option<u32>,
    /// How the rows' losses become one.
    pub reduction: Reduction,
}

/// How the losses of the valid rows become one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their mean; 0 if there is none.
    #[default]
    Mean,
    /// Their sum, for a loss that is divided by a count over more than this call's rows.
    Sum,
}

/// The mean over the rows of `logits` `[n, vocab]` of `-log softmax(logits)[target]`, as an f32 scalar;
/// `targets` is u32 `[n]`.
///
/// # Errors
/// Those of [`cross_entropy_with`].
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, CrossEntropyOptions::default()).map(|(loss, _)| loss)
}

/// The cross-entropy of `logits` `[n, vocab]` against `targets` (u32 `[n]`, on the CPU or on the device of the
/// logits), an f32 scalar, and the number of valid rows.
///
/// Softmax and logarithm are taken in f32 whatever the dtype of the logits, the sum over rows in f64. Without
/// a valid row the loss is 0 and so is every gradient.
///
/// # Errors
/// If a target is neither below `vocab` nor the ignored one (the first such target and its row are named),
/// if the shapes do not fit, if `targets` is not u32 or `logits` not f32, bf16 or f16, or if the tensors
/// are not all on the CPU or on one CUDA device.
pub fn cross_entropy_with(
    logits: &Tensor,
    targets: &Tensor,
    options: CrossEntropyOptions,
) -> Result<(Tensor, usize)> {
    check_ids_device(OP, "targets", targets, ("logits", logits))?;
    let [rows, vocab] = *logits.dims() else {
        bail!("{OP}: expected logits of [n, vocab], got {:?}", logits.dims());
    };
    if targets.dims() != [rows] {
        bail!(
            "{OP}: logits {:?} do not fit targets {:?}: expected [n, vocab] and [n]",
            logits.dims(),
            targets.dims()
        );
    }
    let on_device = ids_beside(OP, targets, logits)?;
    let read = ids(OP, targets)?;
    if read.is_none() && options.ignore_index.is_some() {
        bail!("{OP}: how many targets are not ignored is not known while a graph is captured");
    }
    let captured = read.is_none().then_some(rows);
    let targets = read.unwrap_or_default();
    let ignored = |target: &u32| Some(*target) == options.ignore_index;
    if let Some(at) = targets.iter().position(|t| !ignored(t) && *t as usize >= vocab) {
        bail!("{OP}: target {} at position {at} is out of range for a vocabulary of {vocab}", targets[at]);
    }
    let targets: Vec<Option<u32>> = targets.into_iter().map(|t| (!ignored(&t)).then_some(t)).collect();
    let valid = captured.unwrap_or_else(|| targets.iter().flatten().count());
    let divisor = match options.reduction {
        Reduction::Mean => valid.max(1),
        Reduction::Sum => 1,
    };
    let op = CrossEntropy {
        targets,
        divisor: divisor as f64,
        statistics: Kept::default(),
        on_device,
        ignored: options.ignore_index,
    };
    let logits = logits.contiguous()?;
    let loss = if logits.track_op() { logits.apply_op1(op) } else { logits.apply_op1_no_bwd(&op) }?;
    Ok((loss, valid))
}

/// Of a row: its largest logit, and the sum of `exp(logit - largest)`.
#[derive(Clone, Copy)]
struct Statistics {
    max: f32,
    sum: f32,
}

pub(super) struct CrossEntropy {
    /// `None` for a row that is ignored. Without any if they are captured in a graph.
    pub targets: Vec<Option<u32>>,
    pub divisor: f64,
    /// [`Statistics`] of each row.
    pub statistics: Kept,
    /// The targets on the logits' device, if that is a CUDA device, and the one that is ignored.
    #[allow(dead_code, reason = "read with the feature `cuda`")]
    pub on_device: Option<Tensor>,
    #[allow(dead_code, reason = "read with the feature `cuda`")]
    pub ignored: Option<u32>,
}

fn statistics(logits: &[f32], vocab: usize) -> Vec<Statistics> {
    let mut statistics = Vec::with_capacity(logits.len() / vocab);
    let mut weights = vec![0.0; vocab];
    vectorise(
        #[inline(always)]
        || {
            for row in logits.chunks_exact(vocab) {
                let max = max(row);
                for (weight, logit) in weights.iter_mut().zip(row) {
                    *weight = exp(logit - max);
                }
                let sum = sum(&weights);
                statistics.push(Statistics { max, sum });
            }
        },
    );
    statistics
}

impl CrossEntropy {
    /// Writes the gradient of the logits, every element of `out`.
    ///
    /// # Panics
    /// If the logits are no whole rows of `vocab`, or there is not a target and a statistic for each row.
    fn backward(
        &self,
        logits: &[f32],
        vocab: usize,
        statistics: &[Statistics],
        scale: f32,
        out: &mut [MaybeUninit<f32>],
    ) {
        let rows = self.targets.len();
        assert!(rows.checked_mul(vocab) == Some(logits.len()) && out.len() == logits.len(), "other logits");
        assert!(statistics.len() == rows, "a statistic for each row");
        vectorise(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact(vocab).zip(out.chunks_exact_mut(vocab));
                for (((row, out), statistics), target) in rows.zip(statistics).zip(&self.targets) {
                    let Some(target) = target else {
                        out.fill(MaybeUninit::new(0.0));
                        continue;
                    };
                    let factor = scale / statistics.sum;
                    for (out, logit) in out.iter_mut().zip(row) {
                        out.write(exp(logit - statistics.max) * factor);
                    }
                    // Recomputed rather than read back: 1 is taken away before scaling.
                    let at = *target as usize;
                    out[at].write((exp(row[at] - statistics.max) / statistics.sum - 1.0) * scale);
                }
            },
        );
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, vocab) = layout.shape().dims2()?;
        let mut total = 0f64;
        with_element!(OP, dtype(logits), T => {
            let logits = T::widen(elements(OP, logits, layout)?);
            let statistics = if vocab == 0 { Vec::new() } else { statistics(&logits, vocab) };
            for ((target, row), at) in self.targets.iter().zip(0..).zip(&statistics) {
                if let Some(target) = target {
                    let logit = logits[row * vocab + *target as usize];
                    total += f64::from(at.sum).ln() + (f64::from(at.max) - f64::from(logit));
                }
            }
            self.statistics.set(statistics);
        });
        Ok((CpuStorage::F32(vec![(total / self.divisor) as f32]), Shape::from(())))
    }

    fn cuda_fwd(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda([(logits, layout)])
    }

    fn bwd(&self, logits: &Tensor, _loss: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        if logits.device().is_cuda() {
            let [dlogits] = self.bwd_on_cuda([logits], dloss)?;
            return Ok(dlogits);
        }
        let statistics: &Vec<Statistics> = self.statistics.get(OP)?;
        let (_, vocab) = logits.dims2()?;
        let dloss: f32 = dloss.to_dtype(DType::F32)?.to_scalar()?;
        let scale = (f64::from(dloss) / self.divisor) as f32;
        let dlogits = with_element!(OP, logits.dtype(), T => with_elements::<T, _>(OP, logits, |logits| {
            if logits.is_empty() {
                return Ok(Vec::new());
            }
            let logits = T::widen(logits);
            // SAFETY: `backward` writes every element.
            Ok(unsafe { filled_by(logits.len(), |out| self.backward(&logits, vocab, statistics, scale, out)) })
        })?);
        tensor(OP, dlogits, logits.shape(), logits.dtype()).map(Some)
    }
}
