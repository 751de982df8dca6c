//! Byte-level text: a token is a byte.

use std::{fs, path::Path};

use super::{Batch, Batches, DataError, Part, permutation::Permutation};
use fsdp::files::FileError;

/// How text becomes batches.
#[derive(Clone, Copy, Debug)]
pub struct TextOptions {
    /// Predicted tokens of a row.
    pub seq: usize,
    /// Rows of a global batch.
    pub batch: usize,
    /// Size of the model's vocabulary: 256 serves every text, plain ASCII needs 128.
    pub vocab: usize,
    /// Key of the order of samples.
    pub seed: u64,
}

/// Text cut into overlapping windows of `seq + 1` bytes, served in a random order that is a function of seed
/// and epoch alone.
///
/// Sample `i` is bytes `[i*seq, (i+1)*seq]`: neighbours share one byte, so each byte but the first is
/// predicted once an epoch; what is left at the end, less than a window, is not used. Global batch `step`
/// holds samples `order[step*batch ..]`; the order goes on with the next epoch's where one ends.
#[derive(Debug)]
pub struct TextDataset {
    text: Vec<u8>,
    samples: usize,
    options: TextOptions,
}

impl TextDataset {
    /// Reads the files in the order given and joins them with a newline.
    ///
    /// # Errors
    /// No file, one that cannot be read, and whatever [`from_bytes`](Self::from_bytes) refuses.
    pub fn open<P: AsRef<Path>>(paths: &[P], options: TextOptions) -> Result<Self, DataError> {
        if paths.is_empty() {
            return Err(DataError::NoFiles);
        }
        let mut text = Vec::new();
        for (i, path) in paths.iter().enumerate() {
            if i > 0 {
                text.push(b'\n');
            }
            let path = path.as_ref();
            text.extend(fs::read(path).map_err(FileError::on("read", path))?);
        }
        Self::from_bytes(text, options)
    }

    /// Takes the bytes as they are.
    ///
    /// # Errors
    /// A size of zero, fewer than `seq + 1` bytes, or a byte outside the vocabulary.
    pub fn from_bytes(text: Vec<u8>, options: TextOptions) -> Result<Self, DataError> {
        let TextOptions { seq, batch, vocab, .. } = options;
        for (what, size) in [("the sequence length", seq), ("the global batch", batch)] {
            if size == 0 {
                return Err(DataError::Zero { what });
            }
        }
        if text.len() <= seq {
            return Err(DataError::TextTooShort { bytes: text.len(), seq });
        }
        if let Some(offset) = text.iter().position(|&byte| usize::from(byte) >= vocab) {
            return Err(DataError::ByteOutsideVocabulary { byte: text[offset], offset, vocab });
        }
        let samples = (text.len() - 1) / seq;
        Ok(Self { text, samples, options })
    }

    /// Samples of one epoch.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Bytes of the whole text, separators included.
    pub fn bytes(&self) -> usize {
        self.text.len()
    }
}

impl Batches for TextDataset {
    fn rows(&self) -> usize {
        self.options.batch
    }

    fn seq(&self) -> usize {
        self.options.seq
    }

    /// Always succeeds: epochs follow one another without end.
    fn check_steps(&self, _steps: usize) -> Result<(), DataError> {
        Ok(())
    }

    fn batch(&self, step: usize, part: Part) -> Result<Batch, DataError> {
        let TextOptions { seq, batch, seed, .. } = self.options;
        let rows = part.rows(batch)?;
        let mut taken = Batch::with_capacity(rows.len(), seq);
        for row in rows {
            let served = step as u64 * batch as u64 + row as u64;
            let (epoch, place) = (served / self.samples as u64, served % self.samples as u64);
            let sample = Permutation::new(self.samples, seed, epoch).at(place as usize);
            let window = &self.text[sample * seq..][..=seq];
            taken.push_row(window.iter().map(|&byte| u32::from(byte)));
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: TextOptions = TextOptions { seq: 4, batch: 4, vocab: 256, seed: 3 };

    fn letters(options: TextOptions) -> TextDataset {
        TextDataset::from_bytes((b'a'..=b'z').collect(), options).unwrap()
    }

    #[test]
    fn windows_overlap_by_one_byte_and_cover_the_text_once_an_epoch() {
        let data = letters(TextOptions { batch: 3, ..OPTIONS });
        assert_eq!((data.samples(), data.bytes()), (6, 26));
        let mut windows = Vec::new();
        for step in 0..2 {
            let batch = data.batch(step, Part::WHOLE).unwrap();
            for (inputs, targets) in batch.inputs.chunks(4).zip(batch.targets.chunks(4)) {
                assert_eq!(inputs[1..], targets[..3]);
                windows.push((inputs[0], targets[3]));
            }
        }
        windows.sort_unstable();
        let expected: Vec<(u32, u32)> = (0..6).map(|i| (97 + 4 * i, 97 + 4 * i + 4)).collect();
        assert_eq!(windows, expected);
    }

    #[test]
    fn the_parts_of_every_world_size_concatenate_to_the_same_batch() {
        let data = letters(OPTIONS);
        for step in [0, 1, 7] {
            let whole = data.batch(step, Part::WHOLE).unwrap();
            for (world, microbatches) in [(1, 4), (2, 1), (2, 2), (4, 1)] {
                let (mut inputs, mut targets) = (Vec::new(), Vec::new());
                for rank in 0..world {
                    for microbatch in 0..microbatches {
                        let part = data.batch(step, Part { rank, world, microbatch, microbatches }).unwrap();
                        assert_eq!((part.rows, part.seq), (4 / (world * microbatches), 4));
                        inputs.extend(part.inputs);
                        targets.extend(part.targets);
                    }
                }
                assert_eq!((inputs, targets), (whole.inputs.clone(), whole.targets.clone()));
            }
        }
    }

    #[test]
    fn a_batch_goes_on_into_the_next_epoch() {
        // 6 samples, batches of 4: the second batch ends epoch 0 and begins epoch 1.
        let data = letters(OPTIONS);
        let starts = |step: usize| -> Vec<u32> {
            let batch = data.batch(step, Part::WHOLE).unwrap();
            batch.inputs.iter().step_by(4).map(|id| (id - 97) / 4).collect()
        };
        let served: Vec<u32> = (0..3).flat_map(starts).collect();
        for (epoch, samples) in served.chunks(6).enumerate() {
            let order = Permutation::new(6, 3, epoch as u64);
            let expected: Vec<u32> = (0..6).map(|i| order.at(i) as u32).collect();
            assert_eq!(samples, expected);
        }
    }

    #[test]
    fn a_batch_larger_than_an_epoch_is_served() {
        let data = letters(TextOptions { batch: 16, ..OPTIONS });
        assert_eq!(data.batch(0, Part::WHOLE).unwrap().tokens(), 64);
    }

    #[test]
    fn files_are_joined_in_order_with_a_newline() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (dir.path().join("one"), dir.path().join("two"));
        fs::write(&one, "ab").unwrap();
        fs::write(&two, "cd").unwrap();
        let data = TextDataset::open(&[&two, &one], OPTIONS).unwrap();
        assert_eq!(data.text, b"cd\nab");
        let batch = data.batch(0, Part { world: 4, ..Part::WHOLE }).unwrap();
        assert_eq!(batch.inputs, b"cd\na".map(u32::from));
        assert_eq!(batch.targets, b"d\nab".map(u32::from));
    }

    #[test]
    fn bad_input_is_refused_with_its_numbers() {
        let message =
            |options, text: &[u8]| TextDataset::from_bytes(text.to_vec(), options).unwrap_err().to_string();
        assert_eq!(
            message(OPTIONS, b"abcd"),
            "the text has 4 bytes: one sequence of 4 tokens and the token after it need 5"
        );
        assert_eq!(
            message(TextOptions { vocab: 100, ..OPTIONS }, b"abczef"),
            "byte 122 at offset 3 of the text is outside the vocabulary of 100 ids"
        );
        assert_eq!(
            message(TextOptions { seq: 0, ..OPTIONS }, b"abc"),
            "the sequence length is 0: it must be at least 1"
        );
        assert_eq!(
            message(TextOptions { batch: 0, ..OPTIONS }, b"abc"),
            "the global batch is 0: it must be at least 1"
        );
        let none: [&Path; 0] = [];
        assert!(matches!(TextDataset::open(&none, OPTIONS), Err(DataError::NoFiles)));
        let dir = tempfile::tempdir().unwrap();
        let absent = dir.path().join("absent.txt");
        let message = TextDataset::open(&[&absent], OPTIONS).unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot read `{}`: ", absent.display())), "{message}");
        let uneven = letters(OPTIONS).batch(0, Part { world: 3, ..Part::WHOLE });
        assert!(matches!(uneven, Err(DataError::UnevenBatch { batch: 4, world: 3, microbatches: 1 })));
    }
}
