//! Whole configurations, and what a person is told about each mistake.

mod http;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use tenure_runtime::settings::{HandlerKind, Listen, Settings};

use super::{ConfigError, Sources, settings_of};

const URL: &str = "[database]\nurl = \"postgres://tenure@pg1,pg2:5432/app?sslmode=disable\"\n";

/// A configuration as it stands in a folder, with variables and flags.
struct Case {
    folder: tempfile::TempDir,
    variables: Vec<(String, String)>,
    flags: Vec<String>,
}

impl Case {
    fn new(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tenure.toml"), text).unwrap();
        Self {
            folder,
            variables: Vec::new(),
            flags: Vec::new(),
        }
    }

    fn with(text: &str) -> Self {
        Self::new(&format!("{URL}{text}"))
    }

    fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("tenure.toml")
    }

    fn read(&self) -> Result<Settings, ConfigError> {
        let variables = self
            .variables
            .iter()
            .map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let sources = Sources::read(Some(&self.file()), variables, &self.flags)?;
        settings_of(&sources)
    }

    fn settings(&self) -> Settings {
        self.read().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The message, with the folder's name left out.
    fn error(&self) -> String {
        let text = self.read().expect_err("was taken").to_string();
        text.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

#[test]
fn the_example_of_the_contract_is_taken() {
    let case = Case::with(
        r#"
[worker]
name = "billing-1"
lease_ttl = "30s"
[[pools]]
name = "email"
job_types = ["email_*"]
concurrency = 8
[handlers."email_*"]
http = { url = "http://127.0.0.1:8080/jobs", timeout = "30s" }
[handlers.report-generation]
after_lost_commits = "rerun"
exec = { command = ["sh", "-c", "true"], timeout = "5m", kill_grace = "10s" }
[handlers."report-*".retry]
max_attempts = 3
delay = "60s"
"#,
    );
    let settings = case.settings();
    let report = settings.handlers.resolve("report-generation").unwrap();
    assert!(
        matches!(report.kind, HandlerKind::Exec(exec) if exec.timeout == Duration::from_secs(300))
    );
    assert_eq!(report.retry.max_attempts(), 3);
    assert!(settings.handlers.resolve("report-other").is_none());
    assert_eq!(settings.pools[0].job_types[0].as_str(), "email_*");
    assert_eq!(
        settings.api.listen,
        Some(Listen::Tcp("127.0.0.1:7171".parse().unwrap()))
    );
}

#[test]
fn one_host_gets_a_longer_lease() {
    let lease = |text: &str| Case::new(text).settings().worker.lease_ttl.as_secs();
    assert_eq!(lease(URL), 30);
    assert_eq!(
        lease("[database]\nurl = \"postgres://a@pg1/app?sslmode=disable\"\n"),
        60
    );
    assert_eq!(
        lease(
            "database.url = \"postgres://a@pg1/app?sslmode=disable\"\nworker.lease_ttl = \"40s\""
        ),
        40
    );
}

#[test]
fn variables_win_over_the_file_and_flags_over_variables() {
    let case = Case::with("[worker]\nconcurrency = 1\nname = \"file\"\n")
        .variable("TENURE_WORKER__CONCURRENCY", "2")
        .variable("TENURE_WORKER__NAME", "007")
        .variable("TENURE_PORT_7171_TCP", "tcp://10.0.0.1:7171")
        .flag("worker.concurrency=3");
    let worker = case.settings().worker;
    assert_eq!((worker.concurrency, worker.name.as_str()), (3, "007"));
}

#[test]
fn every_key_that_is_no_text_can_be_given_by_variable() {
    let case = Case::with("")
        .variable("TENURE_WORKER__CONCURRENCY", "2")
        .variable("TENURE_DATABASE__POOL_SIZE", "3")
        .variable(
            "TENURE_POOLS",
            r#"[{name="a",job_types=["x"],concurrency=1}]"#,
        )
        .variable("TENURE_HANDLERS__X__NOOP", "{}")
        .variable("TENURE_HANDLERS__X__RETRY__MAX_ATTEMPTS", "4")
        .variable("TENURE_HANDLERS__Y__EXEC__COMMAND", r#"["sh"]"#)
        .variable("TENURE_HANDLERS__Y__EXEC__ENV", r#"["PATH"]"#)
        .variable("TENURE_HANDLERS__Y__EXEC__TIMEOUT", "3s");
    let settings = case.settings();
    assert_eq!(settings.database.pool_size, 3);
    assert_eq!(
        settings.handlers.resolve("x").unwrap().retry.max_attempts(),
        4
    );
    assert_eq!(settings.worker.concurrency, 2);
}

#[test]
fn passwords_arrive_as_they_are() {
    for password in [
        "p@ss:w/o?r#d%",
        "%s%%n",
        "a b'c\"d\\e",
        "{x}",
        "100%25",
        "密码🙂",
        " lead and trail ",
        "12345",
        "true",
        "[a]",
        "\"q\"",
        "",
    ] {
        let by_variable = Case::with("")
            .variable("TENURE_DATABASE__PASSWORD", password)
            .settings();
        assert_eq!(by_variable.database.password.unwrap().expose(), password);
        if password.is_empty() {
            continue;
        }
        let case = Case::with("");
        for end in ["", "\n", "\r\n"] {
            std::fs::write(
                case.folder.path().join("password"),
                format!("{password}{end}"),
            )
            .unwrap();
            let file = case.folder.path().join("password");
            let flag = format!("database.password_file={}", file.display());
            let by_file = Case::with("").flag(&flag).settings();
            assert_eq!(by_file.database.password.unwrap().expose(), password);
        }
    }
}

#[test]
fn a_systemd_credential_is_the_password() {
    let credentials = tempfile::tempdir().unwrap();
    std::fs::write(
        credentials.path().join("tenure-database-password"),
        "secret\n",
    )
    .unwrap();
    let case = Case::with("").variable(
        "CREDENTIALS_DIRECTORY",
        credentials.path().to_str().unwrap(),
    );
    assert_eq!(
        case.settings().database.password.unwrap().expose(),
        "secret"
    );
}

#[test]
fn mistakes_are_named_with_file_line_key_and_what_was_expected() {
    let cases = [
        (
            "[worker]\nlease_tll = \"3s\"",
            "tenure.toml:4: worker.lease_tll: unknown key; did you mean `lease_ttl`?",
        ),
        (
            "[wroker]\nname = \"a\"",
            "tenure.toml:3: wroker: unknown key; did you mean `worker`?",
        ),
        (
            "[worker]\nheartbeat = 3",
            "tenure.toml:4: worker.heartbeat: found 3: a duration with its unit, such as",
        ),
        (
            "[worker]\nheartbeat = \"3\"",
            "tenure.toml:4: worker.heartbeat: found \"3\": a duration with its unit",
        ),
        ("[worker]\nheartbeat = \"1M\"", "(a minute is \"m\")"),
        (
            "statement_timeout = \"25days\"",
            "tenure.toml:3: database.statement_timeout: must be from 1ms",
        ),
        (
            "statement_timeout = \"1us\"",
            "tenure.toml:3: database.statement_timeout: must be from 1ms",
        ),
        (
            "[worker]\nconcurrency = \"16\"",
            "tenure.toml:4: worker.concurrency: found the text \"16\": a whole number from 1",
        ),
        (
            "[worker]\nconcurrency = 0",
            "tenure.toml:4: worker.concurrency: found 0: a whole number from 1",
        ),
        ("[worker]\nconcurrency = -1", "worker.concurrency: found -1"),
        (
            "[worker]\nconcurrency = 1.5",
            "worker.concurrency: found 1.5",
        ),
        (
            "[worker]\nname = 3",
            "tenure.toml:4: worker.name: found 3: a text in quotes is expected",
        ),
        (
            "[worker]\nheartbeat = \"20s\"",
            "tenure.toml:4: worker.heartbeat:",
        ),
        (
            "[[pools]]\nname = \"a\"\njob_types = [\"x\"]\nconcurrency = 1\n[[pools]]\nname = \"b\"\nconcurency = 1",
            "tenure.toml:9: pools[1].concurency: unknown key; did you mean `concurrency`?",
        ),
        (
            "[[pools]]\nname = \"a\"\nconcurrency = 1",
            "tenure.toml:3: pools[0]: `job_types` is missing",
        ),
        (
            "[[pools]]\nname = \"a\"\nconcurrency = 1\njob_types = [\n\"x\",\n3]",
            "tenure.toml:8: pools[0].job_types[1]: found 3",
        ),
        (
            "[handlers.a.exec]\ntimeout = \"3s\"",
            "tenure.toml:3: handlers.a.exec: `command` is missing",
        ),
        (
            "[handlers.\"a.*\"]\nexec = { command = [\"true\"], cmd = 1 }",
            "tenure.toml:4: handlers.\"a.*\".exec.cmd: unknown key",
        ),
        (
            "[handlers.a]\nprocess = { command = [\"true\"], exit_codes = {} }",
            "tenure.toml:4: handlers.a.process.exit_codes: unknown key",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], limits = { memory = \"512MB\" } }",
            "tenure.toml:4: handlers.a.exec.limits.memory: ",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], limits = { cpus = \"60s\" } }",
            "tenure.toml:4: handlers.a.exec.limits.cpus: unknown key",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], limits = { cpu = \"10ms\" } }",
            "tenure.toml:4: handlers.a.exec.limits.cpu: at least a second",
        ),
        (
            "[handlers.a]\nprocess = { command = [\"true\"], limits = { output = \"1MiB\" } }",
            "tenure.toml:4: handlers.a.process.limits.output: is for exec only",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], user = \"no-such-user\" }",
            "tenure.toml:4: handlers.a.exec.user: there is no user \"no-such-user\"",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], group = \"no-such-group\" }",
            "tenure.toml:4: handlers.a.exec.group: there is no group \"no-such-group\"",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], user = 4000000 }",
            "tenure.toml:4: handlers.a.exec.user: the user 4000000 has no entry",
        ),
        (
            "[handlers.a]\nexec = { command = [\"true\"], nice = 20 }",
            "tenure.toml:4: handlers.a.exec.nice: found 20",
        ),
        (
            "[handlers.a]\nexec = { command = [\"no-such-program\"] }",
            "tenure.toml:4: handlers.a.exec.command: missing handler binary",
        ),
        (
            "[handlers.a.retry]\ndelay = \"1s\"",
            "tenure.toml:3: handlers.a: nothing says what runs",
        ),
        (
            "[handlers.a]\nnoop = {}\nretry = { delay = \"5s\", max_delay = \"1s\" }",
            "tenure.toml:5: handlers.a.retry: max_delay",
        ),
        (
            "[handlers.a]\nnoop = {}\nexec = { command = [\"true\"] }",
            "tenure.toml:3: handlers.a: says more than one",
        ),
        (
            "[handlers.\"a*b*\"]\nnoop = {}\n[handlers.\"a*c*\"]\nnoop = {}",
            "tenure.toml:5: handlers.\"a*c*\": the job type patterns",
        ),
        (
            "[handlers.a]\nafter_lost_commits = \"drop\"",
            "found \"drop\": one of \"keep\", \"rerun\" is expected",
        ),
        (
            "[api]\nlisten = \"0.0.0.0:7171\"",
            "tenure.toml:4: api.listen: 0.0.0.0:7171 can be reached from other machines",
        ),
        (
            "[api]\nlisten = \"7171\"",
            "tenure.toml:4: api.listen: an address and port",
        ),
        (
            "[api]\nmax_body = 3",
            "tenure.toml:4: api.max_body: found 3: a size with its unit",
        ),
        ("[worker\nname = 3", "tenure.toml:3: not valid TOML"),
        (
            "[worker]\nname = \"a\"\nname = \"b\"",
            "tenure.toml:5: not valid TOML",
        ),
    ];
    for (text, expected) in cases {
        let error = Case::with(text).error();
        assert!(
            error.contains(expected),
            "{text}\n  said:     {error}\n  expected: {expected}"
        );
    }
}

#[test]
fn mistakes_in_variables_and_flags_are_named_by_them() {
    let error = Case::with("")
        .variable("TENURE_WORKER__CONCURRENCY", "many")
        .error();
    assert!(
        error
            .starts_with("TENURE_WORKER__CONCURRENCY: worker.concurrency: found the text \"many\""),
        "{error}"
    );
    let error = Case::with("").variable("TENURE_WORKER__NOPE", "1").error();
    assert!(
        error.starts_with("TENURE_WORKER__NOPE: worker.nope: unknown key"),
        "{error}"
    );
    let error = Case::with("").flag("worker.heartbeat=3").error();
    assert!(
        error.starts_with("--set worker.heartbeat: worker.heartbeat: found \"3\""),
        "{error}"
    );
    let error = Case::with("").flag("concurrency").error();
    assert!(
        error.starts_with("--set: SECTION.KEY=VALUE is expected"),
        "{error}"
    );
}

#[test]
fn all_problems_are_shown_at_once() {
    let error = Case::with(
        "schema = \"pg_mine\"\n[api]\nlisten = \"x\"\n[handlers.a]\nexec = { command = [] }",
    )
    .error();
    assert_eq!(error.lines().count(), 3, "{error}");
}

#[test]
fn no_database_says_what_to_set() {
    let error = Case::new("").error();
    assert!(
        error.contains("database.url: no database is named")
            && error.contains("TENURE_DATABASE__URL"),
        "{error}"
    );
}

#[test]
fn secrets_are_never_shown() {
    let marker = "hunter2";
    for text in [
        format!("[database]\nurl = \"mysql://a:{marker}@h/x\""),
        format!("[database]\nurl = [\"{marker}\"]"),
        format!("[database]\nurl = \"postgres://h/x\"\npassword = {{ x = \"{marker}\" }}"),
        format!("{URL}[handlers.a]\nhttp = {{ url = \"ftp://x/?key={marker}\" }}"),
        format!("{URL}[handlers.a]\nhttp = \"{marker}\""),
        format!(
            "{URL}[handlers.a]\nhttp = {{ url = \"http://x\", headers = {{ \"a b\" = \"{marker}\" }} }}"
        ),
    ] {
        let error = Case::new(&text).error();
        assert!(!error.contains(marker), "{error}");
    }
    let settings = Case::with("")
        .variable("TENURE_DATABASE__PASSWORD", marker)
        .settings();
    assert!(!format!("{settings:?}").contains(marker));
}

#[test]
fn a_named_file_must_be_there() {
    let nowhere = PathBuf::from("/nowhere/tenure.toml");
    let error = Sources::read(Some(&nowhere), Vec::new(), &[])
        .expect_err("was taken")
        .to_string();
    assert!(
        error.starts_with("/nowhere/tenure.toml: cannot be read"),
        "{error}"
    );
}

/// The parser of values would end with the stack.
#[test]
fn what_is_nested_without_end_is_refused() {
    let value = format!("{}1{}", "[{a=".repeat(30_000), "}]".repeat(30_000));
    let key = ["worker"; 30_000].join(".");
    for flag in [
        format!("worker.concurrency={value}"),
        format!("{key}=1"),
        format!("handlers.a.exec.command={}", "[".repeat(33)),
    ] {
        let error = Case::new(URL).flag(&flag).read().unwrap_err().to_string();
        assert!(
            error.contains("is nested more than 32 levels deep"),
            "{error}"
        );
        assert!(error.len() < 300, "{error}");
    }
    let error = Case::new(URL)
        .variable("TENURE_WORKER__CONCURRENCY", &value)
        .read()
        .unwrap_err();
    assert!(
        error.to_string().starts_with("TENURE_WORKER__CONCURRENCY"),
        "{error}"
    );
    // What a command says may hold a few.
    let command = r#"handlers.a.exec.command=["sh","-c","[[[[[[ x"]"#;
    assert!(Case::new(URL).flag(command).read().is_ok());
}
