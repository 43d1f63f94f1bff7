//! Publishing over HTTP: what is stored, what is repeated, and that nothing of an event is changed on its way.

use futures_util::future::join_all;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, method_of, packed, refused, send, text},
    support::{
        client::{Response, trace_of},
        contracts::assert_valid,
        envelopes::{Envelope, batch, envelope, envelopes, event_id, id, unique_type},
        network::TokenSpec,
    },
};

const EVENTS: &str = "/api/v1/events";

/// Publishes a body as it is, as the service `live`.
async fn publish_text(site: &Site, body: &str) -> Response {
    send(
        site.one(),
        "POST",
        EVENTS,
        Some(&site.one().service_token("live")),
        body.to_owned(),
    )
    .await
}

/// The answer to a read by id, as text.
async fn stored_text(site: &Site, event_id: &str) -> String {
    let token = site.one().service_token("live");
    let answer = site.one().get(&format!("{EVENTS}/{event_id}"), Some(&token)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.text
}

async fn column(site: &Site, column: &str, event_id: &str) -> String {
    sqlx::query_scalar(sqlx::AssertSqlSafe(format!(
        "SELECT {column}::text FROM events WHERE id = $1"
    )))
    .bind(event_id)
    .fetch_one(&site.pool)
    .await
    .expect("the event is stored")
}

#[tokio::test]
async fn a_single_event_is_stored_with_its_defaults_and_answered_with_its_cursor() {
    let site = Site::shared().await;
    let event = envelope("live");
    let answer = site.one().publish(&event).await;
    assert_eq!(answer.header("content-type"), "application/json; charset=utf-8");
    assert!(answer.text.starts_with(&format!(
        r#"{{"event_id":"{}","duplicate":false,"cursor":"c1."#,
        event.id()
    )));
    let result = answer.expect(201);
    assert_valid("events.publish-result@1", &result);

    let read: Value = serde_json::from_str(&stored_text(&site, event.id()).await).expect("JSON");
    assert_valid("events.read-result@1", &read);
    assert_eq!(read["cursor"], result["cursor"]);
    assert_eq!(read["event"]["priority"], "important");
    assert_eq!(read["event"]["visibility"], "internal");
    assert_eq!(read["event"]["payload"], event.json()["payload"]);
    assert_eq!(column(&site, "publisher", event.id()).await, "svc:live");
    assert_eq!(column(&site, "env", event.id()).await, "production");
}

#[tokio::test]
async fn a_batch_is_answered_in_its_order_with_rising_cursors() {
    let site = Site::shared().await;
    let known = envelope("live");
    let first = site.one().publish(&known).await.expect(201);
    let mut events = envelopes("live", 99);
    events.insert(40, known.clone());
    let answer = site.two().publish_as("live", &batch(&events)).await.expect(201);
    assert_valid("events.publish-result@1", &answer);
    let results = answer["results"].as_array().expect("a list");
    let ids: Vec<&str> = results.iter().map(|result| text(result, "event_id")).collect();
    assert_eq!(ids, events.iter().map(Envelope::id).collect::<Vec<_>>());
    assert_eq!(
        results[40],
        json!({ "event_id": known.id(), "duplicate": true, "cursor": first["cursor"] })
    );
    assert!(
        results
            .iter()
            .enumerate()
            .all(|(at, result)| result["duplicate"] == (at == 40))
    );
    let positions: Vec<i64> =
        sqlx::query_scalar("SELECT seq FROM events WHERE event_type = $1 ORDER BY (payload::json->>'n')::int")
            .bind(events[0].type_name())
            .fetch_all(&site.pool)
            .await
            .expect("positions");
    assert!(positions.len() == 99 && positions.is_sorted(), "{positions:?}");

    let again = site.one().publish_as("live", &batch(&events)).await;
    assert_eq!(again.status, 200, "only repeats: {}", again.text);
    let cursors = |answer: &Value| -> Vec<String> {
        let results = answer["results"].as_array().expect("a list");
        results.iter().map(|result| text(result, "cursor").to_owned()).collect()
    };
    assert_eq!(cursors(&again.body), cursors(&answer));

    let alone = site
        .one()
        .publish_as("live", &batch(&[envelope("live")]))
        .await
        .expect(201);
    assert_eq!(
        alone["results"].as_array().map(Vec::len),
        Some(1),
        "a batch of one is answered as a batch"
    );
}

#[tokio::test]
async fn an_event_published_again_is_a_duplicate_whatever_its_body_says_now() {
    let site = Site::shared().await;
    let event = envelope("live");
    let first = site.one().publish(&event).await.expect(201);
    let changed = event
        .clone()
        .payload(json!({ "other": true }))
        .priority("low")
        .subject("other", "2");
    let again = site.two().publish(&changed).await;
    assert_eq!(again.status, 200, "{}", again.text);
    assert_valid("events.publish-result@1", &again.body);
    assert_eq!(
        again.body,
        json!({ "event_id": event.id(), "duplicate": true, "cursor": first["cursor"] })
    );
    assert!(
        stored_text(&site, event.id()).await.contains("hello"),
        "the first one stays"
    );
}

#[tokio::test]
async fn an_event_of_which_only_the_receipt_is_left_is_a_pruned_duplicate() {
    let site = Site::shared().await;
    let (event, other) = (envelope("live"), envelope("live"));
    site.one().publish(&event).await.expect(201);
    site.run(&format!("DELETE FROM events WHERE id = '{}'", event.id()))
        .await;
    let again = site.two().publish(&event).await;
    assert_eq!(again.status, 200, "{}", again.text);
    assert_eq!(
        again.text,
        format!(r#"{{"event_id":"{}","duplicate":true,"pruned":true}}"#, event.id())
    );
    assert_valid("events.publish-result@1", &again.body);
    let mixed = site
        .one()
        .publish_as("live", &batch(&[event.clone(), other]))
        .await
        .expect(201);
    assert_valid("events.publish-result@1", &mixed);
    assert_eq!(mixed["results"][0]["pruned"], true);
    assert_eq!(site.traces_of(event.id()).await, 1, "the receipt, and no event");
}

#[tokio::test]
async fn an_id_taken_by_another_owner_or_type_is_a_conflict_that_tells_nothing() {
    let site = Site::shared().await;
    let event = envelope("live").payload(json!({ "private": "peculiar" }));
    site.one().publish(&event).await.expect(201);
    let fresh = envelope("live");
    for other in [
        envelope("chat").with_id(event.id()),
        event.clone().event_type(&unique_type("live")),
    ] {
        let answer = site.two().publish(&other).await;
        refused(&answer, 409, "events.id_conflict");
        for told in ["peculiar", event.type_name(), "svc:live", "c1."] {
            assert!(!answer.text.contains(told), "{told} in {}", answer.text);
        }
        let token = other.source().to_owned();
        let body = batch(&[
            fresh
                .clone()
                .set("source", token.as_str())
                .event_type(&unique_type(&token)),
            other,
        ]);
        refused(&site.one().publish_as(&token, &body).await, 409, "events.id_conflict");
        assert_eq!(site.traces_of(fresh.id()).await, 0, "nothing of the batch is stored");
    }
}

#[tokio::test]
async fn fifty_identical_publishes_at_once_over_two_processes_store_one() {
    let site = Site::shared().await;
    for body in [envelope("live").json().clone(), batch(&envelopes("live", 3))] {
        let token = site.one().service_token("live");
        let sent = (0..50).map(|n| {
            let client = if n % 2 == 0 { site.one() } else { site.two() };
            client.post(EVENTS, Some(&token), &body)
        });
        let answers = join_all(sent).await;
        let statuses = |status| answers.iter().filter(|answer| answer.status == status).count();
        assert_eq!(
            (statuses(201), statuses(200)),
            (1, 49),
            "{:?}",
            answers.iter().map(|a| a.status).collect::<Vec<_>>()
        );
        let results = |answer: &Response| match answer.body.get("results") {
            Some(results) => results.as_array().expect("a list").clone(),
            None => vec![answer.body.clone()],
        };
        let first = results(
            answers
                .iter()
                .find(|answer| answer.status == 201)
                .expect("the one that stored"),
        );
        for answer in &answers {
            assert_valid("events.publish-result@1", &answer.body);
            for (own, first) in results(answer).iter().zip(&first) {
                assert_eq!(own["cursor"], first["cursor"], "one event, one cursor");
                assert_eq!(own["duplicate"], answer.status == 200);
            }
        }
        for event in &first {
            assert_eq!(
                site.traces_of(text(event, "event_id")).await,
                2,
                "one event and one receipt"
            );
        }
    }
}

#[tokio::test]
async fn a_trace_that_goes_round_is_stopped_at_the_hop_limit() {
    let site = Site::shared().await;
    let trace = trace();
    let sources = ["live", "chat"];
    for hop in 1..=8 {
        let event = envelope(sources[hop % 2]).set("trace_id", trace.as_str());
        site.one().publish(&event).await.expect(201);
        assert_eq!(column(&site, "hops", event.id()).await, hop.to_string());
    }
    let ninth = envelope("chat").set("trace_id", trace.as_str());
    let document = refused(&site.two().publish(&ninth).await, 409, "events.loop_detected");
    assert_eq!(document["event_id"], ninth.id());
    assert_eq!((&document["hops"], &document["max_hops"]), (&json!(8), &json!(8)));
    assert_eq!(site.traces_of(ninth.id()).await, 0);

    // The trace in the header counts as well.
    let token = site.one().service_token("chat");
    let headed = site.one().request(method_of("POST"), EVENTS, Some(&token));
    let headed = headed.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"));
    let event = envelope("chat");
    let answer = site
        .one()
        .send(
            headed
                .header(CONTENT_TYPE, "application/json")
                .body(event.json().to_string()),
        )
        .await;
    refused(&answer, 409, "events.loop_detected");
}

#[tokio::test]
async fn repeating_oneself_in_a_trace_is_counted_by_request_and_not_by_the_callers_request_id() {
    let site = Site::shared().await;
    let (trace, token) = (trace(), site.one().service_token("live"));
    let same = envelope("live").set("trace_id", trace.as_str()).subject("thing", "7");
    // A batch is one request, however many siblings it holds.
    let siblings: Vec<Envelope> = (0..20).map(|_| same.clone().with_id(&event_id())).collect();
    site.one().publish_as("live", &batch(&siblings)).await.expect(201);
    for request in 2..=9 {
        let event = same.clone().with_id(&event_id());
        let sent = site.one().request(method_of("POST"), EVENTS, Some(&token));
        let sent = sent
            .header("x-openvibe-request-id", "the-same-one")
            .header(CONTENT_TYPE, "application/json");
        let answer = site.one().send(sent.body(event.json().to_string())).await;
        assert_eq!(
            answer.status,
            if request <= 8 { 201 } else { 409 },
            "request {request}: {}",
            answer.text
        );
    }
    let other_subject = same.clone().with_id(&event_id()).subject("thing", "8");
    site.one().publish(&other_subject).await.expect(201);
}

#[tokio::test]
async fn without_a_trace_of_the_caller_the_server_makes_one_and_counts_no_hops() {
    let site = Site::shared().await;
    let event = envelope("live").subject("thing", "7");
    for _ in 0..12 {
        let next = event.clone().with_id(&event_id());
        let answer = site.one().publish(&next).await;
        let made = trace_of(answer.header("traceparent")).expect("a trace").to_owned();
        assert_eq!(answer.status, 201, "{}", answer.text);
        assert_eq!(
            column(&site, "trace_id", next.id()).await,
            made,
            "the event's trace is the answer's"
        );
    }
}

#[tokio::test]
async fn an_event_takes_its_trace_from_itself_then_from_a_well_formed_header() {
    let site = Site::shared().await;
    let (own, header) = (trace(), trace());
    let token = site.one().service_token("live");
    let publish = async |event: &Envelope, traceparent: &str| {
        let sent = site.one().request(method_of("POST"), EVENTS, Some(&token));
        let sent = sent
            .header("traceparent", traceparent)
            .header(CONTENT_TYPE, "application/json");
        let answer = site.one().send(sent.body(event.json().to_string())).await;
        assert_eq!(answer.status, 201, "{}", answer.text);
        (
            column(&site, "trace_id", event.id()).await,
            answer.header("traceparent").to_owned(),
        )
    };
    let span = "00f067aa0ba902b7";
    let (stored, answered) = publish(&envelope("live"), &format!("00-{header}-{span}-00")).await;
    assert_eq!(stored, header);
    assert!(
        answered.starts_with(&format!("00-{header}-")) && answered.ends_with("-00"),
        "{answered}"
    );
    assert!(!answered.contains(span), "a span of its own: {answered}");

    let (stored, answered) = publish(
        &envelope("live").set("trace_id", own.as_str()),
        &format!("00-{header}-{span}-01"),
    )
    .await;
    assert_eq!(
        (stored.as_str(), trace_of(&answered)),
        (own.as_str(), Some(header.as_str()))
    );

    let upper = format!("  00-{}-{}-01 ", header.to_uppercase(), span.to_uppercase());
    assert_eq!(publish(&envelope("live"), &upper).await.0, header);

    let zeros = "0".repeat(32);
    for malformed in [
        format!("01-{header}-{span}-01"),
        format!("00-{zeros}-{span}-01"),
        format!("00-{header}-0000000000000000-01"),
        format!("00-{header}-{span}"),
        format!("00-{header}-{span}-01-x"),
        format!("00-{}-{span}-01", &header[1..]),
        "nonsense".to_owned(),
    ] {
        let (stored, answered) = publish(&envelope("live"), &malformed).await;
        assert_ne!(stored, header, "{malformed}");
        assert_eq!(trace_of(&answered), Some(stored.as_str()), "{malformed}");
        assert!(answered.ends_with("-01"), "a new trace is sampled: {answered}");
    }
}

#[tokio::test]
async fn the_payload_comes_back_byte_for_byte() {
    let site = Site::shared().await;
    let payloads = [
        r#"{"n":[1.0,1e5,1E+5,-0,-0.0,0.1,1.10,100000000000000000000000001,1e400,12345678901234567890.123456789]}"#,
        r#"{"b":1,"a":2,"10":3,"9":4,"":5}"#,
        r#"{"twice":1,"twice":{"x":1,"x":2},"twice":3}"#,
        r#"{"nul":"\u0000","name\u0000":1,"lone":"\ud83d","low":"\ude00 \uDE00","escaped":"\/\u0041\u00e9\n"}"#,
        r#"{"é":"żółć 😀","\u00e9":"\ud83d\ude00","lines":"\u2028"}"#,
        r#"{"__proto__":{"x":1},"constructor":null,"toString":true}"#,
        r#"{"html":"<script>&'</script>","sql":"'; DROP TABLE events; --","percent":"%s{}"}"#,
        r#"{"empty":{},"list":[],"nested":[[[{"a":[]}]]]}"#,
        "{\"directions\":\"\u{202e}\",\"line\":\"\u{2028}\u{feff}\"}",
        "{}",
    ];
    let type_name = unique_type("live");
    let mut bodies = Vec::new();
    for payload in payloads {
        let event = envelope("live").event_type(&type_name).payload(json!("HERE"));
        let body = event.json().to_string().replacen(r#""HERE""#, payload, 1);
        let answer = publish_text(&site, &body).await;
        assert_eq!(answer.status, 201, "{payload}: {}", answer.text);
        let stored = stored_text(&site, event.id()).await;
        assert!(
            stored.ends_with(&format!(r#","payload":{payload}}}}}"#)),
            "{payload}\n{stored}"
        );
        bodies.push(stored);
    }
    let token = site.one().service_token("live");
    let page = site
        .two()
        .get(&format!("{EVENTS}?topic={type_name}"), Some(&token))
        .await;
    for body in bodies {
        assert!(
            page.text.contains(&body),
            "a page says the same as a read by id: {body}"
        );
    }

    let spaced = "{ \"a\" :\t[ 1 ,\r\n 2 ] , \"text\" : \"two  spaces \\\" kept\" }";
    let event = envelope("live").payload(json!("HERE"));
    publish_text(&site, &event.json().to_string().replacen(r#""HERE""#, spaced, 1))
        .await
        .expect(201);
    let stored = stored_text(&site, event.id()).await;
    let compact = r#"{"a":[1,2],"text":"two  spaces \" kept"}"#;
    assert!(
        stored.ends_with(&format!(r#","payload":{compact}}}}}"#)),
        "white space is removed: {stored}"
    );
}

#[tokio::test]
async fn an_envelope_is_answered_with_its_members_in_the_order_of_the_contract() {
    let site = Site::shared().await;
    let (event_id, user, trace) = (event_id(), id("usr"), trace());
    let type_name = unique_type("live");
    let body = format!(
        r#"{{"payload":{{"z":1}},"subject":{{"revision":3,"id":"s \"1\" é","type":""}},"visibility":"public","priority":"low","timestamp":"2026-10-21T10:15:30.5+02:00","on_behalf_of":{{"id":"{user}","type":"user"}},"actor":{{"id":"live","type":"system"}},"source":"live","version":2,"event_type":"{type_name}","trace_id":"{trace}","event_id":"{event_id}"}}"#
    );
    let result = publish_text(&site, &body).await.expect(201);
    let expected = format!(
        r#"{{"cursor":"{}","event":{{"event_id":"{event_id}","trace_id":"{trace}","event_type":"{type_name}","version":2,"source":"live","actor":{{"type":"system","id":"live"}},"on_behalf_of":{{"type":"user","id":"{user}"}},"timestamp":"2026-10-21T10:15:30.5+02:00","priority":"low","visibility":"public","subject":{{"type":"","id":"s \"1\" é","revision":3}},"payload":{{"z":1}}}}}}"#,
        text(&result, "cursor")
    );
    assert_eq!(stored_text(&site, &event_id).await, expected);

    let plain = envelope("live");
    let result = site.one().publish(&plain).await.expect(201);
    let trace = column(&site, "trace_id", plain.id()).await;
    let expected = format!(
        r#"{{"cursor":"{}","event":{{"event_id":"{}","trace_id":"{trace}","event_type":"{}","version":1,"source":"live","actor":{{"type":"service","id":"live"}},"timestamp":"{}","priority":"important","visibility":"internal","subject":{{"type":"thing","id":"1"}},"payload":{{"greeting":"hello"}}}}}}"#,
        text(&result, "cursor"),
        plain.id(),
        plain.type_name(),
        text(plain.json(), "timestamp"),
    );
    assert_eq!(stored_text(&site, plain.id()).await, expected);
}

#[tokio::test]
async fn sizes_are_judged_at_their_exact_limits() {
    let site = Site::shared().await;
    let of_payload = |bytes: usize| envelope("live").payload(json!({ "t": "x".repeat(bytes - r#"{"t":""}"#.len()) }));
    site.one().publish(&of_payload(65_536)).await.expect(201);
    let document = refused(
        &site.one().publish(&of_payload(65_537)).await,
        413,
        "events.payload_too_large",
    );
    assert_eq!(document["limit"], 65_536);
    // Counted in bytes, and without the white space that is not kept.
    let wide = envelope("live").payload(json!({ "t": "é".repeat(32_765) }));
    refused(&site.one().publish(&wide).await, 413, "events.payload_too_large");
    let spaced = envelope("live").payload(json!("HERE"));
    let spaced = spaced
        .json()
        .to_string()
        .replacen(r#""HERE""#, &format!("{{{}}}", " ".repeat(70_000)), 1);
    publish_text(&site, &spaced).await.expect(201);

    for (member, longest) in [("type", "é".repeat(512)), ("id", "x".repeat(1024))] {
        let mut subject = json!({ "type": "thing", "id": "1" });
        subject[member] = longest.into();
        site.one()
            .publish(&envelope("live").set("subject", subject))
            .await
            .expect(201);
    }
    let long_type = format!("live.{}.{}", "a".repeat(509), "b".repeat(509));
    assert_eq!(long_type.len(), 1024);
    site.one()
        .publish(&envelope("live").event_type(&long_type))
        .await
        .expect(201);
    let last_number = envelope("live").set("version", 9_007_199_254_740_991_i64);
    site.one().publish(&last_number).await.expect(201);

    let limit = 2 * 1024 * 1024;
    let event = envelope("live").json().to_string();
    let padded = |bytes: usize| format!("{event}{}", " ".repeat(bytes - event.len()));
    let document = refused(
        &publish_text(&site, &padded(limit + 1)).await,
        413,
        "events.batch_too_large",
    );
    assert_eq!(document["limit"], limit);
    publish_text(&site, &padded(limit)).await.expect(201);
}

#[tokio::test]
async fn depth_is_judged_at_its_limit() {
    let site = Site::shared().await;
    // The envelope and the payload are two of the levels.
    let nested = |levels: usize| {
        let event = envelope("live").payload(json!("HERE"));
        let inner = format!("{{\"a\":{}{}}}", "[".repeat(levels - 2), "]".repeat(levels - 2));
        event.json().to_string().replacen(r#""HERE""#, &inner, 1)
    };
    publish_text(&site, &nested(128)).await.expect(201);
    refused(&publish_text(&site, &nested(129)).await, 400, "events.bad_json");
    refused(
        &publish_text(&site, &"[".repeat(1_000_000)).await,
        400,
        "events.bad_json",
    );
    refused(
        &publish_text(&site, &r#"{"a":"#.repeat(200_000)).await,
        400,
        "events.bad_json",
    );
}

#[tokio::test]
async fn bytes_that_are_not_utf_8_are_refused() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    for bad in [
        &b"\xff"[..],
        b"\xc3\x28",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xc0\x80",
    ] {
        let event = envelope("live");
        let mut body = event.json().to_string().into_bytes();
        let at = body
            .windows(5)
            .position(|window| window == b"hello")
            .expect("the greeting");
        body.splice(at..at, bad.iter().copied());
        let request = site.one().request(method_of("POST"), EVENTS, Some(&token));
        let answer = site
            .one()
            .send(request.header(CONTENT_TYPE, "application/json").body(body))
            .await;
        refused(&answer, 400, "events.bad_json");
        assert_eq!(site.traces_of(event.id()).await, 0);
    }
}

#[tokio::test]
async fn hostile_text_in_the_envelopes_own_fields_is_refused_and_harmless_text_is_kept() {
    let site = Site::shared().await;
    for (good, bad, path) in [
        (r#""id":"1""#, r#""id":"\u0000""#, "/subject/id"),
        (r#""id":"1""#, r#""id":"\ud800""#, "/subject/id"),
        (r#""id":"1""#, r#""id":"1","id":"2""#, "/subject/id"),
        (r#""id":"1""#, r#""id":"1","\u0069d":"2""#, "/subject/id"),
        (r#""version":1"#, r#""version":1,"payload":{}"#, "/payload"),
        (r#""version":1"#, r#""version":1,"\u0073eq":5"#, "/seq"),
    ] {
        let event = envelope("live");
        let body = event.json().to_string().replacen(good, bad, 1);
        let document = refused(&publish_text(&site, &body).await, 422, "events.invalid_envelope");
        assert_eq!(document["errors"][0]["path"], path, "{document}");
        assert_eq!(site.traces_of(event.id()).await, 0);
    }
    for harmless in [
        "'; DROP TABLE events; --",
        "é\u{301}😀",
        "\u{202e}",
        " ",
        "%00",
        "\\",
        "\u{7f}\u{1}",
    ] {
        let event = envelope("live").subject(harmless, harmless);
        site.one().publish(&event).await.expect(201);
        let read: Value = serde_json::from_str(&stored_text(&site, event.id()).await).expect("JSON");
        assert_eq!(read["event"]["subject"], event.json()["subject"]);
    }
}

#[tokio::test]
async fn a_redaction_is_refused_however_it_is_spelt_until_it_can_be_carried_out() {
    let site = Site::shared().await;
    for payload in [
        r#"{"redacts":{"event_ids":["evt_01K7AAB2CD3EF4GH5JK6MN7PQR"]}}"#,
        r#"{"redacts":{}}"#,
        r#"{"redacts":null}"#,
        r#"{"a":1,"\u0072edacts":{"event_ids":[]}}"#,
        r#"{"redacts":1,"redacts":2}"#,
    ] {
        let event = envelope("live").payload(json!("HERE"));
        let body = event.json().to_string().replacen(r#""HERE""#, payload, 1);
        refused(&publish_text(&site, &body).await, 501, "events.not_built");
        assert_eq!(site.traces_of(event.id()).await, 0, "{payload}");
    }
    let nested = envelope("live").payload(json!({ "inner": { "redacts": { "event_ids": [] } }, "redacts_": 1 }));
    site.one().publish(&nested).await.expect(201);
}

#[tokio::test]
async fn a_body_may_come_packed_and_as_any_kind_of_json() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    let event = envelope("live");
    let request = site.one().request(method_of("POST"), EVENTS, Some(&token));
    let request = request
        .header(CONTENT_TYPE, "application/json")
        .header(CONTENT_ENCODING, "gzip");
    site.one()
        .send(request.body(packed(&event.json().to_string())))
        .await
        .expect(201);
    assert!(stored_text(&site, event.id()).await.contains("hello"));
    for content_type in [
        "application/json; charset=utf-8",
        "Application/JSON;Charset=\"UTF-8\"",
        "application/cloudevents+json",
    ] {
        let request = site.one().request(method_of("POST"), EVENTS, Some(&token));
        let request = request.header(CONTENT_TYPE, content_type);
        site.one()
            .send(request.body(envelope("live").json().to_string()))
            .await
            .expect(201);
    }
}

#[tokio::test]
async fn a_source_publishes_in_its_own_and_the_shared_namespaces_only() {
    let site = Site::shared().await;
    for allowed in [unique_type("live"), format!("provider.{}.x", "a1")] {
        site.one()
            .publish(&envelope("live").event_type(&allowed))
            .await
            .expect(201);
    }
    for denied in ["chat.a.b", "lives.a.b", "app.p01k7.x.y", "openvibe.a.b"] {
        let answer = site.one().publish(&envelope("live").event_type(denied)).await;
        refused(&answer, 403, "events.type_not_allowed");
    }
    // Holding the capability is not being a source.
    let stranger = consumer();
    let event = envelope(&stranger).event_type("provider.a.b");
    let token = TokenSpec::service(&stranger).sign();
    refused(
        &site.one().post(EVENTS, Some(&token), event.json()).await,
        403,
        "events.unknown_source",
    );
}

#[tokio::test]
async fn members_beside_the_events_of_a_batch_are_ignored_and_an_event_id_makes_it_one_envelope() {
    let site = Site::shared().await;
    let event = envelope("live");
    let body = json!({ "events": [event.json()], "note": "kept out", "version": 3 });
    site.one().publish_as("live", &body).await.expect(201);
    let other = envelope("live");
    let mixed = json!({ "events": [other.json()], "event_id": event_id() });
    let document = refused(
        &site.one().publish_as("live", &mixed).await,
        422,
        "events.invalid_envelope",
    );
    assert!(document.get("index").is_none(), "{document}");
    assert_eq!(site.traces_of(other.id()).await, 0);
}

/// A fresh trace id.
fn trace() -> String {
    hex::encode(ulid::Ulid::generate().to_bytes())
}
