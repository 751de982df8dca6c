//! The tokenizer of models whose tokens are bytes.

use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::{Tokenizer, TokenizerError};

impl Tokenizer {
    /// Every byte of a text is a token, and its id is the byte: what [`TextDataset::open`] makes of a text. 256 ids, none of
    /// them special. Saved beside a model that was trained on bytes, it lets other tools read and write text with it.
    ///
    /// [`TextDataset::open`]: crate::data::TextDataset::open
    ///
    /// ```
    /// use fsdp_models::Tokenizer;
    ///
    /// let tokenizer = Tokenizer::of_bytes()?;
    /// assert_eq!(tokenizer.encode("né")?, [110, 195, 169]);
    /// assert_eq!(tokenizer.decode(&[110, 195, 169])?, "né");
    /// # Ok::<(), fsdp_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// None that is known: the library's, if it refused its own format.
    pub fn of_bytes() -> crate::Result<Self> {
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let vocab: Map<String, Value> =
            characters().zip(0..).map(|(c, id)| (c.to_string(), json!(id))).collect();
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": bytes,
            "post_processor": null,
            "decoder": bytes,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "vocab": vocab,
                "merges": [],
            },
        });
        let path = PathBuf::from("(bytes)");
        let inner = tokenizers::Tokenizer::from_bytes(tokenizer.to_string());
        let inner = inner
            .map_err(|error| TokenizerError::Invalid { path: path.clone(), reason: error.to_string() })?;
        let mut config = Map::new();
        config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        config.insert("clean_up_tokenization_spaces".into(), json!(false));
        Ok(Tokenizer::new(path, inner, config, None, None, Vec::new()))
    }
}

/// The character that stands for each byte in vocabularies, as in GPT-2's: itself if it is visible in Latin-1, else one
/// from U+0100 on.
fn characters() -> impl Iterator<Item = char> {
    let mut others = (0x100..).filter_map(char::from_u32);
    (0..=255u8).map(move |byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        _ => others.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;
    use crate::data::{Batches, Part, TextDataset, TextOptions};

    #[test]
    fn the_characters_are_those_of_the_library() {
        let library: BTreeSet<char> = ByteLevel::alphabet().into_iter().collect();
        assert_eq!(characters().collect::<BTreeSet<_>>(), library);
        assert_eq!(characters().nth(usize::from(b' ')), Some('Ġ'));
    }

    #[test]
    fn text_survives_a_saved_tokenizer() {
        let dir = tempfile::tempdir().unwrap();
        Tokenizer::of_bytes().unwrap().save(dir.path()).unwrap();
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        let text = "a  b\n\t<s> ünï \u{1f980}\0";
        let ids = tokenizer.encode_prompt(text).unwrap();
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!((tokenizer.vocab_size(), tokenizer.eos()), (256, None));
    }

    #[test]
    fn a_text_cut_by_it_is_the_text_as_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        fs::write(&path, "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich").unwrap();
        let options = TextOptions { seq: 5, batch: 4, vocab: 256, seed: 1 };
        let cut = TextDataset::tokenized(&[&path], &Tokenizer::of_bytes().unwrap(), options).unwrap();
        let bytes = TextDataset::open(&[&path], options).unwrap();
        for served in [0, 8] {
            let batch = |data: &TextDataset| data.batch(served, Part::WHOLE).unwrap();
            assert_eq!(batch(&cut), batch(&bytes));
        }
        let message = |text: &[u8]| {
            fs::write(&path, text).unwrap();
            let cut = TextDataset::tokenized(&[&path], &Tokenizer::of_bytes().unwrap(), options);
            cut.unwrap_err().to_string()
        };
        assert!(
            message(b"\xff\xff\xff\xff\xff\xff").ends_with("it is not UTF-8: byte 0 begins no character")
        );
        assert!(message(b"short").starts_with("the text has 5 tokens: one sequence of 5 tokens"));
    }
}
