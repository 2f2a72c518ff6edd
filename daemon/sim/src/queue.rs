//! Events in the order of their times; those of one time in the order in which they were put in.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What is to happen.
#[derive(Debug)]
pub(crate) struct Queue<E> {
    order: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<E>>,
    free: Vec<usize>,
    sequence: u64,
}

impl<E> Queue<E> {
    pub(crate) fn new() -> Self {
        Self {
            order: BinaryHeap::new(),
            events: Vec::new(),
            free: Vec::new(),
            sequence: 0,
        }
    }

    pub(crate) fn at(&mut self, time: u64, event: E) {
        let slot = self.free.pop().unwrap_or(self.events.len());
        if slot == self.events.len() {
            self.events.push(Some(event));
        } else {
            self.events[slot] = Some(event);
        }
        self.sequence += 1;
        self.order.push(Reverse((time, self.sequence, slot)));
    }

    /// The next event and its time.
    pub(crate) fn next(&mut self) -> Option<(u64, E)> {
        let Reverse((time, _, slot)) = self.order.pop()?;
        self.free.push(slot);
        Some((time, self.events[slot].take()?))
    }
}
