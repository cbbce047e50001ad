//! Following a run: what a cursor missed from the log, then live, until the run has ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, stream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::bus::{Bus, LiveRun};
use super::cursor::Cursor;
use super::frame;
use super::live::{Joined, Position, Taken};
use super::message::Rest;
use crate::domain::{Event, EventKind, Run, RunId, Seq, TenantId};
use crate::store::{Store, StoreError};

/// How often a reader looks at the log of a run that nobody drives in this process.
const POLL: Duration = Duration::from_secs(1);

/// Events of the first page that is read from the log.
const FIRST_PAGE: u32 = 16;
/// Most events of any page.
const MAX_PAGE: u32 = 128;
/// What a reader keeps of a page, in bytes, unless its first event alone is larger. The largest event of a page
/// decides how many the next one asks for.
const PAGE_BYTES: usize = 64 * 1024;

/// Opens event streams.
#[derive(Clone)]
pub struct Streams {
    store: Arc<dyn Store>,
    bus: Bus,
    keep_alive: Duration,
}

/// The answer to a subscription.
#[expect(clippy::large_enum_variant, reason = "made once per connection and taken apart at once")]
pub enum Subscribed {
    /// The run has ended and the reader has all of it.
    Past,
    /// What there is to read.
    Stream(Subscription),
}

/// Why there is nothing to follow.
#[derive(Debug, thiserror::Error)]
pub enum SubscribeError {
    /// This tenant has no such run.
    #[error("no such run")]
    NotFound,
    /// The cursor lies beyond the end of the log, or beyond what has been written of the open message.
    #[error("the cursor is beyond the end of the run's events; the newest event is {last_seq}")]
    BeyondEnd {
        /// The number of the newest event.
        last_seq: Seq,
    },
    /// The log cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Streams {
    /// Streams over a store and the live runs of this process, with a comment after `keep_alive` of silence.
    pub fn new(store: Arc<dyn Store>, bus: Bus, keep_alive: Duration) -> Self {
        Self { store, bus, keep_alive }
    }

    /// Follows a run from a cursor. The first frame is a snapshot of the run; then comes what the cursor missed,
    /// once and without gap, and then what happens. A cursor inside a message that is not the open one any more
    /// counts as its event number alone.
    pub async fn subscribe(&self, tenant: &TenantId, run: RunId, cursor: Cursor) -> Result<Subscribed, SubscribeError> {
        let held = self.bus.find(run);
        // A cursor that is ahead of what was published was read out of the log.
        let driven = held.as_ref().and_then(|live| live.driven_run(tenant));
        let driven = driven.filter(|run| run.last_seq >= cursor.seq());
        let stored = match driven {
            Some(driven) => driven,
            None => self.store.run(tenant, run).await?.ok_or(SubscribeError::NotFound)?,
        };
        let live = held.unwrap_or_else(|| self.bus.live(run));
        let mut changes = live.changes();
        // A commit is followed by its publication, normally at once.
        let patience = Instant::now() + POLL;
        let (position, snapshot) = loop {
            changes.mark_unchanged();
            match live.join(&stored, cursor, Instant::now() < patience) {
                Joined::At(position, snapshot) => break (position, snapshot),
                Joined::Past => return Ok(Subscribed::Past),
                Joined::BeyondEnd { last_seq } => return Err(SubscribeError::BeyondEnd { last_seq }),
                Joined::Behind => tokio::select! {
                    _ = changes.changed() => {}
                    () = sleep_until(patience) => {}
                },
            }
        };
        Ok(Subscribed::Stream(Subscription {
            source: Source { store: Arc::clone(&self.store), tenant: tenant.clone(), run },
            live,
            changes,
            position,
            snapshot: Some(snapshot.map_err(|reason| StoreError::Corrupt { run, reason })?),
            page: VecDeque::new(),
            page_limit: FIRST_PAGE,
            rest: VecDeque::new(),
            ended: false,
            keep_alive: self.keep_alive,
            silent_since: Instant::now(),
        }))
    }

    /// Waits until a run has ended or waits for answers, for at most `wait`, and gives the run as it then stands; `None` when this
    /// tenant has no such run.
    pub async fn settled(&self, tenant: &TenantId, run: RunId, wait: Duration) -> Result<Option<Run>, StoreError> {
        let deadline = later(Instant::now(), wait);
        let Some(mut stored) = self.store.run(tenant, run).await? else { return Ok(None) };
        if stored.status.is_at_rest() {
            return Ok(Some(stored));
        }
        let live = self.bus.live(run);
        loop {
            let look = later(Instant::now(), if live.is_driven() { self.keep_alive } else { POLL });
            let hint = timeout_at(deadline.min(look), live.at_rest()).await;
            match self.store.run(tenant, run).await? {
                Some(now) => stored = now,
                None => return Ok(None),
            }
            if stored.status.is_at_rest() || hint.is_ok() || Instant::now() >= deadline {
                return Ok(Some(stored));
            }
        }
    }
}

/// An instant so far ahead that it cannot be told apart from never, where the sum has no representation.
fn later(start: Instant, by: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(365 * 24 * 3_600);
    start.checked_add(by).unwrap_or(start + NEVER)
}

/// Where a subscription reads the log.
struct Source {
    store: Arc<dyn Store>,
    tenant: TenantId,
    run: RunId,
}

impl Source {
    /// The events after `after`, in order and without a hole.
    async fn page(&self, after: Seq, limit: u32) -> Result<VecDeque<Event>, StoreError> {
        let events = self.store.events_after(&self.tenant, self.run, after, limit).await?;
        for (event, expected) in events.iter().zip(after + 1..) {
            if event.seq != expected {
                let reason = format!("event {expected} is missing from the log; the next one is {}", event.seq);
                return Err(StoreError::Corrupt { run: self.run, reason });
            }
        }
        Ok(events.into())
    }
}

/// One reader of one run. It holds a position, at most a page of events and a chunk of text, and no queue.
pub struct Subscription {
    source: Source,
    live: Arc<LiveRun>,
    changes: watch::Receiver<u64>,
    position: Position,
    snapshot: Option<Bytes>,
    /// Events read from the log, next after the position.
    page: VecDeque<Event>,
    page_limit: u32,
    /// What is missing of the open message; the position is already behind it.
    rest: VecDeque<Rest>,
    ended: bool,
    keep_alive: Duration,
    silent_since: Instant,
}

impl Subscription {
    /// The next bytes of the stream, `None` after `run_end`. They are a whole frame, except that a long delta comes
    /// in several pieces, one after the other. Dropping the future loses nothing.
    ///
    /// After an error the stream may be read on; a reader that is cut off resumes from the last id it got.
    pub async fn next(&mut self) -> Result<Option<Bytes>, StoreError> {
        loop {
            if let Some(bytes) = self.ready() {
                self.silent_since = Instant::now();
                return Ok(Some(bytes));
            }
            if self.ended {
                return Ok(None);
            }
            self.changes.mark_unchanged();
            let taken = self.live.take(&mut self.position);
            match taken {
                Taken::Frame { frame, last } => {
                    self.ended = last;
                    self.silent_since = Instant::now();
                    return Ok(Some(frame));
                }
                Taken::Rest(rest) => self.rest = rest,
                Taken::Replay { through } => self.replay(through).await?,
                Taken::Unpublished => {
                    if !self.look().await? && self.wait(POLL).await {
                        return Ok(Some(self.keep_alive()));
                    }
                }
                Taken::CaughtUp => {
                    if self.wait(self.keep_alive).await {
                        // Should the driver be gone, or its wake-up lost, the log knows.
                        if !self.look().await? {
                            return Ok(Some(self.keep_alive()));
                        }
                    }
                }
            }
        }
    }

    /// The subscription as a stream of bytes. It ends after `run_end` or after an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<Bytes, StoreError>> + Send {
        stream::try_unfold(self, |mut subscription| async {
            Ok(subscription.next().await?.map(|bytes| (bytes, subscription)))
        })
    }

    /// What is already decided to come next.
    fn ready(&mut self) -> Option<Bytes> {
        if let Some(snapshot) = self.snapshot.take() {
            return Some(snapshot);
        }
        if let Some(rest) = self.rest.front_mut() {
            let (chunk, last) = rest.chunk();
            if last {
                self.rest.pop_front();
            }
            return Some(chunk);
        }
        let event = self.page.pop_front()?;
        self.position.read(event.seq);
        self.ended = event.body.kind == EventKind::RunEnd;
        Some(frame::durable(&event))
    }

    /// Reads the log up to an event that has been published.
    async fn replay(&mut self, through: Seq) -> Result<(), StoreError> {
        self.read_page().await?;
        self.page.truncate(usize::try_from(through - self.position.seq()).unwrap_or(usize::MAX));
        if self.page.is_empty() {
            let reason = format!("event {} was published and is missing from the log", self.position.seq() + 1);
            return Err(StoreError::Corrupt { run: self.source.run, reason });
        }
        Ok(())
    }

    /// Reads events that may not be published yet; `true` when there is something to go on with. What a change
    /// overtakes is not used: text that was published meanwhile may belong between the events.
    async fn look(&mut self) -> Result<bool, StoreError> {
        self.read_page().await?;
        if self.changes.has_changed().unwrap_or(false) {
            self.page.clear();
            return Ok(true);
        }
        Ok(!self.page.is_empty())
    }

    /// Reads what follows the position. What a page holds beyond [`PAGE_BYTES`] is let go and read again later.
    async fn read_page(&mut self) -> Result<(), StoreError> {
        self.page = self.source.page(self.position.seq(), self.page_limit).await?;
        let (mut bytes, mut largest, mut fitting) = (0, 1, 0);
        for event in &self.page {
            bytes += event.body.json.len();
            largest = largest.max(event.body.json.len());
            fitting += usize::from(bytes <= PAGE_BYTES);
        }
        self.page.truncate(fitting.max(1));
        self.page_limit = u32::try_from(PAGE_BYTES / largest).unwrap_or(MAX_PAGE).clamp(1, MAX_PAGE);
        Ok(())
    }

    /// Waits for a change, at most until `look` has passed. Says whether a keep-alive is due.
    async fn wait(&mut self, look: Duration) -> bool {
        let due = later(self.silent_since, self.keep_alive);
        let until = due.min(later(Instant::now(), look));
        tokio::select! {
            biased;
            changed = self.changes.changed() => match changed {
                Ok(()) => false,
                // Cannot happen while the live run is held; the log is looked at all the same.
                Err(_) => { sleep_until(until).await; Instant::now() >= due }
            },
            () = sleep_until(until) => Instant::now() >= due,
        }
    }

    fn keep_alive(&mut self) -> Bytes {
        self.silent_since = Instant::now();
        frame::KEEP_ALIVE
    }

    /// Bytes that only this reader holds.
    #[cfg(test)]
    fn held_bytes(&self) -> usize {
        self.page.iter().map(|event| event.body.json.len()).sum::<usize>()
            + self.rest.iter().map(Rest::own_bytes).sum::<usize>()
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
