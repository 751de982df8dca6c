//! Checkpoints: what is saved at one number of ranks, strategy and layout is restored at any other.

mod agreement;
mod beside;
mod damaged;
mod described;
mod faults;
mod file_faults;
mod frozen;
mod full_state;
mod fused;
mod kills;
#[cfg(target_os = "linux")]
mod limits;
mod live;
mod model;
mod power_cuts;
mod resumed;
mod round_trips;
mod slow_disks;
mod small;
mod strictness;
mod writers;
