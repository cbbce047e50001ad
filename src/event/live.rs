//! The shared state of a live run, and how a reader's position moves over it.
//!
//! All readers see one order: an event's number, then the text written since, then the next event. Those who keep
//! up take the same rendered frames out of `recent`; the others are brought to that point from the tail of durable
//! frames, from the log, and from the text of the open message.

use std::collections::VecDeque;

use bytes::Bytes;

use super::bus::{Activity, ExecutingCall};
use super::cursor::{Cursor, Within};
use super::frame::{self, Channel, MessageName};
use super::message::{MAX_MESSAGE_BYTES, OpenMessage, Place, Pushed, Rest};
use crate::domain::{Delta, Event, EventKind, Run, RunId, Seq, Timestamp};

/// Most durable frames kept for readers.
pub(super) const MAX_TAIL_EVENTS: usize = 256;
/// Most bytes of durable frames kept for readers.
pub(super) const MAX_TAIL_BYTES: usize = 256 * 1024;
/// Most bytes of live-only frames kept for readers.
pub(super) const MAX_DELTA_BYTES: usize = 64 * 1024;

/// What a run is doing.
#[derive(Debug)]
enum Doing {
    Idle,
    Writing(Box<OpenMessage>),
    Executing(Vec<ExecutingCall>),
    Ended,
}

/// What is known of the run's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrivenBy {
    /// None in this process, or one that let go.
    Nobody,
    /// One that has published all it committed.
    Published,
    /// One that is committing: the store may be ahead.
    Committing,
}

/// A rendered durable event.
#[derive(Clone, Debug)]
struct DurableFrame {
    seq: Seq,
    last: bool,
    frame: Bytes,
}

/// One frame as readers that keep up get it.
#[derive(Debug)]
enum RecentFrame {
    Durable(DurableFrame),
    /// A piece of a message; it takes a reader from one place to the other.
    Delta {
        epoch: u64,
        from: Place,
        to: Place,
        frame: Bytes,
    },
    /// A frame without id.
    Passing(Bytes),
}

/// How far a reader has come.
#[derive(Clone, Debug)]
pub(super) struct Position {
    /// The last durable event it was given.
    seq: Seq,
    /// The message it has a part of, by epoch; 0 is none.
    epoch: u64,
    place: Place,
    /// The next recent frame, once it has caught up.
    recent: Option<u64>,
}

impl Position {
    pub(super) const fn seq(&self) -> Seq {
        self.seq
    }

    /// The reader was given an event from the log, which may not be published yet.
    pub(super) fn read(&mut self, seq: Seq) {
        (self.seq, self.recent) = (seq, None);
    }
}

/// What a reader gets next.
#[derive(Debug)]
pub(super) enum Taken {
    /// A frame; `last` is the end of the stream.
    Frame { frame: Bytes, last: bool },
    /// What it missed of the open message.
    Rest(VecDeque<Rest>),
    /// It has to read the log after its position, up to this event.
    Replay { through: Seq },
    /// It has everything.
    CaughtUp,
    /// No driver has published yet: the log is all there is.
    Unpublished,
}

/// How a subscription starts.
#[derive(Debug)]
pub(super) enum Joined {
    /// With this first frame, from this position.
    At(Position, Result<Bytes, String>),
    /// The run has ended and the cursor is at its end.
    Past,
    /// The cursor is beyond what there is.
    BeyondEnd {
        /// The newest event.
        last_seq: Seq,
    },
    /// The log is ahead of what has been published.
    Behind,
}

/// What a live run is, as of one moment.
#[derive(Debug)]
pub(super) struct State {
    id: RunId,
    /// `None` until a driver has published.
    run: Option<Run>,
    driven_by: DrivenBy,
    /// When somebody asked for the end of the run, if that was said here.
    end_asked_at: Option<Timestamp>,
    doing: Doing,
    last_seq: Seq,
    epochs: u64,
    tail: VecDeque<DurableFrame>,
    tail_bytes: usize,
    recent: VecDeque<RecentFrame>,
    /// The index of the oldest recent frame.
    recent_start: u64,
    recent_durable_bytes: usize,
    recent_delta_bytes: usize,
}

impl State {
    pub(super) fn new(id: RunId) -> Self {
        Self {
            id,
            run: None,
            driven_by: DrivenBy::Nobody,
            end_asked_at: None,
            doing: Doing::Idle,
            last_seq: 0,
            epochs: 0,
            tail: VecDeque::new(),
            tail_bytes: 0,
            recent: VecDeque::new(),
            recent_start: 0,
            recent_durable_bytes: 0,
            recent_delta_bytes: 0,
        }
    }

    pub(super) fn run(&self) -> Option<&Run> {
        self.run.as_ref()
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.doing, Doing::Ended)
    }

    pub(super) fn cancel_requested(&mut self, at: Timestamp) {
        self.end_asked_at.get_or_insert(at);
    }

    /// The driver hands a step to the store.
    pub(super) fn committing(&mut self) {
        self.driven_by = DrivenBy::Committing;
    }

    /// The driver is gone without having ended the run.
    pub(super) fn let_go(&mut self) {
        self.driven_by = DrivenBy::Nobody;
    }

    pub(super) fn is_driven(&self) -> bool {
        match self.driven_by {
            DrivenBy::Nobody => false,
            DrivenBy::Published | DrivenBy::Committing => self.run.is_some() && !self.has_ended(),
        }
    }

    /// The run, when it is driven here and the store knows nothing of it that is not known here.
    pub(super) fn driven_run(&self) -> Option<&Run> {
        match self.driven_by {
            DrivenBy::Published => self.run.as_ref().filter(|_| !self.has_ended()),
            DrivenBy::Nobody | DrivenBy::Committing => None,
        }
    }

    fn open(&self) -> Option<&OpenMessage> {
        match &self.doing {
            Doing::Writing(open) => Some(open),
            Doing::Idle | Doing::Executing(_) | Doing::Ended => None,
        }
    }

    /// Applies a commit. `watched` says whether anybody can be reading the recent frames.
    pub(super) fn publish(&mut self, events: &[Event], run: &Run, activity: Activity, watched: bool) {
        let published = self.last_seq;
        for event in events.iter().filter(|event| event.seq > published) {
            let last = event.body.kind == EventKind::RunEnd;
            let durable = DurableFrame { seq: event.seq, last, frame: frame::durable(event) };
            self.move_to(event.seq);
            self.push_tail(durable.clone());
            if watched {
                self.push_recent(RecentFrame::Durable(durable));
            }
        }
        if run.last_seq > self.last_seq {
            // Events were committed that are not handed in: readers take them from the log.
            self.move_to(run.last_seq);
            self.recent_start += 1;
            self.trim_recent(0, 0);
        }
        self.run = Some(run.clone());
        self.driven_by = DrivenBy::Published;
        let before = std::mem::replace(&mut self.doing, Doing::Idle);
        self.doing = match (activity, before) {
            (Activity::Idle, _) => Doing::Idle,
            (Activity::Executing(calls), _) => Doing::Executing(calls),
            (Activity::Ended, _) => Doing::Ended,
            (Activity::Writing { step, attempt }, Doing::Writing(open))
                if (open.name.step, open.name.attempt) == (step, attempt) =>
            {
                Doing::Writing(open)
            }
            (Activity::Writing { step, attempt }, _) => {
                self.epochs += 1;
                let name = MessageName { run: self.id, step, attempt };
                Doing::Writing(Box::new(OpenMessage::new(self.epochs, name, self.last_seq)))
            }
        };
    }

    fn move_to(&mut self, seq: Seq) {
        self.last_seq = seq;
        if let Doing::Writing(open) = &mut self.doing {
            open.stop(seq);
        }
    }

    /// Adds a fragment of the response being written.
    pub(super) fn delta(&mut self, delta: Delta<'_>, watched: bool) {
        let (run, seq) = (self.id, self.last_seq);
        let Doing::Writing(open) = &mut self.doing else {
            tracing::warn!(
                run_id = %run,
                "a fragment of a response arrived while no response is written; it is not streamed"
            );
            return;
        };
        let (channel, fragment) = match delta {
            Delta::Text(text) => (Channel::Text, text),
            Delta::Reasoning(text) => (Channel::Reasoning, text),
            Delta::ToolCall { index, id, name, arguments } => {
                let message = open.name;
                if watched {
                    self.passing(frame::tool_call_delta(message, index, id, name, arguments));
                }
                return;
            }
        };
        match open.push(channel, fragment) {
            Pushed::Kept(from, to) if watched => {
                let (id, offset) = match channel {
                    Channel::Text => (Cursor::in_text(seq, to.text), from.text),
                    Channel::Reasoning => (Cursor::in_reasoning(seq, to.text, to.reasoning), from.reasoning),
                };
                let frame = frame::delta(channel, open.name, id, offset, fragment);
                let epoch = open.epoch;
                self.push_recent(RecentFrame::Delta { epoch, from, to, frame });
            }
            Pushed::NowFull => tracing::warn!(
                run_id = %run,
                step = open.name.step,
                "the response is longer than {MAX_MESSAGE_BYTES} bytes; its rest is not streamed but comes with the \
                 finished message"
            ),
            Pushed::Kept(..) | Pushed::Nothing => {}
        }
    }

    /// Shows a frame to the readers that keep up.
    pub(super) fn passing(&mut self, frame: Bytes) {
        self.push_recent(RecentFrame::Passing(frame));
    }

    fn push_tail(&mut self, durable: DurableFrame) {
        if self.tail.back().is_some_and(|newest| newest.seq + 1 != durable.seq) {
            self.tail.clear();
            self.tail_bytes = 0;
        }
        self.tail_bytes += durable.frame.len();
        self.tail.push_back(durable);
        while self.tail.len() > MAX_TAIL_EVENTS || self.tail_bytes > MAX_TAIL_BYTES {
            let Some(oldest) = self.tail.pop_front() else { break };
            self.tail_bytes -= oldest.frame.len();
        }
    }

    fn push_recent(&mut self, frame: RecentFrame) {
        match &frame {
            RecentFrame::Durable(durable) => self.recent_durable_bytes += durable.frame.len(),
            RecentFrame::Delta { frame, .. } | RecentFrame::Passing(frame) => self.recent_delta_bytes += frame.len(),
        }
        self.recent.push_back(frame);
        self.trim_recent(MAX_TAIL_BYTES, MAX_DELTA_BYTES);
    }

    /// Lets go of the oldest recent frames; whoever still needed them catches up another way.
    fn trim_recent(&mut self, durable_bytes: usize, delta_bytes: usize) {
        while self.recent_durable_bytes > durable_bytes || self.recent_delta_bytes > delta_bytes {
            match self.recent.pop_front() {
                Some(RecentFrame::Durable(durable)) => self.recent_durable_bytes -= durable.frame.len(),
                Some(RecentFrame::Delta { frame, .. } | RecentFrame::Passing(frame)) => {
                    self.recent_delta_bytes -= frame.len();
                }
                None => break,
            }
            self.recent_start += 1;
        }
    }

    /// Starts a subscription. `stored` is the run as just read from the store; when it is ahead of what has been
    /// published and `wait` is allowed, the answer is [`Joined::Behind`].
    pub(super) fn join(&self, stored: &Run, cursor: Cursor, wait: bool) -> Joined {
        let live = self.run.as_ref().filter(|_| self.last_seq >= stored.last_seq);
        if live.is_none() && self.run.is_some() && wait {
            return Joined::Behind;
        }
        let run = live.unwrap_or(stored);
        let last_seq = self.last_seq.max(stored.last_seq);
        if cursor.seq() > last_seq {
            return Joined::BeyondEnd { last_seq };
        }
        if run.status.is_finished() && cursor.seq() == last_seq {
            return Joined::Past;
        }
        let mut position = Position { seq: cursor.seq(), epoch: 0, place: Place::default(), recent: None };
        match self.open().filter(|open| cursor.seq() >= open.opened_at) {
            Some(open) => {
                let Some(place) = open.locate(cursor) else { return Joined::BeyondEnd { last_seq } };
                (position.epoch, position.place) = (open.epoch, place);
            }
            // A run no driver has published is between two processes: what was being written is gone, the event
            // that says so is still to come, and the reader that had a part of it is right to come back.
            None if live.is_some() && cursor.seq() == last_seq && cursor.within() != Within::Event => {
                return Joined::BeyondEnd { last_seq };
            }
            None => {}
        }
        Joined::At(position, self.snapshot(run, stored, live.is_some()))
    }

    fn snapshot(&self, run: &Run, stored: &Run, live: bool) -> Result<Bytes, String> {
        let (executing, writing): (&[ExecutingCall], _) = match &self.doing {
            Doing::Executing(calls) if live => (calls, None),
            Doing::Writing(open) if live => {
                let MessageName { step, attempt, .. } = open.name;
                (&[], Some(frame::Writing { step, attempt, length: open.end().text }))
            }
            Doing::Idle | Doing::Executing(_) | Doing::Writing(_) | Doing::Ended => (&[], None),
        };
        let mut run = crate::domain::RunView::from(run);
        // A cancel request is stored before the driver hears of it.
        run.cancel_requested_at = run.cancel_requested_at.or(stored.cancel_requested_at).or(self.end_asked_at);
        frame::snapshot(&frame::Snapshot { run, executing, writing }).map_err(|error| error.to_string())
    }

    /// Gives a reader what comes next and moves its position past it.
    pub(super) fn take(&self, at: &mut Position) -> Taken {
        let open = self.open().filter(|open| at.seq >= open.opened_at);
        if let Some(open) = open.filter(|open| at.epoch != open.epoch) {
            (at.epoch, at.place) = (open.epoch, open.place_after(at.seq));
        }
        if let Some(taken) = self.follow(at) {
            return taken;
        }
        at.recent = None;
        if self.run.is_none() {
            return Taken::Unpublished;
        }
        if at.seq > self.last_seq {
            // It read the log faster than the driver published.
            return Taken::CaughtUp;
        }
        if let Some(open) = open {
            let rest = open.rest(at.seq, &mut at.place, open.place_before_next(at.seq));
            if !rest.is_empty() {
                self.caught_up(at);
                return Taken::Rest(rest);
            }
        }
        if at.seq < self.last_seq {
            let next = at.seq + 1;
            let oldest = self.tail.front().map_or(next, |oldest| oldest.seq);
            let found = usize::try_from(next.saturating_sub(oldest)).ok().and_then(|index| self.tail.get(index));
            if let Some(durable) = found.filter(|durable| durable.seq == next) {
                at.seq = next;
                return Taken::Frame { frame: durable.frame.clone(), last: durable.last };
            }
            let through = match (open, self.open()) {
                (Some(_), _) => next,
                (None, Some(coming)) => coming.opened_at,
                (None, None) => self.last_seq,
            };
            return Taken::Replay { through };
        }
        self.caught_up(at);
        Taken::CaughtUp
    }

    /// From here on the recent frames continue what the reader has, if it has every event.
    fn caught_up(&self, at: &mut Position) {
        at.recent = (at.seq == self.last_seq).then_some(self.recent_end());
    }

    fn recent_end(&self) -> u64 {
        self.recent_start + self.recent.len() as u64
    }

    /// The next recent frame of a reader that keeps up; `None` when it has fallen behind.
    fn follow(&self, at: &mut Position) -> Option<Taken> {
        let index = at.recent?;
        if index == self.recent_end() {
            return Some(Taken::CaughtUp);
        }
        let offset = usize::try_from(index.checked_sub(self.recent_start)?).ok()?;
        let taken = match self.recent.get(offset)? {
            RecentFrame::Durable(durable) => {
                if durable.seq != at.seq + 1 {
                    return None;
                }
                at.seq = durable.seq;
                Taken::Frame { frame: durable.frame.clone(), last: durable.last }
            }
            RecentFrame::Delta { epoch, from, to, frame } => {
                let place = if at.epoch == *epoch { at.place } else { Place::default() };
                if place != *from {
                    return None;
                }
                (at.epoch, at.place) = (*epoch, *to);
                Taken::Frame { frame: frame.clone(), last: false }
            }
            RecentFrame::Passing(frame) => Taken::Frame { frame: frame.clone(), last: false },
        };
        at.recent = Some(index + 1);
        Some(taken)
    }

    /// Bytes held of messages and frames.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> usize {
        self.open().map_or(0, OpenMessage::bytes)
            + self.tail_bytes
            + self.recent_delta_bytes
            + self.recent_durable_bytes
            + self.recent.len() * size_of::<RecentFrame>()
    }
}
