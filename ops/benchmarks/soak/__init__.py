"""`make soak`: mixed load on a whole stack while its processes are killed at random."""
