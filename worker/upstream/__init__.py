"""A worker that answers with servers of other engines. `runtime.py` is the door."""
