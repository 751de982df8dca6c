//! The examples as a user runs them: what they write and print, what they refuse.

#[path = "../support/mod.rs"]
mod support;

mod finetune;
mod quickstart;
mod train_llama;
