use super::request;
use crate::figure::{Report, Samples};
use crate::model::{Model, Request};
use crate::server::{Kind, Server};

/// Rounds of each run, and how many runs.
const ROUNDS: usize = 199;
const RUNS: usize = 5;
/// Rounds around the two ends that are compared.
const EARLY: std::ops::Range<usize> = 5..15;
const LATE: std::ops::Range<usize> = 189..199;

/// The floor has no loop, so there is none beside it.
pub(super) async fn measure(model: &Model, report: &mut Report) {
    let server = Server::start(Kind::Hames, model);
    let mut client = server.client().await;
    let (mut early, mut late) = <(Samples, Samples)>::default();
    let (mut early_bytes, mut late_bytes) = <(Samples, Samples)>::default();
    for _ in 0..RUNS {
        model.take_requests();
        let body = String::from_utf8(request(&format!("rounds.{ROUNDS}")).to_vec()).unwrap();
        let limits = r#","limits":{"max_steps":200,"max_tool_calls":300,"max_tokens":2000000}}"#;
        let body = format!("{}{limits}", body.trim_end_matches('}'));
        let run = client.create(&body.into()).await;
        client.follow(&run).await.finish().await;
        let requests = model.take_requests();
        assert_eq!(requests.len(), ROUNDS + 1);
        between(&requests, EARLY, &mut early, &mut early_bytes);
        between(&requests, LATE, &mut late, &mut late_bytes);
    }
    println!(
        "  hames: a step takes {:.2} ms around round 10 with {:.0} bytes of request, {:.2} ms around round 194 with \
         {:.0} bytes",
        early.median(),
        early_bytes.median(),
        late.median(),
        late_bytes.median(),
    );
    let (more_us, more_kib) =
        ((late.median() - early.median()) * 1e3, (late_bytes.median() - early_bytes.median()) / 1024.0);
    println!("  hames: {:.1} µs more for each KiB of request more", more_us / more_kib);
    let growth = late.median() / early.median();
    let body_growth = late_bytes.median() / early_bytes.median();
    report.at_most("growth of a step from round 10 to 194, beside that of the request", growth, body_growth, None);
}

/// What passed between one answer, once it was handed to the connection, and the arrival of the next request.
fn between(requests: &[Request], rounds: std::ops::Range<usize>, times: &mut Samples, bytes: &mut Samples) {
    for pair in requests[rounds].windows(2) {
        times.push_ms(pair[1].arrived - pair[0].answered);
        bytes.push(pair[1].bytes as f64);
    }
}
