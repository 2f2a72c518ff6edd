//! The journal in `state_dir`: any bytes there, and what a handler printed written to it.
#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use tenure_fuzz::collected;
use tenure_protocol::verdict::Ended;
use tenure_runtime::fuzzing::{found_twice, is_found};

thread_local! {
    static FOLDER: TempDir = TempDir::new().unwrap();
}

fuzz_target!(|data: &[u8]| {
    FOLDER.with(|folder| {
        let (folder, journal) = (folder.path(), folder.path().join("journal.ndjson"));
        fs::write(&journal, data).unwrap();
        let [found, again] = found_twice(folder).unwrap();
        assert_eq!(found, again);

        let ended = Ended::answered(&collected(1 << 20, [data].into_iter()));
        let printed = ended.result.clone().unwrap_or_default();
        // Whatever stood there before.
        assert!(is_found(folder, &printed, ended.clone()).unwrap());
        fs::write(&journal, data).unwrap();
        assert!(is_found(folder, &printed, ended).unwrap());
    });
});
