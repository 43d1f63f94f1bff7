//! The figures that are told, and their aims.

/// One line of the table.
#[derive(Debug)]
pub(crate) struct Figure {
    /// What is measured.
    pub(crate) name: &'static str,
    /// What it should be.
    pub(crate) aim: &'static str,
    /// How the measured value and its reference are named, with their unit.
    pub(crate) units: (&'static str, &'static str),
    /// The value.
    pub(crate) measured: Source,
    /// What it is divided by.
    pub(crate) against: Against,
    /// Where the ratio must be, or the value where it is divided by nothing.
    pub(crate) bound: Bound,
}

/// A value of a measure's sheet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source(pub(crate) &'static str, pub(crate) &'static str);

/// What a measured value is divided by.
#[derive(Debug)]
pub(crate) enum Against {
    /// Another value of the same round.
    Value(Source),
    /// The middle one of several values of the same round.
    Middle(&'static [Source]),
    /// The floor and two commits at one client, in milliseconds.
    FloorAndTwoCommits,
    /// Nothing: it is judged as it is.
    Nothing,
}

/// How a figure is judged.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bound {
    /// More is better.
    AtLeast(f64),
    /// Less is better.
    AtMost(f64),
}

/// The latency of publishes while a broker is in trouble, beside `pg-v1` alone in the same minutes.
macro_rules! trouble {
    ($broker:literal $does:literal $since:literal, $measure:literal beside $alone:ident) => {
        Figure {
            name: concat!(
                "publish at 200/s with all delivered, while ",
                $broker,
                " ",
                $does,
                " ",
                $since,
                ", p99"
            ),
            aim: "≤ 1.3 × `pg-v1` alone",
            units: ("ms", "alone, ms"),
            measured: Source($measure, "publish_p99_ms"),
            against: Against::Middle(&$alone),
            bound: Bound::AtMost(1.3),
        }
    };
}

/// From a publish to one process until the arrival from another one.
macro_rules! wake {
    ($carrier:literal, $measure:literal) => {
        Figure {
            name: concat!(
                "publish to one process → received from another, poll 5 s, ",
                $carrier,
                ", p50"
            ),
            aim: "< 5 ms",
            units: ("ms", ""),
            measured: Source($measure, "received_p50_ms"),
            against: Against::Nothing,
            bound: Bound::AtMost(5.0),
        }
    };
}

const ALONE_BOOT: [Source; 3] = [
    Source("valkey_alone_boot", "publish_p99_ms"),
    Source("nats_alone_boot", "publish_p99_ms"),
    Source("cloud_alone_boot", "publish_p99_ms"),
];
const ALONE_LOAD: [Source; 3] = [
    Source("valkey_alone_load", "publish_p99_ms"),
    Source("nats_alone_load", "publish_p99_ms"),
    Source("cloud_alone_load", "publish_p99_ms"),
];
const R1: Against = Against::Value(Source("r1", "per_s"));

pub(crate) const FIGURES: &[Figure] = &[
    Figure {
        name: "publish, one event a request, 64 connections, no subscription",
        aim: "≥ 1.0 × R1",
        units: ("events/s", "R1, rows/s"),
        measured: Source("publish", "published_per_s"),
        against: R1,
        bound: Bound::AtLeast(1.0),
    },
    Figure {
        name: "publish, one event a request, 1 connection",
        aim: "≥ 0.6 × the same pgbench with one client",
        units: ("events/s", "one client, rows/s"),
        measured: Source("publish_one_connection", "published_per_s"),
        against: Against::Value(Source("r1_one_client", "per_s")),
        bound: Bound::AtLeast(0.6),
    },
    Figure {
        name: "publish, batches of 100, 8 connections",
        aim: "≥ 0.5 × R100",
        units: ("events/s", "R100, rows/s"),
        measured: Source("publish_batches", "published_per_s"),
        against: Against::Value(Source("r100", "per_s")),
        bound: Bound::AtLeast(0.5),
    },
    Figure {
        name: "publish and deliver to one fast receiver, `max_inflight` 16, 64 connections, no backlog left",
        aim: "≥ 0.45 × R1",
        units: ("events/s, the wait for the last one included", "R1, rows/s"),
        measured: Source("deliver", "delivered_per_s"),
        against: R1,
        bound: Bound::AtLeast(0.45),
    },
    Figure {
        name: "publish → received at 200/s, open loop, p50",
        aim: "≤ floor + 2 × one commit at one client",
        units: ("ms", "floor + 2 commits, ms"),
        measured: Source("e2e", "received_p50_ms"),
        against: Against::FloorAndTwoCommits,
        bound: Bound::AtMost(1.0),
    },
    Figure {
        name: "publish → received at 200/s, open loop, p99",
        aim: "≤ 4 × p50",
        units: ("ms", "p50, ms"),
        measured: Source("e2e", "received_p99_ms"),
        against: Against::Value(Source("e2e", "received_p50_ms")),
        bound: Bound::AtMost(4.0),
    },
    Figure {
        name: "ten subscriptions at 200 events/s beside one that hangs, one that drips and one that fails, p99",
        aim: "≤ 1.5 × their p99 alone",
        units: ("ms", "alone, ms"),
        measured: Source("fair", "received_p99_ms"),
        against: Against::Value(Source("fair_alone", "received_p99_ms")),
        bound: Bound::AtMost(1.5),
    },
    Figure {
        name: "twenty subscriptions at 50 events/s beside one that hangs, p95",
        aim: "≤ 1.2 × their p95 alone",
        units: ("ms", "alone, ms"),
        measured: Source("beside_one", "received_p95_ms"),
        against: Against::Value(Source("beside_none", "received_p95_ms")),
        bound: Bound::AtMost(1.2),
    },
    Figure {
        name: "drain of 100,000 waiting deliveries over 20 subscriptions",
        aim: "≥ 0.15 × pgbench claiming and settling in fifties",
        units: ("deliveries/s", "pgbench, rows/s"),
        measured: Source("drain", "delivered_per_s"),
        against: Against::Value(Source("reference_drain", "per_s")),
        bound: Bound::AtLeast(0.15),
    },
    Figure {
        name: "pull, pages of 1,000",
        aim: "≥ 0.4 × COPY of the same rows",
        units: ("rows/s", "COPY, rows/s"),
        measured: Source("pull", "rows_per_s"),
        against: Against::Value(Source("copy", "per_s")),
        bound: Bound::AtLeast(0.4),
    },
    Figure {
        name: "one claim with 1,000,000 rows waiting, one key blocked in front of 300,000",
        aim: "≤ 1.3 × the same with 1,000 rows",
        units: ("ms", "1,000 rows, ms"),
        measured: Source("claim", "full_ms"),
        against: Against::Value(Source("claim", "small_ms")),
        bound: Bound::AtMost(1.3),
    },
    Figure {
        name: "CPU of service and PostgreSQL per published event at saturation",
        aim: "≤ 130 µs",
        units: ("µs", ""),
        measured: Source("publish", "cpu_us_per_event"),
        against: Against::Nothing,
        bound: Bound::AtMost(130.0),
    },
    Figure {
        name: "CPU of service and PostgreSQL per delivered event, its publishing included",
        aim: "≤ 300 µs",
        units: ("µs", ""),
        measured: Source("deliver", "cpu_us_per_event"),
        against: Against::Nothing,
        bound: Bound::AtMost(300.0),
    },
    Figure {
        name: "RSS idle",
        aim: "≤ 60 MB",
        units: ("MB", ""),
        measured: Source("idle", "rss_mb"),
        against: Against::Nothing,
        bound: Bound::AtMost(60.0),
    },
    Figure {
        name: "RSS after the publishes",
        aim: "≤ 150 MB",
        units: ("MB", ""),
        measured: Source("memory", "rss_service_mb"),
        against: Against::Nothing,
        bound: Bound::AtMost(150.0),
    },
    Figure {
        name: "publish to one subscription, QUEUE, TOPIC and STREAM by turns, 64 connections, all five carriers",
        aim: "≥ 0.9 × `pg-v1` alone",
        units: ("events/s", "alone, events/s"),
        measured: Source("carriers_all", "published_per_s"),
        against: Against::Value(Source("carriers_alone", "published_per_s")),
        bound: Bound::AtLeast(0.9),
    },
    trouble!("Valkey" "refuses" "from the start", "valkey_dead_boot" beside ALONE_BOOT),
    trouble!("Valkey" "never answers" "from the start", "valkey_stalled_boot" beside ALONE_BOOT),
    trouble!("Valkey" "is 200 ms late" "from the start", "valkey_slow_boot" beside ALONE_BOOT),
    trouble!("Valkey" "refuses" "from mid-load", "valkey_dead_load" beside ALONE_LOAD),
    trouble!("Valkey" "never answers" "from mid-load", "valkey_stalled_load" beside ALONE_LOAD),
    trouble!("Valkey" "is 200 ms late" "from mid-load", "valkey_slow_load" beside ALONE_LOAD),
    trouble!("NATS" "refuses" "from the start", "nats_dead_boot" beside ALONE_BOOT),
    trouble!("NATS" "never answers" "from the start", "nats_stalled_boot" beside ALONE_BOOT),
    trouble!("NATS" "is 200 ms late" "from the start", "nats_slow_boot" beside ALONE_BOOT),
    trouble!("NATS" "refuses" "from mid-load", "nats_dead_load" beside ALONE_LOAD),
    trouble!("NATS" "never answers" "from mid-load", "nats_stalled_load" beside ALONE_LOAD),
    trouble!("NATS" "is 200 ms late" "from mid-load", "nats_slow_load" beside ALONE_LOAD),
    trouble!("the cloud queue" "refuses" "from the start", "cloud_dead_boot" beside ALONE_BOOT),
    trouble!("the cloud queue" "never answers" "from the start", "cloud_stalled_boot" beside ALONE_BOOT),
    trouble!("the cloud queue" "is 200 ms late" "from the start", "cloud_slow_boot" beside ALONE_BOOT),
    trouble!("the cloud queue" "refuses" "from mid-load", "cloud_dead_load" beside ALONE_LOAD),
    trouble!("the cloud queue" "never answers" "from mid-load", "cloud_stalled_load" beside ALONE_LOAD),
    trouble!("the cloud queue" "is 200 ms late" "from mid-load", "cloud_slow_load" beside ALONE_LOAD),
    wake!("`valkey-v1`", "wake_valkey"),
    wake!("`nats-v1`", "wake_nats"),
    wake!("`nats-js-v1`", "wake_jetstream"),
    wake!("the doorbell of `pg-v1`", "wake_doorbell"),
    Figure {
        name: "10,000 live streams, processor time of the service for each frame",
        aim: "≤ 1.25 × a bare writer",
        units: ("µs", "bare writer, µs"),
        measured: Source("sse", "cpu_service_us_per_event"),
        against: Against::Value(Source("sse_writer", "cpu_service_us_per_event")),
        bound: Bound::AtMost(1.25),
    },
    Figure {
        name: "10,000 live streams, commit → the last of ten that follow a narrow topic, p99",
        aim: "≤ 20 ms",
        units: ("ms", ""),
        measured: Source("sse", "narrow_p99_ms"),
        against: Against::Nothing,
        bound: Bound::AtMost(20.0),
    },
    Figure {
        name: "10,000 idle live streams, memory of each",
        aim: "≤ 12 KB",
        units: ("KiB", ""),
        measured: Source("sse", "rss_kb_per_connection"),
        against: Against::Nothing,
        bound: Bound::AtMost(11.7),
    },
];
