//! Strategies by the names that other systems have for them.

use std::str::FromStr;

use super::{OuterStrategy, Strategy};

/// Every strategy by its own name first, then by the names of ZeRO (Rajbhandari et al., 2020), of PyTorch's DDP and FSDP
/// (`ShardingStrategy`) and of this crate's variants.
const STRATEGIES: [(Strategy, &[&str]); 4] = [
    (Strategy::NoShard, &["no-shard", "zero0", "ddp", "NoShard"]),
    (Strategy::Optim, &["optim", "zero1", "Optim"]),
    (Strategy::OptimGrads, &["optim-grads", "zero2", "shard-grad-op", "OptimGrads"]),
    (Strategy::OptimGradsParams, &["optim-grads-params", "zero3", "full-shard", "fsdp", "OptimGradsParams"]),
];

/// The names of strategies that are two: one inside of a replica, one among replicas.
const HYBRID: [(&str, &str); 2] =
    [("hybrid-shard", "optim-grads-params"), ("hybrid-shard-zero2", "optim-grads")];

const OUTER: [(OuterStrategy, &[&str]); 2] = [
    (OuterStrategy::NoShard, &["no-shard", "zero0", "ddp", "NoShard"]),
    (OuterStrategy::Optim, &["optim", "zero1", "Optim"]),
];

/// A name without what is written in one way or another: case, and the signs between its parts.
fn plain(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '-' | '_' | ' ')).flat_map(char::to_lowercase).collect()
}

fn find<T: Copy>(table: &[(T, &[&str])], text: &str) -> Option<T> {
    let wanted = plain(text);
    table.iter().find(|(_, names)| names.iter().any(|name| plain(name) == wanted)).map(|(value, _)| *value)
}

/// A question after a name that is nearly a known one.
fn meant<T>(table: &[(T, &[&str])], text: &str) -> String {
    let wanted = plain(text);
    let names = table.iter().flat_map(|(_, names)| names.iter());
    let near =
        names.map(|name| (distance(&plain(name), &wanted), name)).min_by_key(|(distance, _)| *distance);
    match near {
        Some((distance, name)) if distance <= 2 && wanted.len() > 3 => format!("did you mean `{name}`? "),
        _ => String::new(),
    }
}

/// Letters to be changed, put in or left out to make one of the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn shown(text: &str) -> String {
    crate::brief::brief(text)
}

impl FromStr for Strategy {
    type Err = String;

    /// By its [name](Strategy::name), or as `zero0` to `zero3`, `ddp`, `full-shard` and `shard-grad-op`, in any case and with
    /// hyphens or underscores.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected =
            "expected no-shard, optim, optim-grads or optim-grads-params, which are zero0 to zero3";
        let hybrid = plain(text);
        let hybrid = hybrid
            .strip_prefix("hsdp")
            .map_or(hybrid.as_str(), |rest| if rest.is_empty() { "hybridshard" } else { rest });
        if let Some((_, inner)) = HYBRID.iter().find(|(name, _)| plain(name) == hybrid) {
            return Err(format!(
                "`{}` is the strategy `{inner}` with several replicas: say both",
                shown(text)
            ));
        }
        find(&STRATEGIES, text).ok_or_else(|| {
            format!("unknown strategy `{}`: {}{expected}", shown(text), meant(&STRATEGIES, text))
        })
    }
}

impl FromStr for OuterStrategy {
    type Err = String;

    /// By its [name](OuterStrategy::name), or as `zero0` or `zero1`, in any case and with hyphens or underscores.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        find(&OUTER, text).ok_or_else(|| {
            format!(
                "unknown outer strategy `{}`: {}expected no-shard or optim",
                shown(text),
                meant(&OUTER, text)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strategy_has_its_names_in_other_systems() {
        for (text, strategy) in [
            ("no-shard", Strategy::NoShard),
            ("zero0", Strategy::NoShard),
            ("DDP", Strategy::NoShard),
            ("NO_SHARD", Strategy::NoShard),
            ("zero-1", Strategy::Optim),
            ("optim", Strategy::Optim),
            ("zero_2", Strategy::OptimGrads),
            ("SHARD_GRAD_OP", Strategy::OptimGrads),
            ("optim_grads", Strategy::OptimGrads),
            ("zero3", Strategy::OptimGradsParams),
            ("ZeRO-3", Strategy::OptimGradsParams),
            ("full_shard", Strategy::OptimGradsParams),
            ("OptimGradsParams", Strategy::OptimGradsParams),
        ] {
            assert_eq!(text.parse(), Ok(strategy), "{text}");
        }
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse(), Ok(strategy));
        }
        assert_eq!("zero1".parse(), Ok(OuterStrategy::Optim));
        assert_eq!("NO_SHARD".parse(), Ok(OuterStrategy::NoShard));
    }

    #[test]
    fn a_near_miss_is_answered_with_the_name_that_was_meant() {
        let refusal = |text: &str| text.parse::<Strategy>().unwrap_err();
        let expected =
            "expected no-shard, optim, optim-grads or optim-grads-params, which are zero0 to zero3";
        assert_eq!(
            refusal("full-shards"),
            format!("unknown strategy `full-shards`: did you mean `full-shard`? {expected}")
        );
        assert_eq!(
            refusal("optim-grad"),
            format!("unknown strategy `optim-grad`: did you mean `optim-grads`? {expected}")
        );
        assert_eq!(refusal("sharded"), format!("unknown strategy `sharded`: {expected}"));
        assert_eq!(
            refusal("HYBRID_SHARD"),
            "`HYBRID_SHARD` is the strategy `optim-grads-params` with several replicas: say both"
        );
        assert_eq!(
            refusal("hsdp"),
            "`hsdp` is the strategy `optim-grads-params` with several replicas: say both"
        );
        assert!(refusal(&"z".repeat(100_000)).len() < 400);
        let outer = "optm".parse::<OuterStrategy>().unwrap_err();
        assert_eq!(outer, "unknown outer strategy `optm`: did you mean `optim`? expected no-shard or optim");
    }
}
