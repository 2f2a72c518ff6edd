//! What the guard does and when, without a process in it.
//!
//! States of a group: trusted → told (TERM) → killed and forgotten. Invariant: a group that was told is killed after its
//! grace, whatever the daemon says later, except that it is over.

use std::collections::BTreeMap;

use super::Message;

/// What has to be done to a process group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Term(i32),
    Kill(i32),
}

/// The groups and the time until which they may live. Nothing is trusted before the daemon says so.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// With the time of its KILL, once it was told.
    groups: BTreeMap<i32, Option<u64>>,
    trust_until: u64,
    grace: u64,
    abandoned: bool,
}

impl Watch {
    /// Takes a word of the daemon.
    pub(super) fn hear(&mut self, message: Message) {
        match message {
            Message::Add(group) => drop(self.groups.entry(group).or_default()),
            Message::Remove(group) => drop(self.groups.remove(&group)),
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
        self.abandoned && self.groups.is_empty()
    }

    /// What has to be done at `now`.
    pub(super) fn due(&mut self, now: u64) -> Vec<Order> {
        let mut orders = Vec::new();
        let trusted = !self.abandoned && now < self.trust_until;
        for (group, kill_at) in &mut self.groups {
            if kill_at.is_none() && !trusted {
                orders.push(Order::Term(*group));
                *kill_at = Some(now.saturating_add(self.grace));
            }
            if kill_at.is_some_and(|at| at <= now) {
                orders.push(Order::Kill(*group));
            }
        }
        self.groups
            .retain(|_, kill_at| kill_at.is_none_or(|at| at > now));
        orders
    }

    /// All groups.
    pub(super) fn groups(&self) -> Vec<i32> {
        self.groups.keys().copied().collect()
    }

    /// Some group was told and not yet killed.
    pub(super) fn is_ending(&self) -> bool {
        self.groups.values().any(Option::is_some)
    }

    /// When there may be something to do if nothing is heard; `None` when there is nothing to guard.
    pub(super) fn wake_at(&self) -> Option<u64> {
        let at = |kill_at: &Option<u64>| kill_at.unwrap_or(self.trust_until);
        self.groups.values().map(at).min()
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
    fn trusted_groups_live_until_trust_ends() {
        let mut watch = watch(&[Message::Trust(1000), Message::Add(7)]);
        assert_eq!(watch.due(999), []);
        assert_eq!(watch.wake_at(), Some(1000));
        watch.hear(Message::Trust(2000));
        assert_eq!(watch.due(1000), []);
        assert_eq!(watch.due(2000), [Order::Term(7)]);
        assert_eq!((watch.is_ending(), watch.wake_at()), (true, Some(2100)));
        assert_eq!(watch.due(2099), []);
        assert_eq!(watch.due(2100), [Order::Kill(7)]);
        assert_eq!((watch.due(9999), watch.wake_at()), (vec![], None));
        assert!(!watch.is_over());
    }

    #[test]
    fn renewed_trust_is_for_the_groups_that_were_not_told() {
        let mut watch = watch(&[Message::Trust(1000), Message::Add(7)]);
        assert_eq!(watch.due(1000), [Order::Term(7)]);
        watch.hear(Message::Trust(5000));
        watch.hear(Message::Add(8));
        watch.hear(Message::Add(7));
        assert_eq!(watch.due(1100), [Order::Kill(7)]);
        assert_eq!(watch.due(4999), []);
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
