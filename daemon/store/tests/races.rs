//! Two at once, with two connections: whichever comes first, a job is never lost and never in two places.

use std::process::Command;
use std::thread;

use crate::support::{Conn, Lab, Worker};

#[test]
fn races() {
    let lab = Lab::start();
    cancel_against_claim(&lab);
    look_ups_while_the_job_moves(&lab);
    completions_wait_for_nobody(&lab);
    completion_against_recovery(&lab);
    promotion_against_cancel(&lab);
    persons_against_each_other(&lab);
    a_key_whose_job_ended_while_we_waited(&lab);
    a_request_whose_job_is_claimed_again(&lab);
    assert_lease_holds_until_commit(&lab);
    snapshots_of_readers(&lab);
    every_table_has_a_key(&lab);
    assert_eq!(lab.deadlocks(), Vec::<String>::new());
}

/// Runs both at once, each on its own connection.
fn both<A: Send, B: Send>(a: impl FnOnce() -> A + Send, b: impl FnOnce() -> B + Send) -> (A, B) {
    thread::scope(|scope| {
        let second = scope.spawn(b);
        let first = a();
        (first, second.join().unwrap())
    })
}

fn sweep(c: &mut Conn, w: &Worker) {
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    c.run(&format!("SELECT sweep('{}')", w.epoch));
}

fn cancel_against_claim(lab: &Lab) {
    let db = lab.db("cancels");
    let (mut a, mut b) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut a);
    let (mut stopped, mut cancelled) = (0, 0);
    for round in 0..150 {
        let job = a.enqueue("m", "");
        if round % 2 == 1 {
            let held = w.claim_one(&mut a, "m");
            w.end(&mut a, "released", &held, "");
        }
        let (answer, held) = both(
            || a.one(&format!("SELECT cancel('{job}')")),
            || w.claim(&mut b, "m", 1),
        );
        match (answer.as_str(), held.as_slice()) {
            ("cancelled", []) => cancelled += 1,
            ("stopping", [held]) => {
                stopped += 1;
                assert_eq!(w.end(&mut b, "completed", held, ""), "done cancelled");
            }
            other => panic!("{other:?}"),
        }
        assert!(a.state(&job).starts_with("cancelled/"));
    }
    println!("{cancelled} cancelled, {stopped} stopped");
    db.sound();
}

/// A job is found whatever it changes from and to, by the view and by the functions.
fn look_ups_while_the_job_moves(lab: &Lab) {
    let db = lab.db("moves");
    let (mut a, mut b) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut a);
    let job = a.enqueue("m", "");
    both(
        || {
            for _ in 0..150 {
                // While the other's cancel is not rolled back there is nothing to claim.
                let held = loop {
                    if let Some(held) = w.claim(&mut a, "m", 1).pop() {
                        break held;
                    }
                };
                w.end(&mut a, "failed", &held, "");
                a.run(&format!("UPDATE lease SET attempts = 0; UPDATE later SET attempts = 0; SELECT promote('{}')", w.epoch));
            }
        },
        || {
            for _ in 0..300 {
                assert_eq!(
                    b.one(&format!("SELECT count(*) FROM jobs WHERE id = '{job}'")),
                    "1"
                );
                b.run("BEGIN");
                let answer = b.one(&format!("SELECT cancel('{job}')"));
                assert!(
                    ["cancelled", "stopping"].contains(&answer.as_str()),
                    "{answer}"
                );
                b.run("ROLLBACK");
            }
        },
    );
    db.sound();
}

/// A user's open transaction has asked to stop, to complete by hand, or asserts the lease: a batch of ends does not wait for it.
fn completions_wait_for_nobody(lab: &Lab) {
    let db = lab.db("batches");
    let (mut c, mut user) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    c.run("SET lock_timeout = '5 s'");
    let acts = [
        "cancel('{}')",
        "complete_manually('{}', 'ann')",
        "move_to_dead_letter('{}')",
        "assert_lease('{}', '{token}')",
    ];
    for act in acts {
        for _ in 0..3 {
            c.enqueue("m", "");
        }
        let held = w.claim(&mut c, "m", 3);
        user.run("BEGIN");
        user.run(&format!(
            "SELECT {}",
            act.replacen("{}", &held[1].job, 1)
                .replace("{token}", &held[1].token)
        ));
        let items: Vec<String> = held.iter().map(|held| held.item("completed", "")).collect();
        let middle = if act.starts_with("assert") {
            "busy"
        } else {
            "done completed"
        };
        assert_eq!(
            c.list(&w.finish_sql(&items)),
            ["done completed", middle, "done completed"],
            "{act}"
        );
        assert_eq!(w.beat(&mut c, &[w.call]).unwrap(), 0);
        sweep(&mut c, &w);
        user.run("COMMIT");
        sweep(&mut c, &w);
        c.list(&w.finish_sql(&items));
        assert_eq!(
            c.list("SELECT DISTINCT status FROM jobs"),
            ["completed"],
            "{act}"
        );
        assert_eq!(c.one("SELECT count(*) FROM stop_request"), "0");
        db.sound();
    }
    // What a worker says in its own open transaction holds up only itself.
    for _ in 0..2 {
        c.enqueue("m", "");
    }
    let held = w.claim(&mut c, "m", 2);
    user.run("BEGIN");
    assert_eq!(
        w.end(&mut user, "completed", &held[0], ""),
        "done completed"
    );
    assert_eq!(
        c.list(&w.finish_sql(&[held[0].item("completed", ""), held[1].item("completed", "")])),
        ["busy", "done completed"]
    );
    user.run("COMMIT");
    assert_eq!(w.end(&mut c, "completed", &held[0], ""), "done");
    db.sound();
}

/// The worker says that a run ended while it is being recovered: one of them wins, and the other changes nothing.
fn completion_against_recovery(lab: &Lab) {
    let db = lab.db("recoveries");
    let (mut a, mut b) = (db.connect(), db.connect());
    let (mut done, mut lost) = (0, 0);
    for _ in 0..60 {
        let mut w = Worker::register(&mut a);
        for _ in 0..4 {
            a.enqueue("m", "");
        }
        let held = w.claim(&mut a, "m", 4);
        let items: Vec<String> = held
            .iter()
            .map(|held| held.item("completed", r#","enqueue":[{"job_type":"follow"}]"#))
            .collect();
        let follows: usize = a
            .one("SELECT count(*) FROM jobs WHERE job_type = 'follow'")
            .parse()
            .unwrap();
        let end = w.finish_sql(&items);
        let gone = format!("SELECT deregister_worker('{}', '{}')", w.id, w.epoch);
        let (mut answers, ()) = both(|| a.list(&end), || b.run(&gone));
        while answers.iter().any(|answer| answer == "busy") {
            answers = a.list(&end);
        }
        for (held, answer) in held.iter().zip(&answers) {
            let state = a.state(&held.job);
            match answer.as_str() {
                "done completed" | "done" => assert_eq!(state, "completed/1"),
                "history" => assert_eq!(state, "pending/0"),
                other => panic!("{other}"),
            }
        }
        let completed = answers
            .iter()
            .filter(|answer| answer.starts_with("done"))
            .count();
        assert_eq!(
            a.one("SELECT count(*) FROM jobs WHERE job_type = 'follow'"),
            (follows + completed).to_string()
        );
        done += completed;
        lost += 4 - completed;
        a.run("SELECT cancel(id) FROM jobs WHERE status = 'pending' AND job_type = 'm'");
    }
    println!("{done} done, {lost} lost");
    db.sound();
}

fn promotion_against_cancel(lab: &Lab) {
    let db = lab.db("promotions");
    let (mut a, mut b) = (db.connect(), db.connect());
    let w = Worker::register(&mut a);
    for _ in 0..100 {
        let job = a.enqueue("m", "unique_key => 'k', run_at => now() + interval '1 h'");
        a.run("UPDATE later SET due = now()");
        let (answer, _) = both(
            || a.one(&format!("SELECT cancel('{job}')")),
            || b.one(&format!("SELECT promoted FROM promote('{}')", w.epoch)),
        );
        assert_eq!(answer, "cancelled");
        assert_eq!(a.state(&job), "cancelled/0");
    }
    db.sound();
}

/// Two acts on one ended job: one is carried out, the other sees what became of it.
fn persons_against_each_other(lab: &Lab) {
    let db = lab.db("two_persons");
    let (mut a, mut b) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut a);
    let acts = [
        "retry('{job}')",
        "review_dead_letter('{token}', 'retry', 'ann')",
        "review_dead_letter('{token}', 'discard', 'bob')",
        "complete_manually('{job}', 'eve')",
    ];
    for first in acts {
        for second in acts {
            a.enqueue("m", "unique_key => 'k'");
            let held = w.claim_one(&mut a, "m");
            w.end(&mut a, "failed", &held, r#","final":true"#);
            let call = |act: &str| {
                format!(
                    "SELECT {}",
                    act.replace("{job}", &held.job)
                        .replace("{token}", &held.token)
                )
            };
            let (one, other) = both(|| a.try_list(&call(first)), || b.try_list(&call(second)));
            assert!(
                one.is_ok() || other.is_ok(),
                "{first} {second}: {one:?} {other:?}"
            );
            for refusal in [one, other].into_iter().filter_map(Result::err) {
                assert_eq!(refusal.code, "TN006", "{first} {second}: {refusal:?}");
            }
            db.sound();
            a.run("SELECT cancel(id) FROM jobs WHERE status = 'pending'");
        }
    }
    // A retry against an enqueue that takes its key.
    for _ in 0..50 {
        let job = a.enqueue("m", "unique_key => 'k'");
        a.run(&format!("SELECT cancel('{job}')"));
        let (retried, new) = both(
            || a.try_list(&format!("SELECT retry('{job}')")),
            || b.enqueue("m", "unique_key => 'k'"),
        );
        match retried {
            Ok(_) => assert_eq!(new, job),
            Err(refusal) => assert!(
                refusal.code == "TN006" && refusal.message.contains(&new),
                "{refusal:?}"
            ),
        }
        a.run("SELECT cancel(id) FROM jobs WHERE status = 'pending'");
    }
    db.sound();
}

/// The second of two enqueues with one id and one key waits for the first, whose job runs and ends before the second goes on.
fn a_key_whose_job_ended_while_we_waited(lab: &Lab) {
    let db = lab.db("slow_twins");
    let (mut a, mut b, mut watch) = (db.connect(), db.connect(), db.connect());
    let mut w = Worker::register(&mut a);
    let id = a.one("SELECT uuid_v7()");
    let with = format!("id => '{id}', unique_key => 'k'");
    let pid = b.pid();
    a.run("BEGIN");
    a.enqueue("m", &with);
    thread::scope(|scope| {
        let slow = scope.spawn(|| b.enqueue("m", &with));
        watch.wait_until_blocked(&pid);
        signal("-STOP", &pid);
        a.run("COMMIT");
        let held = w.claim_one(&mut a, "m");
        w.end(&mut a, "completed", &held, "");
        signal("-CONT", &pid);
        assert_eq!(slow.join().unwrap(), id);
    });
    db.sound();
    assert_ne!(a.enqueue("m", "unique_key => 'k'"), id, "the key is free");
}

fn signal(signal: &str, pid: &str) {
    assert!(
        Command::new("kill")
            .args([signal, pid])
            .status()
            .unwrap()
            .success()
    );
}

/// The sweep finds a request whose job is not leased, and before it takes the job a worker claims it: the request stays.
fn a_request_whose_job_is_claimed_again(lab: &Lab) {
    let db = lab.db("requests");
    let (mut a, mut b, mut watch) = (db.connect(), db.connect(), db.connect());
    let mut w = Worker::register(&mut a);
    let job = a.enqueue("m", "");
    let held = w.claim_one(&mut a, "m");
    b.run("BEGIN");
    b.run(&format!("SELECT cancel('{job}')"));
    w.end(&mut a, "released", &held, "");
    b.run("COMMIT");
    a.run("BEGIN");
    let again = w.claim_one(&mut a, "m");
    let pid = b.pid();
    thread::scope(|scope| {
        let sweeping = scope.spawn(|| sweep(&mut b, &w));
        watch.wait_until_blocked(&pid);
        a.run("COMMIT");
        sweeping.join().unwrap();
    });
    assert_eq!(a.one("SELECT count(*) FROM stop_request"), "1");
    assert_eq!(w.end(&mut a, "completed", &again, ""), "done cancelled");
    db.sound();
}

/// Whoever wants the lease passes by until the user has committed; then the user's effects stand, and the next one is refused.
fn assert_lease_holds_until_commit(lab: &Lab) {
    let db = lab.db("fences");
    let (mut c, mut user) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    c.run("CREATE TABLE public.effect (job uuid, token uuid)");
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    user.run("BEGIN");
    user.run(&format!(
        "SELECT assert_lease('{}', '{}')",
        held.job, held.token
    ));
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        w.id, w.epoch
    ));
    let mut next = Worker::register(&mut c);
    sweep(&mut c, &next);
    assert!(next.claim(&mut c, "m", 1).is_empty());
    user.run(&format!(
        "INSERT INTO public.effect VALUES ('{}', '{}'); COMMIT",
        held.job, held.token
    ));
    sweep(&mut c, &next);
    let again = next.claim_one(&mut c, "m");
    for held in [&held, &again] {
        user.run("BEGIN");
        let asserted = user.try_list(&format!(
            "SELECT assert_lease('{}', '{}')",
            held.job, held.token
        ));
        assert_eq!(asserted.is_ok(), held == &again);
        user.run("ROLLBACK");
    }
    db.sound();
}

/// A reader with an old snapshot sees each job once, as it was; nobody waits for it.
fn snapshots_of_readers(lab: &Lab) {
    let db = lab.db("readers");
    let (mut c, mut reader) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    c.run("SELECT enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'm')) FROM generate_series(1, 100) i))");
    reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY");
    assert_eq!(
        reader.list("SELECT status, count(*) FROM jobs GROUP BY 1"),
        ["pending|100"]
    );
    let held = w.claim(&mut c, "m", 100);
    let items: Vec<String> = held.iter().map(|held| held.item("completed", "")).collect();
    c.list(&w.finish_sql(&items));
    assert_eq!(
        reader.list("SELECT status, count(*) FROM jobs GROUP BY 1"),
        ["pending|100"]
    );
    reader.run("COMMIT");
    assert_eq!(
        reader.list("SELECT status, count(*) FROM jobs GROUP BY 1"),
        ["completed|100"]
    );
    db.sound();
}

/// Under a publication for all tables a DELETE from one without a key fails.
fn every_table_has_a_key(lab: &Lab) {
    let db = lab.db("publications");
    let mut c = db.connect();
    assert_eq!(
        c.list("SELECT relname FROM pg_class c WHERE relnamespace = 'tenure'::regnamespace AND relkind IN ('r', 'p')
                AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)"),
        Vec::<String>::new()
    );
    assert_eq!(
        c.list("SELECT p.oid::regprocedure FROM pg_proc p WHERE pronamespace = 'tenure'::regnamespace AND prosecdef
                AND NOT EXISTS (SELECT FROM unnest(proconfig) s WHERE s LIKE 'search_path=%')"),
        Vec::<String>::new(),
        "each function that runs with the rights of the owner has its search_path pinned"
    );
    assert_eq!(
        c.list("SELECT p.oid::regprocedure FROM pg_proc p WHERE pronamespace = 'tenure'::regnamespace AND prosecdef AND prorettype <> 'trigger'::regtype
                AND obj_description(oid) IS NULL AND proname NOT IN ('obstacle', 'last_error_of')"),
        Vec::<String>::new(),
        "each function that users call has a comment"
    );
}
