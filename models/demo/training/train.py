"""Trains the demonstration model and writes a checkpoint that any Llama implementation can load.

The corpus is generated during the run, and nothing is downloaded. The seed decides everything except the rounding of
the machine, so a second run gives an equivalent model. A run takes about twenty minutes on two free CPU cores.

    python -m models.demo.training.train --out models/demo
    python -m models.demo.training.train --out trial --steps 100                    # a short trial
    OMP_WAIT_POLICY=passive python -m models.demo.training.train --out models/demo --minutes 21 --threads 2

OMP_WAIT_POLICY=passive triples the speed when other processes share the cores: threads that wait for each other then
sleep instead of spinning.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from models.demo.training.corpus import IGNORED, TrainingBatch, batches, encoded_stream
from models.demo.training.grammar import documents
from models.demo.training.vocabulary import BEGIN, END, PAD, VOCABULARY_SIZE, save_tokenizer, train_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

TOKENIZER_DOCUMENTS = 12_000
HELD_OUT_DOCUMENTS = 400
MICRO_BATCHES_PER_STEP = 2  # each step has rows of two different lengths
WARMUP_STEPS = 40
MAX_POSITIONS = 1024
CONFIG_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("hidden_act", "attention_bias", "mlp_bias", "attention_dropout", "initializer_range", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BEGIN),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        architectures=["LlamaForCausalLM"],
    )


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def loss_of(model: LlamaForCausalLM, batch: TrainingBatch, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the summed negative log-likelihood in nats over the targets of a batch, and their number."""
    ids, labels = batch.ids.to(device), batch.labels[:, 1:].to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]  # [B, T - 1, H]
        wanted = labels != IGNORED
        logits = model.lm_head(hidden[wanted])  # [targets, V]: logits only at positions with a target
    return F.cross_entropy(logits.float(), labels[wanted], reduction="sum"), int(wanted.sum())


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: bool, device: torch.device) -> float:
    """Return the perplexity on documents that training never saw.

    held_out: use documents with nouns and requests that training never saw, too.
    """
    model.eval()
    rows = islice(encoded_stream("perplexity", tokenizer, held_out), HELD_OUT_DOCUMENTS)
    total, count = 0.0, 0
    for batch in batches(rows, tokenizer, 0):
        loss, targets = loss_of(model, batch, device)
        total, count = total + loss.item(), count + targets
    model.train()
    return math.exp(total / count)


def rate_at(step: int, done: float, peak: float) -> float:
    """Return the learning rate: a linear warm-up, then a cosine down to a hundredth of `peak`.

    done: the finished share of the run, 0 to 1.
    """
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


class TrainingProgress(NamedTuple):
    """The length of a training run."""

    steps: int
    tokens: int  # padding included


def train(
    model: LlamaForCausalLM,
    stream: Iterator[TrainingBatch],
    steps: int,
    limit_s: float,
    rate: float,
    device: torch.device,
) -> TrainingProgress:
    """Train for `steps` steps or `limit_s` seconds, whichever ends first.

    The learning rate follows the share of steps or of time, whichever is larger.
    """
    learners = optimizers(model, rate)
    started, tokens, step = time.monotonic(), 0, 0
    while (done := max(step / steps, (time.monotonic() - started) / limit_s)) < 1:
        now = rate_at(step, done, rate)
        for group in (group for learner in learners for group in learner.param_groups):
            group["lr"] = now
        total, count = 0.0, 0
        for batch in islice(stream, MICRO_BATCHES_PER_STEP):
            loss, targets = loss_of(model, batch, device)
            (loss / batch.ids.numel()).backward()
            total, count, tokens = total + loss.item(), count + targets, tokens + batch.ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for learner in learners:
            learner.step()
            learner.zero_grad()
        step += 1
        if step % 25 == 0 or step == steps:
            seconds = time.monotonic() - started
            left = min(seconds / step * (steps - step), limit_s - seconds)
            print(
                f"step {step}/{steps} loss={total / count:.3f} lr={now:.2e} tokens={tokens} "
                f"tokens_per_s={tokens / seconds:.0f} "
                f"elapsed_s={seconds:.0f} left_s={left:.0f}",
                flush=True,
            )
    return TrainingProgress(step, tokens)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of the checkpoint. The output projection is tied to the embedding and not stored."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    described = model.config.to_dict()
    config = {key: described[key] for key in CONFIG_KEYS}
    # Older programs read these two under other names.
    config |= {"rope_theta": described["rope_parameters"]["rope_theta"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "bos_token_id": model.config.bos_token_id,
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": model.config.pad_token_id,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "max_new_tokens": 320,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, MAX_POSITIONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1, help="of corpus, order and first weights (default: 1)")
    parser.add_argument("--steps", type=int, default=2000, help="optimiser steps of about 6,000 tokens (default: 2000)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="finish in this time, with fewer steps if need be"
    )
    parser.add_argument(
        "--resume", type=Path, help="continue from this checkpoint; give another --seed for other documents"
    )
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate (default: 0.004)")
    parser.add_argument(
        "--tools", type=float, default=0.5, help="share of documents that are dialogues with tools (default: 0.5)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch (default: 0)")
    args = parser.parse_args()
    started = time.monotonic()
    name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32).to(device)
        model.config.architectures = ["LlamaForCausalLM"]
        before = json.loads((args.resume / "training.json").read_text())["runs"]
    else:
        documented = islice(documents(f"tokenizer-{args.seed}"), TOKENIZER_DOCUMENTS)
        tokenizer = train_tokenizer(text for document in documented for _, text in document)
        model = LlamaForCausalLM(model_config(tokenizer)).to(device)
        before = []
    parameters = sum(p.numel() for p in model.parameters())
    print(
        (f"parameters={parameters} vocabulary={tokenizer.get_vocab_size()} device={device} seed={args.seed}"),
        flush=True,
    )
    stream = batches(encoded_stream(args.seed, tokenizer, tool_share=args.tools), tokenizer, args.seed)
    progress = train(model, stream, args.steps, args.minutes * 60, args.rate, device)
    save(model, tokenizer, args.out)

    served = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(device)
    run = {
        "seed": args.seed,
        "steps": progress.steps,
        "peak_learning_rate": args.rate,
        "tool_share": args.tools,
        "tokens": progress.tokens,
        "seconds": round(time.monotonic() - started),
        "device": device.type,
    }
    log = {
        "parameters": parameters,
        "perplexity_fresh": round(perplexity(served, tokenizer, False, device), 4),
        "perplexity_held_out": round(perplexity(served, tokenizer, True, device), 4),
        "runs": [*before, run],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (args.out / "training.json").write_text(json.dumps(log, indent=2) + "\n")
    print(json.dumps(log))


if __name__ == "__main__":
    main()
