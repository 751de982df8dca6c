//! Waits that can never end: ranks that wait for each other, or for one that has returned.
//!
//! A rank is *at rest* when none of its threads runs ([`Activity`]): it goes on only when a collective that it waits in
//! comes about, for which ranks are missing. Ranks at rest of which each one's every collective lacks one of the same ranks
//! are a *knot*: none of them can be the first to go on. The last rank to come to rest finds it, under the world's lock,
//! at which also every collective comes about, so that what it sees is how things are. Ranks of which not all threads are
//! known are never part of one; for them there is the time-out.

use std::collections::VecDeque;
use std::fmt::Write;

use super::world::{Cause, LocalWorld, State, returned_early};
use crate::device::Activity;

/// A question that is nearly always the answer.
pub(super) const HINT: &str = "was something called on one rank only?";

impl LocalWorld {
    /// `rank` has come to rest: the world fails if that means that ranks wait without end.
    pub(super) fn comes_to_rest(&self, state: &mut State, rank: usize) {
        if state.failure.is_some() {
            return;
        }
        if let Some(stuck) = state.knot(rank) {
            let (culprit, cause, message) = state.describe(rank, &stuck);
            state.fail(self, culprit, cause, message);
        }
    }
}

impl State {
    /// Which ranks can never go on, `rank` among them, if it is so and one of them waits.
    fn knot(&self, rank: usize) -> Option<Vec<bool>> {
        let at_rest = |activity: &std::sync::Arc<Activity>| activity.is_at_rest();
        let mut stuck: Vec<bool> =
            self.ranks.iter().map(|rank| rank.activity.as_ref().is_some_and(at_rest)).collect();
        // Whoever waits for no one of them can go on, and then perhaps those that wait for it.
        let mut changed = true;
        while changed && stuck[rank] {
            changed = false;
            for other in 0..stuck.len() {
                let can_come_about = |channel: &usize| !self.absent(*channel).any(|absent| stuck[absent]);
                if stuck[other] && self.ranks[other].assembling.iter().any(can_come_about) {
                    stuck[other] = false;
                    changed = true;
                }
            }
        }
        let waits = |other: usize| stuck[other] && !self.ranks[other].assembling.is_empty();
        (stuck[rank] && (0..stuck.len()).any(waits)).then_some(stuck)
    }

    /// World ranks that have not arrived in the collective that is assembling.
    fn absent(&self, channel: usize) -> impl Iterator<Item = usize> {
        let this = &self.channels[channel];
        let ranks = this.members.iter().zip(&this.arrived);
        ranks.filter(|(_, arrival)| arrival.is_none()).map(|(rank, _)| *rank)
    }

    /// Words for a knot that `rank` has closed, who is to blame, and how.
    fn describe(&self, rank: usize, stuck: &[bool]) -> (usize, Cause, String) {
        let all = (0..stuck.len()).filter(|rank| stuck[*rank]);
        let waits =
            all.flat_map(|rank| self.ranks[rank].assembling.iter().map(move |channel| (rank, *channel)));
        let gone = waits.clone().find_map(|(waiter, channel)| {
            let gone = self.absent(channel).find(|rank| self.ranks[*rank].returned)?;
            let index = self.channels[channel].members.iter().position(|member| *member == waiter)?;
            Some((gone, waiter, &self.channels[channel].arrived[index].as_ref()?.call))
        });
        if let Some((gone, waiter, call)) = gone {
            let message = returned_early(self, gone, waiter, call);
            return (gone, Cause::RankFailed { failed: gone }, message);
        }
        let circles = waits.map(|(_, channel)| self.circle(channel, stuck));
        let circle = circles.filter(|circle| !circle.is_empty()).min_by_key(Vec::len).unwrap_or_default();
        let mut text = "the ranks wait for each other: ".to_owned();
        for channel in circle.iter().take(SHOWN) {
            let (arrived, absent) =
                (self.channels[*channel].ranks(true), self.channels[*channel].ranks(false));
            let call = self.channels[*channel].arrived.iter().flatten().next();
            let call = call.map(|arrival| arrival.call.to_string()).unwrap_or_default();
            let verb = if arrived.len() == 1 { "waits" } else { "wait" };
            let _ = write!(text, "{} {verb} in {call} for {}; ", named(&arrived), named(&absent));
        }
        if circle.len() > SHOWN {
            let _ = write!(text, "and {} more waits; ", circle.len() - SHOWN);
        }
        (rank, Cause::Diverged, text + HINT)
    }

    /// The shortest way from `channel` over those who are missing there, and where they wait themselves, back to it:
    /// the channels on it.
    fn circle(&self, channel: usize, stuck: &[bool]) -> Vec<usize> {
        let mut from = vec![None; self.channels.len()];
        let mut queue = VecDeque::from([channel]);
        while let Some(at) = queue.pop_front() {
            let absent = self.absent(at).filter(|rank| stuck[*rank]);
            for &next in absent.flat_map(|rank| &self.ranks[rank].assembling) {
                if next == channel {
                    let mut circle = vec![at];
                    while let Some(before) = circle.last().and_then(|last| from[*last]) {
                        circle.push(before);
                    }
                    circle.reverse();
                    return circle;
                }
                if from[next].is_none() {
                    from[next] = Some(at);
                    queue.push_back(next);
                }
            }
        }
        Vec::new()
    }
}

/// Waits of a message.
const SHOWN: usize = 3;

/// `rank 1`, or `ranks [0, 2]`.
fn named(ranks: &[usize]) -> String {
    const SHOWN: usize = 8;
    match ranks {
        [rank] => format!("rank {rank}"),
        _ if ranks.len() > SHOWN => format!("ranks {:?} and {} more", &ranks[..SHOWN], ranks.len() - SHOWN),
        _ => format!("ranks {ranks:?}"),
    }
}
