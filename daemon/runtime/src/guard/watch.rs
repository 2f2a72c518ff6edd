//! What the guard does and when, without a process in it.
//!
//! States of a supervisor: trusted → told (TERM) → told to kill, again and again → gone. Invariant: one that was told is told to
//! kill after its grace, whatever the daemon says later, except that it is over.

use std::collections::BTreeMap;

use super::Message;

/// How long a supervisor is waited for that was told to kill, in milliseconds. What is not gone by then hangs in the kernel, from
/// where it returns only to die.
const LET_GO: u64 = 10_000;

/// What a supervisor has to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Term(i32),
    Kill(i32),
}

/// The supervisors and the time until which their handlers may live. Nothing is trusted before the daemon says so.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// With the time of its KILL, once it was told.
    supervisors: BTreeMap<i32, Option<u64>>,
    trust_until: u64,
    grace: u64,
    abandoned: bool,
}

impl Watch {
    /// Takes a word of the daemon.
    pub(super) fn hear(&mut self, message: Message) {
        match message {
            Message::Add(pid) => drop(self.supervisors.entry(pid).or_default()),
            Message::Remove(pid) => drop(self.supervisors.remove(&pid)),
            Message::Trust(until) => self.trust_until = until,
            Message::Grace(grace) => self.grace = grace,
        }
    }

    /// The daemon is gone: nobody may live any more.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// Nobody is left, and nobody will come.
    pub(super) fn is_over(&self) -> bool {
        self.abandoned && self.supervisors.is_empty()
    }

    /// What has to be done at `now`.
    pub(super) fn due(&mut self, now: u64) -> Vec<Order> {
        let mut orders = Vec::new();
        let trusted = !self.abandoned && now < self.trust_until;
        for (pid, kill_at) in &mut self.supervisors {
            if kill_at.is_none() && !trusted {
                orders.push(Order::Term(*pid));
                *kill_at = Some(now.saturating_add(self.grace));
            }
            if kill_at.is_some_and(|at| at <= now) {
                orders.push(Order::Kill(*pid));
            }
        }
        self.supervisors
            .retain(|_, kill_at| kill_at.is_none_or(|at| now < at.saturating_add(LET_GO)));
        orders
    }

    /// All that are not known to be gone.
    pub(super) fn supervisors(&self) -> Vec<i32> {
        self.supervisors.keys().copied().collect()
    }

    /// Some were told and are not gone.
    pub(super) fn is_ending(&self) -> bool {
        self.supervisors.values().any(Option::is_some)
    }

    /// When there may be something to do if nothing is heard; `None` when there is nothing to guard.
    pub(super) fn wake_at(&self) -> Option<u64> {
        let at = |kill_at: &Option<u64>| kill_at.unwrap_or(self.trust_until);
        self.supervisors.values().map(at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(messages: &[Message]) -> Watch {
        let mut watch = Watch::default();
        watch.hear(Message::Grace(100));
        messages.iter().for_each(|m| watch.hear(*m));
        watch
    }

    #[test]
    fn trusted_handlers_live_until_trust_ends() {
        let mut watch = watch(&[Message::Trust(1000), Message::Add(7)]);
        assert_eq!(watch.due(999), []);
        assert_eq!(watch.wake_at(), Some(1000));
        watch.hear(Message::Trust(2000));
        assert_eq!(watch.due(1000), []);
        assert_eq!(watch.due(2000), [Order::Term(7)]);
        assert_eq!((watch.is_ending(), watch.wake_at()), (true, Some(2100)));
        assert_eq!(watch.due(2099), []);
        assert_eq!(watch.due(2100), [Order::Kill(7)]);
        assert_eq!(watch.due(2150), [Order::Kill(7)]);
        watch.hear(Message::Remove(7));
        assert_eq!((watch.due(9999), watch.wake_at()), (vec![], None));
        assert!(!watch.is_over());
    }

    #[test]
    fn renewed_trust_is_for_those_that_were_not_told() {
        let mut watch = watch(&[Message::Trust(1000), Message::Add(7)]);
        assert_eq!(watch.due(1000), [Order::Term(7)]);
        watch.hear(Message::Trust(5000));
        watch.hear(Message::Add(8));
        watch.hear(Message::Add(7));
        assert_eq!(watch.due(1100), [Order::Kill(7)]);
        assert_eq!(watch.due(1100 + LET_GO), [Order::Kill(7), Order::Term(8)]);
        assert_eq!(watch.supervisors(), [8]);
    }

    #[test]
    fn an_abandoned_guard_ends_all_and_is_over() {
        let mut watch = watch(&[
            Message::Trust(1000),
            Message::Add(7),
            Message::Add(8),
            Message::Remove(8),
        ]);
        watch.abandon();
        assert_eq!(watch.due(0), [Order::Term(7)]);
        watch.hear(Message::Remove(7));
        assert!(watch.is_over());
    }

    #[test]
    fn nothing_is_trusted_before_the_first_word_and_no_grace_is_none() {
        let mut watch = Watch::default();
        watch.hear(Message::Add(7));
        assert_eq!(watch.due(1), [Order::Term(7), Order::Kill(7)]);
    }
}
