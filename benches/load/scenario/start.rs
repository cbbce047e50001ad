use super::request;
use crate::figure::{Report, Samples};
use crate::model::Model;
use crate::server::{Kind, Server};

const ROUNDS: usize = 15;

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let mut figures: [Samples; 2] = Default::default();
    for _ in 0..ROUNDS {
        for (at, kind) in Kind::BOTH.into_iter().enumerate() {
            let server = Server::start(kind, model);
            let mut client = server.client().await;
            let run = client.create(&request("tool")).await;
            client.follow(&run).await.finish().await;
            figures[at].push_ms(server.started.elapsed());
        }
    }
    let [mut floor, mut hames] = figures;
    println!("  hames: p50 {:.1} ms, slowest {:.1} ms", hames.median(), hames.quantile(1.0));
    report.at_most("process start to first finished run, ms", hames.median(), 100.0, Some(floor.median()));
}
