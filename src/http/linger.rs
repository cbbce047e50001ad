//! A connection that is closed gently.
//!
//! A server that answers before it has read the whole request (413, 431) and then closes its socket makes the kernel
//! send a reset, and the client may lose the answer it was just sent. So the writing half is closed first, and what the
//! client still sends is read and thrown away for a short time (RFC 9112 §9.6).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// How long a closed connection is read from, at most.
const LINGER: Duration = Duration::from_secs(2);

/// Wraps a stream; shutting it down also drains it.
pub(super) struct Lingering<S> {
    io: S,
    stage: Stage,
}

enum Stage {
    Open,
    Draining(Pin<Box<Sleep>>),
    Closed,
}

impl<S> Lingering<S> {
    pub(super) const fn new(io: S) -> Self {
        Self { io, stage: Stage::Open }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lingering<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Lingering<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            match &mut this.stage {
                Stage::Open => {
                    ready!(Pin::new(&mut this.io).poll_shutdown(cx))?;
                    this.stage = Stage::Draining(Box::pin(sleep(LINGER)));
                }
                Stage::Draining(time) => {
                    if time.as_mut().poll(cx).is_ready() || ready!(poll_discard(&mut this.io, cx)) {
                        this.stage = Stage::Closed;
                    }
                }
                Stage::Closed => return Poll::Ready(Ok(())),
            }
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

/// Reads once and throws away; true when nothing more will come. An error means the same: the client is gone.
fn poll_discard<S: AsyncRead + Unpin>(io: &mut S, cx: &mut Context<'_>) -> Poll<bool> {
    let mut space = [0; 8 * 1024];
    let mut buf = ReadBuf::new(&mut space);
    let read = ready!(Pin::new(io).poll_read(cx, &mut buf));
    Poll::Ready(read.is_err() || buf.filled().is_empty())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_still_comes_is_read_until_the_client_closes() {
        let (server, mut client) = duplex(16);
        let mut server = Lingering::new(server);
        let closing = tokio::task::JoinSet::from_iter([async move { server.shutdown().await.unwrap() }]);
        let mut rest = Vec::new();
        client.write_all(&[b'x'; 100_000]).await.unwrap();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(rest.is_empty());
        drop(client);
        closing.join_all().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_closes_is_left_after_a_while() {
        let (server, client) = duplex(16);
        let mut server = Lingering::new(server);
        let start = tokio::time::Instant::now();
        server.shutdown().await.unwrap();
        assert_eq!(start.elapsed(), LINGER);
        drop(client);
    }
}
