//! What kernels say that they touch is what they touch, and each of their barriers is needed.

use fsdp_kernels::host::{self, HostError};
use fsdp_kernels::{Access, FAMILIES, Kernel};

use crate::catalogue::{Case, cases};

#[test]
fn the_catalogue_has_every_kernel() {
    let mut listed: Vec<&str> = cases(None).iter().map(|case| case.kernel.name()).collect();
    listed.sort();
    listed.dedup();
    let mut all: Vec<&str> = FAMILIES.iter().flat_map(|family| family.kernels).copied().collect();
    all.sort();
    assert_eq!(listed, all);
}

#[test]
fn structs_have_the_sizes_of_the_text() {
    let built = host::kernels();
    for kernel in Kernel::all() {
        assert!(built.contains(&(kernel.name().into(), kernel.args_size())), "{kernel:?}");
    }
}

/// Each buffer in turn: packs may be used only where all addresses allow.
#[test]
fn any_buffer_may_be_misaligned() {
    let most = cases(None).iter().map(Case::buffers).max();
    for index in 0..most.expect("there are cases") {
        for case in cases(Some(index)).iter().filter(|case| index < case.buffers()) {
            assert_eq!(case.run(&case.accesses()), Ok(()), "buffer {index}");
        }
    }
}

/// A launch with one thing changed about its memory must end at what touches it.
#[test]
fn memory_is_declared_to_the_last_byte_and_no_further() {
    for case in cases(None) {
        let memory = case.accesses();
        assert_eq!(case.run(&memory), Ok(()));
        for index in 0..memory.len() {
            let Access { begin, bytes, writes } = memory[index];
            let mut changes = vec![
                Access { begin, bytes: bytes - 2, writes },
                Access { begin: begin + 2, bytes: bytes - 2, writes },
            ];
            if writes {
                changes.push(Access { begin, bytes, writes: false });
            }
            for change in changes {
                let mut changed = memory.clone();
                changed[index] = change;
                let result = case.run(&changed);
                let found = matches!(&result, Err(HostError::Fault(_)));
                assert!(found, "{}: {change:x?} for {:x?} is enough", case.kernel.name(), memory[index]);
            }
        }
    }
}

/// The mutation test of all `__syncthreads()`: without any one of them some launch is seen to race.
#[test]
fn every_barrier_is_needed() {
    let cases = cases(None);
    for case in &cases {
        assert_eq!(case.run(&case.accesses()), Ok(()));
    }
    let barriers = host::barriers();
    // Those of block_sum, team_softmax, column_sums and embedding_backward.
    assert_eq!(barriers.len(), 8, "{barriers:?}");
    for (index, barrier) in barriers.iter().enumerate() {
        let found = cases.iter().find_map(|case| {
            host::without_barrier(index, || case.run(&case.accesses())).err().map(|error| error.to_string())
        });
        let message = found.unwrap_or_else(|| panic!("nothing fails without the barrier at {barrier}"));
        assert!(message.contains("race") || message.contains("before it is written"), "{barrier}: {message}");
    }
}
