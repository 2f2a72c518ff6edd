//! Which server is the primary, and whether there is none.
//!
//! All hosts are probed side by side, again and again. A round of answers comes in, a [`Finding`] goes out:
//!
//! - A server that takes writes and is of our system is a candidate; of several the highest timeline wins. One whose timeline
//!   is lower than the highest ever seen is never chosen: it is an old primary that does not know that it is one no more.
//! - Of two different servers with equal timelines the one that we are on stays. Another is taken only when ours has not taken
//!   writes for [`DETECTION`]. Two that take writes at once are reported either way.
//! - A server of another system is taken only when none of ours takes writes and the last one has not for [`DETECTION`]: it may
//!   be ours after `pg_upgrade`. The database itself then holds its gate until a person has accepted it.
//!
//! - A server of a lower timeline is taken only if a person has said so, in its own database ([`Facts::instead_of`]). Then those in
//!   whose place it is, which do not show that word, are not taken any more.
//!
//! **Proof that there is no primary.** The last one is silent, refuses, or is a standby now; every other host is a standby of the
//! present epoch, knows this worker by a beat at most two behind the last confirmed one, and has for longer than [`SWEEP_GAP`]
//! received nothing and shown the same time of the last sweep. Were there a primary with workers, it would be swept each second. Should one appear, the gap in its sweeps is
//! over that length, so it recovers nothing and every lease starts anew; and a promoted standby holds its gate for a whole lease of
//! each worker that it knows. So leases can be trusted from the sending of that round on, as from a confirmed beat.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::Beat;
use crate::lease::limits::SWEEP_GAP;
use crate::time::Mono;

/// For so long a primary that does not answer is not given up for another one of equal rank.
pub const DETECTION: Duration = Duration::from_secs(3);
/// A standby that shows a beat further behind than this does not know this worker well enough.
const BEHIND: i64 = 2;

/// What one probe of one host found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// No connection, no answer in time, or a server that starts, stops or refuses.
    Away,
    /// It takes writes.
    Primary(Facts),
    /// It is in recovery.
    Standby(Facts),
    /// It is no standby and takes no writes: `default_transaction_read_only` is on.
    ReadOnly,
}

/// What a server says of itself. Each of the first three is `None` where it does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The system identifier: the same for a primary and all its standbys.
    pub system: Option<i64>,
    /// Rises by one at each promotion. Standbys do not tell.
    pub timeline: Option<i32>,
    /// When the server was started, in microseconds of its own clock: tells two servers apart.
    pub started: Option<i64>,
    /// The last beat of this worker that it shows.
    pub beat: Option<Beat>,
    /// When it was last swept, in microseconds of the primary's clock. Only compared for equality.
    pub swept_at: Option<i64>,
    /// How much WAL a standby has received, replayed or not. Only compared for equality.
    pub received: Option<i64>,
    /// The number of the epoch that it shows.
    pub epoch_no: i64,
    /// A person has said that it is used in place of a server with a timeline up to this one.
    pub instead_of: Option<i32>,
    /// Which installation of tenure its database is.
    pub installation: Option<Uuid>,
}

/// What was seen so far, kept from one process to the next. Each part is `None` until a server has told it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The system identifier.
    pub system: Option<i64>,
    /// Its highest timeline.
    pub timeline: Option<i32>,
    /// What persons have said about timelines up to this one ([`Facts::instead_of`]) has been followed, and means nothing any more.
    pub followed: Option<i32>,
    /// The installation.
    pub installation: Option<Uuid>,
}

impl Seen {
    /// The timeline that a person has to name, so that a server is used in place of all that were seen.
    #[must_use]
    pub fn to_replace(&self) -> Option<i32> {
        self.timeline
            .max(self.followed.map(|spent| spent.saturating_add(1)))
    }
}

/// What this worker knows of the last primary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// The last beat that was confirmed.
    pub beat: Beat,
    /// The number of the epoch in which it was.
    pub epoch_no: i64,
}

/// The last sweep, and what was received: both stand still when there is no primary.
type Still = (i64, i64);

/// A server, as far as it can be told from others.
pub type Identity = (Option<i64>, Option<i32>, Option<i64>);

impl Facts {
    /// What tells this server from another, and from itself before a restart or promotion.
    #[must_use]
    pub fn identity(&self) -> Identity {
        (self.system, self.timeline, self.started)
    }

    /// Whether a name that led to `other` may lead to this server by now: to the same one, or to its successor. What one of them does
    /// not tell is no reason against it.
    #[must_use]
    pub fn stands_for(&self, other: &Self) -> bool {
        let differs =
            |one: Option<i64>, two: Option<i64>| one.is_some() && two.is_some() && one != two;
        let strange = self.installation.is_some()
            && other.installation.is_some()
            && self.installation != other.installation;
        let older = self.timeline.is_some() && self.timeline < other.timeline;
        !strange
            && !differs(self.system, other.system)
            && !older
            && self.instead_of >= other.instead_of
    }

    /// Whether it is the one to use of two that take writes, as far as they themselves show: a person has put it in place of the other, or
    /// its timeline is higher.
    #[must_use]
    pub fn outranks(&self, other: &Self) -> bool {
        self.replaces(other) || !other.replaces(self) && self.timeline > other.timeline
    }

    /// Whether a person has said that it is used in place of the other.
    fn replaces(&self, other: &Self) -> bool {
        self.instead_of > other.instead_of && self.instead_of >= other.timeline
    }
}

/// What follows from a round of probes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finding {
    /// The host to speak to; `None`: there is none now.
    pub primary: Option<usize>,
    /// It is not the server that it was, or the first one: connections from before are of no use.
    pub changed: bool,
    /// Two hosts that take writes and are not one server.
    pub two: Option<(usize, usize)>,
    /// A host that takes writes on a timeline from before the last switch, or in whose place a person has put another one.
    pub stale: Option<usize>,
    /// A host that takes writes and belongs to another system than ours.
    pub foreign: Option<usize>,
    /// A host whose database is another installation of tenure. It is none of ours, whatever its system is.
    pub stranger: Option<usize>,
    /// It is proven that no server is a primary.
    pub none_anywhere: bool,
}

/// Remembers what the rounds have shown.
#[derive(Debug)]
pub struct Primaries {
    /// The host that was chosen last, and what server it was.
    chosen: Option<(usize, Identity)>,
    /// When the chosen one last took writes.
    good_at: Mono,
    seen: Seen,
    /// For each host: what it shows and has received, and since when that is the same.
    still: Vec<Option<(Still, Mono)>>,
}

impl Primaries {
    /// For so many hosts. `seen`: by an earlier process.
    #[must_use]
    pub fn new(hosts: usize, seen: Seen) -> Self {
        Self {
            chosen: None,
            good_at: Mono::ZERO,
            seen,
            still: vec![None; hosts],
        }
    }

    /// What was seen so far, for the next process.
    #[must_use]
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Takes in a round: what each host showed when it was asked at `sent`; the answers are in at `now`.
    pub fn on(&mut self, sent: Mono, now: Mono, sights: &[Sight], known: Known) -> Finding {
        let mut finding = Finding::default();
        let sights = &self.without_strangers(sights, &mut finding)[..];
        self.watch(now, sights);
        let candidates = self.candidates(sights, &mut finding);
        finding.two = two_servers(&candidates);
        let primary = self.choose(now, &candidates, &finding, sights);
        if let Some((host, facts)) = primary {
            let identity = facts.identity();
            finding.changed = self.chosen != Some((host, identity));
            self.chosen = Some((host, identity));
            self.good_at = now;
            self.note(&facts);
        }
        finding.primary = primary.map(|(host, _)| host);
        finding.none_anywhere = self.none_anywhere(sent, sights, known);
        finding
    }

    fn note(&mut self, facts: &Facts) {
        if facts.system.is_some() && facts.system != self.seen.system {
            // Timelines of two systems have nothing to do with each other.
            self.seen = Seen {
                system: facts.system,
                installation: self.seen.installation,
                ..Seen::default()
            };
        }
        if self.is_put_in_place(facts) {
            self.seen.timeline = None;
        }
        self.seen.timeline = self.seen.timeline.max(facts.timeline);
        // Standbys and later primaries show the word too; it was about this once.
        self.seen.followed = self.seen.followed.max(facts.instead_of);
        self.seen.installation = self.seen.installation.or(facts.installation);
    }

    /// A database of another installation is as good as none.
    fn without_strangers(&self, sights: &[Sight], finding: &mut Finding) -> Vec<Sight> {
        let of = |sight: &Sight| match sight {
            Sight::Primary(facts) | Sight::Standby(facts) => facts.installation,
            Sight::Away | Sight::ReadOnly => None,
        };
        let first = sights
            .iter()
            .filter(|sight| matches!(sight, Sight::Primary(_)))
            .find_map(of);
        let ours = self.seen.installation.or(first);
        let mut known = Vec::with_capacity(sights.len());
        for (host, sight) in sights.iter().enumerate() {
            let strange = of(sight).is_some() && ours.is_some() && of(sight) != ours;
            if strange {
                finding.stranger = Some(host);
            }
            known.push(if strange { Sight::Away } else { sight.clone() });
        }
        known
    }

    fn candidates(&self, sights: &[Sight], finding: &mut Finding) -> Vec<(usize, Facts)> {
        let mut candidates = Vec::new();
        let told = sights.iter().find_map(|sight| match sight {
            Sight::Primary(facts) => facts.system,
            _ => None,
        });
        let system = self.seen.system.or(told);
        for (host, sight) in sights.iter().enumerate() {
            let Sight::Primary(facts) = sight else {
                continue;
            };
            if facts.system.is_none() || facts.system == system {
                candidates.push((host, *facts));
            } else {
                finding.foreign = Some(host);
            }
        }
        let (stale, good) = candidates.iter().partition(|(_, facts)| {
            let replaced = candidates
                .iter()
                .any(|(_, other)| self.is_put_in_place(other) && other.replaces(facts));
            replaced || self.is_behind(facts)
        });
        let stale: Vec<(usize, Facts)> = stale;
        finding.stale = stale.last().map(|(host, _)| *host);
        good
    }

    fn choose(
        &self,
        now: Mono,
        candidates: &[(usize, Facts)],
        finding: &Finding,
        sights: &[Sight],
    ) -> Option<(usize, Facts)> {
        let given_up = self.chosen.is_none() || now - self.good_at >= DETECTION;
        let mine = self.chosen.map(|(host, identity)| (host, identity.1));
        let Some(best) = candidates.iter().map(|(_, facts)| facts.timeline).max() else {
            let foreign = finding.foreign.filter(|_| given_up)?;
            return match sights.get(foreign) {
                Some(Sight::Primary(facts)) => Some((foreign, *facts)),
                _ => None,
            };
        };
        let highest = || {
            candidates
                .iter()
                .filter(|(_, facts)| facts.timeline == best)
        };
        let stays = highest().find(|(host, facts)| mine == Some((*host, facts.timeline)));
        let rises = best > mine.and_then(|(_, timeline)| timeline);
        stays
            .or_else(|| highest().next().filter(|_| given_up || rises))
            .copied()
    }

    /// Whether it lacks what was seen elsewhere: a switch, or the word of a person that another server is used in its place.
    fn is_behind(&self, facts: &Facts) -> bool {
        let older = facts.timeline.is_some() && facts.timeline < self.seen.timeline;
        older && !self.is_put_in_place(facts) || facts.instead_of < self.seen.followed
    }

    /// Whether a person has said that it is used in place of the highest that was seen.
    fn is_put_in_place(&self, facts: &Facts) -> bool {
        facts.instead_of > self.seen.followed && facts.instead_of >= self.seen.timeline
    }

    fn watch(&mut self, now: Mono, sights: &[Sight]) {
        for (seen, sight) in self.still.iter_mut().zip(sights) {
            match sight {
                Sight::Standby(Facts {
                    swept_at: Some(swept),
                    received: Some(received),
                    ..
                }) => {
                    let shown = (*swept, *received);
                    if seen.is_none_or(|(before, _)| before != shown) {
                        *seen = Some((shown, now));
                    }
                }
                // One that misses a round and then shows the same has not replayed a sweep meanwhile.
                Sight::Away => {}
                Sight::Standby(_) | Sight::Primary(_) | Sight::ReadOnly => *seen = None,
            }
        }
    }

    fn none_anywhere(&self, sent: Mono, sights: &[Sight], known: Known) -> bool {
        let Some((last, _)) = self.chosen else {
            return false;
        };
        let stands_still = |host: usize| {
            self.still[host].is_some_and(|(_, since)| sent - since > SWEEP_GAP && sent > since)
        };
        let proves = |(host, sight): (usize, &Sight)| match sight {
            Sight::Standby(facts) => {
                let knows_us = facts.epoch_no >= known.epoch_no
                    && facts
                        .beat
                        .is_some_and(|beat| beat.0 >= known.beat.0 - BEHIND);
                host == last || knows_us && stands_still(host)
            }
            Sight::Away => host == last,
            Sight::Primary(_) | Sight::ReadOnly => false,
        };
        sights.len() > 1 && sights.iter().enumerate().all(proves)
    }
}

/// Two of them that are not one server under two names.
fn two_servers(candidates: &[(usize, Facts)]) -> Option<(usize, usize)> {
    let (first, one) = candidates.first()?;
    candidates
        .iter()
        .find(|(_, other)| other.identity() != one.identity())
        .map(|(second, _)| (*first, *second))
}

#[cfg(test)]
mod tests;
