//! Where a stream begins, and what it has to say of what it leaves out.

use crate::domain::cursor::Cursor;
use crate::store::StartBounds;

use super::frame::{Gap, Reason};

/// How a stream begins.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Start {
    /// Said first, in this order.
    pub(super) gaps: Vec<Gap>,
    /// Events after this position are sent.
    pub(super) after: i64,
    /// Public events before this position are not.
    pub(super) public_from: i64,
}

/// Decides from a client's position and the bounds of the log. `window_s` is how far back public events are sent again
/// to this viewer, `None` where that is not limited; `public_only` says that it sees no others.
pub(super) fn start(position: Option<Cursor>, bounds: &StartBounds, window_s: Option<u64>, public_only: bool) -> Start {
    let at = bounds.positions;
    let gap = |reason, from_seq, to_seq| Gap {
        reason,
        from_seq,
        to_seq,
        latest_seq: at.head,
        window_seconds: None,
    };
    let mut start = Start {
        gaps: Vec::new(),
        after: at.head,
        public_from: bounds.public_from,
    };
    let Some(cursor) = position else { return start };
    (start.gaps, start.after) = match cursor.position {
        _ if cursor.epoch != at.epoch => (vec![gap(Reason::Epoch, 1, at.floor)], at.floor),
        ahead if ahead > at.head => (vec![gap(Reason::CursorAhead, at.head + 1, ahead)], at.head),
        gone if gone < at.floor => (vec![gap(Reason::Retention, gone + 1, at.floor)], at.floor),
        known => (Vec::new(), known),
    };
    if let Some(seconds) = window_s
        && start.after < start.public_from - 1
    {
        start.gaps.push(Gap {
            window_seconds: Some(seconds),
            ..gap(Reason::PublicWindow, start.after + 1, start.public_from - 1)
        });
        if public_only {
            start.after = start.public_from - 1;
        }
    }
    start
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Positions;

    fn bounds(public_from: i64) -> StartBounds {
        StartBounds {
            positions: Positions {
                epoch: 2,
                head: 50,
                floor: 10,
            },
            public_from,
        }
    }

    fn said(position: Option<(i64, i64)>, public_from: i64, public_only: bool) -> (Vec<(Reason, i64, i64)>, i64) {
        let position = position.map(|(epoch, position)| Cursor { epoch, position });
        let start = start(position, &bounds(public_from), Some(300), public_only);
        assert!(start.gaps.iter().all(|gap| gap.latest_seq == 50));
        let gaps = start
            .gaps
            .iter()
            .map(|gap| (gap.reason, gap.from_seq, gap.to_seq))
            .collect();
        (gaps, start.after)
    }

    #[test]
    fn a_stream_without_a_position_begins_at_the_head_and_has_missed_nothing() {
        assert_eq!(said(None, 51, true), (vec![], 50));
    }

    #[test]
    fn a_position_that_the_log_does_not_have_is_told() {
        assert_eq!(said(Some((2, 50)), 0, true), (vec![], 50));
        assert_eq!(said(Some((2, 10)), 0, true), (vec![], 10));
        assert_eq!(said(Some((2, 9)), 0, true), (vec![(Reason::Retention, 10, 10)], 10));
        assert_eq!(said(Some((2, 60)), 0, true), (vec![(Reason::CursorAhead, 51, 60)], 50));
        assert_eq!(said(Some((1, 40)), 0, true), (vec![(Reason::Epoch, 1, 10)], 10));
        assert_eq!(said(Some((3, 40)), 0, true), (vec![(Reason::Epoch, 1, 10)], 10));
    }

    #[test]
    fn public_events_from_before_the_window_are_told_and_a_person_keeps_what_is_hers() {
        let window = |from, to| (Reason::PublicWindow, from, to);
        assert_eq!(said(Some((2, 20)), 31, true), (vec![window(21, 30)], 30));
        assert_eq!(said(Some((2, 20)), 31, false), (vec![window(21, 30)], 20));
        assert_eq!(said(Some((2, 30)), 31, true), (vec![], 30));
        let both = vec![(Reason::Retention, 6, 10), window(11, 30)];
        assert_eq!(said(Some((2, 5)), 31, false), (both, 10));
        let unlimited = start(Some(Cursor { epoch: 2, position: 20 }), &bounds(0), None, false);
        assert_eq!((unlimited.gaps, unlimited.after), (vec![], 20));
    }
}
