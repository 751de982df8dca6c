//! Delays for tests: a schedule that is shaken by a seed.
//!
//! A rank's threads pause for a random moment where the order among ranks or streams could matter. The pauses are
//! drawn from the seed, the rank and the number of calls, not from the clock; what the scheduler makes of
//! them differs from run to run all the same.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::rendezvous::Endpoint;

/// Where a thread may be held up.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// The rank's own thread calls a collective.
    Call,
    /// The stream has come to it.
    Arrival,
    /// All have arrived, and the rank's part of the work begins.
    Work,
    /// The work is done.
    Departure,
}

impl Endpoint {
    /// Pauses, if the world is shaken.
    pub(super) fn shake(&self, place: Place) {
        if let Some(seed) = self.world.options.shake {
            let called = self.called.load(Ordering::Relaxed);
            pause(seed, self.world.size, self.rank, [self.channel as u64, called, place as u64]);
        }
    }
}

/// A pause of up to 200 microseconds; often none.
fn pause(seed: u64, ranks: usize, rank: usize, moment: [u64; 3]) {
    if !concerns(seed, ranks, rank) {
        return;
    }
    let draw = moment.into_iter().fold(mix(seed ^ mix(rank as u64)), |draw, part| mix(draw ^ part));
    match draw % 8 {
        0..=3 => {}
        4..=5 => std::thread::yield_now(),
        _ => std::thread::sleep(Duration::from_micros((draw >> 8) % 200)),
    }
}

/// Half of the seeds hold up all ranks, the others one.
fn concerns(seed: u64, ranks: usize, rank: usize) -> bool {
    let draw = mix(seed);
    draw & 1 == 0 || (draw >> 1) % ranks as u64 == rank as u64
}

/// The finaliser of SplitMix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_holds_up_one_rank_or_all() {
        let concerned = |seed| (0..4).filter(|&rank| concerns(seed, 4, rank)).count();
        let counts: Vec<usize> = (0..100).map(concerned).collect();
        assert!(counts.iter().all(|count| [1, 4].contains(count)));
        assert!(counts.contains(&1) && counts.contains(&4));
    }
}
