//! The rules of the house that a compiler does not check: which crate may use which, and the size of files.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What each crate of ours may use of ours, apart from its tests.
const ARROWS: &[(&str, &[&str])] = &[
    (
        "tenure",
        &[
            "api", "core", "embedded", "protocol", "runtime", "store", "verdict",
        ],
    ),
    ("tenure-api", &["core", "runtime", "store"]),
    ("tenure-runtime", &["core", "protocol", "store"]),
    ("tenure-store", &["core"]),
    ("tenure-protocol", &[]),
    ("tenure-core", &[]),
    ("tenure-sim", &["core"]),
    ("tenure-embedded", &[]),
    ("tenure-verdict", &[]),
    ("chaos-tests", &["embedded", "verdict"]),
];

/// The crates that decide, and so must run under a simulated clock, network and chance.
const PURE: &[&str] = &["tenure-core", "tenure-protocol", "tenure-sim"];
const IMPURE: &[&str] = &[
    "tokio",
    "tokio-postgres",
    "rand",
    "reqwest",
    "hyper",
    "mio",
    "nix",
];

/// All SQL stands in one crate.
const SQL_CLIENTS: &[&str] = &[
    "tokio-postgres",
    "deadpool-postgres",
    "tokio-postgres-rustls",
];

/// Lines of a file without its tests, and with them.
const LINES: usize = 500;
const LINES_WITH_TESTS: usize = 700;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .unwrap()
}

/// `cargo tree` as (depth, crate).
fn tree(args: &[&str]) -> Vec<(usize, String)> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--locked",
            "--offline",
            "--no-dedupe",
            "--prefix=depth",
        ])
        .args(args)
        .current_dir(root())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .filter(|line| !line.is_empty())
        .map(|line| {
            let name = line.split(' ').next().unwrap();
            let letters = name.find(|c: char| !c.is_ascii_digit()).unwrap();
            (name[..letters].parse().unwrap(), name[letters..].to_owned())
        })
        .collect()
}

/// Each crate of ours with one that it uses directly.
fn direct(edges: &str) -> BTreeSet<(String, String)> {
    let mut from = String::new();
    let mut pairs = BTreeSet::new();
    for (depth, name) in tree(&["--workspace", "--depth=1", "--edges", edges]) {
        match depth {
            0 => from = name,
            _ => drop(pairs.insert((from.clone(), name))),
        }
    }
    pairs
}

#[test]
fn crates_use_each_other_along_the_arrows_only() {
    let ours: BTreeSet<String> = tree(&["--workspace", "--depth=0"])
        .into_iter()
        .map(|(_, name)| name)
        .collect();
    let listed: BTreeSet<String> = ARROWS.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(
        ours, listed,
        "a crate is new or gone: change ARROWS, and daemon/ARCHITECTURE.md with it"
    );
    for (from, to) in direct("normal,build") {
        if ours.contains(&to) {
            let (_, allowed) = ARROWS.iter().find(|(name, _)| *name == from).unwrap();
            let short = to.trim_start_matches("tenure-");
            assert!(allowed.contains(&short), "{from} must not use {to}");
        }
    }
}

#[test]
fn what_decides_does_nothing_else() {
    for name in PURE {
        let used = tree(&["--package", name, "--edges", "normal,build"]);
        let impure: Vec<_> = used
            .iter()
            .filter(|(_, used)| IMPURE.contains(&used.as_str()))
            .collect();
        assert!(
            impure.is_empty(),
            "{name} must stay pure, but has {impure:?}"
        );
    }
}

#[test]
fn only_the_store_speaks_to_postgresql() {
    for (from, to) in direct("normal,build,dev") {
        let client = SQL_CLIENTS.contains(&to.as_str());
        assert!(
            !client || from == "tenure-store",
            "{from} must not use {to}: all SQL is in tenure-store"
        );
    }
}

#[test]
fn files_are_short_and_named_for_their_subject() {
    let mut files = Vec::new();
    collect(&root(), &mut files);
    assert!(files.len() > 20, "the sources were not found");
    let mut faults = Vec::new();
    for file in files {
        let stem = file.file_stem().unwrap().to_str().unwrap();
        if ["util", "utils", "common", "helper", "helpers", "misc"].contains(&stem) {
            faults.push(format!("{} is named for no subject", file.display()));
        }
        let text = fs::read_to_string(&file).unwrap();
        let is_test = file
            .iter()
            .any(|part| part == "tests" || part == "chaos-tests");
        let code = if is_test {
            0
        } else {
            text.lines()
                .take_while(|line| *line != "#[cfg(test)]")
                .count()
        };
        let all = text.lines().count();
        if code > LINES || all > LINES_WITH_TESTS {
            faults.push(format!(
                "{} has {all} lines, {code} of them before its tests; {LINES} and {LINES_WITH_TESTS} are allowed",
                file.display()
            ));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let (path, name) = (entry.path(), entry.file_name());
        let extension = path.extension().and_then(|extension| extension.to_str());
        if entry.file_type().unwrap().is_dir() {
            if name != "target"
                && name != "node_modules"
                && !name.to_string_lossy().starts_with('.')
            {
                collect(&path, files);
            }
        } else if matches!(extension, Some("rs" | "sql" | "py" | "js")) {
            files.push(path);
        }
    }
}
