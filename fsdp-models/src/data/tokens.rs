//! Batches that were prepared before, in a safetensors file.

use std::path::Path;

use super::DataCursor;
use super::cursor::Fingerprint;
use super::{Batch, Batches, DataError, Part};
use fsdp::files::{StoredDtype, TensorFile};

/// Ids checked at a time when a file is opened.
const CHUNK: usize = 1 << 16;

/// The tensor `tokens` (I32 `[steps, rows, seq + 1]`) of a safetensors file: its rows are the samples, in their order,
/// and global batch `step` is `tokens[step]`.
///
/// Rows are read as they are asked for.
#[derive(Debug)]
pub struct TokenFile {
    file: TensorFile,
    steps: usize,
    rows: usize,
    seq: usize,
    /// For the cursor.
    source: String,
}

impl TokenFile {
    /// Opens a file and checks all its ids against the vocabulary.
    ///
    /// # Errors
    /// Not a safetensors file, no tensor `tokens`, one of another dtype or rank, or an id that is negative or
    /// not below `vocab`.
    pub fn open(path: &Path, vocab: usize) -> Result<Self, DataError> {
        let file = TensorFile::open(path)?;
        let Some(shape) = file.shape("tokens") else {
            let present = file.names().map(str::to_owned).collect();
            return Err(DataError::NoTokens { path: path.to_path_buf(), present });
        };
        let unexpected = || DataError::TokensShape {
            path: path.to_path_buf(),
            dtype: file.dtype_name("tokens").unwrap_or_default(),
            shape: shape.to_vec(),
        };
        let &[steps, rows, width] = shape else {
            return Err(unexpected());
        };
        if file.dtype("tokens") != Some(StoredDtype::I32) || steps == 0 || rows == 0 || width < 2 {
            return Err(unexpected());
        }
        let mut tokens = Self { file, steps, rows, seq: width - 1, source: String::new() };
        tokens.source = format!("a file of {}", tokens.check_ids(vocab)?);
        Ok(tokens)
    }

    /// Steps in the file.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Reads all ids and tells how many there are, and their hash.
    fn check_ids(&self, vocab: usize) -> Result<String, DataError> {
        let mut hash = Fingerprint::new();
        let width = self.seq + 1;
        let total = self.steps * self.rows * width;
        let mut ids = vec![0i32; CHUNK.min(total)];
        for start in (0..total).step_by(CHUNK) {
            let ids = &mut ids[..CHUNK.min(total - start)];
            self.file.read_range_i32("tokens", start, ids)?;
            let outside = |&id: &i32| usize::try_from(id).map_or(true, |id| id >= vocab);
            if let Some(i) = ids.iter().position(outside) {
                let place = start + i;
                return Err(DataError::IdOutsideVocabulary {
                    path: self.file.path().to_path_buf(),
                    id: ids[i],
                    step: place / (self.rows * width),
                    row: place / width % self.rows,
                    position: place % width,
                    vocab,
                });
            }
            hash.add(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        Ok(hash.describe(total, "tokens"))
    }
}

impl Batches for TokenFile {
    fn rows(&self) -> usize {
        self.rows
    }

    fn seq(&self) -> usize {
        self.seq
    }

    fn check_steps(&self, served: u64, steps: usize) -> Result<(), DataError> {
        let wanted = (served as usize).div_ceil(self.rows).saturating_add(steps);
        if wanted <= self.steps {
            return Ok(());
        }
        let path = self.file.path().to_path_buf();
        Err(DataError::NotEnoughSteps { path, available: self.steps, wanted })
    }

    fn batch(&self, served: u64, part: Part) -> Result<Batch, DataError> {
        self.check_steps(served, 1)?;
        let rows = part.rows(self.rows)?;
        let width = self.seq + 1;
        let mut ids = vec![0i32; rows.len() * width];
        self.file.read_range_i32("tokens", (served as usize + rows.start) * width, &mut ids)?;
        let mut batch = Batch::with_capacity(rows.len(), self.seq);
        for row in ids.chunks_exact(width) {
            // The file was checked when it was opened: no id is negative.
            batch.push_row(row.iter().map(|&id| id as u32));
        }
        Ok(batch)
    }

    fn cursor(&self, served: u64) -> DataCursor {
        DataCursor { samples: served, seed: 0, seq: self.seq, source: self.source.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use safetensors::tensor::TensorView;

    use safetensors::Dtype;

    use super::*;

    fn write(dir: &Path, name: &str, dtype: Dtype, shape: &[usize], ids: &[i32]) -> PathBuf {
        let path = dir.join("tokens.safetensors");
        let view = TensorView::new(dtype, shape.to_vec(), bytemuck::cast_slice(ids)).unwrap();
        safetensors::serialize_to_file([(name, view)], None, &path).unwrap();
        path
    }

    fn counted(dir: &Path) -> PathBuf {
        let ids: Vec<i32> = (0..24).collect();
        write(dir, "tokens", Dtype::I32, &[2, 4, 3], &ids)
    }

    #[test]
    fn each_part_gets_its_rows() {
        let dir = tempfile::tempdir().unwrap();
        let tokens = TokenFile::open(&counted(dir.path()), 24).unwrap();
        assert_eq!((tokens.steps(), tokens.rows(), tokens.seq()), (2, 4, 2));
        let whole = tokens.batch(0, Part::WHOLE).unwrap();
        assert_eq!(whole.inputs, [0, 1, 3, 4, 6, 7, 9, 10]);
        assert_eq!(whole.targets, [1, 2, 4, 5, 7, 8, 10, 11]);
        let part = Part { rank: 1, world: 2, microbatch: 1, microbatches: 2 };
        let last = tokens.batch(4, part).unwrap();
        assert_eq!((last.inputs, last.targets, last.rows), (vec![21, 22], vec![22, 23], 1));
    }

    #[test]
    fn a_run_goes_on_with_the_same_ids_only() {
        let dir = tempfile::tempdir().unwrap();
        let cursor = TokenFile::open(&counted(dir.path()), 24).unwrap().cursor(4);
        assert_eq!(TokenFile::open(&counted(dir.path()), 99).unwrap().resume(&cursor).unwrap(), 4);
        let ids: Vec<i32> = (1..25).collect();
        let other = write(dir.path(), "tokens", Dtype::I32, &[2, 4, 3], &ids);
        let message = TokenFile::open(&other, 99).unwrap().resume(&cursor).unwrap_err().to_string();
        assert!(message.starts_with("the run is 4 samples into a file of 24 tokens (fnv1a "), "{message}");
    }

    #[test]
    fn steps_past_the_end_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = counted(dir.path());
        let tokens = TokenFile::open(&path, 24).unwrap();
        tokens.check_steps(0, 2).unwrap();
        tokens.check_steps(4, 1).unwrap();
        let expected = format!("`{}` has tokens for 2 steps, 3 are wanted", path.display());
        assert_eq!(tokens.check_steps(4, 2).unwrap_err().to_string(), expected);
        assert_eq!(tokens.batch(8, Part::WHOLE).unwrap_err().to_string(), expected);
    }

    #[test]
    fn ids_outside_the_vocabulary_are_refused_with_their_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = counted(dir.path());
        assert_eq!(
            TokenFile::open(&path, 16).unwrap_err().to_string(),
            format!(
                "token id 16 at step 1, row 1, position 1 of `{}` is outside the vocabulary of 16 ids",
                path.display()
            )
        );
        let path = write(dir.path(), "tokens", Dtype::I32, &[1, 1, 3], &[0, 5, -1]);
        let error = TokenFile::open(&path, 16).unwrap_err();
        assert!(matches!(error, DataError::IdOutsideVocabulary { id: -1, step: 0, row: 0, position: 2, .. }));
    }

    #[test]
    fn ids_are_checked_to_the_end_of_a_long_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut ids = vec![1; 2 * CHUNK + 10];
        *ids.last_mut().unwrap() = 9;
        let path = write(dir.path(), "tokens", Dtype::I32, &[1, CHUNK + 5, 2], &ids);
        let error = TokenFile::open(&path, 9).unwrap_err();
        let DataError::IdOutsideVocabulary { id, row, position, .. } = error else { panic!("{error}") };
        assert_eq!((id, row, position), (9, CHUNK + 4, 1));
        TokenFile::open(&path, 10).unwrap();
    }

    #[test]
    fn other_tensors_are_refused_by_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), "ids", Dtype::I32, &[1, 1, 3], &[0; 3]);
        let expected = format!("`{}` has no tensor `tokens`; it has ids", path.display());
        assert_eq!(TokenFile::open(&path, 16).unwrap_err().to_string(), expected);
        for (dtype, shape, found) in [
            (Dtype::I32, vec![2, 3], "I32 [2, 3]"),
            (Dtype::F32, vec![1, 2, 3], "F32 [1, 2, 3]"),
            (Dtype::I32, vec![2, 3, 1], "I32 [2, 3, 1]"),
        ] {
            let path = write(dir.path(), "tokens", dtype, &shape, &[0; 6]);
            let message = TokenFile::open(&path, 16).unwrap_err().to_string();
            assert!(
                message.contains(&format!("is {found}: expected I32 [steps, rows, seq + 1]")),
                "{message}"
            );
        }
    }
}
