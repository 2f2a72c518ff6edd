//! What a daemon remembers. It lives outside the database, so no lost commit touches it.

use std::collections::{BTreeMap, BTreeSet};
use tenure_core::ids::{Call, Epoch, JobId, Token, WorkerId};
use tenure_core::model::{End, Memory, Registration, RunEnd};

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
    /// Said ends in buckets up to this one may be forgotten; later ones are all there.
    pub(crate) from: i64,
    /// The same of those whose memory it took over, with their own buckets.
    pub(crate) inherited: Vec<(WorkerId, i64)>,
    /// What it took over has not been said yet, and its buckets are those of others.
    pub(crate) replay: bool,
    /// Its last statement has reached the database in its epoch, and so has the answer.
    pub(crate) spoken: bool,
    pub(crate) attached: bool,
    /// Runs of its own that ended for good, with their bucket and the epoch in which that was answered: what it promises, whether it remembers the statement or not.
    pub(crate) finished: Vec<(i64, Memory, Epoch)>,
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
            from: 0,
            inherited: Vec::new(),
            replay: false,
            spoken: false,
            attached: false,
            finished: Vec::new(),
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
        next.inherited = std::mem::take(&mut self.inherited);
        next.inherited.push((self.id, self.from));
        next.replay = true;
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
        let bucket = self.beat + 1;
        let for_good = matches!(end.end, End::Completed | End::Failed { last: true });
        if for_good && self.own.contains(&memory.token) {
            let epoch = self.epoch.expect("it was answered");
            self.finished.push((bucket, memory.clone(), epoch));
        }
        self.said.push((bucket, memory, end));
    }

    /// It has been overruled, or goes into another bucket.
    pub(crate) fn forget(&mut self, token: Token) {
        self.said.retain(|(_, memory, _)| memory.token != token);
        self.unsaid.retain(|(memory, _)| memory.token != token);
        self.finished.retain(|(_, memory, _)| memory.token != token);
    }

    /// Drops the buckets up to this one. `proven`: all servers that can become the primary show that beat, so nothing is lost.
    pub(crate) fn trim(&mut self, bucket: i64, proven: bool) {
        self.said.retain(|(it, _, _)| *it > bucket);
        self.from = self.from.max(bucket);
        if !proven {
            self.finished.retain(|(it, _, _)| *it > bucket);
        }
    }
}
