//! Tiers of checks: names, stated minutes, and how they are run one after the other.

use std::fmt::Write;
use std::time::Instant;

/// One of the checks.
pub struct Tier {
    pub name: &'static str,
    pub what: &'static str,
    /// How long it takes on 2 cores after the tiers before it.
    pub minutes: f64,
    pub run: fn() -> Result<(), String>,
}

/// What a failure does to those that come after it.
#[derive(Clone, Copy, PartialEq)]
pub enum AfterFailure {
    Stop,
    GoOn,
}

/// A line for each.
pub fn list(tiers: &[Tier]) -> String {
    let mut lines = String::new();
    for Tier { name, what, minutes, .. } in tiers {
        writeln!(lines, "    {name:13} {minutes:>4} min   {what}").expect("a string takes everything");
    }
    lines
}

/// Runs those of the names, or all, and prints the minutes of each, and a warning if all take more than `limit`.
pub fn run(tiers: Vec<Tier>, names: &[&str], after: AfterFailure, limit: f64) -> Result<(), String> {
    if let Some(name) = names.iter().find(|name| tiers.iter().all(|tier| tier.name != **name)) {
        return Err(format!("there is no `{name}`, but:\n{}", list(&tiers)));
    }
    let begun = Instant::now();
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for tier in tiers.iter().filter(|tier| names.is_empty() || names.contains(&tier.name)) {
        println!("\n== {}: {} ({} min stated)", tier.name, tier.what, tier.minutes);
        let start = Instant::now();
        let outcome = (tier.run)();
        let minutes = start.elapsed().as_secs_f64() / 60.0;
        println!(
            "== {}: {} in {minutes:.1} min",
            tier.name,
            if outcome.is_ok() { "passed" } else { "FAILED" }
        );
        done.push((tier, minutes));
        if let Err(error) = outcome {
            eprintln!("error: {}: {error}", tier.name);
            failed.push(tier.name);
            if after == AfterFailure::Stop {
                break;
            }
        }
    }
    println!("\n{}", summary(&done, begun.elapsed().as_secs_f64() / 60.0, limit));
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// The minutes of each, and a warning for each that took twice as long as stated.
fn summary(done: &[(&Tier, f64)], total: f64, limit: f64) -> String {
    let mut text = String::from("== minutes (stated)\n");
    for (tier, minutes) in done {
        writeln!(text, "    {:13} {minutes:>5.1} ({})", tier.name, tier.minutes)
            .expect("a string takes everything");
    }
    write!(text, "    {:13} {total:>5.1}", "all").expect("a string takes everything");
    for (tier, minutes) in done.iter().filter(|(tier, minutes)| *minutes > 2.0 * tier.minutes) {
        write!(
            text,
            "\nwarning: `{}` took {minutes:.1} min, more than twice the {} min that xtask/src/tiers.rs states",
            tier.name, tier.minutes
        )
        .expect("a string takes everything");
    }
    if total > limit {
        write!(text, "\nwarning: all took {total:.1} min, more than {limit} min")
            .expect("a string takes everything");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn tier(name: &'static str, run: fn() -> Result<(), String>) -> Tier {
        Tier { name, what: "nothing", minutes: 1.5, run }
    }

    fn fails() -> Result<(), String> {
        Err("as it must".into())
    }

    #[test]
    fn twice_the_stated_minutes_are_told() {
        let (slow, fast) = (tier("slow", || Ok(())), tier("fast", || Ok(())));
        let text = summary(&[(&slow, 3.1), (&fast, 2.9)], 6.0, 6.0);
        assert!(text.contains("warning: `slow` took 3.1 min, more than twice the 1.5 min"), "{text}");
        assert!(!text.contains("`fast`") && !text.contains("all took"), "{text}");
        let text = summary(&[(&fast, 2.9)], 2.9, 2.8);
        assert!(text.ends_with("warning: all took 2.9 min, more than 2.8 min"), "{text}");
    }

    #[test]
    fn names_are_chosen_and_unknown_ones_refused() {
        assert_eq!(
            run(vec![tier("bad", fails), tier("good", || Ok(()))], &["good"], AfterFailure::Stop, 1.0),
            Ok(())
        );
        let error = run(vec![tier("bad", fails)], &["worse"], AfterFailure::Stop, 1.0).unwrap_err();
        assert!(error.contains("there is no `worse`") && error.contains("bad"), "{error}");
    }

    #[test]
    fn a_failure_fails_the_whole_and_stops_it_only_if_so_said() {
        let tiers = || vec![tier("one", fails), tier("two", fails)];
        assert_eq!(run(tiers(), &[], AfterFailure::Stop, 1.0), Err("failed: one".into()));
        assert_eq!(run(tiers(), &[], AfterFailure::GoOn, 1.0), Err("failed: one, two".into()));
    }
}
