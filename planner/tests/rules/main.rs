//! The rules of the planner, from outside: vectors that other planners of the network share, properties, and files.

mod cards;
mod decisions;
mod offers;
mod properties;
mod simulation;
mod usage;
mod vectors;
