//! What ranks in threads promise: exact sums, and an error on every rank where anything goes wrong.

mod collectives;
mod failures;
mod groups;
mod slices;

use fsdp_comm::launch::local;

use slices::{slice, tag, values};

/// The tests that ranks in processes pass too (`tcp_communicator`): here each one is a test.
macro_rules! on_ranks {
    ($($name:ident,)*) => {
        mod tests {
            $(
                #[test]
                fn $name() {
                    super::$name();
                }
            )*
        }
    };
}
use on_ranks;
