//! How rotary frequencies are scaled for sequences that are longer than those of pretraining.

use serde::Serialize;
use serde_json::{Map, Value};

use super::ConfigError;
use crate::settings::{Kind, Known, Plain, Refusals, Setting, Table};

/// A scaling of the rotary frequencies, as `rope_scaling` of a `config.json` says it.
///
/// `factor` is by how much sequences get longer, at least 1.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum RopeScaling {
    /// All frequencies are divided by the factor (position interpolation, Chen et al., 2023).
    Linear {
        /// Divides every frequency.
        factor: f64,
    },
    /// Sequences longer than `max_position_embeddings` have a larger base, which depends on their length; others are not scaled.
    /// A model has `factor` times as many positions.
    Dynamic {
        /// The base grows with `factor * length / max_position_embeddings - (factor - 1)`.
        factor: f64,
    },
    /// Frequencies that turn round fewer than `low_freq_factor` times within the sequences of pretraining are divided by the
    /// factor, those that turn round more than `high_freq_factor` times stay, those between are interpolated (Llama 3.1).
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// Turns below which a frequency is low.
        low_freq_factor: f64,
        /// Turns above which a frequency is high.
        high_freq_factor: f64,
        /// Length of the sequences of pretraining.
        original_max_position_embeddings: usize,
    },
    /// Interpolates between divided and kept frequencies by pair, and scales the tables (YaRN, Peng et al., 2023).
    Yarn {
        /// Divides the low frequencies.
        factor: f64,
        /// Turns above which a frequency stays.
        beta_fast: f64,
        /// Turns below which a frequency is divided.
        beta_slow: f64,
        /// Whether the first and last pair that are interpolated are rounded to whole ones.
        truncate: bool,
        /// Multiplies the tables; `None` for `0.1 ln(factor) + 1`.
        #[serde(skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// Length of the sequences of pretraining; `None` for `max_position_embeddings`.
        #[serde(skip_serializing_if = "Option::is_none")]
        original_max_position_embeddings: Option<usize>,
    },
}

impl RopeScaling {
    /// What the tables of cosines and sines are multiplied by.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn { attention_factor: Some(given), .. } => *given,
            RopeScaling::Yarn { factor, .. } => yarn_scale(*factor, 1.0),
            _ => 1.0,
        }
    }

    /// Checks the constants for heads of this width.
    pub(super) fn validate(&self, theta: f64, head_dim: usize) -> Result<(), ConfigError> {
        let wrong = |field, value, expected| Err(ConfigError::RopeScaling { field, value, expected });
        let (RopeScaling::Linear { factor }
        | RopeScaling::Dynamic { factor }
        | RopeScaling::Llama3 { factor, .. }
        | RopeScaling::Yarn { factor, .. }) = self;
        if !(factor.is_finite() && *factor >= 1.0) {
            return wrong("factor", *factor, "a number from 1 on");
        }
        let positive = |value: f64| value.is_finite() && value > 0.0;
        match *self {
            RopeScaling::Linear { .. } => Ok(()),
            RopeScaling::Dynamic { .. } if head_dim == 2 => {
                wrong("factor", *factor, "heads wider than 2, whose base can grow")
            }
            RopeScaling::Dynamic { .. } => Ok(()),
            RopeScaling::Llama3 {
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
                ..
            } => {
                if !positive(low) {
                    return wrong("low_freq_factor", low, "a positive number");
                }
                if !(high.is_finite() && high > low) {
                    return wrong("high_freq_factor", high, "a number above low_freq_factor");
                }
                if original == 0 {
                    return wrong("original_max_position_embeddings", 0.0, "at least 1");
                }
                Ok(())
            }
            RopeScaling::Yarn {
                beta_fast,
                beta_slow,
                attention_factor,
                original_max_position_embeddings,
                ..
            } => {
                if !positive(beta_slow) {
                    return wrong("beta_slow", beta_slow, "a positive number");
                }
                if !(beta_fast.is_finite() && beta_fast >= beta_slow) {
                    return wrong("beta_fast", beta_fast, "a number that is not below beta_slow");
                }
                if let Some(given) = attention_factor.filter(|&given| !positive(given)) {
                    return wrong("attention_factor", given, "a positive number");
                }
                if original_max_position_embeddings == Some(0) {
                    return wrong("original_max_position_embeddings", 0.0, "at least 1");
                }
                if theta <= 1.0 {
                    return wrong("rope_theta", theta, "a base above 1");
                }
                Ok(())
            }
        }
    }
}

/// The factor of the tables that YaRN proposes for sequences `factor` times as long.
fn yarn_scale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// The map of rotary parameters that counts, if there is one: as in `transformers`, the older name before the newer.
fn map(json: &Map<String, Value>) -> Option<(&'static str, &Value)> {
    let set = |name| Some((name, json.get(name).filter(|value| !value.is_unset())?));
    ["rope_scaling", "rope_parameters"].into_iter().find_map(set)
}

/// What the maps of rotary parameters say.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Rotary {
    pub theta: Option<f64>,
    pub scaling: Option<RopeScaling>,
}

/// Reads the map of rotary parameters of a `config.json`; what it says that is not known goes to `refusals`.
pub(super) fn read(json: &Map<String, Value>, refusals: &mut Refusals) -> Rotary {
    let Some((name, value)) = map(json) else {
        return Rotary::default();
    };
    let Value::Object(rope) = value else {
        refusals.only(name, &value.shown(), &[Plain::Unset]);
        return Rotary::default();
    };
    // `type` is what older files call it; where both are, the newer counts.
    let kind = ["rope_type", "type"].iter().find_map(|name| rope.get(*name).filter(|kind| !kind.is_unset()));
    let scaling = match kind.map(|kind| (kind, kind.as_str())) {
        None | Some((_, Some("default"))) => {
            refusals.add_within(name, PLAIN.check(rope.iter()));
            None
        }
        Some((_, Some("linear"))) => {
            let map = Fields { map: rope, name, refusals };
            map.read(LINEAR, |map| Some(RopeScaling::Linear { factor: map.number("factor")? }))
        }
        Some((_, Some("dynamic"))) => {
            let map = Fields { map: rope, name, refusals };
            map.read(LINEAR, |map| Some(RopeScaling::Dynamic { factor: map.number("factor")? }))
        }
        Some((_, Some("llama3"))) => Fields { map: rope, name, refusals }.read(LLAMA3, |map| {
            // Each is asked for, so that a message names all that are missing.
            let (factor, low) = (map.number("factor"), map.number("low_freq_factor"));
            let (high, original) = (
                map.number("high_freq_factor"),
                map.required("original_max_position_embeddings", Value::as_u64),
            );
            Some(RopeScaling::Llama3 {
                factor: factor?,
                low_freq_factor: low?,
                high_freq_factor: high?,
                original_max_position_embeddings: original? as usize,
            })
        }),
        Some((_, Some("yarn"))) => Fields { map: rope, name, refusals }.read(YARN, |map| {
            let factor = map.number("factor")?;
            // Of DeepSeek's files: a quotient of two such factors, whose weights are given.
            let weighed = match (map.optional("mscale"), map.optional("mscale_all_dim")) {
                (Some(one), Some(all)) if one != 0.0 && all != 0.0 => {
                    Some(yarn_scale(factor, one) / yarn_scale(factor, all))
                }
                _ => None,
            };
            Some(RopeScaling::Yarn {
                factor,
                beta_fast: map.optional("beta_fast").unwrap_or(32.0),
                beta_slow: map.optional("beta_slow").unwrap_or(1.0),
                truncate: map.map.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                attention_factor: map.optional("attention_factor").or(weighed),
                original_max_position_embeddings: map
                    .map
                    .get("original_max_position_embeddings")
                    .and_then(Value::as_u64)
                    .map(|original| original as usize),
            })
        }),
        Some((kind, _)) => {
            let known = ["default", "linear", "dynamic", "llama3", "yarn"].map(Plain::Text);
            refusals.only(name, &kind.shown(), &known);
            None
        }
    };
    Rotary { theta: rope.get("rope_theta").and_then(Value::as_f64), scaling }
}

/// A map of rotary parameters while it is read.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    name: &'static str,
    refusals: &'a mut Refusals,
}

impl Fields<'_> {
    fn read(
        mut self,
        table: Table,
        read: impl FnOnce(&mut Self) -> Option<RopeScaling>,
    ) -> Option<RopeScaling> {
        self.refusals.add_within(self.name, table.check(self.map.iter()));
        read(&mut self)
    }

    fn required<T>(&mut self, field: &str, value: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let given = self.map.get(field).filter(|value| !value.is_null());
        if given.is_none() {
            self.refusals.missing(&format!("{}.{field}", self.name));
        }
        // What is of another kind is refused already.
        given.and_then(value)
    }

    fn number(&mut self, field: &str) -> Option<f64> {
        self.required(field, Value::as_f64)
    }

    fn optional(&self, field: &str) -> Option<f64> {
        self.map.get(field).and_then(Value::as_f64)
    }
}

const KINDS: Known = Known::Read(Kind::Text, &["rope_type", "type"]);
const WHOLE: Known = Known::Only("partial_rotary_factor", &[Plain::Number(1.0)]);

/// Without scaling.
const PLAIN: Table = Table {
    known: &[
        KINDS,
        WHOLE,
        Known::Read(Kind::Number, &["rope_theta"]),
        Known::Only("factor", &[Plain::Number(1.0)]),
    ],
    off_is_unset: false,
};

/// Linear and dynamic scaling.
const LINEAR: Table = Table {
    known: &[KINDS, WHOLE, Known::Read(Kind::Number, &["factor", "rope_theta"])],
    off_is_unset: false,
};

const LLAMA3: Table = Table {
    known: &[
        KINDS,
        WHOLE,
        Known::Read(Kind::Number, &["factor", "high_freq_factor", "low_freq_factor", "rope_theta"]),
        Known::Read(Kind::Size, &["original_max_position_embeddings"]),
    ],
    off_is_unset: false,
};

const YARN: Table = Table {
    known: &[
        KINDS,
        WHOLE,
        Known::Read(
            Kind::Number,
            &[
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "factor",
                "mscale",
                "mscale_all_dim",
                "rope_theta",
            ],
        ),
        Known::Read(Kind::Size, &["original_max_position_embeddings"]),
        Known::Read(Kind::Bool, &["truncate"]),
        // Whether the model was trained on longer sequences too.
        Known::Ignored(&["finetuned"]),
    ],
    off_is_unset: false,
};
