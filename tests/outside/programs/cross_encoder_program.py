"""Rerankers as `sentence-transformers` writes and computes them: of a causal model, and with a head for labels.

Arguments: the folders of both checkpoints, and a folder for what is written.
"""

import json
import sys
from pathlib import Path

import torch
from cases import run
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore

CAUSAL, CLASSIFIER, WRITTEN = map(Path, sys.argv[1:4])
QUERY, DOCUMENTS = json.loads(sys.argv[4])
PAIRS = [(QUERY, document) for document in DOCUMENTS]
FLOAT32 = {"dtype": torch.float32}


def scores(model, name):
    model.eval()
    model.save_pretrained(str(WRITTEN / name))
    plain = model.predict(PAIRS, activation_fn=torch.nn.Identity())
    return {"scores": [float(one) for one in model.predict(PAIRS)], "logits": [float(one) for one in plain]}


def causal(_):
    body = Transformer(str(CAUSAL), transformer_task="text-generation", model_kwargs=FLOAT32)
    head = LogitScore(true_token_id=body.tokenizer.encode("y")[0], false_token_id=body.tokenizer.encode("n")[0])
    return scores(CrossEncoder(modules=[body, head], device="cpu"), "causal")


def classifier(_):
    return scores(CrossEncoder(str(CLASSIFIER), device="cpu", model_kwargs=FLOAT32, num_labels=1), "classifier")


run(causal, classifier)
