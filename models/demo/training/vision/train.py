"""Trains the demonstration model that sees, and writes a checkpoint as Transformers publishes LLaVA models.

Drawings and questions are made during the run, and nothing is downloaded. The seed decides everything except the
rounding of the machine. A step takes half a second to a second on one CPU core; 3,400 steps made the checkpoint.

    python -m models.demo.training.vision.train --out models/demo-vision
    python -m models.demo.training.vision.train --out trial --steps 100                  # a short trial
    python -m models.demo.training.vision.train --out models/demo-vision --resume models/demo-vision --seed 2

The vision tower learns from a second loss too: a linear layer, which is not saved, tells from each patch whether the
centre of a shape or digit is in it, and its colour. So the tower learns to see long before the decoder asks it to.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from models.demo.training.corpus import IGNORED, Encoded, collate
from models.demo.training.train import rate_at
from models.demo.training.vision.dialogues import INSTRUCTIONS, TALK, WHAT, PictureTurn, dialogue, talk
from models.demo.training.vision.drawings import COLOURS, EDGE, SIGNS, Drawing, draw, pixels
from models.demo.training.vocabulary import BEGIN, END, PAD, train_tokenizer
from tokenizers import Tokenizer
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

IMAGE = "<image>"
PATCH = 12
PATCHES = (EDGE // PATCH) ** 2
VOCABULARY = 512
TOKENIZER_DIALOGUES = 4000
POSITIONS = 2048
BATCH = 32  # conversations in a step
TOWER_SHARE = 0.42  # of the first run
HEAD = 32  # width of an attention head
# Rows down and columns right of the patch to which each head of a layer of the tower attends at first.
NEIGHBOURS = (((-1, 0), (1, 0), (0, -1), (0, 1)), ((-1, -1), (1, 1), (1, -1), (-1, 1)))
MOST_SIDE, LEAST_SIDE = 2 * EDGE, EDGE
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set role = message['role'] if message['role'] in ['system', "
    "'user', 'assistant'] else 'user' %}{{ '<|' + role + '|>' }}{% if message['content'] is string %}{{ "
    "message['content'] | trim }}{% elif message['content'] %}{% for part in message['content'] %}{% if "
    "part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% for part in message['content'] %}{% if "
    "part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def model_config(tokenizer: Tokenizer) -> LlavaConfig:
    ends = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    ids = {name: tokenizer.token_to_id(token) for name, token in ends.items()}
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": EDGE,
        "patch_size": PATCH,
        "vision_use_head": False,
    }
    text = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **ids,
    }
    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=tokenizer.token_to_id(IMAGE),
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        **ids,
    )


class Sample(NamedTuple):
    """A conversation as tokens, and its pictures in order."""

    encoded: Encoded
    drawings: list[Drawing]


def encode(turns: list[PictureTurn], tokenizer: Tokenizer, instruction: str = "") -> Encoded:
    """Encode a conversation in the format of the chat template."""
    end = tokenizer.token_to_id(END)
    image = [tokenizer.token_to_id(IMAGE)] * PATCHES

    def message(role: str, text: str, pictures: int = 0) -> list[int]:
        said = tokenizer.encode(text, add_special_tokens=False).ids
        return [tokenizer.token_to_id(f"<|{role}|>"), *image * pictures, *said, end]

    ids = [tokenizer.token_to_id(BEGIN), *(message("system", instruction) if instruction else [])]
    labels = [IGNORED] * len(ids)
    for turn in turns:
        asked, answered = message("user", turn.said, len(turn.pictures)), message("assistant", turn.answer)
        ids += asked + answered
        labels += [IGNORED] * (len(asked) + 1) + answered[1:]
    return Encoded(ids, labels)


def samples(seed: int | str, tokenizer: Tokenizer) -> Iterator[Sample]:
    """Yield an endless stream of conversations: about one picture, two, or none; BATCH alike ones after another."""
    rng, made = Random(f"vision-{seed}"), 0
    while True:
        if made % BATCH == 0:
            several = rng.random() < 0.1
        made += 1
        count = 2 if several else 0 if rng.random() < 0.04 else 1
        drawings = [draw(rng, rng.randint(LEAST_SIDE, MOST_SIDE)) for _ in range(count)]
        turns = dialogue(rng, drawings, rng.choice((2, 3)) if count == 1 else 2) if drawings else [talk(rng)]
        instruction = rng.choice(INSTRUCTIONS) if rng.random() < 0.1 else ""
        yield Sample(encode(turns, tokenizer, instruction), [p for turn in turns for p in turn.pictures])


class PatchLabels(NamedTuple):
    """What is in each patch. signs: 0 is nothing. colours: IGNORED without a sign."""

    signs: torch.Tensor  # [images, PATCHES] int64
    colours: torch.Tensor


def patch_labels(drawings: list[Drawing]) -> tuple[PatchLabels, PatchLabels]:
    """Return the marks that have their centre in each patch, and the marks that cover the centre of each patch."""
    side = EDGE // PATCH
    found = []
    for reach in (0.0, 1.0):
        signs = torch.zeros(len(drawings), side, side, dtype=torch.int64)
        colours = torch.full_like(signs, IGNORED)
        for at, drawing in enumerate(drawings):
            for mark in drawing.marks:
                centre = int(mark.y * side), int(mark.x * side)
                radius = reach * mark.radius * side
                covered = [
                    (row, column)
                    for row in range(side)
                    for column in range(side)
                    if math.hypot(row + 0.5 - mark.y * side, column + 0.5 - mark.x * side) < radius
                ]
                for row, column in [*covered, centre]:
                    signs[at, row, column] = 1 + SIGNS.index(mark.sign)
                    colours[at, row, column] = COLOURS.index(mark.colour)
        found.append(PatchLabels(signs.flatten(1), colours.flatten(1)))
    return found[0], found[1]


class Teacher(nn.Module):
    """The second loss of the vision tower, from the hidden states of its patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, 1 + len(SIGNS) + len(COLOURS)) for _ in range(2))

    def forward(self, hidden: torch.Tensor, labels: tuple[PatchLabels, PatchLabels]) -> torch.Tensor:
        """hidden: [images, PATCHES, width]. Return the loss of centres and of covered patches together."""
        total = torch.zeros(())
        for head, (signs, colours) in zip(self.heads, labels, strict=True):
            places, sign_logits, colour_logits = head(hidden).flatten(0, 1).split([1, len(SIGNS), len(COLOURS)], dim=1)
            is_there = signs.flatten() > 0
            place = F.binary_cross_entropy_with_logits(places[:, 0], is_there.float())
            sign = F.cross_entropy(sign_logits[is_there], signs.flatten()[is_there] - 1)
            colour = F.cross_entropy(colour_logits[is_there], colours.flatten()[is_there])
            total = total + 6 * place + sign + 0.5 * colour
        return total


def begin_local(model: LlavaForConditionalGeneration) -> None:
    """Give the tower first weights with which each head attends to one neighbour of a patch, as a convolution does.

    The first dimensions of a patch have waves of its place. The queries of a head are the waves of the neighbour. From
    random weights, the tower needs many times the drawings to find out which patches are next to each other.
    """
    tower, side, waves = model.model.vision_tower, EDGE // PATCH, torch.pi / torch.tensor([2.0, 3.0, 5.0, 8.0])
    width = 4 * len(waves)

    def place(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        parts = [wave for at in (row, column) for wave in ((at * waves).sin(), (at * waves).cos())]
        return torch.cat(parts)

    def turn(angle: torch.Tensor) -> torch.Tensor:
        """Return the matrix that takes the waves of a place to those of a place at this distance."""
        sine, cosine = angle.sin().diag(), angle.cos().diag()
        return torch.cat([torch.cat([cosine, sine], dim=1), torch.cat([-sine, cosine], dim=1)])

    with torch.no_grad():
        tower.embeddings.patch_embedding.weight[:width] = 0
        table = tower.embeddings.position_embedding.weight
        table.mul_(0.1)
        at = torch.arange(side).float()
        table[:, :width] = 2 * torch.stack([place(row, column) for row in at for column in at])
        for number, layer in enumerate(tower.encoder.layers):
            for head, (down, right) in enumerate(NEIGHBOURS[number % len(NEIGHBOURS)]):
                rows = slice(head * HEAD, head * HEAD + width)
                move = torch.block_diag(turn(down * waves), turn(right * waves))
                for weight, start in (
                    (layer.self_attn.q_proj.weight, move),
                    (layer.self_attn.k_proj.weight, torch.eye(width)),
                ):
                    weight[head * HEAD : (head + 1) * HEAD] *= 0.1
                    weight[rows] = 0
                    weight[rows, :width] = 2 * start


def optimizers(modules: list[nn.Module], rate: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon for the matrices of the layers, AdamW for all else."""
    matrices, others = [], []
    for module in modules:
        for name, parameter in module.named_parameters():
            is_matrix = parameter.ndim == 2 and ".layers." in name
            (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    model: LlavaForConditionalGeneration,
    stream: Iterator[Sample],
    pad: int,
    steps: int,
    limit_s: float,
    rate: float,
    alone: float,
) -> int:
    """Train for `steps` steps or `limit_s` seconds, whichever ends first, and return the number of steps.

    The learning rate follows the share of steps or of time, whichever is larger. In the first part of all, `alone`, the
    vision tower learns alone.
    """
    teacher = Teacher(model.config.vision_config.hidden_size)
    learners = optimizers([model, teacher], rate)
    image_token, started = model.config.image_token_index, time.monotonic()
    seen, told, step = 0.0, 0.0, 0
    while (done := max(step / steps, (time.monotonic() - started) / limit_s)) < 1:
        now = rate_at(step, done, rate)
        is_alone = done < alone
        for group in (group for learner in learners for group in learner.param_groups):
            group["lr"] = now
        rows = [next(stream) for _ in range(BATCH)]
        drawings = [drawing for row in rows for drawing in row.drawings]
        images = torch.stack([torch.from_numpy(pixels(drawing.image)) for drawing in drawings])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model.get_image_features(pixel_values=images, return_dict=True)
            loss = teacher(found.hidden_states[-1].float(), patch_labels(drawings))
            seen += loss.item()
            if not is_alone:
                batch = collate([row.encoded for row in rows], pad)
                embeds = model.get_input_embeddings()(batch.ids)
                features = torch.cat(found.pooler_output).to(embeds.dtype)
                embeds = embeds.masked_scatter((batch.ids == image_token)[..., None], features)
                hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]
                wanted = batch.labels[:, 1:] != IGNORED
                answers = F.cross_entropy(model.lm_head(hidden[wanted]).float(), batch.labels[:, 1:][wanted])
                told += answers.item()
                loss = 0.3 * loss + answers
        loss.backward()
        parameters = [p for learner in learners for group in learner.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        for learner in learners:
            learner.step()
            learner.zero_grad()
        step += 1
        if step % 25 == 0:
            print(
                f"step {step}/{steps} tower_loss={seen / 25:.4f} answer_loss={told / 25:.4f} lr={now:.2e} "
                f"elapsed_s={time.monotonic() - started:.0f}",
                flush=True,
            )
            seen = told = 0.0
    return step


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of the checkpoint, as `save_pretrained` of Transformers writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    ids = {f"{name}_id": tokenizer.token_to_id(token) for name, token in ends.items()}
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    white = [1.0, 1.0, 1.0]  # images are padded with their mean
    images = LlavaImageProcessorPil(
        size={"shortest_edge": EDGE}, do_center_crop=False, do_pad=True, image_mean=white, image_std=[0.5, 0.5, 0.5]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **ends,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": IMAGE},
    )
    LlavaProcessor(
        images, fast, patch_size=PATCH, vision_feature_select_strategy="full", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    # The most probable answer, for every sampler: there is one right answer.
    generation = {**ids, "do_sample": True, "top_k": 1, "max_new_tokens": 100}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def tokenizer_of(seed: int) -> Tokenizer:
    """Return a tokenizer trained on questions and answers."""
    rng = Random(f"vision-tokenizer-{seed}")
    spoken = [dialogue(rng, [draw(rng, EDGE)], 3) for _ in range(TOKENIZER_DIALOGUES)]
    words = [text for turns in spoken for turn in turns for text in (turn.said, turn.answer)]
    words += [*WHAT, *INSTRUCTIONS, *TALK, *(said for questions in TALK.values() for said in questions)] * 20
    return train_tokenizer(words, VOCABULARY, (IMAGE,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--seed", type=int, default=1, help="of drawings, questions and first weights (default: 1)")
    parser.add_argument("--steps", type=int, default=3000, help=f"of {BATCH} conversations (default: 3000)")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="finish in this time, with fewer steps if need be"
    )
    parser.add_argument(
        "--resume", type=Path, help="continue from this checkpoint; give another --seed for other drawings"
    )
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate (default: 0.004)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves it to torch (default: 0)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        model = LlavaForConditionalGeneration.from_pretrained(args.resume, dtype=torch.float32)
        before = json.loads((args.resume / "training.json").read_text())["runs"]
    else:
        tokenizer = tokenizer_of(args.seed)
        model = LlavaForConditionalGeneration(model_config(tokenizer))
        begin_local(model)
        before = []
    model.set_attn_implementation("eager")  # faster for sequences as short as these
    parameters = sum(p.numel() for p in model.parameters())
    print(f"parameters={parameters} vocabulary={tokenizer.get_vocab_size()} seed={args.seed}", flush=True)
    stream, alone = samples(args.seed, tokenizer), 0.0 if args.resume else TOWER_SHARE
    steps = train(model, stream, tokenizer.token_to_id(PAD), args.steps, args.minutes * 60, args.rate, alone)
    save(model, tokenizer, args.out)
    run = {
        "seed": args.seed,
        "steps": steps,
        "peak_learning_rate": args.rate,
        "seconds": round(time.monotonic() - started),
    }
    log = {
        "parameters": parameters,
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
