#![allow(clippy::unwrap_used)]
use super::*;

const OURS: i64 = 7;

fn seen(timeline: i32) -> Seen {
    Seen {
        system: Some(OURS),
        timeline: Some(timeline),
        ..Seen::default()
    }
}

fn at(ms: u64) -> Mono {
    Mono::from_millis(ms)
}

fn facts(timeline: i32, started: i64) -> Facts {
    Facts {
        system: Some(OURS),
        timeline: Some(timeline),
        started: Some(started),
        epoch_no: 4,
        ..Facts::default()
    }
}

fn primary(timeline: i32, started: i64) -> Sight {
    Sight::Primary(facts(timeline, started))
}

fn standby(beat: i64, swept_at: i64) -> Sight {
    Sight::Standby(Facts {
        timeline: None,
        beat: Some(Beat(beat)),
        swept_at: Some(swept_at),
        received: Some(1_000),
        ..facts(0, 1)
    })
}

/// Rounds that are asked and answered in the same moment.
fn round(primaries: &mut Primaries, ms: u64, sights: &[Sight]) -> Finding {
    let known = Known {
        beat: Beat(10),
        epoch_no: 4,
    };
    primaries.on(at(ms), at(ms), sights, known)
}

/// The same, but that much is another.
fn standby_with(change: impl Fn(&mut Facts)) -> Sight {
    let Sight::Standby(mut facts) = standby(9, 5) else {
        unreachable!()
    };
    change(&mut facts);
    Sight::Standby(facts)
}

#[test]
fn the_one_that_takes_writes_is_found_and_a_promotion_followed() {
    let mut them = Primaries::new(2, Seen::default());
    let first = round(&mut them, 0, &[primary(1, 1), standby(10, 1)]);
    assert_eq!((first.primary, first.changed), (Some(0), true));
    let same = round(&mut them, 1, &[primary(1, 1), standby(10, 2)]);
    assert_eq!((same.primary, same.changed), (Some(0), false));
    let none = round(&mut them, 2, &[Sight::Away, standby(10, 2)]);
    assert_eq!((none.primary, none.none_anywhere), (None, false));
    // A higher timeline is followed at once.
    let next = round(&mut them, 3, &[Sight::Away, primary(2, 1)]);
    assert_eq!((next.primary, next.changed), (Some(1), true));
    assert_eq!(them.seen().timeline, Some(2));
}

#[test]
fn an_old_primary_is_never_gone_back_to() {
    let mut them = Primaries::new(2, Seen::default());
    round(&mut them, 0, &[primary(1, 1), primary(2, 2)]);
    let found = round(&mut them, 60_000, &[primary(1, 1), Sight::Away]);
    assert_eq!((found.primary, found.stale), (None, Some(0)));
    // Nor by the next process.
    let mut next = Primaries::new(2, them.seen());
    let found = round(&mut next, 0, &[primary(1, 1), Sight::Away]);
    assert_eq!((found.primary, found.stale), (None, Some(0)));
}

#[test]
fn a_person_can_put_a_server_in_place_of_a_newer_one() {
    let mut them = Primaries::new(2, seen(5));
    let accepted = |instead_of| {
        Sight::Primary(Facts {
            instead_of: Some(instead_of),
            ..facts(2, 1)
        })
    };
    let found = round(&mut them, 0, &[accepted(4), Sight::Away]);
    assert_eq!((found.primary, found.stale), (None, Some(0)));
    let found = round(&mut them, 1, &[accepted(5), Sight::Away]);
    assert_eq!((found.primary, found.stale), (Some(0), None));
    assert_eq!(them.seen().timeline, Some(2));
    // The word is spent: a later primary shows it too, and the timelines up to 5 fence again.
    let later = Sight::Primary(Facts {
        instead_of: Some(5),
        ..facts(4, 1)
    });
    assert_eq!(round(&mut them, 2, &[Sight::Away, later]).primary, Some(1));
    for mut them in [Primaries::new(2, them.seen()), them] {
        let found = round(&mut them, 9_000, &[accepted(5), Sight::Away]);
        assert_eq!((found.primary, found.stale), (None, Some(0)));
        // Another word is another matter.
        assert_eq!(
            round(&mut them, 9_001, &[accepted(6), Sight::Away]).primary,
            Some(0)
        );
    }
}

#[test]
fn the_one_that_was_replaced_is_not_gone_back_to() {
    let with = |timeline, instead_of| {
        Sight::Primary(Facts {
            instead_of,
            ..facts(timeline, 1)
        })
    };
    let (newer, chosen) = (with(5, None), with(2, Some(5)));
    // It is still there while the word is said, comes back later, or is promoted once more.
    let mut them = Primaries::new(2, seen(5));
    let found = round(&mut them, 0, &[chosen.clone(), newer.clone()]);
    assert_eq!((found.primary, found.stale), (Some(0), Some(1)));
    for back in [newer, with(6, None)] {
        let found = round(&mut them, 60_000, &[chosen.clone(), back.clone()]);
        assert_eq!((found.primary, found.stale), (Some(0), Some(1)));
        let found = round(&mut them, 120_000, &[Sight::Away, back]);
        assert_eq!((found.primary, found.stale), (None, Some(1)));
    }
    // A new word is about all that was seen, the one of before included.
    let named = them.seen().to_replace();
    assert_eq!(named, Some(6));
    let found = round(&mut them, 180_000, &[Sight::Away, with(5, named)]);
    assert_eq!(found.primary, Some(1));
    // A word says nothing of a timeline above the one that it names.
    let mut them = Primaries::new(2, seen(5));
    let found = round(&mut them, 0, &[chosen, with(6, None)]);
    assert_eq!((found.primary, found.stale), (Some(1), None));
}

#[test]
fn a_memory_of_the_last_timeline_there_can_be_is_no_end() {
    let last = Seen {
        followed: Some(i32::MAX),
        ..Seen::default()
    };
    assert_eq!(last.to_replace(), Some(i32::MAX));
}

#[test]
fn another_installation_is_none_of_ours() {
    let of = |installation| {
        Sight::Primary(Facts {
            installation: Some(Uuid::from_u128(installation)),
            ..facts(3, 1)
        })
    };
    let mut them = Primaries::new(2, Seen::default());
    let found = round(&mut them, 0, &[of(1), of(2)]);
    assert_eq!(
        (found.primary, found.stranger, found.two),
        (Some(0), Some(1), None)
    );
    let found = round(&mut them, 60_000, &[Sight::Away, of(2)]);
    assert_eq!((found.primary, found.stranger), (None, Some(1)));
    let found = round(&mut Primaries::new(1, them.seen()), 0, &[of(2)]);
    assert_eq!((found.primary, found.stranger), (None, Some(0)));
}

#[test]
fn a_promotion_beside_a_living_primary_is_followed_and_said() {
    let mut them = Primaries::new(2, Seen::default());
    round(&mut them, 0, &[primary(1, 1), standby(10, 1)]);
    let found = round(&mut them, 1, &[primary(1, 1), primary(2, 5)]);
    assert_eq!((found.primary, found.two), (Some(1), Some((0, 1))));
    let later = round(&mut them, 2, &[primary(1, 1), primary(2, 5)]);
    assert_eq!((later.primary, later.stale), (Some(1), Some(0)));
}

#[test]
fn of_equal_ones_ours_stays_until_it_is_given_up() {
    let mut them = Primaries::new(3, Seen::default());
    round(&mut them, 0, &[primary(2, 1), standby(10, 1), Sight::Away]);
    let both = round(&mut them, 1, &[primary(2, 1), primary(2, 9), Sight::Away]);
    assert_eq!((both.primary, both.two), (Some(0), Some((0, 1))));
    let other = [Sight::Away, primary(2, 9), Sight::Away];
    assert_eq!(round(&mut them, 2, &other).primary, None);
    let given_up = round(&mut them, 4_000, &other);
    assert_eq!((given_up.primary, given_up.changed), (Some(1), true));
}

#[test]
fn one_server_under_two_names_is_one() {
    let mut them = Primaries::new(2, Seen::default());
    let found = round(&mut them, 0, &[primary(1, 1), primary(1, 1)]);
    assert_eq!((found.primary, found.two), (Some(0), None));
}

#[test]
fn a_restart_is_a_change_and_an_unknown_timeline_is_none() {
    let mut them = Primaries::new(1, Seen::default());
    round(&mut them, 0, &[primary(1, 1)]);
    assert!(round(&mut them, 1, &[primary(1, 2)]).changed);
    let untold = Sight::Primary(Facts::default());
    let mut them = Primaries::new(1, Seen::default());
    assert_eq!(
        round(&mut them, 0, std::slice::from_ref(&untold)).primary,
        Some(0)
    );
    assert!(!round(&mut them, 1, &[untold]).changed);
}

#[test]
fn another_system_is_taken_only_when_ours_has_gone() {
    let foreign = |timeline| {
        Sight::Primary(Facts {
            system: Some(8),
            ..facts(timeline, 1)
        })
    };
    let mut them = Primaries::new(2, Seen::default());
    let found = round(&mut them, 0, &[primary(3, 1), foreign(9)]);
    assert_eq!((found.primary, found.foreign), (Some(0), Some(1)));
    let found = round(&mut them, 1_000, &[primary(3, 1), foreign(9)]);
    assert_eq!((found.primary, found.foreign), (Some(0), Some(1)));
    assert_eq!(
        round(&mut them, 2_000, &[Sight::Away, foreign(1)]).primary,
        None
    );
    assert_eq!(
        round(&mut them, 9_000, &[Sight::Away, foreign(1)]).primary,
        Some(1)
    );
    assert_eq!(
        (them.seen().system, them.seen().timeline),
        (Some(8), Some(1))
    );
}

#[test]
fn that_there_is_none_is_proven_by_all_others() {
    let mut them = Primaries::new(3, Seen::default());
    let proven = |them: &mut Primaries, ms, sights: &[Sight]| round(them, ms, sights).none_anywhere;
    round(
        &mut them,
        0,
        &[primary(1, 1), standby(10, 5), standby(10, 5)],
    );
    let quiet = [Sight::Away, standby(9, 5), standby(8, 5)];
    assert!(!proven(&mut them, 100, &quiet));
    assert!(!proven(&mut them, 3_000, &quiet), "not for long enough");
    assert!(proven(&mut them, 3_001, &quiet));
    for doubtful in [
        // It was swept: somebody works.
        [Sight::Away, standby(9, 6), standby(8, 5)],
        // It does not know us.
        [Sight::Away, standby(7, 5), standby(8, 5)],
        // It receives, and only does not replay.
        [
            Sight::Away,
            standby_with(|facts| facts.received = Some(1_001)),
            standby(8, 5),
        ],
        [
            Sight::Away,
            standby_with(|facts| facts.received = None),
            standby(8, 5),
        ],
        // It follows a primary from before the last switch.
        [
            Sight::Away,
            standby_with(|facts| facts.epoch_no = 3),
            standby(8, 5),
        ],
        // It may be the next primary.
        [Sight::Away, Sight::Away, standby(8, 5)],
        [Sight::Away, Sight::ReadOnly, standby(8, 5)],
        [Sight::Away, primary(2, 3), standby(8, 5)],
        [primary(1, 1), standby(8, 5), standby(8, 5)],
    ] {
        let mut them = Primaries::new(3, Seen::default());
        round(
            &mut them,
            0,
            &[primary(1, 1), standby(10, 5), standby(10, 5)],
        );
        assert!(!proven(&mut them, 9_000, &doubtful), "{doubtful:?}");
    }
    // The last one came back as a standby.
    assert!(proven(
        &mut them,
        3_100,
        &[standby(0, 0), standby(9, 5), standby(8, 5)]
    ));
}

#[test]
fn one_name_alone_proves_nothing() {
    let mut them = Primaries::new(1, Seen::default());
    round(&mut them, 0, &[primary(1, 1)]);
    assert!(!round(&mut them, 9_000, &[Sight::Away]).none_anywhere);
}

#[test]
fn a_name_may_lead_to_the_same_server_or_its_successor_and_to_no_other() {
    let lead = facts(2, 20);
    let with = |change: fn(&mut Facts)| {
        let mut found = lead;
        change(&mut found);
        found
    };
    for (found, expected) in [
        (lead, true),
        (with(|it| it.timeline = Some(3)), true),
        (with(|it| it.timeline = None), true),
        (with(|it| it.system = None), true),
        (with(|it| it.timeline = Some(1)), false),
        (with(|it| it.system = Some(8)), false),
        (with(|it| it.instead_of = Some(5)), true),
    ] {
        assert_eq!(found.stands_for(&lead), expected, "{found:?}");
    }
    let put_in_place = Facts {
        instead_of: Some(2),
        ..facts(1, 10)
    };
    assert!(!lead.stands_for(&put_in_place), "it was replaced");
    let installed = |number| Facts {
        installation: Some(Uuid::from_u128(number)),
        ..lead
    };
    assert!(installed(1).stands_for(&installed(1)));
    assert!(!installed(2).stands_for(&installed(1)));
    assert!(installed(2).stands_for(&lead));
}

#[test]
fn of_two_that_take_writes_the_word_of_a_person_comes_before_the_timeline() {
    let put_in_place = Facts {
        instead_of: Some(2),
        ..facts(1, 10)
    };
    assert!(facts(3, 30).outranks(&facts(2, 20)));
    assert!(!facts(2, 20).outranks(&facts(3, 30)));
    assert!(put_in_place.outranks(&facts(2, 20)));
    assert!(!facts(2, 20).outranks(&put_in_place));
    // The word was about timelines up to 2.
    assert!(facts(3, 30).outranks(&put_in_place));
    assert!(!put_in_place.outranks(&facts(3, 30)));
}
