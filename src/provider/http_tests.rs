//! Tests of what is said of an HTTP response; the connection itself is tested in `tests/it/provider`.

use super::*;
use crate::provider::openai_chat::OpenAiChat;
use crate::time::ManualClock;

fn provider(base_url: &str, key: Option<&str>) -> Result<HttpProvider<OpenAiChat>, SetupError> {
    let settings = HttpSettings {
        base_url: base_url.parse().unwrap(),
        api_key: key.map(SecretString::from),
        connect_timeout: Duration::from_secs(1),
        idle_timeout: Duration::from_secs(1),
    };
    let clock = ManualClock::new("2026-01-05T10:00:00Z".parse().unwrap());
    HttpProvider::new(OpenAiChat::new(None), settings, Arc::new(clock))
}

#[test]
fn the_path_is_added_to_the_base() {
    for (base, expected) in [
        ("http://h/v1", "http://h/v1/chat/completions"),
        ("http://h/v1/", "http://h/v1/chat/completions"),
        ("http://h:8000", "http://h:8000/chat/completions"),
        ("http://h/d?api-version=2", "http://h/d/chat/completions?api-version=2"),
    ] {
        assert_eq!(provider(base, None).unwrap().url.as_str(), expected);
    }
}

#[test]
fn a_key_is_a_sensitive_header_and_never_part_of_a_message() {
    let own = provider("http://h/v1", Some("sk-own")).unwrap();
    assert_eq!(format!("{:?}", own.headers.get(AUTHORIZATION).unwrap()), "Sensitive");
    let failure = own.present(ModelFailure::new(FailureClass::Authentication, "Incorrect API key provided: sk-own."));
    assert_eq!(failure.message, "h: Incorrect API key provided: [key].");
    let broken = provider("http://h/v1", Some("sk\nown")).err().unwrap();
    assert!(!broken.to_string().contains("own"), "{broken}");
}

#[test]
fn the_header_overrules_the_status() {
    let own = provider("http://h/v1", None).unwrap();
    for (status, should, expected) in [
        (503, None, FailureClass::Unavailable),
        (503, Some("false"), FailureClass::Refused),
        (429, Some("false"), FailureClass::QuotaExhausted),
        (400, Some("false"), FailureClass::InvalidRequest),
        (400, Some("true"), FailureClass::Unavailable),
        (429, Some("true"), FailureClass::RateLimited),
    ] {
        let mut headers = HeaderMap::new();
        if let Some(should) = should {
            headers.insert("x-should-retry", HeaderValue::from_static(should));
        }
        headers.insert("retry-after", HeaderValue::from_static("Mon, 05 Jan 2026 10:00:07 GMT"));
        let failure = own.refused(StatusCode::from_u16(status).unwrap(), &headers, &ProviderError::text("busy"));
        assert_eq!(
            (failure.class, failure.retry_after),
            (expected, Some(Duration::from_secs(7))),
            "{status} {should:?}"
        );
        assert!(failure.message.starts_with(&format!("answered {status}")) && failure.message.contains("busy"));
    }
}

#[test]
fn tls_needs_no_default_of_the_process() {
    assert!(client_builder("http").is_ok());
    // A machine without any certificate cannot check one, and says so.
    if let Err(error) = client_builder("https") {
        assert!(error.to_string().contains("No CA certificates"), "{error}");
    }
}
