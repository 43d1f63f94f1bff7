//! Keys and tokens for the tests of this room.
