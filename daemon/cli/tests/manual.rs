//! What shells and `man` make of the command line.

use std::fs;
use std::process::Command;

use crate::house::{Said, binary};

fn tenure(arguments: &[&str]) -> Said {
    binary().args(arguments).output().unwrap().into()
}

/// What bash offers for the last of these words.
fn offered(script: &str, words: &[&str]) -> Vec<String> {
    let last = words.len() - 1;
    let program = format!(
        "{script}\nCOMP_WORDS=({})\nCOMP_CWORD={last}\n_tenure tenure \"${{COMP_WORDS[{last}]}}\" \"${{COMP_WORDS[{}]}}\"\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"\ncomplete -p tenure",
        words.join(" "),
        last - 1
    );
    let said: Said = Command::new("bash")
        .args(["--norc", "-c", &program])
        .output()
        .unwrap()
        .into();
    assert_eq!(said.code, 0, "{}", said.err);
    said.out.lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_options() {
    let script = tenure(&["completions", "bash"]).out;
    let commands = offered(&script, &["tenure", "en"]);
    assert!(commands.contains(&"enqueue".to_owned()), "{commands:?}");
    let options = offered(&script, &["tenure", "enqueue", "--fr"]);
    assert!(options.contains(&"--from".to_owned()), "{options:?}");
    let below = offered(&script, &["tenure", "job", "ex"]);
    assert!(below.contains(&"explain".to_owned()), "{below:?}");
    // What a daemon starts is nobody's command.
    let hidden = offered(&script, &["tenure", "wit"]);
    assert!(!hidden.contains(&"witness".to_owned()), "{hidden:?}");
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        assert!(
            tenure(&["completions", shell]).out.contains("enqueue"),
            "{shell}"
        );
    }
}

#[test]
fn each_command_has_a_man_page_that_troff_understands() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().to_str().unwrap();
    assert_eq!(tenure(&["man", "--dir", dir]).code, 0);
    let mut names = Vec::new();
    for file in fs::read_dir(folder.path()).unwrap() {
        let path = file.unwrap().path();
        let said: Said = Command::new("groff")
            .args(["-Kutf8", "-man", "-z", "-ww"])
            .arg(&path)
            .output()
            .unwrap()
            .into();
        assert_eq!(
            (said.code, said.err.as_str()),
            (0, ""),
            "{}",
            path.display()
        );
        names.push(path.file_name().unwrap().to_str().unwrap().to_owned());
    }
    for name in ["tenure.1", "tenure-run.1", "tenure-job-explain.1"] {
        assert!(names.iter().any(|it| it == name), "{names:?}");
    }
    assert!(!names.iter().any(|it| it.contains("guard")), "{names:?}");
    let page = tenure(&["man"]).out;
    assert_eq!(
        page,
        fs::read_to_string(folder.path().join("tenure.1")).unwrap()
    );
    let refused = tenure(&["man", "--dir", "/nowhere"]);
    assert_eq!(refused.code, 2, "{}", refused.err);
}
