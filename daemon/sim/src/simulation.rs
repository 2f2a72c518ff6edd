//! The order of events, the troubles, and the verdict.

use crate::database::Database;
use crate::machine::Machine;
use crate::network::{Event, Network, Trouble};
use crate::random::Random;
use crate::world::{Report, Violation, World};
use tenure_core::ids::JobId;

const MACHINES: usize = 3;
const JOBS: usize = 8;
/// Until then there is trouble.
const PEACE_AT: u64 = 120_000;
/// Until then every job has to have ended.
const END: u64 = 480_000;
/// Two settings of the server's clock are further apart than a lease, as the margin allows for one.
const BETWEEN_CLOCK_SETTINGS: u64 = 35_000;

/// Plays one world from one seed. The same seed gives the same report.
#[must_use]
pub fn run(seed: u64, world: World) -> Report {
    let mut simulation = Simulation::new(seed, world);
    simulation.plan();
    simulation.play();
    simulation.report
}

#[derive(Debug)]
struct Simulation {
    world: World,
    net: Network,
    machines: Vec<Machine>,
    database: Database,
    /// The server's clock minus the simulation's.
    clock_offset: i64,
    server_thaws: u64,
    report: Report,
}

impl Simulation {
    fn new(seed: u64, world: World) -> Self {
        Self {
            world,
            net: Network::new(Random::new(seed), PEACE_AT),
            machines: (0..MACHINES)
                .map(|index| Machine::new(index, world))
                .collect(),
            database: Database::new(i64::try_from(world.ttl.as_millis()).unwrap_or(i64::MAX)),
            clock_offset: 0,
            server_thaws: 0,
            report: Report::default(),
        }
    }

    /// Decides in advance what goes wrong when. Each seed has some of the world's troubles, so that none hides another.
    fn plan(&mut self) {
        let net = &mut self.net;
        for job in 0..JOBS {
            let enqueued = net.random.within(0..60_000);
            net.at(enqueued, Event::Enqueue);
            if net.random.chance(10) {
                let cancelled = net.random.within(enqueued..PEACE_AT);
                net.at(cancelled, Event::Cancel { job });
            }
        }
        for machine in 0..MACHINES {
            let start = net.random.within(0..3_000);
            net.at(start, Event::Restart { machine });
            let cuts = (0..2).map(|_| net.some_time(40_000)).collect();
            net.partitions.push(cuts);
            if self.world.frozen_daemons && net.random.chance(40) {
                let span = net.some_time(60_000);
                net.at(
                    span.start,
                    Event::Trouble(Trouble::FreezeDaemon {
                        machine,
                        until: span.end,
                    }),
                );
            }
            if self.world.frozen_machines && net.random.chance(60) {
                let span = net.some_time(60_000);
                let clock_runs = net.random.chance(50);
                let freeze = Trouble::FreezeMachine {
                    machine,
                    until: span.end,
                    clock_runs,
                };
                net.at(span.start, Event::Trouble(freeze));
            }
            if self.world.crashes && net.random.chance(30) {
                let crash = net.random.within(5_000..PEACE_AT);
                net.at(crash, Event::Trouble(Trouble::Crash { machine }));
            }
        }
        if self.world.server_troubles && net.random.chance(30) {
            let span = net.some_time(40_000);
            net.at(
                span.start,
                Event::Trouble(Trouble::FreezeServer { until: span.end }),
            );
        }
        if self.world.server_troubles && net.random.chance(60) {
            let mut time = net.random.within(0..BETWEEN_CLOCK_SETTINGS);
            while time < PEACE_AT {
                let most = if net.random.chance(80) { 3_000 } else { 60_000 };
                let by = net.random.within(0..most);
                let by = i64::try_from(by).unwrap_or_default();
                let by = if net.random.chance(70) { by } else { -by };
                net.at(time, Event::Trouble(Trouble::SetClock { by }));
                time += BETWEEN_CLOCK_SETTINGS + net.random.within(0..20_000);
            }
        }
    }

    fn play(&mut self) {
        while let Some(event) = self.net.next(END) {
            self.happen(event);
            self.judge();
            if self.net.now > PEACE_AT && self.database.all_ended() {
                break;
            }
        }
        if !self.database.all_ended() {
            self.report.violations.push(Violation::Unfinished);
        }
        self.report.counts = self.database.counts;
        self.report.distrusted = self.machines.iter().map(|machine| machine.distrusted).sum();
    }

    fn happen(&mut self, event: Event) {
        let now = self.net.now;
        match event {
            Event::Arrives { .. } if now < self.server_thaws => {
                let thaw = self.server_thaws + self.net.random.within(0..20);
                self.net.at(thaw, event);
            }
            Event::Arrives {
                machine,
                incarnation,
                ticket,
                statement,
                answer_after,
            } => {
                let server_now = i64::try_from(now).unwrap_or(i64::MAX) + self.clock_offset;
                let busy = now < PEACE_AT && self.net.random.chance(10);
                let answer = self.database.execute(server_now, &statement, busy);
                if let Some(after) = answer_after {
                    self.net.answer(machine, incarnation, after, ticket, answer);
                }
            }
            Event::Process {
                machine,
                incarnation,
                notice,
            } => {
                let (net, daemon) = (&mut self.net, &mut self.machines[machine]);
                let thaw = daemon.daemon_thaws.max(daemon.machine_thaws);
                // What was meant for a daemon that has crashed reaches nobody.
                if incarnation == daemon.incarnation && daemon.running {
                    if now < thaw {
                        net.at(
                            thaw,
                            Event::Process {
                                machine,
                                incarnation,
                                notice,
                            },
                        );
                    } else {
                        daemon.notices(net, notice);
                    }
                }
            }
            Event::Machine { machine, happening } => {
                let (net, body) = (&mut self.net, &mut self.machines[machine]);
                if now < body.machine_thaws {
                    let thaw = body.machine_thaws + net.random.within(0..3_000);
                    net.at(thaw, event);
                } else {
                    body.happens(net, happening);
                }
            }
            Event::Restart { machine } => {
                let (net, body) = (&mut self.net, &mut self.machines[machine]);
                if now < body.machine_thaws {
                    net.at(body.machine_thaws, event);
                } else {
                    body.start(net);
                }
            }
            Event::Trouble(trouble) => self.trouble(trouble),
            Event::Enqueue => self.database.enqueue(),
            Event::Cancel { job } => self.database.cancel(job),
        }
    }

    fn trouble(&mut self, trouble: Trouble) {
        let now = self.net.now;
        match trouble {
            Trouble::FreezeDaemon { machine, until } => self.machines[machine].daemon_thaws = until,
            Trouble::FreezeMachine {
                machine,
                until,
                clock_runs,
            } => {
                let body = &mut self.machines[machine];
                body.machine_thaws = until;
                body.clock_behind += if clock_runs { 0 } else { until - now };
            }
            Trouble::Crash { machine } => {
                let body = &mut self.machines[machine];
                if body.running && now >= body.machine_thaws {
                    body.crash(&mut self.net);
                    let restart = now + self.net.random.within(100..20_000);
                    self.net.at(restart, Event::Restart { machine });
                }
            }
            Trouble::FreezeServer { until } => self.server_thaws = until,
            Trouble::SetClock { by } => self.clock_offset += by,
        }
    }

    /// Looks at what must never be.
    fn judge(&mut self) {
        let at = self.net.now;
        let lenient = self.world.frozen_machines;
        for (job, token) in std::mem::take(&mut self.net.starts) {
            self.report.started += 1;
            if self.lives_twice(job) {
                self.report.doubles += 1;
                if !lenient {
                    self.report.violations.push(Violation::TwoHandlers { at });
                }
            }
            if !lenient && !self.database.holds(job, token) {
                self.report.violations.push(Violation::NoLease { at });
            }
        }
        if std::mem::take(&mut self.database.completed_twice) {
            self.report
                .violations
                .push(Violation::CompletedTwice { at });
        }
    }

    fn lives_twice(&self, job: JobId) -> bool {
        self.net.living.get(&job).is_some_and(|living| *living > 1)
    }
}

impl Network {
    /// A span of at most `longest`, often nearly that, that ends before the peace.
    fn some_time(&mut self, longest: u64) -> std::ops::Range<u64> {
        let start = self.random.within(0..PEACE_AT - 1_000);
        let shortest = if self.random.chance(50) {
            longest * 3 / 4
        } else {
            500
        };
        let end = start + self.random.within(shortest..longest);
        start..end.min(PEACE_AT)
    }
}
