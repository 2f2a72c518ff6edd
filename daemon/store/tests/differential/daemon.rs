//! What a daemon remembers. It lives outside the database, so no lost commit touches it.

use std::collections::{BTreeMap, BTreeSet};
use tenure_core::ids::{Call, Epoch, JobId, Token, WorkerId};
use tenure_core::model::{Memory, Registration, RunEnd};

/// What may lie between a beat and its row, beyond the time that a daemon sees: a gap of the sweeps, in milliseconds.
const MARGIN: i64 = 3_000;

#[derive(Clone)]
pub(crate) struct Daemon {
    pub(crate) id: WorkerId,
    pub(crate) registration: Registration,
    /// Killed: it never says anything again.
    pub(crate) dead: bool,
    /// `None`: not registered yet.
    pub(crate) epoch: Option<Epoch>,
    pub(crate) epoch_no: i64,
    pub(crate) beat: i64,
    /// The number of its last claim call.
    pub(crate) call: Call,
    /// Its handlers.
    pub(crate) held: BTreeMap<JobId, Memory>,
    /// All leases that it ever had itself. Ends that it took over from a predecessor are said again, but others may not know of
    /// it before its first beats, so no promise stands on them.
    pub(crate) own: BTreeSet<Token>,
    /// Ends of which it has no answer yet.
    pub(crate) unsaid: Vec<(Memory, RunEnd)>,
    /// Ends that were answered, with the first beat after: a database that shows this beat shows them.
    pub(crate) said: Vec<(i64, Memory, RunEnd)>,
    /// The workers that its last beat showed.
    pub(crate) roster: BTreeSet<WorkerId>,
    /// Its own clock at which it kills its handlers, unless a beat comes before.
    pub(crate) trusted_until: i64,
    /// What it was before it was restarted.
    pub(crate) predecessor: Option<WorkerId>,
    /// After a switch it does not speak before this time of its own clock.
    pub(crate) silent_until: i64,
}

impl Daemon {
    pub(crate) fn new(id: WorkerId, registration: Registration) -> Self {
        Self {
            id,
            registration,
            dead: false,
            epoch: None,
            epoch_no: 0,
            beat: 0,
            call: Call(0),
            held: BTreeMap::new(),
            own: BTreeSet::new(),
            unsaid: Vec::new(),
            said: Vec::new(),
            roster: BTreeSet::new(),
            trusted_until: i64::MIN,
            predecessor: None,
            silent_until: i64::MIN,
        }
    }

    /// The process that takes its place, with what its state_dir kept.
    pub(crate) fn successor(&mut self, id: WorkerId) -> Self {
        let mut next = Self::new(id, self.registration);
        next.said = std::mem::take(&mut self.said);
        next.unsaid = std::mem::take(&mut self.unsaid);
        next.epoch_no = self.epoch_no;
        next.roster = std::mem::take(&mut self.roster);
        next.predecessor = Some(self.id);
        self.dead = true;
        self.held.clear();
        next
    }

    /// A beat, sent at this time of its clock, was confirmed.
    pub(crate) fn confirmed(&mut self, mono: i64) {
        self.trusted_until = mono + self.registration.lease_ttl - MARGIN;
    }

    /// Without trust it has no handlers.
    pub(crate) fn tick(&mut self, mono: i64) {
        if mono >= self.trusted_until {
            self.held.clear();
        }
    }

    /// The claim calls with jobs whose end the database does not know.
    pub(crate) fn open(&self) -> Vec<Call> {
        let held = self.held.values().map(|memory| memory.call);
        let unsaid = self.unsaid.iter().map(|(memory, _)| memory.call);
        held.chain(unsaid)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// An end has been answered.
    pub(crate) fn remember(&mut self, memory: Memory, end: RunEnd) {
        self.said.push((self.beat + 1, memory, end));
    }
}
