//! Bodies: types, limits of size and time, and the room all of them share.

use bytes::Bytes;
use futures_util::{StreamExt, stream};

use super::super::room::BodyRoom;
use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn room() -> BodyRoom {
    BodyRoom::new(0)
}

fn headers(entries: &[(&'static str, &str)]) -> HeaderMap {
    entries.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_str(value).unwrap())).collect()
}

#[test]
fn only_plain_json_is_taken() {
    for good in [
        "application/json",
        "Application/JSON",
        "application/json; charset=UTF-8",
        "application/json;charset=\"utf-8\"",
    ] {
        assert!(check_type(&headers(&[("content-type", good)])).is_ok(), "{good}");
    }
    for bad in ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "", "json"] {
        assert!(check_type(&headers(&[("content-type", bad)])).is_err(), "{bad}");
    }
    assert!(check_type(&HeaderMap::new()).is_err());
    for encoding in ["gzip", "identity", "br, gzip", ""] {
        let encoded = headers(&[("content-type", "application/json"), ("content-encoding", encoding)]);
        let response = check_type(&encoded).unwrap_err().into_response();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["accept-encoding"]),
            (415, &"identity".parse().unwrap())
        );
    }
}

#[tokio::test]
async fn a_body_is_cut_off_at_the_limit_and_its_rest_never_read() {
    let pieces = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = pieces.clone();
    let endless = stream::repeat_with(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 100]))
    });
    let problem =
        collect(&HeaderMap::new(), Body::from_stream(endless), 1000, SECOND, &mut room().begin()).await.unwrap_err();
    assert_eq!(problem.code(), ProblemCode::BodyTooLarge);
    assert_eq!(pieces.load(std::sync::atomic::Ordering::SeqCst), 11);

    let whole =
        collect(&HeaderMap::new(), Body::from(vec![b' '; 1000]), 1000, SECOND, &mut room().begin()).await.unwrap();
    assert_eq!(whole.len(), 1000);
}

#[tokio::test]
async fn an_announced_length_over_the_limit_is_refused_unread() {
    for length in ["1001", "18446744073709551615"] {
        let unread = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let problem = collect(&headers(&[("content-length", length)]), unread, 1000, SECOND, &mut room().begin())
            .await
            .unwrap_err();
        assert_eq!(problem.code(), ProblemCode::BodyTooLarge, "{length}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_body_runs_out_of_time_however_often_it_sends() {
    let slow = stream::repeat(()).then(|()| async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        Ok::<_, std::io::Error>(Bytes::from_static(b" "))
    });
    let problem =
        collect(&HeaderMap::new(), Body::from_stream(slow), 1000, SECOND, &mut room().begin()).await.unwrap_err();
    assert_eq!(
        (problem.code(), problem.detail()),
        (ProblemCode::BodyTimeout, "The body did not arrive within 1000 ms.")
    );
}

#[tokio::test]
async fn a_body_holds_room_until_it_has_been_read_and_is_refused_when_there_is_none() {
    let room = BodyRoom::of(1000);
    let read = async |bytes: usize, held: &mut Held<'_>| {
        let pieces = stream::iter((0..bytes / 100).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![b' '; 100]))));
        collect(&HeaderMap::new(), Body::from_stream(pieces), 1000, SECOND, held).await
    };
    let (mut one, mut two) = (room.begin(), room.begin());
    assert_eq!(read(600, &mut one).await.unwrap().len(), 600);
    let refused = read(500, &mut two).await.unwrap_err();
    assert_eq!(refused.code(), ProblemCode::Overloaded);
    let response = refused.into_response();
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (503, &"5".parse().unwrap()));
    drop((one, two));
    assert_eq!(read(1000, &mut room.begin()).await.unwrap().len(), 1000);
}
