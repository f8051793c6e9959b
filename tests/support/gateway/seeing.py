"""A model with images for gateways: all files of a LLaVA except its weights."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.support.gateway.running import MODEL, write_model
from tests.support.tokenizers import byte_level

IMAGE = "<image>"
# The text model's own words around the parts of a message.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Image tokens of every picture: 4 x 4 patches.
TOKENS = 16


def write_seeing_model(folder: Path) -> Path:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens([AddedToken(IMAGE, special=True)])
    write_model(folder, tokenizer, chat_template=TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "llava",
        "image_token_index": tokenizer.token_to_id(IMAGE),
        "vision_config": {"image_size": 56},
    }
    (folder / "config.json").write_text(json.dumps(config))
    square = {"height": 56, "width": 56}
    images = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}, "crop_size": square}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "LlavaProcessor", "patch_size": 14}))
    return folder


def data_url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def chat_part(url: str, **keys: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **keys}}


def response_part(**keys: str) -> dict[str, Any]:
    return {"type": "input_image", **keys}


def message_part(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


# The path and the body of a call with these parts, by API.
def chat(*parts: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, **more}


def response(*parts: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    items = [{"role": "user", "content": [*parts, {"type": "input_text", "text": "What?"}]}]
    return "/v1/responses", {"model": MODEL, "input": items, **more}


def message(*parts: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
    return "/v1/messages", {"model": MODEL, "messages": messages, "max_tokens": 9, **more}
