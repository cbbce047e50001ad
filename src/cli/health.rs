//! `hames health`: does a server accept runs? The check of a container or a service manager, which needs no other program.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use reqwest::Url;

use super::exit::{Code, Exit};
use super::output;
use super::remote::{Remote, parse_url};
use crate::config::{self, Env};

/// Most time for an answer, connecting included. Shorter than what container engines wait for a check.
const PATIENCE: Duration = Duration::from_secs(4);

/// Which server.
#[derive(Debug, Args)]
pub(super) struct HealthArgs {
    /// The server; when absent, the one that these settings start on this machine.
    #[arg(long, value_parser = parse_url, conflicts_with = "config")]
    url: Option<Url>,
    /// The settings file of that server.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub(super) async fn health(args: HealthArgs, env: &Env) -> anyhow::Result<Exit> {
    let url = match args.url {
        Some(url) => url,
        None => own_url(args.config, env)?,
    };
    let asked = Remote::new(url.clone())?;
    let late = || format!("{url} gave no answer within {} seconds", PATIENCE.as_secs());
    tokio::time::timeout(PATIENCE, asked.ready()).await.with_context(late)??;
    output::print(&mut std::io::stdout(), "ready\n")?;
    Ok(Exit::Code(Code::Done))
}

/// Where the server of these settings listens. Other problems of the settings are its own to tell.
fn own_url(file: Option<PathBuf>, env: &Env) -> anyhow::Result<Url> {
    let loaded = config::read(file.as_deref(), env);
    match loaded.config() {
        Some(config) => parse_url(&format!("http://{}", reachable(config.server.bind))).map_err(anyhow::Error::msg),
        None => Err(loaded.into_config().err().context("the settings cannot be read")?.into()),
    }
}

/// The address under which this machine reaches a listener: one that listens on every address, on the loopback one.
fn reachable(bind: SocketAddr) -> SocketAddr {
    let ip = match bind.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip @ (IpAddr::V4(_) | IpAddr::V6(_)) => ip,
    };
    SocketAddr::new(ip, bind.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_the_settings_is_asked_where_it_can_be_reached() {
        for (bind, expected) in [
            ("0.0.0.0:8080", "http://127.0.0.1:8080/"),
            ("[::]:81", "http://[::1]:81/"),
            ("127.9.9.9:82", "http://127.9.9.9:82/"),
            ("192.168.0.4:83", "http://192.168.0.4:83/"),
        ] {
            let env = Env::from_iter([("HAMES_SERVER__BIND", bind)]);
            assert_eq!(own_url(None, &env).unwrap().as_str(), expected);
        }
        assert_eq!(own_url(None, &Env::default()).unwrap().as_str(), "http://127.0.0.1:8080/");
        let missing = own_url(Some("/nowhere/hames.toml".into()), &Env::default()).unwrap_err();
        assert!(missing.to_string().starts_with("/nowhere/hames.toml: cannot be read"), "{missing}");
    }
}
