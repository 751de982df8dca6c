//! Errors of completions.

/// Why there is no completion.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// Nothing to continue.
    #[error("the prompt is empty: at least one token is needed to begin with")]
    EmptyPrompt,
    /// More than the model can look at.
    #[error("a prompt of {tokens} tokens is too long for a model of {positions} positions")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// A setting out of range.
    #[error("{setting} is {value}: it must be {expected}")]
    Setting {
        /// Which.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        expected: &'static str,
    },
    /// Nothing to choose from.
    #[error("there are no logits to choose a token by")]
    NoLogits,
    /// The model is broken.
    #[error(
        "a logit of the token after {position} others is not a number: the model's weights are not finite"
    )]
    NotANumber {
        /// Tokens before it.
        position: usize,
    },
}
