//! What a process gets and what is made of what it says.

use std::time::Duration;

use tenure_protocol::verdict::{LONG_DELAY, Verdict};
use tenure_runtime::exec::{Handler, Limits, Task};
use tenure_runtime::settings::ExitMeaning;

use super::{command, executor, pids, run, run_task, runs, sh, task, until};

#[tokio::test]
async fn exit_codes_and_signals_are_verdicts() {
    let cases = [
        ("exit 0", Verdict::Done, Some(0), None),
        ("exit 1", Verdict::RETRY, Some(1), None),
        ("exit 75", Verdict::RETRY, Some(75), None),
        ("exit 65", Verdict::Dead, Some(65), None),
        ("exit 127", Verdict::RETRY_LONG, Some(127), None),
        ("kill -9 $$", Verdict::RETRY, None, Some(9)),
        ("kill -SEGV $$", Verdict::RETRY, None, Some(11)),
    ];
    for (script, verdict, code, signal) in cases {
        let ended = run(&sh(script)).await;
        assert_eq!(
            (ended.verdict, ended.exit_code, ended.signal),
            (verdict, code, signal),
            "{script}"
        );
        assert_eq!(ended.error.is_some(), verdict != Verdict::Done, "{script}");
    }
    let mut own = command(&["sh", "-c", "exit 3"]);
    own.exit_codes.insert(3, ExitMeaning::Done);
    assert_eq!(run(&Handler::Exec(own)).await.verdict, Verdict::Done);
}

#[tokio::test]
async fn an_error_quotes_the_last_line_of_the_log() {
    let ended = run(&sh("echo one >&2; echo 'boom: no disk' >&2; exit 4")).await;
    assert_eq!(ended.error.as_deref(), Some("exit code 4: boom: no disk"));
    assert_eq!(ended.log_tail.as_deref(), Some("one\nboom: no disk"));
    let ended = run(&sh("echo said on stdout; exit 4")).await;
    assert_eq!(ended.log_tail.as_deref(), Some("said on stdout"));
    assert_eq!(ended.result, None);
}

#[tokio::test]
async fn what_cannot_be_started_says_what_to_do_and_does_not_come_back_soon() {
    let missing = command(&["/no/such/program"]);
    let not_executable = command(&["/etc/passwd"]);
    let mut nowhere = command(&["true"]);
    nowhere.cwd = Some("/no/such/directory".into());
    for (settings, hint) in [
        (missing, "installed"),
        (not_executable, "chmod"),
        (nowhere, "/no/such/directory"),
    ] {
        let ended = run(&Handler::Exec(settings)).await;
        assert_eq!(
            ended.verdict,
            Verdict::Retry {
                not_before: Some(LONG_DELAY),
                long: true
            }
        );
        let error = ended.error.unwrap();
        assert!(error.contains(hint), "{error}");
    }
}

#[tokio::test]
async fn results_are_json_or_text_whatever_the_bytes() {
    assert_eq!(
        run(&sh("echo '{\"n\":18446744073709551616}'"))
            .await
            .result
            .unwrap(),
        "{\"n\":18446744073709551616}"
    );
    assert_eq!(
        run(&sh("printf 'a\\0b\\377'; printf 'x\\0y' >&2"))
            .await
            .result
            .unwrap(),
        "\"a␀b\u{FFFD}\""
    );
    assert_eq!(
        run(&sh("printf 'x\\0y' >&2; exit 1"))
            .await
            .log_tail
            .unwrap(),
        "x␀y"
    );
    let ended = run(&sh(r#"echo '{"a":1,"tenure":{"snooze":"10m"}}'"#)).await;
    assert_eq!(ended.verdict, Verdict::Snooze(Duration::from_mins(10)));
    let ended = run(&sh(r#"echo '{"a":1,"tenure":{"snoze":"10m"}}'"#)).await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert!(ended.error.unwrap().contains("tenure.snoze"));
}

/// B29: a left-over that holds the pipes open.
#[tokio::test]
async fn a_grandchild_with_the_pipes_does_not_hold_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pids");
    let ended = run(&sh(&format!(
        "sleep 300 & echo $! > {}; echo done",
        file.display()
    )))
    .await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("\"done\""))
    );
    let left_over = pids(&file, 1).await[0];
    until(|| !runs(left_over)).await;
}

/// B32: both streams at once, then one endless line, in bounded memory.
#[tokio::test]
async fn output_of_any_size_neither_blocks_nor_fills_the_memory() {
    let ended = run(&sh("for i in $(seq 50); do head -c 500000 /dev/zero | tr '\\0' o; head -c 500000 /dev/zero | tr '\\0' e >&2; done")).await;
    assert_eq!(ended.verdict, Verdict::Done, "{:?}", ended.error);
    let (result, log) = (ended.result.unwrap(), ended.log_tail.unwrap());
    assert!(result.starts_with("\"ooo") && result.ends_with("ooo\""));
    assert!(result.contains("… [tenure: 24934464 bytes left out] …"));
    assert!(result.len() < 65 * 1024);
    assert!(log.contains("bytes left out") && log.len() < 17 * 1024);

    let ended = run(&sh("head -c 20000000 /dev/zero | tr '\\0' x >&2; exit 3")).await;
    assert_eq!(ended.exit_code, Some(3));
    assert!(ended.error.unwrap().len() < 1000);
}

/// B34: the handler echoes while it reads. B49: and every byte of the data arrives.
#[tokio::test]
async fn large_payloads_pass_both_ways() {
    let data = format!(
        r#"{{"id": 1970670598291982290,"u":18446744073709551616, "fill":"{}"}}"#,
        "x".repeat(5 << 20)
    );
    let mut executor = executor();
    executor.limits = Limits {
        result: 16 << 20,
        log: 1024,
    };
    let ended = run_task(&executor, &Handler::Exec(command(&["cat"])), &task(&data)).await;
    assert_eq!(ended.verdict, Verdict::Done);
    assert!(ended.result.unwrap().contains(&data));
}

#[tokio::test]
async fn a_handler_need_not_read() {
    let data = format!("\"{}\"", "x".repeat(5 << 20));
    let ended = run_task(&executor(), &sh("exec <&-; echo '1'"), &task(&data)).await;
    assert_eq!(
        (ended.verdict, ended.result.as_deref()),
        (Verdict::Done, Some("1"))
    );
}

/// B97: an allow-list, and no descriptor of ours.
#[tokio::test]
async fn a_handler_gets_what_is_named_and_nothing_else() {
    let mut settings = command(&[
        "sh",
        "-c",
        "env; ls /proc/self/fd; grep -E '^Sig(Blk|Ign)' /proc/self/status",
    ]);
    settings.env = vec![
        "CARGO_MANIFEST_DIR".to_owned(),
        "NOT_THERE_AT_ALL".to_owned(),
    ];
    let _socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let task = Task {
        traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned()),
        ..task("{}")
    };
    let ended = run_task(&executor(), &Handler::Exec(settings), &task).await;
    let text: String = serde_json::from_str(&ended.result.unwrap()).unwrap();
    let mut names: Vec<&str> = text
        .lines()
        .filter_map(|line| Some(line.split_once('=')?.0))
        .collect();
    names.sort_unstable();
    names.retain(|name| !matches!(*name, "PWD" | "_" | "SHLVL" | "OLDPWD"));
    let expected = [
        "CARGO_MANIFEST_DIR",
        "PATH",
        "TENURE_ATTEMPT",
        "TENURE_DEADLINE",
        "TENURE_JOB_ID",
        "TENURE_JOB_TYPE",
        "TENURE_MAX_ATTEMPTS",
        "TENURE_TENANT",
        "TENURE_TOKEN",
        "TRACEPARENT",
    ];
    assert_eq!(names, expected);
    assert!(
        text.contains(&format!("TENURE_JOB_ID={}", task.job)) && text.contains("TENURE_ATTEMPT=2")
    );
    let descriptors: Vec<&str> = text
        .lines()
        .filter(|line| line.parse::<u32>().is_ok())
        .collect();
    assert_eq!(
        descriptors,
        ["0", "1", "2", "3"],
        "the last is the directory that ls reads"
    );
    assert!(text.contains("SigBlk:\t0000000000000000"), "{text}");
    let ignored = text
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:\t"))
        .unwrap();
    let pipe_and_child = 1 << 12 | 1 << 16;
    assert_eq!(
        u64::from_str_radix(ignored, 16).unwrap() & pipe_and_child,
        0
    );
}

/// B102: no text of a job reaches a shell.
#[tokio::test]
async fn text_is_never_run() {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().join("mark");
    for text in [
        "$(touch M)",
        "`touch M`",
        "; touch M",
        "\"\ntouch M\n\"",
        "' || touch M",
    ] {
        let text = text.replace('M', &mark.display().to_string());
        let task = Task {
            job_type: text.clone(),
            tenant: text.clone(),
            traceparent: Some(text.clone()),
            watermark: Some(serde_json::Value::from(text.as_str()).to_string()),
            enqueued_at: text.clone(),
            ..task(&serde_json::Value::from(text.as_str()).to_string())
        };
        let ended = run_task(
            &executor(),
            &sh("cat >&2; printf %s \"$TENURE_TENANT\""),
            &task,
        )
        .await;
        assert_eq!(
            ended.result.unwrap(),
            serde_json::Value::from(text).to_string()
        );
        assert!(!mark.exists());
    }
}

#[tokio::test]
async fn noop_is_done_at_once() {
    let ended = run(&Handler::Noop).await;
    assert_eq!((ended.verdict, ended.result), (Verdict::Done, None));
}
