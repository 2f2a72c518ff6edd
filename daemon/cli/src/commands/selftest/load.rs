//! Producers: one for each host enqueues there whenever it takes writes, and notes what was acknowledged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tenure_store::session::{Session, Target};
use tenure_verdict::switches::Enqueue;
use tenure_verdict::uptime;
use tokio::task::JoinSet;

use super::notes::Notes;

/// Between two enqueues, for one daemon: at least, and at most that much more, in milliseconds. A job takes half a second of one of its
/// four slots: half of what the daemons can do is asked of them.
const PAUSE: (u64, u64) = (150, 200);

/// What is enqueued, each as likely as the next: the number of ticks of a tenth of a second.
const MIX: [u32; 10] = [0, 0, 0, 2, 2, 2, 2, 5, 5, 20];

/// For each daemon, more than it can run at once, so that a fault finds jobs that nobody has started.
const BACKLOG: usize = 16;

/// Running producers.
pub(super) struct Load {
    wishes: Arc<Wishes>,
    producers: JoinSet<()>,
}

/// What the producers are asked for.
#[derive(Default)]
struct Wishes {
    over: AtomicBool,
    backlog: AtomicBool,
}

impl Load {
    /// Starts them on this runtime.
    pub(super) fn start(
        runtime: &tokio::runtime::Handle,
        target: &Target,
        notes: &Arc<Notes>,
        daemons: usize,
        random: &mut fastrand::Rng,
    ) -> Self {
        let wishes = Arc::<Wishes>::default();
        let mut producers = JoinSet::new();
        for host in 0..target.address.hosts() {
            let producer = Producer {
                target: Target {
                    address: target.address.at(host),
                    ..target.clone()
                },
                server: u16::try_from(host).unwrap_or(u16::MAX),
                notes: Arc::clone(notes),
                daemons,
                random: random.fork(),
                wishes: Arc::clone(&wishes),
            };
            producers.spawn_on(producer.run(), runtime);
        }
        Self { wishes, producers }
    }

    /// Whoever reaches the primary next puts in more than can run at once.
    pub(super) fn pile_up(&self) {
        self.wishes.backlog.store(true, Ordering::Relaxed);
    }

    /// Ends them; nothing is enqueued when this is over.
    pub(super) async fn stop(mut self) {
        self.wishes.over.store(true, Ordering::Relaxed);
        while self.producers.join_next().await.is_some() {}
    }
}

struct Producer {
    target: Target,
    server: u16,
    notes: Arc<Notes>,
    daemons: usize,
    random: fastrand::Rng,
    wishes: Arc<Wishes>,
}

impl Producer {
    async fn run(mut self) {
        let mut open: Option<Session> = None;
        while !self.wishes.over.load(Ordering::Relaxed) {
            let session = match open.take() {
                Some(session) => Some(session),
                // A standby, or one that is away: another producer finds the primary.
                None => Session::open(&self.target).await.ok().map(|(it, _)| it),
            };
            if let Some(session) = session
                && self.enqueue(&session).await
            {
                open = Some(session);
            }
            let pause = Duration::from_millis(PAUSE.0 + self.random.u64(..PAUSE.1));
            let daemons = u32::try_from(self.daemons).unwrap_or(u32::MAX);
            tokio::time::sleep(pause / daemons).await;
        }
    }

    async fn enqueue(&mut self, session: &Session) -> bool {
        let many = self.wishes.backlog.load(Ordering::Relaxed);
        let (ticks, count) = match many {
            true => (4, BACKLOG * self.daemons),
            false => (self.random.choice(MIX).unwrap_or_default(), 1),
        };
        let job_type = format!("selftest-{ticks}");
        let sql = format!(
            "SELECT id::text FROM %enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', '{job_type}', 'max_attempts', 1000)) \
             FROM generate_series(1, {count}))) AS made(id)"
        );
        let Ok(rows) = session.rows("enqueue", &sql, &[]).await else {
            return false;
        };
        if many {
            self.wishes.backlog.store(false, Ordering::Relaxed);
        }
        let at = uptime();
        for id in rows.iter().filter_map(|row| row.try_get("id").ok()) {
            self.notes.enqueued(Enqueue {
                id,
                job_type: job_type.clone(),
                at,
                server: self.server,
            });
        }
        true
    }
}
