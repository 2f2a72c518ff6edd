//! The processes of one `process` handler: which of them gets a job, when one is started, when it has to go, and what its death
//! means for the jobs in it.
//!
//! ```text
//!   start ──► starting ──ready──► working ──enough jobs, too old, too fat──► leaving ──► gone
//!                 └──────────────────┴──────── dies, breaks the protocol ───────────────► gone, replaced after a wait
//! ```
//!
//! Invariants: a process has at most as many jobs as both the settings and its hello allow; a job that runs alone shares its
//! process with nobody; there are never more than `processes` that may still get jobs.
//! Pure: times come in, and what is to be done goes out.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::time::Mono;

/// The wait after the first bad end; it doubles with each further one.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// The longest wait.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What the settings say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// So many processes.
    pub processes: usize,
    /// So many jobs in each.
    pub concurrency: usize,
    /// A process goes after so many jobs.
    pub max_jobs: Option<u64>,
    /// A process goes when it is so old.
    pub max_age: Option<Duration>,
    /// A process goes when it holds so much memory, in bytes.
    pub max_memory: Option<u64>,
}

/// Names a process; never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId(pub u64);

/// Where a job goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Into this process; the seat is taken.
    Seat(ProcessId),
    /// A process with this name is to be started; the job asks again when something has changed.
    Start(ProcessId),
    /// Nowhere yet. It asks again when something has changed, or at this time.
    Wait(Option<Mono>),
}

/// Why a process gets no further job and goes when its last one has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// `max_jobs`.
    Jobs,
    /// `max_age`.
    Age,
    /// `max_memory`.
    Memory,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// As it should: it was told to, or stopped with one of its jobs.
    Well,
    /// It died, broke the protocol, or never was ready.
    Badly,
}

/// What the end of a process means for a job that was in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The job killed it: a failed attempt.
    Failed,
    /// One of several jobs killed it: no attempt is used, and each runs alone next time.
    Marked,
    /// It was ended for another reason: no attempt is used.
    Released,
}

#[derive(Debug)]
struct Member {
    /// `None` until it is ready.
    concurrency: Option<usize>,
    /// When it was started, and then when it was ready.
    since: Mono,
    /// Places in it that are taken.
    open: usize,
    /// Places that it ever gave.
    seated: u64,
    /// Jobs that it has got.
    given: u64,
    /// Its one job runs alone.
    alone: bool,
    leaving: bool,
}

impl Member {
    fn free(&self, max_jobs: Option<u64>) -> usize {
        if self.leaving || self.alone {
            return 0;
        }
        let left = max_jobs.map_or(u64::MAX, |most| most.saturating_sub(self.seated));
        let free = self.concurrency.unwrap_or(0).saturating_sub(self.open);
        free.min(usize::try_from(left).unwrap_or(usize::MAX))
    }
}

/// See the module.
#[derive(Debug)]
pub struct Crew {
    limits: Limits,
    members: BTreeMap<ProcessId, Member>,
    last: u64,
    /// Bad ends since a job last ended well in a process.
    bad_ends: u32,
    /// No process is started before.
    not_before: Mono,
    waiting: usize,
    /// Of those that wait.
    waiting_alone: usize,
    /// How often a process was gone before it was ready.
    failed_starts: u64,
}

impl Crew {
    /// Without a process.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            members: BTreeMap::new(),
            last: 0,
            bad_ends: 0,
            not_before: Mono::ZERO,
            waiting: 0,
            waiting_alone: 0,
            failed_starts: 0,
        }
    }

    /// A job begins to wait for a place.
    pub fn begin_waiting(&mut self, alone: bool) {
        self.waiting += 1;
        self.waiting_alone += usize::from(alone);
    }

    /// It waits no longer: it has a place, or wants none.
    pub fn end_waiting(&mut self, alone: bool) {
        self.waiting = self.waiting.saturating_sub(1);
        self.waiting_alone = self.waiting_alone.saturating_sub(usize::from(alone));
    }

    /// Where one of the waiting jobs goes.
    pub fn place(&mut self, now: Mono, alone: bool) -> Place {
        if let Some(id) = self.seat(alone)
            && let Some(member) = self.members.get_mut(&id)
        {
            member.open += 1;
            member.seated += 1;
            member.alone = alone;
            return Place::Seat(id);
        }
        let staying = self.members.values().filter(|it| !it.leaving);
        let (mut count, mut coming) = (0, 0);
        for member in staying {
            count += 1;
            coming += usize::from(member.concurrency.is_none()) * self.limits.concurrency;
        }
        if count >= self.limits.processes || coming >= self.waiting.max(1) {
            return Place::Wait(None);
        }
        if now < self.not_before {
            return Place::Wait(Some(self.not_before));
        }
        self.last += 1;
        let id = ProcessId(self.last);
        self.members.insert(
            id,
            Member {
                concurrency: None,
                since: now,
                open: 0,
                seated: 0,
                given: 0,
                alone: false,
                leaving: false,
            },
        );
        Place::Start(id)
    }

    /// The fullest process with a free seat, so that others become empty; for a job that runs alone an empty one. While such a job
    /// waits, the process that is nearest to being empty gets nothing else.
    fn seat(&self, alone: bool) -> Option<ProcessId> {
        let most = self.limits.max_jobs;
        let free = || self.members.iter().filter(|(_, it)| it.free(most) > 0);
        if alone {
            return free().find(|(_, it)| it.open == 0).map(|(id, _)| *id);
        }
        let staying = self
            .members
            .iter()
            .filter(|(_, it)| !it.leaving && it.concurrency.is_some() && !it.alone);
        let kept = staying
            .min_by_key(|(id, it)| (it.open, **id))
            .filter(|_| self.waiting_alone > 0)
            .map(|(id, _)| *id);
        free()
            .filter(|(id, _)| Some(**id) != kept)
            .max_by_key(|(id, it)| (it.open, std::cmp::Reverse(**id)))
            .map(|(id, _)| *id)
    }

    /// The process says that it takes so many jobs at once.
    pub fn ready(&mut self, now: Mono, id: ProcessId, concurrency: u32) {
        let said = usize::try_from(concurrency).unwrap_or(usize::MAX);
        if let Some(member) = self.members.get_mut(&id) {
            // A slow start is no age.
            member.since = now;
            member.concurrency = Some(said.min(self.limits.concurrency).max(1));
        }
    }

    /// The job of a place was given to the process. Says why it has to go, once.
    pub fn given(&mut self, now: Mono, id: ProcessId) -> Option<Leave> {
        self.members.get_mut(&id)?.given += 1;
        self.look(now, id, 0)
    }

    /// The process takes nothing any more, and so not the job of this place.
    pub fn not_given(&mut self, id: ProcessId) {
        if let Some(member) = self.members.get_mut(&id) {
            member.open = member.open.saturating_sub(1);
            member.alone = false;
            member.leaving = true;
        }
    }

    /// The process has answered for a job. Says why it has to go, once.
    pub fn over(&mut self, now: Mono, id: ProcessId, memory: u64) -> Option<Leave> {
        let member = self.members.get_mut(&id)?;
        member.open = member.open.saturating_sub(1);
        member.alone = false;
        self.bad_ends = 0;
        self.look(now, id, memory)
    }

    /// Whether a process has to go. Says why, once.
    pub fn look(&mut self, now: Mono, id: ProcessId, memory: u64) -> Option<Leave> {
        let (limits, member) = (self.limits, self.members.get_mut(&id)?);
        if member.leaving || member.concurrency.is_none() {
            return None;
        }
        let why = if limits.max_jobs.is_some_and(|most| member.given >= most) {
            Leave::Jobs
        } else if limits
            .max_age
            .is_some_and(|most| now >= member.since + most)
        {
            Leave::Age
        } else if limits.max_memory.is_some_and(|most| memory > most) {
            Leave::Memory
        } else {
            return None;
        };
        member.leaving = true;
        Some(why)
    }

    /// When a process becomes too old.
    #[must_use]
    pub fn too_old_at(&self, id: ProcessId) -> Option<Mono> {
        let member = self.members.get(&id).filter(|it| !it.leaving)?;
        Some(member.since + self.limits.max_age?)
    }

    /// Nothing is to be given to this process any more: it is being ended.
    pub fn leave(&mut self, id: ProcessId) {
        if let Some(member) = self.members.get_mut(&id) {
            member.leaving = true;
        }
    }

    /// The process is no more, and so are the places of its jobs.
    pub fn gone(&mut self, now: Mono, id: ProcessId, how: Gone) {
        let Some(member) = self.members.remove(&id) else {
            return;
        };
        if how == Gone::Badly {
            self.failed_starts += u64::from(member.concurrency.is_none());
            let wait = FIRST_WAIT * 2u32.saturating_pow(self.bad_ends.min(16));
            self.bad_ends = self.bad_ends.saturating_add(1);
            self.not_before = now + wait.min(LONGEST_WAIT);
        }
    }

    /// Counts the processes that were gone before they were ready.
    #[must_use]
    pub fn failed_starts(&self) -> u64 {
        self.failed_starts
    }

    /// Whether a process works or is about to.
    #[must_use]
    pub fn has_any(&self) -> bool {
        self.members.values().any(|it| !it.leaving)
    }

    /// How many jobs could have a place without waiting for another one's end, beside the `admitted` ones that are on their way, wait or
    /// run. After a start that failed one job at a time tries.
    #[must_use]
    pub fn capacity(&self, now: Mono, admitted: usize) -> usize {
        let staying = || self.members.values().filter(|it| !it.leaving);
        let free: usize = staying()
            .map(|it| match it.concurrency {
                Some(_) => it.free(self.limits.max_jobs),
                None => self.limits.concurrency,
            })
            .sum();
        let missing = self.limits.processes.saturating_sub(staying().count());
        let more = if now < self.not_before {
            0
        } else if self.bad_ends > 0 && free == 0 {
            missing.min(1)
        } else {
            missing.saturating_mul(self.limits.concurrency)
        };
        let seated: usize = self.members.values().map(|it| it.open).sum();
        (free + more).saturating_sub(admitted.saturating_sub(seated))
    }

    /// When a process is started again after bad ends, if that is still to come.
    #[must_use]
    pub fn starts_again_at(&self, now: Mono) -> Option<Mono> {
        let staying = self.members.values().filter(|it| !it.leaving).count();
        (now < self.not_before && staying < self.limits.processes).then_some(self.not_before)
    }

    /// How many processes there are: starting, working, leaving.
    #[must_use]
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for member in self.members.values() {
            counts[match member {
                Member { leaving: true, .. } => 2,
                Member {
                    concurrency: None, ..
                } => 0,
                _ => 1,
            }] += 1;
        }
        counts
    }
}

/// What the end of a process means for each of the `open` jobs in it. `blamed`: it ended by itself or broke the protocol.
#[must_use]
pub fn fate(blamed: bool, open: usize) -> Fate {
    match (blamed, open) {
        (false, _) => Fate::Released,
        (true, 0 | 1) => Fate::Failed,
        (true, _) => Fate::Marked,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        processes: 2,
        concurrency: 3,
        max_jobs: None,
        max_age: None,
        max_memory: None,
    };

    fn at(ms: u64) -> Mono {
        Mono::from_millis(ms)
    }

    fn started(crew: &mut Crew, now: Mono) -> ProcessId {
        match crew.place(now, false) {
            Place::Start(id) => id,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_process_is_started_for_as_many_jobs_as_it_may_take() {
        let mut crew = Crew::new(LIMITS);
        for _ in 0..4 {
            crew.begin_waiting(false);
        }
        let first = started(&mut crew, at(0));
        let second = started(&mut crew, at(0));
        assert_eq!(crew.place(at(0), false), Place::Wait(None));
        crew.ready(at(0), first, 1);
        assert_eq!(crew.place(at(1), false), Place::Seat(first));
        crew.ready(at(0), second, 100);
        for _ in 0..3 {
            assert_eq!(crew.place(at(1), false), Place::Seat(second));
        }
        assert_eq!(crew.place(at(1), false), Place::Wait(None));
        assert_eq!(crew.counts(), [0, 2, 0]);
    }

    #[test]
    fn a_job_that_runs_alone_gets_a_process_for_itself() {
        let mut crew = Crew::new(Limits {
            processes: 1,
            ..LIMITS
        });
        crew.begin_waiting(false);
        let id = started(&mut crew, at(0));
        crew.ready(at(0), id, 3);
        assert_eq!(crew.place(at(0), false), Place::Seat(id));
        crew.end_waiting(false);
        crew.begin_waiting(true);
        assert_eq!(crew.place(at(0), true), Place::Wait(None));
        // It waits for the others to end, and nobody comes in between.
        crew.begin_waiting(false);
        assert_eq!(crew.place(at(0), false), Place::Wait(None));
        assert_eq!(crew.over(at(1), id, 0), None);
        assert_eq!(crew.place(at(1), false), Place::Wait(None));
        assert_eq!(crew.place(at(1), true), Place::Seat(id));
        crew.end_waiting(true);
        assert_eq!(crew.place(at(1), false), Place::Wait(None));
        crew.over(at(2), id, 0);
        assert_eq!(crew.place(at(2), false), Place::Seat(id));
    }

    #[test]
    fn a_process_goes_when_it_has_done_enough() {
        let limits = Limits {
            max_jobs: Some(2),
            ..LIMITS
        };
        let mut crew = Crew::new(limits);
        crew.begin_waiting(false);
        let id = started(&mut crew, at(0));
        crew.ready(at(0), id, 3);
        for _ in 0..2 {
            assert_eq!(crew.place(at(0), false), Place::Seat(id));
        }
        // Its places are used up before its jobs have come to it.
        let next = started(&mut crew, at(0));
        assert_eq!(crew.given(at(0), id), None);
        assert_eq!(crew.given(at(0), id), Some(Leave::Jobs));
        assert_ne!(next, id);
        assert_eq!(crew.over(at(0), id, 0), None);
        assert_eq!(crew.over(at(0), id, 0), None);
        crew.gone(at(0), id, Gone::Well);
        assert_eq!(crew.capacity(at(0), 1), 3 + 3 - 1);
    }

    #[test]
    fn age_and_memory() {
        let limits = Limits {
            max_age: Some(Duration::from_secs(10)),
            max_memory: Some(1000),
            ..LIMITS
        };
        let mut crew = Crew::new(limits);
        crew.begin_waiting(false);
        let id = started(&mut crew, at(500));
        // Before it is ready it is not looked at: a slow start is no age.
        assert_eq!(crew.look(at(60_000), id, 9999), None);
        crew.ready(at(60_000), id, 1);
        assert_eq!(crew.look(at(69_999), id, 1000), None);
        assert_eq!(crew.too_old_at(id), Some(at(70_000)));
        assert_eq!(crew.look(at(69_999), id, 1001), Some(Leave::Memory));
        assert_eq!(crew.look(at(80_000), id, 0), None);
    }

    #[test]
    fn bad_ends_are_followed_by_longer_waits() {
        let mut crew = Crew::new(LIMITS);
        crew.begin_waiting(false);
        let mut now = at(0);
        let mut waits = Vec::new();
        for _ in 0..10 {
            let id = started(&mut crew, now);
            crew.gone(now, id, Gone::Badly);
            assert_eq!(crew.capacity(now, 0), 0);
            let Place::Wait(Some(until)) = crew.place(now, false) else {
                panic!("it is started at once");
            };
            waits.push(until - now);
            now = until;
            crew.end_waiting(false);
            assert_eq!(crew.capacity(now, 0), 1);
            crew.begin_waiting(false);
        }
        assert_eq!(waits[..3], [200, 400, 800].map(Duration::from_millis));
        assert_eq!(waits[9], LONGEST_WAIT);
        assert_eq!(crew.failed_starts(), 10);
        let id = started(&mut crew, now);
        crew.ready(now, id, 1);
        assert_eq!(crew.place(now, false), Place::Seat(id));
        crew.over(now, id, 0);
        crew.gone(now, id, Gone::Badly);
        assert_eq!(crew.place(now, false), Place::Wait(Some(now + FIRST_WAIT)));
    }

    #[test]
    fn only_the_one_job_of_a_process_is_blamed() {
        assert_eq!(fate(true, 1), Fate::Failed);
        assert_eq!(fate(true, 2), Fate::Marked);
        assert_eq!(fate(false, 1), Fate::Released);
    }

    /// What may happen to a crew.
    #[derive(Debug, Clone)]
    enum Step {
        Come(bool),
        Ready(usize, u32),
        End(usize, u64),
        Die(usize, bool),
        Pass(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            any::<bool>().prop_map(Step::Come),
            (0usize..4, 1u32..6).prop_map(|(at, n)| Step::Ready(at, n)),
            (0usize..8, 0u64..200).prop_map(|(at, memory)| Step::End(at, memory)),
            (0usize..4, any::<bool>()).prop_map(|(at, badly)| Step::Die(at, badly)),
            (0u64..2000).prop_map(Step::Pass),
        ];
        prop::collection::vec(step, 1..120)
    }

    proptest! {
        #[test]
        fn seats_are_never_given_twice_and_nobody_waits_for_ever(steps in steps(), processes in 1usize..3, concurrency in 1usize..4) {
            let limits = Limits {
                processes,
                concurrency,
                max_jobs: Some(5),
                max_age: Some(Duration::from_secs(20)),
                max_memory: Some(150),
            };
            let mut crew = Crew::new(limits);
            let mut now = at(0);
            let mut waiting: Vec<bool> = Vec::new();
            let mut leaving = std::collections::BTreeSet::new();
            // Of each process: what it said, and the jobs in it.
            let mut alive: BTreeMap<ProcessId, (Option<u32>, Vec<bool>)> = BTreeMap::new();
            let calm = (0..300).flat_map(|at| [Step::Pass(1000), Step::Ready(at % 4, 2), Step::End(at % 3, 0)]);
            for step in steps.into_iter().chain(calm) {
                match step {
                    Step::Come(alone) => {
                        crew.begin_waiting(alone);
                        waiting.push(alone);
                    }
                    Step::Ready(nth, n) => {
                        let starting = alive.iter_mut().filter(|(_, it)| it.0.is_none()).nth(nth % 2);
                        if let Some((id, it)) = starting {
                            it.0 = Some(n);
                            crew.ready(now, *id, n);
                        }
                    }
                    Step::End(nth, memory) => {
                        let count = alive.values().filter(|it| !it.1.is_empty()).count();
                        let mut busy = alive.iter_mut().filter(|(_, it)| !it.1.is_empty());
                        let found = busy.nth(nth % count.max(1)).map(|(id, it)| { it.1.pop(); *id });
                        if let Some(id) = found {
                            if crew.over(now, id, memory).is_some() {
                                leaving.insert(id);
                            }
                            if leaving.contains(&id) && alive[&id].1.is_empty() {
                                crew.gone(now, id, Gone::Well);
                                alive.remove(&id);
                            }
                        }
                    }
                    Step::Die(nth, badly) => {
                        let dying = alive.keys().nth(nth).copied();
                        if let Some(id) = dying {
                            alive.remove(&id);
                            crew.gone(now, id, if badly { Gone::Badly } else { Gone::Well });
                        }
                    }
                    Step::Pass(ms) => now = now + Duration::from_millis(ms),
                }
                for _ in 0..2 {
                    let mut still = Vec::new();
                    for alone in waiting.drain(..) {
                        match crew.place(now, alone) {
                            Place::Seat(id) => {
                                crew.end_waiting(alone);
                                let (said, jobs) = alive.get_mut(&id).unwrap();
                                jobs.push(alone);
                                if crew.given(now, id).is_some() {
                                    leaving.insert(id);
                                }
                                let most = usize::try_from(said.unwrap()).unwrap().min(concurrency);
                                prop_assert!(jobs.len() <= most);
                                prop_assert!(jobs.len() == 1 || !jobs.contains(&true));
                            }
                            Place::Start(id) => {
                                alive.insert(id, (None, Vec::new()));
                                still.push(alone);
                            }
                            Place::Wait(_) => still.push(alone),
                        }
                    }
                    waiting = still;
                }
                let [starting, working, _] = crew.counts();
                prop_assert!(starting + working <= processes);
            }
            prop_assert!(waiting.is_empty(), "{waiting:?} still wait");
        }
    }
}
