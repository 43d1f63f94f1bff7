#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| openvibe_events_fuzz::cursor(data));
