//! Who may be chosen at all. The first test that fails gives the reason, so their order is part of the answer.

use crate::Text;
use crate::number::{fixed, text};
use crate::offer::{Offer, Status, Trust};
use crate::requirements::Requirements;

/// Why an offer may not be chosen, its cost aside; `None` when it may.
pub(crate) fn excluded(wanted: &Requirements, trust: &[Trust], offer: &Offer, latency: Option<f64>) -> Option<Text> {
    lacking(wanted, offer)
        .or_else(|| untrusted(trust, offer))
        .or_else(|| elsewhere(wanted, offer))
        .or_else(|| unhealthy(offer))
        .or_else(|| slow(wanted, latency))
        .or_else(|| full(wanted, offer))
}

/// Why what it costs excludes an offer.
pub(crate) fn dear(wanted: &Requirements, cost: f64) -> Option<Text> {
    let most = wanted.max_cost_usd?;
    (cost > most).then(|| format!("estimated ${} over ${}", fixed(cost, 6), text(most)).into())
}

fn lacking(wanted: &Requirements, offer: &Offer) -> Option<Text> {
    let missing = wanted
        .capabilities
        .iter()
        .find(|wanted| !offer.capabilities.contains(wanted))?;
    Some(format!("lacks {missing}").into())
}

fn untrusted(allowed: &[Trust], offer: &Offer) -> Option<Text> {
    let allowed = if allowed.is_empty() { &Trust::ALL[..] } else { allowed };
    if offer.trust.is_some_and(|trust| allowed.contains(&trust)) {
        return None;
    }
    let names: Vec<&str> = allowed.iter().map(|trust| trust.as_str()).collect();
    Some(format!("workload requires {} trust", names.join(" or ")).into())
}

fn elsewhere(wanted: &Requirements, offer: &Offer) -> Option<Text> {
    let set = |place: &'_ Option<Text>| place.clone().filter(|place| !place.is_empty());
    if let Some(residency) = set(&wanted.residency)
        && residency != offer.region
        && !offer.regions.contains(&residency)
    {
        return Some(format!("outside {residency}").into());
    }
    let region = set(&wanted.region)?;
    (region != "nearest" && region != offer.region && offer.region != "global")
        .then(|| format!("not in {region}").into())
}

fn unhealthy(offer: &Offer) -> Option<Text> {
    match offer.status {
        Some(Status::Up | Status::Degraded) => None,
        Some(status) => Some(format!("health {}", status.as_str()).into()),
        None => Some(Text::Borrowed("health unknown")),
    }
}

fn slow(wanted: &Requirements, latency: Option<f64>) -> Option<Text> {
    let (ceiling, latency) = (wanted.max_latency_ms?, latency?);
    (latency > ceiling).then(|| format!("p95 {} ms over {} ms", text(latency), text(ceiling)).into())
}

fn full(wanted: &Requirements, offer: &Offer) -> Option<Text> {
    let (needs, has) = (wanted.resources, &offer.capacity);
    let short = |needs: f64, free: Option<f64>| free.filter(|free| needs != 0.0 && *free < needs);
    if let Some(free) = short(needs.cpu, has.available_cores) {
        return Some(format!("{} cores free, needs {}", text(free), text(needs.cpu)).into());
    }
    if let Some(free) = short(needs.memory_mb, has.available_memory_mb) {
        return Some(format!("{} MB free, needs {}", text(free), text(needs.memory_mb)).into());
    }
    if needs.gpu && has.gpu_type.is_none() {
        return Some(Text::Borrowed("no GPU"));
    }
    let kinds = wanted
        .capabilities
        .iter()
        .filter_map(|capability| capability.strip_prefix("worker:"));
    kinds
        .into_iter()
        .find(|kind| has.workers.iter().any(|(own, free)| own == kind && *free == 0))
        .map(|kind| format!("no free {kind} worker").into())
}
