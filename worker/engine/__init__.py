"""The engine of the PagedAttention paper. `engine.py` is the way in; sequence, blocks and scheduler import no torch."""
