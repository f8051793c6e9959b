"""One model replica: takes requests off the queue, runs them through the paged engine, commits every step."""
