//! Processes that break the protocol, or never begin to speak it.

use tenure_protocol::verdict::Verdict;
use tenure_runtime::settings::ProcessSettings;

use super::process::{do_all, do_one, error, fleet, handler, many, numbered, settings};
use super::*;

/// Scripts that break the protocol while they have a job, and what the error has to say.
#[tokio::test]
async fn what_breaks_the_protocol_is_said_and_the_process_replaced() {
    for (script, says) in [
        (
            "print('loading model', flush=True)",
            "standard output is for the protocol alone",
        ),
        ("say(type='result', id='7')", "needs the id"),
        (
            "say(type='done', id=job['id'])",
            "none of ready, result, error, progress",
        ),
        (
            "done(dict(id='01890a5d-ac96-774b-bcce-b302099a8057'))",
            "which it does not have",
        ),
        ("say(type='ready')", "said twice that it is ready"),
        ("os.write(1, b'\\xff\\xfe\\n')", "not UTF-8"),
        ("os.write(1, b'x' * 100_000_000)", "longer than"),
        (
            "[os.write(1, b'x' * 60_000) for _ in iter(int, 1)]",
            "longer than",
        ),
        (
            "os.write(1, b'{\"type\":\"result\",' + b' ' * 200_000 + b'}\\n')",
            "longer than",
        ),
        ("os.close(1)", "closed its standard output"),
    ] {
        let handler = handler(&format!(
            "
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
say(type='ready')
for job in jobs():
    if job['data'] == 1: {script}
    else: done(job)
    if job['data'] == 1: time.sleep(1000)
"
        ));
        let broken = do_one(&handler, "1").await;
        assert_eq!(broken.verdict, Verdict::RETRY, "{script}: {broken:?}");
        let said = error(&broken);
        assert!(said.contains(says), "{script}: {said}");
        assert!(said.contains("broke the protocol"), "{script}: {said}");
        assert!(said.len() < 800, "{script}: {said}");
        let next = do_one(&handler, "2").await;
        assert_eq!(next.verdict, Verdict::Done, "{script}: {next:?}");
    }
}

#[tokio::test]
async fn a_job_is_answered_once() {
    let handler = many(
        "
say(type='ready', concurrency=2)
held = []
for job in jobs():
    held.append(job)
    if len(held) == 2:
        done(held[0])
        done(held[0])
        time.sleep(1000)
",
        2,
    );
    let ended = do_all(&handler, &[numbered(1), numbered(2)]).await;
    let (good, bad): (Vec<_>, Vec<_>) = ended.iter().partition(|it| it.verdict == Verdict::Done);
    assert_eq!((good.len(), bad.len()), (1, 1), "{ended:?}");
    assert!(error(bad[0]).contains("answered once"), "{bad:?}");
}

#[tokio::test]
async fn no_hello_is_a_fault_of_the_installation() {
    let short = |script: &str| {
        fleet(&ProcessSettings {
            hello_timeout: Duration::from_millis(300),
            ..settings(script)
        })
    };
    for (handler, says) in [
        (
            short("log('waiting for a GPU'); time.sleep(1000)"),
            "within 300ms (hello_timeout): waiting for a GPU",
        ),
        (
            handler("log('no licence'); sys.exit(4)"),
            "before it said that it is ready, exit code 4: no licence",
        ),
        (
            handler("print('hello', flush=True); time.sleep(1000)"),
            "standard output is for the protocol alone",
        ),
        (
            handler(
                "say(type='progress', id='01890a5d-ac96-774b-bcce-b302099a8057'); time.sleep(1000)",
            ),
            "before it said that it is ready",
        ),
        (
            handler("say(type='ready', concurrency=0); time.sleep(1000)"),
            "concurrency must be from 1",
        ),
        (
            fleet(&ProcessSettings {
                command: vec!["/nowhere/worker".into()],
                ..settings("")
            }),
            "could not be started",
        ),
    ] {
        // All that wait learn of it, and none of them is blamed for more than an attempt.
        for ended in do_all(&handler, &[numbered(1), numbered(2)]).await {
            assert_eq!(ended.verdict, Verdict::RETRY_LONG, "{says}: {ended:?}");
            assert!(error(&ended).contains(says), "{says}: {ended:?}");
        }
        // One job at a time tries it again, after a wait.
        assert!(handler.room() <= 1);
    }
}

#[tokio::test]
async fn a_process_that_closes_its_input_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("closed");
    let handler = handler(&format!(
        "
say(type='ready')
for job in jobs():
    done(job, os.getpid())
    if job['data'] == 1:
        os.close(0)
        open('{}', 'w').close()
        time.sleep(1000)
",
        note.display()
    ));
    assert_eq!(do_one(&handler, "1").await.verdict, Verdict::Done);
    until(|| note.exists()).await;
    // It never got the job, so that has not failed.
    let second = do_one(&handler, "2").await;
    assert_eq!(second.verdict, Verdict::Stopped, "{second:?}");
    assert!(
        error(&second).contains("closed its standard input"),
        "{second:?}"
    );
    assert_eq!(do_one(&handler, "3").await.verdict, Verdict::Done);
}
