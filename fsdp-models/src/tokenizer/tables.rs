//! Settings that tokenizer files may have: those that are read, and those that are ignored.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::settings::{Kind, Known, Plain, Refusals, Setting, Table};

/// The sections of a `tokenizer.json`. What they hold is the business of the library that builds the tokenizer.
const SECTIONS: Table = Table {
    known: &[
        Known::Read(Kind::List, &["added_tokens"]),
        Known::Read(
            Kind::Map,
            &["decoder", "model", "normalizer", "padding", "post_processor", "pre_tokenizer", "truncation"],
        ),
        Known::Read(Kind::Text, &["version"]),
    ],
    off_is_unset: false,
};

/// The section of the model, whose settings the library passes over if it does not know them.
const MODEL: Table = Table {
    known: &[
        Known::Read(Kind::Bool, &["byte_fallback", "fuse_unk", "ignore_merges"]),
        Known::Read(Kind::Text, &["continuing_subword_prefix", "end_of_word_suffix", "type", "unk_token"]),
        Known::Read(Kind::Size, &["max_input_chars_per_word", "unk_id"]),
        Known::Read(Kind::List, &["merges"]),
        // A map, or a list with a score for each token.
        Known::Read(Kind::Any, &["vocab"]),
        // Merges that are left out at random: every rank would cut a text in another way.
        Known::Only("dropout", &[Plain::Number(0.0)]),
    ],
    off_is_unset: false,
};

/// Refuses a `tokenizer.json` with settings that are not known. Of a text that is none, nothing is said here.
pub(super) fn check_json(bytes: &[u8]) -> Refusals {
    #[derive(Deserialize)]
    struct Model {
        model: BTreeMap<String, Shallow>,
    }
    let mut refusals = Refusals::default();
    if let Ok(sections) = serde_json::from_slice::<BTreeMap<String, Shallow>>(bytes) {
        refusals = SECTIONS.check(sections.iter());
    }
    if let Ok(Model { model }) = serde_json::from_slice(bytes) {
        refusals.add_within("model", MODEL.check(model.iter()));
    }
    refusals
}

/// A value without what it holds: a vocabulary is large.
enum Shallow {
    Scalar(Value),
    List(usize),
    Map(usize),
}

impl<'de> Deserialize<'de> for Shallow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;

        impl<'de> Visitor<'de> for Look {
            type Value = Shallow;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_bool<E>(self, value: bool) -> Result<Shallow, E> {
                Ok(Shallow::Scalar(value.into()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Shallow, E> {
                Ok(Shallow::Scalar(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Shallow, E> {
                Ok(Shallow::Scalar(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Shallow, E> {
                Ok(Shallow::Scalar(value.into()))
            }

            fn visit_str<E>(self, value: &str) -> Result<Shallow, E> {
                Ok(Shallow::Scalar(value.into()))
            }

            fn visit_unit<E>(self) -> Result<Shallow, E> {
                Ok(Shallow::Scalar(Value::Null))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Shallow, A::Error> {
                let mut count = 0;
                while values.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Shallow::List(count))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut values: A) -> Result<Shallow, A::Error> {
                let mut count = 0;
                while values.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(Shallow::Map(count))
            }
        }

        deserializer.deserialize_any(Look)
    }
}

impl Setting for Shallow {
    fn is_unset(&self) -> bool {
        match self {
            Shallow::Scalar(value) => value.is_unset(),
            Shallow::List(count) | Shallow::Map(count) => *count == 0,
        }
    }

    fn is(&self, plain: &Plain) -> bool {
        match self {
            Shallow::Scalar(value) => value.is(plain),
            Shallow::List(_) | Shallow::Map(_) => matches!(plain, Plain::Unset) && self.is_unset(),
        }
    }

    fn misfit(&self, kind: Kind) -> Option<String> {
        let fits = match self {
            Shallow::Scalar(value) => return value.misfit(kind),
            Shallow::List(_) => matches!(kind, Kind::Any | Kind::List),
            Shallow::Map(_) => matches!(kind, Kind::Any | Kind::Map),
        };
        (!fits).then(|| format!("is {}", self.shown()))
    }

    fn shown(&self) -> String {
        match self {
            Shallow::Scalar(value) => value.shown(),
            Shallow::List(count) => format!("a list of {count}"),
            Shallow::Map(count) => format!("a map of {count}"),
        }
    }
}

/// What a `tokenizer_config.json` may say beside a `tokenizer.json`. Every switch is written there.
const CONFIG: Table = Table {
    known: &[
        Known::Read(Kind::Map, &["added_tokens_decoder"]),
        Known::Read(Kind::Token, &["bos_token", "eos_token"]),
        // What comes around a text: `tokenizer.json` says it, for `transformers` 5 too.
        Known::Ignored(&["add_bos_token", "add_eos_token"]),
        // Texts of special tokens become those tokens.
        Known::Only("split_special_tokens", &[Plain::Bool(false)]),
        // Other special tokens. Their texts are in `tokenizer.json`, else they are none.
        Known::Ignored(&[
            "additional_special_tokens",
            "audio_token",
            "cls_token",
            "extra_special_tokens",
            "image_token",
            "mask_token",
            "model_specific_special_tokens",
            "pad_token",
            "sep_token",
            "unk_token",
            "video_token",
        ]),
        // How conversations are written as text: here texts come as they are.
        Known::Ignored(&["chat_template", "response_schema", "use_default_system_prompt"]),
        // How several texts become a batch: here they are cut into windows.
        Known::Ignored(&[
            "max_length",
            "max_len",
            "model_input_names",
            "model_max_length",
            "pad_to_multiple_of",
            "pad_token_type_id",
            "padding",
            "padding_side",
            "return_token_type_ids",
            "stride",
            "truncation",
            "truncation_side",
            "truncation_strategy",
        ]),
        // How text is cut and put together again: `tokenizer.json` says it.
        Known::Ignored(&[
            "add_prefix_space",
            "clean_up_tokenization_spaces",
            "errors",
            "legacy",
            "sp_model_kwargs",
            "spaces_between_special_tokens",
            "trim_offsets",
            "vocab_size",
        ]),
        // The code and the files of others.
        Known::Ignored(&[
            "_commit_hash",
            "auto_map",
            "backend",
            "device_map",
            "from_slow",
            "is_local",
            "local_files_only",
            "name_or_path",
            "processor_class",
            "special_tokens_map_file",
            "tokenizer_class",
            "tokenizer_file",
            "transformers_version",
            "trust_remote_code",
            "use_fast",
            "vocab_file",
        ]),
    ],
    off_is_unset: true,
};

/// What a `tokenizer_config.json` says that is not known.
pub(super) fn check_config(config: &Map<String, Value>) -> Refusals {
    CONFIG.check(config.iter())
}

/// What a GGUF file may say of a tokenizer with a byte-level vocabulary.
pub(super) const GGUF: Table = Table {
    known: &[
        Known::Read(Kind::Text, &["tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"]),
        Known::Read(
            Kind::Bool,
            &[
                "tokenizer.ggml.add_bos_token",
                "tokenizer.ggml.add_eos_token",
                "tokenizer.ggml.add_space_prefix",
            ],
        ),
        Known::Read(
            Kind::Id,
            &[
                "tokenizer.ggml.bos_token_id",
                "tokenizer.ggml.eom_token_id",
                "tokenizer.ggml.eos_token_id",
                "tokenizer.ggml.eot_token_id",
                "tokenizer.ggml.padding_token_id",
                "tokenizer.ggml.unknown_token_id",
            ],
        ),
        Known::Read(
            Kind::List,
            &["tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.tokens"],
        ),
        Known::Only("tokenizer.ggml.add_sep_token", &[Plain::Bool(false)]),
        Known::Only("tokenizer.ggml.remove_extra_whitespaces", &[Plain::Bool(false)]),
        // Other special tokens, most of them for filling in the middle of a text.
        Known::Ignored(&[
            "tokenizer.ggml.cls_token_id",
            "tokenizer.ggml.fim_*",
            "tokenizer.ggml.mask_token_id",
            "tokenizer.ggml.middle_token_id",
            "tokenizer.ggml.prefix_token_id",
            "tokenizer.ggml.separator_token_id",
            "tokenizer.ggml.seperator_token_id",
            "tokenizer.ggml.suffix_token_id",
        ]),
        // A byte-level vocabulary has merges, not scores, and one type of tokens.
        Known::Ignored(&["tokenizer.ggml.scores", "tokenizer.ggml.token_type_count"]),
        // Further ways to write conversations, and the same tokenizer in Hugging Face's words.
        Known::Ignored(&[
            "tokenizer.chat_template.*",
            "tokenizer.chat_templates",
            "tokenizer.huggingface.json",
        ]),
    ],
    off_is_unset: false,
};
