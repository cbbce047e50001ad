//! A network between store and server that can be broken.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What becomes of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weather {
    /// They arrive.
    Fair,
    /// They do not, and nobody is told; connections from before stay silent for ever.
    Silent,
    /// Connections are closed, and new ones as soon as they come.
    Down,
}

#[derive(Debug)]
struct State {
    weather: watch::Sender<(u32, Weather)>,
    /// What a request holds whose answer is lost, with the connection, once the server has given it.
    cut_at: watch::Sender<Option<&'static str>>,
    cuts: AtomicUsize,
    opened: AtomicUsize,
}

/// Passes connections on to the server.
pub(super) struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
    _tasks: JoinSet<()>,
}

impl Proxy {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            weather: watch::Sender::new((0, Weather::Fair)),
            cut_at: watch::Sender::new(None),
            cuts: AtomicUsize::new(0),
            opened: AtomicUsize::new(0),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&state)));
        Self { address, state, _tasks: tasks }
    }

    /// The server, reached through here in the clear, so that requests can be told.
    pub(super) fn options(&self, options: PgConnectOptions) -> PgConnectOptions {
        options.host("127.0.0.1").port(self.address.port()).ssl_mode(PgSslMode::Disable)
    }

    fn set(&self, weather: Weather) {
        self.state.weather.send_modify(|(age, now)| (*age, *now) = (*age + 1, weather));
    }

    /// Connections that are open, and those that come, fall silent.
    pub(super) fn silence(&self) {
        self.set(Weather::Silent);
    }

    /// Connections are closed, and those that come as well.
    pub(super) fn take_down(&self) {
        self.set(Weather::Down);
    }

    /// Connections that come work.
    pub(super) fn mend(&self) {
        self.set(Weather::Fair);
    }

    /// The server's answer to the next request that holds `text` is lost with its connection.
    pub(super) fn cut_answer_to(&self, text: &'static str) {
        self.state.cut_at.send_replace(Some(text));
    }

    /// Answers that were lost.
    pub(super) fn cuts(&self) -> usize {
        self.state.cuts.load(Ordering::Relaxed)
    }

    /// Connections that were opened so far.
    pub(super) fn opened(&self) -> usize {
        self.state.opened.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    loop {
        let (client, _) = listener.accept().await.unwrap();
        state.opened.fetch_add(1, Ordering::Relaxed);
        let born = *state.weather.borrow();
        connections.spawn(pass(client, Arc::clone(&state), born));
        while connections.try_join_next().is_some() {}
    }
}

async fn pass(mut client: TcpStream, state: Arc<State>, (born, at_first): (u32, Weather)) {
    match at_first {
        Weather::Down => return,
        Weather::Silent => return std::future::pending().await,
        Weather::Fair => {}
    }
    let place = super::database::server();
    let mut server = TcpStream::connect((place.get_host(), place.get_port())).await.unwrap();
    let mut weather = state.weather.subscribe();
    let (mut asked, mut answered) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let mut cuts = false;
    loop {
        tokio::select! {
            changed = async { weather.wait_for(|(age, _)| *age != born).await.map(|now| now.1) } => match changed {
                Ok(Weather::Silent) => std::future::pending().await,
                Ok(Weather::Down | Weather::Fair) | Err(_) => return,
            },
            read = client.read(&mut asked) => {
                let Ok(length @ 1..) = read else { return };
                let text = *state.cut_at.borrow();
                let holds = |text: &str| asked[..length].windows(text.len()).any(|part| part == text.as_bytes());
                if text.is_some_and(holds) {
                    state.cut_at.send_replace(None);
                    cuts = true;
                }
                server.write_all(&asked[..length]).await.unwrap();
            }
            read = server.read(&mut answered) => {
                let Ok(length @ 1..) = read else { return };
                if cuts {
                    state.cuts.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                if client.write_all(&answered[..length]).await.is_err() {
                    return;
                }
            }
        }
    }
}
