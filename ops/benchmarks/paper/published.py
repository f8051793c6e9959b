"""Values that the paper reports (Kwon et al., SOSP'23, arXiv 2309.06180), for comparison with ours."""

from __future__ import annotations

# Figure 2: share of the KV cache's memory that holds token states, percent.
EFFECTIVE_USE = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "Quire": 96.3}

# Figure 13: mean number of batched requests, OPT-13B on an A100-40GB; the request rates are in the captions.
BATCHED = {
    "ShareGPT": {"Orca (Max)": 7.00, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "Quire": 30.42},
    "Alpaca": {"Orca (Max)": 7.00, "Orca (Pow2)": 43.24, "Orca (Oracle)": 72.75, "Quire": 132.44},
}
BATCHED_RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}

# Figure 15 and section 6.3: blocks saved by sharing, percent, by number of sequences. For ShareGPT the text gives the
# range from 2 to 6 sequences only.
SAVED: dict[str, dict[str, dict[int, float | None]]] = {
    "Alpaca": {
        "parallel sampling": {2: 6.09, 4: 8.53, 6: 9.79},
        "beam search": {2: 37.56, 4: 53.13, 6: 55.16},
    },
    "ShareGPT": {
        "parallel sampling": {2: 16.2, 4: None, 6: 30.5},
        "beam search": {2: 44.3, 4: None, 6: 66.3},
    },
}

# Sustained request rate over that of a baseline: (least, most).
RATE_RATIOS = {
    # Section 6.2, ShareGPT over three models.
    "Orca (Oracle)": (1.7, 2.7),
    "Orca (Max)": (2.7, 8.0),
    "FasterTransformer": (None, 22.0),
}
# Section 6.3, OPT-13B on Alpaca, over Orca (Oracle): from basic sampling to six beams.
BASIC_ALPACA_OVER_ORACLE, SIX_BEAMS_OVER_ORACLE = 1.3, 2.3
# Section 6.4, over Orca (Oracle), by tokens of the shared prefix.
SHARED_PREFIX_OVER_ORACLE = {80: 1.67, 341: 3.58}
# Section 6.5, over every Orca.
CHATBOT_OVER_ORCA = 2.0

# Section 7.2: block sizes that did best.
BEST_BLOCK_SIZES = {"ShareGPT": (16, 128), "Alpaca": (16, 32)}
