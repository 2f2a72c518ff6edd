//! Jobs, dead letters, workers and the schema, as a person handles them.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::house::{House, Said, binary};

const NOBODY: &str = "0199c0c0-0000-7000-8000-000000000000";

#[test]
fn a_job_is_put_in_looked_at_cancelled_and_retried() {
    let house = House::new();
    let data = r#"{"n": 1970670598291982290, "x": 0.10000000000000000000001}"#;
    let id = house.ok(&[
        "enqueue",
        "mail",
        "--data",
        data,
        "--label",
        "team=a",
        "--priority",
        "-5",
        "--max-attempts",
        "7",
    ]);
    let listed = house.ok(&["job", "list"]);
    assert!(
        listed.starts_with(&format!("{id}\tmail\tpending\t0/7\t")),
        "{listed}"
    );
    let shown = house.run(&["job", "show", &id, "--output", "json"]).out;
    assert!(shown.contains(data), "digits and order stay: {shown}");
    let job = house.json(&["job", "show", &id]);
    assert_eq!(
        (&job["priority"], &job["labels"]["team"]),
        (&(-5).into(), &"a".into())
    );
    assert!(
        job["waiting_for"]
            .as_str()
            .unwrap()
            .contains("no living worker"),
        "{job}"
    );
    assert_eq!(
        house.ok(&["job", "cancel", &id, "--reason", "not needed"]),
        format!("{id} cancelled")
    );
    let job = house.json(&["job", "show", &id]);
    assert!(
        job["last_error"]
            .as_str()
            .unwrap()
            .ends_with(": not needed"),
        "{job}"
    );
    assert_eq!(house.ok(&["job", "retry", &id]), format!("{id} pending"));
    let refused = house.run(&["job", "retry", &id]);
    assert_eq!(refused.code, 4, "{}", refused.err);
    assert!(
        refused.err.contains("is pending") && refused.err.contains("hint: "),
        "{}",
        refused.err
    );
}

#[test]
fn lists_are_filtered() {
    let house = House::new();
    let later = house.ok(&["enqueue", "a", "--in", "1h"]);
    let other = house.ok(&["enqueue", "b", "--tenant", "acme"]);
    let ids = |arguments: &[&str]| {
        let jobs = house.json(&[&["job", "list"], arguments].concat());
        jobs.as_array()
            .unwrap()
            .iter()
            .map(|job| job["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(ids(&[]), [other.clone(), later.clone()], "the newest first");
    assert_eq!(ids(&["--status", "scheduled"]), [later.as_str()]);
    assert_eq!(ids(&["--type", "b"]), [other.as_str()]);
    assert_eq!(ids(&["--tenant", "acme"]), [other.as_str()]);
    assert_eq!(ids(&["--limit", "1"]), [other.as_str()]);
    assert_eq!(house.run(&["job", "list", "--status", "done"]).code, 2);
    let numbers = house.json(&["stats"]);
    assert_eq!(numbers[1]["job_type"], "b");
    assert_eq!(numbers[1]["pending_count"], 1);
}

#[test]
fn an_enqueue_can_be_repeated() {
    let house = House::new();
    let id = house.ok(&["enqueue", "a", "--unique-key", "k"]);
    assert_eq!(house.ok(&["enqueue", "a", "--unique-key", "k"]), id);
    let own = house.sql("SELECT tenure.uuid_v7()")[0][0].clone().unwrap();
    for _ in 0..2 {
        assert_eq!(house.ok(&["enqueue", "a", "--id", &own]), own);
    }
    assert_eq!(house.json(&["job", "list"]).as_array().unwrap().len(), 2);
}

#[test]
fn data_come_from_file_or_standard_input() {
    let house = House::new();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[1, 2]").unwrap();
    let id = house.ok(&[
        "enqueue",
        "a",
        "--data",
        &format!("@{}", file.path().display()),
    ]);
    assert_eq!(
        house.json(&["job", "show", &id])["data"],
        serde_json::json!([1, 2])
    );
    let said = house.feed(&["enqueue", "a", "--data", "-"], "{\"from\": \"stdin\"}\n");
    assert_eq!(
        house.json(&["job", "show", said.out.trim()])["data"]["from"],
        "stdin"
    );
}

#[test]
fn dead_letters_are_decided() {
    let house = House::new();
    let die = || {
        let id = house.ok(&["enqueue", "a"]);
        house.sql(&format!(
            "SELECT tenure.move_to_dead_letter('{id}', '{{\"by\": \"test\"}}')"
        ));
        id
    };
    let (first, second, third) = (die(), die(), die());
    let letters = house.json(&["dead", "list"]);
    assert_eq!(letters.as_array().unwrap().len(), 3);
    let letter = house.json(&["dead", "show", &first]);
    assert_eq!(letter["original_job_id"], first.as_str());
    let said = house.ok(&[
        "dead",
        "retry",
        letter["id"].as_str().unwrap(),
        "--data",
        "{\"n\": 2}",
        "--note",
        "fixed the data",
    ]);
    assert_eq!(said, format!("{first} pending"));
    assert_eq!(house.json(&["job", "show", &first])["data"]["n"], 2);
    assert_eq!(
        house.ok(&["dead", "discard", &second, "--reviewer", "ann"]),
        format!("{second} discarded")
    );
    assert_eq!(
        house.ok(&["dead", "fix", &third]),
        format!("{third} completed")
    );
    assert_eq!(house.ok(&["dead", "list"]), "");
    let all = house.json(&["dead", "list", "--all"]);
    let reviewed = |job: &str| {
        all.as_array()
            .unwrap()
            .iter()
            .find(|letter| letter["original_job_id"] == job)
            .unwrap()
            .clone()
    };
    assert_eq!(reviewed(&second)["reviewed_by"], "ann");
    assert_eq!(reviewed(&first)["review_note"], "fixed the data");
    assert_eq!(house.run(&["dead", "discard", &second]).code, 4);
    assert_eq!(house.run(&["dead", "retry", NOBODY]).code, 3);
}

#[test]
fn each_kind_of_failure_has_its_exit_code_and_message() {
    let house = House::new();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["job", "show", NOBODY], 3, "no job 0199c0c0"),
        (&["job", "cancel", NOBODY], 3, "no job 0199c0c0"),
        (&["job", "wait", NOBODY], 3, "no job 0199c0c0"),
        (&["dead", "show", NOBODY], 3, "no dead letter 0199c0c0"),
        (&["worker", "drain", NOBODY], 3, "no live worker 0199c0c0"),
        (&["job", "show", "nope"], 2, "invalid value 'nope'"),
        (
            &["enqueue", "a", "--data", "nope"],
            2,
            "the data are no JSON",
        ),
        (
            &["enqueue", "a", "--data", "@/nowhere"],
            2,
            "/nowhere cannot be read",
        ),
        (
            &["enqueue", "a", "--priority", "high"],
            2,
            "invalid value 'high'",
        ),
        (
            &["enqueue", "a", "--max-attempts", "0"],
            2,
            "0 is not in 1..",
        ),
        (
            &["enqueue", "a", "--in", "5"],
            2,
            "a duration with its unit",
        ),
        (
            &["enqueue", "a", "--run-at", "tomorrowish"],
            2,
            "invalid input syntax for type timestamp",
        ),
        (&["enqueue", "a*"], 2, "has a *"),
        (&["enqueue", ""], 2, "job_type"),
        (
            &[
                "enqueue",
                "a",
                "--id",
                "0199c0c0-0000-4000-8000-000000000000",
            ],
            2,
            "is not a UUIDv7",
        ),
        (
            &["enqueue", "a", "--data", "\"\\u0000\""],
            2,
            "unsupported Unicode escape",
        ),
        (
            &["stats", "--set", "worker.nope=1"],
            2,
            "--set worker.nope: worker.nope: unknown key",
        ),
        (
            &["stats", "--config", "/nowhere.toml"],
            2,
            "/nowhere.toml: cannot be read",
        ),
        (
            &["stats", "--set", "database.schema=other"],
            4,
            "run `tenure migrate up`",
        ),
        (
            &[
                "stats",
                "--set",
                "database.url=postgres://postgres@127.0.0.1:1/app",
            ],
            5,
            "127.0.0.1:1",
        ),
        (&["nonsense"], 2, "unrecognized subcommand"),
    ];
    for (arguments, code, message) in cases {
        let said = house.run(arguments);
        assert_eq!(
            (said.code, said.out.as_str()),
            (*code, ""),
            "{arguments:?}: {}",
            said.err
        );
        assert!(
            said.err.contains(message),
            "{arguments:?} said: {}",
            said.err
        );
    }
}

#[test]
fn a_failure_as_json_is_the_same_envelope() {
    let house = House::new();
    for (arguments, code) in [
        (&["job", "show", NOBODY][..], "not_found"),
        (&["job", "show", "nope"], "usage"),
    ] {
        let said = house.run(&[arguments, &["--output", "json"]].concat());
        let envelope: serde_json::Value = serde_json::from_str(&said.out).unwrap();
        assert_eq!(envelope["success"], false);
        assert!(envelope["data"].is_null());
        assert_eq!(envelope["error"]["code"], code);
        assert!(envelope["error"]["message"].is_string());
        assert!(envelope["error"].as_object().unwrap().contains_key("hint"));
        assert_eq!(said.err, "");
    }
}

#[test]
fn waiting_ends_with_the_job() {
    let house = House::new();
    let mut child = house
        .command(&["enqueue", "a", "--wait", "--output", "table"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let id = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let why = lines.next().unwrap();
    assert!(
        why.contains("no living worker can run this job type"),
        "{why}"
    );
    house.ok(&["job", "cancel", &id, "--reason", "test"]);
    let rest: Vec<String> = lines.collect();
    let said = Said::from(child.wait_with_output().unwrap());
    assert_eq!(said.code, 1);
    assert!(said.out.contains("cancelled"), "{}", said.out);
    assert!(
        rest[0].contains(&format!("job {id} was cancelled")),
        "{rest:?}"
    );
    let said = house.run(&["job", "wait", &id, "--output", "json"]);
    let envelope: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(
        (said.code, &envelope["error"]["code"]),
        (1, &"job_cancelled".into())
    );
    assert_eq!(envelope["data"]["status"], "cancelled");
    let pending = house.ok(&["enqueue", "a"]);
    let said = house.run(&["job", "wait", &pending, "--timeout", "300ms"]);
    assert_eq!(said.code, 1);
    assert!(
        said.err.contains("has not ended within 300ms"),
        "{}",
        said.err
    );
}

#[test]
fn nothing_from_a_payload_acts_on_the_terminal() {
    let house = House::new();
    let id = house.ok(&["enqueue", "a", "--data", "\"\\u001b[31mred\""]);
    house.ok(&[
        "job",
        "cancel",
        &id,
        "--reason",
        "\u{1b}]0;title\u{7}\nsecond\u{202e}",
    ]);
    for arguments in [
        &["job", "list"][..],
        &["job", "show", &id],
        &["job", "wait", &id],
    ] {
        for output in [&[][..], &["--output", "table"], &["--output", "json"]] {
            let said = house.run(&[arguments, output].concat());
            let all = format!("{}{}", said.out, said.err);
            assert!(!all.contains('\u{1b}') && !all.contains('\u{7}'), "{all:?}");
        }
    }
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let house = House::new();
    for _ in 0..3 {
        house.ok(&["enqueue", "a"]);
    }
    let mut child = house
        .command(&["job", "list"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(Said::from(child.wait_with_output().unwrap()).err, "");
}

#[test]
fn the_schema_comes_is_shown_and_goes() {
    let house = House::bare();
    let said = house.run(&["migrate", "status"]);
    assert_eq!(said.code, 4, "{}", said.err);
    assert!(
        said.out.contains("0001_tables\tpending") && said.err.contains("run `tenure migrate up`"),
        "{}",
        said.err
    );
    assert!(
        house
            .ok(&["migrate", "--dry-run"])
            .starts_with("Would apply 0001_tables")
    );
    assert!(
        house
            .ok(&["migrate", "up"])
            .starts_with("Applied 0001_tables")
    );
    assert_eq!(house.ok(&["migrate"]), "The schema is up to date.");
    assert!(
        house
            .ok(&["migrate", "status"])
            .contains("0001_tables\tapplied")
    );
    let id = house.ok(&["enqueue", "a"]);
    let refused = house.run(&["migrate", "down"]);
    assert_eq!(refused.code, 4);
    assert!(
        refused
            .err
            .contains("tenure migrate down --drop-schema tenure"),
        "{}",
        refused.err
    );
    assert_eq!(
        house
            .run(&["migrate", "down", "--drop-schema", "public"])
            .code,
        4
    );
    house.ok(&["migrate", "down", "--dry-run", "--drop-schema", "tenure"]);
    house.ok(&["job", "show", &id]);
    house.ok(&["migrate", "down", "--drop-schema", "tenure"]);
    assert_eq!(
        house
            .run(&["migrate", "down", "--drop-schema", "tenure"])
            .code,
        3
    );
}

#[test]
fn two_installations_share_a_database() {
    let house = House::new();
    let other = ["--set", "database.schema=second"];
    house.ok(&[&["migrate"], &other[..]].concat());
    let id = house.ok(&[&["enqueue", "a"], &other[..]].concat());
    assert_eq!(house.run(&["job", "show", &id]).code, 3);
    house.ok(&[&["job", "show", &id], &other[..]].concat());
}

#[test]
fn check_config_shows_what_is_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tenure.toml");
    std::fs::write(
        &file,
        "[database]\nurl = \"postgres://u:hunter2@127.0.0.1/app\"\n[handlers.a]\nexec = { command = [\"sh\"] }\n\
         [handlers.\"*\".retry]\ndelay = \"5s\"\n[worker]\nconcurrency = 3\n",
    )
    .unwrap();
    let config = file.to_str().unwrap();
    let said = Said::from(
        binary()
            .args(["check-config", "--config", config])
            .output()
            .unwrap(),
    );
    assert_eq!(said.code, 0, "{}", said.err);
    for line in [
        "worker.concurrency\t3",
        "handlers.a.retry.delay\t5s",
        "database.servers\t127.0.0.1:5432",
        "handlers.a.exec.command\t[\"sh\"]",
    ] {
        assert!(
            said.out.contains(line),
            "{line} is missing in\n{}",
            said.out
        );
    }
    assert!(!said.out.contains("hunter2"));
    let said = Said::from(
        binary()
            .arg("check-config")
            .env("TENURE_CONFIG", config)
            .env("TENURE_WORKER__CONCURRENCY", "x")
            .output()
            .unwrap(),
    );
    assert_eq!(said.code, 2);
    assert!(
        said.err.contains(
            "error: TENURE_WORKER__CONCURRENCY: worker.concurrency: found the text \"x\""
        ),
        "{}",
        said.err
    );
}
