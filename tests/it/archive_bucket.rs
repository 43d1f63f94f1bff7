//! The archive in a bucket of a real server that checks keys, with the line cut at every step.

use openvibe_events::{
    archive::{ArchiveError, Storage},
    config::{Archive, ArchiveS3, Credentials, Secret},
};

use crate::{
    archive_months::Months,
    store_fixture::events_of,
    support::{dice::Dice, envelopes::unique_segment, process::setting, proxy::Proxy},
    tiers_world::rows,
};

fn archive(endpoint: &str, prefix: &str, secret: &str) -> Archive {
    let named = |name: &str| {
        setting::<String>(name).unwrap_or_else(|| panic!("{name} is not set: eval \"$(scripts/services.sh up sqs)\""))
    };
    let secret = if secret.is_empty() {
        named("OV_TEST_SQS_SECRET_KEY")
    } else {
        secret.to_owned()
    };
    Archive {
        dir: "/nonexistent".into(),
        scratch: std::env::temp_dir(),
        s3: Some(ArchiveS3 {
            bucket: "events".to_owned(),
            endpoint: Some(endpoint.to_owned()),
            region: "us-east-1".to_owned(),
            credentials: Some(Credentials {
                access_key: named("OV_TEST_SQS_ACCESS_KEY"),
                secret_key: Secret::new(secret),
            }),
            prefix: format!("{prefix}/"),
        }),
    }
}

fn server() -> String {
    setting("OV_TEST_S3_URL").expect("OV_TEST_S3_URL is not set: eval \"$(scripts/services.sh up sqs)\"")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_month_goes_into_a_bucket_and_back_and_a_wrong_key_takes_nothing() {
    let months = Months::new().await;
    months.fill(3, 300).await;
    let image = months.image().await;
    let prefix = unique_segment();
    let wrong = Storage::open(&archive(&server(), &prefix, "wrong")).expect("settings");
    let error = months.export_to(&wrong).await.expect_err("a wrong key");
    let ArchiveError::Bucket { hint, .. } = &error else {
        panic!("{error}")
    };
    assert!(hint.contains("access key"), "{error}: {hint}");
    assert_eq!(months.image().await, image);
    let right = Storage::open(&archive(&server(), &prefix, "")).expect("settings");
    assert!(
        right.name().ends_with(&format!("/events/{prefix}/")),
        "{}",
        right.name()
    );
    assert_eq!(months.export_to(&right).await.expect("exported").deleted, 300);
    assert!(matches!(
        months.restore_from(&wrong).await,
        Err(ArchiveError::Bucket { .. })
    ));
    assert_eq!(months.restore_from(&right).await.expect("restored").inserted, 300);
    assert_eq!(months.image().await, image);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_cut_at_any_step_loses_and_doubles_nothing() {
    let proxy = Proxy::start(server().trim_start_matches("http://")).await;
    let through = format!("http://{}", proxy.address());
    let months = Months::new().await;
    months.fill(3, 20).await;
    let image = months.image().await;
    let prefix = unique_segment();
    let place = Storage::open(&archive(&through, &prefix, "")).expect("settings");
    let direct = Storage::open(&archive(&server(), &prefix, "")).expect("settings");
    // Each round is cut one piece later than the one before, on its way there or back.
    for answers in [false, true] {
        for pieces in 0..60 {
            if answers {
                proxy.cut_after_answers(pieces);
            } else {
                proxy.cut_after_asking(pieces);
            }
            let done = months.export_to(&place).await;
            proxy.restore();
            if let Ok(done) = done {
                assert_eq!((done.exported, done.count), (20, 20));
                break;
            }
            assert!(pieces < 59, "an export takes fewer pieces");
            // Whatever was cut: every event is in the database until it is in the archive.
            assert_eq!(months.image().await, image);
        }
        assert_eq!(rows(&months.fixture, "events_archive").await, 0);
        for pieces in 0..60 {
            if answers {
                proxy.cut_after_answers(pieces);
            } else {
                proxy.cut_after_asking(pieces);
            }
            let done = months.restore_from(&place).await;
            proxy.restore();
            if let Ok(done) = done {
                assert_eq!(done.count, 20);
                break;
            }
            assert!(pieces < 59, "a restore takes fewer pieces");
        }
        assert_eq!(months.image().await, image);
    }
    assert_eq!(months.export_to(&direct).await.expect("exported").deleted, 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_several_parts_comes_back_whole() {
    let months = Months::new().await;
    // Noise, so that the object is larger than a part.
    let mut events = events_of("live.noise.x", 250);
    let mut dice = Dice::of(1);
    for event in &mut events {
        let noise: String = (0..60_000)
            .map(|_| char::from(b'0' + u8::try_from(dice.below(64)).expect("small")))
            .collect();
        event.payload = serde_json::json!({ "noise": noise }).to_string();
    }
    months.fill_with(3, &events).await;
    let image = months.image().await;
    let place = Storage::open(&archive(&server(), &unique_segment(), "")).expect("settings");
    assert_eq!(months.export_to(&place).await.expect("exported").deleted, 250);
    assert_eq!(months.restore_from(&place).await.expect("restored").inserted, 250);
    assert_eq!(months.image().await, image);
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let open = |change: &dyn Fn(&mut ArchiveS3)| {
        let mut archive = archive("http://127.0.0.1:1", "x", "secret");
        change(archive.s3.as_mut().expect("a bucket"));
        Storage::open(&archive)
    };
    for (endpoint, fits) in [
        ("http://store.example.org", false),
        ("http://127.0.0.1.example.org", false),
        ("https://store.example.org", true),
        ("http://[::1]:9000", true),
        ("http://localhost:9000", true),
    ] {
        let opened = open(&|s3| s3.endpoint = Some(endpoint.to_owned()));
        assert_eq!(opened.is_ok(), fits, "{endpoint}");
    }
    assert!(matches!(open(&|s3| s3.endpoint = None), Err(ArchiveError::Settings(_))));
    assert!(matches!(
        open(&|s3| s3.credentials = None),
        Err(ArchiveError::Settings(_))
    ));
}
