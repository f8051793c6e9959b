"""Rotary position embedding (RoFormer, arXiv 2104.09864): frequencies and their scaling, as in Transformers.

The order of the float32 operations is that of `transformers.modeling_rope_utils`, so that cos and sin are equal bit for
bit: a difference in the last bit of a frequency grows with the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.shared.model.fields import Fields

SUPPORTED = "default, linear, llama3"
DEFAULT_THETA = 10_000.0
ORIGINAL = "original_max_position_embeddings"
# Fields of the type yarn. M-RoPE gives a token of text one position, so that its sections have no effect.
YARN_FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
    *("partial_rotary_factor", "finetuned"),
)


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of RoPE. Most fields after `factor` are those of the type llama3."""

    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    # The next four are for the type yarn. attention_factor multiplies cos and sin. Dimensions with beta_slow to
    # beta_fast rotations within the original context are interpolated; truncate widens their range to integers.
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rotated: float = 1.0  # share of the pairs of dimensions that are rotated, of the type proportional
    divisors: tuple[float, ...] = ()  # of the frequencies, one for each pair of dimensions; none in config.json

    def longest_context(self, max_position_embeddings: int) -> int:
        """Return the longest context in tokens. Model cards add YaRN without changing max_position_embeddings."""
        if self.rope_type != "yarn":
            return max_position_embeddings
        return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))


def parse_rope(
    fields: Fields,
    max_position_embeddings: int,
    default_theta: float | None = None,
    yarn: bool = True,
    proportional: bool = False,
) -> RopeConfig:
    """Read `rope_parameters` with theta inside (Transformers 5), or `rope_theta` and `rope_scaling`.

    default_theta: of the family; None: DEFAULT_THETA. yarn, proportional: these layers may have this type.

    Raises CheckpointError for an unsupported type, and for a missing field of the type.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.section(name)
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    rope_type = rope.get(key, "default")
    if key == "type" and any(isinstance(rope.get(layer), dict) for layer in ("full_attention", "sliding_attention")):
        raise fields.fault(name, "one set of RoPE parameters for all layers")
    is_proportional = proportional and rope_type == "proportional"
    for owner in (fields, rope) if not is_proportional else (fields,):
        if owner.get("partial_rotary_factor", 1.0) != 1.0:
            raise owner.fault("partial_rotary_factor", "1.0 (all of head_dim is rotated)")
    theta = (
        rope.number("rope_theta")
        if rope.get("rope_theta")
        else fields.number("rope_theta", default_theta or DEFAULT_THETA)
    )
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, rope.number("factor"))
    if is_proportional:
        rotated = rope.number("partial_rotary_factor", 1.0)
        if rotated > 1:
            raise rope.fault("partial_rotary_factor", "a number above 0, at most 1")
        return RopeConfig("proportional", theta, rope.number("factor", 1.0), rotated=rotated)
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=fields.integer(ORIGINAL, rope.integer(ORIGINAL, max_position_embeddings)),
        )
    if rope_type == "yarn" and yarn:
        original = fields.integer(ORIGINAL, rope.integer(ORIGINAL, max_position_embeddings))
        return _parse_yarn(rope, theta, original)
    supported = f"{SUPPORTED}, yarn" if yarn else f"{SUPPORTED}, proportional" if proportional else SUPPORTED
    raise rope.unsupported(key, supported) if isinstance(rope_type, str) else rope.fault(key, supported)


def _parse_yarn(rope: Fields, theta: float, original: int) -> RopeConfig:
    for name in rope.names():  # such as mscale, and the scale of queries by position
        if name not in YARN_FIELDS and rope.get(name) is not None:
            raise rope.unsupported(name, "no such field")
    if rope.get("factor") is None:  # Transformers derives it
        raise rope.unsupported("factor", "a number")
    factor = rope.number("factor")
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.divisors:  # of a GGUF file
        inv_freq = inv_freq / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.rope_type == "proportional":  # Gemma 4: the last pairs are not rotated
        num_rotated = int(rope.rotated * head_dim // 2)
        return torch.where(torch.arange(head_dim // 2) < num_rotated, inv_freq, 0.0) / rope.factor
    if rope.rope_type == "linear":  # positions are squeezed by the factor (arXiv 2306.15595)
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    if rope.rope_type == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate those between (Llama 3.1)."""
    original = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    is_long, is_short = wavelength > original / low, wavelength < original / high
    scaled = torch.where(is_long, inv_freq / rope.factor, inv_freq)
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * scaled / rope.factor + share * scaled
    return torch.where(~is_long & ~is_short, between, scaled)


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Keep dimensions with many rotations, and divide those with few by the factor (YaRN, arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        """Return the dimension with this number of rotations within the original context."""
        length = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return 1.0 / (rope.factor * powers) * (1 - kept) + inv_freq * kept


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return the table of rotations, float32 [num_positions, head_dim]: each row has the cosines, then the sines."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)  # [P, D / 2]
    return torch.cat((angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor), dim=-1)
