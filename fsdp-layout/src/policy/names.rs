//! Strategies by the names that other systems have for them.

use std::str::FromStr;

use super::{OuterStrategy, Strategy};

/// Every strategy by its own name first, then by the names of ZeRO (Rajbhandari et al., 2020) and of PyTorch's DDP and FSDP
/// (`ShardingStrategy`).
const STRATEGIES: [(Strategy, &[&str]); 4] = [
    (Strategy::NoShard, &["no-shard", "zero0", "ddp"]),
    (Strategy::Optim, &["optim", "zero1"]),
    (Strategy::OptimGrads, &["optim-grads", "zero2", "shard_grad_op"]),
    (Strategy::OptimGradsParams, &["optim-grads-params", "zero3", "full_shard", "fsdp"]),
];

/// The names of strategies that are two: one inside of a replica, one among replicas.
const HYBRID: [(&str, &str); 2] =
    [("hybrid-shard", "optim-grads-params"), ("hybrid-shard-zero2", "optim-grads")];

const OUTER: [(OuterStrategy, &[&str]); 2] =
    [(OuterStrategy::NoShard, &["no-shard", "zero0", "ddp"]), (OuterStrategy::Optim, &["optim", "zero1"])];

/// A name without what is written in one way or another: case, and the signs between its parts.
fn plain(name: &str) -> String {
    name.chars().filter(|c| !matches!(c, '-' | '_' | ' ')).flat_map(char::to_lowercase).collect()
}

fn find<T: Copy>(table: &[(T, &[&str])], text: &str) -> Option<T> {
    let wanted = plain(text);
    table.iter().find(|(_, names)| names.iter().any(|name| plain(name) == wanted)).map(|(value, _)| *value)
}

/// All names of a table: `one (also, so) or another (and, so)`.
fn listed<T>(table: &[(T, &[&str])]) -> String {
    let entry = |(_, names): &(T, &[&str])| format!("{} ({})", names[0], names[1..].join(", "));
    let (last, first) = table.split_last().expect("there are strategies");
    let first: Vec<String> = first.iter().map(entry).collect();
    format!("{} or {}", first.join(", "), entry(last))
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

impl Strategy {
    /// All names that are understood, for help and messages: `no-shard (zero0, ddp), optim (zero1), ..`.
    pub fn names() -> String {
        listed(&STRATEGIES)
    }
}

impl OuterStrategy {
    /// All names that are understood, for help and messages: `no-shard (zero0, ddp) or optim (zero1)`.
    pub fn names() -> String {
        listed(&OUTER)
    }
}

impl FromStr for Strategy {
    type Err = String;

    /// By its [name](Strategy::name) or another one of [`Strategy::names`], in any case and with hyphens, underscores or neither.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
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
            let expected = Strategy::names();
            format!("unknown strategy `{}`: {}expected {expected}", shown(text), meant(&STRATEGIES, text))
        })
    }
}

impl FromStr for OuterStrategy {
    type Err = String;

    /// By its [name](OuterStrategy::name) or another one of [`OuterStrategy::names`], in any case and with hyphens, underscores or
    /// neither.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        find(&OUTER, text).ok_or_else(|| {
            let expected = OuterStrategy::names();
            format!("unknown outer strategy `{}`: {}expected {expected}", shown(text), meant(&OUTER, text))
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
            ("full-shard", Strategy::OptimGradsParams),
            ("OptimGradsParams", Strategy::OptimGradsParams),
        ] {
            assert_eq!(text.parse(), Ok(strategy), "{text}");
        }
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse(), Ok(strategy));
            assert_eq!(format!("{strategy:?}").parse(), Ok(strategy));
        }
        // What is shown is understood.
        let names = Strategy::names();
        let shown: Vec<&str> =
            names.split([' ', ',', '(', ')']).filter(|name| !matches!(*name, "" | "or")).collect();
        assert_eq!(shown.len(), 12);
        assert!(shown.iter().all(|name| name.parse::<Strategy>().is_ok()), "{shown:?}");
        assert_eq!("zero1".parse(), Ok(OuterStrategy::Optim));
        assert_eq!("NO_SHARD".parse(), Ok(OuterStrategy::NoShard));
    }

    #[test]
    fn a_near_miss_is_answered_with_the_name_that_was_meant() {
        let refusal = |text: &str| text.parse::<Strategy>().unwrap_err();
        let expected = "expected no-shard (zero0, ddp), optim (zero1), optim-grads (zero2, shard_grad_op) or \
                        optim-grads-params (zero3, full_shard, fsdp)";
        assert_eq!(
            refusal("full-shards"),
            format!("unknown strategy `full-shards`: did you mean `full_shard`? {expected}")
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
        assert_eq!(
            outer,
            "unknown outer strategy `optm`: did you mean `optim`? expected no-shard (zero0, ddp) or optim (zero1)"
        );
    }
}
