"""`make soak`: mixed load on a whole stack whose processes are killed all the time."""
