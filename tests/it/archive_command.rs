//! The archive command as operators run it.

use std::process::{Command, Output};

use serde_json::Value;

use crate::{
    archive_months::Months,
    store_fixture::{event_of, put},
};

fn run(months: &Months, arguments: &[&str], env: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_openvibe-events"))
        .arg("archive")
        .args(arguments)
        .env_clear()
        .env("DATABASE_URL", months.fixture.url())
        .env("EVENTS_ARCHIVE_DIR", months.directory.path().join("archive"))
        .envs(env.iter().copied())
        .output()
        .expect("the binary runs")
}

fn answer(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[tokio::test(flavor = "multi_thread")]
async fn status_export_and_restore_answer_json_and_exit_codes() {
    let months = Months::new().await;
    let all = months.fill(3, 3).await;
    put(&months.fixture.store, None, &[event_of("live.hot.x")], None)
        .await
        .expect("stored");
    let status = answer(&run(&months, &["status"], &[]));
    assert_eq!(
        status["replay"],
        serde_json::json!([{"month": "2024-03", "rows": 3, "first_seq": all[0], "last_seq": all[2], "held": 0}])
    );
    assert_eq!(
        (&status["hot"]["rows"], &status["hot"]["oldest_seq"]),
        (&Value::from(1), &Value::from(all[2] + 1))
    );
    let done = answer(&run(&months, &["export", "--month", "2024-03"], &[]));
    let members: Vec<&String> = done.as_object().expect("an object").keys().collect();
    assert_eq!(
        members,
        ["changed", "count", "deleted", "exported", "month", "object", "storage"]
    );
    assert_eq!(
        (&done["deleted"], &done["object"]),
        (&Value::from(3), &Value::from("2024/events-2024-03.ndjson.gz"))
    );
    let back = answer(&run(
        &months,
        &["restore", "--month", "2024-03", "--hold-days", "2", "--json"],
        &[],
    ));
    assert_eq!(back["inserted"], 3);
    assert_eq!(
        answer(&run(&months, &["status", "--json"], &[]))["replay"][0]["held"],
        3
    );
    for arguments in [
        &["export", "--month", "2024-13"][..],
        &["export", "--month", "nope"],
        &["export"],
        &["restore"],
        &["restore", "--month", "2024-03", "--hold-days", "0"],
        &["export", "--month", "2024-03", "--older-than-days", "-1"],
        &["restore", "--month", "../../x"],
        &["frobnicate"],
        &[],
    ] {
        assert_eq!(run(&months, arguments, &[]).status.code(), Some(2), "{arguments:?}");
    }
    for (arguments, env, words) in [
        (
            &["restore", "--month", "2020-01"][..],
            &[][..],
            "holds no events of 2020-01",
        ),
        (&["export", "--month", "9998-01"], &[], "has not ended yet"),
        (
            &["status"],
            &[("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")],
            "database",
        ),
    ] {
        let output = run(&months, arguments, env);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    let output = run(
        &months,
        &["export", "--month", "2024-03"],
        &[("EVENTS_ARCHIVE_S3_BUCKET", "b")],
    );
    assert_eq!(output.status.code(), Some(2));
}
