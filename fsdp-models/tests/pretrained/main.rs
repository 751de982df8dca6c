//! Pretrained weights and tokenizers in files, in shards, and back.

mod fixtures;
mod gguf;
mod hostile;
mod identity;
mod indexed;
mod load;
#[cfg(unix)]
mod no_files;
mod save;
mod tokenizer;
