//! Checkpoints: what is saved at one number of ranks, strategy and layout is restored at any other.

mod beside;
mod faults;
mod file_faults;
mod frozen;
mod full_state;
mod fused;
mod kills;
#[cfg(target_os = "linux")]
mod limits;
mod model;
mod power_cuts;
mod round_trips;
mod small;
mod strictness;
mod writers;
