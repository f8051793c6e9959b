"""The stateless HTTP front: validates, tokenizes, enqueues, and streams back what the workers emit."""
