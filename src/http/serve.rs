//! The accept loop: who may connect, how slow a client may be, how the server stops.
//!
//! `axum::serve` bounds neither the time for headers nor the number of connections; this does.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use futures_util::FutureExt;
use futures_util::future::Either;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::guard::{MAX_HEADER_BYTES, MAX_HEADERS};
use super::linger::Lingering;
use super::state::Stages;
use crate::config::ServerConfig;

/// Bytes of a connection's read buffer and of its write buffer. A request head that does not fit is answered with a
/// bare 431 and the connection closed.
const BUFFER_BYTES: usize = 2 * MAX_HEADER_BYTES;

/// HTTP/2 streams one connection may have open.
const MAX_STREAMS: u32 = 128;

/// HTTP/2 streams a client may open and reset before they were accepted, and resets it may provoke.
const MAX_RESETS: usize = 20;

/// Time between HTTP/2 pings, and for their answer.
const PING: Duration = Duration::from_secs(20);

/// How long connections have to end once streams are closed. Streams are closed after the hard token, and what follows
/// it has to be over well before `shutdown::HARD_STOP`.
const DRAIN: Duration = Duration::from_secs(2);

/// Pause after the operating system refused a connection for want of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(500);

/// Serves until `stages.stopping`; then accepts no more, lets requests in progress end, and returns when all
/// connections are closed: at the latest two seconds after `stages.closing`.
pub async fn serve(listener: TcpListener, router: Router, config: &ServerConfig, stages: Stages) {
    let server = Arc::new(Server::new(router, config, stages.stopping.clone()));
    let permits = Arc::new(Semaphore::new(config.max_connections));
    let mut connections = JoinSet::new();
    while let Some(accepted) = accept(&listener, &permits, &mut connections, &stages.stopping).await {
        let server = Arc::clone(&server);
        connections.spawn(async move {
            let changes = TaskTracker::new();
            server.connection(accepted.stream, &changes).await;
            drop(accepted.permit);
            changes.close();
            changes.wait().await;
        });
    }
    // New clients are refused at once and can try another server.
    drop(listener);
    drain(connections, &stages.closing).await;
}

/// A connection and its place among the open ones.
struct Accepted {
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
}

/// Waits for a place and for a client, and meanwhile reaps connections that ended. `None` when the server stops.
/// While all places are taken, clients wait in the listener's backlog.
async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
    connections: &mut JoinSet<()>,
    stopping: &CancellationToken,
) -> Option<Accepted> {
    let mut held = None;
    loop {
        tokio::select! {
            biased;
            () = stopping.cancelled() => return None,
            Some(ended) = connections.join_next() => report(ended),
            permit = Arc::clone(permits).acquire_owned(), if held.is_none() => held = permit.ok(),
            client = listener.accept(), if held.is_some() => match client {
                Ok((stream, _)) => {
                    if let Some(permit) = held.take() {
                        return Some(Accepted { stream, permit });
                    }
                }
                Err(error) if is_of_the_client(&error) => tracing::debug!(error = %error, "a client went away"),
                Err(error) => {
                    tracing::error!(error = %error, "no connection can be accepted now");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

fn is_of_the_client(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

async fn drain(mut connections: JoinSet<()>, closing: &CancellationToken) {
    let bounded = async {
        closing.cancelled().await;
        sleep(DRAIN).await;
    };
    tokio::pin!(bounded);
    loop {
        tokio::select! {
            biased;
            ended = connections.join_next() => match ended {
                Some(ended) => report(ended),
                None => return,
            },
            () = &mut bounded => {
                tracing::warn!(connections = connections.len(), "connections did not end in time and are cut");
                connections.shutdown().await;
                return;
            }
        }
    }
}

fn report(ended: Result<(), JoinError>) {
    match ended {
        Err(error) if error.is_panic() => tracing::error!(error = %error, "a connection panicked"),
        Ok(()) | Err(_) => {}
    }
}

/// What all connections share.
struct Server {
    router: Router,
    builder: Builder<TokioExecutor>,
    header_timeout: Duration,
    write_timeout: Duration,
    stopping: CancellationToken,
}

impl Server {
    fn new(router: Router, config: &ServerConfig, stopping: CancellationToken) -> Self {
        let header_timeout = Duration::from_millis(config.header_timeout_ms);
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(header_timeout)
            .max_buf_size(BUFFER_BYTES)
            // Up to twice the documented number is answered with a problem.
            .max_headers(2 * MAX_HEADERS);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_pending_accept_reset_streams(MAX_RESETS)
            .max_local_error_reset_streams(MAX_RESETS)
            .max_header_list_size(u32::try_from(BUFFER_BYTES).unwrap_or(u32::MAX))
            .max_send_buf_size(BUFFER_BYTES)
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING);
        let write_timeout = Duration::from_millis(config.write_timeout_ms);
        Self { router, builder, header_timeout, write_timeout, stopping }
    }

    /// Serves a connection until it ends. Of `changes` are the requests that go on without it.
    async fn connection(&self, stream: TcpStream, changes: &TaskTracker) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(error = %error, "small packets of a connection are held back");
        }
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.write_timeout));
        let io = TokioIo::new(Lingering::new(Box::pin(stream)));
        let spoken = CancellationToken::new();
        let service = service_fn(|request: Request<Incoming>| {
            spoken.cancel();
            answer(self.router.clone(), request, changes)
        });
        let connection = self.builder.serve_connection(io, service);
        tokio::pin!(connection);
        // hyper's own header timeout starts once it knows the protocol, which takes up to 24 bytes to tell.
        let silence = async {
            if timeout(self.header_timeout, spoken.cancelled()).await.is_ok() {
                std::future::pending::<()>().await;
            }
        };
        tokio::pin!(silence);
        tokio::select! {
            biased;
            ended = connection.as_mut() => return log_end(ended),
            () = &mut silence => return log_silence(),
            () = self.stopping.cancelled() => connection.as_mut().graceful_shutdown(),
        }
        tokio::select! {
            biased;
            ended = connection.as_mut() => log_end(ended),
            () = &mut silence => log_silence(),
        }
    }
}

/// Answers a request. One that may change something is a task of its own from the moment its head is read: hyper drops
/// what a connection is at work on when its client closes it, and that may come in the same packet as the request.
fn answer(
    router: Router,
    request: Request<Incoming>,
    changes: &TaskTracker,
) -> impl Future<Output = Result<Response, JoinError>> + Send + use<> {
    let is_safe = request.method().is_safe();
    let answer = router.oneshot(request.map(Body::new)).map(|answer| match answer {
        Ok(response) => response,
        Err(never) => match never {},
    });
    if is_safe { Either::Left(answer.map(Ok)) } else { Either::Right(changes.spawn(answer)) }
}

/// Clients go away all the time; only a head that was too large is worth a line, since its answer says little.
fn log_end(ended: Result<(), Box<dyn std::error::Error + Send + Sync>>) {
    let Err(error) = ended else { return };
    match error.downcast_ref::<hyper::Error>() {
        Some(error) if error.is_parse_too_large() => {
            tracing::warn!(limit_bytes = BUFFER_BYTES, "a request was refused with 431: its head is too large");
        }
        Some(_) | None => tracing::debug!(error = %error, "a connection broke off"),
    }
}

fn log_silence() {
    tracing::debug!("a connection is closed: no request came in time");
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;
    use tokio::time::Instant;

    use super::*;
    use crate::shutdown::{Ended, HARD_STOP, Shutdown, Signal, Signals};

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_never_ends_does_not_keep_the_server_from_stopping_in_time() {
        let mut connections = JoinSet::new();
        connections.spawn(std::future::pending());
        let shutdown = Shutdown::new();
        let hard = shutdown.hard().clone();
        let (sender, signals) = mpsc::channel(1);
        sender.send(Signal::Terminate).await.unwrap();
        let start = Instant::now();
        let work = async {
            hard.cancelled().await;
            drain(connections, &hard).await;
        };
        let ended = shutdown.run(Signals::Channel(signals), Duration::from_secs(30), work).await;
        assert_eq!((ended, start.elapsed()), (Ended::Finished(()), Duration::from_secs(30) + DRAIN));
        assert!(2 * DRAIN < HARD_STOP, "what else stops after the hard token has as long");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_end_in_time_are_not_cut() {
        let mut connections = JoinSet::new();
        let last = Duration::from_millis(1_999);
        connections.spawn(sleep(last));
        let closing = CancellationToken::new();
        closing.cancel();
        let start = Instant::now();
        drain(connections, &closing).await;
        assert_eq!(start.elapsed(), last);
    }
}
