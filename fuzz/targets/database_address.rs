//! The address of the database.
//!
//! Input: lines for user, the password up to its middle, the password from there, and all that follows the `@`.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tenure_store::address::Address;

/// In the middle of the password, to see where it shows.
const MARKER: &str = "hunter2";

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(address) = parse(text) {
        assert_parts(&address);
    }
    let mut lines = text.splitn(4, '\n');
    let mut line = || lines.next().unwrap_or_default();
    let (user, before, after, rest) = (line(), line(), line(), line());
    if text.contains(MARKER) || user.contains(['@', ':', '?']) {
        return;
    }
    let password = format!("{before}{MARKER}{after}");
    match parse(&format!("postgres://{user}:{password}@{rest}")) {
        Err(error) => assert!(!error.contains(MARKER), "{error}"),
        Ok(address) => assert!(!address.servers().contains(MARKER), "{}", address.servers()),
    }
    let encoded: String = password
        .bytes()
        .map(|byte| format!("%{byte:02X}"))
        .collect();
    if let Ok(address) = parse(&format!("postgres://{user}:{encoded}@{rest}")) {
        assert_parts(&address);
        // A parameter may give another one.
        let given = address.config.get_password();
        assert!(rest.contains('?') || given == Some(password.as_bytes()));
    }
});

fn parse(url: &str) -> Result<Address, String> {
    Address::parse(url, None, Duration::from_secs(5)).map_err(|error| error.to_string())
}

/// Demands that each of its hosts can be asked alone, with all else as it was.
fn assert_parts(address: &Address) {
    assert!(address.hosts() > 0);
    for host in 0..address.hosts() {
        let one = address.at(host);
        assert_eq!(one.hosts(), 1);
        assert_eq!(one.config.get_password(), address.config.get_password());
        assert_eq!(one.config.get_user(), address.config.get_user());
        assert_eq!(one.config.get_dbname(), address.config.get_dbname());
        assert!(address.servers().contains(&one.servers()));
    }
}
