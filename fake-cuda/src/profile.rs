//! What a profiler learns of a program.

use crate::library::{PATH, control};
use crate::session::read_text;

/// The path for `NVTX_INJECTION64_PATH`, by which the driver attaches to NVTX as a profiler. Set before the first range.
pub const PROFILER: &str = PATH;

/// The ranges that were pushed since the profiler attached, a line each: `LANE: MESSAGE`, indented by their depth in their
/// thread. The last line is the domain's name and how many ranges have not ended. None if it has not attached.
pub fn ranges() -> Vec<String> {
    read_text(control().profile).lines().map(str::to_owned).collect()
}
