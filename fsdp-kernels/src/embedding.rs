//! Rows of a table, and its gradient.
//!
//! For the gradient [`embedding_spans`] notes where each id occurs first and last, then [`embedding_backward`] adds up the rows of each
//! id in the order of its positions.

use crate::dtype::{by_dtype, pick};
use crate::launch::{PACK, THREADS};
use crate::{Access, Args, DevicePtr, Dtype, Launch};

pub(crate) const EMBEDDING: &[&str] = by_dtype!("embedding");
pub(crate) const EMBEDDING_SPANS: &str = "fsdp_embedding_spans";
pub(crate) const EMBEDDING_BACKWARD: &[&str] = by_dtype!("embedding_backward");

/// Rows of a table of this dtype; takes [`EmbeddingArgs`].
pub fn embedding(dtype: Dtype) -> &'static str {
    pick(EMBEDDING, dtype)
}

/// `rows[p] = weight[ids[p]]`; NaN for an id that is not below `vocab`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EmbeddingArgs {
    /// u32 `[count]`.
    pub ids: DevicePtr,
    /// `[vocab, dim]`.
    pub weight: DevicePtr,
    /// `[count, dim]`, written.
    pub rows: DevicePtr,
    /// Elements of a row.
    pub dim: u64,
    /// Number of ids.
    pub count: u64,
    /// Rows of the table.
    pub vocab: u32,
}

// SAFETY: repr(C), the fields of `EmbeddingArgs` in embedding.cuh.
unsafe impl Args for EmbeddingArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        if self.dim == 0 {
            return None;
        }
        Launch::over(self.count, max_blocks)
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.ids, self.count, 4),
            Access::read(self.weight, u64::from(self.vocab).saturating_mul(self.dim), dtype.size()),
            Access::write(self.rows, self.count.saturating_mul(self.dim), dtype.size()),
        ]
    }
}

/// Where ids occur; takes [`EmbeddingSpansArgs`].
pub fn embedding_spans() -> &'static str {
    EMBEDDING_SPANS
}

/// The first and last position of each id.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EmbeddingSpansArgs {
    /// u32 `[count]`. Those not below `vocab` are passed over.
    pub ids: DevicePtr,
    /// u32 `[vocab]`, all 0 before.
    pub first: DevicePtr,
    /// u32 `[vocab]`, all 0 before.
    pub end: DevicePtr,
    /// Number of ids.
    pub count: u32,
    /// Rows of the table.
    pub vocab: u32,
}

// SAFETY: repr(C), the fields of `EmbeddingSpansArgs` in embedding.cuh.
unsafe impl Args for EmbeddingSpansArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        Launch::over(u64::from(self.count).div_ceil(THREADS.into()), max_blocks)
    }

    fn accesses(&self, _: [Dtype; 2]) -> Vec<Access> {
        vec![
            Access::read(self.ids, self.count.into(), 4),
            Access::write(self.first, self.vocab.into(), 4),
            Access::write(self.end, self.vocab.into(), 4),
        ]
    }
}

/// The gradient of the table, for rows of this dtype; takes [`EmbeddingBackwardArgs`].
pub fn embedding_backward(dtype: Dtype) -> &'static str {
    pick(EMBEDDING_BACKWARD, dtype)
}

/// `dweight[ids[p]] += drows[p]`, for `p` in order, in f32.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EmbeddingBackwardArgs {
    /// Those given to [`EmbeddingSpansArgs`].
    pub ids: DevicePtr,
    /// What [`EmbeddingSpansArgs`] wrote.
    pub first: DevicePtr,
    /// What [`EmbeddingSpansArgs`] wrote.
    pub end: DevicePtr,
    /// `[count, dim]`: the gradient of the rows that were looked up.
    pub drows: DevicePtr,
    /// f32 `[vocab, dim]`, added to.
    pub dweight: DevicePtr,
    /// Elements of a row.
    pub dim: u64,
    /// Number of ids.
    pub count: u32,
    /// Rows of the table.
    pub vocab: u32,
}

// SAFETY: repr(C), the fields of `EmbeddingBackwardArgs` in embedding.cuh.
unsafe impl Args for EmbeddingBackwardArgs {
    fn launch(&self, max_blocks: u32) -> Option<Launch> {
        let tiles = self.dim.div_ceil(u64::from(THREADS) * PACK).min(u64::from(u16::MAX)) as u32;
        if tiles == 0 {
            return None;
        }
        // Most positions have nothing to do: their block looks at one id and goes on.
        let grid = Launch::over(self.count.into(), max_blocks.div_ceil(tiles))?.grid;
        Some(Launch { grid: [grid[0], tiles], ..Launch::ONE })
    }

    fn accesses(&self, [dtype, _]: [Dtype; 2]) -> Vec<Access> {
        let (count, vocab) = (u64::from(self.count), u64::from(self.vocab));
        vec![
            Access::read(self.ids, count, 4),
            Access::read(self.first, vocab, 4),
            Access::read(self.end, vocab, 4),
            Access::read(self.drows, count.saturating_mul(self.dim), dtype.size()),
            Access::write(self.dweight, vocab.saturating_mul(self.dim), 4),
        ]
    }
}
