//! The ways a waiting delivery or stream is woken. A carrier can say "look at this row"; it knows nothing of the store.
