"""The commands with which operators look at what runs: `quire ps`, `stop`, `trace`, `top` and `doctor`."""
