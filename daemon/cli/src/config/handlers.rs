//! The `[handlers]` section: which rules there are, and whether each can be meant.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use tenure_core::pattern::{self, Pattern};
use tenure_core::retry::Policy;
use tenure_runtime::exec::{Clients, HttpHandler, PrepareError};
use tenure_runtime::settings::{
    Accepts, AfterLostCommits, Authorities, DEFAULT_DELAY, DEFAULT_MAX_DELAY, DEFAULT_PATH,
    Durability, ExecSettings, ExitMeaning, HandlerKind, Handlers, HttpSettings, MOST_JOBS,
    ProcessSettings, RetryRule, Rule, Secret,
};

use super::binary;
use super::confinement::Keys;
use super::resolve::Check;
use super::schema::{
    AfterLostCommitsName, DurabilityName, ExecSection, ExitName, HandlerSection, HttpSection,
    ProcessSection, RetrySection,
};
use super::value::Count;

/// Reads all rules; what is wrong with them goes to `check`.
pub(crate) fn resolve(
    check: &mut Check<'_>,
    sections: BTreeMap<String, HandlerSection>,
) -> Handlers {
    let names: Vec<String> = sections.keys().cloned().collect();
    let patterns = self::patterns(&names);
    for (at, why) in patterns
        .iter()
        .enumerate()
        .filter_map(|(at, p)| Some((at, p.as_ref().err()?)))
    {
        check.refuse(&["handlers", &names[at]], why.clone());
    }
    let mut rules = Vec::new();
    for ((name, section), pattern) in sections.into_iter().zip(patterns) {
        let kind = kind(check, &name, &section);
        let retry = retry(check, &name, &section.retry);
        let Ok(pattern) = pattern else { continue };
        rules.push(Rule {
            pattern,
            kind,
            retry,
            after_lost_commits: section.after_lost_commits.map(|name| match name {
                AfterLostCommitsName::Keep => AfterLostCommits::Keep,
                AfterLostCommitsName::Rerun => AfterLostCommits::Rerun,
            }),
            durability: section.durability.map(|name| match name {
                DurabilityName::Local => Durability::Local,
                DurabilityName::Replicated => Durability::Replicated,
            }),
        });
    }
    let handlers = Handlers { rules };
    for rule in handlers.rules.iter().filter(|rule| rule.pattern.is_exact()) {
        if handlers.resolve(rule.pattern.as_str()).is_none() {
            let what = "nothing says what runs; add exec = { command = [\"…\"] }, process = { command = [\"…\"] } or http = { url = \"…\" }";
            check.refuse(&["handlers", rule.pattern.as_str()], what);
        }
    }
    handlers
}

/// Reads patterns that stand side by side: each of them, or why it cannot be used.
pub(crate) fn patterns(texts: &[String]) -> Vec<Result<Pattern, String>> {
    let mut good: Vec<Pattern> = Vec::new();
    let mut read = |text: &String| {
        let pattern = Pattern::new(text).map_err(|error| error.to_string())?;
        for other in &good {
            pattern::check(&[other.clone(), pattern.clone()]).map_err(|error| error.to_string())?;
        }
        good.push(pattern.clone());
        Ok(pattern)
    };
    texts.iter().map(&mut read).collect()
}

fn kind(check: &mut Check<'_>, name: &str, section: &HandlerSection) -> Option<HandlerKind> {
    let said = usize::from(section.exec.is_some())
        + usize::from(section.http.is_some())
        + usize::from(section.process.is_some())
        + usize::from(section.noop.is_some());
    if said > 1 {
        check.refuse(
            &["handlers", name],
            "says more than one of exec, http, process and noop; keep one",
        );
    }
    if let Some(exec) = &section.exec {
        return Some(HandlerKind::Exec(self::exec(check, name, exec)));
    }
    if let Some(http) = &section.http {
        return Some(HandlerKind::Http(self::http(check, name, http)));
    }
    if let Some(process) = &section.process {
        return Some(HandlerKind::Process(self::process(check, name, process)));
    }
    section.noop.as_ref().map(|_| HandlerKind::Noop)
}

/// What every kind of handler that starts a program has to be right in.
struct Program<'a> {
    section: [&'a str; 3],
    command: &'a [String],
    cwd: Option<&'a Path>,
    env: &'a [String],
}

impl Program<'_> {
    fn check(&self, check: &mut Check<'_>) {
        let path = |key| [self.section[0], self.section[1], self.section[2], key];
        if self.cwd.is_some_and(|cwd| !cwd.is_dir()) {
            check.refuse(&path("cwd"), "is not a folder");
        }
        let search = match self.env.iter().any(|variable| variable == "PATH") {
            true => std::env::var("PATH").unwrap_or_default(),
            false => DEFAULT_PATH.to_owned(),
        };
        let Some((program, arguments)) = self.command.split_first() else {
            let what =
                "a program with its arguments is expected, such as [\"python3\", \"report.py\"]";
            return check.refuse(&path("command"), what);
        };
        if let Err(why) = binary::find(program, self.cwd, &search) {
            check.refuse(&path("command"), why);
        }
        if arguments.iter().any(|argument| argument.contains('\0')) {
            check.refuse(&path("command"), "an argument holds a NUL");
        }
    }
}

fn process(check: &mut Check<'_>, name: &str, section: &ProcessSection) -> ProcessSettings {
    let path = |key| ["handlers", name, "process", key];
    let program = Program {
        section: ["handlers", name, "process"],
        command: &section.command,
        cwd: section.cwd.as_deref(),
        env: &section.env,
    };
    program.check(check);
    if section.concurrency.0 > MOST_JOBS {
        check.refuse(
            &path("concurrency"),
            format!("at most {MOST_JOBS} jobs at once in one process can be meant"),
        );
    }
    let count = |count: Count| usize::try_from(count.0).unwrap_or(usize::MAX);
    let confinement = Keys {
        section: ["handlers", name, "process"],
        user: section.user.as_ref(),
        group: section.group.as_ref(),
        nice: section.nice,
        private_tmp: section.private_tmp,
        limits: &section.limits,
    };
    ProcessSettings {
        command: section.command.clone(),
        cwd: section.cwd.clone(),
        env: section.env.clone(),
        confinement: Box::new(confinement.resolve(check)),
        processes: count(section.processes),
        concurrency: count(section.concurrency),
        timeout: check.positive(&path("timeout"), section.timeout.0),
        kill_grace: section.kill_grace.0,
        hello_timeout: check.positive(&path("hello_timeout"), section.hello_timeout.0),
        max_jobs: section.max_jobs.map(|most| u64::from(most.0)),
        max_age: section
            .max_age
            .map(|age| check.positive(&path("max_age"), age.0)),
        max_memory: section
            .max_memory
            .map(|size| u64::try_from(size.0).unwrap_or(u64::MAX)),
    }
}

fn exec(check: &mut Check<'_>, name: &str, section: &ExecSection) -> ExecSettings {
    let path = |key| ["handlers", name, "exec", key];
    let program = Program {
        section: ["handlers", name, "exec"],
        command: &section.command,
        cwd: section.cwd.as_deref(),
        env: &section.env,
    };
    program.check(check);
    let mut exit_codes = BTreeMap::new();
    for (code, meaning) in &section.exit_codes {
        match code.parse::<u8>() {
            Ok(code) => exit_codes.insert(
                i32::from(code),
                match meaning {
                    ExitName::Done => ExitMeaning::Done,
                    ExitName::Retry => ExitMeaning::Retry,
                    ExitName::Dead => ExitMeaning::Dead,
                },
            ),
            Err(_) => {
                check.refuse(
                    &["handlers", name, "exec", "exit_codes", code],
                    "an exit code from 0 to 255 is expected",
                );
                None
            }
        };
    }
    let confinement = Keys {
        section: ["handlers", name, "exec"],
        user: section.user.as_ref(),
        group: section.group.as_ref(),
        nice: section.nice,
        private_tmp: section.private_tmp,
        limits: &section.limits,
    };
    ExecSettings {
        command: section.command.clone(),
        cwd: section.cwd.clone(),
        env: section.env.clone(),
        confinement: Box::new(confinement.resolve(check)),
        timeout: check.positive(&path("timeout"), section.timeout.0),
        kill_grace: section.kill_grace.0,
        exit_codes,
    }
}

fn http(check: &mut Check<'_>, name: &str, section: &HttpSection) -> HttpSettings {
    let path = |key| ["handlers", name, "http", key];
    if section.socket.is_some() && !section.allow.is_empty() {
        check.refuse(
            &path("allow"),
            "a Unix socket leads to no address; remove `allow` or `socket`",
        );
    }
    if section
        .socket
        .as_ref()
        .is_some_and(|socket| !socket.is_absolute())
    {
        check.refuse(
            &path("socket"),
            "a full path is expected, such as \"/run/app.sock\"",
        );
    }
    let settings = HttpSettings {
        socket: section.socket.clone(),
        timeout: check.positive(&path("timeout"), section.timeout.0),
        connect_timeout: check.positive(&path("connect_timeout"), section.connect_timeout.0),
        body_timeout: section
            .body_timeout
            .map(|span| check.positive(&path("body_timeout"), span.0)),
        idle_timeout: section.idle_timeout.0,
        max_response: section.max_response.map_or(usize::MAX, |size| size.0),
        max_headers: section.max_headers.0,
        secret: section
            .secret_file
            .as_ref()
            .and_then(|file| check.secret_file(&path("secret_file"), file)),
        authorities: section
            .ca_file
            .as_ref()
            .and_then(|file| authorities(check, &path("ca_file"), file)),
        allow: allow(check, name, &section.allow),
        accepts: Accepts {
            hold: check.positive(&path("hold"), section.hold.0),
            max_open: section.max_open.0 as usize,
        },
        headers: section
            .headers
            .iter()
            .map(|(header, value)| (header.clone(), Secret::new(value)))
            .collect(),
        ..HttpSettings::at(&section.url)
    };
    if let Err(error) = HttpHandler::new(&settings, &mut Clients::default()) {
        let key = match error {
            PrepareError::Url(_) | PrepareError::Client(_) | PrepareError::NotAllowed(_) => "url",
            PrepareError::Header(_) | PrepareError::Reserved(_) => "headers",
            PrepareError::Secret(_) => "secret_file",
            PrepareError::Authorities { .. } => "ca_file",
        };
        check.refuse(&path(key), error.to_string());
    }
    settings
}

fn authorities(check: &mut Check<'_>, path: &[&str], file: &Path) -> Option<Authorities> {
    match std::fs::read_to_string(file) {
        Ok(pem) => Some(Authorities {
            file: file.to_owned(),
            pem,
        }),
        Err(error) => {
            check.refuse(path, format!("{} cannot be read: {error}", file.display()));
            None
        }
    }
}

/// Networks such as `10.0.0.0/8`, and single addresses.
fn allow(check: &mut Check<'_>, name: &str, texts: &[String]) -> Vec<IpNet> {
    let mut networks = Vec::new();
    for (at, text) in texts.iter().enumerate() {
        let single = text.parse::<IpAddr>().map(IpNet::from);
        match single.or_else(|_| text.parse::<IpNet>()) {
            Ok(network) => networks.push(network),
            Err(_) => check.refuse(
                &["handlers", name, "http", "allow", &at.to_string()],
                format!(
                    "found \"{text}\": an address such as \"127.0.0.1\", or a network such as \"10.0.0.0/8\", is expected"
                ),
            ),
        }
    }
    networks
}

fn retry(check: &mut Check<'_>, name: &str, section: &RetrySection) -> RetryRule {
    let max_attempts = section
        .max_attempts
        .and_then(|count| i32::try_from(count.0).ok());
    let (delay, max_delay) = (
        section.delay.map(|span| span.0),
        section.max_delay.map(|span| span.0),
    );
    let longest = max_delay.unwrap_or(DEFAULT_MAX_DELAY.max(delay.unwrap_or_default()));
    let first = delay.unwrap_or(DEFAULT_DELAY.min(longest));
    if let Err(error) = Policy::new(max_attempts.unwrap_or(1), first, longest) {
        check.refuse(&["handlers", name, "retry"], error.to_string());
    }
    RetryRule {
        max_attempts,
        delay,
        max_delay,
    }
}
