//! How the heart makes this worker known: at first, and in each new epoch.

use std::cell::RefCell;
use std::time::Duration;

use tenure_core::ids::{Beat, Epoch, Token, WorkerId};
use tenure_core::time::Mono;
use tenure_store::error::StoreError;
use tenure_store::finish::{Answer, Covers, EndAnswer, Reattach};
use tenure_store::session::Session;
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::dispatch::Note;
use crate::events;
use crate::heart::{Heard, Heart, Link};
use crate::held::Statement;
use crate::journal::{Legacy, RECENT};

/// The other workers beat at once when they hear of a new one, and then it may claim; it looks again after these times.
const ADMITTED: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(250),
    Duration::from_secs(1),
];

/// How many of the workers that one process was it remembers.
const FORMERLY: usize = 8;

impl Heart {
    /// Becomes a worker, and takes over from those that this process or the last one in `state_dir` was.
    pub(crate) async fn register(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
        asked_at: Mono,
    ) -> Result<(), StoreError> {
        let session = self.session(link, heard).await?;
        let (worker, epoch, epoch_no) = self.make_known(link, &session).await?;
        let (found, rerun) = self.succeed(link, &session, worker, epoch).await?;
        self.listen(&session, worker).await?;
        let mut now = link.borrow_mut();
        now.registered = None;
        if (1..epoch_no).contains(&now.epoch_no) {
            now.report = Some(epoch_no);
        }
        now.epoch_no = epoch_no;
        let left = std::mem::take(&mut now.legacy.answered);
        // Should it have to become another worker, that one succeeds this.
        now.formerly.push(worker);
        if now.formerly.len() > FORMERLY {
            now.formerly.remove(0);
        }
        now.legacy = Legacy {
            workers: vec![worker],
            ..Legacy::default()
        };
        drop(now);
        let (sent, _) = self.leases.beats();
        let left = left.into_iter().map(|(_, end)| end).collect();
        self.ends.registered(worker, left, found, sent);
        self.status.confirmed(asked_at);
        events::registered(worker, epoch_no);
        self.leases
            .registered(worker, epoch, epoch_no, asked_at, &[], &rerun);
        self.note(Note::Registered);
        self.ends.nudge();
        let notes = self.notes.clone();
        drop(tokio::task::spawn_local(async move {
            for wait in ADMITTED {
                tokio::time::sleep(wait).await;
                let _ = notes.try_send(Note::Woken);
            }
        }));
        Ok(())
    }

    /// Registers, unless an earlier try got as far and only what comes after it failed: each registration is a worker that
    /// others count on.
    async fn make_known(
        &self,
        link: &RefCell<Link>,
        session: &Session,
    ) -> Result<(WorkerId, Epoch, i64), StoreError> {
        let before = link.borrow_mut().registered.take();
        let known = match before {
            Some(known) => known,
            None => {
                let worker = WorkerId(Uuid::new_v4());
                let (epoch, epoch_no) = session.register(worker, &self.registration).await?;
                (worker, epoch, epoch_no)
            }
        };
        link.borrow_mut().registered = Some(known);
        Ok(known)
    }

    /// Says what its predecessors had ended. Answers with the last heartbeat of theirs that the database showed, and with the runs among it
    /// that have to be given back.
    async fn succeed(
        &self,
        link: &RefCell<Link>,
        session: &Session,
        worker: WorkerId,
        epoch: Epoch,
    ) -> Result<(Option<Beat>, Vec<Token>), StoreError> {
        let (predecessors, seen) = {
            let now = link.borrow();
            (now.legacy.workers.clone(), now.epoch_no)
        };
        let ends = self.ends.all();
        let Some(last) = predecessors.last() else {
            return Ok((None, Vec::new()));
        };
        // The journal's beats are those of the last worker in it.
        let formerly = link.borrow().formerly.clone();
        let was_another = !formerly.is_empty();
        let found = session.open_epoch(*last, seen).await?.beat;
        let found = found.max(self.formerly_found(session, &formerly).await?);
        let mut said: Vec<String> = ends.iter().map(Statement::hold).collect();
        let (open, open_leases) = self.leases.open().holds();
        said.extend(open);
        let (covers_from, ago) = self.ends.covers();
        let covers = {
            let now = link.borrow();
            let lacks = |beat: &Beat| found.is_none_or(|found| *beat > found);
            let answered = now.legacy.answered.iter();
            said.extend(
                answered
                    .filter(|(beat, _)| lacks(beat))
                    .map(|(_, end)| end.again()),
            );
            // Only a worker that ended long ago has no row by right.
            let recent = match formerly.is_empty() {
                true => now.legacy.recent,
                false => self.status.heartbeat_age().is_some_and(|age| age < RECENT),
            };
            Covers {
                worker: *last,
                formerly,
                from: covers_from.max(now.legacy.covers_from),
                ago,
                predecessor: !recent,
            }
        };
        said.extend(self.ends.after(found));
        // Those that it knew as another worker may still hold what the database has lost.
        let (_, _, roster) = self.leases.holds();
        let reattach = Reattach {
            worker,
            epoch,
            // With this all is here that was answered before that beat was sent, by whichever worker this process was.
            beat: self.leases.beats().0,
            roster: &roster,
            registration: &self.registration,
            predecessors: &predecessors,
            held: &ends
                .iter()
                .map(|end| end.end.token)
                .chain(open_leases)
                .collect::<Vec<_>>(),
            covers: &[covers],
            without_primary: self.lookout.outage(),
        };
        let answers = session.reattach(reattach, &said).await?;
        let (lost, rerun) = sorted(&answers)?;
        self.leases.open().remove(&lost);
        self.leases.open().say(session, worker, epoch, true).await?;
        let again = said.len() - ends.len();
        events::succeeded(was_another, ends.len(), again);
        Ok((found, rerun))
    }

    /// The last beat that the database shows of any of the workers that this process was.
    async fn formerly_found(
        &self,
        session: &Session,
        formerly: &[WorkerId],
    ) -> Result<Option<Beat>, StoreError> {
        let mut found = None;
        for worker in formerly {
            found = found.max(session.open_epoch(*worker, 0).await?.beat);
        }
        Ok(found)
    }

    /// Says all in a new epoch.
    pub(crate) async fn reattach(
        &self,
        link: &RefCell<Link>,
        heard: &mpsc::Sender<Heard>,
        worker: WorkerId,
        asked_at: Mono,
    ) -> Result<(), StoreError> {
        let session = self.session(link, heard).await?;
        let (seen, formerly) = {
            let now = link.borrow();
            (now.epoch_no, now.formerly.clone())
        };
        let now = session.open_epoch(worker, seen).await?;
        let found = match now.beat {
            // Its registration is part of what was lost.
            None => self.formerly_found(&session, &formerly).await?,
            found => found,
        };
        // It may have become another worker meanwhile, which succeeds this one: then the dead must not speak.
        if !self.leases.rejoins(worker, asked_at) {
            return Err(StoreError::Repeat("it is asked again".into()));
        }
        let (running, beat, roster) = self.leases.holds();
        let ends = self.ends.all();
        let again = self.ends.after(found);
        let held: Vec<Token> = running
            .iter()
            .map(|held| held.token())
            .chain(ends.iter().map(|end| end.end.token))
            .collect();
        let counts = (running.len(), ends.len(), again.len());
        let (open, open_leases) = self.leases.open().holds();
        let held = [held, open_leases].concat();
        let mut said = again;
        said.extend(open);
        said.extend(running.iter().map(|held| held.hold()));
        said.extend(ends.iter().map(Statement::hold));
        let (from, ago) = self.ends.covers();
        let reattach = Reattach {
            worker,
            epoch: now.epoch,
            beat,
            roster: &roster,
            registration: &self.registration,
            predecessors: &[],
            held: &held,
            covers: &[Covers {
                worker,
                formerly,
                from,
                ago,
                predecessor: false,
            }],
            without_primary: self.lookout.outage(),
        };
        let answers = session.reattach(reattach, &said).await?;
        let (lost, rerun) = sorted(&answers)?;
        // A switch may have lost no more than that their leases stand by themselves; the next heartbeat would take those back.
        self.leases
            .open()
            .say(&session, worker, now.epoch, true)
            .await?;
        self.lookout.forget_outage();
        let mut state = link.borrow_mut();
        state.epoch_no = now.number;
        state.report = Some(now.number);
        drop(state);
        self.ends.moved(found, self.leases.beats().0);
        self.status.confirmed(asked_at);
        let stopped = lost.len() + rerun.len();
        events::reattached(worker, now.number, counts.0, counts.1, counts.2, stopped);
        self.leases
            .registered(worker, now.epoch, now.number, asked_at, &lost, &rerun);
        self.note(Note::Registered);
        self.ends.nudge();
        Ok(())
    }
}

/// The leases that are gone, whose handlers must stop and whose ends are history; and the runs that have to be given back.
fn sorted(answers: &[EndAnswer]) -> Result<(Vec<Token>, Vec<Token>), StoreError> {
    let of = |wanted| {
        answers
            .iter()
            .filter(move |answer| answer.answer == wanted)
            .map(|answer| answer.token)
    };
    match of(Answer::Busy).next() {
        // Everything has to be said again, in one piece: what is not named is taken for given up.
        Some(_) => Err(StoreError::Repeat(
            "a job is locked by another transaction".into(),
        )),
        None => Ok((of(Answer::Stop).collect(), of(Answer::Rerun).collect())),
    }
}
