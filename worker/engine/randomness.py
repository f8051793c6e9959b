"""Random numbers keyed by (seed, choice, position): never by batch, by step or by process.

A stream that moves to another worker, or that is recomputed after preemption, draws the same tokens.
"""

MASK = 2**64 - 1


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA'14)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for the token at `position` of a choice."""
    x = _mix((seed + 0x9E3779B97F4A7C15) & MASK)
    x = _mix((x + choice * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & MASK)
    x = _mix((x + position * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & MASK)
    return (x >> 11) * 2.0**-53
