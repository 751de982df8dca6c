//! Checkpoints: what is saved at one number of ranks, strategy and layout is restored at any other.

mod beside;
mod faults;
mod file_faults;
mod frozen;
mod full_state;
mod kills;
mod model;
mod power_cuts;
mod round_trips;
mod small;
mod strictness;
mod writers;
