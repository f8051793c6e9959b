"""Averages the weights of checkpoints. The mean of two runs with one ancestor is often steadier than either run.

python -m models.demo.training.average --out models/demo run5=0.8 run3=0.2

The other files of the checkpoint are those of the first run.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
OTHERS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json")


def average(shares: dict[Path, float], out: Path) -> None:
    """Write the weighted mean of checkpoints to a folder. Raise ValueError unless the shares add up to 1."""
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"the shares add up to {sum(shares.values())}, not to 1")
    total: dict[str, torch.Tensor] = {}
    for folder, share in shares.items():
        for name, weight in load_file(folder / WEIGHTS).items():
            total[name] = total.get(name, torch.zeros(weight.shape)) + share * weight.float()
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.bfloat16() for name, tensor in total.items()}, out / WEIGHTS, metadata={"format": "pt"})
    for name in OTHERS:
        shutil.copy(next(iter(shares)) / name, out / name)
    log = json.loads((out / "training.json").read_text())
    log["average"] = [
        {"share": share, "runs": json.loads((folder / "training.json").read_text())["runs"]}
        for folder, share in shares.items()
    ]
    (out / "training.json").write_text(json.dumps(log, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("runs", nargs="+", metavar="FOLDER=SHARE", help="a checkpoint and its share of the mean")
    args = parser.parse_args()
    pairs = [run.rpartition("=") for run in args.runs]
    average({Path(folder): float(share) for folder, _, share in pairs}, args.out)


if __name__ == "__main__":
    main()
