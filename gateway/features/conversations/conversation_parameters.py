"""The bodies and the answers of /v1/conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.gateway.api.labels import LABELS
from quire.gateway.api.parameters import OF_THE_CALL, Body
from quire.gateway.api.responses.items import Item, read_items
from quire.gateway.errors.api_errors import invalid, refused
from quire.shared.config.schema_parts import ANY_OBJECT, COUNT, FLAG, TEXT, Schema, array, id_parameter, record
from quire.shared.protocol.sampling_params import Parameter

CONVERSATION = "conv_"
# Items of one call that adds items, as in the OpenAI API.
MAX_ADDED = 20


def _items(name: str, value: Any) -> list[Item]:
    """Read items that are added to a conversation. Raises InvalidRequest."""
    if type(value) is not list or len(value) > MAX_ADDED:
        raise invalid(name, f"an array of at most {MAX_ADDED} items", value)
    skipped: list[tuple[str, str]] = []
    items = read_items(name, value, skipped)
    if skipped:
        at, reason = skipped[0]
        raise refused(f"{at}.type", f"{at} cannot be kept: {reason}.", code="unsupported_parameter")
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            at = f"{name}[{index}].type"
            raise refused(at, f"{at} is item_reference, which only the input of a response may have.")
    return items


_ITEMS = Parameter(
    read=_items,
    schema=array(ANY_OBJECT, high=MAX_ADDED),
    kind=f"array of at most {MAX_ADDED} items",
    default=(),
    help="[items](#items) of the conversation, without `item_reference`",
)
_METADATA = replace(LABELS["metadata"], help="stored with the conversation, and returned with it")
CREATE = {
    "items": _ITEMS,
    "metadata": _METADATA,
    "model": replace(
        OF_THE_CALL["model"],
        required=False,
        help="the model whose responses may continue the conversation; needed only if the server has several",
    ),
}
UPDATE = {"metadata": replace(_METADATA, required=True)}
ADD = {"items": replace(_ITEMS, required=True)}
# By their names in /openapi.json.
BODIES = {
    "ConversationRequest": Body(CREATE),
    "ConversationUpdate": Body(UPDATE),
    "ConversationItemsRequest": Body(ADD),
}
ANSWERS: dict[str, Schema] = {
    "Conversation": record(
        id=TEXT,
        object={"const": "conversation"},
        created_at=COUNT,
        metadata={"type": "object", "additionalProperties": TEXT},
    ),
    "ConversationDeletion": record(id=TEXT, object={"const": "conversation.deleted"}, deleted=FLAG),
    "ConversationItem": record(id=TEXT, type=TEXT),
}
PARAMETERS: Schema = {
    "ConversationId": id_parameter(CONVERSATION),
    "ItemId": {**id_parameter(""), "name": "item_id"},
}
