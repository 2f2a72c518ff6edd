//! What the fuzzer found worth keeping of handlers' output (see `fuzz/`), given to a real PostgreSQL.

use std::fs;

use tenure_embedded::{Options, Server, Sql};
use tenure_protocol::output::Capped;
use tenure_protocol::verdict::Ended;

#[test]
fn postgresql_takes_what_is_made_of_any_output() {
    let server = Server::start(Options::for_tests()).unwrap();
    let mut sql = server.sql("postgres").unwrap();
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/corpus/handler_output"
    );
    let mut results = 0;
    for file in fs::read_dir(folder).unwrap() {
        let input = fs::read(file.unwrap().path()).unwrap();
        // What comes before it is for the target.
        let Some(printed) = input.get(3..) else {
            continue;
        };
        let mut capped = Capped::new(1 << 20);
        capped.push(printed);
        let output = capped.finish();
        let ended = Ended::answered(&output);
        for text in [output.text(), ended.error].iter().flatten() {
            takes(&mut sql, text, "text");
        }
        if let Some(result) = &ended.result {
            takes(&mut sql, result, "jsonb");
            results += 1;
        }
        for job in &ended.directives.enqueue {
            takes(&mut sql, &job.to_json(), "jsonb");
            if let Some(time) = &job.run_at {
                takes(&mut sql, time, "timestamptz");
            }
        }
    }
    assert!(results > 10, "the corpus was not found");
}

fn takes(sql: &mut Sql, text: &str, kind: &str) {
    let quoted = text.replace('\'', "''");
    let taken = sql.run(&format!("SELECT '{quoted}'::{kind}"));
    assert!(taken.is_ok(), "{text:?} is no {kind}: {:?}", taken.err());
}
