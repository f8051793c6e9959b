"""Images of calls: their limits, and the checks that they have a picture."""
