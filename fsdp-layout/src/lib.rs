//! What a parameter is and where each of its elements lives: descriptions, layouts, meshes as arithmetic, and the memory
//! that they come to.
//!
//! The lowest crate of `fsdp`. Nothing here allocates memory of a device, starts a thread or knows of a tensor library, so
//! that the compiler can evaluate a layout and a program can plan one for ranks that it does not have.
//!
//! - [`spec`]: a parameter's name, shape, group, placement; the tree that a model's type tells.
//! - [`init`]: initial values, the same for every number of ranks.
//! - [`policy`]: what is sharded, kept and rounded.
//! - [`mesh`]: ranks arranged along named dims.
//! - [`layout`]: groups, buckets, shards, at run time and in constant expressions; bytes per rank.
//! - [`brief`], [`warning`] and [`random`]: words in messages, warnings, and random numbers, for the crates above.

#![warn(missing_debug_implementations)]

pub mod brief;

pub mod warning;

pub mod random;

pub mod init;

pub mod spec;

pub mod policy;

pub mod mesh;

pub mod layout;
