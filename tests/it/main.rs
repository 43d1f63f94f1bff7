//! Integration tests: the real binary against a real PostgreSQL, a real issuer and real webhook receivers.
//!
//! Every test makes what it uses with `support`, or shares a running service in which it keeps to rows of its own, so
//! all of them run at once. The PostgreSQL server comes from `OV_TEST_PG_URL`; without it a test fails and says how to
//! start one.

mod api_authority;
mod api_deliveries;
mod api_documents;
mod api_edge;
mod api_hostile;
mod api_limits;
mod api_policies;
mod api_process;
mod api_publish;
mod api_read;
mod api_refusals;
mod api_subscriptions;
mod api_world;
mod contracts;
mod delivery_company;
mod delivery_life;
mod delivery_processes;
mod delivery_worker;
mod dev;
mod dev_live;
mod docs;
mod fabric;
mod fabric_cloud;
mod fabric_jetstream;
mod fabric_nats;
mod fabric_switches;
mod fabric_valkey;
mod fabric_world;
mod faults_database;
mod faults_hangups;
mod faults_pooler;
mod faults_schema;
mod faults_storm;
mod first_event;
mod harness_self;
mod outbound_tls;
mod simulate;
mod store_claims;
mod store_counter;
mod store_fixture;
mod store_heads;
mod store_indexes;
mod store_leases;
mod store_migrate;
mod store_plans;
mod store_pooler;
mod store_publish;
mod store_pulls;
mod store_replay;
mod store_seal;
mod store_skip;
mod store_snapshot;
mod store_versions;
mod support;
