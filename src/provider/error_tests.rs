//! Tests of what errors mean.

use serde_json::json;

use super::*;

fn of_status(status: u16, body: Value) -> FailureClass {
    ProviderError::find(&body).unwrap_or_default().class_of_status(status)
}

#[test]
fn status_and_code_decide_the_class() {
    use FailureClass::*;
    let none = json!({});
    let quota = json!({"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}});
    let short_term = json!({"error": {"message": "Quota exceeded for requests per minute", "code": 429}});
    let context = json!({"error": {"message": "too big", "code": "context_length_exceeded"}});
    let worded = json!({"message": "This model's maximum context length is 4096 tokens."});
    for (status, body, expected) in [
        (401, &none, Authentication),
        (403, &none, Authentication),
        (402, &none, QuotaExhausted),
        (408, &none, Unavailable),
        (409, &none, Unavailable),
        (500, &none, Unavailable),
        (503, &none, Unavailable),
        (529, &none, Unavailable),
        (429, &none, RateLimited),
        (429, &short_term, RateLimited),
        (429, &quota, QuotaExhausted),
        (400, &none, InvalidRequest),
        (404, &none, InvalidRequest),
        (422, &none, InvalidRequest),
        (302, &none, InvalidRequest),
        (400, &context, ContextTooLong),
        (422, &worded, ContextTooLong),
        (413, &none, ContextTooLong),
    ] {
        assert_eq!(of_status(status, body.clone()), expected, "{status} {body}");
    }
}

#[test]
fn errors_in_a_stream_are_classed_by_number_or_word() {
    use FailureClass::*;
    for (error, expected) in [
        (json!({"code": 502, "message": "x"}), Unavailable),
        (json!({"code": "429", "message": "x"}), RateLimited),
        (json!({"code": "server_error", "message": "x"}), Unavailable),
        (json!({"type": "invalid_request_error", "code": null, "message": "x"}), InvalidRequest),
        (json!({"code": "rate_limit_exceeded"}), RateLimited),
        (json!({"code": "insufficient_quota"}), QuotaExhausted),
        (json!({"code": "context_length_exceeded"}), ContextTooLong),
        (json!("plain"), Unavailable),
    ] {
        assert_eq!(ProviderError::read(&error).class_in_stream(), expected, "{error}");
    }
}

#[test]
fn errors_are_found_in_every_usual_form() {
    for (body, message) in [
        (json!({"error": {"message": "a", "type": "t"}}), "a (t)"),
        (json!({"error": "b"}), "b"),
        (json!({"error": "Not Found", "message": "no such model", "status": 404}), "no such model (404)"),
        (json!({"object": "error", "message": "c", "code": 400}), "c (400)"),
        (json!({"detail": [{"loc": ["body"], "msg": "d"}]}), r#"[{"loc":["body"],"msg":"d"}]"#),
        (json!([{"error": {"message": "e", "code": 400, "status": "INVALID"}}]), "e (400)"),
        (json!({"error": {"code": "f"}}), r#"{"code":"f"}"#),
    ] {
        assert_eq!(ProviderError::find(&body).unwrap().excerpt(), message, "{body}");
    }
    assert_eq!(ProviderError::find(&json!({"choices": [], "error": null})), None);
    assert_eq!(ProviderError::default().excerpt(), "no message");
}

#[test]
fn excerpts_are_short_and_on_one_line() {
    assert_eq!(excerpt(" a\n\tb  "), "a b");
    let long = excerpt(&"é".repeat(2000));
    assert_eq!(long.chars().count(), MAX_EXCERPT_CHARS + 1);
}

#[test]
fn the_wait_is_read_from_milliseconds_seconds_or_a_date() {
    let now = "2026-01-05T10:00:00Z".parse().unwrap();
    for (millis, after, expected) in [
        (None, None, None),
        (Some("250"), Some("9"), Some(250)),
        (Some("x"), Some("9"), Some(9_000)),
        (None, Some("1.5"), Some(1_500)),
        (None, Some("-3"), None),
        (None, Some("NaN"), None),
        (None, Some("1e300"), Some(120_000)),
        (None, Some("Mon, 05 Jan 2026 10:00:02 GMT"), Some(2_000)),
        (None, Some("Mon, 05 Jan 2026 09:59:30 GMT"), Some(0)),
        (None, Some("Mon, 05 Jan 2026 12:00:00 GMT"), Some(120_000)),
        (None, Some("soon"), None),
    ] {
        assert_eq!(retry_after(millis, after, now), expected.map(Duration::from_millis), "{millis:?} {after:?}");
    }
}
