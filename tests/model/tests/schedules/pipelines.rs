//! The pipelines, driven as the engine drives them.

use fsdp_model_check::pipelines::{fail_together, train};

#[test]
fn two_ranks_train() {
    train(2, 1, 250);
}

#[test]
fn two_outer_ranks_train() {
    train(1, 2, 125);
}

#[test]
fn two_by_two_ranks_train() {
    train(2, 2, 62);
}

#[test]
fn four_ranks_train() {
    train(4, 1, 62);
}

#[test]
fn a_rank_that_fails_ends_the_other() {
    fail_together(125);
}
