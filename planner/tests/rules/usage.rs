//! The usage of a month: what it forecasts, and when it makes the planner think again.

use openvibe_events_planner::{Month, Usage};

use crate::offers::NOW_MS;

const DAY_MS: i64 = 86_400_000;
/// 2026-10-01T00:00:00Z.
const OCTOBER_MS: i64 = 1_790_812_800_000;
/// 2026-11-01T00:00:00Z.
const NOVEMBER_MS: i64 = OCTOBER_MS + 31 * DAY_MS;

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= expected.abs() * 1e-9
}

#[test]
fn a_month_is_the_calendars_in_utc() {
    for (now, start, end) in [
        (NOW_MS, OCTOBER_MS, NOVEMBER_MS),
        (OCTOBER_MS, OCTOBER_MS, NOVEMBER_MS),
        (NOVEMBER_MS - 1, OCTOBER_MS, NOVEMBER_MS),
        (NOVEMBER_MS, NOVEMBER_MS, NOVEMBER_MS + 30 * DAY_MS),
        // February of a leap year, and the turn of a year.
        (1_709_164_800_000, 1_706_745_600_000, 1_709_251_200_000),
        (1_798_761_599_999, 1_796_083_200_000, 1_798_761_600_000),
    ] {
        assert_eq!(
            Month::of(now),
            Month {
                start_ms: start,
                end_ms: end
            },
            "{now}"
        );
    }
}

#[test]
fn usage_goes_on_as_it_went_and_begins_anew_each_month() {
    let mut usage = Usage::new(OCTOBER_MS);
    usage.add("valkey", "signal-operation", 600, OCTOBER_MS + DAY_MS);
    usage.add("valkey", "signal-operation", 400, OCTOBER_MS + 2 * DAY_MS);
    usage.set("nats", "signal-operation", 7, OCTOBER_MS + 2 * DAY_MS);
    let half = OCTOBER_MS + 31 * DAY_MS / 2;
    assert!(close(usage.used("valkey", "signal-operation", half), 1000.0));
    let states = usage.states(half);
    let valkey = states.get("valkey").expect("counted");
    assert_eq!(
        (valkey.period_start_ms, valkey.period_end_ms),
        (OCTOBER_MS, NOVEMBER_MS)
    );
    assert!(close(valkey.usage["signal-operation"], 1000.0));
    assert!(close(valkey.expected("signal-operation", half), 2000.0));
    assert!(close(
        states.get("nats").expect("counted").expected("signal-operation", half),
        14.0
    ));
    assert!(close(valkey.expected("another", half), 0.0));

    assert!(
        usage.states(NOVEMBER_MS).get("valkey").is_none(),
        "an old month says nothing of the new one"
    );
    assert!(close(usage.used("valkey", "signal-operation", NOVEMBER_MS), 0.0));
    usage.add("valkey", "signal-operation", 1, NOVEMBER_MS);
    assert!(close(usage.used("valkey", "signal-operation", NOVEMBER_MS), 1.0));
}

/// Ten signals in the first second of a month are no sign of thirty million.
#[test]
fn the_first_day_of_a_month_forecasts_no_flood() {
    let mut usage = Usage::new(OCTOBER_MS);
    usage.add("valkey", "signal-operation", 10, OCTOBER_MS);
    let states = usage.states(OCTOBER_MS + 1000);
    let expected = states
        .get("valkey")
        .expect("counted")
        .expected("signal-operation", OCTOBER_MS + 1000);
    assert!(close(expected, 310.0), "{expected}");
}
