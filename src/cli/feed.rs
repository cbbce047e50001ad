//! The frames of a run's event stream, from this process or from a server.

use anyhow::Context as _;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryStreamExt as _};
use sse_stream::{Sse, SseByteStream};

use super::output;
use super::remote::{Remote, RemoteFeed};
use crate::domain::{RunId, RunRequest, TenantId};
use crate::event::{Cursor, Streams, Subscribed};
use crate::run::{Caller, CreateError, Supervisor};
use crate::store::StoreError;

/// One frame of an event stream (WHATWG HTML, "Server-sent events").
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// Where to go on after it; `None` when it does not move the reader.
    pub(super) id: Option<String>,
    /// The type of the event.
    pub(super) event: String,
    /// JSON.
    pub(super) data: String,
}

impl Frame {
    /// A frame of a block that carries data; `None` for one that does not.
    pub(super) fn new(block: Sse) -> Option<Self> {
        let Sse { event, data, id, retry: _ } = block;
        Some(Self { id, event: event.unwrap_or_else(|| "message".to_owned()), data: data? })
    }
}

/// What a feed gives.
#[derive(Debug)]
pub(super) enum Heard {
    /// A frame.
    Frame(Frame),
    /// In words: the server did not answer as it should, and is asked again.
    Trouble(String),
}

/// The blocks in a stream of bytes.
pub(super) type Blocks = SseByteStream<BoxStream<'static, Result<Bytes, StreamError>>>;

/// What broke a stream.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamError {
    /// The connection.
    #[error(transparent)]
    Connection(#[from] reqwest::Error),
    /// The database of this process.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Who executes runs: this process, or a server.
pub(super) enum Executor {
    Local { supervisor: Supervisor, streams: Streams },
    Remote(Remote),
}

impl Executor {
    /// Creates a run.
    pub(super) async fn create(&self, request: RunRequest) -> anyhow::Result<RunId> {
        match self {
            Self::Local { supervisor, streams: _ } => {
                let created = supervisor.create(Caller::untraced(TenantId::local()), request, None).await;
                Ok(created.map_err(refusal)?.id)
            }
            Self::Remote(remote) => remote.create(&request).await,
        }
    }

    /// Asks a run to end.
    pub(super) async fn cancel(&self, run: RunId) -> anyhow::Result<()> {
        match self {
            Self::Local { supervisor, streams: _ } => {
                supervisor.cancel(&TenantId::local(), run).await?;
                Ok(())
            }
            Self::Remote(remote) => remote.cancel(run).await,
        }
    }

    /// Follows a run from its first event.
    pub(super) async fn follow(&self, run: RunId) -> anyhow::Result<Feed> {
        match self {
            Self::Local { supervisor: _, streams } => {
                match streams.subscribe(&TenantId::local(), run, Cursor::START).await? {
                    Subscribed::Stream(subscription) => {
                        let bytes = subscription.into_stream().map_err(StreamError::Store).boxed();
                        Ok(Feed::Local(Box::new(SseByteStream::new(bytes))))
                    }
                    Subscribed::Past => anyhow::bail!("run {run} has no events"),
                }
            }
            Self::Remote(remote) => Ok(Feed::Remote(Box::new(remote.follow(run, None).known()))),
        }
    }
}

/// A stream being followed.
pub(super) enum Feed {
    Local(Box<Blocks>),
    Remote(Box<RemoteFeed>),
}

impl Feed {
    /// What comes next; `None` after the last frame. Nothing is lost when it is dropped waiting.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<Heard>> {
        match self {
            Self::Local(blocks) => loop {
                let Some(block) = blocks.next().await else { return Ok(None) };
                if let Some(frame) = Frame::new(block.context("the event stream broke")?) {
                    return Ok(Some(Heard::Frame(frame)));
                }
            },
            Self::Remote(feed) => feed.next().await,
        }
    }
}

/// Why a run was not accepted, with every field that is wrong.
fn refusal(error: CreateError) -> anyhow::Error {
    match error {
        CreateError::Invalid(fields) => {
            anyhow::anyhow!("the run was refused{}", output::fields(&fields))
        }
        CreateError::Overloaded { .. } | CreateError::Stopping | CreateError::Store(_) | CreateError::Internal(_) => {
            anyhow::Error::new(error).context("the run was refused")
        }
    }
}
