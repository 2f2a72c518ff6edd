#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use proptest::prelude::*;
use std::time::Duration;
use uuid::Uuid;

mod outages;

const EPOCH: Epoch = Epoch(Uuid::from_u128(1));

fn limits() -> Limits {
    Limits::new(
        Duration::from_secs(30),
        Duration::from_secs(3),
        Duration::from_secs(10),
    )
    .unwrap()
}

fn at(seconds: u64) -> Mono {
    Mono::from_millis(seconds * 1000)
}

fn worker(n: u128) -> WorkerId {
    WorkerId(Uuid::from_u128(n))
}

fn token(n: u128) -> Token {
    Token(Uuid::from_u128(n))
}

fn job(n: u128) -> JobId {
    JobId(Uuid::from_u128(n))
}

/// Registered at 0, so trusted until 20 s and beating at 3 s.
fn member() -> Keeper {
    let mut keeper = Keeper::new(limits());
    assert_eq!(
        keeper.on(at(0), Event::Tick),
        [Command::Register { asked_at: at(0) }]
    );
    keeper.on(
        at(0),
        Event::Registered {
            worker: worker(1),
            epoch: EPOCH,
            asked_at: at(0),
        },
    );
    keeper
}

/// A member with one job for each number, waiting.
fn with_jobs(numbers: &[u128]) -> Keeper {
    let mut keeper = member();
    let call = keeper.claim(at(0)).unwrap();
    let jobs = numbers.iter().map(|n| (job(*n), token(*n))).collect();
    keeper.on(at(0), Event::ClaimAnswered { call, jobs });
    keeper
}

fn beat_of(commands: &[Command]) -> (Beat, Call, &[Call]) {
    match commands {
        [
            Command::Beat {
                beat,
                settled,
                open,
                ..
            },
        ] => (*beat, *settled, open),
        other => panic!("expected one beat, not {other:?}"),
    }
}

#[test]
fn trust_counts_from_the_sending() {
    let mut keeper = member();
    let (beat, ..) = beat_of(&keeper.on(at(3), Event::Tick));
    keeper.on(
        at(8),
        Event::BeatAnswered {
            beat,
            revoked: vec![],
        },
    );
    assert_eq!(keeper.trusted_until(), Some(at(23)));
}

#[test]
fn an_answer_after_the_wait_means_nothing_and_the_next_beat_follows() {
    let mut keeper = member();
    let (lost, ..) = beat_of(&keeper.on(at(3), Event::Tick));
    assert_eq!(keeper.on(at(9), Event::Tick), []);
    let (next, ..) = beat_of(&keeper.on(at(10), Event::Tick));
    assert_ne!(lost, next);
    keeper.on(
        at(11),
        Event::BeatAnswered {
            beat: lost,
            revoked: vec![],
        },
    );
    assert_eq!(keeper.trusted_until(), Some(at(20)));
}

#[test]
fn a_request_during_a_beat_is_answered_by_the_next_one() {
    let mut keeper = member();
    let (beat, ..) = beat_of(&keeper.on(at(1), Event::BeatNow));
    assert_eq!(keeper.on(at(1), Event::BeatNow), []);
    beat_of(&keeper.on(
        at(2),
        Event::BeatAnswered {
            beat,
            revoked: vec![],
        },
    ));
}

#[test]
fn failed_beats_keep_their_pace() {
    let mut keeper = member();
    let (beat, ..) = beat_of(&keeper.on(at(3), Event::Tick));
    assert_eq!(keeper.on(at(3), Event::BeatFailed { beat }), []);
    assert_eq!(keeper.wake_at(), Some(at(6)));
}

#[test]
fn a_call_stays_open_until_the_last_end_is_confirmed() {
    let mut keeper = with_jobs(&[1, 2]);
    assert_eq!(keeper.try_start(at(0), token(1)), Start::Go);
    keeper.on(at(1), Event::Ended { token: token(1) });
    keeper.on(at(1), Event::Ended { token: token(2) });
    keeper.on(
        at(1),
        Event::Confirmed {
            tokens: vec![token(1), token(1)],
        },
    );
    let commands = keeper.on(at(3), Event::Tick);
    let (beat, settled, open) = beat_of(&commands);
    assert_eq!((settled, open), (Call(1), &[Call(1)][..]));
    keeper.on(
        at(3),
        Event::BeatAnswered {
            beat,
            revoked: vec![],
        },
    );
    keeper.on(
        at(4),
        Event::Confirmed {
            tokens: vec![token(2)],
        },
    );
    assert_eq!(beat_of(&keeper.on(at(6), Event::Tick)).2, []);
}

#[test]
fn a_claim_answered_too_late_starts_nothing_and_is_shown_as_a_ghost_at_once() {
    let mut keeper = member();
    let call = keeper.claim(at(0)).unwrap();
    keeper.on(at(1), Event::ClaimGivenUp { call });
    let commands = keeper.on(
        at(2),
        Event::ClaimAnswered {
            call,
            jobs: vec![(job(1), token(1))],
        },
    );
    assert_eq!(beat_of(&commands).1, call);
    assert_eq!(beat_of(&commands).2, []);
    assert_eq!(keeper.try_start(at(2), token(1)), Start::Gone);
}

#[test]
fn the_end_of_trust_kills_what_runs_and_gives_back_what_waits() {
    let mut keeper = with_jobs(&[1, 2]);
    keeper.try_start(at(0), token(1));
    let commands = keeper.on(at(20), Event::Tick);
    assert!(commands.contains(&Command::Kill {
        tokens: vec![token(1)],
        why: Why::TrustEnded
    }));
    assert!(commands.contains(&Command::Release {
        tokens: vec![token(2)]
    }));
    assert_eq!(keeper.claim(at(20)), None);
    assert_eq!(keeper.try_start(at(20), token(2)), Start::Gone);
    assert!(
        !keeper
            .on(at(21), Event::Tick)
            .iter()
            .any(|c| matches!(c, Command::Kill { .. }))
    );
}

#[test]
fn trust_is_looked_at_again_right_before_a_start() {
    let mut keeper = with_jobs(&[1]);
    assert_eq!(keeper.try_start(at(20), token(1)), Start::Release);
    assert_eq!(keeper.try_start(at(20), token(1)), Start::Gone);
}

#[test]
fn a_second_lease_of_a_job_waits_for_no_handler_of_the_first() {
    let mut keeper = with_jobs(&[1]);
    keeper.try_start(at(0), token(1));
    let call = keeper.claim(at(1)).unwrap();
    keeper.on(
        at(1),
        Event::ClaimAnswered {
            call,
            jobs: vec![(job(1), token(9))],
        },
    );
    assert_eq!(keeper.try_start(at(1), token(9)), Start::Release);
}

#[test]
fn a_revocation_stops_one_job_and_the_end_of_trust_sharpens_it() {
    let mut keeper = with_jobs(&[1, 2, 3]);
    keeper.try_start(at(0), token(1));
    keeper.try_start(at(0), token(2));
    let (beat, ..) = beat_of(&keeper.on(at(1), Event::BeatNow));
    let revoked = vec![token(1), token(3), token(7)];
    let commands = keeper.on(at(1), Event::BeatAnswered { beat, revoked });
    let kill = Command::Kill {
        tokens: vec![token(1)],
        why: Why::Revoked,
    };
    assert_eq!(
        commands,
        [
            kill,
            Command::Release {
                tokens: vec![token(3)]
            }
        ]
    );
    let commands = keeper.on(at(21), Event::Tick);
    assert!(commands.contains(&Command::Kill {
        tokens: vec![token(1), token(2)],
        why: Why::TrustEnded
    }));
}

#[test]
fn declared_dead_it_registers_anew_only_when_all_handlers_are_dead() {
    let mut keeper = with_jobs(&[1, 2]);
    keeper.try_start(at(0), token(1));
    let refused = Event::Refused {
        worker: worker(1),
        epoch: EPOCH,
        refusal: Refusal::Dead,
    };
    let commands = keeper.on(at(1), refused.clone());
    assert_eq!(
        commands,
        [Command::Kill {
            tokens: vec![token(1)],
            why: Why::DeclaredDead
        }]
    );
    assert_eq!((keeper.claim(at(1)), keeper.trusted_until()), (None, None));
    assert_eq!(keeper.on(at(5), Event::Tick), []);
    let commands = keeper.on(at(6), Event::Ended { token: token(1) });
    assert_eq!(commands, [Command::Register { asked_at: at(6) }]);
    keeper.on(
        at(6),
        Event::Registered {
            worker: worker(2),
            epoch: EPOCH,
            asked_at: at(6),
        },
    );
    assert_eq!(
        keeper.on(at(6), refused),
        [],
        "a late refusal of the old worker means nothing"
    );
    assert_eq!(keeper.claim(at(6)), Some(Call(2)));
}

#[test]
fn a_claim_of_the_worker_that_died_starts_nothing_under_the_next() {
    let mut keeper = member();
    let call = keeper.claim(at(0)).unwrap();
    keeper.on(
        at(1),
        Event::Refused {
            worker: worker(1),
            epoch: EPOCH,
            refusal: Refusal::Dead,
        },
    );
    keeper.on(
        at(1),
        Event::Registered {
            worker: worker(2),
            epoch: EPOCH,
            asked_at: at(1),
        },
    );
    keeper.on(
        at(2),
        Event::ClaimAnswered {
            call,
            jobs: vec![(job(1), token(1))],
        },
    );
    assert_eq!(keeper.try_start(at(2), token(1)), Start::Gone);
}

#[test]
fn another_epoch_keeps_the_handlers_and_drops_the_claims_under_way() {
    let mut keeper = with_jobs(&[1]);
    keeper.try_start(at(0), token(1));
    let call = keeper.claim(at(1)).unwrap();
    let refused = Event::Refused {
        worker: worker(1),
        epoch: EPOCH,
        refusal: Refusal::OtherEpoch,
    };
    assert_eq!(
        keeper.on(at(2), refused),
        [Command::Reattach {
            worker: worker(1),
            asked_at: at(2)
        }]
    );
    assert_eq!(
        keeper.on(
            at(2),
            Event::ClaimAnswered {
                call,
                jobs: vec![(job(2), token(2))]
            }
        ),
        []
    );
    assert_eq!(
        keeper.on(at(2), Event::RegisterFailed { asked_at: at(2) }),
        []
    );
    assert_eq!(
        keeper.on(at(5), Event::Tick),
        [Command::Reattach {
            worker: worker(1),
            asked_at: at(5)
        }]
    );
    let epoch = Epoch(Uuid::from_u128(2));
    keeper.on(
        at(6),
        Event::Registered {
            worker: worker(1),
            epoch,
            asked_at: at(5),
        },
    );
    assert_eq!(keeper.trusted_until(), Some(at(25)));
    assert_eq!(keeper.try_start(at(6), token(2)), Start::Gone);
    assert_eq!(beat_of(&keeper.on(at(8), Event::Tick)).2, [Call(1)]);
}

#[test]
fn an_unanswered_registration_is_asked_again() {
    let mut keeper = Keeper::new(limits());
    keeper.on(at(0), Event::Tick);
    assert_eq!(keeper.on(at(6), Event::Tick), []);
    assert_eq!(
        keeper.on(at(7), Event::Tick),
        [Command::Register { asked_at: at(7) }]
    );
    keeper.on(
        at(8),
        Event::Registered {
            worker: worker(1),
            epoch: EPOCH,
            asked_at: at(0),
        },
    );
    assert_eq!(
        keeper.member(),
        Some((worker(1), EPOCH)),
        "the answer to the first question is as good"
    );
    assert_eq!(keeper.trusted_until(), Some(at(0) + limits().trust()));
}

/// What a shell may do, with small numbers so that they meet.
#[derive(Clone, Debug)]
enum Step {
    On(Event),
    Claim,
    Start(Token),
}

fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let token_ = || (1_u128..6).prop_map(token);
    let step = prop_oneof![
        4 => Just(Step::On(Event::Tick)),
        4 => (1_i64..40, prop::collection::vec(token_(), 0..2))
            .prop_map(|(beat, revoked)| Step::On(Event::BeatAnswered { beat: Beat(beat), revoked })),
        1 => (1_i64..40).prop_map(|beat| Step::On(Event::BeatFailed { beat: Beat(beat) })),
        1 => Just(Step::On(Event::BeatNow)),
        1 => Just(Step::On(Event::NoPrimary { asked_at: Mono::ZERO })),
        4 => (1_u128..4, 1_u128..3).prop_map(|(w, e)| Step::On(Event::Registered {
            worker: worker(w), epoch: Epoch(Uuid::from_u128(e)), asked_at: Mono::ZERO })),
        1 => Just(Step::On(Event::RegisterFailed { asked_at: Mono::ZERO })),
        1 => (1_u128..4, 1_u128..3, any::<bool>()).prop_map(|(w, e, dead)| Step::On(Event::Refused {
            worker: worker(w), epoch: Epoch(Uuid::from_u128(e)),
            refusal: if dead { Refusal::Dead } else { Refusal::OtherEpoch } })),
        3 => (1_i64..8, prop::collection::vec((1_u128..4, 1_u128..6), 0..3)).prop_map(|(call, jobs)| Step::On(
            Event::ClaimAnswered { call: Call(call), jobs: jobs.into_iter().map(|(j, t)| (job(j), token(t))).collect() })),
        1 => (1_i64..8).prop_map(|call| Step::On(Event::ClaimGivenUp { call: Call(call) })),
        2 => token_().prop_map(|token| Step::On(Event::Ended { token })),
        2 => token_().prop_map(|token| Step::On(Event::Confirmed { tokens: vec![token] })),
        3 => Just(Step::Claim),
        4 => token_().prop_map(Step::Start),
    ];
    prop::collection::vec((0_u64..6_000, step), 1..120)
}

proptest! {
    /// Whatever comes in whatever order: no panic, and the invariants of the module's header.
    #[test]
    fn invariants_hold_for_any_events(steps in steps()) {
        let mut keeper = Keeper::new(limits());
        let (mut now, mut confirmed) = (Mono::ZERO, None);
        let (mut asked, mut sent) = (None, None::<(Beat, Mono)>);
        for (wait, step) in steps {
            now = now + Duration::from_millis(wait);
            let commands = match step {
                Step::Claim => {
                    let call = keeper.claim(now);
                    prop_assert!(call.is_none() || keeper.trusted_until().is_some_and(|until| now < until));
                    vec![]
                }
                Step::Start(token) => {
                    let live = keeper.live.len();
                    let start = keeper.try_start(now, token);
                    prop_assert!(start != Start::Go || keeper.trusted_until().is_some_and(|until| now < until));
                    prop_assert_eq!(keeper.live.len(), live + usize::from(start == Start::Go));
                    vec![]
                }
                Step::On(mut event) => {
                    match &mut event {
                        Event::Registered { asked_at, .. } | Event::RegisterFailed { asked_at } => {
                            *asked_at = asked.unwrap_or_default();
                        }
                        Event::NoPrimary { asked_at } => *asked_at = now,
                        // Most beats that are answered are the last one.
                        Event::BeatAnswered { beat, .. } | Event::BeatFailed { beat } if beat.0 > 5 => {
                            *beat = sent.map_or(*beat, |(last, _)| last);
                        }
                        _ => {}
                    }
                    match &event {
                        Event::Registered { asked_at, .. } | Event::NoPrimary { asked_at } => confirmed = confirmed.max(Some(*asked_at)),
                        Event::BeatAnswered { beat, .. } => {
                            let this = sent.filter(|(number, _)| number == beat);
                            confirmed = confirmed.max(this.map(|(_, at)| at));
                        }
                        _ => {}
                    }
                    keeper.on(now, event)
                }
            };
            for command in &commands {
                match command {
                    Command::Register { asked_at } => {
                        prop_assert!(keeper.live.is_empty());
                        asked = Some(*asked_at);
                    }
                    Command::Reattach { asked_at, .. } => asked = Some(*asked_at),
                    Command::Beat { beat, open, settled, .. } => {
                        prop_assert!(sent.is_none_or(|(before, _)| before < *beat));
                        prop_assert!(open.iter().all(|call| call <= settled));
                        prop_assert!(keeper.calls.settled() == *settled);
                        sent = Some((*beat, now));
                    }
                    Command::Kill { tokens, .. } | Command::Release { tokens } => prop_assert!(!tokens.is_empty()),
                }
            }
            prop_assert!(keeper.trusted_until() <= confirmed.map(|sent| sent + limits().trust()));
            let trusted = keeper.trusted_until().is_some_and(|until| now < until);
            let running = keeper.jobs.values().filter(|held| held.state == State::Running).count();
            prop_assert!(trusted || commands.is_empty() || running == 0);
            let handlers = keeper.jobs.values().filter(|held| matches!(held.state, State::Running | State::Stopping(_)));
            prop_assert_eq!(handlers.count(), keeper.live.len());
        }
    }
}
