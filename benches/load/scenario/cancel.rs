use std::time::Instant;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::Method;

use super::request;
use crate::figure::{Report, Samples};
use crate::model::Model;
use crate::server::{Kind, Server};

const CANCELS: usize = 200;
/// Runs that are at work meanwhile.
const OTHERS: usize = 64;

/// The floor cannot cancel, so there is none beside it.
pub(super) async fn measure(model: &Model, report: &mut Report) {
    let server = Server::start(Kind::Hames, model);
    let mut client = server.client().await;
    for _ in 0..OTHERS {
        client.create(&request("hold")).await;
    }
    let mut to_close = Samples::default();
    for number in 0..CANCELS {
        let mark = format!("{number}");
        let run = client.create(&request(&format!("hold.{mark}"))).await;
        model.open_streams(OTHERS + 1).await;
        let asked = Instant::now();
        let answer = client.send(Method::DELETE, &format!("/runs/{run}"), "application/json", &Bytes::new()).await;
        answer.into_body().collect().await.unwrap();
        to_close.push_ms(model.closed(&mark).await.saturating_duration_since(asked));
    }
    println!("  hames: p50 {:.2} ms, p99 {:.2} ms", to_close.median(), to_close.quantile(0.99));
    report.at_most("DELETE to the close of the model's stream, p50, ms", to_close.median(), 3.0, None);
}
