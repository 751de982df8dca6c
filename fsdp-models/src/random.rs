//! A hash of a key and a position, for random numbers that depend on nothing else.

/// One step of the SplitMix64 generator (Steele, Lea, Flood 2014): a bijective mixing of 64 bits.
pub(crate) fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixing_is_splitmix64() {
        // The generator's published first outputs for seed 1234567.
        let gamma = 0x9e37_79b9_7f4a_7c15u64;
        let outputs: Vec<u64> =
            (0..3).map(|i| mix(1_234_567u64.wrapping_add(gamma.wrapping_mul(i)))).collect();
        assert_eq!(
            outputs,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
