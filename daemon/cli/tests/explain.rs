//! `tenure job explain`: each situation is made for real.

use serde_json::Value;

use crate::house::House;

fn one(house: &House, sql: &str) -> String {
    house.sql(sql)[0][0].clone().unwrap_or_default()
}

fn enqueue(house: &House, more: &str) -> String {
    one(house, &format!("SELECT tenure.enqueue('mail'{more})"))
}

/// The codes of the reasons, the text of the first, and all of it.
fn explained(house: &House, job: &str) -> (Vec<String>, String, Value) {
    let all = house.json(&["job", "explain", job]);
    let reasons = all["reasons"].as_array().unwrap();
    let text = |reason: &Value, key: &str| reason[key].as_str().unwrap_or_default().to_owned();
    let codes = reasons.iter().map(|reason| text(reason, "code")).collect();
    let first = reasons
        .first()
        .map_or(String::new(), |reason| text(reason, "text"));
    (codes, first, all)
}

fn codes(house: &House, job: &str) -> Vec<String> {
    explained(house, job).0
}

/// A worker that can run these job types, with so many slots; its id and epoch.
fn worker(house: &House, job_types: &str, slots: u32) -> (String, String) {
    let row = &house.sql(&format!(
        "SELECT w.id, r.epoch FROM (SELECT tenure.random_uuid() AS id) w,
           tenure.register_worker(w.id, 'billing-1', 'v1', '30 s', '3 s', '{{{job_types}}}', {slots}) r"
    ))[0];
    house.sql("UPDATE tenure.worker SET admitted = true");
    (row[0].clone().unwrap(), row[1].clone().unwrap())
}

fn claim(house: &House, (worker, epoch): &(String, String), call: u32) -> String {
    one(
        house,
        &format!(
            "SELECT token FROM tenure.claim_job_batch('{worker}', '{epoch}', {call}, ARRAY(SELECT lane FROM tenure.lane), ARRAY(SELECT 1 FROM tenure.lane), 1)"
        ),
    )
}

#[test]
fn waiting_jobs_say_what_they_wait_for() {
    let house = House::new();
    let job = enqueue(&house, "");
    let (reasons, text, _) = explained(&house, &job);
    assert_eq!(reasons, ["no_worker"]);
    assert_eq!(text, "no running worker has a handler for mail");
    worker(&house, "report-*", 4);
    assert_eq!(codes(&house, &job), ["no_worker"]);
    let able = worker(&house, "m*", 1);
    assert_eq!(codes(&house, &job), ["next"]);
    let second = enqueue(&house, "");
    assert_eq!(codes(&house, &second), ["behind_others"]);
    claim(&house, &able, 1);
    house.sql(&format!(
        "SELECT tenure.heartbeat('{}', '{}', 1, 1, '{{1}}', 1)",
        able.0, able.1
    ));
    assert_eq!(codes(&house, &second), ["no_free_slot"]);
    house.sql(r#"SELECT tenure.pause('mail', '{"by":"ann"}')"#);
    let (reasons, text, all) = explained(&house, &second);
    assert_eq!(reasons, ["paused"]);
    assert!(
        text.starts_with("the job type mail was paused by ann at 2"),
        "{text}"
    );
    // What it says would release it does.
    house.sql(all["reasons"][0]["release"].as_str().unwrap());
    assert_eq!(codes(&house, &second), ["no_free_slot"]);

    let later = enqueue(&house, ", run_at => now() + interval '1 day'");
    let (reasons, text, all) = explained(&house, &later);
    assert_eq!(reasons, ["time"]);
    assert!(text.starts_with("its time comes at 2"), "{text}");
    assert!(
        all["history"][0]["what"]
            .as_str()
            .unwrap()
            .starts_with("put in, to run at 2")
    );
    let due = enqueue(&house, ", run_at => now() + interval '1 ms'");
    assert_eq!(codes(&house, &due), ["time", "due"]);
}

#[test]
fn running_and_failed_jobs_say_whose_they_are() {
    let house = House::new();
    let job = enqueue(&house, ", max_attempts => 2");
    let able = worker(&house, "*", 4);
    let token = claim(&house, &able, 1);
    let (reasons, text, _) = explained(&house, &job);
    assert_eq!(reasons, ["running"]);
    assert!(
        text.starts_with("worker billing-1 runs it since 2"),
        "{text}"
    );
    house.ok(&["job", "cancel", &job, "--reason", "wrong file"]);
    let (reasons, text, _) = explained(&house, &job);
    assert_eq!(reasons, ["stopping", "running"]);
    assert!(text.contains("that it is cancelled: wrong file"), "{text}");
    let end = |kind: &str, run: u32, token: &str, more: &str| {
        house.sql(&format!(
            r#"SELECT * FROM tenure.finish('{}', '{}', '[{{"kind":"{kind}","job":"{job}","run":{run},"token":"{token}"{more}}}]')"#,
            able.0, able.1
        ))
    };
    end("released", 1, &token, "");
    let (reasons, text, _) = explained(&house, &job);
    assert_eq!(reasons, ["ended"]);
    assert!(text.contains("wrong file"), "{text}");
    house.ok(&["job", "retry", &job]);
    let token = claim(&house, &able, 2);
    end(
        "failed",
        4,
        &token,
        r#","error":"no such account","delay_ms":60000"#,
    );
    let (reasons, text, _) = explained(&house, &job);
    assert_eq!(reasons, ["retry"]);
    assert!(
        text.starts_with("its last attempt failed (no such account); the next one is due at 2"),
        "{text}"
    );
    house.sql("UPDATE tenure.later SET due = now()");
    house.sql(&format!("SELECT tenure.promote('{}')", able.1));
    let token = claim(&house, &able, 3);
    end(
        "failed",
        5,
        &token,
        r#","error":"no such account","final":true"#,
    );
    let (reasons, text, all) = explained(&house, &job);
    assert_eq!(reasons, ["dead_letter"]);
    assert_eq!(text, "it failed for good: no such account");
    let release = all["reasons"][0]["release"].as_str().unwrap();
    let command = release.split('`').nth(1).unwrap();
    let words: Vec<&str> = command.split(' ').skip(1).collect();
    house.ok(&words);
    assert_eq!(codes(&house, &job), ["next"]);
    let (_, _, all) = explained(&house, &job);
    let history: Vec<&str> = all["history"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["what"].as_str().unwrap())
        .collect();
    assert!(history[0] == "put in" && history.len() >= 5, "{history:?}");
    assert!(
        history
            .iter()
            .any(|it| it.contains("failed by worker billing-1, after 0")),
        "{history:?}"
    );
    assert!(
        history
            .iter()
            .any(|it| it.contains("dead letter reviewed by")),
        "{history:?}"
    );
    // For people.
    let shown = house.ok(&["job", "explain", &job]);
    assert!(
        shown.contains("because") && shown.contains("a worker can take it at any moment"),
        "{shown}"
    );
}

#[test]
fn the_state_of_the_database_comes_first() {
    let house = House::new();
    let job = enqueue(&house, "");
    let able = worker(&house, "*", 4);
    house.sql("DELETE FROM tenure.here");
    assert_eq!(codes(&house, &job), ["no_epoch"]);
    house.sql(&format!("SELECT tenure.open_epoch('{}')", able.0));
    let (reasons, text, _) = explained(&house, &job);
    assert_eq!(reasons, ["reattaching"]);
    assert!(text.contains("waiting for billing-1"), "{text}");
    house.sql("UPDATE tenure.cluster SET gate = 'hold', uncovered = true");
    assert_eq!(codes(&house, &job), ["gate_on_hold"]);
}

#[test]
fn a_job_that_is_not_there_is_not_explained() {
    let house = House::new();
    let said = house.run(&["job", "explain", "01890a5d-ac96-774b-bcce-b302099a8057"]);
    assert_eq!(said.code, 3, "{}", said.err);
    let done = enqueue(&house, "");
    house.sql(&format!(
        "SELECT tenure.complete_manually('{done}', 'ann', 'by phone')"
    ));
    assert_eq!(codes(&house, &done), Vec::<String>::new());
}
