//! Six clients that do everything at once on the same jobs for some seconds. Afterwards everything is in its place, and nobody
//! has waited for another in a circle.

use std::collections::HashMap;
use std::sync::Mutex;
use std::thread;

use crate::support::{Conn, Held, Lab, Worker};

#[test]
fn storm() {
    let lab = Lab::start();
    let db = lab.db("storm");
    db.connect().run("SELECT lane_of('a'); SELECT lane_of('b')");
    // Completions by run, as their workers were answered: each job may end well once.
    let completed = Mutex::new(HashMap::<String, u32>::new());
    thread::scope(|scope| {
        for client in 0..6 {
            let (db, completed) = (&db, &completed);
            scope.spawn(move || {
                let mut client = Client {
                    c: db.connect(),
                    w: Worker::register(&mut db.connect()),
                    held: Vec::new(),
                    random: 7 * client + 1,
                };
                for _ in 0..220 {
                    client.act(completed);
                }
            });
        }
    });
    assert_eq!(lab.deadlocks(), Vec::<String>::new());
    db.sound();
    for (job, times) in completed.into_inner().unwrap() {
        assert_eq!(times, 1, "job {job}");
    }
    let mut c = db.connect();
    println!(
        "{:?}",
        c.list("SELECT status, count(*) FROM jobs GROUP BY 1 ORDER BY 1")
    );
}

struct Client {
    c: Conn,
    w: Worker,
    held: Vec<Held>,
    random: u64,
}

impl Client {
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % bound
    }

    fn act(&mut self, completed: &Mutex<HashMap<String, u32>>) {
        match self.below(12) {
            0 | 1 => {
                let jobs: Vec<String> = (0..10)
                    .map(|_| {
                        let key = match self.below(3) {
                            0 => format!(r#","unique_key":"{}""#, self.below(12)),
                            _ => String::new(),
                        };
                        let job_type = ["a", "b"][usize::from(self.below(2) == 0)];
                        format!(
                            r#"{{"job_type":"{job_type}","priority":{}{key}}}"#,
                            self.below(2)
                        )
                    })
                    .collect();
                self.c
                    .run(&format!("SELECT enqueue_many('[{}]')", jobs.join(",")));
            }
            2..=4 => match self.w.try_claim(&mut self.c, "_", 5) {
                Ok(held) => self.held.extend(held),
                Err(refusal) => self.anew(&refusal.code),
            },
            5..=7 => self.end(completed),
            8 => {
                // Persons, on whatever is there.
                let act =
                    ["cancel(id)", "move_to_dead_letter(id)"][usize::from(self.below(2) == 0)];
                self.c.run(&format!(
                    "SELECT {act} FROM (SELECT id FROM jobs ORDER BY random() LIMIT 2) j"
                ));
                for act in ["retry(id)", "complete_manually(id, 'ann')"] {
                    let _ = self.c.try_list(&format!("SELECT {act} FROM (SELECT id FROM jobs WHERE status IN ('failed', 'cancelled') ORDER BY random() LIMIT 1) j"));
                }
            }
            9 => {
                self.c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s' WHERE swept_at < clock_timestamp() - interval '0.1 s'");
                self.c.run(&format!("SELECT sweep('{}')", self.w.epoch));
            }
            10 => {
                let open: Vec<i64> = self.held.iter().map(|held| held.call).collect();
                if let Err(refusal) = self.w.beat(&mut self.c, &open) {
                    self.anew(&refusal.code);
                }
            }
            _ => {
                if self.below(4) == 0 {
                    self.c.run(&format!(
                        "SELECT deregister_worker('{}', '{}')",
                        self.w.id, self.w.epoch
                    ));
                }
            }
        }
    }

    /// Ends what it holds, some of it twice in one call, until nothing is busy.
    fn end(&mut self, completed: &Mutex<HashMap<String, u32>>) {
        let kinds = ["completed", "completed", "failed", "released", "snoozed"];
        let mut said: Vec<(Held, &str)> = Vec::new();
        for held in std::mem::take(&mut self.held) {
            let kind = kinds[usize::try_from(self.below(5)).unwrap()];
            said.push((held, kind));
        }
        while !said.is_empty() {
            let items: Vec<String> = said
                .iter()
                .map(|(held, kind)| held.item(kind, r#","enqueue":[{"job_type":"a"}]"#))
                .collect();
            let answers = self.c.list(&self.w.finish_sql(&items));
            assert_eq!(answers.len(), said.len());
            let mut busy = Vec::new();
            for (one, answer) in said.into_iter().zip(answers) {
                match answer.as_str() {
                    "busy" => busy.push(one),
                    "done completed" if one.1 == "completed" => {
                        *completed.lock().unwrap().entry(one.0.job).or_default() += 1;
                    }
                    _ => {}
                }
            }
            said = busy;
        }
    }

    /// It was declared dead: a new one begins, with nothing.
    fn anew(&mut self, code: &str) {
        assert_eq!(code, "TN004");
        self.held.clear();
        self.w = Worker::register(&mut self.c);
    }
}
