use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::request;
use crate::figure::{Report, Samples};
use crate::model::Model;
use crate::server::{Idle, Kind, Server};

/// Turns of floor and hames.
const ROUNDS: usize = 6;
/// How long one turn is measured, after its warm-up.
const TURN: Duration = Duration::from_secs(4);
const WARM_UP: Duration = Duration::from_secs(1);
/// Runs at a time.
const CONCURRENT: usize = 64;

/// What one turn showed. Its load is a closed loop: the next run begins when one has ended.
struct Turn {
    runs_per_second: f64,
    cpu_ms_per_run: f64,
    service_ms: Samples,
    idle: f64,
}

pub(super) async fn measure(model: &Model, report: &mut Report) {
    let mut ratios = Samples::default();
    let mut service_ratios = Samples::default();
    // Of floor and hames: runs per second, CPU per run, service time alone.
    let mut figures: [[Samples; 3]; 2] = Default::default();
    for round in 0..ROUNDS {
        let mut rate = [0.0; 2];
        let mut alone = [0.0; 2];
        // Each goes first as often as the other.
        for at in [round % 2, (round + 1) % 2] {
            let kind = Kind::BOTH[at];
            let server = Server::start(kind, model);
            let mut many = turn(&server, CONCURRENT).await;
            let mut one = turn(&server, 1).await;
            rate[at] = many.runs_per_second;
            alone[at] = one.service_ms.median();
            println!(
                "  {}: {:.0} runs/s at {CONCURRENT} (p50 {:.1} ms, p99 {:.1} ms), {:.2} ms CPU per run, machine idle \
                 {:.0} %; alone {:.2} ms (p99 {:.2} ms), {:.2} ms CPU",
                kind.name(),
                many.runs_per_second,
                many.service_ms.median(),
                many.service_ms.quantile(0.99),
                many.cpu_ms_per_run,
                many.idle * 100.0,
                alone[at],
                one.service_ms.quantile(0.99),
                one.cpu_ms_per_run,
            );
            figures[at][0].push(many.runs_per_second);
            figures[at][1].push(many.cpu_ms_per_run);
            figures[at][2].push(alone[at]);
        }
        ratios.push(rate[1] / rate[0]);
        service_ratios.push(alone[1] / alone[0]);
    }
    let [mut floor, mut hames] = figures;
    println!("  medians: floor {:.0} runs/s, hames {:.0} runs/s", floor[0].median(), hames[0].median());
    report.at_least("runs per second at 64, share of the floor's", ratios.median(), 0.6, None);
    report.at_most("service time alone, multiple of the floor's", service_ratios.median(), 1.6, None);
    report.at_most("server CPU per durable run, ms", hames[1].median(), 1.2, Some(floor[1].median()));
}

/// Keeps `concurrent` runs going for a while.
async fn turn(server: &Server, concurrent: usize) -> Turn {
    let begin = Instant::now() + WARM_UP;
    let end = begin + TURN;
    let body = request("tool");
    let mut workers = JoinSet::new();
    for _ in 0..concurrent {
        let (mut client, body) = (server.client().await, body.clone());
        workers.spawn(async move {
            let mut service = Samples::default();
            while Instant::now() < end {
                let from = Instant::now();
                let run = client.create(&body).await;
                client.follow(&run).await.finish().await;
                if (begin..end).contains(&Instant::now()) {
                    service.push_ms(from.elapsed());
                }
            }
            service
        });
    }
    tokio::time::sleep_until(begin.into()).await;
    let cpu = server.cpu_seconds();
    let mut idle = Idle::default();
    idle.share();
    tokio::time::sleep_until(end.into()).await;
    let (cpu, idle) = (server.cpu_seconds() - cpu, idle.share());
    let mut service_ms = Samples::default();
    while let Some(worker) = workers.join_next().await {
        service_ms.extend(worker.unwrap());
    }
    let runs = service_ms.len() as f64;
    Turn { runs_per_second: runs / TURN.as_secs_f64(), cpu_ms_per_run: cpu * 1e3 / runs, service_ms, idle }
}
