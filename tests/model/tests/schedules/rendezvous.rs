//! How ranks meet.

use fsdp_model_check::knots::*;
use fsdp_model_check::rendezvous::*;

#[test]
fn two_ranks_meet_in_each_of_all_schedules() {
    println!("{} schedules", two_ranks_meet_in_every_schedule());
}

#[test]
fn a_failure_wakes_in_each_of_all_schedules() {
    println!("{} schedules", a_failure_wakes_in_every_schedule());
}

#[test]
fn collectives_of_two_ranks_are_exact() {
    collectives_are_exact(2, 250);
}

#[test]
fn collectives_of_three_ranks_are_exact() {
    collectives_are_exact(3, 250);
}

#[test]
fn collectives_under_way_outlive_the_ranks_code() {
    streams_outlive_the_ranks_code(250);
}

#[test]
fn a_fault_reaches_both_ranks() {
    a_fault_reaches_every_rank(2, 1000);
}

#[test]
fn a_fault_reaches_three_ranks() {
    a_fault_reaches_every_rank(3, 500);
}

#[test]
fn a_fault_beside_time_outs_reaches_all_ranks() {
    a_fault_beside_time_outs_reaches_every_rank(500);
}

#[test]
fn time_outs_end_two_ranks() {
    time_outs_end_all_ranks(2, 500);
}

#[test]
fn time_outs_end_three_ranks() {
    time_outs_end_all_ranks(3, 500);
}

#[test]
fn two_ranks_in_a_circle_fail() {
    ranks_in_a_circle_fail(2, 1000);
}

#[test]
fn three_ranks_in_a_circle_fail() {
    ranks_in_a_circle_fail(3, 500);
}

#[test]
fn groups_that_wait_around_fail() {
    groups_in_a_circle_fail(500);
}

#[test]
fn a_knot_of_two_ranks_ends_the_third() {
    a_knot_of_two_ends_the_third(500);
}

#[test]
fn long_waits_end_well() {
    long_waits_end(500);
}
