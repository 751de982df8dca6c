//! Checkpoints: what is saved at one number of ranks, strategy and layout is restored at any other.

mod faults;
mod full_state;
mod model;
mod round_trips;
mod strictness;
