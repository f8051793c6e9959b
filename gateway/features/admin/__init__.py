"""What a gateway tells operators and clients about itself: metrics, probes, models, dead letters, and the admin API."""
