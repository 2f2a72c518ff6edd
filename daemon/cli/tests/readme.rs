//! What the documents show runs here, and what they say of defaults and links holds.
//!
//! In README.md the info string of a fenced block has a second word where the block is run: the name of the file that it is,
//! or `run` for a part of the script. The `text` block after such a part is what that part prints.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

use crate::house::{House, Said, binary};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const SETUP: &str = "see `scripts/setup test` for what must be installed";

#[test]
fn the_readme_does_what_it_says() {
    let house = House::bare();
    let place = Place::new(&house);
    let readme = fs::read_to_string(format!("{ROOT}/README.md")).unwrap();
    let mut script = String::new();
    let mut expected = Vec::new();
    for (info, body) in blocks(&readme) {
        match info.split_once(' ') {
            Some((_, "run")) => {
                script += &format!("printf '\\036'\n{}", place.fit(body));
                expected.push(None);
            }
            Some((_, name)) => place.write(name, body),
            None if info == "text" => *expected.last_mut().unwrap() = Some(body),
            None => {}
        }
    }
    assert!(expected.len() > 1 && expected.iter().any(Option::is_some));
    let said = place.run(&script);
    for (printed, expected) in said.out.split('\u{1e}').skip(1).zip(expected) {
        if let Some(expected) = expected {
            assert_eq!(without_ids(printed), without_ids(expected), "{}", said.err);
        }
    }
}

#[test]
fn the_defaults_in_the_document_are_the_ones_in_force() {
    let document = fs::read_to_string(format!("{ROOT}/docs/configuration.md")).unwrap();
    let (mut without, mut with, mut rows) = (String::new(), String::new(), 0);
    for line in document.lines() {
        let section = match line {
            "## [database]" | "## [worker]" | "## [api]" | "## [log]" => &line[3..],
            "## [[pools]]" => "[[pools]]\nname = 'p'\njob_types = ['p']\nconcurrency = 1",
            "## [handlers.NAME]" => "[handlers.a]",
            "### exec" => "[handlers.a.exec]\ncommand = ['true']",
            "### process" => "[handlers.c.process]\ncommand = ['true']",
            "### http" => "[handlers.b.http]\nurl = 'http://localhost/'",
            "### Confinement" => "[handlers.d.exec]\ncommand = ['true']",
            "### retry" => "[handlers.a.retry]",
            "## Variables" => break,
            _ => "",
        };
        writeln!(without, "{section}").unwrap();
        writeln!(with, "{section}").unwrap();
        let cells: Vec<&str> = line
            .split(" | ")
            .map(|cell| cell.trim_matches('|'))
            .collect();
        if let [key, default, _] = cells[..]
            && let Some(default) = code(default)
        {
            writeln!(with, "{} = {default}", code(key).unwrap()).unwrap();
            rows += 1;
        }
    }
    assert!(rows > 25, "{rows} defaults were found");
    let in_force = |config: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), config).unwrap();
        let mut command = binary();
        command
            .args(["check-config", "--output", "json", "--config"])
            .arg(file.path())
            .env(
                "TENURE_DATABASE__URL",
                "postgres://u@h1,h2/d?sslmode=disable",
            );
        let said = Said::from(command.output().unwrap());
        assert_eq!(said.code, 0, "{}{config}", said.out);
        let said: serde_json::Value = serde_json::from_str(&said.out).unwrap();
        said["data"]["settings"].clone()
    };
    assert_eq!(in_force(&with), in_force(&without));
}

#[test]
fn the_documents_link_to_files_that_are_there() {
    for name in [
        "README.md",
        "CHANGELOG.md",
        "daemon/ARCHITECTURE.md",
        "docs/configuration.md",
        "docs/sql.md",
        "handlers/README.md",
    ] {
        let path = Path::new(ROOT).join(name);
        let text = fs::read_to_string(&path).unwrap();
        for after in text.split("](").skip(1) {
            let (link, _) = after.split_once(')').unwrap();
            let file = link.split('#').next().unwrap();
            if !file.is_empty() && !link.contains("://") {
                assert!(path.parent().unwrap().join(file).exists(), "{name}: {link}");
            }
        }
    }
}

#[test]
fn the_example_handlers_do_their_work() {
    let house = House::new();
    house.sql("CREATE TABLE account (name text PRIMARY KEY, points bigint NOT NULL)");
    house.sql("CREATE TABLE points_given (job uuid PRIMARY KEY)");
    house.sql("INSERT INTO account VALUES ('ann', 1)");
    let place = Place::new(&house);
    let folder = place.folder.path().display();
    place.write("secret", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n");
    let config = format!(
        r#"
        [handlers.archive]
        exec = {{ command = ["{ROOT}/handlers/examples/shell/archive.sh"], env = ["ARCHIVE_DIR"] }}
        [handlers.points]
        exec = {{ command = ["{ROOT}/handlers/examples/python/points.py"], env = ["DATABASE_URL"] }}
        [handlers.count-words]
        http = {{ url = "http://127.0.0.1:8080/", secret_file = "secret" }}
        [handlers.forged]
        http = {{ url = "http://127.0.0.1:8080/" }}
        [handlers.render]
        http = {{ url = "http://127.0.0.1:8081/" }}
        [api]
        public_url = "http://127.0.0.1:7171"
        [handlers."*".retry]
        delay = "1s"
        "#
    );
    place.write("tenure.toml", &config);
    place.write("text.json", r#"{"text": "déjà vu, again"}"#);
    let said = place.run(&place.fit(&format!(
        r#"
        export ARCHIVE_DIR={folder} TENURE_DATABASE__URL=$DATABASE_URL
        PORT=8080 WEBHOOK_SECRET_FILE=secret node {ROOT}/handlers/examples/node/server.js &
        PORT=8081 {ROOT}/handlers/examples/python/later.py 2> receiver.log &
        tenure --config tenure.toml run --set api.listen=127.0.0.1:7171 &
        wait_for() {{ tenure --output json job wait "$1" || true; }}
        archived=$(tenure enqueue archive --data '{{"n": 1.50}}')
        given=$(tenure enqueue points --data '{{"account": "ann", "points": 5}}')
        wait_for $archived
        wait_for $given
        wait_for $(tenure enqueue points --data '{{"account": "nobody", "points": 5}}')
        wait_for $(tenure enqueue count-words --data @text.json)
        wait_for $(tenure enqueue count-words --data '{{}}')
        wait_for $(tenure enqueue forged --max-attempts 1)
        wait_for $(tenure enqueue render --data '{{"pages": 30}}')
        wait_for $(tenure enqueue render --data '{{}}')
        grep -c '"data":{{"n": 1.50}}' $archived.json
        "#
    )));
    let lines: Vec<&str> = said.out.lines().collect();
    let [
        archived,
        given,
        nobody,
        counted,
        textless,
        forged,
        rendered,
        pageless,
        kept,
    ] = lines[..]
    else {
        panic!("{}{}", said.out, said.err);
    };
    let job = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
    let file = format!("{}.json", job(archived)["data"]["id"].as_str().unwrap());
    assert_eq!(job(archived)["data"]["result"], json!({"file": file}));
    assert_eq!(kept, "1", "the data went through byte for byte");
    assert_eq!(job(given)["data"]["result"], json!({"points": 6}));
    assert_eq!(job(counted)["data"]["result"], json!({"words": 3}));
    assert_eq!(job(rendered)["data"]["result"], json!({"pages": 30}));
    for (line, why) in [
        (pageless, "wrong data: KeyError('pages')"),
        (nobody, "there is no account 'nobody'"),
        (textless, "422"),
        (forged, "401"),
    ] {
        assert_eq!(job(line)["success"], false, "{line}");
        assert!(line.contains(why), "{line}");
    }
}

/// A folder in which the examples run, with what this machine has in place of what they name.
struct Place {
    folder: TempDir,
    url: String,
    /// In place of those that the texts name.
    ports: [(&'static str, String); 3],
}

impl Place {
    fn new(house: &House) -> Self {
        let free = ["8080", "8081", "7171"]
            .map(|named| (named, TcpListener::bind("127.0.0.1:0").unwrap()));
        Self {
            folder: tempfile::tempdir().unwrap(),
            url: house.server.url("app", "postgres"),
            ports: free.map(|(named, free)| (named, free.local_addr().unwrap().port().to_string())),
        }
    }

    fn fit(&self, text: &str) -> String {
        let text = text.replace("postgres://postgres@localhost/app", &self.url);
        // With what stands before it, so that no number is taken for a port.
        self.ports.iter().fold(text, |text, (named, port)| {
            [":", "PORT=", "listen("].iter().fold(text, |text, before| {
                text.replace(&format!("{before}{named}"), &format!("{before}{port}"))
            })
        })
    }

    fn write(&self, name: &str, body: &str) {
        fs::write(self.folder.path().join(name), self.fit(body)).unwrap();
    }

    /// Runs a script, and ends what it left in the background.
    fn run(&self, script: &str) -> Said {
        let bin = Path::new(env!("CARGO_BIN_EXE_tenure")).parent().unwrap();
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new("bash");
        command
            .args(["-euo", "pipefail", "-c"])
            .arg(format!(
                "trap 'kill $(jobs -p) || true; wait' EXIT\n{script}"
            ))
            .current_dir(self.folder.path())
            .env_clear()
            .env("DATABASE_URL", &self.url)
            // Debian's Python and its modules come before any other.
            .env("PATH", format!("{}:/usr/bin:/bin:{path}", bin.display()))
            .env(
                "NODE_PATH",
                format!("/usr/share/nodejs:{ROOT}/target/readme/node_modules"),
            )
            .env("TENURE_API__LISTEN", "off");
        let said = Said::from(command.output().unwrap());
        assert_eq!(said.code, 0, "{}{}\n{SETUP}", said.out, said.err);
        said
    }
}

/// The fenced blocks of a Markdown text: info string and body.
fn blocks(text: &str) -> Vec<(&str, &str)> {
    let mut blocks = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("\n```") {
        let (info, after) = after.split_once('\n').unwrap();
        let (body, after) = after.split_once("```\n").unwrap();
        blocks.push((info, body));
        rest = after;
    }
    blocks
}

/// What stands in a cell that is a code span and nothing else.
fn code(cell: &str) -> Option<&str> {
    let inside = cell.trim().strip_prefix('`')?.strip_suffix('`')?;
    (!inside.contains('`')).then_some(inside)
}

/// The words of a text, with `ID` for each UUID.
fn without_ids(text: &str) -> String {
    let mut words = String::new();
    for word in text.split_whitespace() {
        let word = uuid::Uuid::try_parse(word).map_or(word, |_| "ID");
        write!(words, "{word} ").unwrap();
    }
    words
}
