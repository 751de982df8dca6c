//! Text, cut into samples. Tokens are bytes, or those of a tokenizer.

use std::path::Path;

use super::DataCursor;
use super::cursor::Fingerprint;
use super::{Batch, Batches, DataError, Part, permutation::Permutation};
use crate::product::product;
use crate::tokenizer::Tokenizer;

/// Most tokens of a global batch, with which bytes and places can still be counted.
const MAX_TOKENS: usize = 1 << 48;
use fsdp::files;

/// How text becomes batches.
#[derive(Clone, Copy, Debug)]
pub struct TextOptions {
    /// Predicted tokens of a row.
    pub seq: usize,
    /// Rows of a global batch.
    pub batch: usize,
    /// Size of the model's vocabulary: for bytes, 256 serves every text, plain ASCII needs 128.
    pub vocab: usize,
    /// Key of the order of samples.
    pub seed: u64,
}

/// Text cut into overlapping windows of `seq + 1` tokens, served in a random order that is a function of seed
/// and epoch alone.
///
/// Sample `i` is tokens `[i*seq, (i+1)*seq]`: neighbours share one token, so each token but the first is
/// predicted once an epoch; what is left at the end, less than a window, is not used. The global batch after
/// `served` samples holds samples `order[served ..]`; the order goes on with the next epoch's where one ends.
#[derive(Debug)]
pub struct TextDataset {
    tokens: Tokens,
    samples: usize,
    options: TextOptions,
    /// For the cursor.
    source: String,
}

#[derive(Debug)]
enum Tokens {
    Bytes(Vec<u8>),
    Ids(Vec<u32>),
}

impl Tokens {
    fn len(&self) -> usize {
        match self {
            Tokens::Bytes(bytes) => bytes.len(),
            Tokens::Ids(ids) => ids.len(),
        }
    }

    fn describe(&self) -> String {
        let mut hash = Fingerprint::new();
        match self {
            Tokens::Bytes(bytes) => hash.add(bytes.iter().copied()),
            Tokens::Ids(ids) => hash.add(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
        hash.describe(self.len(), self.unit())
    }

    fn unit(&self) -> &'static str {
        match self {
            Tokens::Bytes(_) => "bytes",
            Tokens::Ids(_) => "tokens",
        }
    }
}

impl TextDataset {
    /// Reads the files in the order given and joins them with a newline. A token is a byte.
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
            text.extend(files::read(path, u64::MAX)?);
        }
        Self::from_bytes(text, options)
    }

    /// Reads the files in the order given and cuts each into the tokenizer's tokens. Between two files comes the token
    /// that ends a text, if the tokenizer has one.
    ///
    /// # Errors
    /// No file, one that cannot be read or is not UTF-8, and whatever [`from_ids`](Self::from_ids) refuses.
    pub fn tokenized<P: AsRef<Path>>(
        paths: &[P],
        tokenizer: &Tokenizer,
        options: TextOptions,
    ) -> crate::Result<Self> {
        if paths.is_empty() {
            return Err(DataError::NoFiles.into());
        }
        let mut ids = Vec::new();
        for (i, path) in paths.iter().enumerate() {
            if i > 0 {
                ids.extend(tokenizer.eos());
            }
            let path = path.as_ref();
            let text = files::read_to_string(path, u64::MAX)?;
            ids.extend(tokenizer.encode(&text)?);
        }
        Ok(Self::from_ids(ids, options)?)
    }

    /// Takes the bytes as they are.
    ///
    /// # Errors
    /// A size of zero, fewer than `seq + 1` bytes, or a byte outside the vocabulary.
    pub fn from_bytes(text: Vec<u8>, options: TextOptions) -> Result<Self, DataError> {
        let outside = text.iter().position(|&byte| usize::from(byte) >= options.vocab);
        let outside = outside.map(|offset| DataError::ByteOutsideVocabulary {
            byte: text[offset],
            offset,
            vocab: options.vocab,
        });
        Self::new(Tokens::Bytes(text), options, outside)
    }

    /// Takes the ids that a tokenizer made of a text.
    ///
    /// # Errors
    /// A size of zero, fewer than `seq + 1` ids, or an id outside the vocabulary.
    pub fn from_ids(ids: Vec<u32>, options: TextOptions) -> Result<Self, DataError> {
        let outside = ids.iter().position(|&id| id as usize >= options.vocab);
        let outside = outside.map(|position| DataError::TokenOutsideVocabulary {
            id: ids[position],
            position,
            vocab: options.vocab,
        });
        Self::new(Tokens::Ids(ids), options, outside)
    }

    fn new(tokens: Tokens, options: TextOptions, outside: Option<DataError>) -> Result<Self, DataError> {
        let TextOptions { seq, batch, .. } = options;
        for (what, size) in [("the sequence length", seq), ("the global batch", batch)] {
            if size == 0 {
                return Err(DataError::Zero { what });
            }
        }
        // The last rows of an epoch and the first of the next are counted on from there.
        product("tokens in a batch", &[("rows", batch), ("length", seq)], MAX_TOKENS)?;
        if tokens.len() <= seq {
            return Err(DataError::TextTooShort { tokens: tokens.len(), unit: tokens.unit(), seq });
        }
        if let Some(outside) = outside {
            return Err(outside);
        }
        let samples = (tokens.len() - 1) / seq;
        let source = format!("a text of {}", tokens.describe());
        Ok(Self { tokens, samples, options, source })
    }

    /// Samples of one epoch.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// Tokens of the whole text, separators included.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
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
    fn check_steps(&self, _served: u64, _steps: usize) -> Result<(), DataError> {
        Ok(())
    }

    fn batch(&self, served: u64, part: Part) -> Result<Batch, DataError> {
        let TextOptions { seq, batch, seed, .. } = self.options;
        let rows = part.rows(batch)?;
        let mut taken = Batch::with_capacity(rows.len(), seq);
        for row in rows {
            let place = served + row as u64;
            let (epoch, place) = (place / self.samples as u64, place % self.samples as u64);
            let sample = Permutation::new(self.samples, seed, epoch).at(place as usize);
            let window = sample * seq..=(sample + 1) * seq;
            match &self.tokens {
                Tokens::Bytes(bytes) => taken.push_row(bytes[window].iter().map(|&byte| u32::from(byte))),
                Tokens::Ids(ids) => taken.push_row(ids[window].iter().copied()),
            }
        }
        Ok(taken)
    }

    fn cursor(&self, served: u64) -> DataCursor {
        let TextOptions { seq, seed, .. } = self.options;
        DataCursor { samples: served, seed, seq, source: self.source.clone() }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const OPTIONS: TextOptions = TextOptions { seq: 4, batch: 4, vocab: 256, seed: 3 };

    fn letters(options: TextOptions) -> TextDataset {
        TextDataset::from_bytes((b'a'..=b'z').collect(), options).unwrap()
    }

    #[test]
    fn windows_overlap_by_one_byte_and_cover_the_text_once_an_epoch() {
        let data = letters(TextOptions { batch: 3, ..OPTIONS });
        assert_eq!((data.samples(), data.tokens()), (6, 26));
        let mut windows = Vec::new();
        for served in [0, 3] {
            let batch = data.batch(served, Part::WHOLE).unwrap();
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
        for served in [0, 4, 28] {
            let whole = data.batch(served, Part::WHOLE).unwrap();
            for (world, microbatches) in [(1, 4), (2, 1), (2, 2), (4, 1)] {
                let (mut inputs, mut targets) = (Vec::new(), Vec::new());
                for rank in 0..world {
                    for microbatch in 0..microbatches {
                        let part =
                            data.batch(served, Part { rank, world, microbatch, microbatches }).unwrap();
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
        let starts = |step: u64| -> Vec<u32> {
            let batch = data.batch(4 * step, Part::WHOLE).unwrap();
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
        let batch = data.batch(0, Part { world: 4, ..Part::WHOLE }).unwrap();
        assert_eq!(batch.inputs, b"cd\na".map(u32::from));
        assert_eq!(batch.targets, b"d\nab".map(u32::from));
    }

    #[test]
    fn ids_are_served_as_bytes_are() {
        let ids = TextDataset::from_ids((97..=122).collect(), OPTIONS).unwrap();
        assert_eq!((ids.samples(), ids.tokens()), (6, 26));
        for served in [0, 5, 13] {
            let bytes = letters(OPTIONS).batch(served, Part::WHOLE).unwrap();
            assert_eq!(ids.batch(served, Part::WHOLE).unwrap(), bytes);
        }
        let message =
            |options, ids: &[u32]| TextDataset::from_ids(ids.to_vec(), options).unwrap_err().to_string();
        assert_eq!(
            message(OPTIONS, &[1, 2, 3]),
            "the text has 3 tokens: one sequence of 4 tokens and the token after it need 5"
        );
        assert_eq!(
            message(TextOptions { vocab: 9, ..OPTIONS }, &[1, 2, 3, 9, 5]),
            "token id 9 at position 3 of the text is outside the model's vocabulary of 9 ids: is this the model's tokenizer?"
        );
    }

    #[test]
    fn a_run_goes_on_at_the_very_next_sample_with_any_batch() {
        let rows = |data: &TextDataset, served, world| -> Vec<u32> {
            let part = |rank| data.batch(served, Part { rank, world, ..Part::WHOLE }).unwrap().inputs;
            (0..world).flat_map(part).collect()
        };
        let data = letters(OPTIONS);
        // Ten samples in batches of 4, 4 and 2, the last by a source of another batch and on other ranks.
        let mut cursor = data.cursor(0);
        let mut served = Vec::new();
        for batch in [4, 4, 2] {
            let data = letters(TextOptions { batch, ..OPTIONS });
            let json = serde_json::to_string(&cursor).unwrap();
            let samples = data.resume(&serde_json::from_str(&json).unwrap()).unwrap();
            served.extend(rows(&data, samples, if batch == 4 { 1 } else { 2 }));
            cursor = data.cursor(samples + batch as u64);
        }
        assert_eq!(cursor.samples, 10);
        assert_eq!(served, rows(&letters(TextOptions { batch: 10, ..OPTIONS }), 0, 1));
    }

    #[test]
    fn other_text_or_another_order_is_refused_with_what_was_and_what_is() {
        let cursor = letters(OPTIONS).cursor(8);
        let other = TextDataset::from_bytes((b'A'..=b'Z').collect(), TextOptions { seed: 4, ..OPTIONS });
        let message = other.unwrap().resume(&cursor).unwrap_err().to_string();
        let source = cursor.source.clone();
        assert!(
            message.starts_with(&format!(
                "the run is 8 samples into {source} in sequences of 4 tokens, order 3; it is given a text of 26 bytes (fnv1a "
            )),
            "{message}"
        );
        assert!(message.contains("order 4: it goes on with the same text"), "{message}");
        for options in [TextOptions { seq: 5, ..OPTIONS }, TextOptions { seed: 4, ..OPTIONS }] {
            assert!(letters(options).resume(&cursor).is_err());
        }
        assert_eq!(letters(TextOptions { batch: 9, vocab: 200, ..OPTIONS }).resume(&cursor).unwrap(), 8);
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
        let last = TextOptions { seq: usize::MAX, batch: 1, ..OPTIONS };
        assert!(
            message(last, b"abc")
                .starts_with("too many tokens in a batch: rows 1 x length 18446744073709551615,")
        );
        let rows = TextOptions { batch: 1 << 62, ..OPTIONS };
        assert_eq!(
            message(rows, b"abcdef"),
            "too many tokens in a batch: rows 4611686018427387904 x length 4, expected at most 281474976710656"
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
