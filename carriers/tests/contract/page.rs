//! The example of docs/adding-a-carrier.md is this code, and it works.

mod uds_v1;

use carriers::{Class, Health, SignalError};

use super::support::process::{Process, Variables, new_instance, unique};
use super::support::wait::{SOON, eventually};

#[test]
fn the_page_shows_the_code_that_is_tested_here() {
    let page = include_str!("../../../docs/adding-a-carrier.md");
    let code = include_str!("page/uds_v1.rs").replace("use carriers::", "use crate::");
    let shown = page.split("```rust\n").filter_map(|block| block.split("```").next());
    assert!(
        shown.into_iter().any(|block| block == code),
        "copy carriers/tests/contract/page/uds_v1.rs into the page"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_carrier_of_the_page_carries() {
    let place = |name: &str| {
        std::env::temp_dir()
            .join(format!("{}-{name}", new_instance()))
            .display()
            .to_string()
    };
    let (left, right) = (place("left"), place("right"));
    let variables = |own: &str, peer: &str| Variables::from([("UDS_PATH", own.into()), ("UDS_PEER", peer.into())]);
    let mut one = Process::start(&uds_v1::DESCRIPTOR, &variables(&left, &right));
    one.stands(Health::Up, SOON).await;
    let lost = one.send(Class::Topic, &[unique(Class::Topic)]).await;
    assert!(matches!(lost, Err(SignalError::Lost(_))), "the peer is away: {lost:?}");
    let mut two = Process::start(&uds_v1::DESCRIPTOR, &variables(&right, &left));
    two.stands(Health::Up, SOON).await;
    let sent: Vec<_> = (0..20).map(|_| unique(Class::Topic)).collect();
    one.send(Class::Topic, &sent).await.expect("the peer is there");
    eventually("all arrive", SOON, async || two.signals() == sent).await;
    one.stop().await;
    assert_eq!(one.send(Class::Topic, &sent).await, Err(SignalError::NotConnected));
    two.stop().await;
    std::fs::remove_file(left).ok();
    std::fs::remove_file(right).ok();
}
