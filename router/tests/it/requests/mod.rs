//! Requests and the workers that they are sent to.

mod pair_attempts;
mod pairing;
mod pd;
mod policies;
mod regular;
mod tokens;
