//! Registers, beats, re-attaches and probes.

use super::super::cluster::SERVERS;
use super::super::network::{Network, Notice, Seen, Ticket};
use super::super::server::{Answer, Statement};
use super::super::world::Fault;
use super::work::is_gone;
use super::{Daemon, Round};
use tenure_core::ids::{Beat, Call, Epoch, Token, WorkerId};
use tenure_core::lease::event::{Event, Refusal};
use tenure_core::model::{Heartbeat, Kept, Opened, Reattach, ReattachAnswer, Refused};
use tenure_core::primary::{Known, Sight};
use tenure_core::time::Mono;
use uuid::Uuid;

/// How long a round of probes waits for answers.
const ROUND: u64 = 1_000;
/// From round to round while there is no primary.
const OFTEN: u64 = 700;

impl Daemon {
    /// Sends a statement to the primary, if one is known.
    pub(super) fn say(
        &mut self,
        net: &mut Network,
        ticket: Ticket,
        statement: Statement,
        timeout: u64,
    ) {
        let given_up = Notice::GivenUp(ticket.clone());
        match self.host {
            Some(host) => {
                net.send(self.here(), host, ticket, statement);
                self.notice_at(net, net.now + timeout, given_up);
            }
            None => self.notice_at(net, net.now + 2, given_up),
        }
    }

    fn patience(&self) -> u64 {
        u64::try_from(self.world.limits.answer_within().as_millis()).unwrap_or(u64::MAX)
    }

    /// Registers, unless an earlier try got as far and only what comes after it failed.
    pub(super) fn register(&mut self, net: &mut Network, asked_at: Mono) {
        if self.registering.is_some() {
            return;
        }
        self.registering = Some(asked_at);
        self.rejoining = None;
        if let Some(known) = self.registered {
            return self.succeed(net, known, asked_at);
        }
        let worker = net.fresh_worker();
        let registration = self.registration();
        self.say(
            net,
            Ticket::Register { worker, asked_at },
            Statement::Register {
                worker,
                registration,
            },
            self.patience(),
        );
    }

    /// Says what the predecessors left, and that they are dead.
    fn succeed(&mut self, net: &mut Network, known: (WorkerId, Epoch, i64), asked_at: Mono) {
        let (worker, epoch, epoch_no) = known;
        self.registered = Some(known);
        let mut statements = self.holds();
        statements.extend(self.remembered(None));
        let said = Reattach {
            beat: 0,
            statements,
            // Old as it is: nobody else may know them.
            roster: self.roster_said(self.world.fault == Fault::RosterForgotten),
            registration: Some(self.registration()),
            predecessors: self.predecessors.clone(),
            ..Reattach::default()
        };
        self.reconnect();
        let ticket = Ticket::Succeed {
            worker,
            epoch,
            epoch_no,
            asked_at,
        };
        let statement = Statement::Reattach {
            worker,
            epoch,
            said,
        };
        self.say(net, ticket, statement, self.patience());
    }

    pub(super) fn open_epoch(&mut self, net: &mut Network, worker: WorkerId, asked_at: Mono) {
        let seen = self.epoch_no;
        self.rejoining = Some((worker, asked_at));
        self.say(
            net,
            Ticket::Open { worker, asked_at },
            Statement::Open { worker, seen },
            self.patience(),
        );
    }

    fn reattach(&mut self, net: &mut Network, worker: WorkerId, opened: Opened, asked_at: Mono) {
        let found = opened.beat.map(Beat);
        let mut statements = self.holds();
        statements.extend(self.remembered(found));
        let said = Reattach {
            beat: self.answered.0,
            roster: self.roster_said(false),
            statements,
            registration: Some(self.registration()),
            ..Reattach::default()
        };
        self.reconnect();
        let ticket = Ticket::Reattach {
            worker,
            epoch: opened.epoch,
            epoch_no: opened.epoch_no,
            asked_at,
            found,
            tokens: said
                .statements
                .iter()
                .map(|said| said.memory().token)
                .collect(),
        };
        let statement = Statement::Reattach {
            worker,
            epoch: opened.epoch,
            said,
        };
        self.say(net, ticket, statement, self.patience());
    }

    fn roster_said(&self, forgotten: bool) -> Vec<WorkerId> {
        if forgotten || self.world.fault == Fault::RostersIgnored {
            return Vec::new();
        }
        self.roster.clone()
    }

    /// Answers about ends that were said before mean nothing any more: they are said again.
    fn reconnect(&mut self) {
        self.connection += 1;
        for open in self.open.values_mut() {
            open.under_way = false;
        }
    }

    pub(super) fn beat(
        &mut self,
        net: &mut Network,
        (worker, epoch, beat): (WorkerId, Epoch, Beat),
        settled: Call,
        open: Vec<Call>,
    ) {
        self.sent = beat;
        self.beat_under_way = Some(beat);
        let said = Heartbeat {
            beat: beat.0,
            settled,
            open,
            draining: self.draining,
        };
        let ticket = Ticket::Beat {
            worker,
            epoch,
            beat,
        };
        let statement = Statement::Beat {
            worker,
            epoch,
            said,
        };
        self.say(net, ticket, statement, self.patience());
    }

    pub(super) fn given_up(&mut self, net: &mut Network, ticket: Ticket) {
        match ticket {
            Ticket::Register { asked_at, .. } | Ticket::Succeed { asked_at, .. } => {
                if self.registering.take_if(|it| *it == asked_at).is_some() {
                    self.tell(net, Event::RegisterFailed { asked_at });
                }
            }
            Ticket::Open { worker, asked_at }
            | Ticket::Reattach {
                worker, asked_at, ..
            } => {
                self.rejoining.take_if(|it| *it == (worker, asked_at));
                self.tell(net, Event::RegisterFailed { asked_at });
            }
            Ticket::Beat { beat, .. } => {
                self.beat_under_way.take_if(|waiting| *waiting == beat);
                self.tell(net, Event::BeatFailed { beat });
            }
            Ticket::Claim { call, .. } => self.claim_failed(net, call),
            Ticket::End {
                connection, tokens, ..
            } if connection == self.connection => self.say_again(&tokens),
            Ticket::End { .. } | Ticket::Sweep { .. } | Ticket::Leave => {}
        }
    }

    pub(super) fn answered(
        &mut self,
        net: &mut Network,
        ticket: Ticket,
        answer: Answer,
        astray: bool,
    ) {
        self.note_refusal(net, &ticket, &answer);
        match (ticket, answer) {
            // One whose wait was over goes unused: a worker that others wait for, no longer than for its lease.
            (Ticket::Register { worker, asked_at }, Answer::Opened(opened))
                if self.registering == Some(asked_at) && self.registered.is_none() =>
            {
                self.succeed(net, (worker, opened.epoch, opened.epoch_no), asked_at);
            }
            (
                Ticket::Succeed {
                    worker,
                    epoch,
                    epoch_no,
                    asked_at,
                },
                Answer::Reattached(_),
            ) if self.registering == Some(asked_at) => {
                self.registering = None;
                self.registered = None;
                self.predecessors = vec![worker];
                self.joined(net, (worker, epoch, epoch_no), None, asked_at, astray);
            }
            // Not as a worker that it is no more, or was when this was asked.
            (Ticket::Open { worker, asked_at }, Answer::Opened(opened))
                if self.rejoining == Some((worker, asked_at)) =>
            {
                self.reattach(net, worker, opened, asked_at);
            }
            (
                Ticket::Reattach {
                    worker,
                    epoch,
                    epoch_no,
                    asked_at,
                    found,
                    tokens,
                },
                Answer::Reattached(answers),
            ) => {
                self.stop_lost(net, &tokens, &answers);
                // The keeper would take it for the answer to a registration and be again who it is no more.
                let awaited = self.rejoining.take_if(|it| *it == (worker, asked_at));
                if awaited.is_some() || self.world.fault == Fault::LateReattach {
                    self.joined(net, (worker, epoch, epoch_no), found, asked_at, astray);
                }
            }
            (Ticket::Beat { beat, .. }, Answer::Beaten(answer))
                if self.beat_under_way == Some(beat) =>
            {
                self.beat_under_way = None;
                self.roster = answer.workers.into_iter().collect();
                self.answered = beat;
                let daemon = self.index;
                net.seen.push(Seen::Confirmed { daemon, astray });
                let revoked = answer.revoked.into_iter().map(|(_, token)| token).collect();
                self.tell(net, Event::BeatAnswered { beat, revoked });
            }
            (Ticket::Claim { call, .. }, Answer::Claimed(jobs, at)) => {
                self.claimed(net, call, jobs, at, astray);
            }
            (Ticket::End { connection, .. }, Answer::Ended(answers)) => {
                self.ended(net, connection, answers, astray);
            }
            (ticket @ Ticket::Succeed { .. }, Answer::Refused(_)) => {
                self.registered = None;
                self.given_up(net, ticket);
            }
            (ticket, Answer::Failed | Answer::Refused(_)) => {
                self.given_up(net, ticket);
            }
            _ => {}
        }
    }

    /// When the answer says that the worker or the epoch is gone, the keeper learns it.
    fn note_refusal(&mut self, net: &mut Network, ticket: &Ticket, answer: &Answer) {
        let refusal = match answer {
            Answer::Refused(Refused::OtherEpoch) => Refusal::OtherEpoch,
            answer if is_gone(answer) => Refusal::Dead,
            _ => return,
        };
        let (worker, epoch) = match *ticket {
            Ticket::Beat { worker, epoch, .. }
            | Ticket::Claim { worker, epoch, .. }
            | Ticket::End { worker, epoch, .. }
            | Ticket::Sweep { worker, epoch } => (worker, epoch),
            Ticket::Reattach { worker, .. } | Ticket::Open { worker, .. } => {
                (worker, Epoch(Uuid::nil()))
            }
            Ticket::Register { .. } | Ticket::Succeed { .. } | Ticket::Leave => return,
        };
        self.tell(
            net,
            Event::Refused {
                worker,
                epoch,
                refusal,
            },
        );
    }

    /// The handlers of leases that are gone must stop.
    fn stop_lost(&mut self, net: &mut Network, tokens: &[Token], answers: &[ReattachAnswer]) {
        for (token, answer) in tokens.iter().zip(answers) {
            if *answer == ReattachAnswer::Held(Kept::Stop) {
                self.kill(net, *token, self.lost_grace(), false);
            }
        }
    }

    /// It is a member, if the keeper takes the answer. What it remembered later than `found` it has said.
    fn joined(
        &mut self,
        net: &mut Network,
        (worker, epoch, epoch_no): (WorkerId, Epoch, i64),
        found: Option<Beat>,
        asked_at: Mono,
        astray: bool,
    ) {
        let before = self.keeper.member();
        self.tell(
            net,
            Event::Registered {
                worker,
                epoch,
                asked_at,
            },
        );
        if before.is_none() && self.keeper.member() == Some((worker, epoch)) {
            self.epoch_no = epoch_no;
            self.memory.moved(found, self.sent);
            let daemon = self.index;
            net.seen.push(Seen::Confirmed { daemon, astray });
        }
    }

    /// Begins a round of probes.
    pub(super) fn probe(&mut self, net: &mut Network) {
        self.rounds += 1;
        let worker = self.worker_asked_for();
        self.round = Some(Round {
            number: self.rounds,
            sent: net.now,
            worker,
            sights: vec![None; SERVERS],
        });
        for host in 0..SERVERS {
            net.probe(self.here(), host, self.rounds, worker);
        }
        let over = net.now + ROUND;
        self.notice_at(net, over, Notice::RoundOver(self.rounds));
    }

    /// As which worker this daemon looks for its beats: between two epochs it is still the one that it was.
    pub(crate) fn worker_asked_for(&self) -> Option<WorkerId> {
        self.worker().or(self.predecessors.first().copied())
    }

    pub(super) fn sighted(&mut self, net: &mut Network, number: u64, host: usize, sight: Sight) {
        let Some(round) = self.round.as_mut().filter(|round| round.number == number) else {
            return;
        };
        round.sights[host] = Some(sight);
        if round.sights.iter().all(Option::is_some) {
            self.round_over(net, number);
        }
    }

    pub(super) fn round_over(&mut self, net: &mut Network, number: u64) {
        let Some(round) = self.round.take_if(|round| round.number == number) else {
            return;
        };
        let sent = Mono::from_millis(round.sent);
        let sights: Vec<Sight> = round
            .sights
            .into_iter()
            .map(|sight| sight.unwrap_or(Sight::Away))
            .collect();
        let known = Known {
            beat: self.answered,
            epoch_no: self.epoch_no,
        };
        let finding = self.primaries.on(sent, self.mono(net), &sights, known);
        self.host = finding.primary;
        let mut none = finding.none_anywhere;
        if self.world.fault == Fault::ProofTooEasy && finding.primary.is_none() {
            let standby = |sight: &&Sight| matches!(sight, Sight::Standby(_));
            none = sights.iter().filter(standby).count() >= SERVERS - 1;
        }
        if finding.changed {
            // Answers of the connections to the last one are not waited for.
            self.reconnect();
            if let Some(beat) = self.beat_under_way.take() {
                self.tell(net, Event::BeatFailed { beat });
            }
            self.tell(net, Event::BeatNow);
        }
        // What was asked for as another worker proves nothing for this one.
        if none && round.worker == self.worker_asked_for() {
            let before = self.keeper.trusted_until();
            self.tell(net, Event::NoPrimary { asked_at: sent });
            if self.keeper.trusted_until() > before {
                let (daemon, asked) = (self.index, round.sent);
                net.seen.push(Seen::Proved { daemon, asked });
            }
        }
        // A predecessor's beats have numbers of their own.
        if round.worker.is_some() && round.worker == self.worker() {
            self.prove(&sights);
        }
        let again = match self.host {
            Some(_) => round.sent + self.registration().heartbeat.unsigned_abs(),
            None => round.sent + OFTEN,
        };
        self.notice_at(net, again, Notice::ProbeTime);
    }

    /// What every host has shown cannot be lost in a switch any more. The primary counts too: one that was promoted just now may
    /// lack what the others have.
    fn prove(&mut self, sights: &[Sight]) {
        let Some(primary) = self.host else {
            return;
        };
        for (shown, sight) in self.shown.iter_mut().zip(sights) {
            if let Sight::Standby(facts) | Sight::Primary(facts) = sight {
                *shown = (*shown).max(facts.beat);
            }
        }
        let counts = |host: &usize| self.world.fault != Fault::PrimaryUnasked || *host != primary;
        let hosts = (0..SERVERS).filter(counts);
        if let Some(beat) = hosts.map(|host| self.shown[host]).min().flatten() {
            self.memory.proven(beat);
        }
    }
}
