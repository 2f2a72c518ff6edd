//! A re-attach in several calls, and who is waited for meanwhile.

use std::time::Duration;

use tenure_core::ids::{Beat, Epoch, WorkerId};
use tenure_store::finish::{Answer, Reattach};
use tenure_store::session::Session;
use tenure_store::worker::Registration;

use crate::stops::sweep;
use crate::support::{Conn, Held, Lab, Worker, block_on};

#[test]
fn replay() {
    let lab = Lab::start();
    nothing_counts_before_the_last_call(&lab);
    a_lock_leaves_everything_unsaid(&lab);
    a_worker_that_speaks_is_not_given_up(&lab);
    a_lock_in_the_first_of_several_calls(&lab);
    ghosts_are_taken_with_the_last_call(&lab);
    a_lost_registration_is_waited_for_until_its_last_call(&lab);
    rosters_count_under_hold(&lab);
    a_successor_that_names_no_call(&lab);
    the_last_word_and_the_end_of_the_time(&lab);
    decisions_while_others_speak(&lab);
}

const MORE: &str = r#","more":true"#;

fn held_option(held: &[&Held]) -> String {
    let tokens: Vec<String> = held
        .iter()
        .map(|held| format!("\"{}\"", held.token))
        .collect();
    format!(r#","held":[{}]"#, tokens.join(","))
}

fn beat(c: &mut Conn, w: &Worker) -> String {
    c.one(&format!("SELECT beat FROM probe('{}')", w.id))
}

/// The job of the last speaker is locked for a moment. Were that taken for its word, the window would close without it.
fn a_lock_leaves_everything_unsaid(lab: &Lab) {
    let db = lab.db("locked_in_the_window");
    let (mut c, mut other) = (db.connect(), db.connect());
    let (mut before, mut w) = (Worker::register(&mut c), Worker::register(&mut c));
    c.enqueue("m", "");
    let first = before.claim_one(&mut c, "m");
    // The claim that was lost, after a release that was lost too.
    let second = Held {
        run: 2,
        token: c.one("SELECT random_uuid()"),
        ..first.clone()
    };
    c.lose_here();
    before.reattach(&mut c, &[first.item("hold", "")], &[], "");
    other.run("BEGIN");
    other.run("SELECT count(*) FROM (SELECT FROM lease FOR UPDATE) locked");
    w.beat = 7;
    let says = [second.item("hold", "")];
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["busy"]);
    assert_eq!(c.one("SELECT gate FROM cluster"), "window");
    assert_eq!(beat(&mut c, &w), "0");
    assert!(w.claim(&mut c, "m", 9).is_empty());
    other.run("ROLLBACK");
    assert_eq!(w.reattach(&mut c, &says, &[], ""), ["kept"]);
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(beat(&mut c, &w), "7");
    assert_eq!(c.one("SELECT token FROM lease"), second.token);
    db.sound();
}

/// More is said than one call takes, and the first one meets a lock: the last one must not count as the last word.
fn a_lock_in_the_first_of_several_calls(lab: &Lab) {
    const CALLS: usize = 2;
    let db = lab.db("locked_first");
    let (mut c, mut other) = (db.connect(), db.connect());
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    c.lose_here();
    c.run(&format!("SELECT open_epoch('{}')", w.id));
    other.run("BEGIN");
    other.run("SELECT count(*) FROM (SELECT FROM lease FOR UPDATE) locked");
    let strange = |_| {
        held.item("hold", "")
            .replace(&held.job, &uuid::Uuid::now_v7().to_string())
    };
    let mut statements = vec![held.item("completed", r#","confirmed":true"#)];
    statements.extend((0..500 * CALLS).map(strange));
    let epoch = Epoch(c.one("SELECT epoch FROM cluster").parse().unwrap());
    let registration = Registration {
        name: "w".to_owned(),
        version: "1".to_owned(),
        lease_ttl: Duration::from_secs(30),
        heartbeat: Duration::from_secs(3),
        job_types: vec!["%".to_owned()],
        concurrency: 1,
    };
    let said = Reattach {
        worker: WorkerId(w.id.parse().unwrap()),
        epoch,
        beat: Beat(7),
        roster: &[],
        registration: &registration,
        predecessors: &[],
        held: &[],
        covers: &[],
        without_primary: Duration::ZERO,
    };
    let target = lab.target(&db.name, "postgres", "tenure");
    let speak = || {
        block_on(async {
            let (session, _notifications) = Session::open(&target).await.unwrap();
            session.reattach(said, &statements).await.unwrap()
        })
    };
    let answers = |wanted| speak().iter().filter(|said| said.answer == wanted).count();
    assert_eq!(answers(Answer::Busy), 1);
    assert_eq!(beat(&mut c, &w), "0");
    assert_eq!(c.one("SELECT gate FROM cluster"), "window");
    other.run("ROLLBACK");
    assert_eq!(answers(Answer::Done), 1);
    assert_eq!(beat(&mut c, &w), "7");
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(c.state(&held.job), "completed/1");
    db.sound();
}

/// It has much to say, and its lease would have ended meanwhile.
fn a_worker_that_speaks_is_not_given_up(lab: &Lab) {
    let db = lab.db("still_speaking");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let mut other = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    c.lose_here();
    w.reattach(&mut c, &[held.item("hold", "")], &[], MORE);
    other.epoch.clone_from(&w.epoch);
    let later = |c: &mut Conn, seconds: u32, who: &Worker| {
        c.run(&format!(
            "UPDATE cluster SET opened_at = opened_at - interval '{seconds} s'; UPDATE expected SET heard_at = heard_at - interval '{seconds} s'; \
             UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'"
        ));
        c.run(&format!("SELECT sweep('{}')", who.epoch));
        c.one("SELECT gate FROM cluster")
    };
    assert_eq!(later(&mut c, 20, &w), "window");
    w.reattach(&mut c, &[], &[], MORE);
    assert_eq!(
        later(&mut c, 20, &w),
        "window",
        "the other's time is over, this one speaks"
    );
    assert_eq!(
        later(&mut c, 20, &w),
        "open",
        "it has been silent for too long"
    );
    db.sound();
}

fn nothing_counts_before_the_last_call(lab: &Lab) {
    let db = lab.db("several_calls");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    for kind in ["one", "two"] {
        c.enqueue(kind, "");
    }
    let held = ["one", "two"].map(|kind| w.claim_one(&mut c, kind));
    c.lose_here();
    w.beat = 7;
    assert_eq!(
        w.reattach(&mut c, &[held[0].item("completed", "")], &[], MORE),
        ["done completed"]
    );
    assert_eq!(
        beat(&mut c, &w),
        "0",
        "the beat proves all that was before it"
    );
    assert_eq!(c.one("SELECT gate FROM cluster"), "window");
    assert_eq!(
        c.one("SELECT count(*) FROM expected WHERE spoken_at IS NULL"),
        "1"
    );
    w.reattach(&mut c, &[held[1].item("hold", "")], &[], "");
    assert_eq!(beat(&mut c, &w), "7");
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(
        c.one("SELECT closed_at IS NOT NULL AND first_claim_at IS NULL FROM switch"),
        "t"
    );
    db.sound();
}

fn ghosts_are_taken_with_the_last_call(lab: &Lab) {
    let db = lab.db("late_ghosts");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let held = ["one", "two", "unread"].map(|kind| {
        c.enqueue(kind, "");
        w.claim_one(&mut c, kind)
    });
    c.lose_here();
    w.reattach(&mut c, &[held[0].item("hold", "")], &[], MORE);
    assert_eq!(c.one("SELECT count(*) FROM lease"), "3");
    let options = held_option(&[&held[0], &held[1]]);
    w.reattach(&mut c, &[held[1].item("hold", "")], &[], &options);
    assert_eq!(
        held.each_ref().map(|held| c.state(&held.job)),
        ["running/1", "running/1", "pending/0"]
    );
    db.sound();
}

/// Nobody but itself knows of it. In its first call it is registered again, and what it holds is in the second.
fn a_lost_registration_is_waited_for_until_its_last_call(lab: &Lab) {
    let db = lab.db("registered_again");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    // As on a server that has lost the claim and the registration.
    c.run("DELETE FROM worker; DELETE FROM beat; DELETE FROM lease");
    c.run("UPDATE job SET pos = nextval('ready_pos')");
    c.run("INSERT INTO ready (lane, priority, pos, id, run, attempts, flags, ready_at) SELECT lane, priority, pos, id, 0, 0, 0, now() FROM job");
    c.lose_here();
    let me = w.clone();
    w.reattach(&mut c, &[], &[&me], MORE);
    for _ in 0..3 {
        c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
        assert_eq!(
            c.one(&format!("SELECT gate FROM sweep('{}')", w.epoch)),
            "window"
        );
    }
    assert_eq!(
        w.reattach(&mut c, &[held.item("hold", "")], &[&me], ""),
        ["kept"]
    );
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(c.state(&job), "running/1");
    db.sound();
}

/// Whoever is named while a person is awaited is waited for after the decision.
fn rosters_count_under_hold(lab: &Lab) {
    let db = lab.db("roster_on_hold");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let mut unknown = Worker::register(&mut c);
    c.enqueue("m", "");
    c.run(&format!(
        "DELETE FROM worker WHERE id = '{0}'; DELETE FROM beat WHERE worker = '{0}'",
        unknown.id
    ));
    c.move_to_other_system();
    w.reattach(&mut c, &[], &[&unknown], "");
    assert_eq!(c.one("SELECT accept_cluster('moved')"), "window");
    assert!(w.claim(&mut c, "m", 1).is_empty());
    unknown.reattach(&mut c, &[], &[], "");
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    db.sound();
}

fn a_successor_that_names_no_call(lab: &Lab) {
    let db = lab.db("no_call");
    let mut c = db.connect();
    let mut dead = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = dead.claim_one(&mut c, "m");
    let mut w = Worker::register(&mut c);
    let says = held
        .item("completed", "")
        .replace(&format!(r#""call":{},"#, held.call), "");
    let options = format!(r#","predecessors":["{}"]"#, dead.id);
    assert_eq!(
        w.reattach(&mut c, &[says], &[], &options),
        ["done completed"]
    );
    db.sound();
}

/// The sweep closes the window by time and marks who is absent, while the last of them speaks: neither waits for the other.
fn the_last_word_and_the_end_of_the_time(lab: &Lab) {
    let db = lab.db("last_word");
    let (mut c, mut speaker, mut watch) = (db.connect(), db.connect(), db.connect());
    let (mut w, other) = (Worker::register(&mut c), Worker::register(&mut c));
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    c.run("UPDATE cluster SET opened_at = opened_at - interval '31 s'; UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    // The speaker has written its word, and is about to close the window when the sweep has just done so.
    speaker.run("BEGIN");
    speaker.run(&format!(
        "SELECT reattach('{}', '{}', 1, '[]', options => '{{\"more\":true}}')",
        other.id, w.epoch
    ));
    speaker.run(&format!(
        "UPDATE expected SET spoken_at = now() WHERE worker = '{}'",
        other.id
    ));
    c.run("BEGIN");
    c.run(&format!("SELECT sweep('{}')", w.epoch));
    let pid = speaker.pid();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| {
            speaker.run("SELECT close_window(false)");
            speaker.run("COMMIT");
        });
        watch.wait_until_blocked(&pid);
        c.run("COMMIT");
        closing.join().unwrap();
    });
    assert_eq!(lab.deadlocks(), Vec::<String>::new());
    assert_eq!(
        c.one(&format!(
            "SELECT absent FROM expected WHERE worker = '{}'",
            other.id
        )),
        "f"
    );
    db.sound();
}

/// Persons decide while workers speak, some of them with gaps in their memory: nobody waits in a circle.
fn decisions_while_others_speak(lab: &Lab) {
    let db = lab.db("decisions");
    let mut connections: Vec<Conn> = (0..5).map(|_| db.connect()).collect();
    let mut workers: Vec<Worker> = (0..4)
        .map(|_| Worker::register(&mut connections[0]))
        .collect();
    for round in 0..25 {
        connections[0].move_to_other_system();
        connections[0].run("UPDATE beat SET beat = 0");
        connections[0].run(&format!("SELECT open_epoch('{}')", workers[0].id));
        std::thread::scope(|scope| {
            let (person, speakers) = connections.split_first_mut().unwrap();
            for (nth, (w, c)) in workers.iter_mut().zip(speakers).enumerate() {
                let covers = if (nth + round) % 2 == 0 {
                    format!(r#","covers":[{{"worker":"{}","from":2,"ms":9}}]"#, w.id)
                } else {
                    String::new()
                };
                let options = format!(r#"{covers},"without_primary_ms":{}"#, round + nth);
                w.beat = 5;
                scope.spawn(move || w.reattach(c, &[], &[], &options));
            }
            for _ in 0..4 {
                // Refused when there is nothing to decide just now.
                drop(person.try_list("SELECT accept_cluster('moved')"));
                drop(person.try_list("SELECT resume_cluster()"));
            }
        });
    }
    assert_eq!(lab.deadlocks(), Vec::<String>::new());
    let c = &mut connections[0];
    drop(c.try_list("SELECT accept_cluster('moved')"));
    drop(c.try_list("SELECT resume_cluster()"));
    // The last speaker and the person may have passed each other by: then the next sweep closes the window.
    let now = Worker {
        epoch: c.one("SELECT epoch FROM cluster"),
        ..workers[0].clone()
    };
    sweep(c, &now);
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(
        c.one("SELECT closed_at IS NULL FROM switches ORDER BY epoch_no DESC LIMIT 1"),
        "f"
    );
    db.sound();
}
