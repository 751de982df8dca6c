//! The examples as a user runs them: what they write and print, what they refuse.

mod example;
mod finetune;
#[cfg(unix)]
mod launch;
mod quickstart;
mod train_llama;
