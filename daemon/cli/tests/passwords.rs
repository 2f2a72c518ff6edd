//! Passwords with any characters reach the server, by every way, and are never printed.

use crate::house::{House, Said, binary};

/// As in the address: everything but letters and digits is encoded.
fn encoded(text: &str) -> String {
    text.bytes()
        .map(|b| {
            if b.is_ascii_alphanumeric() {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

#[test]
fn any_password_connects_by_address_variable_and_file() {
    let house = House::new();
    let rules = "local all postgres trust\nhost all postgres 127.0.0.1/32 trust\nhost all app 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(house.server.data_dir().join("pg_hba.conf"), rules).unwrap();
    house.sql("SELECT pg_reload_conf()");
    house.sql("CREATE ROLE app LOGIN IN ROLE tenure_admin");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    let at = format!("127.0.0.1:{}/app", house.server.port());
    for password in [
        "p@ss:w/o?r#d%",
        "%s%%n",
        "a b'c\"d\\e",
        "{x}",
        "100%25",
        "密码🙂",
        " leading and trailing ",
        "12345",
    ] {
        house.sql(&format!(
            "ALTER ROLE app PASSWORD '{}'",
            password.replace('\'', "''")
        ));
        std::fs::write(&file, format!("{password}\n")).unwrap();
        let ways = [
            vec![(
                "TENURE_DATABASE__URL",
                format!("postgres://app:{}@{at}", encoded(password)),
            )],
            vec![
                ("TENURE_DATABASE__URL", format!("postgres://app@{at}")),
                ("TENURE_DATABASE__PASSWORD", password.to_owned()),
            ],
            vec![
                ("TENURE_DATABASE__URL", format!("postgres://app@{at}")),
                ("TENURE_DATABASE__PASSWORD_FILE", file.display().to_string()),
            ],
        ];
        for way in ways {
            let said = Said::from(binary().arg("stats").envs(way.clone()).output().unwrap());
            assert_eq!(said.code, 0, "{way:?}: {}", said.err);
        }
    }
}

#[test]
fn a_wrong_password_is_said_without_printing_it() {
    let house = House::new();
    let rules = "local all postgres trust\nhost all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(house.server.data_dir().join("pg_hba.conf"), rules).unwrap();
    house.sql("SELECT pg_reload_conf()");
    house.sql("CREATE ROLE app LOGIN PASSWORD 'right'");
    let url = format!(
        "postgres://app:hunter2@127.0.0.1:{}/app",
        house.server.port()
    );
    let said = Said::from(
        binary()
            .arg("stats")
            .env("TENURE_DATABASE__URL", url)
            .output()
            .unwrap(),
    );
    assert_eq!(said.code, 5);
    assert!(
        said.err.contains("password authentication failed") && !said.err.contains("hunter2"),
        "{}",
        said.err
    );
}
