//! Differences that random histories have found, each as the shortest history that shows it.

use tenure_core::ids::JobId;
use tenure_core::model::{End, Gate, NewJob, Place, Refused, RunEnd, Stop};

use super::play::{Play, START};
use super::postgres::Postgres;
use super::sql;
use super::steps::RERUN;

fn job(job_type: &str) -> NewJob {
    NewJob {
        id: None,
        job_type: job_type.to_owned(),
        tenant: "default".to_owned(),
        priority: 0,
        run_at: None,
        unique_key: None,
        max_attempts: None,
        watermark: None,
    }
}

/// Plays it on a server.
fn play(history: impl FnOnce(&mut Play<'_>)) {
    let mut postgres = Postgres::start(START);
    let mut play = Play::new(1, Some(&mut postgres));
    history(&mut play);
    play.compare();
}

/// Two registered daemons that have beaten since, so both may claim.
fn two_daemons(play: &mut Play<'_>) {
    for nth in 0..2 {
        let daemon = play.new_daemon();
        play.daemons.push(daemon);
        play.register(nth);
    }
    play.beat(0, false);
    play.beat(1, false);
}

/// The key of the second of them was taken although only the first counts, and its other users were not put in.
#[test]
fn an_id_that_stands_twice_in_a_batch_is_one_enqueue() {
    play(|play| {
        let id = Some(JobId(play.random.uuid_v7(play.now)));
        let key = |key: &str| Some(key.to_owned());
        let first = NewJob {
            id,
            unique_key: key("a"),
            ..job("mail")
        };
        let second = NewJob {
            id,
            unique_key: key("b"),
            ..job("mail")
        };
        let third = NewJob {
            unique_key: key("b"),
            ..job("mail")
        };
        play.enqueue(&[first, second, third]);
    });
}

/// They came in the order of a sort that was there for another purpose.
#[test]
fn jobs_become_ready_in_the_order_in_which_they_are_due() {
    play(|play| {
        two_daemons(play);
        let due = |ms: i64| NewJob {
            run_at: Some(START + ms),
            ..job("mail")
        };
        let jobs: Vec<NewJob> = (1..=12).map(|nth| due(nth * 7 % 13 * 100)).collect();
        play.enqueue(&jobs);
        play.pass(2_000);
        play.promote();
    });
}

/// The sweep said 0 when it had just declared their worker lost.
#[test]
fn a_sweep_counts_the_jobs_of_the_workers_that_it_declares_lost() {
    play(|play| {
        two_daemons(play);
        play.enqueue(&[job("mail"), job("report"), job("score")]);
        for _ in 0..9 {
            play.claim(0);
        }
        for _ in 0..10 {
            play.pass(2_500);
            play.sweep();
            play.beat(1, false);
        }
        assert!(play.met.recovered > 0);
    });
}

/// It did by the clock alone, though nobody could have spoken in a time that no sweep has seen.
#[test]
fn a_window_is_not_closed_by_time_in_which_nobody_could_speak() {
    play(|play| {
        two_daemons(play);
        play.take_copy();
        play.lose_tail();
        play.attach(0);
        // The new primary is frozen.
        play.pass(100_000);
        play.attach(0);
        play.sweep();
        play.pass(1_000);
        play.sweep();
    });
}

/// It was claimed at once, as new, while another daemon held it.
#[test]
fn an_enqueue_that_was_lost_and_is_repeated_waits_for_who_may_hold_the_job() {
    play(|play| {
        two_daemons(play);
        play.take_copy();
        let id = JobId(play.random.uuid_v7(play.now));
        let known = NewJob {
            id: Some(id),
            ..job("mail")
        };
        play.enqueue(std::slice::from_ref(&known));
        play.lose_tail();
        play.attach(0);
        play.enqueue(&[known, job("report")]);
        for _ in 0..9 {
            play.claim(0);
        }
        let place = &play.model.jobs[&id].place;
        assert!(matches!(place, Place::Ready { .. }), "{place:?}");
    });
}

/// By its times the job was from after the switch, so a person could retry what a worker was about to report as done.
#[test]
fn what_is_from_before_a_switch_is_not_told_by_clocks() {
    play(|play| {
        two_daemons(play);
        let id = JobId(play.random.uuid_v7(play.now));
        let known = NewJob {
            id: Some(id),
            ..job("mail")
        };
        play.enqueue(&[known]);
        play.take_copy();
        play.lose_tail();
        play.now -= 60_000;
        play.attach(0);
        assert_eq!(play.model.stop(id, Stop::Cancel), Err(Refused::Reattaching));
        let statement = sql::stop(&play.names, id, Stop::Cancel);
        play.same(&statement, Err(Refused::Reattaching));
    });
}

/// A re-attach renews a worker but tells it of nobody, and the new one claimed as if it were known.
#[test]
fn a_new_worker_claims_when_beats_have_told_the_others() {
    play(|play| {
        two_daemons(play);
        let third = play.new_daemon();
        play.daemons.push(third);
        play.register(2);
        play.enqueue(&[job("mail"), job("report"), job("score")]);
        play.attach(0);
        play.attach(1);
        for _ in 0..5 {
            play.claim(2);
        }
        assert_eq!(play.met.claimed, 0);
        play.beat(0, false);
        play.beat(1, false);
        for _ in 0..9 {
            play.claim(2);
        }
        assert!(play.met.claimed > 0);
    });
}

/// The window was over at once when no worker was known, and the jobs of one that had come in the lost tail were given out.
#[test]
fn a_worker_that_nobody_knows_of_is_waited_for() {
    play(|play| {
        play.take_copy();
        play.lose_tail();
        let alone = play.new_daemon();
        play.daemons.push(alone);
        play.register(0);
        play.compare();
        for _ in 0..30 {
            play.pass(2_500);
            play.sweep();
            play.beat(0, false);
        }
        assert_eq!(play.model.gate, Gate::Open);
    });
}

/// An epoch was lost with all that was in it, and the next one got its number: what had been claimed in the lost one looked like
/// claimed in this one, so a completion counted whose effects were lost.
#[test]
fn numbers_of_lost_epochs_come_again() {
    play(|play| {
        two_daemons(play);
        play.take_copy();
        play.lose_tail();
        // It falls behind before anybody has opened an epoch.
        play.take_copy();
        play.attach_surely(0);
        play.attach_surely(1);
        play.enqueue(&[job(RERUN)]);
        while play.daemons[0].held.is_empty() {
            play.claim(0);
        }
        let memory = play.daemons[0].held.values().next().unwrap().clone();
        play.write_effects(&memory);
        let end = RunEnd {
            job: memory.job,
            run: memory.run,
            token: memory.token,
            end: End::Completed,
            delay: 0,
            result: None,
            follow_ups: Vec::new(),
            watermark: None,
        };
        play.finish(0, vec![(memory.clone(), end)], true);
        play.lose_tail();
        // One that knows of no epoch comes first.
        let new = play.new_daemon();
        play.daemons.push(new);
        play.register(2);
        assert_eq!(play.model.epoch_no, memory.epoch_no);
        play.attach_surely(0);
        let place = &play.model.jobs[&memory.job].place;
        assert!(!matches!(place, Place::Ended(_)), "{place:?}");
    });
}
