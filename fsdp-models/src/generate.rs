//! Completions of a prompt, token by token, from a sharded model.
//!
//! There is no cache of keys and values: each token evaluates the whole sequence so far. That is enough for the few tokens
//! that show how a training run is doing.

use std::cmp::Ordering;

use candle_core::{DType, Device, Tensor};
use fsdp::Fsdp;

pub use crate::error::GenerateError;
use crate::llama::Llama;
use crate::random::mix;

/// How the next token is chosen, and how many are. The same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Most tokens of a completion.
    pub max_tokens: usize,
    /// Divides the logits: below 1 the likely gets likelier. 0 takes the likeliest token always.
    pub temperature: f64,
    /// Choose among so many of the likeliest tokens; `None` for all.
    pub top_k: Option<usize>,
    /// Then among the likeliest of these whose probabilities make up this part; 1 for all.
    pub top_p: f64,
    /// Key of the choices: the same seed, prompt and model give the same completion.
    pub seed: u64,
    /// Each of them ends a completion, and is not a part of it: [`Tokenizer::ends`](crate::Tokenizer::ends).
    pub ends: Vec<u32>,
}

impl Default for Sampling {
    /// 32 tokens at temperature 0.8, of the 50 likeliest those that make up 0.95, seed 0, no end.
    fn default() -> Self {
        Sampling { max_tokens: 32, temperature: 0.8, top_k: Some(50), top_p: 0.95, seed: 0, ends: Vec::new() }
    }
}

impl Sampling {
    /// Checks the settings.
    ///
    /// # Errors
    /// The first that is out of range, with its value.
    pub fn validate(&self) -> Result<(), GenerateError> {
        let out_of_range =
            |setting, value, expected| Err(GenerateError::Setting { setting, value, expected });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return out_of_range("the temperature", self.temperature, "finite and at least 0");
        }
        if self.top_k == Some(0) {
            return out_of_range("top-k", 0.0, "at least 1");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return out_of_range("top-p", self.top_p, "above 0 and at most 1");
        }
        Ok(())
    }

    /// The token after `position` others, for its logits.
    ///
    /// Tokens of equal logits are taken in the order of their ids, and the random number depends on the seed and the
    /// position alone: the choice is the same on every rank.
    ///
    /// # Errors
    /// Settings out of range, no logits, or one that is a NaN.
    pub fn choose(&self, logits: &[f32], position: usize) -> Result<u32, GenerateError> {
        self.validate()?;
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(GenerateError::NotANumber { position });
        }
        let likelier = |&a: &u32, &b: &u32| -> Ordering {
            logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b))
        };
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        if self.temperature == 0.0 {
            return ids.into_iter().min_by(likelier).ok_or(GenerateError::NoLogits);
        }
        if let Some(k) = self.top_k.filter(|&k| k < ids.len()) {
            ids.select_nth_unstable_by(k, likelier);
            ids.truncate(k);
        }
        ids.sort_unstable_by(likelier);
        let &likeliest = ids.first().ok_or(GenerateError::NoLogits)?;
        let most = f64::from(logits[likeliest as usize]);
        let weight = |&id: &u32| ((f64::from(logits[id as usize]) - most) / self.temperature).exp();
        let mut weights: Vec<f64> = ids.iter().map(weight).collect();
        if self.top_p < 1.0 {
            let part = self.top_p * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            // The token with which the part is reached belongs to it.
            let within = weights.iter().take_while(|&&weight| {
                let before = sum;
                sum += weight;
                before < part
            });
            let kept = within.count();
            weights.truncate(kept);
        }
        let mut left = uniform(self.seed, position as u64) * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave a little of the last one's part.
        Ok(ids[chosen.unwrap_or(weights.len() - 1)])
    }
}

/// In `[0, 1)`, a function of seed and place.
fn uniform(seed: u64, place: u64) -> f64 {
    (mix(mix(seed).wrapping_add(place)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Continues `prompt`, and returns what comes after it: until `sampling` says that it is enough, or the model has no more
/// positions. Every rank must call it, with the same arguments, and gets the same tokens.
///
/// # Errors
/// An empty prompt or one longer than the model's positions, settings out of range, logits that are no numbers, and those
/// of the evaluation.
pub fn generate(model: &Fsdp<Llama>, prompt: &[u32], sampling: &Sampling) -> crate::Result<Vec<u32>> {
    sampling.validate()?;
    let positions = model.module().positions();
    if prompt.is_empty() {
        return Err(GenerateError::EmptyPrompt.into());
    }
    if prompt.len() > positions {
        return Err(GenerateError::PromptTooLong { tokens: prompt.len(), positions }.into());
    }
    let mut ids = prompt.to_vec();
    while ids.len() - prompt.len() < sampling.max_tokens && ids.len() < positions {
        let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu)?;
        let logits: Tensor = model.evaluate(&input)?;
        let last = logits.narrow(1, ids.len() - 1, 1)?.flatten_all()?.to_dtype(DType::F32)?;
        let next = sampling.choose(&last.to_vec1()?, ids.len())?;
        if sampling.ends.contains(&next) {
            break;
        }
        ids.push(next);
    }
    Ok(ids.split_off(prompt.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling =
        Sampling { max_tokens: 8, temperature: 1.0, top_k: None, top_p: 1.0, seed: 7, ends: Vec::new() };

    /// Logits of the probabilities 0.4, 0.1, 0.3, 0.2.
    fn logits() -> Vec<f32> {
        [0.4f32, 0.1, 0.3, 0.2].iter().map(|p| p.ln() + 3.0).collect()
    }

    /// How often each token is chosen.
    fn shares(sampling: &Sampling) -> [f64; 4] {
        let mut counts = [0.0; 4];
        for position in 0..20_000 {
            counts[sampling.choose(&logits(), position).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn close(found: [f64; 4], expected: [f64; 4]) {
        for (found, expected) in found.iter().zip(expected) {
            // Five standard errors; what has no probability never comes.
            assert!((found - expected).abs() <= 0.018 * (expected * 4.0).min(1.0), "{found} {expected}");
        }
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        close(shares(&PLAIN), [0.4, 0.1, 0.3, 0.2]);
        close(shares(&Sampling { seed: 8, ..PLAIN }), [0.4, 0.1, 0.3, 0.2]);
        // Squares, of sum 0.3.
        close(
            shares(&Sampling { temperature: 0.5, ..PLAIN }),
            [0.16 / 0.3, 0.01 / 0.3, 0.09 / 0.3, 0.04 / 0.3],
        );
        close(shares(&Sampling { top_k: Some(2), ..PLAIN }), [4.0 / 7.0, 0.0, 3.0 / 7.0, 0.0]);
        close(shares(&Sampling { top_p: 0.75, ..PLAIN }), [4.0 / 9.0, 0.0, 3.0 / 9.0, 2.0 / 9.0]);
        close(shares(&Sampling { top_p: 0.39, ..PLAIN }), [1.0, 0.0, 0.0, 0.0]);
        close(shares(&Sampling { top_k: Some(2), top_p: 0.5, ..PLAIN }), [1.0, 0.0, 0.0, 0.0]);
        close(shares(&Sampling { top_k: Some(99), ..PLAIN }), [0.4, 0.1, 0.3, 0.2]);
    }

    #[test]
    fn without_temperature_the_likeliest_is_chosen_and_the_first_of_equals() {
        let greedy = Sampling { temperature: 0.0, ..PLAIN };
        assert_eq!(greedy.choose(&[1.0, 5.0, -2.0, 5.0], 3), Ok(1));
        let first = Sampling { top_k: Some(1), ..PLAIN };
        assert_eq!(first.choose(&[1.0, 5.0, -2.0, 5.0], 3), Ok(1));
    }

    #[test]
    fn a_choice_depends_on_seed_and_place_alone() {
        let chosen = |seed| -> Vec<u32> {
            (0..64).map(|at| Sampling { seed, ..PLAIN }.choose(&logits(), at).unwrap()).collect()
        };
        assert_eq!(chosen(1), chosen(1));
        assert_ne!(chosen(1), chosen(2));
        assert!(chosen(1).windows(2).any(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn what_cannot_be_chosen_from_is_refused() {
        let refusal =
            |sampling: Sampling, logits: &[f32]| sampling.choose(logits, 5).unwrap_err().to_string();
        assert_eq!(
            refusal(PLAIN, &[1.0, f32::NAN]),
            "a logit of the token after 5 others is not a number: the model's weights are not finite"
        );
        assert_eq!(refusal(PLAIN, &[]), "there are no logits to choose a token by");
        assert_eq!(
            refusal(Sampling { temperature: -1.0, ..PLAIN }, &[1.0]),
            "the temperature is -1: it must be finite and at least 0"
        );
        assert_eq!(
            refusal(Sampling { top_k: Some(0), ..PLAIN }, &[1.0]),
            "top-k is 0: it must be at least 1"
        );
        assert_eq!(
            refusal(Sampling { top_p: 0.0, ..PLAIN }, &[1.0]),
            "top-p is 0: it must be above 0 and at most 1"
        );
        // An impossible token is never chosen, and one that is certain always.
        assert_eq!(PLAIN.choose(&[f32::NEG_INFINITY, 0.0], 1), Ok(1));
    }
}
