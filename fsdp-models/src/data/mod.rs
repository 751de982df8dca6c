//! Training data: the token ids that each rank gets in each step. The batch of all ranks together does not depend on their number.

pub mod corpus;
mod cursor;
mod permutation;
mod text;
mod tokens;

use std::ops::Range;

use candle_core::{Device, Tensor};

pub use permutation::Permutation;
pub use text::{TextDataset, TextOptions};
pub use tokens::TokenFile;

pub use crate::error::DataError;
pub use crate::run::DataCursor;

/// A source of global batches that any number of ranks can share.
///
/// What a global batch holds depends on the samples served before it alone; the world size only says who takes which
/// rows of it.
pub trait Batches: Send + Sync {
    /// Rows of a global batch.
    fn rows(&self) -> usize;

    /// Tokens of a row that are predicted: inputs and targets have this length.
    fn seq(&self) -> usize;

    /// Fails unless `steps` steps can be served after `served` samples. Called once, before training.
    ///
    /// # Errors
    /// [`DataError::NotEnoughSteps`].
    fn check_steps(&self, served: u64, steps: usize) -> Result<(), DataError>;

    /// The rows of the global batch after `served` samples that fall to `part`. Any rank may call it, in any order.
    ///
    /// # Errors
    /// `part` does not divide the batch, the samples are past the end, or the source cannot be read.
    fn batch(&self, served: u64, part: Part) -> Result<Batch, DataError>;

    /// The place after `served` samples.
    fn cursor(&self, served: u64) -> DataCursor;

    /// The samples that were served when `cursor` was taken, of this source or of one that serves the same samples in
    /// the same order. The number of rows of a batch may be another one.
    ///
    /// # Errors
    /// [`DataError::OtherData`], which says what was and what is.
    fn resume(&self, cursor: &DataCursor) -> Result<u64, DataError> {
        cursor.matches(&self.cursor(cursor.samples))
    }
}

/// Which part of a global batch: a data-parallel rank's microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Data-parallel rank, below `world`.
    pub rank: usize,
    /// Data-parallel ranks.
    pub world: usize,
    /// Microbatch of the rank, below `microbatches`.
    pub microbatch: usize,
    /// Microbatches a rank cuts its rows into.
    pub microbatches: usize,
}

impl Part {
    /// The whole global batch.
    pub const WHOLE: Part = Part { rank: 0, world: 1, microbatch: 0, microbatches: 1 };

    /// Rows of a global batch of `batch` rows: rank `r` of `W` has rows `[r*batch/W, (r+1)*batch/W)`, cut
    /// into `microbatches` consecutive pieces.
    ///
    /// # Errors
    /// [`DataError::UnevenBatch`] if the pieces would not be equal, [`DataError::NoSuchPart`] if the rank or
    /// the microbatch is out of range.
    pub fn rows(self, batch: usize) -> Result<Range<usize>, DataError> {
        let Part { rank, world, microbatch, microbatches } = self;
        if rank >= world || microbatch >= microbatches {
            return Err(DataError::NoSuchPart { rank, world, microbatch, microbatches });
        }
        match world.checked_mul(microbatches) {
            Some(parts) if batch > 0 && batch.is_multiple_of(parts) => {
                let each = batch / parts;
                let start = (rank * microbatches + microbatch) * each;
                Ok(start..start + each)
            }
            _ => Err(DataError::UnevenBatch { batch, world, microbatches }),
        }
    }
}

/// Token ids of some rows, and for each the id that follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `rows * seq` ids, row after row.
    pub inputs: Vec<u32>,
    /// `rows * seq` ids: `inputs` shifted by one token.
    pub targets: Vec<u32>,
    /// Number of rows.
    pub rows: usize,
    /// Tokens of a row.
    pub seq: usize,
}

impl Batch {
    /// An empty batch with room for `rows` rows.
    fn with_capacity(rows: usize, seq: usize) -> Self {
        let (inputs, targets) = (Vec::with_capacity(rows * seq), Vec::with_capacity(rows * seq));
        Self { inputs, targets, rows: 0, seq }
    }

    /// Appends a row of `seq + 1` ids.
    fn push_row(&mut self, ids: impl Iterator<Item = u32> + Clone) {
        self.inputs.extend(ids.clone().take(self.seq));
        self.targets.extend(ids.skip(1));
        self.rows += 1;
        debug_assert_eq!(self.targets.len(), self.rows * self.seq);
    }

    /// Number of predicted tokens.
    pub fn tokens(&self) -> usize {
        self.rows * self.seq
    }

    /// Inputs and targets as `u32` tensors of shape `[rows, seq]`.
    ///
    /// # Errors
    /// The copy to `device` failed.
    pub fn to_tensors(&self, device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
        let shape = (self.rows, self.seq);
        let inputs = Tensor::from_slice(&self.inputs, shape, device)?;
        Ok((inputs, Tensor::from_slice(&self.targets, shape, device)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_batch_tile_it_in_order() {
        for (batch, world, microbatches) in [(8, 1, 1), (8, 2, 4), (12, 3, 2), (6, 6, 1)] {
            let mut next = 0;
            for rank in 0..world {
                for microbatch in 0..microbatches {
                    let rows = Part { rank, world, microbatch, microbatches }.rows(batch).unwrap();
                    assert_eq!(rows, next..next + batch / (world * microbatches));
                    next = rows.end;
                }
            }
            assert_eq!(next, batch);
        }
    }

    #[test]
    fn an_uneven_batch_is_refused_with_its_numbers() {
        let part = Part { rank: 0, world: 3, microbatch: 0, microbatches: 2 };
        assert_eq!(
            part.rows(8).unwrap_err().to_string(),
            "a global batch of 8 rows cannot be divided among 3 ranks with 2 microbatches each: it must be a \
             positive multiple of 6; 8 rows with as many microbatches would do on 1, 2 or 4 ranks"
        );
        let message = |batch, world, microbatches| {
            Part { rank: 0, world, microbatch: 0, microbatches }.rows(batch).unwrap_err().to_string()
        };
        assert!(message(8, 3, 1).ends_with("would do on 1, 2, 4 or 8 ranks"));
        assert!(message(7, 2, 7).ends_with("would do on 1 rank"));
        assert!(message(8, 2, 3).ends_with("a positive multiple of 6"));
        assert!(
            message(5040, 11, 1)
                .ends_with("would do on 58 numbers of ranks: 1, 2, 3, 4, 5, 6, 7, 8 and 50 more")
        );
        assert!(matches!(Part::WHOLE.rows(0), Err(DataError::UnevenBatch { batch: 0, .. })));
        let huge = Part { world: usize::MAX, microbatches: 2, ..Part::WHOLE };
        assert!(matches!(huge.rows(8), Err(DataError::UnevenBatch { .. })));
    }

    #[test]
    fn a_part_out_of_range_is_refused() {
        for part in [
            Part { rank: 2, world: 2, ..Part::WHOLE },
            Part { microbatch: 1, ..Part::WHOLE },
            Part { world: 0, ..Part::WHOLE },
        ] {
            assert!(matches!(part.rows(8), Err(DataError::NoSuchPart { .. })), "{part:?}");
        }
    }

    #[test]
    fn tensors_have_rows_and_columns() {
        let mut batch = Batch::with_capacity(2, 3);
        batch.push_row([1, 2, 3, 4].into_iter());
        batch.push_row([5, 6, 7, 8].into_iter());
        assert_eq!(batch.tokens(), 6);
        let (inputs, targets) = batch.to_tensors(&Device::Cpu).unwrap();
        assert_eq!(inputs.to_vec2::<u32>().unwrap(), [[1, 2, 3], [5, 6, 7]]);
        assert_eq!(targets.to_vec2::<u32>().unwrap(), [[2, 3, 4], [6, 7, 8]]);
    }
}
