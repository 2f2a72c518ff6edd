//! While there is no primary, and what random events have found.
use super::*;

fn other_epoch() -> Event {
    Event::Refused {
        worker: worker(1),
        epoch: EPOCH,
        refusal: Refusal::OtherEpoch,
    }
}

#[test]
fn proof_that_there_is_no_primary_is_as_good_as_a_beat() {
    let mut keeper = with_jobs(&[1]);
    keeper.try_start(at(0), token(1));
    for second in (4..90).step_by(4) {
        keeper.on(
            at(second),
            Event::NoPrimary {
                asked_at: at(second),
            },
        );
    }
    assert_eq!(keeper.trusted_until(), Some(at(88 + 20)));
    assert_eq!(keeper.try_start(at(89), token(1)), Start::Gone);
    // Also between the loss of one epoch and the re-attach in the next.
    keeper.on(at(90), other_epoch());
    keeper.on(at(91), Event::NoPrimary { asked_at: at(91) });
    assert_eq!(keeper.trusted_until(), Some(at(111)));
}

#[test]
fn trust_that_has_ended_does_not_come_back_by_a_proof() {
    let mut keeper = with_jobs(&[1]);
    keeper.try_start(at(0), token(1));
    keeper.on(at(20), Event::NoPrimary { asked_at: at(19) });
    assert_eq!(keeper.trusted_until(), Some(at(20)));
}

#[test]
fn a_primary_that_was_found_is_spoken_to_at_once() {
    let mut keeper = member();
    keeper.on(at(1), other_epoch());
    keeper.on(at(2), Event::RegisterFailed { asked_at: at(1) });
    let again = Command::Reattach {
        worker: worker(1),
        asked_at: at(2),
    };
    assert_eq!(keeper.on(at(2), Event::BeatNow), [again]);
    // Not while an answer is out.
    assert_eq!(keeper.on(at(2), Event::BeatNow), []);
}

/// Found by `invariants_hold_for_any_events`.
#[test]
fn a_token_that_comes_twice_is_one_job() {
    let mut keeper = member();
    let calls = [keeper.claim(at(0)).unwrap(), keeper.claim(at(0)).unwrap()];
    for call in calls {
        let jobs = vec![(job(1), token(4))];
        keeper.on(at(0), Event::ClaimAnswered { call, jobs });
        keeper.try_start(at(0), token(4));
    }
    assert_eq!(keeper.live.len(), 1);
    let kills = keeper.on(at(20), Event::Tick);
    assert!(matches!(&kills[..], [Command::Kill { tokens, .. }, ..] if tokens == &[token(4)]));
}

/// Found by the simulation, seed 16172 of its first build: the re-attach is answered when the worker has given itself up and
/// registers anew. Its leases are recovered then, so nothing may start under them.
#[test]
fn an_answer_to_a_life_before_is_none() {
    let mut keeper = with_jobs(&[1]);
    keeper.on(at(17), other_epoch());
    let again = keeper.on(at(20), Event::Tick);
    assert!(
        again.contains(&Command::Register { asked_at: at(20) }),
        "{again:?}"
    );
    let late = |worker, asked_at| Event::Registered {
        worker,
        epoch: Epoch(Uuid::from_u128(2)),
        asked_at,
    };
    keeper.on(at(21), late(worker(1), at(17)));
    assert_eq!(keeper.member(), None);
    keeper.on(at(21), late(worker(2), at(20)));
    assert!(keeper.member().is_some());
}

/// A large memory takes longer to say than an answer is waited for.
#[test]
fn a_re_attach_may_be_answered_after_it_was_asked_again() {
    let mut keeper = with_jobs(&[1]);
    keeper.try_start(at(0), token(1));
    keeper.on(at(5), other_epoch());
    let again = keeper.on(at(12), Event::Tick);
    assert!(matches!(again[..], [Command::Reattach { .. }]), "{again:?}");
    assert!(keeper.rejoins(worker(1), at(5)) && !keeper.rejoins(worker(1), at(4)));
    let answer = |asked_at| Event::Registered {
        worker: worker(1),
        epoch: Epoch(Uuid::from_u128(2)),
        asked_at,
    };
    keeper.on(at(13), answer(at(4)));
    assert_eq!(keeper.member(), None);
    keeper.on(at(13), answer(at(5)));
    assert!(keeper.member().is_some());
    // Trust counts from when it was asked for that is answered.
    assert_eq!(keeper.trusted_until(), Some(at(25)));
}
