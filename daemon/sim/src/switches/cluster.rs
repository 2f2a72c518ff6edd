//! Three servers: a primary, and standbys whose state is a prefix of its commits.
//!
//! The commits of a *term* are all states that one primary has gone through, with those of its ancestors up to the fork. So a
//! standby is a term and a position in it, and what a promotion loses is what lies behind the position of who is promoted.

use std::rc::Rc;

use tenure_core::ids::{Beat, WorkerId};
use tenure_core::model::{Database, NewJob};
use tenure_core::primary::{Facts, Sight};

/// How many.
pub(crate) const SERVERS: usize = 3;
/// The model counts its names up; so many lie between the names of two terms, since real ones are random.
const NAMES_IN_A_TERM: usize = 500;

#[derive(Debug)]
struct Commit {
    at: u64,
    state: Rc<Database>,
}

#[derive(Debug)]
struct Term {
    timeline: i32,
    /// The term and position that it went on from.
    parent: Option<(usize, usize)>,
    commits: Vec<Commit>,
}

/// One server.
#[derive(Debug)]
pub(crate) struct Server {
    /// What it goes on from; `None`: it is a standby.
    primary: Option<Database>,
    /// It is not there: connections are refused.
    pub(crate) down: bool,
    /// Until then it answers nobody, and what is said to it is carried out afterwards.
    pub(crate) frozen_until: u64,
    /// Replication reaches it.
    pub(crate) linked: bool,
    /// How late commits reach it.
    pub(crate) lag: u64,
    /// Its clock minus the simulation's.
    pub(crate) clock: i64,
    started: i64,
    /// Since when it has been working as what it is.
    pub(crate) since: u64,
    upstream: Option<usize>,
    term: usize,
    position: usize,
}

/// All servers and their history.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// By host.
    pub(crate) servers: Vec<Server>,
    /// The one that was promoted last: the primary, whoever else believes to be one.
    pub(crate) latest: usize,
    /// Timelines have numbers that no other has.
    archive: bool,
    terms: Vec<Term>,
    names: Database,
}

impl Cluster {
    /// The first is the primary. `clocks`: theirs minus the simulation's.
    pub(crate) fn new(clocks: [i64; SERVERS], archive: bool) -> Self {
        let database = Database::new(clocks[0]);
        let first = Commit {
            at: 0,
            state: Rc::new(database.clone()),
        };
        let server = |clock| Server {
            primary: None,
            down: false,
            frozen_until: 0,
            linked: true,
            lag: 20,
            clock,
            started: clock,
            since: 0,
            upstream: Some(0),
            term: 0,
            position: 0,
        };
        let mut servers: Vec<Server> = clocks.into_iter().map(server).collect();
        servers[0].primary = Some(database);
        Self {
            servers,
            latest: 0,
            archive,
            terms: vec![Term {
                timeline: 1,
                parent: None,
                commits: vec![first],
            }],
            names: Database::new(0),
        }
    }

    /// It takes statements, writing ones if it is a primary.
    pub(crate) fn runs(&self, host: usize, now: u64) -> bool {
        !self.servers[host].down && self.servers[host].frozen_until <= now
    }

    /// It takes writes.
    pub(crate) fn writable(&self, host: usize, now: u64) -> bool {
        self.runs(host, now) && self.is_primary(host)
    }

    /// It is no standby.
    pub(crate) fn is_primary(&self, host: usize) -> bool {
        self.servers[host].primary.is_some()
    }

    /// The server's time.
    pub(crate) fn time(&self, host: usize, now: u64) -> i64 {
        i64::try_from(now).unwrap_or(i64::MAX) + self.servers[host].clock
    }

    /// What a primary works on.
    pub(crate) fn primary(&mut self, host: usize) -> Option<&mut Database> {
        self.servers[host].primary.as_mut()
    }

    /// What it shows, as far as it has come.
    pub(crate) fn shows(&self, host: usize) -> &Database {
        let server = &self.servers[host];
        match &server.primary {
            Some(database) => database,
            None => &self.terms[server.term].commits[server.position].state,
        }
    }

    /// A statement has changed something.
    pub(crate) fn commit(&mut self, host: usize, now: u64) {
        let server = &mut self.servers[host];
        if let Some(database) = &server.primary {
            let state = Rc::new(database.clone());
            let commits = &mut self.terms[server.term].commits;
            commits.push(Commit { at: now, state });
            server.position = commits.len() - 1;
        }
    }

    /// Lets all standbys have what has reached them by now. To be called before anything of servers changes, and before looking.
    pub(crate) fn catch_up(&mut self, now: u64) {
        for host in 0..SERVERS {
            let server = &self.servers[host];
            let Some(upstream) = server.upstream.filter(|_| server.primary.is_none()) else {
                continue;
            };
            let flows = server.linked && self.runs(host, now) && self.writable(upstream, now);
            if flows && self.follows(host, upstream) {
                let term = self.servers[upstream].term;
                let commits = &self.terms[term].commits;
                let lag = self.servers[host].lag;
                let come = commits.partition_point(|commit| commit.at + lag <= now);
                let server = &mut self.servers[host];
                server.term = term;
                server.position = server.position.max(come.saturating_sub(1));
            }
        }
    }

    /// Whether all that it has is also in the history of the other.
    pub(crate) fn follows(&self, host: usize, upstream: usize) -> bool {
        let server = &self.servers[host];
        let mut term = self.servers[upstream].term;
        let mut shared = usize::MAX;
        while term != server.term {
            let Some((parent, position)) = self.terms[term].parent else {
                return false;
            };
            (term, shared) = (parent, shared.min(position));
        }
        server.position <= shared
    }

    /// A standby becomes a primary. Answers with the number of commits of the last one that it lacks.
    pub(crate) fn promote(&mut self, host: usize, now: u64) -> usize {
        self.catch_up(now);
        let last = &self.servers[self.latest];
        let had = self.terms[last.term].commits.len();
        let server = &self.servers[host];
        let (term, position) = (server.term, server.position);
        let parent = &self.terms[term];
        let mut commits: Vec<Commit> = parent.commits[..=position]
            .iter()
            .map(|commit| Commit {
                at: commit.at,
                state: Rc::clone(&commit.state),
            })
            .collect();
        // Without an archive a server does not know of timelines that it never followed, and may take the number of one. It never
        // takes a lower one here: a primary with such a one would be taken for an old one for ever.
        let highest = self.terms.iter().map(|term| term.timeline).max();
        let highest = highest.unwrap_or(0);
        let timeline = if self.archive {
            highest + 1
        } else {
            highest.max(parent.timeline + 1)
        };
        self.draw_names();
        let mut database = self.names.clone();
        database.fall_back_to(&commits[position].state);
        commits.push(Commit {
            at: now,
            state: Rc::new(database.clone()),
        });
        self.terms.push(Term {
            timeline,
            parent: Some((term, position)),
            commits,
        });
        let server = &mut self.servers[host];
        server.primary = Some(database);
        server.since = now;
        server.term = self.terms.len() - 1;
        server.position += 1;
        server.upstream = None;
        self.latest = host;
        had.saturating_sub(position + 1)
    }

    /// Names of one term are never those of another.
    fn draw_names(&mut self) {
        let drawn = NewJob {
            id: None,
            job_type: "name".into(),
            tenant: String::new(),
            priority: 0,
            run_at: None,
            unique_key: Some("one".into()),
            max_attempts: None,
            watermark: None,
        };
        let drawn = vec![drawn; NAMES_IN_A_TERM];
        let _ = self.names.enqueue(0, &drawn);
    }

    /// A primary comes up after a crash, perhaps without its last commits: those that no standby has.
    pub(crate) fn recover_from_crash(&mut self, host: usize, now: u64, lacks: usize) -> usize {
        self.catch_up(now);
        let term = self.servers[host].term;
        let shared = (0..SERVERS)
            .filter(|other| *other != host && self.follows(*other, host))
            .map(|other| self.servers[other].position)
            .chain(self.terms[term].parent.map(|(_, fork)| fork + 1))
            .max()
            .unwrap_or(0);
        let commits = &mut self.terms[term].commits;
        let last = commits.len() - 1;
        let kept = shared.max(last.saturating_sub(lacks));
        commits.truncate(kept + 1);
        let earlier = Rc::clone(&commits[kept].state);
        let server = &mut self.servers[host];
        if let Some(database) = &mut server.primary {
            database.fall_back_to(&earlier);
        }
        self.restarted(host, now);
        self.commit(host, now);
        last - kept
    }

    /// It is up again.
    pub(crate) fn restarted(&mut self, host: usize, now: u64) {
        self.servers[host].started = self.time(host, now);
        self.servers[host].down = false;
        self.servers[host].frozen_until = 0;
        self.servers[host].since = now;
    }

    /// A standby is told to follow another server; it can if that has all that it has.
    pub(crate) fn follow(&mut self, host: usize, upstream: usize, now: u64) {
        self.catch_up(now);
        self.servers[host].upstream = Some(upstream);
    }

    /// Whether it could go on where the present primary has stopped.
    pub(crate) fn could_succeed(&self, host: usize, now: u64) -> bool {
        host != self.latest
            && !self.is_primary(host)
            && self.runs(host, now)
            && self.follows(host, self.latest)
    }

    /// It gets all that the present primary has before that one hands over.
    pub(crate) fn complete(&mut self, host: usize, now: u64) {
        self.catch_up(now);
        let (term, position) = (
            self.servers[self.latest].term,
            self.servers[self.latest].position,
        );
        let server = &mut self.servers[host];
        (server.term, server.position) = (term, position);
    }

    /// It answers nobody until then.
    pub(crate) fn freeze(&mut self, host: usize, now: u64, until: u64) {
        self.catch_up(now);
        self.servers[host].frozen_until = until;
        self.servers[host].since = until;
    }

    /// It becomes a standby of the present primary, made anew from it.
    pub(crate) fn rebuild(&mut self, host: usize, now: u64) {
        self.catch_up(now);
        let (term, position) = (
            self.servers[self.latest].term,
            self.servers[self.latest].position,
        );
        let latest = self.latest;
        self.restarted(host, now);
        let server = &mut self.servers[host];
        server.primary = None;
        server.upstream = Some(latest);
        (server.term, server.position) = (term, position);
    }

    /// What a probe of it finds.
    pub(crate) fn sight(&mut self, host: usize, now: u64, worker: Option<WorkerId>) -> Sight {
        self.catch_up(now);
        if !self.runs(host, now) {
            return Sight::Away;
        }
        let server = &self.servers[host];
        let shown = self.shows(host);
        let primary = server.primary.is_some();
        let beat = worker.and_then(|worker| shown.workers.get(&worker));
        let facts = Facts {
            system: Some(1),
            timeline: primary.then(|| self.terms[server.term].timeline),
            started: Some(server.started),
            beat: beat.map(|worker| Beat(worker.beat)),
            swept_at: Some(shown.swept_at),
            // What is received is replayed at once here.
            received: Some(shown.swept_at),
            epoch_no: shown.epoch_no,
            instead_of: None,
            installation: None,
        };
        if primary {
            Sight::Primary(facts)
        } else {
            Sight::Standby(facts)
        }
    }
}
