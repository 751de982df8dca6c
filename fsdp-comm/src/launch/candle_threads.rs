//! candle's pool of threads, which ranks that are threads of one process share.

use std::env;
use std::num::NonZero;
use std::sync::Once;
use std::thread::available_parallelism;

use fsdp_layout::warning::warn;

/// Tells a program once that its ranks will wait for each other. It is only told: a process that has threads cannot safely
/// change its environment.
pub(super) fn tell_of_shared_pool(ranks: usize) {
    static TOLD: Once = Once::new();
    let cores = available_parallelism().map_or(1, NonZero::get);
    let variable = |name: &str| env::var(name).ok();
    if let Some(message) = warning(ranks, cores, variable) {
        TOLD.call_once(|| warn(message));
    }
}

/// What there is to tell, if the pool has several threads and nobody has chosen that. `variable` is the environment.
fn warning(ranks: usize, cores: usize, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    // As candle reads them.
    let threads = |name| variable(name)?.parse().ok().filter(|&threads: &usize| threads > 0);
    let is_chosen = threads("CANDLE_NUM_THREADS").is_some();
    if ranks < 2 || is_chosen || threads("RAYON_NUM_THREADS").unwrap_or(cores) < 2 {
        return None;
    }
    Some(format!(
        "the {ranks} ranks are threads of one process, where candle computes element-wise ops of 65,536 elements and more on \
         one pool of threads: they wait for each other there. Set CANDLE_NUM_THREADS=1 in the environment, or first of all \
         in `main`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_told(ranks: usize, cores: usize, set: &[(&str, &str)]) -> bool {
        let variable =
            |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        let told = warning(ranks, cores, variable);
        assert!(told.iter().all(|text| text.contains("Set CANDLE_NUM_THREADS=1 in the environment")));
        told.is_some()
    }

    #[test]
    fn a_pool_of_several_threads_that_nobody_chose_is_told() {
        assert!(is_told(2, 8, &[]));
        assert!(is_told(2, 8, &[("RAYON_NUM_THREADS", "4")]));
        // candle takes neither.
        assert!(is_told(2, 8, &[("CANDLE_NUM_THREADS", "0")]));
        assert!(is_told(2, 8, &[("CANDLE_NUM_THREADS", "one")]));
        for set in [("CANDLE_NUM_THREADS", "1"), ("CANDLE_NUM_THREADS", "4"), ("RAYON_NUM_THREADS", "1")] {
            assert!(!is_told(2, 8, &[set]), "{set:?}");
        }
        assert!(!is_told(1, 8, &[]));
        assert!(!is_told(2, 1, &[]));
    }
}
