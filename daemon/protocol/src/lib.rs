//! The messages between tenure and its handlers, as pure functions over bytes.
//!
//! [`envelope`] is what a handler gets, [`output`] and [`result`] are what is made of its answer, [`directives`] what an
//! answer may ask for, [`lines`] what a process and its daemon say to each other, [`verdict`] what an attempt's end means for its job, and [`webhook`] how a receiver knows that a
//! request is ours. Nothing here reads a clock, a file or a socket: time and bytes come in as arguments.

pub mod directives;
pub mod envelope;
mod json;
pub mod lines;
pub mod output;
pub mod result;
pub mod verdict;
pub mod webhook;
