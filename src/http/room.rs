//! How much memory the bodies of all requests together may take while they are read.
//!
//! Each body has its own limit, and so has the number of connections, but their product is far more than a machine
//! has. A body takes room as its bytes come, so that only who sends can use the room up, and gives it back once it
//! has been read into a request. When there is none left, it is refused: to let it wait would keep what it holds.

use tokio::sync::{Semaphore, SemaphorePermit};

use super::problem::Problem;

/// Bytes of bodies that may be held at a time.
const MAX_HELD_BYTES: usize = 256 * 1024 * 1024;

/// The room for bodies, in bytes.
pub(super) struct BodyRoom(Semaphore);

/// What one body has of it.
pub(super) struct Held<'r> {
    room: &'r Semaphore,
    permit: Option<SemaphorePermit<'r>>,
}

impl BodyRoom {
    /// Room for [`MAX_HELD_BYTES`], or for one body where that is more.
    pub(super) fn new(max_body_bytes: usize) -> Self {
        Self::of(MAX_HELD_BYTES.max(max_body_bytes))
    }

    /// Room for so many bytes.
    pub(super) fn of(bytes: usize) -> Self {
        Self(Semaphore::new(bytes.min(Semaphore::MAX_PERMITS)))
    }

    /// Begins a body, which holds nothing yet.
    pub(super) const fn begin(&self) -> Held<'_> {
        Held { room: &self.0, permit: None }
    }
}

impl Held<'_> {
    /// Takes room for further bytes of the body.
    pub(super) fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        // A piece is what one read of a connection gave, far less than 4 GiB.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let more = self.room.try_acquire_many(bytes).map_err(|_| Problem::bodies_overload())?;
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            None => self.permit = Some(more),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::problem::ProblemCode;
    use super::*;

    #[test]
    fn bodies_share_the_room_and_give_it_back() {
        let room = BodyRoom::of(100);
        let (mut one, mut two) = (room.begin(), room.begin());
        one.grow(40).unwrap();
        two.grow(40).unwrap();
        one.grow(20).unwrap();
        assert_eq!(two.grow(1).unwrap_err().code(), ProblemCode::Overloaded);
        two.grow(0).unwrap();
        drop(one);
        two.grow(60).unwrap();
        drop(two);
        room.begin().grow(100).unwrap();
    }

    #[test]
    fn the_largest_body_always_fits_an_idle_server() {
        for max_body_bytes in [1, 4 * 1024 * 1024, 300 * 1024 * 1024] {
            let room = BodyRoom::new(max_body_bytes);
            room.begin().grow(max_body_bytes).unwrap();
            assert_eq!(room.0.available_permits(), MAX_HELD_BYTES.max(max_body_bytes));
        }
        assert_eq!(BodyRoom::new(usize::MAX).0.available_permits(), Semaphore::MAX_PERMITS);
    }
}
